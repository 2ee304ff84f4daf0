"""overlap="auto": short runs choose K on examples that they do not learn; then the run is as with that K."""

import math
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cmcl
from cmcl import Options, Recipe, data
from cmcl.training import Interrupted, loop
from cmcl.training.checkpoint import FolderInUseError, locked
from cmcl.training.choosing import candidates, overlap_errors

QUIET = Options(quiet=True)
AUTO = Recipe(members=2, overlap="auto", epochs=60, batch_size=20, optimizer="adam", lr=0.03)


def clusters(centres, labels, noise):
    """200 points around the centres, in turn."""
    which = torch.arange(200) % len(centres)
    points = torch.tensor(centres)[which] + noise * torch.randn(
        200, 2, generator=torch.Generator().manual_seed(0)
    )
    return points, torch.tensor(labels)[which]


XOR = clusters([(-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0)], [0, 1, 1, 0], 0.2)
ANGLES = [2 * math.pi * i / 8 for i in range(8)]
RING = clusters([(math.cos(a), math.sin(a)) for a in ANGLES], list(range(8)), 0.1)


def trained(train, recipe=AUTO, *, network=lambda: nn.Linear(2, 2), options=QUIET, **how):
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(network, recipe.members)
    return ensemble, cmcl.fit(ensemble, train, recipe=recipe, options=options, **how)


def narrow():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 8))


class TestWhatIsChosen:
    def test_specialists_where_one_member_cannot_learn_everything(self):
        """No linear classifier separates XOR, so independent ones fail together; specialists do not."""
        _, result = trained(XOR)
        assert result.overlap == 1
        assert result.overlap_errors[2] > result.overlap_errors[1] + 10

    def test_all_but_one(self):
        """The averaged prediction of four linear classifiers, three of which learn each example, solves XOR."""
        ensemble, result = trained(XOR, replace(AUTO, members=4))
        assert result.overlap == 3
        assert result.overlap_errors[4] > result.overlap_errors[3] + 10
        assert (ensemble.predict(XOR[0]).probs.argmax(1) == XOR[1]).all()

    def test_independent_members_where_each_can_learn_everything(self):
        """Two hidden units separate a ring of eight classes; a specialist has too few examples to learn to."""
        _, result = trained(RING, network=narrow)
        assert result.overlap == 2
        assert result.overlap_errors[1] > result.overlap_errors[2] + 10

    @pytest.mark.parametrize(("members", "overlaps"), [(1, [1]), (2, [1, 2]), (3, [2, 1, 3]), (5, [4, 1, 5])])
    def test_candidates(self, members, overlaps):
        assert candidates(members) == overlaps

    def test_the_first_of_equal_candidates(self):
        one_class = (torch.randn(200, 2), torch.zeros(200, dtype=torch.long))
        _, result = trained(one_class, replace(AUTO, members=4))
        assert set(result.overlap_errors.values()) == {0.0}
        assert result.overlap == 3


class TestHowItIsChosen:
    def test_short_runs_on_separate_examples(self):
        seen = []

        def score(recipe, kept, held_out):
            seen.append((recipe, kept, held_out))
            return {4: 3.0, 1: 2.0, 5: 1.0}[recipe.overlap]

        recipe = replace(AUTO, members=5, epochs=None, steps=100, milestones=((50, 0.1),), warm_start=10)
        assert overlap_errors(recipe, XOR, None, score) == {4: 3.0, 1: 2.0, 5: 1.0}
        short = replace(recipe, steps=20, milestones=((10, 0.1),), warm_start=2)
        assert [one for one, _, _ in seen] == [replace(short, overlap=k) for k in (4, 1, 5)]
        for _, kept, held_out in seen:
            assert torch.bincount(held_out[1]).tolist() == [20, 20], "20 % of each class"
            both = torch.cat([kept[0], held_out[0]])
            assert sorted(both.tolist()) == sorted(XOR[0].tolist())

    @pytest.mark.parametrize("targets", [torch.arange(40).view(10, 2, 2), torch.arange(10.0)])
    def test_targets_that_are_no_classes(self, targets):
        """Of masks and of numbers, any fifth is held out."""
        examples, sizes = (torch.arange(10.0).view(10, 1), targets), []

        def score(recipe, kept, held_out):
            sizes.append((len(kept[0]), len(held_out[0])))
            both = [torch.cat(parts) for parts in zip(kept, held_out, strict=True)]
            order = both[0].flatten().long()
            assert sorted(order.tolist()) == list(range(10))
            assert both[1].equal(targets[order])
            return 0.0

        overlap_errors(AUTO, examples, None, score)
        assert sizes == [(8, 2)] * 2

    def test_the_held_out_part_of_the_recipe_is_used(self):
        train = data.from_arrays(torch.rand(40, 1, 4, 4), torch.arange(40) % 2)
        recipe = replace(AUTO, epochs=2, validation=0.25)
        network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 2))  # noqa: E731
        _, result = trained(train, recipe, network=network)
        tenths = [error / 10 for error in result.overlap_errors.values()]  # of 10 held-out examples
        assert tenths == pytest.approx([round(n) for n in tenths])

    def test_then_the_run_is_as_with_that_overlap(self):
        auto, result = trained(XOR, replace(AUTO, epochs=5))
        given, other = trained(XOR, replace(AUTO, epochs=5, overlap=result.overlap))
        assert all(a.equal(b) for a, b in zip(auto.parameters(), given.parameters(), strict=True))
        assert (other.overlap, other.overlap_errors) == (result.overlap, {})

    def test_independent_training_has_nothing_to_choose(self):
        _, result = trained(XOR, replace(AUTO, method="ie", epochs=1))
        assert (result.overlap, result.overlap_errors) == (2, {})

    def test_it_is_said(self, capsys):
        trained(XOR, replace(AUTO, epochs=1), options=Options())
        assert "chose overlap 1 by the held-out error of short runs (1: " in capsys.readouterr().err

    def test_a_resumed_run_keeps_its_choice(self, tmp_path):
        recipe, calls, stop = replace(AUTO, epochs=5), [], [math.inf]

        def augment(images, targets, generator):
            calls.append(len(images))
            if len(calls) == stop[0]:
                signal.raise_signal(signal.SIGINT)
            return images, targets

        whole, result = trained(XOR, recipe, augment=augment)
        calls, stop = [], [len(calls) - 20]  # in the long run, 30 of its 50 steps done
        with pytest.raises(Interrupted, match="step 30 of 50"):
            trained(XOR, recipe, augment=augment, out=tmp_path)
        resumed, again = trained(XOR, recipe, augment=augment, out=tmp_path, resume=True)
        assert (again.overlap, again.overlap_errors) == (result.overlap, {}), "no short runs again"
        assert all(a.equal(b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))

    def test_a_folder_that_is_taken_raises_before_the_short_runs(self, tmp_path, monkeypatch):
        trained(XOR, replace(AUTO, epochs=1, overlap=1), out=tmp_path)
        monkeypatch.setattr(loop, "overlap_errors", lambda *_: pytest.fail("a short run"))
        with pytest.raises(ValueError, match="must be a new folder. It holds a run at step 10"):
            trained(XOR, replace(AUTO, epochs=1), out=tmp_path)
        with locked(tmp_path), pytest.raises(FolderInUseError):
            trained(XOR, replace(AUTO, epochs=1), out=tmp_path, resume=True)
        with pytest.raises(ValueError, match="must hold a checkpoint to resume from. It does not exist"):
            trained(XOR, replace(AUTO, epochs=1), out=tmp_path / "new", resume=True)

    def test_the_folder_is_taken_during_the_short_runs(self, tmp_path, monkeypatch):
        def in_use(*_):
            with pytest.raises(FolderInUseError), locked(tmp_path):
                pass
            return {1: 0.0}

        monkeypatch.setattr(loop, "overlap_errors", in_use)
        assert trained(XOR, replace(AUTO, epochs=1), out=tmp_path)[1].overlap == 1

    def test_a_signal_before_the_short_runs_is_not_lost(self, tmp_path, monkeypatch):
        stop = lambda *_: signal.raise_signal(signal.SIGTERM)  # noqa: E731
        monkeypatch.setattr(loop.RunFolder, "saved_recipe", stop)
        with pytest.raises(Interrupted, match="step 1 of 8"):
            trained(XOR, replace(AUTO, epochs=5), out=tmp_path)

    def test_a_signal_while_a_short_run_is_scored_stops_the_next(self, tmp_path, monkeypatch):
        calls, scores = [], loop._scores

        def scored(*rest):
            calls.append(rest)
            if len(calls) == 2:  # after the last step, where no checkpoint is due any more
                signal.raise_signal(signal.SIGTERM)
            return scores(*rest)

        monkeypatch.setattr(loop, "_scores", scored)
        with pytest.raises(Interrupted, match="stopped by SIGTERM at step 1 of 8"):
            trained(XOR, replace(AUTO, epochs=5), out=tmp_path)
        assert len(calls) == 2

    @pytest.mark.parametrize(
        ("train", "error", "message"),
        [
            (
                DataLoader(TensorDataset(*XOR), 20),
                TypeError,
                "a pair of tensors for overlap='auto'. Got DataLoader",
            ),
            ((XOR[0][:2], XOR[1][:2]), ValueError, "more examples for overlap='auto'. Got 2"),
        ],
    )
    def test_data_that_cannot_be_divided(self, train, error, message):
        with pytest.raises(error, match=message):
            trained(train)

    def test_an_objective_needs_a_number(self):
        with pytest.raises(ValueError, match="overlap must be a number here: `fit` chooses it. Got auto"):
            _ = AUTO.objective
