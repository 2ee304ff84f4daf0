"""`Dataset`: the one value that every loader returns, and its subsets.

N images, C channels, H x W pixels.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from .registry import load

IGNORE = 255  # in masks: a pixel without a class
_CHUNK = 1 << 26  # bytes hashed at a time, so that a dataset on the GPU is not copied at once


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with their targets, and where they came from."""

    images: Tensor  # (N,C,H,W) uint8, or floating point
    targets: Tensor  # (N,) long; for segmentation (N,H,W) uint8 or long
    classes: tuple[str, ...]
    split: str = "train"
    source: str = "memory"  # for error messages: a folder or a file
    groups: tuple[str, ...] | None = None  # (N,) names of the groups of related images
    recipe: Mapping[str, Any] | None = field(default=None, repr=False)  # how `load_recipe` loads it again
    # equal where the images were identical before a transform, so that `split_validation` keeps them together
    units: tuple[bytes, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        images, targets, source = self.images, self.targets, self.source
        check_images(f"images of {source}", images)
        n, _, height, width = images.shape
        if tuple(targets.shape) not in {(n,), (n, height, width)}:
            raise ValueError(
                f"targets of {source} must have shape {(n,)} (classes) or {(n, height, width)} (masks). "
                f"Got {tuple(targets.shape)}."
            )
        allowed = (torch.int64,) if targets.ndim == 1 else (torch.uint8, torch.int64)
        if targets.dtype not in allowed:
            raise TypeError(f"targets of {source} must be one of {allowed}. Got {targets.dtype}.")
        if self.groups is not None and len(self.groups) != n:
            raise ValueError(f"groups must name one group per image ({n}). Got {len(self.groups)}.")
        classes = len(self.classes)
        labels = targets[not_ignored(targets, default_ignore_index(targets, classes))]
        low, high = (int(end) for end in labels.aminmax()) if labels.numel() else (0, -1)
        if low < 0 or high >= classes:
            raise ValueError(
                f"labels of {source} must be between 0 and {classes - 1} ({classes} classes). "
                f"Got {low if low < 0 else high}. Correct the labels (they start at 0), or name all classes."
            )

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
        """The images at these positions, in this order; or those where a boolean mask is true."""
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


def check_images(name: str, images: Tensor, hint: str = "") -> None:
    """Raise unless images are uint8 or floating point, of shape (N,C,H,W)."""
    if images.ndim != 4:
        raise ValueError(f"{name} must have shape (N,C,H,W). Got {tuple(images.shape)}. {hint}".strip())
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"{name} must be uint8 or floating point. Got {images.dtype}.")


def load_recipe(recipe: Mapping[str, Any], root: str | Path | None = None) -> Dataset:
    """Load again what a `Dataset.recipe` describes, from the files under `root`."""
    dataset = load(recipe["name"], split=recipe["split"], root=root, **recipe["options"])
    if "hold_out" not in recipe:
        return dataset
    part = recipe["hold_out"]
    train, validation = split_validation(dataset, part["fraction"], part["seed"])
    return validation if part["part"] == "validation" else train


def evenly_spaced(dataset: Dataset, n: int | None) -> Dataset:
    """n examples at equal distances, because a dataset may be sorted by class; None: all."""
    if n is None or n >= len(dataset):
        return dataset
    return dataset.subset([i * len(dataset) // n for i in range(n)])


def stratified_subset(dataset: Dataset, n: int) -> Dataset:
    """n examples drawn evenly from the classes (or groups); the same ones each time."""
    return dataset.subset(sorted(_drawn_evenly(dataset, n)[:n]))


def outside_subset(dataset: Dataset, n: int) -> Dataset:
    """The examples that `stratified_subset` leaves out."""
    return dataset.subset(sorted(_drawn_evenly(dataset, n)[n:]))


def _drawn_evenly(dataset: Dataset, n: int) -> list[int]:
    """All positions, in the order in which a stratified subset of n takes them."""
    if n > len(dataset):
        raise ValueError(f"subset must be at most {len(dataset)}, the size of the dataset. Got {n}.")
    strata = _strata(dataset)
    taken: Counter[Hashable] = Counter()
    turn = {}  # position -> how many of its stratum come before it
    for i in torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist():
        turn[i] = taken[strata[i]]
        taken[strata[i]] += 1
    return sorted(turn, key=turn.__getitem__)


def split_validation(dataset: Dataset, fraction: float, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Hold out a fraction of every class (of every group, for segmentation): (train, validation).

    The same seed gives the same split, and identical images stay on one side.
    """
    kept, held = hold_out(_strata(dataset), dataset.units or identities(dataset.images), fraction, seed)
    if not held or not kept:
        raise ValueError(f"fraction must leave images on both sides of {len(dataset)}. Got {fraction}.")
    parts = dataset.subset(kept), dataset.subset(held, split="validation")
    if dataset.recipe is None:
        return parts
    choice = {"fraction": fraction, "seed": seed}
    train, validation = (
        replace(part, recipe={**dataset.recipe, "hold_out": {**choice, "part": part.split}}) for part in parts
    )
    return train, validation


def _strata(dataset: Dataset) -> Sequence[Hashable]:
    if dataset.targets.ndim == 1:
        labels: list[int] = dataset.targets.tolist()
        return labels
    return dataset.groups or ("all",) * len(dataset)


def hold_out(
    strata: Sequence[Hashable], units: Sequence[Hashable], fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Positions (kept, held): the rounded fraction of every stratum is held, equal units stay together."""
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be between 0 and 1. Got {fraction}.")
    same_unit: dict[Hashable, list[int]] = defaultdict(list)
    for position, unit in enumerate(units):
        same_unit[unit].append(position)
    candidates: dict[Hashable, list[list[int]]] = defaultdict(list)  # stratum -> positions of each unit
    for positions in same_unit.values():
        candidates[strata[positions[0]]].append(positions)
    generator = torch.Generator().manual_seed(seed)
    held: set[int] = set()
    for choices in candidates.values():
        room = round(fraction * sum(map(len, choices)))
        for choice in torch.randperm(len(choices), generator=generator).tolist():
            if len(choices[choice]) <= room:
                held.update(choices[choice])
                room -= len(choices[choice])
    return [i for i in range(len(units)) if i not in held], sorted(held)


def identities(images: Tensor) -> list[bytes]:
    """A short digest per image: equal exactly for identical images."""
    rows = images.detach().cpu().flatten(1).contiguous().numpy()
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]


def tensor_checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        # torch cannot view an empty tensor as bytes
        for chunk in torch.split(tensor.flatten().view(torch.uint8), _CHUNK) if tensor.numel() else ():
            digest.update(chunk.cpu().numpy().data)
    return digest.hexdigest()


def default_ignore_index(targets: Tensor, classes: int) -> int | None:
    """255 for masks, unless there are so many classes that 255 is one of them; otherwise None."""
    if targets.ndim == 1 or targets.is_floating_point() or targets.dtype == torch.bool:
        return None
    return IGNORE if classes <= IGNORE <= torch.iinfo(targets.dtype).max else None


def not_ignored(targets: Tensor, ignore_index: int | None) -> Tensor:
    """A boolean mask of the targets that differ from `ignore_index`."""
    return torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
