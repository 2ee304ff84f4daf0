"""`cmcl reproduce`: plans, status, time, searches; and `cmcl report` from what it leaves."""

import json
import re
from dataclasses import replace

import pytest
import torch

from cmcl.cli.reproduce import _hint
from cmcl.reproduction import CELLS, cells, find
from cmcl.reproduction.campaign import Job, Report
from cmcl.reproduction.cells import Cell, search, select
from cmcl.reproduction.recipes import BETAS, RECIPES

NO_GPU = "" if torch.cuda.is_available() else r" \(no GPU was found\)"
DIGITS = find("digits-ie")
TINY = replace(
    DIGITS,
    members=2,
    epochs=None,
    steps=2,
    subset=60,
    network_options=dict(DIGITS.network_options) | {"filters": [2, 4]},
)
CELL = Cell("table9/tiny-ie", "tiny-ie", ("table9", "ie"), {"oracle": 1.0, "top1": 2.0})


@pytest.fixture
def tiny(monkeypatch):
    """A paper with one cell."""
    monkeypatch.setitem(RECIPES, "tiny-ie", TINY)
    monkeypatch.setattr(cells, "CELLS", (CELL,))


@pytest.fixture
def reproduce(cmcl, tmp_path):
    """With the folders of this test."""
    folders = ["--out", tmp_path / "runs", "--results", tmp_path / "results"]
    return lambda *words: cmcl("reproduce", *words, *folders)


def test_a_dry_run_lists_cells_with_their_costs(reproduce):
    code, out, _ = reproduce("table1", "--dry-run", "--device", "cpu")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[1:6]] == [
        cell.name for cell in CELLS if cell.where[0] == "table1"
    ]
    assert lines[-1].startswith("5 runs, ")
    assert re.search(rf"5 of unknown time, on .*\d threads?{NO_GPU}\.$", lines[-1]), (
        "which device it would be"
    )
    code, out, _ = reproduce("table1", "--dry-run", "--json", "--seeds", 2)
    jobs = json.loads(out)
    assert code == 0
    assert [job["seed"] for job in jobs] == [0] * 5 + [1] * 5
    assert all(job["seconds"] is None for job in jobs), "no record of this device"


def test_parts(reproduce):
    parts = [json.loads(reproduce("all", "--dry-run", "--json", "--part", f"{i}/2")[1]) for i in (1, 2)]
    whole = json.loads(reproduce("all", "--dry-run", "--json")[1])
    names = [{job["name"] for job in part} for part in parts]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {job["name"] for job in whole}


def test_recipes_by_name(reproduce, tiny):
    """What is no cell of the paper, with seeds from any first one."""
    words = ("tiny-ie", "--quiet", "--seed", 5, "--device", "cpu", "--evaluate-every", 1, "--save-every", 0)
    code, out, _ = reproduce(*words, "--json")
    assert code == 0
    assert len(json.loads(out)["done"]) == 1
    assert json.loads(reproduce(*words, "--json")[1]) == {"done": [], "left": {}}
    assert [job["seed"] for job in json.loads(reproduce(*words, "--dry-run", "--seeds", 2, "--json")[1])] == [
        6
    ]


def test_status_of_every_cell(reproduce):
    code, out, _ = reproduce("--status", "--json")
    cells = json.loads(out)
    assert code == 0
    assert [cell["id"] for cell in cells] == [cell.id for cell in CELLS]
    resnet = next(cell for cell in cells if cell["id"] == "table3/cifar10-resnet20-cmcl")
    assert resnet["paper"] == {"oracle": 2.79, "top1": 8.75}
    assert resnet["ours"] is None
    assert len(json.loads(reproduce("table1", "--status", "--json")[1])) == 5


def test_train_then_nothing_is_missing(reproduce, tiny, tmp_path):
    code, out, _ = reproduce("table9", "--quiet", "--seeds", 2, "--device", "cpu")
    assert code == 0
    assert "tiny-ie seed 1: done" in out
    records = tmp_path / "results" / "records"
    written = {path: path.stat().st_mtime_ns for path in records.glob("*.json")}
    assert len(written) == 2
    code, out, _ = reproduce("table9", "--quiet", "--seeds", 2, "--json", "--device", "cpu")
    assert (code, json.loads(out)) == (0, {"done": [], "left": {}})
    assert written == {path: path.stat().st_mtime_ns for path in records.glob("*.json")}
    assert reproduce("table9", "--dry-run", "--seeds", 2)[1].strip().endswith("Nothing is missing.")
    (cell,) = json.loads(reproduce("--status", "--json")[1])
    assert cell["ours"]["top1"]["n"] == 2
    assert set(cell["ours"]["oracle"]) == {"mean", "std", "n"}
    code, out, _ = reproduce("--status")
    assert "1 of 1 cells have a record" in out
    assert " ± " in out


@pytest.mark.filterwarnings("default")  # shown, as to a user
def test_a_damaged_record(reproduce, tiny, tmp_path):
    reproduce("table9", "--quiet", "--seeds", 2, "--device", "cpu")
    (damaged,) = (tmp_path / "results" / "records").glob("*seed0.json")
    damaged.write_text(json.dumps(json.loads(damaged.read_text()) | {"errors": {}}))
    code, out, err = reproduce("--status", "--json")
    assert code == 0
    assert json.loads(out)[0]["ours"]["top1"]["n"] == 1, "the other one counts"
    assert err.startswith(f"cmcl: skipped: {damaged}: ")
    assert err.count("\n") == 1
    assert json.loads(reproduce("table9", "--dry-run", "--seeds", 2, "--json")[1])[0]["seed"] == 0


def test_ctrl_c_while_evaluating(reproduce, tiny, monkeypatch):
    def interrupt(*args, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cmcl.reproduction.runner.evaluate_run", interrupt)
        code, _, err = reproduce("table9", "--quiet", "--device", "cpu")
    assert (code, err.count("\n")) == (130, 1)
    assert "the same command resumes it" in err
    assert reproduce("table9", "--quiet", "--device", "cpu")[0] == 0


def test_what_failed_is_not_called_too_long():
    """One of a minute diverged, and there was no time for one of two hours."""
    short, long = Job("short", 0, (), 60.0, 0.0, "GPU"), Job("long", 0, (), 7200.0, 0.0, "GPU")
    report = Report([short, long], errors={"short seed 0": ValueError("diverged")}, late=[long])
    assert "the shortest is expected to take 2h" in _hint(report)
    assert report.left == {"long seed 0": "no time left", "short seed 0": "ValueError: diverged"}


def test_time_over(reproduce, tiny, monkeypatch):
    assert reproduce("table9", "--quiet", "--device", "cpu")[0] == 0  # its time per step is known then
    monkeypatch.setitem(RECIPES, "tiny-ie", replace(TINY, steps=10**6))
    code, out, err = reproduce("table9", "--quiet", "--budget", "1s", "--device", "cpu")
    assert code == 3
    assert "no time left" in out
    assert "the shortest is expected to take " in err
    assert "--unfinished" in err
    code, out, err = reproduce("table9", "--quiet", "--budget", "1s", "--unfinished", "--device", "cpu")
    assert code == 3
    assert "tiny-ie seed 0: started, expected to take" in out
    assert err.endswith("cmcl: time is over: the same command resumes it.\n")
    assert "resume=True" not in out + err
    assert json.loads(reproduce("table9", "--dry-run", "--json")[1])[0]["done"] > 0


class TestSearch:
    def test_cells(self):
        found = search(select(["table3"]))
        assert len(found) == 6, "three networks, two sets"
        assert {len(cells) for cells in found.values()} == {15}
        cell = found["svhn-resnet20-cmcl"][0]
        assert (cell.recipe.validation, cell.recipe.data) == (0.1, "svhn")
        on_test = search(select(["table3"]), on_test=True)["svhn-resnet20-cmcl"][0]
        assert on_test.recipe.validation == 0
        assert on_test.name.endswith("-chosen-on-test")

    def test_every_name_of_a_search_finds_its_recipe(self):
        from cmcl.reproduction import grid

        for validation in (0.1, 0.0):
            for name, recipe in grid("svhn-resnet20-cmcl", validation=validation).items():
                assert find(name) == recipe
        with pytest.raises(ValueError, match="must be a known name"):
            find("svhn-resnet21-cmcl-beta1-k2")

    def test_no_more_overlap_than_members(self):
        cells = search(select(["fig4bc"]))["icoseg-fcn-m3-cmcl"]
        assert {cell.recipe.overlap for cell in cells} == {2, 3}

    @pytest.mark.parametrize(("how", "on"), [("heldout", "validation"), ("test", "test")])
    def test_from_the_command(self, reproduce, tiny, monkeypatch, how, on):
        monkeypatch.setitem(RECIPES, "tiny-ie", replace(TINY, method="cmcl"))
        code, out, _ = reproduce("table9", "--search", how, "--dry-run", "--json")
        assert len(json.loads(out)) == len(BETAS), "K = 2 alone fits two members"
        code, out, _ = reproduce("table9", "--search", how, "--quiet", "--json", "--device", "cpu")
        found = json.loads(out)
        assert code == 0
        assert len(found["done"]) == 5
        choice = found["chosen"]["tiny-ie"]
        assert choice["chosen_on"] == on
        assert choice["beta"] in BETAS
        _, out, _ = reproduce("table9", "--search", how, "--quiet", "--device", "cpu")
        assert ("as the paper presumably did" in out) == (how == "test")
        assert f"cmcl train tiny-ie --beta {choice['beta']:g} --overlap 2" in out
