"""The campaign: order, skipping, budget, resuming. On tiny networks and scikit-learn's digits."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cmcl
from cmcl.experiments import CELLS, Cell, __main__
from cmcl.experiments import campaign as module
from cmcl.experiments.campaign import campaign, parse_budget, plan
from cmcl.experiments.costs import expected_seconds
from cmcl.experiments.deadline import stopping_after
from cmcl.experiments.recipes import DIGITS, RECIPES
from cmcl.experiments.records import load_records, summarise
from cmcl.experiments.run import run

OPTIONS = cmcl.Options(device="cpu", quiet=True)
TINY = replace(
    DIGITS, members=2, epochs=None, steps=3, network_options=DIGITS.network_options | {"filters": [2, 4]}
)
TINIES = {
    "tiny-ie": TINY,
    "tiny-mcl": replace(TINY, method="mcl"),
    "tiny-long": replace(TINY, steps=600),
}


def cell(name, *where):
    return Cell(f"{where[0] if where else 'test'}/{name}", name, where or ("test", name))


IE, MCL, LONG = map(cell, TINIES)


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "campaign-cache"
    monkeypatch.setenv("CMCL_CACHE", str(cache))
    for name, recipe in TINIES.items():
        monkeypatch.setitem(RECIPES, name, recipe)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def go(tmp_path):
    """A campaign in a folder of its own."""

    def start(*cells, **changes):
        return campaign(
            cells, results=tmp_path / "results", runs=tmp_path / "runs", options=OPTIONS, **changes
        )

    return start


def names(report):
    return [record.name for record in report.records]


def test_what_is_done_is_not_done_again(go, tmp_path):
    assert names(go(IE, MCL)) == ["tiny-ie", "tiny-mcl"]
    again = go(IE, MCL)
    assert again.jobs == again.records == []
    assert [job.seeds for job in go(IE, seeds=(0, 1, 2), dry_run=True).jobs] == [(1, 2)]
    assert {
        r["id"]: r["ours"]["top1"]["n"] for r in summarise([IE, MCL], load_records(tmp_path / "results"))
    } == {
        "test/tiny-ie": 1,
        "test/tiny-mcl": 1,
    }


def test_one_seed_of_everything_then_the_others_together(go):
    report = go(IE, MCL, seeds=(0, 1, 2))
    assert [(job.name, job.seeds) for job in report.jobs] == [
        ("tiny-ie", (0,)),
        ("tiny-mcl", (0,)),
        ("tiny-ie", (1, 2)),
        ("tiny-mcl", (1, 2)),
    ]
    assert [record.together for record in report.records if record.name == "tiny-ie"] == [[0], [1, 2], [1, 2]]


def test_a_changed_recipe_is_trained_again(go, monkeypatch):
    go(IE)
    monkeypatch.setitem(RECIPES, "tiny-ie", replace(TINY, lr=0.005))
    assert names(go(IE)) == ["tiny-ie"]


def test_partial_records_do_not_count(go, tmp_path):
    run("tiny-ie", out=tmp_path / "tried", results=tmp_path / "results", steps=2, options=OPTIONS)
    run("tiny-mcl", out=tmp_path / "tried", results=tmp_path / "results", test_limit=9, options=OPTIONS)
    assert names(go(IE, MCL)) == ["tiny-ie", "tiny-mcl"]


def test_a_dry_run_only_plans(go, tmp_path):
    report = go(IE, dry_run=True)
    assert [job.cells for job in report.jobs] == [("test/tiny-ie",)]
    assert report.jobs[0].seconds > 0
    assert not (tmp_path / "runs").exists()


def test_nothing_starts_that_cannot_be_expected_to_end(go, monkeypatch):
    monkeypatch.setattr(module, "expected_seconds", lambda recipe, *rest, **more: recipe.steps * 10.0)
    report = go(LONG, IE, budget_seconds=100)
    assert names(report) == ["tiny-ie"], "a shorter one still fits"
    assert report.left == {"tiny-long seed 0": "expected to take 6000 s, 100 s left"}


def test_what_is_late_saves_itself_and_goes_on(go):
    report = go(LONG, MCL, budget_seconds=0.01, unfinished=True)
    assert report.records == []
    assert "stopped by SIGTERM at step" in report.left["tiny-long seed 0"]
    (job, _) = go(LONG, MCL, dry_run=True).jobs
    assert 0 < job.done < 1
    assert names(go(LONG)) == ["tiny-long"]
    assert go(LONG).jobs == []


def test_no_time_is_left_for_the_second(go, monkeypatch):
    (record,) = go(IE).records

    def slow(*rest, **more):
        time.sleep(0.2)
        return [record]

    monkeypatch.setattr(module, "run", slow)
    report = go(MCL, LONG, budget_seconds=0.1, unfinished=True)
    assert list(report.left) == ["tiny-long seed 0"]


def test_an_interrupt_ends_the_campaign_and_a_failure_does_not(go, monkeypatch, tmp_path):
    failing = cell("cifar10-cnn-ie")
    report = go(failing, IE, root=tmp_path)
    assert "FileNotFoundError" in report.left["cifar10-cnn-ie seed 0"]
    assert names(report) == ["tiny-ie"]

    def stop(*rest, **more):
        raise cmcl.engine.Interrupted("stopped by SIGINT")

    monkeypatch.setattr(module, "run", stop)
    assert list(go(MCL, LONG).left) == ["tiny-mcl seed 0"]


def test_killed_and_started_again(go, tmp_path):
    """A real process, killed without a warning once it has finished one cell."""
    recipes = {name: recipe.to_json() for name, recipe in TINIES.items()}
    code = f"""
import torch, cmcl
from cmcl.experiments import Cell, RECIPES
from cmcl.experiments.campaign import campaign
torch.set_num_threads(1)
RECIPES |= {{name: cmcl.Recipe.from_json(values) for name, values in {recipes!r}.items()}}
RECIPES["tiny-long"] = __import__("dataclasses").replace(RECIPES["tiny-long"], steps=10**6)
cells = [Cell("test/" + name, name, ("test", name)) for name in ("tiny-ie", "tiny-long")]
campaign(cells, results={str(tmp_path / "results")!r}, runs={str(tmp_path / "runs")!r},
         options=cmcl.Options(device="cpu", quiet=True))
"""
    source = str(Path(__file__).parents[1] / "src")
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": source})
    records = tmp_path / "results" / "records"
    waited = time.monotonic() + 60
    while not (list(records.glob("*.json")) or process.poll() is not None or time.monotonic() > waited):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (first,) = records.glob("*.json")
    written = first.stat().st_mtime_ns
    assert names(go(IE, MCL)) == ["tiny-mcl"]
    assert first.stat().st_mtime_ns == written


def test_the_order_of_the_issue(tmp_path):
    jobs = plan(CELLS, seeds=(0, 1, 2), results=tmp_path, runs=tmp_path, options=OPTIONS)
    order = [(job.name, job.seeds) for job in jobs]
    assert len(set(order)) == len(order)
    first = [
        ("cifar10-resnet20-ie", (0,)),
        ("svhn-resnet20-cmcl", (0,)),
        ("cifar10-cnn-ie", (0,)),
        ("cifar10-cnn-cmcl-sharing-sampled", (0,)),
        ("cifar10-cnn-ie-adversarial", (0,)),
        ("icoseg-fcn-m5-cmcl", (0,)),
        ("cifar10-resnet20-cmcl", (1, 2)),
        ("cifar10-cnn-mcl", (1, 2)),
        ("cifar10-resnet20-m10-cmcl", (0,)),
        ("svhn-vggnet17-cmcl", (0,)),
        ("cifar10-cnn-m5-cmcl-k4", (0,)),
        ("svhn-googlenet18-cmcl", (0,)),
        ("cifar10-cnn-m10-cmcl-k4", (0,)),
        ("svhn-resnet20-ie", (1, 2)),
    ]
    places = [order.index(job) for job in first]
    assert places == sorted(places)


def test_parts_share_the_recipes_out(tmp_path):
    def part(*shard):
        return {j.name for j in plan(CELLS, seeds=(0,), results=tmp_path, runs=tmp_path, shard=shard)}

    parts = [part(i, 3) for i in (1, 2, 3)]
    assert set.union(*parts) == part(1, 1)
    assert sum(map(len, parts)) == len(part(1, 1))
    with pytest.raises(ValueError, match="between 1 and n. Got 0/3"):
        part(0, 3)


def test_costs_learn_from_records_of_the_same_device(go):
    (record,) = go(IE).records
    resnet = RECIPES["cifar10-resnet20-ie"]
    rough = expected_seconds(resnet, 1, [], "H200", cpu=False)
    assert 4 * 60 < rough < 7 * 60, "what it took in the past"
    slow = replace(
        record,
        device="H200",
        recipe=resnet.to_json(),
        recipe_hash=resnet.hash,
        seconds=2 * rough,
        together=[0],
    )
    assert expected_seconds(resnet, 1, [slow], "H200", cpu=False) == pytest.approx(2 * rough)
    assert expected_seconds(resnet, 1, [slow], "another", cpu=False) == rough
    mcl = RECIPES["svhn-resnet20-mcl"]
    assert expected_seconds(mcl, 2, [slow], "H200", cpu=False) == pytest.approx(
        2 * expected_seconds(mcl, 2, [], "H200", cpu=False)
    )
    assert expected_seconds(TINY, 1, [record], record.device, cpu=True) == pytest.approx(record.seconds)


def test_budgets():
    assert [parse_budget(t) for t in ("90", "90s", "25m", "1h30m", "0.5h")] == [90, 90, 1500, 5400, 1800]
    for text in ("", "m", "25 minutes", "-3", "0", "nan", "5m3"):
        with pytest.raises(ValueError, match="25m"):
            parse_budget(text)


def test_without_a_training_the_time_just_passes():
    with stopping_after(0.01):
        time.sleep(0.3)
    with stopping_after(None):
        pass


def test_from_the_command_line(capsys, monkeypatch, tmp_path):
    def main(*words):
        places = [*("--out", tmp_path / "runs"), *("--results", tmp_path / "results")]
        monkeypatch.setattr(sys, "argv", ["experiments", *map(str, [*words, *places])])
        return __main__.main(), capsys.readouterr().out

    code, text = main("run", "tiny-ie", "tiny-mcl", "--quiet", "--seeds", 0, 1)
    assert code == 0
    assert "tiny-mcl seed 1: top-1" in text
    assert main("run", "tiny-ie", "--quiet")[1] == "tiny-ie: has its records\n"
    code, text = main("run", "tiny-long", "--quiet", "--budget", "0.01s")
    assert code == 3
    assert "go on with resume" in text
    assert main("run", "tiny-longer", "--quiet") == (
        2,
        "cmcl: recipe must be a known name. Got 'tiny-longer'. Did you mean 'tiny-long'?\n",
    )
    code, text = main("campaign", "table1", "--dry-run", "--part", "1/2")
    assert text.count("minutes") == 3
    monkeypatch.setattr(sys, "argv", ["experiments", "status", "--results", str(tmp_path / "results")])
    assert __main__.main() == 0
    assert {row["id"] for row in json.loads(capsys.readouterr().out)} == {c.id for c in CELLS}
