"""Every check before training: what `fit` raises for, and that it changes nothing then."""

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
from cmcl.training import loop
from cmcl.training.preflight import check_scored
from test_train import CLASSES, QUIET, data, identical, weights
from test_train_edges import LINEAR, apart, dataset, linear


def loader(*tensors, batch=8):
    return DataLoader(TensorDataset(*tensors), batch)


class TestData:
    @pytest.mark.parametrize(
        "train",
        [TensorDataset(*data()), data()[0], "digits", None],
        ids=["dataset of torch", "no targets", "name", "nothing"],
    )
    def test_something_to_learn_from(self, train):
        with pytest.raises(TypeError, match="train must be a Dataset, a pair .* or a DataLoader"):
            fit(apart(), train, recipe=LINEAR, options=QUIET)
        if train is not None:
            with pytest.raises(TypeError, match="test must be a Dataset, a pair .* or a DataLoader"):
                fit(apart(), data(), recipe=LINEAR, test=train, options=QUIET)

    @pytest.mark.parametrize("field", ["adversarial", "validation"])
    def test_settings_that_need_tensors(self, field):
        with pytest.raises(TypeError, match=f"train must be .*{field}.* Got"):
            fit(apart(), loader(*data()), recipe=replace(LINEAR, **{field: 0.1}), options=QUIET)

    def test_examples_that_the_networks_take(self):
        images, targets = data()
        double = images.double(), targets
        with pytest.raises(
            ValueError, match=r"train must .*.float64 .*convert by images.to\(torch.float32\)"
        ):
            fit(apart(), double, recipe=LINEAR, options=QUIET)
        with pytest.raises(ValueError, match=r"test must .*.float64 .*convert by images.to\(torch.float32\)"):
            fit(apart(), data(), recipe=LINEAR, test=double, options=QUIET)
        with pytest.raises(ValueError, match=r"convert by images.to\(torch.float64\)"):
            fit(apart().double(), data(), recipe=LINEAR, options=QUIET)
        with pytest.raises(ValueError, match=r"of shape \(1, 5, 4\) and this error: .*mat1 and mat2.*\.$"):
            fit(apart(), (images[..., 1:], targets), recipe=LINEAR, options=QUIET)

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


def test_raw_images_of_a_loader():
    """They go through the transform; without one, networks take them as they are."""
    images, targets = torch.randint(256, (40, 1, 5, 5), dtype=torch.uint8), data()[1]
    raw, ready = apart(), apart()
    raw.transform = MeanStd().fit(images)
    fit(raw, loader(images, targets), recipe=LINEAR, options=QUIET)
    fit(ready, loader(raw.transform.transform(images), targets), recipe=LINEAR, options=QUIET)
    assert identical(weights(raw), weights(ready))

    class Scaled(nn.Sequential):
        def forward(self, x):
            return super().forward(x.float() / 255)

    raw, ready = apart(lambda: Scaled(*linear())), apart()
    in_turn = replace(QUIET, members="sequential")  # a class of one's own is never stacked
    fit(raw, loader(images, targets), recipe=LINEAR, options=in_turn)
    fit(ready, loader(images.float() / 255, targets), recipe=LINEAR, options=in_turn)
    assert identical(weights(raw), weights(ready))
    with pytest.raises(ValueError, match=r"networks accept. Got torch.uint8 of shape"):
        fit(apart(), loader(images, targets), recipe=LINEAR, options=QUIET)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_what_to_do_with_token_ids_of_a_narrow_type(dtype):
    words = apart(lambda: nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 4)))
    tokens, targets = torch.randint(50, (8, 3)).to(dtype), torch.randint(4, (8,))
    with pytest.raises(ValueError, match=r"Convert token ids by inputs.long\(\)"):
        fit(words, (tokens, targets), recipe=LINEAR, options=QUIET)
    fit(words, (tokens.long(), targets), recipe=LINEAR, options=QUIET)


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
            ((images[:0], targets[:0]), "as many images as targets, at least one. Got 0 and 0"),
            ((images, targets[1:]), "Got 40 and 39"),
        ],
        ids=["labels", "size", "soft", "raw", "none", "fewer"],
    )
    def test_mistakes(self, test, reason, monkeypatch):
        monkeypatch.setattr(loop, "TrainState", lambda *_: pytest.fail("it began to train"))
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
    assert "specialist_fraction_by_class" not in rows[0]
    with pytest.raises(ValueError, match="targets must be between 0 and 3"):
        fit(apart(), (images, targets), recipe=LINEAR, options=QUIET)
    later = loader(images.flip(0), targets.flip(0))  # none in the first batch
    rows = fit(apart(), later, recipe=LINEAR, task=task, options=QUIET).rows
    assert "specialist_fraction_by_class" not in rows[0]


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
    with pytest.raises(ValueError, match="out must name the folder of the run to resume"):
        fit(apart(), data(), recipe=LINEAR, resume=True, options=QUIET)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there():
    with pytest.raises(
        ValueError, match="device must be one that torch can use. Got 'cuda', and torch finds"
    ):
        fit(apart(), data(), recipe=LINEAR, options=Options(device="cuda", quiet=True))


def test_held_out_data_are_looked_at_first(monkeypatch):
    seen = []
    monkeypatch.setattr(cmcl.training.preflight, "check_scored", lambda name, *_: seen.append(name))
    recipe = replace(LINEAR, validation=0.25, epochs=1)
    fit(apart(), dataset(), recipe=recipe, test=data(), options=QUIET)
    assert seen == ["the held-out part of train", "test"]


class TestScoredLoaders:
    def test_are_looked_at_before_the_first_step(self, monkeypatch):
        monkeypatch.setattr(loop, "TrainState", lambda *_: pytest.fail("it began to train"))
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


class TestNothingIsChanged:
    """A `fit` that raises leaves transform, classes, device, modes and statistics as they were."""

    def ensemble(self):
        torch.manual_seed(0)
        return Ensemble(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(25), nn.Linear(25, CLASSES)), 2)

    @pytest.mark.parametrize(
        "wrong",
        [
            dict(test=(data()[0], data()[1] + 9)),
            dict(recipe=replace(LINEAR, batch_size=1)),
            dict(ignore_index="some"),
            dict(seed=-1),
            dict(options=Options(quiet=True, device="cuda:99")),
            dict(options=Options(quiet=True, device="cuda:128")),
            dict(options=Options(quiet=True, device="cuda:99999999999")),
            dict(options=Options(quiet=True, device="xpu:99")),
        ],
        ids=[
            "test",
            "recipe",
            "ignore_index",
            "seed",
            "device",
            "negative for torch",
            "no number for torch",
            "device that torch lacks",
        ],
    )
    def test_by_a_mistake(self, wrong, tmp_path):
        ensemble, images = self.ensemble(), (data()[0] * 40 + 128).clamp(0, 255).byte()
        before, modes = weights(ensemble), [m.training for m in ensemble.modules()]
        train = cmcl.data.Dataset(images, data()[1], tuple("abcd"))
        with pytest.raises(ValueError, match="must"):
            fit(ensemble, train, **{"recipe": LINEAR, "options": QUIET, "out": tmp_path / "run"} | wrong)
        assert (ensemble.transform, ensemble.classes) == (None, None)
        assert identical(weights(ensemble), before)
        assert [m.training for m in ensemble.modules()] == modes
        assert not (tmp_path / "run").exists()

    def test_by_a_first_step_that_fails(self):
        class Picky(nn.Flatten):
            def forward(self, x):
                if self.training:
                    raise RuntimeError("not while training")
                return super().forward(x)

        ensemble = Ensemble(lambda: nn.Sequential(Picky(), nn.Linear(25, CLASSES)), 2)
        ensemble.temperature, ensemble.classes = 0.5, tuple("wxyz")
        images = (data()[0] * 40 + 128).clamp(0, 255).byte()
        with pytest.raises(RuntimeError, match="not while training"):
            fit(ensemble, cmcl.data.Dataset(images, data()[1], tuple("abcd")), recipe=LINEAR, options=QUIET)
        assert (ensemble.transform, ensemble.image_shape) == (None, None)
        assert (ensemble.temperature, ensemble.classes) == (0.5, tuple("wxyz"))

    def test_by_a_folder_of_another_run(self, tmp_path):
        train = cmcl.data.Dataset(data()[0], data()[1], tuple("abcd"))
        fit(self.ensemble(), train, recipe=LINEAR, out=tmp_path, options=QUIET)
        other = self.ensemble()
        with pytest.raises(ValueError, match="recipe must be that of the run"):
            fit(other, train, recipe=replace(LINEAR, lr=0.2), out=tmp_path, resume=True, options=QUIET)
        assert other.classes is None


class TestFrozenModules:
    def test_a_batch_norm_in_eval_mode_keeps_mode_and_statistics(self):
        torch.manual_seed(0)
        ensemble = Ensemble(
            lambda: nn.Sequential(
                nn.Flatten(), nn.BatchNorm1d(25), nn.Linear(25, CLASSES), nn.BatchNorm1d(4)
            ),
            2,
        )
        frozen, free = ensemble.members[0][1].eval(), ensemble.members[1][1]
        before = frozen.running_mean.clone(), free.running_mean.clone()
        seen = []
        frozen.register_forward_hook(lambda module, *_: seen.append(module.training))
        fit(ensemble, data(), recipe=LINEAR, test=data(), options=replace(QUIET, evaluate_every=1))
        assert not any(seen)
        assert frozen.running_mean.equal(before[0])
        assert not free.running_mean.equal(before[1])
        fit(ensemble, data(), recipe=LINEAR, options=QUIET)  # which finds all modules in eval mode
        assert frozen.running_mean.equal(before[0])
        fit(ensemble.train(), data(), recipe=LINEAR, options=QUIET)
        assert not frozen.running_mean.equal(before[0]), "set free by train()"

    def test_a_network_in_eval_mode_is_trained(self):
        """As pretrained networks come, and as `fit` returns them."""
        ensemble = apart(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(25), nn.Linear(25, CLASSES)))
        ensemble.members[0].eval()
        fit(ensemble, data(), recipe=LINEAR, options=QUIET)
        first = ensemble.members[0][1].running_mean.clone()
        fit(ensemble, data(), recipe=LINEAR, options=QUIET)
        assert not ensemble.members[0][1].running_mean.equal(first)


class TestArrays:
    def test_are_taken(self):
        ours, theirs = apart(), apart()
        images, targets = data()
        arrays = images.double().numpy()[:, :, ::-1], targets.numpy().astype(np.int16)
        fit(ours, arrays, recipe=LINEAR, test=arrays, options=QUIET)
        fit(theirs, (images.flip(2), targets), recipe=LINEAR, options=QUIET)
        assert identical(weights(ours), weights(theirs))
        assert evaluate(ours, arrays) == evaluate(ours, (images.flip(2), targets))

    def test_classes_that_are_words(self):
        for words in (np.array(["cat", "dog"] * 20), np.array(["cat", "dog"] * 20, dtype=object), ["a"] * 40):
            with pytest.raises(TypeError, match="LabelEncoder, or use cmcl.CMCLClassifier"):
                fit(apart(), (data()[0].numpy(), words), recipe=LINEAR, options=QUIET)

    def test_labels_from_1(self):
        for targets in (data()[1] + 1, (data()[1] + 1).numpy()):
            with pytest.raises(ValueError, match="Got 1 to 4; labels start at 0: subtract 1"):
                fit(apart(), (data()[0], targets), recipe=LINEAR, options=QUIET)

    def test_numbers_to_regress(self):
        with pytest.raises(TypeError, match="Got a torch.float32 .*classification"):
            fit(apart(), (data()[0], torch.rand(40)), recipe=LINEAR, options=QUIET)

    def test_uint8_tokens_are_ordinary_inputs(self):
        class Bag(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.last = nn.Embedding(256, 8), nn.Linear(8, CLASSES)

            def forward(self, tokens):
                return self.last(self.embedding(tokens.int()).mean(1))

        tokens = torch.randint(256, (40, 6), dtype=torch.uint8)
        ensemble = apart(Bag)
        result = fit(ensemble, (tokens, data()[1]), recipe=LINEAR, test=(tokens, data()[1]), options=QUIET)
        assert ensemble.transform is None
        assert result.scores["top1"] <= 100


@pytest.mark.parametrize(("last", "warned"), [(nn.Softmax(1), 1), (nn.LogSoftmax(1), 1), (nn.Identity(), 0)])
def test_outputs_of_a_softmax(last, warned, recwarn):
    fit(apart(lambda: linear(last)), data(), recipe=LINEAR, options=QUIET)
    assert sum("logits look like" in str(w.message) for w in recwarn) == warned


class TestBatchNorm:
    def vectors(self):
        return apart(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(25, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        )

    @pytest.mark.parametrize(
        "train",
        [data(1), DataLoader(TensorDataset(*data(17)), 8), DataLoader(TensorDataset(*data()), 1)],
        ids=["one example", "last batch", "batches of one"],
    )
    def test_a_batch_of_one(self, train):
        with pytest.raises(ValueError, match="BatchNorm must see more than one example"):
            fit(self.vectors(), train, recipe=LINEAR, options=QUIET)

    def test_parts_of_one(self):
        with pytest.raises(ValueError, match="Got a batch of 8, in 8 parts"):
            fit(self.vectors(), data(), recipe=replace(LINEAR, accumulate=8), options=QUIET)

    def test_where_it_has_more_values(self):
        def pixels():
            return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, CLASSES))

        fit(apart(pixels), data(9), recipe=LINEAR, options=QUIET)
        dropped = DataLoader(TensorDataset(*data(17)), 8, drop_last=True)
        fit(self.vectors(), dropped, recipe=LINEAR, options=QUIET)


def test_both_errors_of_dense_outputs():
    """Two members of one pixel image each; worked out by hand.

    The averaged prediction is right at one pixel of two, the more confident member at none.
    """

    class Fixed(nn.Module):
        def __init__(self, probs):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(()))
            self.register_buffer("logits", torch.tensor(probs).log())

        def forward(self, x):
            return self.logits.expand(len(x), 2, 1, 2) + self.weight

    # classes by pixels; targets are 0 and 0
    sure = Fixed([[[0.1, 0.4]], [[0.9, 0.6]]])  # wrong at both, and more confident
    other = Fixed([[[0.2, 0.7]], [[0.8, 0.3]]])  # right at the second
    scores = evaluate(Ensemble([sure, other]), (torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2).long()))
    assert (scores["top1"], scores["picked"]) == (50.0, 100.0)
    assert (scores["oracle"], scores["member"]) == (50.0, 75.0)
