"""Batches: every example once in N of the stream, full batches, an order that anyone can work out again."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from cmcl.data import from_arrays
from cmcl.training.batches import Loaded, Resident, epoch_seed, permutation, subset, tensors

CPU = torch.device("cpu")


def resident(n, batch, seed=0):
    """Example i is the image i, its target i % 7."""
    images = torch.arange(n, dtype=torch.float32).reshape(n, 1, 1, 1)
    return Resident(images, torch.arange(n) % 7, batch, seed, CPU)


def take(source, epoch, first=None):
    """The examples of an epoch's steps, (steps, B), from step `first` on."""
    steps = source.steps(epoch)
    first = steps.start if first is None else first
    rows = []
    for size in source.epoch(epoch, range(first, steps.stop)):
        images, targets = source.current()
        assert len(targets) == size
        assert (images.flatten().long() % 7).equal(targets)
        rows.append(images.flatten().long())
        source.advance()
    return torch.stack(rows) if rows else torch.empty(0, source.batch_size, dtype=torch.long)


SIZES = [(12, 4), (10, 4), (7, 7), (9, 8), (5, 1), (23, 5)]


class TestResident:
    @pytest.mark.parametrize(("n", "batch"), SIZES)
    def test_every_example_once_in_n_of_the_stream(self, n, batch):
        source = resident(n, batch)
        stream = torch.cat([take(source, epoch).flatten() for epoch in range(5)])
        for epoch in range(len(stream) // n):
            assert stream[epoch * n : (epoch + 1) * n].sort().values.tolist() == list(range(n))

    @pytest.mark.parametrize(("n", "batch"), SIZES)
    def test_batches_are_full_and_steps_without_gaps(self, n, batch):
        source, step = resident(n, batch), 0
        for epoch in range(6):
            steps = source.steps(epoch)
            assert steps.start == step
            step = steps.stop
            assert take(source, epoch).shape == (len(steps), batch)
        assert step * batch >= 6 * n > (step - 1) * batch

    @pytest.mark.parametrize(("n", "batch"), SIZES)
    def test_beginning_anywhere_gives_the_tail(self, n, batch):
        source = resident(n, batch)
        for epoch in (0, 1, 2):
            whole, steps = take(source, epoch), source.steps(epoch)
            for first in steps:
                assert take(resident(n, batch), epoch, first).equal(whole[first - steps.start :])

    def test_the_order_follows_seed_and_epoch_alone(self):
        torch.manual_seed(1)
        first = take(resident(20, 5, 3), 2)
        torch.manual_seed(2)
        source = resident(20, 5, 3)
        for epoch in (4, 0):
            take(source, epoch)
        assert take(source, 2).equal(first)
        assert not take(source, 3).equal(first)
        assert not take(resident(20, 5, 4), 2).equal(first)

    def test_drawing_it_leaves_the_global_generator_alone(self):
        before = torch.get_rng_state()
        take(resident(20, 5), 0)
        assert torch.get_rng_state().equal(before)

    def test_the_epoch_of_a_step_is_that_where_its_batch_begins(self):
        assert [resident(10, 4).epoch_of(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]

    def test_more_than_there_is(self):
        source = resident(3, 128)
        assert source.batch_size == 3
        assert [len(source.steps(epoch)) for epoch in range(4)] == [1, 1, 1, 1]

    def test_all_that_a_step_changes_is_its_row(self):
        source = resident(10, 4)
        source.seek(0, 1)
        (row,) = source.tensors()
        assert row.item() == 1
        source.advance()
        assert row.item() == 2


class Noisy(TensorDataset):
    """Draws from the global generator for each example, as augmentations do."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image + torch.rand(()), target


def loaded(n=10, batch=4, seed=0, kind=TensorDataset, **options):
    data = kind(torch.arange(n, dtype=torch.float32).reshape(n, 1), torch.arange(n))
    return Loaded(DataLoader(data, batch_size=batch, **options), seed, CPU, lambda x: x)


def draw(source, epoch, first=None):
    """The batches of an epoch; in between the global generator is used by others, as a step does."""
    steps = source.steps(epoch)
    first = steps.start if first is None else first
    batches = []
    for size in source.epoch(epoch, range(first, steps.stop)):
        batches.append(source.current())
        assert len(batches[-1][1]) == size
    return batches


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        a.equal(c) and b.equal(d) for (a, b), (c, d) in zip(ours, theirs, strict=True)
    )


class TestLoaded:
    def test_the_loaders_batches_as_they_are(self):
        source = loaded()
        assert [len(x) for x, _ in draw(source, 0)] == [4, 4, 2]
        assert torch.cat([y for _, y in draw(source, 1)]).tolist() == list(range(10))
        assert source.steps(2) == range(6, 9)
        assert (source.examples, source.batch_size) == (12, 4), "as if the last batch were full"

    @pytest.mark.parametrize("kind", [TensorDataset, Noisy])
    @pytest.mark.parametrize("own", [True, False])
    def test_shuffled_the_same_again_from_anywhere(self, kind, own):
        def make(seed=0):
            return loaded(kind=kind, seed=seed, shuffle=True, generator=torch.Generator() if own else None)

        torch.manual_seed(1)
        whole = draw(make(), 1)
        torch.manual_seed(2)
        for first in (3, 4, 5):
            assert same(draw(make(), 1, first), whole[first - 3 :])
        assert not same(draw(make(), 2), whole)
        assert not same(draw(make(seed=1), 1), whole)

    def test_a_sampler_follows_the_epoch(self):
        def make(seed):
            data = TensorDataset(torch.zeros(30, 1), torch.arange(30))
            sampler = DistributedSampler(data, num_replicas=2, rank=0, seed=seed)
            return Loaded(DataLoader(data, 10, sampler=sampler), seed, CPU, lambda x: x)

        whole = draw(make(1), 4)
        assert same(draw(make(1), 4), whole)
        assert same(draw(make(1), 4, 9), whole[1:])
        assert not same(draw(make(1), 5), whole)

    def test_one_batch_less_than_its_length_says(self):
        class Short(IterableDataset):
            def __len__(self):
                return 12

            def __iter__(self):
                return ((torch.zeros(1), i) for i in range(8))

        source = Loaded(DataLoader(Short(), 4), 0, CPU, lambda x: x)
        with pytest.raises(ValueError, match="as many batches as its length says, 3. Got fewer"):
            draw(source, 0)


def test_a_subset_has_examples_of_every_class():
    dataset = from_arrays(torch.zeros(12, 1, 2, 2, dtype=torch.uint8), torch.arange(12) % 3)
    assert subset(dataset, 6).targets.bincount().tolist() == [2, 2, 2]
    assert subset(dataset, 12) is subset(dataset, None) is dataset
    pair = tensors(dataset)
    assert subset(pair, 12) is pair
    with pytest.raises(TypeError, match=r"a Dataset for recipe.subset. Got tuple"):
        subset(pair, 6)


def test_orders_stay_the_same_from_version_to_version():
    """A run resumed by a newer version must see the examples that the old one would have seen."""
    assert epoch_seed(0, 0) == 3056769172604291498
    assert permutation(8, 0, 0).tolist() == [5, 6, 7, 2, 0, 4, 3, 1]
