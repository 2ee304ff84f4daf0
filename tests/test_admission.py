"""What a run refuses before its first step, and in which words."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import cmcl
from cmcl import Ensemble, Options, Recipe, evaluate, fit
from cmcl.data.dataset import IGNORE
from cmcl.data.transforms import MeanStd
from cmcl.serialization import Missing
from cmcl.training.admission import check_scored
from test_train import CLASSES, QUIET, data, identical, weights
from test_train_edges import LINEAR, apart, dataset, linear


def loader(*tensors, batch=8):
    return DataLoader(TensorDataset(*tensors), batch)


class TestRepeats:
    def test_each_has_weights_of_its_own(self):
        """[ensemble] * 3 would train one set of weights with three gradients, and look like no variance."""
        with pytest.raises(ValueError, match="ensembles must have weights of their own. Got the same ones"):
            fit([apart()] * 2, data(), recipe=LINEAR, seed=[0, 1], options=QUIET)

    def test_as_many_seeds(self):
        with pytest.raises(ValueError, match="seed must give 1 numbers, one an ensemble. Got 2 for 1"):
            fit(apart(), data(), recipe=LINEAR, seed=[0, 1], options=QUIET)
        with pytest.raises(ValueError, match="Got 0 for 0 ensembles"):
            fit([], data(), recipe=LINEAR, seed=[], options=QUIET)

    def test_different_seeds(self):
        with pytest.raises(
            ValueError, match=r"seed must give different numbers, one an ensemble. Got \[5, 5\]"
        ):
            fit([apart(), apart()], data(), recipe=LINEAR, seed=[5, 5], options=QUIET)

    def test_seeds_of_numpy(self, tmp_path):
        ours, theirs = apart(), apart()
        fit(ours, data(), recipe=LINEAR, seed=3, options=QUIET)
        fit(theirs, data(), recipe=LINEAR, seed=np.int64(3), options=QUIET, out=tmp_path)
        assert identical(weights(ours), weights(theirs))
        with pytest.raises(TypeError, match="float"):
            fit(apart(), data(), recipe=LINEAR, seed=1.5, options=QUIET)

    @pytest.mark.parametrize("seeds", [np.arange(2), torch.arange(2), range(2), (0, 1)], ids=type)
    def test_seeds_in_any_row(self, seeds):
        assert len(fit([apart(), apart()], data(), recipe=LINEAR, seed=seeds, options=QUIET).rows) == 4

    def test_a_frozen_part_may_be_common(self):
        backbone = nn.Linear(25, 25).requires_grad_(False)

        def network():
            return nn.Sequential(nn.Flatten(), backbone, nn.Linear(25, 4))

        fit([apart(network), apart(network)], data(), recipe=LINEAR, seed=[0, 1], options=QUIET)
        backbone.requires_grad_(True)
        with pytest.raises(ValueError, match="weights of their own"):
            fit([apart(network), apart(network)], data(), recipe=LINEAR, seed=[0, 1], options=QUIET)


class TestData:
    @pytest.mark.parametrize(
        "train",
        [TensorDataset(*data()), tuple(map(np.asarray, data())), data()[0], "digits", None],
        ids=["dataset of torch", "arrays", "no targets", "name", "nothing"],
    )
    def test_something_to_learn_from(self, train):
        with pytest.raises(TypeError, match="train must be a Dataset, a pair of tensors .* or a DataLoader"):
            fit(apart(), train, recipe=LINEAR, options=QUIET)

    def test_examples_that_the_networks_take(self):
        images, targets = data()
        with pytest.raises(ValueError, match=r"must take an example of train. Got torch.float64 of shape"):
            fit(apart(), (images.double(), targets), recipe=LINEAR, options=QUIET)
        with pytest.raises(ValueError, match=r"compute in float32: convert by images.float\(\)\.$"):
            fit(apart(), (images.double(), targets), recipe=LINEAR, options=QUIET)
        with pytest.raises(
            ValueError, match=r"test must .* compute in float32: convert by images.float\(\)\.$"
        ):
            fit(apart(), data(), recipe=LINEAR, test=(images.double(), targets), options=QUIET)
        with pytest.raises(ValueError, match=r"compute in float64: convert by images.double\(\)\.$"):
            fit(apart().double(), data(), recipe=LINEAR, options=QUIET)
        with pytest.raises(ValueError, match=r"of shape \(1, 5, 4\) and this answer: .*mat1 and mat2.*\.$"):
            fit(apart(), (images[..., 1:], targets), recipe=LINEAR, options=QUIET)

    def test_bytes_that_are_no_images(self):
        vectors = torch.randint(256, (40, 25), dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"Got \(40, 25\).* not images"):
            fit(apart(), (vectors, data()[1]), recipe=LINEAR, options=QUIET)
        fit(apart(), (vectors.float() / 255, data()[1]), recipe=LINEAR, options=QUIET)

    def test_batches_of_two_tensors(self):
        images, targets = data()

        def dicts(rows):
            return {"x": torch.stack([x for x, _ in rows])}

        train = DataLoader(TensorDataset(images, targets), 8, collate_fn=dicts)
        with pytest.raises(TypeError, match=r"must be \(images, targets\), two tensors. Got dict"):
            fit(apart(), train, recipe=LINEAR, options=QUIET)
        with pytest.raises(
            TypeError,
            match=r"two tensors. Got a torch.float32 tensor of .*, a torch.int64 tensor of shape \(8,\), a",
        ):
            fit(apart(), loader(images, targets, targets), recipe=LINEAR, options=QUIET)

    def test_streams_need_a_length(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(zip(*data(), strict=True))

        class Known(Stream):
            def __len__(self):
                return 40

        with pytest.raises(TypeError, match="train must have a length. Got a DataLoader without: .*Stream"):
            fit(apart(), DataLoader(Stream(), 8), recipe=LINEAR, options=QUIET)
        streamed, indexed = apart(), apart()
        fit(streamed, DataLoader(Known(), 8), recipe=LINEAR, options=QUIET)
        fit(indexed, loader(*data()), recipe=LINEAR, options=QUIET)
        assert identical(weights(streamed), weights(indexed))


class TestLabels:
    def test_of_a_later_batch(self, tmp_path):
        """A DataLoader shows them only on the way; what was learned before is kept."""
        images, targets = data()
        targets[-1] = 99
        train = loader(images, targets)
        with pytest.raises(ValueError, match=r"targets must be between 0 and 3 .*Got . to 99"):
            fit(
                apart(),
                train,
                recipe=LINEAR,
                out=tmp_path,
                options=replace(QUIET, checkpoint_seconds=0),
            )
        kept = sorted(path.name[:13] for path in (tmp_path / "checkpoints").glob("step-*"))
        assert kept[-1] == f"step-{len(train) - 1:08d}"

    def test_of_pixels(self):
        images, targets = torch.rand(4, 1, 5, 5), torch.zeros(4, 5, 5, dtype=torch.long)
        targets[0, 0, 0] = IGNORE
        pixels = Ensemble(lambda: nn.Conv2d(1, 2, 1), 2)
        fit(pixels, (images, targets), recipe=LINEAR, options=QUIET)
        targets[3, 4, 4] = 2
        for train in ((images, targets), loader(images, targets, batch=2)):
            with pytest.raises(ValueError, match=r"targets must be between 0 and 1 .*Got 0 to 2"):
                fit(pixels, train, recipe=LINEAR, options=QUIET)

    def test_of_a_task_of_its_own(self):
        """What they mean is the task's business, in every batch."""
        images, targets = data()
        targets[-1] = 99

        def doubled(logits, targets):
            return F.cross_entropy(logits, targets % CLASSES, reduction="none")

        for train in ((images, targets), loader(images, targets)):
            fit(apart(), train, recipe=LINEAR, task=doubled, options=QUIET)


class TestRawLoaders:
    def test_go_through_the_transform(self):
        """As the same images do that come as tensors."""
        images = torch.randint(256, (40, 1, 5, 5), dtype=torch.uint8)
        targets = data()[1]
        raw, ready = apart(), apart()
        raw.transform = MeanStd().fit(images)
        fit(raw, loader(images, targets), recipe=LINEAR, options=QUIET)
        fit(ready, loader(raw.transform.transform(images), targets), recipe=LINEAR, options=QUIET)
        assert identical(weights(raw), weights(ready))

    def test_without_one_the_networks_take_them_as_they_are(self):
        class Scaled(nn.Sequential):
            def forward(self, x):
                return super().forward(x.float() / 255)

        images, targets = torch.randint(256, (40, 1, 5, 5), dtype=torch.uint8), data()[1]
        raw, ready = apart(lambda: Scaled(*linear())), apart()
        fit(raw, loader(images, targets), recipe=LINEAR, options=QUIET)
        fit(ready, loader(images.float() / 255, targets), recipe=LINEAR, options=QUIET)
        assert identical(weights(raw), weights(ready))
        with pytest.raises(ValueError, match=r"must take an example of train. Got torch.uint8 of shape"):
            fit(apart(), loader(images, targets), recipe=LINEAR, options=QUIET)


class TestScoredData:
    """A mistake in them is told before the first step, not after the last."""

    images, targets = data()

    @pytest.mark.parametrize(
        ("test", "reason"),
        [
            ((images, targets + 1), "between 0 and 3"),
            ((images[..., 1:], targets), "mat1 and mat2"),
            ((images, F.one_hot(targets).float()), "targets"),
            ((images.byte(), targets), "must"),
            ((images[:0], targets[:0]), "as many images as targets, and not none. Got 0 and 0"),
            ((images, targets[1:]), "Got 40 and 39"),
        ],
        ids=["labels", "size", "soft", "raw", "none", "fewer"],
    )
    def test_mistakes(self, test, reason, monkeypatch):
        monkeypatch.setattr(cmcl.training.run.Run, "go", lambda *_: pytest.fail("it began to train"))
        with pytest.raises(ValueError, match=f"test must .*{reason}"):
            fit(apart(), data(), recipe=LINEAR, test=test, options=QUIET)

    def test_two_classes_as_booleans(self):
        test = data()[0], data()[1] > 1
        assert fit(apart(), data(), recipe=LINEAR, test=test, options=QUIET).scores

    def test_images_where_no_pixel_counts(self):
        images, masks = torch.randn(6, 3, 12, 12), torch.randint(2, (6, 12, 12))
        masks[0] = IGNORE
        masks[:, 0] = IGNORE
        ensemble = cmcl.Ensemble(lambda: cmcl.networks.fcn(filters=(3, 4)), 2)
        recipe = Recipe(members=2, epochs=1, batch_size=4, lr=0.1)
        assert fit(ensemble, (images, masks), recipe=recipe, test=(images, masks), options=QUIET).scores

    def test_what_kind(self):
        with pytest.raises(TypeError, match="test must be a Dataset"):
            fit(apart(), data(), recipe=LINEAR, test=TensorDataset(*data()), options=QUIET)

    def test_looking_draws_nothing(self):
        """Masks at test time come from torch's generator, which others use."""

        def cut():
            torch.manual_seed(0)
            ensemble = cmcl.Ensemble(lambda: linear(nn.ReLU()), 2, share_after="1")
            ensemble.share_at_test = "sampled"
            return ensemble

        recipe = replace(LINEAR, labels="sampled")
        ensemble, before = cut(), torch.get_rng_state()
        check_scored("test", ensemble, data())
        assert torch.get_rng_state().equal(before)
        ensemble.predict(data()[0])
        assert not torch.get_rng_state().equal(before), "this ensemble draws"
        looked, blind = cut(), cut()
        fit(looked, data(), recipe=recipe, test=data(), options=QUIET)
        fit(blind, data(), recipe=recipe, options=QUIET)
        assert identical(weights(looked), weights(blind))


def test_a_task_that_ignores_labels_of_its_own():
    images, targets = data()
    targets = targets.clone()
    targets[:10] = -100
    task = partial(F.cross_entropy, reduction="none", ignore_index=-100)
    rows = fit(apart(), (images, targets), recipe=LINEAR, task=task, options=QUIET).rows
    assert "win_rates_by_class" not in rows[0]
    with pytest.raises(ValueError, match="targets must be between 0 and 3"):
        fit(apart(), (images, targets), recipe=LINEAR, options=QUIET)
    later = loader(images.flip(0), targets.flip(0))  # none in the first batch
    rows = fit(apart(), later, recipe=LINEAR, task=task, options=QUIET).rows
    assert "win_rates_by_class" not in rows[0]


def test_a_run_that_is_all_warm_start():
    with pytest.warns(UserWarning, match=r"the run ends in its warm start \(9 epochs of 2\)"):
        fit(apart(), data(), recipe=replace(LINEAR, warm_start=9), options=QUIET)


def test_images_that_are_ready_need_no_fitted_transform(tmp_path):
    """An ensemble of the zoo, loaded without its data, can be trained on."""
    ensemble = apart()
    ensemble.transform = MeanStd()
    fit(ensemble, data(), recipe=LINEAR, options=QUIET)
    ensemble.transform = Missing({"kind": "zca", "source": {"recipe": {"name": "cifar10"}}})
    fit(ensemble, data(), recipe=LINEAR, options=QUIET, out=tmp_path)


def test_to_resume_needs_a_folder():
    with pytest.raises(ValueError, match="out must name the folder of the run to be resumed"):
        fit(apart(), data(), recipe=LINEAR, resume=True, options=QUIET)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there():
    with pytest.raises(
        ValueError, match="device must be one that torch can use. Got 'cuda', and torch finds"
    ):
        fit(apart(), data(), recipe=LINEAR, options=Options(device="cuda", quiet=True))


def test_options():
    with pytest.raises(ValueError, match="evaluate_every must be a whole number of at least 0. Got -1."):
        Options(evaluate_every=-1)


def test_held_out_data_are_looked_at_first(monkeypatch):
    seen = []
    monkeypatch.setattr(cmcl.training.run, "check_scored", lambda name, *_: seen.append(name))
    recipe = replace(LINEAR, validation=0.25, epochs=1)
    fit(apart(), dataset(), recipe=recipe, test=data(), options=QUIET)
    assert seen == ["the held-out part of train", "test"]


class TestScoredLoaders:
    def test_are_looked_at_before_the_first_step(self, monkeypatch):
        monkeypatch.setattr(cmcl.training.run.Run, "go", lambda *_: pytest.fail("it began to train"))
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
                check_scored("test", apart(), test)
            seen += [targets for _, targets in test]
        assert torch.equal(torch.cat(looked), torch.cat(alone))

    def test_scored_by_hand_they_are_told(self):
        with pytest.raises(ValueError, match="data must hold at least one batch"):
            evaluate(apart(), DataLoader(TensorDataset(*(t[:0] for t in data())), 8))
        with pytest.raises(TypeError, match="batches of data must be"):
            evaluate(apart(), DataLoader([{"x": x} for x in data()[0]], 8))
