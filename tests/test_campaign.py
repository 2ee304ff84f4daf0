"""The campaign: order, skipping, budget, resuming. On tiny networks and scikit-learn's digits."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cmcl
from cmcl.reproduction import CELLS, Cell, environment
from cmcl.reproduction import campaign as module
from cmcl.reproduction.campaign import Work, campaign, expected_seconds, parse_budget
from cmcl.reproduction.cells import BESIDE_PAPER, select, summarise
from cmcl.reproduction.recipes import DIGITS, OOD, RECIPES
from cmcl.reproduction.record import load_records
from cmcl.reproduction.runner import run, run_folder
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
def wanted(tmp_path):
    return Work((), tmp_path / "results", tmp_path / "runs", options=OPTIONS)


@pytest.fixture
def go(wanted):
    """A campaign in a folder of its own."""

    def start(*cells, seeds=(0,), root=None, **changes):
        return campaign(replace(wanted, cells=cells, seeds=seeds, root=root), **changes)

    return start


@pytest.fixture
def missing(wanted):
    """The jobs of such a campaign."""

    def jobs(*cells, seeds=(0,)):
        return replace(wanted, cells=cells, seeds=seeds).missing()

    return jobs


def names(report):
    return [record.name for record in report.records]


def test_what_is_done_is_not_done_again(go, missing, tmp_path):
    assert names(go(IE, MCL)) == ["tiny-ie", "tiny-mcl"]
    again = go(IE, MCL)
    assert again.jobs == again.records == []
    assert [job.seed for job in missing(IE, seeds=(0, 1, 2))] == [1, 2]
    assert {
        r["id"]: r["ours"]["top1"]["n"] for r in summarise([IE, MCL], load_records(tmp_path / "results"))
    } == {
        "test/tiny-ie": 1,
        "test/tiny-mcl": 1,
    }


def test_the_first_seed_of_everything_then_the_others(missing):
    jobs = missing(IE, MCL, seeds=(0, 1, 2))
    assert [(job.name, job.seed) for job in jobs] == [
        *(("tiny-ie", 0), ("tiny-mcl", 0)),
        *(("tiny-ie", 1), ("tiny-ie", 2), ("tiny-mcl", 1), ("tiny-mcl", 2)),
    ]


def test_what_another_process_did_meanwhile_is_not_done_again(go, tmp_path, monkeypatch):
    """Its records come while the first of ours trains: two of the others."""
    trained, lines = [], []

    def watched(name, seeds, **more):
        if not trained:
            run("tiny-mcl", (0,), **more | {"out": tmp_path / "others"})
            run("tiny-ie", (2,), **more | {"out": tmp_path / "others"})
        trained.append((name, *seeds))
        return run(name, seeds, **more)

    monkeypatch.setattr(module, "run", watched)
    report = go(IE, MCL, seeds=(0, 1, 2), say=lines.append)
    assert trained == [("tiny-ie", 0), ("tiny-ie", 1), ("tiny-mcl", 1), ("tiny-mcl", 2)]
    assert "tiny-mcl seed 0: has its record by now" in lines
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


def test_a_plan_writes_nothing(missing, tmp_path):
    (job,) = missing(IE)
    assert job.cells == ("test/tiny-ie",)
    assert job.seconds is None, "no record of this network on this device"
    assert not (tmp_path / "runs").exists()


def test_nothing_starts_that_cannot_be_expected_to_end(go, monkeypatch):
    monkeypatch.setattr(module, "expected_seconds", lambda recipe, *rest, **more: recipe.steps * 10.0)
    report = go(LONG, IE, budget_seconds=100)
    assert names(report) == ["tiny-ie"], "a shorter one still fits"
    assert [(job.name, job.seconds) for job in report.late] == [("tiny-long", 6000.0)]
    assert report.left == {"tiny-long seed 0": "no time left"}


def test_what_is_late_saves_itself_and_goes_on(go, missing):
    report = go(LONG, MCL, budget_seconds=0.2, unfinished=True)  # more than planning takes, less than LONG
    assert report.records == []
    assert list(report.left) == ["tiny-long seed 0"]
    assert report.progressed
    (job, _) = missing(LONG, MCL)
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
    assert isinstance(report.errors["cifar10-cnn-ie seed 0"], FileNotFoundError)
    assert list(report.left) == ["cifar10-cnn-ie seed 0"]
    assert names(report) == ["tiny-ie"]

    def stop(*rest, **more):
        raise cmcl.training.Interrupted(3, 9, "SIGINT")

    monkeypatch.setattr(module, "run", stop)
    assert go(MCL, LONG).left == {"tiny-mcl seed 0": "stopped by SIGINT"}


def test_killed_and_started_again(go, tmp_path):
    """A real process, killed without a warning once it has finished one cell."""
    recipes = {name: recipe.to_json() for name, recipe in TINIES.items()}
    code = f"""
import torch, cmcl
from cmcl.reproduction import Cell, RECIPES
from cmcl.reproduction.campaign import Work, campaign
torch.set_num_threads(1)
RECIPES |= {{name: cmcl.Recipe.from_json(values) for name, values in {recipes!r}.items()}}
RECIPES["tiny-long"] = __import__("dataclasses").replace(RECIPES["tiny-long"], steps=10**6)
cells = [Cell("test/" + name, name, ("test", name)) for name in ("tiny-ie", "tiny-long")]
options = cmcl.Options(device="cpu", quiet=True)
campaign(Work(cells, {str(tmp_path / "results")!r}, {str(tmp_path / "runs")!r}, options=options))
"""
    source = str(Path(__file__).parents[1] / "src")
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": source})
    records = tmp_path / "results" / "records"
    while not list(records.glob("*.json")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (first,) = records.glob("*.json")
    written = first.stat().st_mtime_ns
    assert names(go(IE, MCL)) == ["tiny-mcl"]
    assert first.stat().st_mtime_ns == written


def test_the_order(tmp_path):
    """VGGNet and GoogLeNet, Table 2 with M = 5, seeds of the headline, figure 4a, M = 10, then today's training."""
    words = ["all", "default", "modern"]
    jobs = Work(select(words), tmp_path, tmp_path, (0, 1, 2), options=OPTIONS).missing()
    order = [(job.name, job.seed) for job in jobs]
    assert len(set(order)) == len(order) == 3 * len({cell.name for cell in (*CELLS, *BESIDE_PAPER)})
    first = [
        ("cifar10-resnet20-ie", 0),
        ("svhn-resnet20-cmcl", 0),
        ("cifar10-cnn-ie", 0),
        ("cifar10-cnn-cmcl-sharing-sampled", 0),
        ("cifar10-cnn-cmcl-default", 0),
        ("cifar10-cnn-ie-adversarial", 0),
        ("icoseg-fcn-m5-cmcl", 0),
        ("cifar10-vggnet17-ie", 0),
        ("cifar10-googlenet18-cmcl", 0),
        ("svhn-vggnet17-cmcl", 0),
        ("svhn-googlenet18-cmcl", 0),
        ("cifar10-cnn-m5-cmcl-k4", 0),
        ("cifar10-resnet20-cmcl", 1),
        ("svhn-resnet20-ie", 2),
        ("cifar10-cnn-cmcl-default", 2),
        ("cifar10-resnet20-m10-cmcl", 0),
        ("cifar10-cnn-m10-cmcl-k4", 0),
        ("cifar10-resnet20-w8-modern-ie", 0),
        ("cifar10-cnn-mcl", 2),
        ("cifar10-resnet20-w8-modern-ie", 1),
    ]
    places = [order.index(job) for job in first]
    assert places == sorted(places)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU, as that of a scheduler")
def test_a_plan_for_devices_of_other_machines(tmp_path):
    work = Work([IE], tmp_path, tmp_path, options=cmcl.Options(device="cuda"))
    assert [job.device for job in work.missing()] == ["cuda"]


def test_parts_share_the_recipes_out(tmp_path):
    def part(*shard):
        return {job.name for job in Work(CELLS, tmp_path, tmp_path, shard=shard).missing()}

    parts = [part(i, 3) for i in (1, 2, 3)]
    assert set.union(*parts) == part(1, 1)
    assert sum(map(len, parts)) == len(part(1, 1))
    with pytest.raises(ValueError, match="between 1 and n. Got 0/3"):
        part(0, 3)


def test_expected_seconds_come_from_records_of_the_same_device():
    """64,000 steps of five members in 320 s: 1 ms per member and step."""
    record = made_record("cifar10-resnet20-ie", device="H200", steps=64_000, seconds=320.0)
    ie, mcl, svhn = (
        RECIPES[f"{name}-resnet20-{way}"]
        for name, way in (("cifar10", "ie"), ("cifar10", "mcl"), ("svhn", "mcl"))
    )
    assert expected_seconds(ie, [record], "H200") == pytest.approx(320.0)
    assert expected_seconds(mcl, [record], "H200") == pytest.approx(320.0)
    assert expected_seconds(svhn, [record], "H200") == pytest.approx(320.0 * 93_120 / 64_000)
    assert expected_seconds(changed(ie, members=10), [record], "H200") == pytest.approx(640.0)
    assert expected_seconds(ie, [record], "another") is None
    assert expected_seconds(RECIPES["cifar10-cnn-ie"], [record], "H200") is None, "another network"
    assert (
        expected_seconds(TINY, [changed(record, recipe=record.recipe | {"network": "cnn"})], "H200") is None
    )
    nearer = made_record("cifar10-resnet20-mcl", device="H200", steps=64_000, seconds=640.0)
    assert expected_seconds(mcl, [record, nearer], "H200") == pytest.approx(640.0), "its own recipe"
    large = changed(record, recipe=record.recipe | {"batch_size": 512}, recipe_hash="0" * 16, seconds=1000.0)
    alike = changed(mcl, batch_size=512)
    assert expected_seconds(alike, [nearer, large], "H200") == pytest.approx(1000.0), "its batch size first"
    slow = changed(record, seed=1, seconds=1000.0)  # it shared the device
    assert expected_seconds(ie, [record, slow], "H200") == pytest.approx(320.0)


def test_an_interrupted_run_counts_by_its_remaining_steps(go, missing, tmp_path):
    (record,) = go(IE).records
    folder = run_folder(tmp_path / "runs", "tiny-long", TINIES["tiny-long"], 0) / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-00000150-0123456789ab.safetensors").write_bytes(b"")
    (job,) = missing(LONG)
    assert (job.done, job.device) == (0.25, environment.current(OPTIONS)["device"])
    assert job.seconds == pytest.approx(record.seconds / 3 * 450, rel=1e-6)


def test_budgets():
    assert [parse_budget(t) for t in ("90s", "25m", "1h30m", "0.5h")] == [90, 1500, 5400, 1800]
    for text in ("", "m", "25", "25 minutes", "-3", "0", "0m", "0h0s", "nan", "5m3", "9" * 400 + "h"):
        with pytest.raises(ValueError, match="25m"):
            parse_budget(text)


@pytest.mark.slow
def test_a_queue_with_a_time_limit(tmp_path):
    """benchmarks/gpu_queue.py: what the time does not suffice for is done by the same command later."""
    root = Path(__file__).parents[1]
    script, source = root / "benchmarks" / "gpu_queue.py", os.environ | {"PYTHONPATH": str(root / "src")}
    what = ["digits-300-single", "digits-300-ie", "--seeds", "2", "--device", "cpu"]

    def queue(time):
        words = [sys.executable, str(script), time, *what]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=source).returncode

    assert queue("0.1s") == 3
    assert not (tmp_path / "results").exists()
    assert queue("1h") == 0
    assert len(load_records(tmp_path / "results")) == 4
    assert queue("1h") == 0, "nothing is missing"
