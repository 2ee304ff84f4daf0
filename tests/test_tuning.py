"""Successive halving keeps the right ones, and `tune` chooses by held-out data alone."""

import json
import math
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cmcl
from cmcl.report.load import load
from cmcl.reproduction import recipes, runner, tuning
from cmcl.reproduction.tuning import successive_halving, tune

needs_altair = pytest.mark.skipif(
    not (find_spec("altair") and find_spec("vl_convert")), reason="needs altair and vl-convert-python"
)
BASE = cmcl.Recipe(epochs=9, members=5)


def candidates(n):
    return {f"c{i}": replace(BASE, beta=1 + i) for i in range(n)}


def test_halving_by_hand():
    """Nine, then the best three, then one; three times as long each. The candidate's error is its beta."""
    calls = []

    def score(name, recipe):
        calls.append((name, recipe.epochs))
        return 10 - recipe.beta

    rungs = successive_halving(candidates(9), score)
    assert [rung.fraction for rung in rungs] == [1 / 9, 1 / 3, 1]
    assert [len(rung.errors) for rung in rungs] == [9, 3, 1]
    assert rungs[0].kept == ["c8", "c7", "c6"]
    assert rungs[-1].kept == ["c8"]
    assert calls[9:] == [("c8", 3), ("c7", 3), ("c6", 3), ("c8", 9)]


def test_a_late_bloomer_can_win_if_it_survives():
    """The choice is made by the last round, not by the first."""
    rungs = successive_halving(candidates(9), lambda name, recipe: abs(recipe.beta - recipe.epochs))
    assert rungs[0].kept == ["c0", "c1", "c2"]  # after 1 epoch, beta 1 is best
    assert rungs[1].kept == ["c2"]  # after 3, beta 3
    assert successive_halving(candidates(4), lambda *_: 7.0, eta=2)[-1].kept == ["c0"], "ties go to the first"


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(2, 5), st.randoms())
def test_the_best_wins_if_errors_do_not_depend_on_the_length(n, eta, random):
    errors = {f"c{i}": random.random() for i in range(n)}
    lengths = []

    def score(name, recipe):
        lengths.append(recipe.epochs)
        return errors[name]

    rungs = successive_halving(candidates(n), score, eta=eta)
    assert rungs[-1].kept == [min(errors, key=errors.get)]
    assert rungs[-1].fraction == 1
    assert len(rungs) == next(k for k in range(9) if eta ** (k + 1) > n) + 1
    assert sum(lengths) <= 9 * (math.log(n, eta) + 2) * eta, "a round costs little more than eta full runs"


def test_shortening_keeps_the_schedule_in_proportion():
    recipe = replace(BASE, epochs=None, steps=900, milestones=((300, 0.1), (0.5, 0.2)), warm_start=30)
    short = recipe.shortened(1 / 3)
    assert (short.steps, short.warm_start, short.milestones) == (300, 10, ((100, 0.1), (0.5, 0.2)))
    for step in (0, 99, 100, 149, 150, 299):
        assert short.lr_at(step, 300) == recipe.lr_at(3 * step, 900)
    assert recipe.shortened(1) is recipe
    assert replace(recipe, decay=0.5, decay_steps=9).shortened(1 / 3).decay_steps == 3
    assert replace(recipe, steps=2, milestones=()).shortened(1 / 9).steps == 1


@pytest.fixture
def tiny(monkeypatch):
    """Seconds instead of minutes."""
    network = recipes.DIGITS.network_options | {"filters": [2, 2]}
    recipe = replace(recipes.DIGITS, method="cmcl", members=2, epochs=0.6, network_options=network)
    monkeypatch.setitem(recipes.RECIPES, "tiny", recipe)
    return {"name": "tiny", "betas": [0.25, 0.5, 1.0], "overlaps": [1], "options": cmcl.Options(quiet=True)}


def test_tuning_digits(tiny, tmp_path, monkeypatch):
    lines = []
    result = tune(**tiny, out=tmp_path, say=lines.append)
    assert len(lines) == 3 + 1
    assert [rung["fraction"] for rung in result["rungs"]] == [pytest.approx(1 / 3), 1]
    first, last = (rung["rows"] for rung in result["rungs"])
    (kept,) = [row for row in first if row["kept"]]
    assert kept["held_out"] == min(row["held_out"] for row in first)
    assert result["chosen"] == kept["name"] == last[0]["name"]
    assert result["held_out"] == last[0]["held_out"]
    assert json.loads((Path(result["runs"][0]) / "record.json").read_text())["name"] == result["chosen"]
    assert json.loads((tmp_path / "tuning-tiny.json").read_text()) == result

    folders = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/record.json")}
    assert len(folders) == 4
    tested = [record for record in folders.values() if record["full_test"]]
    assert [record["name"] for record in tested] == [result["chosen"]], "one look at the test set"
    assert result["test"] == tested[0]["errors"]["expected"]["top1"]
    assert all(record["recipe"]["validation"] == 0.1 for record in folders.values())

    shown = load([tmp_path])
    assert [run.name for run in shown.runs] == [result["chosen"]]
    assert shown.excluded == 3

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

    def halve(candidates, *_, **__):
        raise ValueError({recipe.overlap for recipe in candidates.values()})

    monkeypatch.setattr(tuning, "successive_halving", halve)
    assert recipes.find("digits-cmcl").overlap > 2
    assert tune_command(cmcl, tmp_path, "members=2")[2] == "cmcl: {2}\n"


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
def test_a_figure_that_cannot_be_drawn_raises_before_the_search(name, tmp_path, cmcl, monkeypatch):
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.setattr(tuning, "tune", pytest.fail)
    code, _, err = cmcl("tune", "digits-cmcl", "--plot", tmp_path / name)
    assert code == 2
    assert name in err


def test_a_figure_without_altair_raises_before_the_search(tmp_path, cmcl, monkeypatch, without_altair):
    monkeypatch.setattr(tuning, "tune", pytest.fail)
    code, _, err = cmcl("tune", "digits-cmcl", "--plot", tmp_path / "tuning.svg")
    assert code == 2
    assert "pip install 'confident-mcl[report]'" in err


@pytest.mark.parametrize(
    ("count", "eta", "share"), [(8, 2, 1 / 8), (8, 3, 1 / 3), (9, 3, 1 / 9), (9, 2, 1 / 8)]
)
def test_the_first_rung(count, eta, share):
    """The power of eta up to the number of candidates: eta 2 may begin shorter or longer than eta 3."""
    few = candidates(count)

    def score(name, recipe):
        return recipe.beta

    assert successive_halving(few, score, eta=eta)[0].fraction == share
    (only,) = successive_halving(few, score, eta=count + 1)
    assert (only.fraction, only.kept) == (1, ["c0"]), "all in full"


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
    with pytest.raises(ValueError, match="at least one recipe. Got none."):
        successive_halving({}, lambda *_: 0.0)
