"""`Dataset`: the one value that every loader returns, and even parts of it.

N images, C channels, H x W pixels.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor

from .checksum import tensor_checksum

IGNORE = 255  # in masks: a pixel that has no class


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with their targets, and where they came from."""

    images: Tensor  # (N,C,H,W) uint8, or floating point
    targets: Tensor  # (N,) long; for segmentation (N,H,W) uint8 or long
    classes: tuple[str, ...]
    split: str = "train"
    source: str = "memory"  # for people: a folder or a file
    groups: tuple[str, ...] | None = None  # (N,) names of the groups of related images
    recipe: Mapping[str, Any] | None = field(default=None, repr=False)  # how `load_recipe` gets it again
    units: tuple[bytes, ...] | None = field(default=None, repr=False)  # equal for images that were identical

    def __post_init__(self) -> None:
        _check_images(self.images, self.source)
        _check_targets(self.targets, self.images, self.source)
        _check_labels(self.targets, len(self.classes), self.source)
        if self.groups is not None and len(self.groups) != len(self.images):
            message = f"groups must name one group per image ({len(self.images)}). Got {len(self.groups)}."
            raise ValueError(message)

    @cached_property
    def checksum(self) -> str:
        """sha256 of images and targets: the same arrays from other files have the same checksum."""
        return tensor_checksum({"images": self.images, "targets": self.targets})

    def __len__(self) -> int:
        return len(self.images)

    @overload
    def __getitem__(self, index: slice) -> "Dataset": ...
    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    def __getitem__(self, index: int | slice) -> "Dataset | tuple[Tensor, Tensor]":
        if isinstance(index, slice):
            return self.subset(range(len(self))[index])
        return self.images[index], self.targets[index]

    def subset(self, indices: Sequence[int] | Tensor, *, split: str | None = None) -> "Dataset":
        """The images at these positions, in this order; or those where a mask of booleans is true."""
        positions = torch.as_tensor(indices)
        positions = positions.nonzero().flatten() if positions.dtype == torch.bool else positions.long()
        chosen = positions.tolist()
        return replace(
            self,
            images=self.images[positions],
            targets=self.targets[positions],
            split=split or self.split,
            groups=self.groups and tuple(self.groups[i] for i in chosen),
            recipe=None,
            units=self.units and tuple(self.units[i] for i in chosen),
        )


def spread(dataset: Dataset, count: int | None) -> Dataset:
    """So many examples from all over a set, which may be sorted by class; None: all."""
    if count is None or count >= len(dataset):
        return dataset
    return dataset.subset([i * len(dataset) // count for i in range(count)])


def split_validation(dataset: Dataset, fraction: float, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Hold out a share of every class (of every group, for segmentation): (train, validation).

    The same seed gives the same split, and identical images stay on one side.
    """
    strata: Sequence[Hashable] = dataset.groups or ("all",) * len(dataset)
    if dataset.targets.ndim == 1:
        strata = dataset.targets.tolist()
    kept, held = hold_out(strata, dataset.units or identities(dataset.images), fraction, seed)
    if not held or not kept:
        message = f"fraction must leave images on both sides of {len(dataset)}. Got {fraction}."
        raise ValueError(message)
    train, validation = dataset.subset(kept), dataset.subset(held, split="validation")
    return _with_part(dataset, train, fraction, seed), _with_part(dataset, validation, fraction, seed)


def few(train: Dataset, count: int) -> Dataset:
    """So many of the images, drawn evenly from the classes (or groups); the same ones for every seed."""
    if count > len(train):
        raise ValueError(f"examples must be at most {len(train)}, the whole set. Got {count}.")
    strata: Sequence[Any] = train.targets.tolist() if train.targets.ndim == 1 else train.groups or ()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    taken: Counter[Any] = Counter()
    turn = {}  # how many of its class come before it
    for i in order:
        kind = strata[i] if strata else None
        turn[i] = taken[kind]
        taken[kind] += 1
    return train.subset(sorted(sorted(order, key=turn.__getitem__)[:count]))


def _with_part(whole: Dataset, part: Dataset, fraction: float, seed: int) -> Dataset:
    if whole.recipe is None:
        return part
    choice = {"fraction": fraction, "seed": seed, "part": part.split}
    return replace(part, recipe={**whole.recipe, "hold_out": choice})


def hold_out(
    strata: Sequence[Hashable], units: Sequence[Hashable], fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Positions (kept, held): the rounded share of every stratum is held, equal units stay together."""
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1. Got {fraction}.")
    members: dict[Hashable, list[int]] = {}
    for position, unit in enumerate(units):
        members.setdefault(unit, []).append(position)
    stratum_units: dict[Hashable, list[list[int]]] = {}
    for positions in members.values():
        stratum_units.setdefault(strata[positions[0]], []).append(positions)
    generator = torch.Generator().manual_seed(seed)
    held: set[int] = set()
    for candidates in stratum_units.values():
        held |= _draw(candidates, fraction, generator)
    return [i for i in range(len(units)) if i not in held], sorted(held)


def _draw(candidates: list[list[int]], fraction: float, generator: torch.Generator) -> set[int]:
    quota = round(fraction * sum(map(len, candidates)))
    drawn: set[int] = set()
    for choice in torch.randperm(len(candidates), generator=generator).tolist():
        if len(drawn) + len(candidates[choice]) <= quota:
            drawn.update(candidates[choice])
    return drawn


def identities(images: Tensor) -> list[bytes]:
    """A short digest per image: equal exactly for identical images."""
    rows = images.detach().cpu().flatten(1).contiguous().numpy()
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]


def _check_images(images: Tensor, source: str) -> None:
    if images.ndim != 4:
        message = f"images of {source} must have shape (N,C,H,W). Got {tuple(images.shape)}."
        raise ValueError(message)
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"images of {source} must be uint8 or floating point. Got {images.dtype}.")


def _check_targets(targets: Tensor, images: Tensor, source: str) -> None:
    n, _, height, width = images.shape
    if tuple(targets.shape) not in {(n,), (n, height, width)}:
        message = (
            f"targets of {source} must have shape {(n,)} (classes) or {(n, height, width)} (masks). "
            f"Got {tuple(targets.shape)}."
        )
        raise ValueError(message)
    allowed = (torch.int64,) if targets.ndim == 1 else (torch.uint8, torch.int64)
    if targets.dtype not in allowed:
        raise TypeError(f"targets of {source} must be one of {allowed}. Got {targets.dtype}.")


def ignored(targets: Tensor, classes: int) -> int | None:
    """The target that counts for nothing: 255 of pixels, unless there are so many classes that it is one."""
    if targets.ndim == 1 or targets.is_floating_point() or targets.dtype == torch.bool:
        return None
    return IGNORE if classes <= IGNORE <= torch.iinfo(targets.dtype).max else None


def counting(targets: Tensor, nothing: int | None) -> Tensor:
    """Which targets count, as booleans: all but those that are `nothing`."""
    return torch.ones_like(targets, dtype=torch.bool) if nothing is None else targets != nothing


def _check_labels(targets: Tensor, classes: int, source: str) -> None:
    labels = targets[counting(targets, ignored(targets, classes))]
    if not labels.numel():
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        message = (
            f"labels of {source} must be between 0 and {classes - 1} ({classes} classes). Got {wrong}. "
            "Correct the file, or name all classes."
        )
        raise ValueError(message)
