"""Whatever the recipe: a run stopped anywhere ends as the whole one."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cmcl import Ensemble, Options, Recipe, fit
from cmcl.training import Interrupted
from test_train import before_step, data, identical, interrupt, told, weights

pytestmark = pytest.mark.filterwarnings("ignore:the run ends in its warm start", "ignore:.*under a tenth")


def network():
    stem = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(stem, nn.Flatten(), nn.Linear(27, 4))


@st.composite
def recipes(draw):
    members = draw(st.integers(1, 3))
    sharing = members > 1 and draw(st.booleans())
    length = draw(
        st.sampled_from([{"epochs": 2}, {"epochs": 2.5}, {"epochs": 4}, {"steps": 1}, {"steps": 11}])
    )
    return Recipe(
        members=members,
        overlap=draw(st.integers(1, members)),
        method=draw(st.sampled_from(["ie", "mcl", "cmcl"])),
        labels=draw(st.sampled_from(["exact", "sampled"])),
        samples=draw(st.sampled_from([1, 3])),
        sharing=sharing,
        adversarial=0.0 if sharing else draw(st.sampled_from([0.0, 0.1])),
        warm_start=draw(st.sampled_from([0, 0, 1, 9])),
        batch_size=draw(st.sampled_from([4, 12, 64])),
        accumulate=draw(st.sampled_from([1, 2, 4])),
        optimizer=draw(st.sampled_from(["sgd", "adam", "adamw", "muon"])),
        lr=0.02,
        milestones=draw(st.sampled_from([(), ((3, 0.5), (0.5, 0.1))])),
        clip_norm=draw(st.sampled_from([None, 0.5])),
        **length,
    )


@settings(max_examples=30, deadline=None)
@given(
    recipe=recipes(),
    examples=st.sampled_from([5, 13, 40]),
    seed=st.integers(0, 9),
    loader=st.booleans(),
    stops=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    every=st.integers(0, 2),
)
def test_stopped_and_resumed_as_whole(recipe, examples, seed, loader, stops, every):
    loader = loader and not recipe.adversarial

    def train():
        both = data(examples)
        return DataLoader(TensorDataset(*both), recipe.batch_size, shuffle=True) if loader else both

    def go(first, *, out, resume=False, seconds=60.0):
        """An ensemble with weights from the seed `first`, trained; a resumed run has its own."""
        torch.manual_seed(first)
        ensemble = Ensemble(network, recipe.members, share_after="0" if recipe.sharing else None)
        options = Options(quiet=True, device="cpu", evaluate_every=every, checkpoint_seconds=seconds)
        test = data(20, seed=5)
        result = fit(
            ensemble, train(), recipe=recipe, seed=seed, test=test, out=out, resume=resume, options=options
        )
        return weights(ensemble), result

    with tempfile.TemporaryDirectory() as name:
        whole, parts = Path(name, "whole"), Path(name, "parts")
        expected, result = go(0, out=whole)
        for number, stop in enumerate(stops):
            try:
                with before_step(stop, interrupt):
                    go(50 if number else 0, out=parts, resume=number > 0, seconds=0.0 if stop % 2 else 60.0)
            except Interrupted:
                continue
        found, resumed = go(70, out=parts, resume=True)
        assert identical(found, expected)
        assert told(parts) == told(whole)
        assert (resumed.scores, resumed.steps) == (result.scores, result.steps)
