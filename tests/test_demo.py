"""`cmcl demo`: in small for its parts, whole (slow) for the paper's point."""

import inspect
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cmcl.cli.demo import MORE_SEEDS
from cmcl.cli.demo import demo as cli_demo
from cmcl.demo import METHODS, demo
from cmcl.reproduction.recipes import RECIPES


def test_the_command_shows_the_seed_that_the_function_does():
    """The command cannot ask it before torch is imported."""
    command, function = (inspect.signature(f).parameters["seed"].default for f in (cli_demo, demo))
    assert command == function


@pytest.fixture
def tiny(monkeypatch):
    """The demo's own recipes, for two steps and on few images."""
    for set_, options in (("digits-300", {"filters": [2, 4]}), ("shapes-160", {"filters": [2, 2]})):
        for method in METHODS:
            recipe = RECIPES[f"{set_}-{method}"]
            options = dict(recipe.network_options) | options
            short = replace(
                recipe, epochs=None, steps=2, warm_start=0, batch_size=8, subset=40, network_options=options
            )
            monkeypatch.setitem(RECIPES, f"{set_}-{method}", short)


@pytest.mark.parametrize(
    "more", [[], pytest.param(["--segmentation"], marks=pytest.mark.slow)]
)  # draws scenes
def test_what_it_prints_for_programs(cmcl, tiny, tmp_path, more):
    code, out, err = cmcl("demo", "--out", tmp_path / "d", "--json", *more)
    found = json.loads(out)
    assert code == 0
    assert list(found) == ["single", "ie", "mcl", "cmcl", "report"]
    for method in METHODS:
        assert set(found[method]) == {"top1", "oracle", "ece"}
        assert all(0 <= value <= 100 for value in found[method].values())
        assert found[method]["oracle"] <= found[method]["top1"]
    assert found["single"]["oracle"] == found["single"]["top1"], "one member is its own oracle"
    assert found["report"] == str(tmp_path / "d" / "report.html")
    assert "<html" in Path(found["report"]).read_text()
    assert "4/4 CMCL" in err


def test_without_the_extra_report_it_names_it(cmcl, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    code, out, err = cmcl("demo", "--out", tmp_path / "d")
    assert code == 0
    assert "confident-mcl[report]" in out
    assert "no report page" in err
    assert not (tmp_path / "d" / "report.html").exists()
    code, _, err = cmcl("report", tmp_path / "d", "-o", tmp_path / "r.html")
    assert code == 2
    assert "confident-mcl[report]" in err


def test_what_it_prints_for_people(cmcl, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    code, out, err = cmcl("demo", "--quiet", "--seed", 3)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[:5]] == [
        "method",
        "one",
        "independent",
        "MCL",
        "CMCL",
    ]
    assert "cmcl-demo/report.html" in out
    assert "One seed on so few test images is noisy: the README has means over twenty seeds." in out
    assert "averaged in" in out
    assert "docs/rejecting.md" in out
    assert list((tmp_path / "cmcl-demo").glob("digits-300-cmcl--*--seed3"))
    assert torch.get_num_threads() == threads


def test_what_is_trained_is_not_trained_again(tiny, tmp_path):
    first = demo(tmp_path, quiet=True)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/telemetry.jsonl")}
    rows = {path: path.read_text() for path in files}
    assert len(files) == 4
    assert demo(tmp_path, quiet=True) == first
    assert rows == {path: path.read_text() for path in files}


def test_the_second_time_changes_no_record(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("CMCL_COMMIT", "first")
    demo(tmp_path, quiet=True)
    records = {path: path.read_bytes() for path in tmp_path.glob("*/record.json")}
    assert len(records) == 4
    monkeypatch.setenv("CMCL_COMMIT", "second")
    demo(tmp_path, quiet=True)
    assert records == {path: path.read_bytes() for path in records}


def test_what_the_text_promises_is_there():
    """The numbers of seeds that the demo names are those of the files it points to."""
    seeds = {False: ("README.md", "| 20 seeds |"), True: ("results/demo-seeds-segmentation.txt", None)}
    root = Path(__file__).parents[1]
    assert seeds[False][1] in (root / seeds[False][0]).read_text()
    assert "twenty" in MORE_SEEDS[False]
    assert (
        len(re.findall(r"cmcl +\w+ +top-1 by seed: (.*)", (root / seeds[True][0]).read_text())[0].split())
        == 5
    )
    assert "five" in MORE_SEEDS[True]
    assert "temperature" in (root / "docs" / "rejecting.md").read_text()


def test_the_four_differ_in_method_alone():
    for set_ in ("digits-300", "shapes-160"):
        single, ie, mcl, cmcl = (RECIPES[f"{set_}-{method}"] for method in METHODS)
        same = {
            "method": "ie",
            "members": 1,
            "overlap": 1,
            "sharing": False,
            "labels": "exact",
            "warm_start": 0,
        }
        assert all(replace(recipe, **same) == single for recipe in (ie, mcl, cmcl))
        assert (mcl.method, mcl.overlap) == ("mcl", 1)
        assert (cmcl.method, cmcl.sharing, cmcl.labels) == ("cmcl", True, "sampled")
        assert ie.members == mcl.members == cmcl.members > single.members


def test_digits_as_the_readme_says():
    recipe = RECIPES["digits-300-cmcl"]
    assert (recipe.subset, recipe.members, recipe.overlap) == (300, 5, 3)
    assert recipe.network_options["filters"] == [8, 16]


@pytest.mark.slow
def test_the_papers_point(tmp_path):
    """MCL: some member nearly always right, and nobody knows which. CMCL repairs that."""
    found = demo(tmp_path, quiet=True)
    assert found["mcl"]["oracle"] < 2
    assert found["mcl"]["top1"] > 20
    assert found["cmcl"]["top1"] < 6
    assert found["cmcl"]["oracle"] < found["ie"]["oracle"]
