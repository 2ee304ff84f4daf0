"""Batches: the set sits on the device as one tensor; an epoch is a seeded permutation and slices of it.

The order of an epoch depends on (seed, epoch) alone, so a run can stop and go on at any batch.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .dataset import Dataset

Batch = tuple[Tensor, Tensor]  # images (B,C,H,W), targets (B,...)


class EpochSource(Protocol):
    """What a training loop needs: a number of batches, and the batches of an epoch from any one on."""

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of this epoch, from number `start` on."""
        ...


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of tensors, shared out over `world` ranks.

    `batch_size` counts the whole batch over all ranks, so that training is the same for any `world`: rank r
    takes every world-th image of each batch. With `even_shares` the last batch of several ranks is cut to a
    multiple of `world`, so that the mean of the ranks' means is the mean of the batch; switch it off to
    evaluate every image once.
    """

    images: Tensor
    targets: Tensor
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    rank: int = 0
    world: int = 1
    even_shares: bool = True

    def __post_init__(self) -> None:
        n, world = len(self.images), self.world
        if len(self.targets) != n:
            raise ValueError(f"images and targets must be as many. Got {n} and {len(self.targets)}.")
        if not 0 <= self.rank < world:
            raise ValueError(f"rank must be between 0 and {world - 1} (world is {world}). Got {self.rank}.")
        if self.batch_size < 1 or (self.even_shares and self.batch_size % world):
            message = f"batch_size must be a positive multiple of world ({world}). Got {self.batch_size}."
            raise ValueError(message)

    def __len__(self) -> int:
        return -(-self._used() // self.batch_size)

    def _used(self) -> int:
        """Images of an epoch, over all ranks."""
        unit = self.batch_size if self.drop_last else self.world if self.even_shares else 1
        return len(self.images) // unit * unit

    def order(self, epoch: int) -> Tensor:
        """Positions of all images of this epoch, before they are shared out; on the CPU."""
        n = len(self.images)
        return permutation(n, self.seed, epoch) if self.shuffle else torch.arange(n)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of this epoch for this rank, from number `start` on."""
        order = self.order(epoch)[: self._used()].to(self.images.device)
        rest = order[start * self.batch_size :]
        for positions in torch.split(rest, self.batch_size) if len(rest) else ():
            mine = positions[self.rank :: self.world]
            yield self.images[mine], self.targets[mine]


@dataclass(frozen=True, eq=False)
class LoaderBatches:
    """A DataLoader with the same face.

    Its order follows (seed, epoch) where it has a `generator` or a sampler with `set_epoch`; otherwise the
    order is the loader's own business, and going on at batch `start` skips as many.
    """

    loader: DataLoader[Any]
    device: torch.device
    seed: int = 0
    look: Callable[[Tensor], None] = lambda targets: None  # at targets, before they go to the device

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of this epoch, from number `start` on."""
        if self.loader.generator is not None:
            self.loader.generator.manual_seed(epoch_seed(self.seed, epoch))
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(epoch)
        for images, targets in islice(self.loader, start, None):
            self.look(targets)
            yield images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


def as_batches(
    data: Dataset | Sequence[Tensor] | DataLoader[Any],
    *,
    batch_size: int,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **options: Any,
) -> EpochSource:
    """Batches of a `Dataset`, of (images, targets), or of a DataLoader, which keeps its own batch size.

    Args:
        data: what to batch; tensors are moved to the device once, whole.
        batch_size: images per batch over all ranks.
        device: where the batches are wanted.
        seed: with the number of the epoch, decides the order.
        options: shuffle, drop_last, rank, world, even_shares, as for `Batches`; none for a DataLoader.
    """
    if isinstance(data, DataLoader):
        if options:
            message = (
                f"{', '.join(sorted(options))} must be set in the DataLoader itself. Got a DataLoader and"
            )
            raise TypeError(f"{message} these options. Leave them out, or pass (images, targets).")
        return LoaderBatches(data, torch.device(device), seed)
    images, targets = (data.images, data.targets) if isinstance(data, Dataset) else data
    return Batches(images.to(device), targets.to(device), batch_size, seed, **options)


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """The order of n examples in an epoch: a pure function of its arguments."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for one epoch; hashed, so that neighbouring seeds and epochs have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8], "little") >> 1
