"""Where a step's batches come from: tensors on the training device, or a DataLoader.

R repeats, N examples, B batch. Repeats see the same examples, each in an order of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .. import _checks
from ..data.batches import Batch, LoaderBatches, epoch_seed, permutation
from ..data.dataset import tensor_checksum
from ..ensemble import Ensemble
from ..telling import first_line
from .config import Recipe
from .setup import Data, tensors


class Resident:
    """The whole set on the device. Epochs follow each other without a gap, so every batch is full.

    Example j of the endless stream is `permutation(j // N)[j % N]`, a pure function of the seed: a run can
    stop and go on anywhere. The batch of a step is gathered on the device, by a counter that lives there.
    """

    def __init__(
        self, images: Tensor, targets: Tensor, batch_size: int, seeds: Sequence[int], device: torch.device
    ) -> None:
        if len(images) != len(targets) or not len(images):
            raise ValueError(
                f"images and targets must be as many, and not none. Got {len(images)} and {len(targets)}."
            )
        self.images, self.targets = images.to(device), targets.to(device)
        self.examples, self.seeds = len(images), seeds
        # Labels tell data apart; images, or soft labels, may be computed anew and differ in the last bits.
        labels = "soft" if targets.is_floating_point() else tensor_checksum({"": targets})[:12]
        self.name = self.told = f"{self.examples} examples with targets {labels}"
        self.batch_size = min(batch_size, self.examples)
        rows = self.examples // self.batch_size + 1  # the most steps that can start in one epoch
        self._order = torch.zeros(len(seeds), rows, self.batch_size, dtype=torch.long, device=device)
        self._row = torch.zeros(1, dtype=torch.long, device=device)

    def steps(self, epoch: int) -> range:
        """The steps whose batch begins in this epoch."""
        return range(self._first(epoch), self._first(epoch + 1))

    def epoch_of(self, step: int) -> int:
        """The epoch in which a step's batch begins."""
        return step * self.batch_size // self.examples

    def begin(self, epoch: int, step: int) -> None:
        """Make ready for the steps of an epoch, from `step` on."""
        steps = self.steps(epoch)
        start = steps.start * self.batch_size - epoch * self.examples
        count = len(steps) * self.batch_size
        for order, seed in zip(self._order, self.seeds, strict=True):
            stream = torch.cat([permutation(self.examples, seed, e) for e in (epoch, epoch + 1)])
            order[: len(steps)].copy_(stream[start : start + count].reshape(len(steps), -1))
        self._row.fill_(step - steps.start)

    @property
    def size(self) -> int:
        """Examples in the current batch."""
        return self.batch_size

    def batch(self, repeat: int) -> tuple[Tensor, Tensor]:
        """Images (B, ...) and targets (B, ...) of the current step, gathered on the device."""
        index = self._order[repeat].index_select(0, self._row)[0]  # (B,)
        return self.images.index_select(0, index), self.targets.index_select(0, index)

    def advance(self) -> None:
        """On to the next step; on the device, like `batch`."""
        self._row.add_(1)

    def expect(self, classes: int, ignore_index: int | None) -> None:
        """Nothing to do: all labels were there to be looked at."""

    def feed(self) -> None:
        """Nothing to do: the data are there."""

    def state(self) -> list[Tensor]:
        """The tensors that a step changes."""
        return [self._row]

    def _first(self, epoch: int) -> int:
        return -(-epoch * self.examples // self.batch_size)


class Loaded:
    """Batches of a user's DataLoader, copied to one place on the device; for one repeat."""

    def __init__(
        self,
        loader: DataLoader[Any],
        seeds: Sequence[int],
        device: torch.device,
        transformed: Callable[[Tensor], Tensor] | None = None,  # raw images for the networks
    ) -> None:
        try:
            batches = len(loader)
        except TypeError as error:
            raise TypeError(
                f"train must have a length. Got a DataLoader without: {first_line(error)}."
            ) from None
        if not batches:
            raise ValueError("train must hold at least one batch. Got an empty DataLoader.")
        if len(seeds) > 1:
            raise TypeError(
                "train must be tensors for several seeds at once, each in an order of its own. Got a "
                "DataLoader; pass tensors, or train one seed after the other."
            )
        self.batches = LoaderBatches(loader, device, seeds[0])
        self.transformed = transformed or (lambda x: x)
        self.batch_size = loader.batch_size or 1
        self.examples = batches * self.batch_size
        self.name = f"{batches} batches of {self.batch_size}"
        self.told = f"a DataLoader of {_examples(loader) or 'some'} examples"
        self._iterator: Iterator[Batch] = iter(())
        self._batch: Batch | None = None

    def steps(self, epoch: int) -> range:
        """The steps of an epoch: one for each batch of the loader."""
        return range(epoch * len(self.batches), (epoch + 1) * len(self.batches))

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to."""
        return step // len(self.batches)

    def begin(self, epoch: int, step: int) -> None:
        """Start the loader's epoch, and skip what was done before.

        Its order follows (seed, epoch), and so do augmentations that draw from torch's CPU generator.
        """
        torch.default_generator.manual_seed(epoch_seed(self.batches.seed, epoch))
        self._iterator = self.batches.epoch(epoch, step - self.steps(epoch).start)

    def first(self) -> Batch:
        """Some batch, to see what they are like; on the CPU."""
        images, targets = first_batch("train", self.batches.loader)
        return self.transformed(images), targets

    def expect(self, classes: int, ignore_index: int | None) -> None:
        """Batches to come must have labels of these classes."""
        # not a method: a reference to self would keep the loader's workers alive after the run
        self.batches = replace(self.batches, look=partial(_look, classes, ignore_index))

    def feed(self) -> None:
        """Bring the next batch to the device."""
        images, targets = next(self._iterator, (None, None))
        if images is None or targets is None:
            raise ValueError(
                f"train must yield as many batches as its length says, {len(self.batches)}. Got fewer; mend "
                "the __len__ of its dataset."
            )
        self._batch = self.transformed(images), targets

    @property
    def size(self) -> int:
        """Examples in the current batch; the last of an epoch may be smaller."""
        return len(self.batch(0)[1])

    def batch(self, repeat: int) -> Batch:
        """Images (B, ...) and targets (B, ...) that `feed` brought."""
        assert self._batch is not None  # the loop feeds before every step
        return self._batch

    def advance(self) -> None:
        """Nothing to do: `feed` brings the next batch."""

    def state(self) -> list[Tensor]:
        """Nothing that a step changes."""
        return []


def _examples(loader: DataLoader[Any]) -> int | None:
    return len(loader.dataset) if hasattr(loader.dataset, "__len__") else None


def _look(classes: int, ignore_index: int | None, targets: Tensor) -> None:
    if not targets.is_cuda:  # on a GPU, looking would wait for the device
        _checks.label_range(targets, classes, ignore_index)


def first_batch(name: str, loader: DataLoader[Any]) -> Batch:
    """Some batch, to see what they are like. What torch draws for it, it will draw again."""
    before = [(own, own.get_state()) for own in _generators(loader)]
    with torch.random.fork_rng(devices=[]):
        batch = next(iter(loader), None)
    for own, state in before:
        own.set_state(state)
    if batch is None:
        raise ValueError(f"{name} must hold at least one batch. Got an empty DataLoader.")
    return _checks.pair(name, batch)


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Those that decide its order."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = [loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
    return [own for own in found if isinstance(own, torch.Generator)]


Source = Resident | Loaded


def source_of(
    train: Data, ensemble: Ensemble, recipe: Recipe, seeds: Sequence[int], device: torch.device
) -> tuple[Source, Batch]:
    """The batches of a run, and examples on the CPU: all of them, or the first batch of a DataLoader."""
    if isinstance(train, DataLoader):
        # without a transform the networks take their images as they come
        loaded = Loaded(train, seeds, device, ensemble.transformed if ensemble.transform else None)
        return loaded, loaded.first()
    images, targets = tensors(train)
    images = ensemble.transformed(images)
    return Resident(images, targets, recipe.batch_size, seeds, device), (images, targets)
