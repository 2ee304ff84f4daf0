"""Optuna's pruner keeps the right ones, and `tune` chooses by held-out data alone."""

import json
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import cmcl
from cmcl.report.load import load
from cmcl.reproduction import recipes, runner
from cmcl.training.checkpoint import FolderInUseError

optuna = pytest.importorskip("optuna")
tuning = pytest.importorskip("cmcl.reproduction.tuning")
fractions, tune = tuning.fractions, tuning.tune
needs_altair = pytest.mark.skipif(
    not (find_spec("altair") and find_spec("vl_convert")), reason="needs altair and vl-convert-python"
)
BASE = cmcl.Recipe(epochs=9, members=5)


def test_fractions_by_hand():
    """Powers of eta up to the number of candidates: one candidate of a round goes to the next."""
    assert fractions(9, 3) == [1 / 9, 1 / 3, 1]
    assert fractions(8, 3) == fractions(3, 3) == [1 / 3, 1]
    assert fractions(9, 2) == fractions(8, 2) == [1 / 8, 1 / 4, 1 / 2, 1]
    assert fractions(1, 3) == fractions(8, 9) == [1], "all in full"


def test_shortening_keeps_the_schedule_in_proportion():
    recipe = replace(BASE, epochs=None, steps=900, milestones=((300, 0.1), (0.5, 0.2)), warm_start=30)
    short = recipe.shortened(1 / 3)
    assert (short.steps, short.warm_start, short.milestones) == (300, 10, ((100, 0.1), (0.5, 0.2)))
    for step in (0, 99, 100, 149, 150, 299):
        assert short.lr_at(step, 300) == recipe.lr_at(3 * step, 900)
    assert recipe.shortened(1) is recipe
    assert replace(BASE, epochs=6).shortened(1 / 3).epochs == 2
    assert replace(recipe, decay=0.5, decay_steps=9).shortened(1 / 3).decay_steps == 3
    assert replace(recipe, steps=2, milestones=()).shortened(1 / 9).steps == 1


@pytest.fixture
def tiny(monkeypatch):
    """Seconds instead of minutes."""
    network = recipes.DIGITS.network_options | {"filters": [2, 2]}
    recipe = replace(recipes.DIGITS, method="cmcl", members=2, epochs=0.6, network_options=network)
    monkeypatch.setitem(recipes.RECIPES, "tiny", recipe)
    return {"name": "tiny", "betas": [0.25, 0.5, 1.0], "overlaps": [1], "options": cmcl.Options(quiet=True)}


def told(monkeypatch, errors):
    """Candidates whose held-out error is known by their beta; the calls (candidate, epochs)."""
    calls = []

    def held_out(name, recipe, seeds, shared):
        calls.append((name, recipe.epochs))
        error = errors[recipe.beta]
        if isinstance(error, BaseException):
            errors[recipe.beta] = 70.0
            raise error
        return error

    monkeypatch.setattr(tuning, "_held_out", held_out)
    return calls


def test_the_pruner_by_hand(tiny, tmp_path, monkeypatch):
    """Eta 3: the first goes on, and then who is among the best third of those so far (or the best of two)."""
    errors = dict(zip((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), (50.0, 60.0, 40.0, 45.0, 30.0, 44.0), strict=True))
    calls = told(monkeypatch, errors)
    result = tune(**tiny | {"betas": list(errors)}, out=tmp_path)
    short, full = 0.6 * (1 / 3), 0.6
    assert [(name.removeprefix("tiny-beta")[0], epochs) for name, epochs in calls] == [
        *(("1", short), ("1", full), ("2", short), ("3", short), ("3", full), ("4", short)),
        *(("5", short), ("5", full), ("6", short)),
    ]
    assert (result["beta"], result["held_out"]) == (5.0, 30.0)
    first, last = result["rungs"]
    assert [row["beta"] for row in first["rows"]] == list(errors)
    assert [row["beta"] for row in first["rows"] if row["kept"]] == [1, 3, 5]
    assert [(row["beta"], row["kept"]) for row in last["rows"]] == [(1, False), (3, False), (5, True)]
    study = optuna.load_study(study_name=result["study"], storage=f"sqlite:///{tmp_path}/tuning-tiny.db")
    assert [trial.params for trial in study.trials] == [{"beta": b, "overlap": 1} for b in errors]
    assert study.best_value == 30.0


def test_ties_go_to_the_first(tiny, tmp_path, monkeypatch):
    told(monkeypatch, dict.fromkeys((1.0, 0.5, 2.0), 50.0))
    assert tune(**tiny | {"betas": [1.0, 0.5, 2.0], "eta": 9}, out=tmp_path)["beta"] == 1.0


def test_one_that_diverges_is_not_chosen(tiny, tmp_path, monkeypatch):
    told(monkeypatch, {1.0: cmcl.Diverged("loss is NaN"), 2.0: 60.0})
    assert tune(**tiny | {"betas": [1.0, 2.0]}, out=tmp_path)["beta"] == 2.0
    told(monkeypatch, {3.0: cmcl.Diverged("loss is NaN")})
    with pytest.raises(ValueError, match="Got none: all diverged. Lower lr."):
        tune(**tiny | {"betas": [3.0]}, out=tmp_path)


@pytest.mark.parametrize("stop", [cmcl.Interrupted(3, 9, "SIGTERM"), KeyboardInterrupt(), OSError("full")])
def test_an_interrupted_candidate_is_trained_when_the_search_resumes(tiny, tmp_path, monkeypatch, stop):
    calls = told(monkeypatch, {1.0: 60.0, 2.0: stop, 4.0: 80.0})
    changed = tiny | {"betas": [1.0, 2.0, 4.0], "eta": 5}
    with pytest.raises(type(stop)):
        tune(**changed, out=tmp_path)
    assert tune(**changed, out=tmp_path)["beta"] == 1.0
    assert [name.removeprefix("tiny-beta")[0] for name, _ in calls] == ["1", "2", "4", "2"]
    again = tune(**changed, out=tmp_path)
    assert len(calls) == 4
    assert [row["held_out"] for row in again["rungs"][0]["rows"]] == [60, 70, 80]


def test_a_candidate_whose_folder_is_in_use_comes_back(tiny, tmp_path, monkeypatch):
    """By a worker that was silent for so long that another took its candidate."""
    monkeypatch.setattr(tuning, "GRACE", 1)
    calls = told(monkeypatch, {1.0: FolderInUseError("in use"), 2.0: 80.0})
    assert tune(**tiny | {"betas": [1.0, 2.0], "eta": 5}, out=tmp_path)["beta"] == 1.0
    assert [name.removeprefix("tiny-beta")[0] for name, _ in calls] == ["1", "2", "1"]


def test_a_killed_workers_candidate_comes_back(tiny, tmp_path, monkeypatch):
    """A trial that is running without a heartbeat, as SIGKILL leaves it; and one of a worker that lives."""
    calls = told(monkeypatch, dict.fromkeys((1.0, 2.0), 60.0))
    changed = tiny | {"betas": [1.0, 2.0], "eta": 5}
    monkeypatch.setattr(tuning, "HEARTBEAT", 1)
    monkeypatch.setattr(tuning, "GRACE", 3)
    monkeypatch.setattr(tuning, "POLL", 0.2)
    work = tuning._work

    def killed(study, objective, say):
        with pytest.warns(UserWarning, match="Heartbeat"):
            trial = study.ask()
        study._storage.record_heartbeat(trial._trial_id)
        work(study, objective, say)

    monkeypatch.setattr(tuning, "_work", killed)
    lines = []
    assert tune(**changed, out=tmp_path, say=lines.append)["beta"] == 1.0
    assert [name.removeprefix("tiny-beta")[0] for name, _ in calls] == ["2", "1"]
    assert "waiting for other workers, or for 3 s if they were killed: tiny-beta1-k1" in lines


def test_another_search_is_another_study(tiny, tmp_path, monkeypatch):
    told(monkeypatch, {1.0: 60.0, 2.0: 50.0})
    one = tune(**tiny | {"betas": [1.0]}, out=tmp_path)
    two = tune(**tiny | {"betas": [1.0, 2.0]}, out=tmp_path)
    assert one["study"] != two["study"]
    assert (one["beta"], two["beta"]) == (1.0, 2.0)


def test_tuning_digits(tiny, tmp_path, monkeypatch):
    lines = []
    result = tune(**tiny, out=tmp_path, say=lines.append)
    assert [rung["fraction"] for rung in result["rungs"]] == [pytest.approx(1 / 3), 1]
    first, last = (rung["rows"] for rung in result["rungs"])
    assert len(lines) == len(first) + len(last)
    assert len(first) == 3
    assert [row["name"] for row in first if row["kept"]] == [row["name"] for row in last]
    (chosen,) = [row for row in last if row["kept"]]
    assert chosen["held_out"] == min(row["held_out"] for row in last) == result["held_out"]
    assert result["chosen"] == chosen["name"]
    assert json.loads((Path(result["runs"][0]) / "record.json").read_text())["name"] == result["chosen"]
    assert json.loads((tmp_path / "tuning-tiny.json").read_text()) == result

    folders = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/record.json")}
    assert len(folders) == 3 + len(last)
    tested = [record for record in folders.values() if record["full_test"]]
    assert [record["name"] for record in tested] == [result["chosen"]], "one look at the test set"
    assert result["test"] == tested[0]["errors"]["expected"]["top1"]
    assert all(record["recipe"]["validation"] == 0.1 for record in folders.values())

    shown = load([tmp_path])
    assert [run.name for run in shown.runs] == [result["chosen"]]
    assert shown.excluded == len(folders) - 1

    fits = []
    fit = runner.fit
    monkeypatch.setattr(runner, "fit", lambda *a, **k: fits.append(k["recipe"]) or fit(*a, **k))
    assert tune(**tiny, out=tmp_path) == result
    assert [recipe.beta for recipe in fits] == [result["beta"]], "finished candidates are only read"


@needs_altair
def test_the_command(tiny, tmp_path, cmcl):
    words = ("tune", "tiny", "--betas", "0.25,0.5", "--overlaps", "1", "--out", tmp_path, "--device", "cpu")
    code, out, err = cmcl(*words, "--plot", tmp_path / "tuning.svg")
    assert code == 0
    assert "chosen: beta 0." in out
    assert err.count("held-out top-1") == 2
    assert (tmp_path / "tuning.svg").exists()
    code, out, err = cmcl(*words, "--json", "--quiet")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "tuning-tiny.json").read_text())


def test_a_recipe_changed_and_what_to_do_next(tiny, tmp_path, cmcl, monkeypatch):
    """The command that it ends with trains the chosen one on all data."""
    words = ("--out", tmp_path, "--device", "cpu", "--set", "epochs=0.3", "--set", "network_options.kernel=1")
    code, out, _ = cmcl("tune", "tiny", "--betas", "0.25", "--overlaps", "2", *words)
    assert code == 0
    *_, chosen, folder, command = out.splitlines()
    assert chosen.startswith("chosen: beta 0.25, K 2; test error")
    result = json.loads((tmp_path / "tuning-tiny-kernel1-epochs0.3.json").read_text())
    assert folder == f"trained without the 10% held out: {result['runs'][0]}"
    searched = json.loads((Path(result["runs"][0]) / "recipe.json").read_text())
    assert (searched["epochs"], searched["network_options"]["kernel"]) == (0.3, 1)
    words = shlex.split(command.removeprefix("to train it on all data: "))
    assert words[0] == "cmcl"
    code, out, _ = cmcl(*words[1:], "--json", "--quiet")
    assert code == 0
    trained = json.loads((Path(json.loads(out)[0]["run"]) / "recipe.json").read_text())
    assert trained == searched | {"validation": 0.0}


def test_fewer_members_than_the_recipes_own_overlap(cmcl, tmp_path, monkeypatch):
    """K is searched, so the recipe's own is in nobody's way."""
    monkeypatch.setitem(recipes.RECIPES, "digits-cmcl", replace(recipes.find("digits-cmcl"), overlap=3))

    def study(name, url, eta, lock):
        raise ValueError(name)

    monkeypatch.setattr(tuning, "_study", study)
    assert tune_command(cmcl, tmp_path, "members=2")[2].startswith("cmcl: digits-cmcl-members2-")


def tune_command(cmcl, out, *settings):
    return cmcl("tune", "digits-cmcl", "--out", out, *(word for one in settings for word in ("--set", one)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("beta=1", "--set must name a field that is not searched. Got beta. Use --betas."),
        ("validation=0", "Got validation. Use --validation."),
        ("epoch=3", "Recipe has no field 'epoch'. Did you mean 'epochs'?"),
        ("method=ie", "recipe must be a CMCL one"),
        ("data=arrays", "name must be a known dataset. Got 'arrays'"),
    ],
)
def test_what_cannot_be_set(cmcl, tmp_path, setting, message):
    code, out, err = tune_command(cmcl, tmp_path, setting)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_of_the_papers_overlaps_those_that_can_be(monkeypatch):
    few = replace(recipes.RECIPES["digits-cmcl"], members=3)
    monkeypatch.setitem(recipes.RECIPES, "few", few)
    assert recipes.OVERLAPS == (2, 3, 4)
    assert {recipe.overlap for recipe in recipes.grid("few").values()} == {2, 3}


def test_numbers_on_the_command_line(cmcl):
    code, _, err = cmcl("tune", "digits-cmcl", "--betas", "0.5;1")
    assert (code, err) == (2, "cmcl: --betas must be numbers with commas, such as 0.5,0.75. Got '0.5;1'.\n")


@needs_altair
@pytest.mark.parametrize("name", ["tuning.gif", "folder.svg"])
def test_a_figure_that_cannot_be_drawn_raises_before_the_search(name, tmp_path, mistake, monkeypatch):
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.setattr(tuning, "tune", pytest.fail)
    assert name in mistake("tune", "digits-cmcl", "--plot", tmp_path / name)


def test_without_optuna(tmp_path, cmcl, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "cmcl.reproduction.tuning")
    monkeypatch.delattr("cmcl.reproduction.tuning")
    code, _, err = tune_command(cmcl, tmp_path)
    message = "this needs optuna. Install it with: pip install 'confident-mcl[tune]'."
    assert (code, err) == (2, f"cmcl: {message}\n")


def test_a_figure_without_altair_raises_before_the_search(tmp_path, mistake, monkeypatch, without_altair):
    monkeypatch.setattr(tuning, "tune", pytest.fail)
    err = mistake("tune", "digits-cmcl", "--plot", tmp_path / "tuning.svg")
    assert "pip install 'confident-mcl[report]'" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "digits-ie"}, r"must be a CMCL one.* Got 'digits-ie' \(ie\)"),
        ({"name": "digit-cmcl"}, "Did you mean 'digits-cmcl'"),
        ({"validation": 0}, "validation must be above 0 and below 1, to choose by. Got 0."),
        ({"overlaps": [1, 9]}, r"overlaps must be between 1 and 5 .* Got \[1, 9\]."),
        ({"overlaps": [0, 1]}, r"overlaps .* Got \[0, 1\]."),
        ({"overlaps": []}, r"overlaps .* Got \[\]."),
        ({"eta": 1}, "eta must be 2 or more. Got 1."),
    ],
)
def test_errors(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tune(**{"name": "digits-cmcl", "out": tmp_path} | change)
