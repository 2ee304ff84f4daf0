import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cmcl.data import Dataset
from cmcl.data.batches import LoaderBatches, epoch_seed, permutation


def numbered(n):
    return torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1), torch.arange(n)


def seen(batches):
    return [targets.tolist() for _, targets in batches]


def test_orders_stay_the_same_from_version_to_version():
    """A run resumed by a newer version must see the images that the old one would have seen."""
    assert epoch_seed(0, 0) == 3056769172604291498
    assert permutation(8, 0, 0).tolist() == [5, 6, 7, 2, 0, 4, 3, 1]
    assert permutation(100, 1, 0).tolist() not in (permutation(100, 1, 1).tolist(), permutation(100, 2, 0))


def test_a_dataset_feeds_a_loader():
    images, targets = numbered(10)
    dataset = Dataset(images, targets, tuple(map(str, range(10))))
    batches = LoaderBatches(DataLoader(dataset, batch_size=4), torch.device("cpu"))
    assert len(batches) == 3
    assert seen(batches.epoch(0, 1)) == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("kind", ["generator", "sampler"])
def test_a_loader_follows_seed_and_epoch(kind):
    data = TensorDataset(*numbered(30))

    def batches(seed):
        sampler = DistributedSampler(data, num_replicas=2, rank=0, seed=seed)
        own = {"sampler": sampler} if kind == "sampler" else {"shuffle": True, "generator": torch.Generator()}
        return LoaderBatches(DataLoader(data, 10, **own), torch.device("cpu"), seed)

    assert seen(batches(1).epoch(4)) == seen(batches(1).epoch(4))
    assert seen(batches(1).epoch(4, 1)) == seen(batches(1).epoch(4))[1:]
    assert seen(batches(1).epoch(4)) not in (seen(batches(1).epoch(5)), seen(batches(2).epoch(4)))
