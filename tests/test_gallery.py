"""Galleries: which images are chosen, and that people see them as they are."""

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cmcl.data.dataset import IGNORE, Dataset
from cmcl.reproduction.gallery import disputed, write_gallery


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture).reshape(-1, *np.asarray(picture).shape[2:]).tolist()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4), st.integers(0, 2**31))
def test_disputed_by_brute_force(m, n, c, seed):
    probs = torch.rand(m, n, c, generator=torch.Generator().manual_seed(seed)).softmax(2)
    confidence, answer = probs.double().max(2)
    for i, value in enumerate(disputed(probs).tolist()):
        pairs = combinations(range(m), 2)
        expected = sum(
            float(confidence[a, i] * confidence[b, i]) for a, b in pairs if answer[a, i] != answer[b, i]
        )
        assert value == pytest.approx(expected)


def test_classification(tmp_path):
    logits = torch.zeros(2, 3, 2)  # (M, N, C); image 1 is the disputed one
    logits[0, :, 0] = 5
    logits[1, :, 0] = torch.tensor([5.0, -8.0, 5.0])
    pictures = torch.arange(3 * 3 * 4 * 4).reshape(3, 3, 4, 4).to(torch.uint8)
    test = Dataset(torch.rand(3, 3, 4, 4), torch.tensor([0, 1, 0]), ("cat", "dog"))
    write_gallery(tmp_path / "gallery", logits.softmax(2), test, pictures)
    content = json.loads((tmp_path / "gallery" / "gallery.json").read_text())
    assert (content["task"], content["classes"]) == ("classification", ["cat", "dog"])
    first = content["items"][0]
    assert (first["index"], first["target"]) == (1, 1)
    assert [member["answer"] for member in first["members"]] == [0, 1]
    sure = torch.tensor([5.0, 0.0]).softmax(0)[0].item()
    assert first["members"][0]["confidence"] == pytest.approx(sure, abs=1e-4)
    assert first["chosen"] == 1, "8 nats apart is surer than 5"
    raw = pictures[1].permute(1, 2, 0).reshape(-1, 3).tolist()
    assert pixels(tmp_path / "gallery" / first["image"]) == raw


def test_segmentation(tmp_path):
    truth = torch.zeros(2, 2, 2, dtype=torch.uint8)
    truth[1, 0, 0], truth[1, 0, 1] = 1, IGNORE
    logits = torch.zeros(2, 2, 2, 2, 2)  # (M, N, C, H, W)
    logits[0, :, 0] = 5  # member 0: all background
    logits[1, :, 1] = 2  # member 1: all foreground, less sure
    test = Dataset(torch.rand(2, 1, 2, 2), truth, ("background", "foreground"), groups=("a", "b"))
    write_gallery(tmp_path, logits.softmax(2), test, torch.zeros(2, 1, 2, 2, dtype=torch.uint8))
    content = json.loads((tmp_path / "gallery.json").read_text())
    assert [item["group"] for item in content["items"]] == ["a", "b"], "0 to 100 % before 33 to 67 %"
    errors = [member["error"] for member in content["items"][1]["members"]]
    assert errors == [pytest.approx(100 / 3, abs=1e-2), pytest.approx(200 / 3, abs=1e-2)]
    assert content["items"][1]["chosen"] == 0
    assert pixels(tmp_path / content["items"][1]["truth"]) == [255, 128, 0, 0]
    assert pixels(tmp_path / content["items"][1]["members"][1]["mask"]) == [255] * 4


def test_one_scene_of_a_group(tmp_path):
    logits = torch.zeros(2, 3, 2, 2, 2)
    logits[0, :, 0], logits[1, :, 1] = 5, 5
    truth = torch.zeros(3, 2, 2, dtype=torch.uint8)
    test = Dataset(torch.rand(3, 1, 2, 2), truth, ("background", "foreground"), groups=("a", "a", "b"))
    write_gallery(tmp_path, logits.softmax(2), test, torch.rand(3, 1, 2, 2))
    assert [i["index"] for i in json.loads((tmp_path / "gallery.json").read_text())["items"]] == [0, 2]
