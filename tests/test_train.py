"""The loop: what it trains, tells, saves and finds again; every way to stop and go on gives the same weights.

M members, N examples, B batch.
"""

import itertools
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cmcl
from cmcl import Ensemble, Options, Recipe, evaluate, fit
from cmcl._files import DiskFullError
from cmcl.data import Dataset
from cmcl.pretrained import SharedStemEnsemble
from cmcl.training import Diverged, Interrupted
from cmcl.training import step as engine_step
from cmcl.training.checkpoint import Checkpoints, FolderInUseError, locked
from cmcl.training.preflight import fitting
from cmcl.training.step import TrainState

ROOT = Path(__file__).parents[1]
N, B, M, CLASSES = 40, 8, 3, 4  # 5 steps an epoch
RECIPE = Recipe(members=M, overlap=2, labels="sampled", sharing=True, epochs=4, batch_size=B, lr=0.05)
QUIET = Options(quiet=True)
ALWAYS = Options(quiet=True, checkpoint_seconds=0.0)  # a checkpoint after every step


class Small(nn.Module):
    """Convolution, batch normalisation, dropout, fully connected; cut into stem and trunk."""

    poison = None  # (step, value): what the trunk multiplies its input with at that step of training

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU())
        self.head = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.3), nn.Linear(27, CLASSES))
        self.steps = 0

    def stem(self, x):
        return self.front(x)

    def trunk(self, h):
        self.steps += self.training
        if self.poison and self.training and self.steps == self.poison[0] + 1:
            h = h * self.poison[1]
        return self.head(h)

    def forward(self, x):
        return self.trunk(self.stem(x))


def small(seed=0, network=Small):
    torch.manual_seed(seed)
    return Ensemble(network, M, share_after="stem")


def data(n=N, seed=99):
    """Images whose first pixels tell the class."""
    generator = torch.Generator().manual_seed(seed)
    images, targets = torch.randn(n, 1, 5, 5, generator=generator), torch.arange(n) % CLASSES
    images[torch.arange(n), 0, targets, targets] += 3.0
    return images, targets


def weights(ensemble):
    return {key: value.clone() for key, value in ensemble.state_dict().items()}


def identical(ours, theirs):
    return ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)


def told(folder):
    """The rows of a run, but for what depends on the clock."""
    path = folder / "telemetry.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        assert row.pop("images_per_second") > 0
    return rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: (weights, rows)."""
    folder = tmp_path_factory.mktemp("whole")
    ensemble = small()
    fit(ensemble, data(), recipe=RECIPE, seed=2, out=folder, options=QUIET, test=data(20, seed=5))
    return weights(ensemble), told(folder)


def go(folder, *, resume=False, ensemble=None, recipe=RECIPE, seed=2, options=QUIET, train=None):
    """The same run as `whole`, or a part of it; returns the ensemble."""
    ensemble = ensemble or small(7)  # other weights: a resumed run must bring its own
    fit(
        ensemble,
        train or data(),
        recipe=recipe,
        seed=seed,
        out=folder,
        resume=resume,
        options=options,
        test=data(20, seed=5),
    )
    return ensemble


def interrupt():
    signal.raise_signal(signal.SIGINT)


@contextmanager
def before_step(number, act):
    """Call `act` when so many steps of the next run are done."""
    call, count = engine_step.Step.__call__, itertools.count()

    def counted(self):
        if next(count) == number:
            act()
        call(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_step.Step, "__call__", counted)
        yield


class TestRows:
    def test_one_an_epoch(self, tmp_path):
        result = fit(small(), data(), recipe=RECIPE, seed=5, out=tmp_path, options=QUIET)
        rows = told(tmp_path)
        assert [(row["epoch"], row["step"], row["seed"]) for row in rows] == [
            (epoch, 5 * epoch, 5) for epoch in (1, 2, 3, 4)
        ]
        assert [row["loss"] for row in result.rows] == [row["loss"] for row in rows]
        assert "loss" not in repr(result), "a person who prints it is not to read all of the telemetry"
        assert result.steps == 20
        assert result.seconds > 0

    @pytest.mark.parametrize("changes", [dict(), dict(overlap=1), dict(method="ie"), dict(method="mcl")])
    def test_they_add_up(self, changes):
        recipe = replace(RECIPE, labels="exact", **changes)
        k = recipe.objective["overlap"]
        beta = recipe.objective["beta"]
        for row in fit(small(), data(), recipe=recipe, options=QUIET).rows:
            assert sum(row["specialist_fraction"]) == pytest.approx(k)
            for column in zip(*row["specialist_fraction_by_class"], strict=True):
                assert sum(column) == pytest.approx(k)
            assert len(row["specialist_fraction_by_class"][0]) == CLASSES
            # classes are as many here, so that the mean over them is the overall rate
            for rate, by_class in zip(
                row["specialist_fraction"], row["specialist_fraction_by_class"], strict=True
            ):
                assert rate == pytest.approx(sum(by_class) / CLASSES)
            assert row["loss"] == pytest.approx(row["task"] + beta * row["kl"], rel=1e-5)
            assert 0 < row["specialist_entropy"] <= math.log(CLASSES)
            assert (row["nonspecialist_entropy"] == 0) == (k == M)
            assert row["gradient_norm"] > 0

    def test_against_one_step_by_hand(self):
        """A single batch, so that everything can be worked out from the logits before it."""
        ensemble, (images, targets) = small(), data(B)
        ensemble.share_prob = 0.0
        for member in ensemble.members:
            member.head[2].p = 0.0
        with torch.no_grad():
            loss = cmcl.confident_oracle_loss(ensemble.train()(images), targets, overlap=2)
            entropy = cmcl.metrics.entropy(ensemble(images).softmax(2))
        recipe = replace(RECIPE, steps=1, epochs=None, labels="exact", share_prob=0.0)
        (row,) = fit(ensemble, (images, targets), recipe=recipe, options=QUIET).rows
        assert row["loss"] == pytest.approx(loss.total.item(), rel=1e-5)
        assert row["specialist_fraction"] == pytest.approx(loss.assignment.float().mean(1).tolist())
        assert row["specialist_entropy"] == pytest.approx(entropy[loss.assignment].mean().item(), rel=1e-4)
        assert row["nonspecialist_entropy"] == pytest.approx(
            entropy[~loss.assignment].mean().item(), rel=1e-4
        )
        assert row["lr"] == 0.05

    def test_the_learning_rate_of_the_last_step(self):
        recipe = replace(RECIPE, milestones=((5, 0.1),))
        assert [
            row["lr"] for row in fit(small(), data(), recipe=recipe, options=QUIET).rows
        ] == pytest.approx([0.05, 0.005, 0.005, 0.005])

    def test_the_last_epoch_may_be_a_part(self, tmp_path):
        recipe = replace(RECIPE, epochs=None, steps=7)
        result = fit(small(), data(), recipe=recipe, out=tmp_path, options=QUIET)
        assert [(row["epoch"], row["step"]) for row in told(tmp_path)] == [(1, 5), (2, 7)]
        assert result.steps == 7

    def test_dense_outputs(self):
        images, targets = torch.randn(12, 3, 8, 8), torch.randint(2, (12, 8, 8))
        targets[:, 0] = 255  # no class
        torch.manual_seed(0)
        ensemble = Ensemble(lambda: cmcl.networks.fcn(filters=(3, 4)), 2, share_after="stem")
        recipe = Recipe(members=2, epochs=1, batch_size=4, lr=0.1)
        result = fit(ensemble, (images, targets), recipe=recipe, test=(images, targets), options=QUIET)
        assert sum(result.rows[0]["specialist_fraction"]) == pytest.approx(1)
        assert "specialist_fraction_by_class" not in result.rows[0]
        assert 0 <= result.scores["oracle"] <= result.scores["member"] <= 100


class Stubborn(nn.Module):
    """Answers class `always` with great confidence, whatever it is taught."""

    def __init__(self, always, size=25):
        super().__init__()
        self.linear = nn.Linear(size, CLASSES)
        self.register_buffer("answer", 30.0 * nn.functional.one_hot(torch.tensor(always), CLASSES))

    def forward(self, x):
        return 1e-6 * self.linear(x.flatten(1)) + self.answer


class TestDeadMembers:
    def build(self):
        torch.manual_seed(0)
        return Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(25, CLASSES)), Stubborn(3)])

    def run(self, *, out=None, resume=False, **changes):
        recipe = Recipe(members=2, epochs=6, batch_size=B, lr=0.1, **changes)
        images, _ = data()
        train = images, torch.arange(N) % 3  # never the stubborn member's answer
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            rows = fit(self.build(), train, recipe=recipe, seed=9, out=out, resume=resume, options=QUIET).rows
        return [row.get("dead_members") for row in rows], [str(w.message) for w in seen]

    def test_the_alarm_sounds_once_with_what_to_try(self):
        """Also in a quiet run."""
        self.run()
        dead, (told,) = self.run()  # again in the next run: Python shows an equal warning only once
        assert dead == [None, None, [1], None, None, None]
        assert told.startswith("member [1] was a specialist for under a tenth of its fair share (50% of")
        assert all(hint in told for hint in ("larger overlap", "smaller beta", "warm start"))

    @pytest.mark.parametrize(
        ("changes", "dead"),
        [
            (dict(rule="relaxed", epsilon=0.2), [None, None, [1], None, None, None]),
            (dict(rule="annealed"), [None, None, [1], None, None, None]),
            (dict(evolve=0.5), [None, None, None, None, [1], None]),  # K = 2 in a quarter of the run
            (dict(method="mcl"), [None, None, [1], None, None, None]),
        ],
        ids=["relaxed", "annealed", "evolving", "mcl"],
    )
    def test_with_every_rule(self, changes, dead):
        """Counted by specialists, the K best, also where the weights are soft."""
        found, (told,) = self.run(**changes)
        assert found == dead
        assert told.startswith("member [1] was a specialist for under a tenth of its fair share")

    def test_a_resumed_run_goes_on_counting(self, tmp_path):
        second = N // B + 1  # a step of the second epoch
        with before_step(second, interrupt), pytest.raises(Interrupted):
            self.run(out=tmp_path)
        dead, _ = self.run(out=tmp_path, resume=True)
        assert dead == [None, [1], None, None, None], "of the epochs 2 to 6"

    def test_not_while_it_warms_up(self):
        dead, _ = self.run(warm_start=2)
        assert dead == [None, None, None, None, [1], None]

    def test_independent_members_are_never_dead(self):
        assert self.run(method="ie") == ([None] * 6, [])


class TestRecipes:
    def test_warm_start_is_an_independent_ensemble_at_first(self):
        rows = fit(small(), data(), recipe=replace(RECIPE, warm_start=2), options=QUIET).rows
        assert [sum(row["specialist_fraction"]) for row in rows] == pytest.approx([3, 3, 2, 2])
        assert rows[0]["specialist_fraction"] == [1, 1, 1]
        independent = fit(small(), data(), recipe=replace(RECIPE, method="ie"), options=QUIET).rows
        assert [row["loss"] for row in rows[:2]] == [row["loss"] for row in independent[:2]]

    def test_telemetry_shows_the_schedules(self):
        """K as the sum of the fractions, over five steps each; the temperature of the last step."""
        evolving, annealed = (
            fit(small(), data(), recipe=replace(RECIPE, overlap=1, **changes), options=QUIET).rows
            for changes in (dict(evolve=1.0), dict(rule="annealed"))
        )
        overlaps = [round(3 - 2 * step / 20) for step in range(20)]
        found = [sum(row["specialist_fraction"]) for row in evolving]
        assert found == pytest.approx([sum(overlaps[i : i + 5]) / 5 for i in (0, 5, 10, 15)])
        assert "temperature" not in evolving[0]
        temperatures = [row["temperature"] for row in annealed]
        assert temperatures == pytest.approx([1e-3 ** (step / 20) for step in (4, 9, 14, 19)])

    def test_methods_differ(self):
        results = []
        for method in ("ie", "mcl", "cmcl"):
            ensemble = small()
            fit(ensemble, data(), recipe=replace(RECIPE, method=method), options=QUIET)
            results.append(weights(ensemble))
        assert not any(identical(a, b) for a, b in itertools.combinations(results, 2))

    def test_it_learns(self):
        recipe = replace(RECIPE, epochs=40)
        ensemble = small()
        result = fit(ensemble, data(200), recipe=recipe, test=data(100, seed=5), options=QUIET)
        assert result.scores["top1"] < 15
        assert result.scores["oracle"] <= result.scores["top1"]

    def test_what_does_not_fit_the_ensemble(self):
        with pytest.raises(ValueError, match=r"recipe.members must be 3, .* Got 5"):
            fit(small(), data(), recipe=replace(RECIPE, members=5))
        with pytest.raises(TypeError, match="ensemble must be a cmcl.Ensemble. Got list"):
            fit([small(), small(1)], data(), recipe=RECIPE)
        with pytest.raises(ValueError, match="seed must be between"):
            fit(small(), data(), recipe=RECIPE, seed=10**22)
        images, targets = data()
        with pytest.raises(ValueError, match=r"targets must be between 0 and 3 .* Got 0 to 4"):
            fit(small(), (images, targets + (targets == 3)), recipe=RECIPE, options=QUIET)
        with pytest.raises(ValueError, match="precision must be"):
            Options(precision="float8")
        with pytest.raises(ValueError, match=r"recipe.share_prob must be 0.7, .* Got 0.2"):
            fit(small(), data(), recipe=replace(RECIPE, share_prob=0.2), options=QUIET)
        apart = cmcl.Ensemble(list(small().members))
        with pytest.raises(ValueError, match="recipe.sharing must be False, .*share_after=None"):
            fit(apart, data(), recipe=RECIPE, options=QUIET)


class TestSharing:
    """What a recipe says of it is true; one that says nothing takes the ensemble as it was built."""

    OPEN = replace(RECIPE, sharing=None, epochs=1)

    def one_stem(self):
        torch.manual_seed(0)
        linear = [(25, 8), (8, 8), (8, CLASSES)]
        networks = [nn.Sequential(nn.Flatten(), *(nn.Linear(*size) for size in linear)) for _ in range(M)]
        return SharedStemEnsemble(networks, stem="1", share_after="2")

    def test_left_open(self, tmp_path):
        """Trains, and keeps, what the same recipe does that says it."""
        open_one, said = small(), small()
        fit(open_one, data(), recipe=self.OPEN, out=tmp_path, options=QUIET)
        fit(said, data(), recipe=replace(self.OPEN, sharing=True), options=QUIET)
        assert identical(weights(open_one), weights(said))
        kept = Checkpoints(tmp_path / "checkpoints").latest().facts.recipe
        assert kept == replace(self.OPEN, sharing=True).to_json()
        assert fitting(self.OPEN, Ensemble(Small, M)) == replace(self.OPEN, sharing=False)

    def test_the_probability_of_ones_own_ensemble(self):
        own = Ensemble(Small, M, share_after="stem", share_prob=0.4)
        assert fitting(self.OPEN, own) == replace(self.OPEN, sharing=True, share_prob=0.4)
        assert fitting(replace(self.OPEN, share_prob=0.4), own).share_prob == 0.4
        with pytest.raises(ValueError, match=r"recipe.share_prob must be 0.4, .* Got 0.2"):
            fitting(replace(self.OPEN, share_prob=0.2), own)

    def test_an_ablation_that_would_change_nothing_is_refused(self):
        off = replace(RECIPE, sharing=False)
        with pytest.raises(ValueError, match="recipe.sharing must be True, .*share_after='stem'.* Got False"):
            fit(small(), data(), recipe=off, options=QUIET)
        with pytest.raises(ValueError, match="share_after='2'.* Got False"):
            fit(self.one_stem(), data(), recipe=off, options=QUIET)
        fit(self.one_stem(), data(), recipe=self.OPEN, options=QUIET)
        fit(Ensemble(Small, M), data(), recipe=replace(off, epochs=1), options=QUIET)

    def test_adversarial_training_with_an_ensemble_that_shares(self):
        with pytest.raises(ValueError, match="adversarial training must not share"):
            fit(small(), data(), recipe=replace(self.OPEN, adversarial=0.1), options=QUIET)


class TestEvaluation:
    def dataset(self, n=80):
        images, targets = data(n)
        return Dataset(images, targets, tuple("abcd"))

    def test_held_out_for_looking_and_test_for_the_end(self):
        recipe = replace(RECIPE, validation=0.25, epochs=3)
        options = Options(quiet=True, evaluate_every=1)
        test = data(40, seed=5)
        ensemble = small()
        result = fit(ensemble, self.dataset(), recipe=recipe, test=test, options=options)
        assert result.steps == math.ceil(3 * 60 / B)
        kept, held = cmcl.data.split_validation(self.dataset(), 0.25)
        assert (len(kept), len(held)) == (60, 20)
        looked, reported = evaluate(ensemble, held), evaluate(ensemble, test)
        assert {key: result.rows[-1][key] for key in looked} == looked
        assert result.scores == reported
        assert looked != reported
        alone = small()
        fit(alone, kept, recipe=replace(recipe, validation=0.0), options=QUIET)
        assert identical(weights(alone), weights(ensemble)), "what is held out is not trained on"

    def test_every_n_epochs_and_at_the_end(self):
        rows = fit(
            small(),
            data(),
            recipe=replace(RECIPE, epochs=5),
            test=data(20),
            options=Options(quiet=True, evaluate_every=2),
        ).rows
        assert ["top1" in row for row in rows] == [False, True, False, True, True]
        rows = fit(small(), data(), recipe=RECIPE, test=data(20), options=QUIET).rows
        assert ["top1" in row for row in rows] == [False, False, False, True], "only at the end by default"

    def test_looking_changes_nothing(self, whole):
        ensemble = small()
        options = Options(quiet=True, evaluate_every=1, evaluation_batch=3)
        before = torch.get_rng_state()
        fit(ensemble, data(), recipe=RECIPE, seed=2, test=data(20, seed=5), options=options)
        assert identical(weights(ensemble), whole[0])
        assert torch.get_rng_state().equal(before), "nor does fit change the global generator"

    def test_errors_in_percent_by_hand(self):
        """Two members that always answer 0 and 1, on the classes 0, 1 and 2."""
        members = [Stubborn(always, size=1) for always in (0, 1)]
        images, targets = torch.zeros(4, 1, 1, 1), torch.tensor([0, 1, 2, 0])
        with torch.no_grad():
            for member in members:
                member.answer[2:] = -30.0
            members[0].answer += torch.tensor([1.0, 0, 0, 0])  # the surer one decides
        scores = evaluate(Ensemble(members), (images, targets))
        assert scores == pytest.approx({"top1": 50.0, "picked": 50.0, "oracle": 25.0, "member": 62.5})
        loader = DataLoader(TensorDataset(images, targets), batch_size=3)
        assert evaluate(Ensemble(members), loader) == pytest.approx(scores)


class TestInputs:
    def test_a_loader_in_order_is_what_its_batches_are(self):
        """Its own batch size counts, not the recipe's; the last batch may be small."""
        images, targets = data()
        loader = DataLoader(TensorDataset(images, targets), batch_size=12)
        result = fit(small(), loader, recipe=replace(RECIPE, epochs=3), test=loader, options=QUIET)
        assert result.steps == 12
        assert [row["step"] for row in result.rows] == [4, 8, 12]
        assert sum(result.rows[0]["specialist_fraction"]) == pytest.approx(2)

    def test_a_loader_with_a_batch_smaller_than_its_pieces(self):
        loader = DataLoader(TensorDataset(*data(18)), batch_size=8)  # 8, 8, 2
        recipe = replace(RECIPE, accumulate=4, epochs=2)
        assert fit(small(), loader, recipe=recipe, options=QUIET).steps == 6

    def test_fewer_examples_than_a_batch(self):
        result = fit(small(), data(5), recipe=replace(RECIPE, epochs=3), options=QUIET)
        assert (result.steps, len(result.rows)) == (3, 3)

    def test_raw_images_are_standardised(self):
        images = (data()[0] * 40 + 128).clamp(0, 255).to(torch.uint8)
        ensemble = small()
        fit(ensemble, (images, data()[1]), recipe=RECIPE, options=QUIET)
        assert ensemble.transform is not None
        assert ensemble.predict(images).probs.shape == (N, CLASSES)

    def test_nothing_is_written_unless_asked(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        fit(small(), data(), recipe=RECIPE, options=QUIET)
        assert not list(tmp_path.iterdir())


APART = replace(RECIPE, share_prob=0.0)


def poisoned(at, value=torch.nan, member=1):
    """An ensemble whose one member goes wrong at a step; nothing is shared, or others would catch it."""
    ensemble = small()
    ensemble.share_prob = 0.0
    ensemble.members[member].poison = (at, value)
    return ensemble


def test_another_task_is_not_resumed(tmp_path):
    smooth = partial(nn.functional.cross_entropy, reduction="none", label_smoothing=0.1)
    with before_step(6, interrupt), pytest.raises(Interrupted):
        fit(small(), data(), recipe=RECIPE, task=smooth, out=tmp_path, options=QUIET)
    with pytest.raises(ValueError, match=r"task must be that of the run to resume, cross_entropy .*0.1"):
        fit(small(), data(), recipe=RECIPE, out=tmp_path, resume=True, options=QUIET)
    fit(small(), data(), recipe=RECIPE, task=smooth, out=tmp_path, resume=True, options=QUIET)


class TestDivergence:
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_says_where_and_keeps_the_last_good_state(self, tmp_path, value, optimizer):
        recipe = replace(APART, milestones=((6, 0.1),), optimizer=optimizer)
        ensemble = poisoned(7, value)
        with pytest.raises(Diverged) as error:
            fit(ensemble, data(), recipe=recipe, seed=2, out=tmp_path / "a", options=ALWAYS)
        text = (
            "seed 2: the loss of member [1], or its gradient, is NaN or infinite at step 7, with lr 0.005. "
        )
        assert str(error.value).startswith(text)
        assert "Try a smaller lr" in str(error.value)
        clean = poisoned(99)
        with before_step(6, interrupt), pytest.raises(Interrupted, match="at step 7 of 20"):
            fit(clean, data(), recipe=recipe, seed=2, out=tmp_path / "b", options=QUIET)
        good = weights(clean)
        assert all(value.isfinite().all() for value in good.values())
        assert identical(weights(ensemble), good)
        kept = Checkpoints(tmp_path / "a" / "checkpoints").latest()
        assert kept.facts.step == 7
        assert identical({key: kept.tensors[f"ensemble.{key}"] for key in good}, good)

    def test_the_last_checkpoint_can_be_resumed(self, tmp_path):
        with pytest.raises(Diverged):
            fit(poisoned(7), data(), recipe=APART, seed=2, out=tmp_path, options=ALWAYS)
        cured, clean = poisoned(99), poisoned(99)
        fit(cured, data(), recipe=APART, seed=2, out=tmp_path, resume=True, options=QUIET)
        fit(clean, data(), recipe=APART, seed=2, options=QUIET)
        assert identical(weights(cured), weights(clean))

    def test_it_is_noticed_before_a_checkpoint_is_written(self, tmp_path, monkeypatch):
        """As on a GPU, where looking at every step would cost too much."""
        check, calls = TrainState.check_finite, itertools.count(1)
        monkeypatch.setattr(TrainState, "check_finite", lambda state: next(calls) % 2 or check(state))
        with pytest.raises(Diverged, match="at step 7"):
            fit(poisoned(7), data(), recipe=APART, seed=2, out=tmp_path, options=ALWAYS)
        assert Checkpoints(tmp_path / "checkpoints").latest().facts.step == 7


def stopped(folder, number, act=interrupt, error=Interrupted, **options):
    """The run of `whole`, stopped by `act` before step `number` is taken."""
    with before_step(number, act), pytest.raises(error) as caught:
        go(folder, ensemble=small(), **options)
    return str(caught.value)


def fail(error):
    def act():
        raise error

    return act


class TestResume:
    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
    @pytest.mark.parametrize("number", [0, 4, 5, 18, 19])  # 4: the last step of an epoch; 19: of the run
    def test_bit_identical_after_a_signal_anywhere(self, whole, tmp_path, number, name):
        text = stopped(tmp_path, number, lambda: signal.raise_signal(signal.Signals[name]))
        assert text.startswith(f"stopped by {name} at step {number + 1} of 20. It is saved in {tmp_path}")
        assert len(told(tmp_path)) == (number + 1) // 5
        ensemble = go(tmp_path, resume=True)
        assert identical(weights(ensemble), whole[0])
        assert told(tmp_path) == whole[1]

    def test_asked_to_stop_while_the_end_is_saved(self, whole, tmp_path, monkeypatch):
        save = Checkpoints.save

        def saved(self, tensors, facts):
            if facts.step == 20:
                interrupt()
            return save(self, tensors, facts)

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", saved)
            with pytest.raises(Interrupted, match="at step 20 of 20"):
                go(tmp_path, ensemble=small())
        assert identical(weights(go(tmp_path, resume=True)), whole[0])

    def test_after_an_error_of_any_kind(self, whole, tmp_path):
        """A second SIGINT, a bug, no memory: what was saved before is there."""
        for number, error in ((6, KeyboardInterrupt()), (5, MemoryError()), (3, RuntimeError("bug"))):
            act, kind, resume = fail(error), type(error), (tmp_path / "checkpoints").exists()
            stopped(tmp_path, number, act, kind, options=ALWAYS, resume=resume)
        assert Checkpoints(tmp_path / "checkpoints").latest().facts.step == 14
        assert identical(weights(go(tmp_path, resume=True)), whole[0])
        assert told(tmp_path) == whole[1]

    def test_many_times_in_a_row(self, whole, tmp_path):
        for _ in range(6):  # three steps each
            stopped(tmp_path, 2, resume=(tmp_path / "checkpoints").exists())
        assert identical(weights(go(tmp_path, resume=True)), whole[0])
        assert told(tmp_path) == whole[1]

    def test_in_a_warm_start_and_after_it(self, tmp_path):
        recipe = replace(RECIPE, warm_start=2, optimizer="adamw", clip_norm=0.5)
        ensemble = go(tmp_path / "whole", ensemble=small(), recipe=recipe)
        for number in (6, 12):
            folder = tmp_path / str(number)
            stopped(folder, number, recipe=recipe)
            assert identical(weights(go(folder, resume=True, recipe=recipe)), weights(ensemble))
            assert told(folder) == told(tmp_path / "whole")

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_a_loader(self, tmp_path, shuffle):
        class Augmented(TensorDataset):
            def __getitem__(self, index):
                image, target = super().__getitem__(index)
                return image + 0.1 * torch.randn(image.shape), target

        def train():
            return DataLoader(Augmented(*data()), batch_size=B, shuffle=shuffle)

        ensemble = go(tmp_path / "whole", ensemble=small(), train=train())
        for number in (2, 4, 11):
            torch.manual_seed(number)
            stopped(tmp_path / str(number), number, train=train())
            torch.manual_seed(number + 1)
            resumed = go(tmp_path / str(number), resume=True, train=train())
            assert identical(weights(resumed), weights(ensemble))

    def test_a_run_that_is_done(self, whole, tmp_path):
        for recipe in (RECIPE, replace(RECIPE, epochs=None, steps=7)):
            folder = tmp_path / str(recipe.steps)
            first, rows = weights(go(folder, recipe=recipe, ensemble=small())), told(folder)
            files = {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").iterdir()}
            assert identical(weights(go(folder, resume=True, recipe=recipe)), first)
            assert told(folder) == rows
            again = {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").iterdir()}
            assert again == files, "not saved again"

    def test_nothing_to_resume(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="must hold a checkpoint to resume from. It holds notes.txt."):
            go(tmp_path, resume=True)
        with pytest.raises(ValueError, match="new must hold a checkpoint"):
            go(tmp_path / "new", resume=True)
        assert not (tmp_path / "new").exists()

    def test_max_seconds(self, whole, tmp_path):
        with before_step(3, lambda: time.sleep(0.6)), pytest.raises(Interrupted) as stop:
            go(tmp_path, ensemble=small(), options=replace(QUIET, max_seconds=0.5))
        found = stop.value
        assert (found.reason, found.steps, found.folder) == ("max_seconds", 20, tmp_path)
        assert 1 <= found.step <= 4
        assert identical(weights(go(tmp_path, resume=True)), whole[0])

    def test_parts_of_interrupted_writes_are_removed(self, tmp_path):
        for name in (".recipe.json.abcd1234.part", "checkpoints/.step-1.abcd1234.part"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("half")
        go(tmp_path, ensemble=small())
        assert not list(tmp_path.rglob("*.part"))

    def test_hidden_files_of_others_stay(self, tmp_path):
        for name in ("mine/.notes.abcd1234.part", ".notes.part"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("mine")
        go(tmp_path, ensemble=small())
        assert len(list(tmp_path.rglob("*.part"))) == 2

    def test_the_lock_names_nobody(self, tmp_path):
        go(tmp_path, ensemble=small())
        assert not (tmp_path / ".lock").read_bytes(), "neither host name nor process id"

    def test_time_counts_over_all_parts(self, tmp_path):
        stopped(tmp_path, 3, lambda: (time.sleep(0.5), interrupt()))
        result = fit(small(), data(), recipe=RECIPE, seed=2, out=tmp_path, resume=True, options=QUIET)
        assert result.seconds > 0.5


class TestRefusals:
    @pytest.fixture
    def folder(self, tmp_path):
        stopped(tmp_path, 3)
        return tmp_path

    def test_a_folder_with_a_run(self, folder):
        with pytest.raises(
            ValueError, match="It holds a run at step 4. Pass resume=True to resume it, or name"
        ):
            go(folder)
        assert Checkpoints(folder / "checkpoints").latest().facts.step == 4

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                dict(recipe=replace(RECIPE, epochs=8, lr=0.5)),  # of a longer run, too
                r"recipe must be that of the run to resume, lr=0.05. Got lr=0.5.$",
            ),
            (dict(seed=3), "seed must be that of the run to resume, 2. Got 3"),
        ],
    )
    def test_another_recipe_or_seed(self, folder, changes, message):
        with pytest.raises(ValueError, match=message):
            go(folder, resume=True, **changes)

    def test_another_network(self, folder):
        class Larger(Small):
            def __init__(self):
                super().__init__()
                self.more = nn.Linear(2, 2)

        ensemble = small(network=Larger)
        before = weights(ensemble)
        with pytest.raises(
            ValueError, match=r"networks must be .* Got another ensemble.\S+, and \d+ more diff"
        ):
            go(folder, resume=True, ensemble=ensemble)
        assert identical(weights(ensemble), before)

    def test_another_kind_of_device(self, folder):
        """A run of CUDA has that device's random state, which a CPU cannot go on from."""
        checkpoints = Checkpoints(folder / "checkpoints")
        tensors, facts = checkpoints.latest()
        later = facts.model_copy(update={"step": facts.step + 1})
        checkpoints.save(tensors | {"random.cuda": torch.get_rng_state()}, later)
        with pytest.raises(ValueError, match="device must be of the kind .* started on, CUDA. Got cpu."):
            go(folder, resume=True)

    def test_a_second_run_at_the_same_time(self, folder):
        with locked(folder), pytest.raises(FolderInUseError, match="must be used by one run at a time"):
            go(folder, resume=True)
        go(folder, resume=True)
        with locked(folder):  # the run has released it
            pass
        with pytest.raises(ValueError, match="It holds a run at step 20. Pass resume=True"):
            go(folder)


class TestFullDisk:
    def test_stops_with_what_was_saved_and_goes_on(self, whole, tmp_path, monkeypatch):
        write, count = Path.write_bytes, itertools.count()

        def full(self, data):
            if next(count) == 8:
                write(self, data[: len(data) // 2])
                raise OSError(28, "No space left on device")
            return write(self, data)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            with pytest.raises(DiskFullError, match=r"must fit on its disk.*Free some space, then resume"):
                go(tmp_path, ensemble=small(), options=ALWAYS)
        assert Checkpoints(tmp_path / "checkpoints").latest().facts.step == 8
        assert not list((tmp_path / "checkpoints").glob(".*"))
        assert identical(weights(go(tmp_path, resume=True)), whole[0])
        assert told(tmp_path) == whole[1]


CHILD = """
import signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import torch
import test_train as t
folder, mode = t.Path(sys.argv[2]), sys.argv[3]
if mode == "wait":  # for a signal, in the middle of the run
    def act():
        print("at step 6", flush=True)
        while not signal.getsignal(signal.SIGINT).__self__.received:
            time.sleep(0.05)
    with t.before_step(6, act):
        t.go(folder, ensemble=t.small())
else:
    t.go(folder, resume=True)
"""


class TestProcesses:
    def start(self, folder, mode):
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(folder), mode],
            env={
                "PYTHONPATH": str(ROOT / "src"),
                "PATH": "/usr/bin:/bin",
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def test_sigint_and_a_second_process(self, whole, tmp_path):
        with self.start(tmp_path, "wait") as first:
            assert first.stdout.readline() == "at step 6\n"
            with self.start(tmp_path, "resume") as second:
                out = second.communicate(timeout=120)
            assert second.returncode == 1
            assert "It is in use by another process" in out[1]
            first.send_signal(signal.SIGINT)  # the step is finished, then all is saved
            _, error = first.communicate(timeout=120)
        assert first.returncode == 1
        assert "Interrupted: stopped by SIGINT at step 7 of 20." in error
        assert "resume it with resume=True" in error
        assert identical(weights(go(tmp_path, resume=True)), whole[0])
        assert told(tmp_path) == whole[1]


def test_in_a_thread_of_its_own(whole):
    """Signals reach the main thread alone; the rest works anywhere."""
    ensemble, errors = small(), []

    def run():
        try:
            go(None, ensemble=ensemble)
        except BaseException as error:  # shown by the assertion below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []
    assert identical(weights(ensemble), whole[0])


def test_without_a_folder_an_interrupt_saves_nothing():
    with before_step(3, interrupt), pytest.raises(Interrupted, match="Nothing was saved"):
        go(None)


class TestProgress:
    def test_a_line_an_epoch_when_piped(self, capsys):
        go(None, options=Options())
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 4
        assert re.match(r"epoch 4/4 loss \d\.\d+, top-1 [\d.]+ %, oracle [\d.]+ %, lr 0\.05", lines[-1])


def test_evaluation_is_in_eval_mode_from_the_first_epoch():
    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.seen = nn.Linear(4, 3), set()

        def forward(self, x):
            self.seen.add((self.training, len(x)))
            return self.fc(x)

    train, test = (torch.randn(8, 4), torch.randint(3, (8,))), (torch.randn(5, 4), torch.randint(3, (5,)))
    ensemble = Ensemble(Spy, 1)
    recipe = Recipe(method="ie", members=1, epochs=1, batch_size=8, lr=0.01)
    fit(ensemble, train, recipe=recipe, test=test, options=QUIET)
    seen = ensemble.members[0].seen
    assert (False, 5) in seen
    assert (True, 5) not in seen
    assert (True, 8) in seen


def test_what_is_chosen_by_is_not_the_test_set():
    """With a validation share, the looks on the way are at the held-out part, never at the test set."""
    train = cmcl.data.load("digits", split="train")[:200]
    looked = []

    class Watched(Ensemble):
        def forward(self, x):
            looked.append((self.training, len(x)))
            return super().forward(x)

    ensemble = Watched(
        lambda: cmcl.networks.cnn(channels=1, size=8, filters=(2, 3), kernel=3, padding=1, hidden=None), 1
    )
    recipe = Recipe(method="ie", members=1, epochs=2, batch_size=50, lr=0.01, validation=0.2)
    test = cmcl.data.load("digits", split="test")[:77]
    fit(ensemble, train, recipe=recipe, test=test, options=Options(quiet=True, evaluate_every=1))
    scored = [n for training, n in looked if not training]
    assert scored[:3] == [2, 2, 2], "whether train, the held-out part and test fit"
    assert len(scored) == 3 + 4, "an epoch each, the temperature, test"
    assert scored.count(77) == 1, "the test set once, at the end"
    assert scored[-1] == 77
