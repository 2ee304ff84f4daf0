"""A finished run is extended: the same as if it had been longer from the start, or a message that says why not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cmcl as package
from cmcl.training.checkpoint import last_step
from cmcl.training.config import LATER, Recipe

TRAIN = package.data.load("digits")[:200]
SHORT = Recipe(members=3, epochs=2, batch_size=64, lr=0.05, milestones=((5, 0.5),), decay=0.9, decay_steps=4)


def network():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.Dropout(0.1))


def fit(recipe, **how):
    torch.manual_seed(0)
    ensemble = package.Ensemble(network, 3)
    result = package.fit(ensemble, TRAIN, recipe=recipe, options=package.Options(quiet=True), **how)
    return ensemble, result


def test_an_extended_run_is_bit_for_bit_the_longer_one(tmp_path):
    fit(SHORT, out=tmp_path / "run")
    longer = replace(SHORT, epochs=4)
    extended, result = fit(longer, out=tmp_path / "run", resume=True)
    whole, whole_result = fit(longer)
    assert result.steps == whole_result.steps == 13
    for key, value in whole.state_dict().items():
        assert torch.equal(extended.state_dict()[key], value), key
    rows = [json.loads(line) for line in (tmp_path / "run" / "telemetry.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole_result.rows]
    _, result = fit(replace(SHORT, epochs=None, steps=13), out=tmp_path / "run", resume=True)
    assert result.steps == 13, "as long, in other words"
    with pytest.raises(ValueError, match="steps must be at least 13, those done. Got 7"):
        fit(SHORT, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "tied",
    [
        {"schedule": "cosine"},
        {"warmup": 0.1},
        {"milestones": ((0.5, 0.1),)},
        {"decay": 0.5, "decay_steps": None},
        {"evolve": 0.5},
        {"rule": "annealed"},
        {"ema": 0.1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_depends_on_the_length_cannot_be_extended(tmp_path, tied):
    short = replace(SHORT, **{"decay": 1.0} | tied)
    assert short.tied_to_length == [next(iter(tied))]
    fit(short, out=tmp_path / "run")
    with pytest.raises(ValueError, match=rf"Got {next(iter(tied))}=.*Train anew"):
        fit(replace(short, epochs=4), out=tmp_path / "run", resume=True)


def test_the_command(cmcl, mistake, tmp_path):
    words = ["train", "digits-ie", "--members", 2, "--subset", 100, "--out", tmp_path, "--quiet", "--json"]
    words += ["--set", "decay=1", "--epochs"]
    (short,) = json.loads(cmcl(*words, 2)[1])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    code, out, err = cmcl(*words, 4, "--resume")
    assert code == 0
    assert "extending digits-ie" in err
    (longer,) = json.loads(out)
    assert longer["run"] != short["run"]
    assert all(path.read_bytes() == content for path, content in before.items()), "the shorter run stays"
    assert (last_step(Path(short["run"])), last_step(Path(longer["run"]))) == (7, 13)
    other = [*words[:7], tmp_path / "other", *words[8:]]
    (anew,) = json.loads(cmcl(*other, 4)[1])
    same = {key for key in anew if anew[key] == longer[key]}
    assert same >= {"name", "top1", "oracle", "member", "ece"}
    assert "finished" in mistake(*words, 4)


def test_the_command_says_how_if_it_cannot(cmcl, mistake, tmp_path):
    words = ["train", "digits-ie", "--members", 2, "--subset", 100, "--out", tmp_path, "--quiet", "--epochs"]
    assert cmcl(*words, 1)[0] == 0
    err = mistake(*words, 2, "--resume")
    assert "Got decay=0.1" in err
    assert "without --resume" in err
    assert len(list(tmp_path.iterdir())) == 1


def test_a_longer_run_is_not_extended_by_a_shorter_one(cmcl, mistake, tmp_path):
    words = ["train", "digits-ie", "--members", 2, "--subset", 100, "--out", tmp_path, "--quiet"]
    words += ["--set", "decay=1"]
    assert cmcl(*words, "--steps", 4)[0] == 0
    assert "--resume must find a run to resume" in mistake(*words, "--steps", 2, "--resume")
    assert len(list(tmp_path.iterdir())) == 1, "no folder with the checkpoints of the longer run"


def test_fields_that_came_later_keep_the_hash_of_older_recipes():
    """Those of records in results/, which were made before there were such fields."""
    assert {name: getattr(Recipe, name) for name in LATER} == LATER, "defaults"
    for name in LATER:
        other = replace(SHORT, **{name: not LATER[name]})
        assert other.hash != SHORT.hash
