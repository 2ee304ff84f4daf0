"""Augmentation, weight averaging and schedules: hand-worked batches, statistics, and exact resuming."""

import os
import signal
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cmcl import Ensemble, Interrupted, Options, Recipe, fit
from cmcl.training import augment as module
from cmcl.training import loop
from cmcl.training.augment import augment, crop, cutout, flip, jitter
from cmcl.training.batches import Resident
from cmcl.training.config import Augment
from test_train import CLASSES, QUIET, RECIPE, B, N, data, small

MODERN = replace(
    RECIPE,
    augment=Augment(flip="alternating", crop=1, cutout=2, jitter=0.1, mixup=0.4, cutmix=1.0),
    label_smoothing=0.1,
    schedule="linear",
    warmup=0.2,
    ema=0.2,
    evolve=0.5,
)


def images(n=6, side=8, seed=0):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


def test_settings_are_named_and_stay_as_they_are():
    with pytest.raises((TypeError, ValueError)):
        Augment(True)
    with pytest.raises(FrozenInstanceError):
        Augment(flip=True).flip = False


class TestFlip:
    def test_marked_examples_and_their_masks(self):
        x, masks = torch.arange(8.0).view(2, 1, 2, 2), torch.arange(8).view(2, 2, 2)
        flipped, moved = flip(x, masks, torch.tensor([False, True]))
        assert flipped.flatten().tolist() == [0, 1, 2, 3, 5, 4, 7, 6]
        assert moved.flatten().tolist() == [0, 1, 2, 3, 5, 4, 7, 6]

    def test_half_of_all_examples(self):
        torch.manual_seed(0)
        x = images(2000, 2)
        found, _ = augment(x, torch.zeros(2000), Augment(flip=True), 2)
        changed = (found != x).flatten(1).any(1)
        assert 0.45 < changed.float().mean() < 0.55
        assert torch.equal(found[changed], x[changed].flip(-1))


class TestCrop:
    def test_every_example_is_a_window_of_its_reflection(self):
        torch.manual_seed(0)
        x = images(200, 5)
        padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
        windows = torch.stack([padded[:, :, i : i + 5, j : j + 5] for i in range(5) for j in range(5)])
        found, _ = crop(x, torch.zeros(200), 2)
        hits = (windows == found).flatten(2).all(2)  # (25, 200)
        assert hits.any(0).all()
        assert hits.any(1).all(), "every shift occurs"

    def test_masks_move_with_their_images(self):
        torch.manual_seed(1)
        masks = torch.arange(50 * 36).view(50, 6, 6)
        moved, targets = crop(masks[:, None].float(), masks, 2)
        assert torch.equal(moved[:, 0].long(), targets)


class TestCutout:
    def test_a_square_is_set_to_zero(self):
        torch.manual_seed(0)
        x = images(300, 8)
        found = cutout(x, 4)
        holes = (found != x).any(1)  # (300, 8, 8)
        assert (found[holes[:, None].expand_as(found)] == 0).all()
        sizes = holes.flatten(1).sum(1)
        assert sizes.max() == 16
        assert sizes.min() >= 4, "cut at the border, but the centre is inside"
        for hole in holes[:20]:
            rows, columns = hole.any(1), hole.any(0)
            assert hole.sum() == rows.sum() * columns.sum(), "a rectangle"


class TestMix:
    def test_mixup_is_a_weighted_mean_of_images_and_labels(self):
        torch.manual_seed(0)
        x, y = images(6), torch.arange(6)
        found, soft = augment(x, y, Augment(mixup=1.0), 6)
        for i in range(6):
            own, other = soft[i, i].item(), soft[i, i - 1].item()
            assert own + other == pytest.approx(1, abs=1e-6)
            assert torch.allclose(found[i], own * x[i] + other * x[i - 1], atol=1e-5)

    def test_cutmix_labels_are_fractions_of_the_area(self):
        torch.manual_seed(0)
        x, y = images(50), torch.arange(50)
        found, soft = augment(x, y, Augment(cutmix=1.0), 50)
        kept = (found == x).all(1).flatten(1).float().mean(1)
        assert torch.allclose(soft[torch.arange(50), y], kept)
        assert ((found == x) | (found == x.roll(1, 0))).all()
        assert 0.3 < kept.mean() < 0.9

    def test_both_give_each_example_one_of_them(self):
        torch.manual_seed(0)
        x = images(200)
        found, _ = augment(x, torch.arange(200), Augment(mixup=1.0, cutmix=1.0), 200)
        pasted = ((found == x) | (found == x.roll(1, 0))).flatten(1).all(1)
        assert 0.35 < pasted.float().mean() < 0.65

    @pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
    def test_the_table_draws_a_beta_distribution(self, alpha):
        torch.manual_seed(0)
        drawn = module._beta(alpha, torch.zeros(100_000, dtype=torch.float64))
        assert drawn.mean().item() == pytest.approx(0.5, abs=0.01)
        assert drawn.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


def test_jitter_scales_around_the_mean_and_shifts():
    torch.manual_seed(0)
    x = images(500)
    found = jitter(x, 0.2)
    means, stds = ((t.mean((1, 2, 3)), t.std((1, 2, 3))) for t in (x, found))
    shift, scale = stds[0] - means[0], stds[1] / means[1]
    assert 0.15 < shift.abs().max() <= 0.2 + 1e-5
    assert 1.15 < scale.max() <= 1.2 + 1e-4
    assert 0.8 - 1e-4 <= scale.min() < 0.85


class TestAlternating:
    def test_every_example_is_mirrored_in_every_other_epoch(self):
        x = torch.arange(10.0).view(10, 1, 1, 1).expand(10, 1, 1, 2) + torch.tensor([0.0, 0.5])
        batches = Resident(x, torch.arange(10), 4, 3, torch.device("cpu"), alternating=True)
        seen = {}
        for epoch in range(4):
            for _ in batches.epoch(epoch, batches.steps(epoch)):
                for image, target in zip(*batches.current(), strict=True):
                    seen.setdefault(int(target), []).append(bool(image[0, 0, 0] > image[0, 0, 1]))
                batches.advance()
        for mirrored in seen.values():
            assert all(a != b for a, b in pairwise(mirrored))
        assert len({mirrored[0] for mirrored in seen.values()}) == 2, "half of them begin mirrored"


class TestFit:
    def test_an_augmentation_of_the_users_sees_every_batch(self):
        seen = []

        def own(x, y, generator):
            seen.append(len(x))
            return x + torch.randn(x.shape, generator=generator), y

        fit(small(), data(), recipe=replace(RECIPE, epochs=1), augment=own, options=QUIET)
        assert seen == [2] + [B] * (N // B), "two examples before training, then every batch"

    def test_label_smoothing_is_that_of_torch(self):
        class Constant(nn.Module):
            def __init__(self):
                super().__init__()
                self.logits = nn.Parameter(torch.randn(CLASSES))

            def forward(self, x):
                return self.logits.expand(len(x), -1)

        torch.manual_seed(0)
        ensemble = Ensemble(Constant, 2)
        logits = [m.logits.detach().clone() for m in ensemble.members]
        recipe = Recipe(
            method="ie", members=2, steps=1, batch_size=N, lr=1.0, momentum=0, label_smoothing=0.3
        )
        result = fit(ensemble, data(), recipe=recipe, options=QUIET)
        expected = sum(
            F.cross_entropy(z.expand(N, -1), data()[1], label_smoothing=0.3).item() for z in logits
        )
        assert result.rows[0]["loss"] == pytest.approx(expected, rel=1e-5)

    def test_the_ensemble_has_the_averaged_weights(self):
        """decay 1 - 1/(0.25 * 8): each average is half the last one and half the weights after the step."""
        recipe = Recipe(method="ie", members=3, steps=8, batch_size=B, lr=0.05, sharing=True)
        trail = []

        def watch(x, y, generator):
            trail.append(ensemble.members[0].front[0].weight.detach().clone())
            return x, y

        ensemble = small()
        fit(ensemble, data(), recipe=recipe, augment=watch, options=QUIET)
        trail.append(ensemble.members[0].front[0].weight.detach().clone())
        expected = trail[0]
        for weights in trail[1:]:
            expected = (expected + weights) / 2
        averaged = small()
        fit(averaged, data(), recipe=replace(recipe, ema=0.25), options=QUIET)
        assert torch.allclose(averaged.members[0].front[0].weight, expected, atol=1e-6)

    def test_evaluation_uses_the_average_and_leaves_training_alone(self):
        recipe = replace(RECIPE, ema=0.2, epochs=2)
        plain, evaluated = small(), small()
        fit(plain, data(), recipe=recipe, options=QUIET)
        options = Options(quiet=True, evaluate_every=1)
        fit(evaluated, data(), recipe=recipe, test=data(seed=5), options=options)
        for ours, theirs in zip(plain.state_dict().values(), evaluated.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("rule", ["relaxed", "annealed"])
    def test_rules(self, rule):
        ensemble = small()
        result = fit(ensemble, data(), recipe=replace(RECIPE, rule=rule, overlap=1, epochs=12), options=QUIET)
        assert result.rows[-1]["loss"] < result.rows[0]["loss"]
        assert sum(result.rows[-1]["specialist_fraction"]) == pytest.approx(1)

    def test_an_evolving_overlap_is_counted(self):
        result = fit(small(), data(), recipe=replace(RECIPE, overlap=1, evolve=1.0, epochs=9), options=QUIET)
        specialists = [sum(row["specialist_fraction"]) for row in result.rows]
        assert specialists[0] == pytest.approx(3)
        assert specialists[-1] == pytest.approx(1)
        assert specialists == sorted(specialists, reverse=True)

    @pytest.mark.parametrize("stop", [3, 7, 12])
    def test_resumes_to_the_same_bits_with_everything_on(self, tmp_path, stop):
        whole, parts = small(), small()
        fit(whole, data(), recipe=MODERN, out=tmp_path / "whole", options=QUIET)
        calls = iter(range(100))

        def interrupt(x, y, generator):
            if next(calls) == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return x, y

        with pytest.raises(Interrupted):
            fit(parts, data(), recipe=MODERN, augment=interrupt, out=tmp_path / "parts", options=QUIET)
        again = small(seed=8)
        rest = {"recipe": MODERN, "augment": interrupt, "out": tmp_path / "parts", "resume": True}
        fit(again, data(), options=QUIET, **rest)
        for ours, theirs in zip(whole.state_dict().values(), again.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)

    @pytest.mark.parametrize(
        ("changes", "options", "message"),
        [
            (dict(augment={"mixup": 1.0}), dict(task=F.cross_entropy), "task"),
            (dict(label_smoothing=0.1), dict(task=F.cross_entropy), "task"),
            (dict(augment={"crop": 3}), {}, "crop must be below half"),
        ],
    )
    def test_mistakes(self, changes, options, message):
        if "task" in options:
            options = {"task": lambda z, y: F.cross_entropy(z, y, reduction="none")}
        with pytest.raises(ValueError, match=message):
            fit(small(), data(), recipe=replace(RECIPE, **changes), options=QUIET, **options)

    def test_what_augmentation_needs(self):
        flat = (torch.randn(20, 4), torch.arange(20) % 2)
        ensemble = Ensemble(lambda: nn.Linear(4, 2), 3)
        recipe = Recipe(members=3, epochs=1, augment={"flip": True})
        with pytest.raises(ValueError, match=r"images must be \(N, C, H, W\)"):
            fit(ensemble, flat, recipe=recipe, options=QUIET)
        loader = DataLoader(TensorDataset(*data()), batch_size=8)
        with pytest.raises(TypeError, match="alternating"):
            fit(small(), loader, recipe=replace(RECIPE, augment={"flip": "alternating"}), options=QUIET)
        fit(small(), loader, recipe=replace(RECIPE, augment={"flip": True}, epochs=1), options=QUIET)


class TestTargets:
    """Targets that are not one int64 class per example."""

    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
    def test_label_smoothing_takes_any_integer_labels(self, dtype):
        x, y = data()
        fit(small(), (x, y.to(dtype)), recipe=replace(RECIPE, label_smoothing=0.1, epochs=1), options=QUIET)

    def test_soft_labels_stay_with_flip_and_crop(self):
        x, soft = images(6), torch.rand(6, 5)
        found, kept = augment(x, soft, Augment(flip=True, crop=2), 5)
        assert torch.equal(kept, soft)
        assert found.shape == x.shape

    def test_mixup_has_no_ignored_labels(self):
        recipe = replace(RECIPE, augment={"mixup": 1.0})
        with pytest.raises(ValueError, match="no ignore_index"):
            fit(small(), data(), recipe=recipe, ignore_index=0, options=QUIET)

    def test_specialists_are_counted_by_class_with_label_smoothing(self):
        loader = DataLoader(TensorDataset(*data()), batch_size=8)
        rows = [
            fit(small(), loader, recipe=replace(RECIPE, epochs=1, **changes), options=QUIET).rows[0]
            for changes in ({}, {"label_smoothing": 0.1})
        ]
        assert rows[0].keys() == rows[1].keys()


@pytest.mark.parametrize(
    "own", [lambda x, y, g: (x.repeat(2, 1, 1, 1), y.repeat(2)), lambda x, y, g: (x.double(), y)]
)
def test_an_augmentation_that_changes_the_batch_is_named_before_training(own):
    ensemble = small()
    before = {key: value.clone() for key, value in ensemble.state_dict().items()}
    with pytest.raises(ValueError, match="augment must return as many"):
        fit(ensemble, data(), recipe=RECIPE, augment=own, options=QUIET)
    assert all(torch.equal(value, before[key]) for key, value in ensemble.state_dict().items())


def test_averages_leave_other_buffers_alone():
    """A causal mask of -inf: its average with itself would be NaN."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
            self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 2)

        def forward(self, x):
            return self.out(self.norm(x)) + self.mask.exp()

    torch.manual_seed(0)
    ensemble = Ensemble(Masked, 2)
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    fit(ensemble, (x, y), recipe=Recipe(members=2, steps=6, batch_size=10, ema=0.2), options=QUIET)
    assert ensemble.members[0].mask.tolist() == [0, -torch.inf]
    assert ensemble.members[0].norm.running_mean.isfinite().all()


def test_members_that_share_weights_do_not_run_in_parallel():
    one = nn.Linear(4, 3)
    apart = Ensemble(lambda: nn.Linear(4, 2), 2)
    tied = Ensemble([nn.Sequential(one, nn.Linear(3, 2)) for _ in range(2)])
    assert loop._are_apart(apart, RECIPE)
    assert not loop._are_apart(tied, RECIPE)
