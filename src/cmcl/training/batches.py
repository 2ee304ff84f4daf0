"""The batches of a run: tensors kept on the training device, or a DataLoader.

Both make the batches of an epoch current one after the other. Their order depends on (seed, epoch) alone, so
a run can stop and resume at any step. N examples, B batch.
"""

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .. import _checks
from ..data.dataset import Dataset, split_validation, stratified_subset, tensor_checksum
from .augment import flip

DRAWS, FLIPS = -1, -2  # instead of an epoch: seeds of masks, labels and dropout, and of the first flips

Data = Dataset | tuple[Tensor, Tensor] | DataLoader[Any]
Batch = tuple[Tensor, Tensor]  # images (B, ...), targets (B, ...)


def tensors(data: Dataset | tuple[Tensor, Tensor]) -> Batch:
    """Images (N, ...) and targets (N, ...)."""
    return (data.images, data.targets) if isinstance(data, Dataset) else data


def subset(train: Data, count: int | None) -> Data:
    """The stratified subset of `count` examples; None, or the number of examples there are: all of them."""
    if count is None or (not isinstance(train, DataLoader) and len(tensors(train)[0]) == count):
        return train
    if not isinstance(train, Dataset):
        raise TypeError(f"train must be a Dataset for recipe.subset. Got {type(train).__name__}.")
    return stratified_subset(train, count)


def hold_out(train: Data, fraction: float) -> tuple[Data, Dataset | None]:
    """The rest to train on, and the stratified fraction of a `Dataset` that is held out for validation."""
    if not fraction:
        return train, None
    if not isinstance(train, Dataset):
        raise TypeError(f"train must be a Dataset for recipe.validation > 0. Got {type(train).__name__}.")
    return split_validation(train, fraction)


class Resident:
    """The whole training set on the device. Epochs follow each other without a gap: every batch is full.

    Example j of the endless stream is `permutation(j // N)[j % N]`. The batch of a step is gathered on the
    device, by a counter that is there as well, so that a CUDA graph can hold it.

    With `alternating`, every image is mirrored in every other epoch; half of them begin mirrored.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        batch_size: int,
        seed: int,
        device: torch.device,
        *,
        alternating: bool = False,
    ) -> None:
        self.images, self.targets = images.to(device), targets.to(device)
        self.examples, self.seed = len(images), seed
        # Labels tell datasets apart; images, or soft labels, may be computed anew and differ by rounding.
        labels = "soft" if targets.is_floating_point() else tensor_checksum({"": targets})[:12]
        self.description = f"{self.examples} examples with targets {labels}"
        self.batch_size = min(batch_size, self.examples)
        rows = self.examples // self.batch_size + 1  # the most steps that can start in one epoch
        self._order = torch.zeros(rows, self.batch_size, dtype=torch.long, device=device)
        self._row = torch.zeros(1, dtype=torch.long, device=device)
        self._mirrored = torch.zeros_like(self._order, dtype=torch.bool) if alternating else None

    def steps(self, epoch: int) -> range:
        """The steps whose batch begins in this epoch."""
        first, end = (-(-e * self.examples // self.batch_size) for e in (epoch, epoch + 1))
        return range(first, end)

    def epoch_of(self, step: int) -> int:
        """The epoch in which a step's batch begins."""
        return step * self.batch_size // self.examples

    def epoch(self, epoch: int, todo: range) -> Iterator[int]:
        """Make the batches of some steps of an epoch current, one by one; yields their sizes."""
        self.seek(epoch, todo.start)
        for _ in todo:
            yield self.batch_size

    def seek(self, epoch: int, step: int) -> None:
        """Make the batch of one step current."""
        steps = self.steps(epoch)
        start = steps.start * self.batch_size - epoch * self.examples
        order = torch.cat([permutation(self.examples, self.seed, e) for e in (epoch, epoch + 1)])
        part = order[start : start + len(steps) * self.batch_size]
        self._order[: len(steps)].copy_(part.reshape(len(steps), -1))
        if self._mirrored is not None:
            first = torch.Generator().manual_seed(epoch_seed(self.seed, FLIPS))
            mirrored = torch.randint(2, (self.examples,), generator=first)[order]
            mirrored += torch.tensor([epoch, epoch + 1]).repeat_interleave(self.examples)
            part = mirrored[start : start + len(steps) * self.batch_size] % 2 == 1
            self._mirrored[: len(steps)].copy_(part.reshape(len(steps), -1))
        self._row.fill_(step - steps.start)

    def current(self) -> Batch:
        """Images (B, ...) and targets (B, ...) of the current step, gathered on the device."""
        index = self._order.index_select(0, self._row)[0]  # (B,)
        batch = self.images.index_select(0, index), self.targets.index_select(0, index)
        return batch if self._mirrored is None else flip(*batch, self._mirrored.index_select(0, self._row)[0])

    def advance(self) -> None:
        """Go to the next step, on the device."""
        self._row.add_(1)

    def tensors(self) -> list[Tensor]:
        """The tensors that a step changes."""
        return [self._row]


class Loaded:
    """Batches of a user's DataLoader, moved to the device.

    Its order follows (seed, epoch) where it has a `generator` or a sampler with `set_epoch`, and so do
    augmentations that draw from torch's CPU generator.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        device: torch.device,
        transform: Callable[[Tensor], Tensor],  # from images of the loader to inputs of the networks
        check: Callable[[Tensor], None] = lambda targets: None,
    ) -> None:
        self.loader, self.seed, self.device = loader, seed, device
        self.transform, self.check = transform, check
        self.batch_size = loader.batch_size or 1
        self.examples = len(loader) * self.batch_size
        self.description = f"{len(loader)} batches of {self.batch_size}"
        self._batch: Batch | None = None

    def steps(self, epoch: int) -> range:
        """The steps of an epoch: one for each batch of the loader."""
        return range(epoch * len(self.loader), (epoch + 1) * len(self.loader))

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""
        return step // len(self.loader)

    def epoch(self, epoch: int, todo: range) -> Iterator[int]:
        """Make the batches of some steps of an epoch current, one by one; yields their sizes."""
        torch.default_generator.manual_seed(epoch_seed(self.seed, epoch))
        if self.loader.generator is not None:
            self.loader.generator.manual_seed(epoch_seed(self.seed, epoch))
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(epoch)
        first, done = self.steps(epoch).start, 0
        for images, targets in islice(self.loader, todo.start - first, todo.stop - first):
            self.check(targets)
            images, targets = (t.to(self.device, non_blocking=True) for t in (images, targets))
            self._batch = self.transform(images), targets
            yield len(targets)
            done += 1
        if done < len(todo):
            raise ValueError(
                f"train must yield as many batches as its length says, {len(self.loader)}. Got fewer; fix "
                "the __len__ of its dataset."
            )

    def current(self) -> Batch:
        """Images (B, ...) and targets (B, ...) of the current step."""
        assert self._batch is not None  # set by `epoch`
        return self._batch

    def advance(self) -> None:
        """Nothing to do: `epoch` loads the next batch."""

    def tensors(self) -> list[Tensor]:
        """No tensor is changed by a step."""
        return []


Batches = Resident | Loaded


def first_batch(name: str, loader: DataLoader[Any]) -> Batch:
    """One batch of a DataLoader, to check it. The random numbers drawn for it are drawn again later."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = [loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
    generators = [own for own in found if isinstance(own, torch.Generator)]  # that decide its order
    states = [own.get_state() for own in generators]
    with torch.random.fork_rng(devices=[]):
        batch = next(iter(loader), None)
    for own, state in zip(generators, states, strict=True):
        own.set_state(state)
    if batch is None:
        raise ValueError(f"{name} must hold at least one batch. Got an empty DataLoader.")
    return _checks.pair(name, batch)


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """The order of n examples in an epoch: a pure function of its arguments."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


def epoch_seed(seed: int | str, epoch: int) -> int:
    """A seed for one epoch; hashed, so that neighbouring seeds and epochs have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8], "little") >> 1
