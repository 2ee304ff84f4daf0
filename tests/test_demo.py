"""`cmcl demo`: in small for its parts, whole (slow) for the paper's point."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cmcl as package
from cmcl.cli.explore import METHODS, MORE_SEEDS
from cmcl.data.dataset import stratified_subset
from cmcl.reproduction.recipes import RECIPES
from cmcl.reproduction.record import Record
from cmcl.training import Recipe

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tiny(monkeypatch):
    """The demo's own recipes, for two steps and on few images."""
    small = {"epochs": None, "steps": 2, "warm_start": 0, "batch_size": 8, "subset": 40}
    for stem, filters in (("digits-300", [2, 4]), ("shapes-160", [2, 2])):
        for method in METHODS:
            recipe = RECIPES[f"{stem}-{method}"]
            options = dict(recipe.network_options) | {"filters": filters}
            monkeypatch.setitem(
                RECIPES, f"{stem}-{method}", replace(recipe, network_options=options, **small)
            )


@pytest.mark.parametrize("more", [[], pytest.param(["--segmentation"], marks=pytest.mark.slow)])
def test_json(cmcl, tiny, tmp_path, more):
    code, out, err = cmcl("demo", "--out", tmp_path / "d", "--json", *more)
    found = json.loads(out)
    assert code == 0
    assert list(found) == ["single", "ie", "mcl", "cmcl", "report"]
    for method in METHODS:
        picked = {"picked"} if more else set()
        assert set(found[method]) == {"top1", "oracle", "ece", "scaled_ece"} | picked
        assert all(0 <= value <= 100 for value in found[method].values())
        assert found[method]["oracle"] <= found[method]["top1"]
    assert found["single"]["oracle"] == found["single"]["top1"], "one member is its own oracle"
    assert found["report"] == str(tmp_path / "d" / "report.html")
    assert "<html" in Path(found["report"]).read_text()
    assert "4/4 CMCL" in err


def test_the_temperature_is_that_of_images_outside_the_subset(cmcl, tiny, tmp_path):
    """It is saved with the ensemble, and the record has the ECE of the test images before and after."""
    found = json.loads(cmcl("demo", "--out", tmp_path, "--json", "--quiet")[1])["cmcl"]
    (folder,) = tmp_path.glob("digits-300-cmcl--*")
    ensemble, record = package.load(folder), Record.load(folder / "record.json")
    train, test = (package.data.load("digits", split=split) for split in ("train", "test"))
    inside = {image.numpy().tobytes() for image in stratified_subset(train, 40).images}
    outside = train.subset([i for i in range(len(train)) if train.images[i].numpy().tobytes() not in inside])
    assert len(outside) == len(train) - 40
    prediction = ensemble.predict(outside.images)
    expected = package.calibration.fit_temperature(prediction.member_probs, outside.targets)
    assert ensemble.temperature == record.calibration["temperature"] == pytest.approx(expected, rel=1e-3)
    prediction = ensemble.predict(test.images)
    for key, probs in (("ece", prediction.member_probs), ("scaled_ece", prediction.probs[None])):
        assert found[key] == pytest.approx(100 * package.metrics.ece(probs, test.targets), abs=1e-3)
        assert found[key] == record.calibration[key]


def test_the_extra_report_is_optional(cmcl, mistake, tiny, tmp_path, without_altair):
    code, out, err = cmcl("demo", "--out", tmp_path / "d")
    assert code == 0
    assert "CMCL" in out
    assert "no report page" in err
    assert "pip install 'confident-mcl[report]'" in err
    assert not (tmp_path / "d" / "report.html").exists()
    assert "confident-mcl[report]" in mistake("report", tmp_path / "d", "-o", tmp_path / "r.html")


def test_text(cmcl, tiny, tmp_path, monkeypatch):
    """The second time nothing is trained, and no record changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CMCL_COMMIT", "first")
    threads = torch.get_num_threads()
    code, out, err = cmcl("demo", "--quiet", "--seed", 4)
    assert (code, err) == (0, "")
    first = ["method", "one", "independent", "MCL", "CMCL"]
    assert [line.split()[0] for line in out.splitlines()[:5]] == first
    assert "cmcl-demo/report.html" in out
    assert "results/demo-seeds.txt" in out
    assert "underconfident" in out
    assert "fitted on training images outside the subset" in out
    assert torch.get_num_threads() == threads
    files = {path: path.read_bytes() for path in Path("cmcl-demo").glob("*/[rt]e*.json*")}
    assert len([path for path in files if path.name in ("record.json", "telemetry.jsonl")]) == 8
    monkeypatch.setenv("CMCL_COMMIT", "second")
    assert cmcl("demo", "--quiet") == (0, out, ""), "4 is the default seed"
    assert files == {path: path.read_bytes() for path in files}


def test_what_the_text_refers_to():
    """The numbers of seeds are those of the files it names."""
    text = (ROOT / "results" / "demo-seeds.txt").read_text()
    assert len(re.findall(r"cmcl +\w+ +top-1 by seed: (.*)", text)[0].split()) == 20
    assert "twenty" in MORE_SEEDS[False]
    text = (ROOT / "results" / "demo-seeds-segmentation.txt").read_text()
    assert len(re.findall(r"cmcl +\w+ +top-1 by seed: (.*)", text)[0].split()) == 5
    assert "five" in MORE_SEEDS[True]
    assert "temperature" in (ROOT / "docs" / "tutorials" / "calibration.md").read_text()


def test_the_four_differ_in_the_objective_alone():
    same = {"method": "ie", "members": 1, "overlap": 1, "sharing": False, "labels": "exact", "warm_start": 0}
    for stem in ("digits-300", "shapes-160"):
        single, ie, mcl, cmcl = (RECIPES[f"{stem}-{method}"] for method in METHODS)
        assert all(replace(recipe, beta=single.beta, **same) == single for recipe in (ie, mcl, cmcl))
        assert (mcl.method, mcl.overlap, cmcl.method) == ("mcl", 1, "cmcl")
        assert ie.members == mcl.members == cmcl.members > single.members
    assert (cmcl.overlap, cmcl.sharing, cmcl.labels) == (1, True, "sampled"), "the scenes: as in the paper"
    assert (cmcl := RECIPES["digits-300-cmcl"]).subset == 300, "as the quickstart says"
    assert (cmcl.members, cmcl.network_options["filters"]) == (5, [8, 16])
    assert (cmcl.beta, cmcl.overlap) == (Recipe.beta, Recipe.overlap), "the library's default"


@pytest.mark.slow
def test_the_papers_point(cmcl, tmp_path):
    """MCL: some member is nearly always right, but the average is not. CMCL repairs that."""
    found = json.loads(cmcl("demo", "--quiet", "--json", "--out", tmp_path)[1])
    assert found["mcl"]["oracle"] < 2
    assert found["mcl"]["top1"] > 20
    assert found["cmcl"]["top1"] < 6
    assert found["cmcl"]["oracle"] < found["ie"]["oracle"]
    assert found["cmcl"]["ece"] > 10
    assert found["cmcl"]["scaled_ece"] < 3
