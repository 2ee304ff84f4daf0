"""Targets that count for nothing, and what scoring looks at before and after a run."""

import gc
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

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
            assert result.scores == [evaluate(ensemble, (images, targets), ignore_index=-1)]

    def test_a_run_can_be_recorded(self, tmp_path):
        images, targets = masks(-100)
        ensemble = pixels()
        named = {"ignore_index": -100}
        result = fit(
            ensemble, (images, targets), recipe=PIXELS, test=(images, targets), options=QUIET, **named
        )
        test = images.numpy(), targets.numpy()  # arrays will do
        record = cmcl.record(tmp_path, ensemble, test, recipe=PIXELS, result=result, **named)
        assert record.errors["expected"]["top1"] == pytest.approx(result.scores[0]["top1"])

    def test_a_run_is_resumed_with_the_same(self, tmp_path):
        fit(pixels(), masks(0), recipe=PIXELS, out=tmp_path, options=QUIET)
        with pytest.raises(ValueError, match="data must be that of the run to be resumed"):
            fit(pixels(), masks(0), recipe=PIXELS, ignore_index=0, out=tmp_path, resume=True, options=QUIET)


def test_examples_without_a_label():
    """They are scored as if they were not there."""
    images, targets = data()
    targets[::2] = -1
    ensemble = apart()
    result = fit(
        ensemble, (images, targets), recipe=LINEAR, test=(images, targets), ignore_index=-1, options=QUIET
    )
    assert result.scores == [evaluate(ensemble, (images[1::2], targets[1::2]))]


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
    monkeypatch.setattr(cmcl.engine.run.Run, "go", lambda *_: pytest.fail("it began to train"))
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
    for key in ("win_rates", "winners_entropy", "losers_entropy"):
        assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-5)
    assert sum(rows[1]["win_rates"]) == pytest.approx(1)


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

    @pytest.mark.parametrize("own", [False, True])
    def test_go_on_as_if_nobody_had_looked(self, own):
        looked, alone = [], []
        for seen in (looked, alone):
            order, examples = torch.Generator().manual_seed(3), TensorDataset(*data())
            sampler = RandomSampler(examples, num_samples=16, generator=order)
            how = {"sampler": sampler} if own else {"shuffle": True, "generator": order}
            test = DataLoader(examples, 8, **how)
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
    given = {"recipe": LINEAR, "seed": [0, 1], "test": data(), "options": options}
    torch.manual_seed(0)
    with pytest.raises(MemoryError):
        fit([apart(), apart()], data(), **given, out=tmp_path)
    assert list((tmp_path / "checkpoints").glob("step-00000010-*"))
    monkeypatch.undo()
    torch.manual_seed(0)
    whole = fit([apart(), apart()], data(), **given).rows
    kept = [json.loads(line) for line in (tmp_path / "telemetry.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["seed"], row["loss"]) for row in kept] == [
        (row["epoch"], row["seed"], row["loss"]) for row in whole
    ]


def test_what_was_learned_is_kept_when_telemetry_cannot_be_written(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(cmcl.engine.telemetry.Telemetry, "write", broken)
    with pytest.raises(OSError, match="gone"):
        fit(apart(), data(), recipe=LINEAR, out=tmp_path, options=replace(QUIET, checkpoint_seconds=1e9))
    assert list((tmp_path / "checkpoints").glob("step-00000005-*"))


def test_no_worker_outlives_the_run():
    train = DataLoader(TensorDataset(*data()), 8, num_workers=1)
    gc.disable()
    try:
        fit(apart(), train, recipe=LINEAR, options=QUIET)
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


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
