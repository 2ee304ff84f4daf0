"""Evaluation: numbers against hand-worked ones and the metrics; the gallery shows images as they are."""

import io
import json
import math
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import cmcl
from cmcl import calibration, metrics
from cmcl.data.dataset import IGNORE, Dataset
from cmcl.reproduction import evaluate as module
from cmcl.reproduction import find
from cmcl.reproduction.evaluate import (
    Entropies,
    evaluate_run,
    predictions,
    recorded_errors,
)
from cmcl.reproduction.gallery import Gallery, GalleryBuilder, disputed
from cmcl.reproduction.recipes import DIGITS
from cmcl.reproduction.runner import build
from report_samples import changed

TINY = changed(
    DIGITS, members=2, epochs=None, steps=4, network_options=DIGITS.network_options | {"filters": [2, 4]}
)


def write_gallery(folder, probs, test, images, batch=2):
    gallery = GalleryBuilder(test, images)
    for start in range(0, probs.shape[1], batch):
        gallery.update(probs[:, start : start + batch], start)
    gallery.write(folder)


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
    gallery = Gallery.load(tmp_path / "gallery" / "gallery.json")
    assert (gallery.task, gallery.classes) == ("classification", ["cat", "dog"])
    assert [(item.index, item.target) for item in gallery.items] == [(1, 1), (0, 0), (2, 0)]
    found = gallery.predictions
    assert found.classes.tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]], "the average, then the members"
    assert found.wrong.tolist() == [False, False, False]
    sure = torch.tensor([5.0, 0.0]).softmax(0)
    assert found.confidence[1, 1] == pytest.approx(sure[0].item(), abs=1e-3)
    assert found.entropy[1, 1] == pytest.approx(-(sure * sure.log()).sum().item(), abs=1e-3)
    assert found.entropy[2, 1] < found.entropy[1, 1], "8 nats apart is surer than 5"
    raw = pictures[1].permute(1, 2, 0).reshape(-1, 3).tolist()
    assert pixels(tmp_path / "gallery" / gallery.items[0].image) == raw


def test_the_chosen_member_has_the_lowest_entropy_however_close(tmp_path):
    """Two members, 0.0001 apart of 0.69: float16 would take them for equal, and the first for chosen."""
    logits = torch.tensor([[[0.020, 0.0]], [[0.025, 0.0]]])  # (M, N, C)
    test = Dataset(torch.rand(1, 1, 2, 2), torch.tensor([0]), ("cat", "dog"))
    write_gallery(tmp_path, logits.softmax(2), test, test.images)
    found = Gallery.load(tmp_path / "gallery.json").predictions
    assert found.entropy[1:, 0].argmin() == 1


def test_images_with_a_wrong_prediction_are_in_the_gallery(tmp_path):
    """Beside the most disputed: here nothing is disputed, and every fifth is wrong."""
    logits = torch.zeros(2, 100, 2)
    logits[:, :, 0] = 5
    targets = (torch.arange(100) % 5 == 0).long()
    test = Dataset(torch.rand(100, 1, 2, 2), targets, ("cat", "dog"))
    write_gallery(tmp_path, logits.softmax(2), test, test.images, batch=30)
    gallery = Gallery.load(tmp_path / "gallery.json")
    assert {item.index for item in gallery.items} == {*range(12), *range(0, 100, 5)}
    assert gallery.predictions.wrong.nonzero()[0].tolist() == list(range(0, 100, 5))


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


def test_scenes_are_evenly_spaced_images_and_one_disputed_image_of_a_group(tmp_path):
    logits = torch.zeros(2, 31, 2, 2, 2)
    logits[:, :, 0] = 5
    logits[1, 3:6] = logits[1, 3:6].flip(1)  # images 3, 4 and 5 are disputed
    truth = torch.zeros(31, 2, 2, dtype=torch.uint8)
    groups = ("a",) * 3 + ("b", "b", "c") + ("d",) * 25
    test = Dataset(torch.rand(31, 1, 2, 2), truth, ("background", "foreground"), groups=groups)
    write_gallery(tmp_path, logits.softmax(2), test, torch.rand(31, 1, 2, 2))
    shown = [item.index for item in Gallery.load(tmp_path / "gallery.json").items]
    assert shown == [0, 10, 20, 30, 3, 5, 6], "the first of groups that nothing is disputed in"


def test_the_gallery_does_not_depend_on_the_batch_size(tmp_path):
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(3, 40, 4, generator=generator).softmax(2)
    test = Dataset(torch.rand(40, 1, 2, 2), torch.zeros(40).long(), tuple("abcd"))
    for batch in (1, 7, 40):
        write_gallery(tmp_path / str(batch), probs, test, test.images, batch)
    first, *others = (Gallery.load(tmp_path / str(b) / "gallery.json") for b in (1, 7, 40))
    for other in others:
        assert other.model_dump() == first.model_dump()
        assert all(map(np.array_equal, other.predictions, first.predictions))
    shown = [item.index for item in first.items]
    assert shown[:12] == disputed(probs).argsort(descending=True)[:12].tolist()
    assert set(shown[12:]) <= set(first.predictions.wrong.nonzero()[0])


def digits(n=40):
    test = cmcl.data.load("digits", split="test")[:n]
    return changed(test, images=test.images / 255)


def evaluated(ensemble, test, **more):
    return evaluate_run(ensemble, test.images, test.targets, **more)


def test_errors_by_hand():
    probs = torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.2, 0.8], [0.3, 0.7]]])  # (M, N, C)
    for targets, picked in (([0, 1], 0.0), ([1, 1], 50.0)):  # member 0 is more confident of the first image
        scores = metrics.Accumulator()
        for i in (0, 1):
            scores.update(probs[:, i : i + 1], torch.tensor(targets[i : i + 1]))
        assert recorded_errors(scores) == {"top1": picked, "picked": picked, "oracle": 0.0}


def test_entropies_by_hand():
    """Two members, three classes; member 0 specialises in class 0."""
    low, high = [1.0, 0.0, 0.0], [1 / 3] * 3  # entropies 0 and log 3: the first and the last bin
    probs = torch.tensor([[low, high, high], [high, low, high]])  # (M, N, C)
    entropies = Entropies()
    for i, target in enumerate((0, 1, 2)):
        entropies.update(probs[:, i : i + 1], torch.tensor([target]))
    entropies.update(probs[:, :2], None)
    found = entropies.compute(torch.tensor([[True, False, False], [False] * 3]))
    ends = [[(h[0], h[-1], sum(h)) for h in found[key]] for key in ("specialised", "other", "ood")]
    assert ends == [[(1, 0, 1), (0, 0, 0)], [(0, 2, 2), (1, 2, 3)], [(1, 1, 2), (1, 1, 2)]]
    assert (sum(found["averaged"]), found["averaged"][-1], sum(found["averaged_ood"])) == (3, 1, 2)
    assert found["largest"] == pytest.approx(math.log(3), abs=1e-6)


def test_without_sharing_it_is_what_the_metrics_say():
    ensemble, test = build(TINY, 0), digits()
    found = evaluated(ensemble, test, batch_size=7)
    assert found == evaluated(ensemble, test, batch_size=40), "batches change nothing"
    probs = ensemble.predict(test.images).member_probs
    assert found["errors"]["expected"] == found["errors"]["sampled"]
    assert {"member": fmean(found["members"])} | found["errors"]["expected"] == pytest.approx(
        cmcl.evaluate(ensemble, test)
    )
    assert found["errors"]["expected"]["top1"] == metrics.percent(metrics.top1_error(probs, test.targets))
    assert found["members"] == metrics.percent(metrics.member_errors(probs, test.targets))
    assert found["classwise"] == metrics.percent(metrics.classwise_accuracy(probs, test.targets))
    confidence, predicted = probs.mean(0).max(1)
    risks = metrics.risk_coverage(confidence, predicted == test.targets)[1]
    assert found["calibration"]["risk_coverage"][-1] == metrics.percent(risks[-1])
    assert len(found["calibration"]["risk_coverage"]) == 100
    assert sum(found["calibration"]["reliability"]["count"]) == 40
    entropy = metrics.entropy(probs)
    for m, (own, other) in enumerate(
        zip(found["entropy"]["specialised"], found["entropy"]["other"], strict=True)
    ):
        counts = torch.histc(entropy[m].double(), 50, 0, math.log(10)).long().tolist()
        assert [a + b for a, b in zip(own, other, strict=True)] == counts


def test_the_ece_after_temperature_scaling():
    """Everything else is of the prediction that is not scaled."""
    ensemble, test = build(TINY, 0), digits()
    plain = evaluated(ensemble, test)
    ensemble.temperature = 0.25
    found = evaluated(ensemble, test, batch_size=7)
    probs = ensemble.predict(test.images).probs
    scaled = metrics.ece(probs[None], test.targets)
    expected = {"temperature": 0.25, "scaled_ece": metrics.percent(scaled)}
    bins = found["calibration"].pop("scaled_reliability")
    assert found["calibration"] == plain["calibration"] | expected
    assert sum(bins["count"]) == len(test)
    means = [n * c for n, c in zip(bins["count"], bins["confidence"], strict=True) if n]
    assert sum(means) / len(test) == pytest.approx(100 * probs.amax(1).mean().item(), abs=1e-3)
    assert found | {"calibration": None} == plain | {"calibration": None}
    assert expected["scaled_ece"] != plain["calibration"]["ece"]


def test_the_ece_of_halves_that_calibrate_each_other(monkeypatch):
    """By hand: two temperatures, each for the examples that it was not fitted to; not of a few examples."""
    ensemble, test = build(TINY, 0), cmcl.data.load("digits", split="test")[:150]
    test = changed(test, images=test.images / 16)
    found = evaluated(ensemble, test, batch_size=37)["calibration"]
    probs = ensemble.predict(test.images).member_probs
    even = calibration.fit_temperature(probs[:, ::2], test.targets[::2])
    odd = calibration.fit_temperature(probs[:, 1::2], test.targets[1::2])
    both = [calibration.apply_temperature(probs[:, n : n + 1], even if n % 2 else odd) for n in range(150)]
    expected = metrics.percent(metrics.ece(torch.cat(both)[None], test.targets))
    assert found["cross_fitted_ece"] == pytest.approx(expected, abs=1e-4)
    assert even != odd
    assert "cross_fitted_ece" not in evaluated(ensemble, test[:99])["calibration"]
    monkeypatch.setattr(module, "LARGEST", 150 * 10 // 3)  # a third of the examples, from the whole test set
    third = changed(test, images=test.images[::3], targets=test.targets[::3])
    monkeypatch.setattr(module, "FEWEST", 50)
    expected = evaluated(ensemble, test, batch_size=37)["calibration"]["cross_fitted_ece"]
    monkeypatch.setattr(module, "LARGEST", 10**6)
    assert evaluated(ensemble, third)["calibration"]["cross_fitted_ece"] == pytest.approx(expected, abs=1e-4)
    ensemble.temperature = 0.5
    assert "cross_fitted_ece" not in evaluated(ensemble, test)["calibration"], "it has its own"


def test_with_sharing_and_ood_data():
    ensemble = build(changed(TINY, sharing=True), 0)
    ood = torch.rand(30, 1, 8, 8) * 3
    found = evaluated(ensemble, digits(), ood=ood, seed=3)
    assert found == evaluated(ensemble, digits(), ood=ood, seed=3), "the masks have a seed"
    (one,), (other,) = (predictions(ensemble, digits().images, mode="sampled", seed=s) for s in (3, 4))
    assert not one.equal(other)
    assert sum(found["entropy"]["ood"][0]) == sum(found["entropy"]["averaged_ood"]) == 30
    assert 0 <= found["calibration"]["auroc"] <= 1
    assert ensemble.share_at_test == "expected"


def test_segmentation_has_both_scores():
    recipe = changed(find("shapes-ie"), network_options={"filters": [2, 4]})
    shapes = cmcl.data.load("shapes", split="test", groups=2, per_group=5, size=8)
    test = changed(shapes, images=shapes.images / 255)
    ensemble = build(recipe, 0)
    found = evaluated(ensemble, test, batch_size=3)["errors"]["expected"]
    probs = ensemble.predict(test.images).member_probs
    assert found["top1"] == metrics.percent(metrics.top1_error(probs, test.targets))
    assert found["picked"] == metrics.percent(metrics.picked_error(probs, test.targets))
    assert found["top1"] != found["picked"]
    assert sum(evaluated(ensemble, test)["entropy"]["test"][0]) == len(shapes)


def test_classes_without_examples_are_none():
    test = digits()
    rows = [i for i, label in enumerate(test.targets.tolist()) if label != 3]
    found = evaluated(build(TINY, 0), Dataset(test.images[rows], test.targets[rows], test.classes))
    assert [row[3] for row in found["classwise"]] == [None, None]
    json.dumps(found, allow_nan=False)


def test_memory_does_not_grow_with_the_number_of_images():
    """Batches are released: probabilities of at most two are alive at a time."""
    import gc
    import weakref

    alive, most = [], 0

    class Watched(metrics.Accumulator):
        def update(self, probs, targets, **more):
            nonlocal most
            gc.collect()
            alive.append(weakref.ref(probs))
            most = max(most, sum(one() is not None for one in alive))
            super().update(probs, targets, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "Accumulator", Watched)
        evaluated(build(TINY, 0), digits(), batch_size=4)
    assert len(alive) == 10
    assert most <= 2


@pytest.mark.parametrize(("title", "terminal"), [("seed 0", True), ("seed 0", False), ("", True)])
def test_evaluation_is_shown_on_a_terminal(monkeypatch, title, terminal):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", stderr)
    list(predictions(build(TINY, 0), digits().images, title=title, batch_size=10))
    assert (title in stderr.getvalue() and "100%" in stderr.getvalue()) is bool(title and terminal)
