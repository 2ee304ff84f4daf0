"""The campaign: order, skipping, budget, resuming. On tiny networks and scikit-learn's digits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cmcl
from cmcl.reproduction import CELLS, Cell, __main__, environment
from cmcl.reproduction import campaign as module
from cmcl.reproduction.campaign import campaign, parse_budget, plan
from cmcl.reproduction.cells import summarise
from cmcl.reproduction.costs import START, at_its_own_speed, expected_seconds
from cmcl.reproduction.deadline import stopping_after
from cmcl.reproduction.recipes import DIGITS, OOD, RECIPES
from cmcl.reproduction.record import load_records
from cmcl.reproduction.runner import run, run_folder
from cmcl.training.checkpoint import Checkpoints
from report_samples import changed, made_record

OPTIONS = cmcl.Options(device="cpu", quiet=True)
TINY = changed(
    DIGITS, members=2, epochs=None, steps=3, network_options=DIGITS.network_options | {"filters": [2, 4]}
)
TINIES = {
    "tiny-ie": TINY,
    "tiny-mcl": changed(TINY, method="mcl"),
    "tiny-long": changed(TINY, steps=600),
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


def test_what_another_process_did_meanwhile_is_not_done_again(go, tmp_path, monkeypatch):
    """Its records come while the first of ours trains: all of one job's seeds, and one of another's."""
    trained, lines = [], []

    def watched(name, seeds, **more):
        if not trained:
            run("tiny-mcl", (0,), **more | {"out": tmp_path / "others"})
            run("tiny-ie", (2,), **more | {"out": tmp_path / "others"})
        trained.append((name, *seeds))
        return run(name, seeds, **more)

    monkeypatch.setattr(module, "run", watched)
    report = go(IE, MCL, seeds=(0, 1, 2), say=lines.append)
    assert trained == [("tiny-ie", 0), ("tiny-ie", 1), ("tiny-mcl", 1, 2)]
    assert "tiny-mcl seed 0: has its records by now" in lines
    assert report.left == {}


class TestWithoutUnseenData:
    """Figure 2 needs a second set. Where it is not there, nothing is trained over and over for it."""

    @pytest.fixture(autouse=True)
    def outside(self, monkeypatch):
        """Figure 2's set of tiny-ie: CIFAR-10, as good as any that may be missing."""
        monkeypatch.setitem(OOD, "digits", "cifar10")

    @pytest.mark.parametrize("cells", [("fig2a",), ("table1", "fig2a")])
    def test_not_trained_again(self, go, tmp_path, cells):
        wanted = [cell("tiny-ie", where, "ie") for where in cells]
        with pytest.warns(UserWarning, match="figure 2 lacks"):
            assert names(go(*wanted, root=tmp_path)) == ["tiny-ie"]
        shutil.rmtree(tmp_path / "runs")
        with pytest.warns(UserWarning, match="figure 2 lacks"):
            assert go(*wanted, root=tmp_path).jobs == []

    def test_once_it_is_there(self, go, tmp_path, monkeypatch):
        with pytest.warns(UserWarning, match="figure 2 lacks"):
            go(cell("tiny-ie", "fig2a", "ie"), root=tmp_path)
        monkeypatch.setitem(OOD, "digits", "digits")
        (record,) = go(cell("tiny-ie", "fig2a", "ie"), root=tmp_path).records
        assert record.ood == "digits"
        assert go(cell("tiny-ie", "fig2a", "ie"), root=tmp_path).jobs == []


def test_a_damaged_record_stops_nothing(go, tmp_path):
    go(IE, MCL)
    damaged = next((tmp_path / "results" / "records").glob("tiny-mcl--*"))
    damaged.write_text(damaged.read_text().replace('"errors": {', '"errors": {}, "_": {'))
    with pytest.warns(UserWarning, match="skipped: .*tiny-mcl"):
        assert names(go(IE, MCL)) == ["tiny-mcl"]
    assert go(IE, MCL).jobs == [], "it was written anew"


def test_a_changed_recipe_is_trained_again(go, monkeypatch):
    go(IE)
    monkeypatch.setitem(RECIPES, "tiny-ie", changed(TINY, lr=0.005))
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
    left = report.left["tiny-long seed 0"]
    assert left.startswith("time over at step ")
    assert "resume" not in left, "a campaign has no such option"
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
        raise cmcl.training.Interrupted("stopped by SIGINT")

    monkeypatch.setattr(module, "run", stop)
    assert list(go(MCL, LONG).left) == ["tiny-mcl seed 0"]


def test_killed_and_started_again(go, tmp_path):
    """A real process, killed without a warning once it has finished one cell."""
    recipes = {name: recipe.to_json() for name, recipe in TINIES.items()}
    code = f"""
import torch, cmcl
from cmcl.reproduction import Cell, RECIPES
from cmcl.reproduction.campaign import campaign
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
    resnet, real = RECIPES["cifar10-resnet20-ie"], made_record("cifar10-resnet20-ie")
    rough = expected_seconds(resnet, 1, [], "H200", cpu=False)
    assert 4 * 60 < rough < 7 * 60, "what it took in the past"
    slow = changed(real, device="H200", seconds=2 * rough)
    assert expected_seconds(resnet, 1, [slow], "H200", cpu=False) == pytest.approx(2 * rough)
    assert expected_seconds(resnet, 1, [slow], "another", cpu=False) == rough
    alone = changed(slow, seed=1, seconds=slow.seconds / 2)  # the other had company
    assert expected_seconds(resnet, 1, [slow, alone], "H200", cpu=False) == pytest.approx(rough)
    mcl = RECIPES["svhn-resnet20-mcl"]
    assert expected_seconds(mcl, 2, [slow], "H200", cpu=False) == pytest.approx(
        2 * expected_seconds(mcl, 2, [], "H200", cpu=False)
    )
    assert expected_seconds(TINY, 1, [record], record.device, cpu=True) == pytest.approx(record.seconds)


class TestItsOwnSpeed:
    @pytest.fixture
    def interrupted(self, tmp_path):
        """A checkpoint at step 100 of 600, after so many seconds on some device."""

        def make(seconds, device="H200", step=100):
            folder = run_folder(tmp_path / "runs", "tiny-long", TINIES["tiny-long"], (0,))
            Checkpoints(folder / "checkpoints").save(step, {}, {"seconds": seconds})
            environment.keep(folder, 0, environment.facts(OPTIONS) | {"device": device})
            return folder

        return make

    def test_by_hand(self, interrupted):
        folder = interrupted(1000.0 + START)
        assert at_its_own_speed(folder, 600, "H200", cpu=False) == pytest.approx(5000 + START)

    def test_where_it_tells_little(self, interrupted, tmp_path):
        assert at_its_own_speed(tmp_path, 600, "H200", cpu=False) is None, "not begun"
        assert at_its_own_speed(interrupted(1.9 * START), 600, "H200", cpu=False) is None, "hardly begun"
        assert at_its_own_speed(interrupted(1000.0), 100, "H200", cpu=False) is None, "finished"
        assert at_its_own_speed(interrupted(1000.0), 600, "A100", cpu=False) is None, "another device"

    def test_damage(self, interrupted):
        folder = interrupted(1000.0)
        next((folder / "checkpoints").iterdir()).write_bytes(b"broken")
        assert at_its_own_speed(folder, 600, "H200", cpu=False) is None

    def test_the_budget_uses_it(self, go, interrupted):
        here = environment.facts(OPTIONS)["device"]
        interrupted(1000.0 + START / 10, device=here)
        (job,) = go(LONG, dry_run=True).jobs
        assert (job.seconds, job.done) == (pytest.approx(5000 + START / 10), pytest.approx(1 / 6))
        assert job.device == here
        assert "expected to take 5006 s" in go(LONG, budget_seconds=4000).left["tiny-long seed 0"]


def test_budgets():
    assert [parse_budget(t) for t in ("90s", "25m", "1h30m", "0.5h")] == [90, 1500, 5400, 1800]
    for text in ("", "m", "25", "25 minutes", "-3", "0", "0m", "0h0s", "nan", "5m3"):
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
    assert text.startswith("tiny-long: time over at step ")
    assert "the same command goes on" in text
    assert main("run", "tiny-longer", "--quiet") == (
        2,
        "cmcl: recipe must be a known name. Got 'tiny-longer'. Did you mean 'tiny-long'?\n",
    )
    code, text = main("campaign", "table1", "--dry-run", "--part", "1/2")
    assert text.count("minutes") == 3
    monkeypatch.setattr(sys, "argv", ["experiments", "status", "--results", str(tmp_path / "results")])
    assert __main__.main() == 0
    assert {row["id"] for row in json.loads(capsys.readouterr().out)} == {c.id for c in CELLS}
