"""Targets that count for nothing."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cmcl
from cmcl import Ensemble, Recipe, evaluate, fit
from test_train import CLASSES, QUIET, data, identical, weights
from test_train_edges import LINEAR, apart

PIXELS = Recipe(members=2, epochs=2, batch_size=4, lr=0.1)


class Tagger(nn.Module):
    """A class for each token."""

    def __init__(self, classes):
        super().__init__()
        self.embed, self.answer = nn.Embedding(classes, 8), nn.Linear(8, classes)

    def forward(self, tokens):
        return self.answer(self.embed(tokens)).transpose(1, 2)


def masks(void):
    torch.manual_seed(0)
    images, targets = torch.randn(8, 1, 6, 6), torch.randint(3, (8, 6, 6))
    return images, targets.masked_fill(torch.rand(8, 6, 6) < 0.5, void)


def pixels():
    torch.manual_seed(1)
    return Ensemble(lambda: nn.Conv2d(1, 3, 1), 2)


class TestPixels:
    def test_255_is_a_class_where_there_are_so_many(self):
        tokens = torch.full((16, 5), 255)
        tokens[:, 0] = torch.arange(16)
        torch.manual_seed(0)
        ensemble = Ensemble(lambda: Tagger(300), 2)
        recipe = Recipe(method="ie", members=2, epochs=30, batch_size=8, optimizer="adam", lr=0.05)
        result = fit(ensemble, (tokens, tokens), recipe=recipe, test=(tokens, tokens), options=QUIET)
        assert (ensemble.predict(tokens).probs.argmax(1) == 255)[:, 1:].all()
        assert result.scores == evaluate(ensemble, (tokens, tokens))
        wrong = tokens.where(tokens != 255, 254)
        assert evaluate(ensemble, (tokens, wrong))["top1"] >= 80

    def test_any_value_can_be_named(self):
        """The same pixels count, so the same is learned and found, to the bit."""
        ours, theirs = pixels(), pixels()
        first = fit(ours, masks(255), recipe=PIXELS, test=masks(255), options=QUIET)
        named = {"ignore_index": -100}
        second = fit(theirs, masks(-100), recipe=PIXELS, test=masks(-100), options=QUIET, **named)
        assert identical(weights(ours), weights(theirs))
        assert first.scores == second.scores == evaluate(theirs, masks(-100), **named)

    @pytest.mark.parametrize("void", [-100, -1, 3])
    def test_others_are_refused_before_the_first_step(self, void):
        for train in (masks(void), DataLoader(TensorDataset(*masks(void)), 4)):
            ensemble = pixels()
            before = weights(ensemble)
            with pytest.raises(ValueError, match=r"targets must be between 0 and 2 .*ignore_index"):
                fit(ensemble, train, recipe=PIXELS, options=QUIET)
            assert identical(weights(ensemble), before)

    def test_nothing_is_ignored_on_demand(self):
        with pytest.raises(ValueError, match="targets must be between 0 and 2 .*Got 0 to 255"):
            fit(pixels(), masks(255), recipe=PIXELS, ignore_index=None, options=QUIET)

    @pytest.mark.parametrize(
        ("value", "error", "match"),
        [
            ("none", ValueError, "ignore_index must be a number, 'auto' or None. Got 'none'"),
            (2.5, TypeError, "ignore_index must be a whole number, or None. Got float 2.5"),
            (True, TypeError, "ignore_index must be a whole number, or None"),
        ],
    )
    def test_it_is_a_number(self, value, error, match):
        with pytest.raises(error, match=match):
            fit(pixels(), masks(255), recipe=PIXELS, ignore_index=value, options=QUIET)

    def test_it_is_a_number_that_targets_can_be(self):
        """As uint8, torch takes -100 for 156."""
        images, targets = masks(255)
        with pytest.raises(ValueError, match="0 to 255 for torch.uint8. Got -100; convert them"):
            fit(pixels(), (images, targets.byte()), recipe=PIXELS, ignore_index=-100, options=QUIET)
        logits = pixels()(images)
        with pytest.raises(ValueError, match="0 to 255 for torch.uint8. Got -100; convert them"):
            cmcl.confident_oracle_loss(logits, targets.byte(), ignore_index=-100)

    def test_images_without_a_pixel_that_counts(self):
        """They may come first, in what is learned and in what is scored."""
        images, targets = masks(-1)
        targets[:2] = -1
        test = DataLoader(TensorDataset(images, targets), 1)
        for scored in (test, (images, targets)):
            ensemble = pixels()
            result = fit(
                ensemble, (images, targets), recipe=PIXELS, test=scored, ignore_index=-1, options=QUIET
            )
            assert result.scores == evaluate(ensemble, (images, targets), ignore_index=-1)

    def test_a_run_can_be_recorded(self, tmp_path):
        images, targets = masks(-100)
        ensemble = pixels()
        named = {"ignore_index": -100}
        result = fit(
            ensemble, (images, targets), recipe=PIXELS, test=(images, targets), options=QUIET, **named
        )
        test = images.numpy(), targets.numpy()  # arrays will do
        record = cmcl.record(tmp_path, ensemble, test, recipe=PIXELS, result=result, **named)
        assert record.errors["expected"]["picked"] == pytest.approx(result.scores["picked"])

    def test_a_run_is_resumed_with_the_same(self, tmp_path):
        fit(pixels(), masks(0), recipe=PIXELS, out=tmp_path, options=QUIET)
        with pytest.raises(ValueError, match="data must be that of the run to resume"):
            fit(pixels(), masks(0), recipe=PIXELS, ignore_index=0, out=tmp_path, resume=True, options=QUIET)


def test_examples_without_a_label():
    """They are scored as if they were not there."""
    images, targets = data()
    targets[::2] = -1
    ensemble = apart()
    result = fit(
        ensemble, (images, targets), recipe=LINEAR, test=(images, targets), ignore_index=-1, options=QUIET
    )
    assert result.scores == evaluate(ensemble, (images[1::2], targets[1::2]))


@pytest.mark.parametrize("of_pixels", [False, True])
def test_a_task_reads_integer_targets_of_any_shape(of_pixels):
    """Several labels at once: 0 or 1 for each class."""
    build, recipe, images = (pixels, PIXELS, masks(0)[0]) if of_pixels else (apart, LINEAR, data()[0])
    ours, theirs = build(), build()
    labels = torch.randint(2, ours(images).shape[1:])

    def task(logits, targets):
        return F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none").mean(1)

    fit(ours, (images, labels), recipe=recipe, task=task, options=QUIET)
    fit(theirs, (images, labels.float()), recipe=recipe, task=task, options=QUIET)
    assert identical(weights(ours), weights(theirs))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
def test_targets_of_any_integer_type(dtype):
    images, targets = masks(0)
    ours, theirs = pixels(), pixels()
    fit(ours, (images, targets.to(dtype)), recipe=PIXELS, options=QUIET)
    fit(theirs, (images, targets), recipe=PIXELS, options=QUIET)
    assert identical(weights(ours), weights(theirs))


class TestRecorded:
    def test_data_sets_have_a_value_of_their_own(self, tmp_path):
        images, targets = masks(0)
        ensemble, given = pixels(), {"recipe": PIXELS, "ignore_index": 0}
        result = fit(ensemble, (images, targets), **given, options=QUIET)
        with pytest.raises(TypeError, match="test must be .* for ignore_index. Got a Dataset"):
            cmcl.record(tmp_path, ensemble, cmcl.data.from_arrays(images, targets), result=result, **given)

    def test_where_255_is_a_class_nothing_can_be_ignored(self, tmp_path):
        images, targets = masks(-1)
        ensemble, given = Ensemble(lambda: nn.Conv2d(1, 300, 1), 2), {"recipe": PIXELS, "ignore_index": -1}
        result = fit(ensemble, (images, targets), **given, options=QUIET)
        with pytest.raises(ValueError, match="classes must be at most 255 .*Got 300"):
            cmcl.record(tmp_path, ensemble, (images, targets), result=result, **given)


def test_nothing_to_score_is_told_before_the_first_step(monkeypatch):
    monkeypatch.setattr(cmcl.training.loop, "TrainState", lambda *_: pytest.fail("it began to train"))
    images, targets = masks(-1)
    given = {"recipe": PIXELS, "ignore_index": -1, "options": QUIET}
    with pytest.raises(ValueError, match="test must fit .*must hold more than ignore_index"):
        fit(pixels(), (images, targets), test=(images, torch.full_like(targets, -1)), **given)
    images, targets = data()
    wrong = targets.clone()
    wrong[3], wrong[5] = 77, 255  # the highest of those that count is wrong
    with pytest.raises(ValueError, match="test must fit .*Got 0 to 77"):
        fit(apart(), (images, targets), test=(images, wrong), recipe=LINEAR, ignore_index=255)
    wrong[3] = 0
    with pytest.raises(ValueError, match="test must fit .*Got 0 to 255"):  # of images it is a label
        fit(apart(), (images, targets), test=(images, wrong), recipe=LINEAR)


@pytest.mark.parametrize("batch", [1, None])
def test_nobody_wins_what_counts_for_nothing(batch):
    """With everything else as it is, win rates and entropies are those of the examples that count."""
    images, targets = data()
    recipe = replace(LINEAR, members=3, epochs=1, lr=1e-12)
    rows = []
    for hidden in (0, 30):
        torch.manual_seed(0)
        ensemble = Ensemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(25, CLASSES)), 3)
        void = torch.cat([targets, targets.new_full((hidden,), -1)])
        more = torch.cat([images, images[:hidden]])
        one = replace(recipe, batch_size=batch or len(more))
        rows += fit(ensemble, (more, void), recipe=one, ignore_index=-1, options=QUIET).rows
    for key in ("specialist_fraction", "specialist_entropy", "nonspecialist_entropy"):
        assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-5)
    assert sum(rows[1]["specialist_fraction"]) == pytest.approx(2)
