"""The order of examples in an epoch, and a DataLoader that can start at any batch.

The order of an epoch depends on (seed, epoch) alone, so a run can resume at any batch.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

Batch = tuple[Tensor, Tensor]  # images (B,C,H,W), targets (B,...)


@dataclass(frozen=True, eq=False)
class LoaderBatches:
    """The batches of a DataLoader.

    Their order follows (seed, epoch) if the loader has a `generator` or a sampler with `set_epoch`; otherwise
    the order is the loader's own, and starting at batch `start` skips as many.
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


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """The order of n examples in an epoch: a pure function of its arguments."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for one epoch; hashed, so that neighbouring seeds and epochs have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8], "little") >> 1
