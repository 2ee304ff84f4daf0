import functools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cmcl.data import Batches, Dataset, as_batches
from cmcl.data.batches import epoch_seed


def numbered(n):
    return torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1), torch.arange(n)


def seen(batches):
    return [targets.tolist() for _, targets in batches]


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 50),
    world=st.integers(1, 4),
    per_rank=st.integers(1, 8),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 99),
)
def test_ranks_share_out_each_batch(n, world, per_rank, seed, epoch):
    size = per_rank * world
    alone = list(seen(Batches(*numbered(n), size, seed).epoch(epoch)))
    assert sorted(functools.reduce(operator.iadd, alone, [])) == list(range(n))
    ranks = [Batches(*numbered(n), size, seed, rank=rank, world=world) for rank in range(world)]
    shares = [seen(batches.epoch(epoch)) for batches in ranks]
    for i in range(len(ranks[0])):
        parts = [share[i] for share in shares]
        assert len({len(part) for part in parts}) == 1
        assert set(functools.reduce(operator.iadd, parts, [])) <= set(alone[i])
    assert sum(len(part) for share in shares for part in share) == n - n % world


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 40), world=st.integers(1, 5), size=st.integers(1, 9))
def test_uneven_shares_evaluate_every_image_once(n, world, size):
    options = {"shuffle": False, "even_shares": False, "world": world}
    shares = [seen(Batches(*numbered(n), size, rank=rank, **options).epoch(0)) for rank in range(world)]
    assert sorted(x for share in shares for part in share for x in part) == list(range(n))


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 40), size=st.integers(1, 9), start=st.integers(0, 45), drop=st.booleans())
def test_an_epoch_goes_on_at_any_batch(n, size, start, drop):
    batches = Batches(*numbered(n), size, drop_last=drop)
    whole = seen(batches.epoch(7))
    assert len(whole) == len(batches)
    assert seen(batches.epoch(7, start)) == whole[start:]
    assert not drop or all(len(batch) == size for batch in whole)


def test_order_depends_on_seed_and_epoch():
    batches = Batches(*numbered(100), 10, seed=1)
    assert seen(batches.epoch(0)) == seen(batches.epoch(0))
    assert seen(batches.epoch(0)) != seen(batches.epoch(1))
    assert seen(batches.epoch(0)) != seen(Batches(*numbered(100), 10, seed=2).epoch(0))
    assert seen(Batches(*numbered(4), 3, shuffle=False).epoch(5)) == [[0, 1, 2], [3]]


def test_orders_stay_the_same_from_version_to_version():
    """A run resumed by a newer version must see the images that the old one would have seen."""
    assert epoch_seed(0, 0) == 3056769172604291498
    assert Batches(*numbered(8), 8).order(0).tolist() == [5, 6, 7, 2, 0, 4, 3, 1]


def test_images_stay_with_their_targets():
    for images, targets in Batches(*numbered(50), 7).epoch(3):
        assert images.flatten().tolist() == targets.tolist()


def test_a_dataset_tensors_and_a_loader_are_all_accepted():
    images, targets = numbered(10)
    dataset = Dataset(images, targets, tuple(map(str, range(10))))
    loader = DataLoader(TensorDataset(images, targets), batch_size=4)
    for data in (dataset, (images, targets), loader):
        batches = as_batches(data, batch_size=4, **({} if data is loader else {"shuffle": False}))
        assert len(batches) == 3
        assert seen(batches.epoch(0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert seen(batches.epoch(0, 2)) == [[8, 9]]


def test_a_loader_takes_no_options():
    loader = DataLoader(TensorDataset(*numbered(10)), batch_size=4)
    with pytest.raises(TypeError, match="rank, world must be set in the DataLoader itself"):
        as_batches(loader, batch_size=4, world=2, rank=1)


def test_a_dataset_feeds_a_loader_of_its_own():
    images, targets = numbered(10)
    dataset = Dataset(images, targets, tuple(map(str, range(10))))
    assert seen(DataLoader(dataset, batch_size=5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_loader_with_a_generator_follows_seed_and_epoch():
    def batches(seed):
        loader = DataLoader(TensorDataset(*numbered(30)), 10, shuffle=True, generator=torch.Generator())
        return as_batches(loader, batch_size=10, seed=seed)

    assert seen(batches(1).epoch(4)) == seen(batches(1).epoch(4))
    assert seen(batches(1).epoch(4, 1)) == seen(batches(1).epoch(4))[1:]
    assert seen(batches(1).epoch(4)) != seen(batches(1).epoch(5))
    assert seen(batches(1).epoch(4)) != seen(batches(2).epoch(4))


def test_a_loader_with_a_distributed_sampler_is_told_the_epoch():
    dataset = TensorDataset(*numbered(30))
    loader = DataLoader(dataset, 10, sampler=DistributedSampler(dataset, num_replicas=2, rank=0))
    batches = as_batches(loader, batch_size=10)
    assert seen(batches.epoch(0)) != seen(batches.epoch(1))
    assert seen(batches.epoch(0)) == seen(batches.epoch(0))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "positive multiple of world .1.. Got 0"),
        ({"batch_size": 5, "world": 2}, "positive multiple of world .2.. Got 5"),
        ({"batch_size": 4, "world": 2, "rank": 2}, "between 0 and 1 .world is 2.. Got 2"),
    ],
)
def test_mistakes_are_explained(options, match):
    with pytest.raises(ValueError, match=match):
        Batches(*numbered(10), **options)


def test_images_and_targets_must_be_as_many():
    with pytest.raises(ValueError, match="Got 3 and 4"):
        Batches(numbered(3)[0], numbered(4)[1], 2)
