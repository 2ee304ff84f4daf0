"""Targets that count for nothing, and what scoring looks at before and after a run."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

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
        assert result.scores == [evaluate(ensemble, (tokens, tokens))]
        wrong = tokens.where(tokens != 255, 254)
        assert evaluate(ensemble, (tokens, wrong))["top1"] >= 80

    def test_any_value_can_be_named(self):
        """The same pixels count, so the same is learned and found, to the bit."""
        ours, theirs = pixels(), pixels()
        first = fit(ours, masks(255), recipe=PIXELS, test=masks(255), options=QUIET)
        named = {"ignore_index": -100}
        second = fit(theirs, masks(-100), recipe=PIXELS, test=masks(-100), options=QUIET, **named)
        assert identical(weights(ours), weights(theirs))
        assert first.scores == second.scores == [evaluate(theirs, masks(-100), **named)]

    @pytest.mark.parametrize("void", [-100, -1, 3])
    def test_others_are_refused_before_the_first_step(self, void):
        for train in (masks(void), DataLoader(TensorDataset(*masks(void)), 4)):
            ensemble = pixels()
            before = weights(ensemble)
            with pytest.raises(ValueError, match=r"targets must be between 0 and 2 .*ignore_index excludes"):
                fit(ensemble, train, recipe=PIXELS, options=QUIET)
            assert identical(weights(ensemble), before)

    def test_nothing_is_ignored_on_demand(self):
        with pytest.raises(ValueError, match="targets must be between 0 and 2 .*Got 0 to 255"):
            fit(pixels(), masks(255), recipe=PIXELS, ignore_index=None, options=QUIET)
        with pytest.raises(
            ValueError, match="ignore_index must be one of 'auto', None, 'a number'. Got 'non"
        ):
            fit(pixels(), masks(255), recipe=PIXELS, ignore_index="none", options=QUIET)

    def test_a_run_is_resumed_with_the_same(self, tmp_path):
        fit(pixels(), masks(0), recipe=PIXELS, out=tmp_path, options=QUIET)
        with pytest.raises(ValueError, match="data must be that of the run to be resumed"):
            fit(pixels(), masks(0), recipe=PIXELS, ignore_index=0, out=tmp_path, resume=True, options=QUIET)


def test_examples_without_a_label():
    """They add nothing, so without sharing of a batch it is as if they were not there."""
    images, targets = data()
    targets[::2] = -1
    ensemble = apart()
    result = fit(ensemble, (images, targets), recipe=LINEAR, test=(images, targets), ignore_index=-1)
    assert result.scores == [evaluate(ensemble, (images[1::2], targets[1::2]))]


def test_a_task_reads_integer_targets_of_any_shape():
    """Several labels at once: 0 or 1 for each class."""
    images, _ = data()
    labels = torch.randint(2, (len(images), CLASSES))

    def task(logits, targets):
        return F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none").mean(1)

    ours, theirs = apart(), apart()
    fit(ours, (images, labels), recipe=LINEAR, task=task, options=QUIET)
    fit(theirs, (images, labels.float()), recipe=LINEAR, task=task, options=QUIET)
    assert identical(weights(ours), weights(theirs))


class TestScoredLoaders:
    def test_are_looked_at_before_the_first_step(self, monkeypatch):
        monkeypatch.setattr(cmcl.engine.run.Run, "go", lambda *_: pytest.fail("it began to train"))
        images, targets = data()

        def refused(error, match, dataset):
            test = DataLoader(dataset, 8)
            with pytest.raises(error, match=match):
                fit(apart(), data(), recipe=LINEAR, test=test, options=QUIET)

        refused(ValueError, "test must fit .* between 0 and 3", TensorDataset(images, targets + 1))
        refused(ValueError, "test must hold at least one batch", TensorDataset(images[:0], targets[:0]))
        refused(TypeError, "batches of test must be .*Got dict", [{"x": x} for x in images])

    def test_go_on_as_if_nobody_had_looked(self):
        looked, alone = [], []
        for seen in (looked, alone):
            order = torch.Generator().manual_seed(3)
            test = DataLoader(TensorDataset(*data()), 8, shuffle=True, generator=order)
            if seen is looked:
                cmcl.engine.admission.check_scored("test", apart(), test)
            seen += [targets for _, targets in test]
        assert torch.equal(torch.cat(looked), torch.cat(alone))

    def test_scored_by_hand_they_are_told(self):
        with pytest.raises(ValueError, match="data must hold at least one batch"):
            evaluate(apart(), DataLoader(TensorDataset(*(t[:0] for t in data())), 8))
        with pytest.raises(TypeError, match="batches of data must be"):
            evaluate(apart(), DataLoader([{"x": x} for x in data()[0]], 8))


def test_what_was_learned_is_kept_when_scoring_fails(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no room for the answers")

    monkeypatch.setattr(cmcl.engine.run, "evaluate", broken)
    options = replace(QUIET, checkpoint_seconds=1e9)
    with pytest.raises(MemoryError):
        fit(apart(), data(), recipe=LINEAR, test=data(), out=tmp_path, options=options)
    assert list((tmp_path / "checkpoints").glob("step-00000010-*"))


def test_a_loader_that_ends_early_says_so():
    class Short(IterableDataset):
        def __len__(self):
            return 40

        def __iter__(self):
            return iter(list(zip(*data(), strict=True))[:20])

    with pytest.raises(ValueError, match="train must yield as many batches as its length says, 5. Got fewer"):
        fit(apart(), DataLoader(Short(), 8), recipe=LINEAR, options=QUIET)


def test_several_threads_may_ask_a_trained_ensemble():
    """Batch statistics and dropout would make each answer another one, and change the statistics."""
    images, targets = data()

    def network():
        layers = nn.Linear(25, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, CLASSES)
        return nn.Sequential(nn.Flatten(), *layers)

    ensemble = apart(network)
    fit(ensemble, (images, targets), recipe=LINEAR, options=QUIET)
    assert not any(module.training for module in ensemble.modules())
    alone = ensemble.predict(images).probs
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: ensemble.predict(images).probs, range(40)))
    assert all(torch.equal(answer, alone) for answer in answers)
