"""Drawn scenes with foreground masks: the set for segmentation that needs no file.

A group shows the same kind of object in the same colours before the same kind of background, from image to
image in other places, sizes, turns and light: like iCoseg, but endless, and the same everywhere for one seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from .dataset import Dataset, hold_out
from .drawing import BACKGROUNDS, OBJECTS, Field, Rng, clouds
from .images import parse_size
from .registry import FOREGROUND

SMALLEST = 8  # pixels; in smaller scenes some objects would vanish
_FINE = 2  # drawn at twice the size, then averaged: smooth edges


@dataclass(frozen=True)
class _Group:
    """What the images of a group have in common."""

    background: int
    object: int
    colours: Field  # (4,3), one for each part
    pattern: int
    most: int  # objects in an image


def load(
    split: str = "train",
    root: str | Path | None = None,
    *,
    groups: int = 20,
    per_group: int = 20,
    size: int | Sequence[int] = 64,
    seed: int = 0,
) -> Dataset:
    """Draw the scenes of one split: four fifths of every group are for training.

    Args:
        split: "train" or "test".
        root: not used.
        groups: number of groups.
        per_group: images in each of them.
        size: (height, width), or one number for squares.
        seed: another seed, other scenes.
    """
    height, width = parse_size(size)
    if min(height, width) < SMALLEST or 2 * width < height:
        message = f"size of shapes must be at least {SMALLEST} each way, and the width half the height."
        raise ValueError(f"{message} Got {(height, width)}: there is no room for the objects.")
    if min(groups, per_group) < 1:
        raise ValueError(f"groups and per_group must be positive. Got {groups} and {per_group}.")
    names = [f"scene {g:03d}" for g in range(groups) for _ in range(per_group)]
    train, test = hold_out(names, range(len(names)), fraction=0.2, seed=seed)
    chosen = train if split == "train" else test
    if not chosen:
        raise ValueError(f"per_group must be at least 3 for a test split. Got {per_group}.")
    drawn = [draw(seed, *divmod(i, per_group), (height, width)) for i in chosen]
    images = torch.from_numpy(np.stack([image for image, _ in drawn]))
    masks = torch.from_numpy(np.stack([mask for _, mask in drawn]))
    return Dataset(images, masks, FOREGROUND, split, "drawn", tuple(names[i] for i in chosen))


def draw(
    seed: int, group: int, index: int, size: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Image (3,H,W) and mask (H,W) number `index` of a group."""
    common = _common(np.random.default_rng([seed, group]), group)
    rng = np.random.default_rng([seed, group, index + 1])
    shape = (size[0] * _FINE, size[1] * _FINE)
    y, x = np.mgrid[: shape[0], : shape[1]].astype(np.float32) / shape[0]  # height is 1
    scene = BACKGROUNDS[common.background](rng, x, y, common.colours)
    mask = np.zeros(shape, bool)
    for _ in range(rng.integers(1, common.most + 1)):
        scene, mask = _place(rng, common, scene, mask, x, y)
    scene = _as_photo(rng, scene)
    image = np.clip(_shrink(scene) * 255 + rng.normal(0, 2.5, (*size, 3)), 0, 255)
    return image.astype(np.uint8).transpose(2, 0, 1).copy(), (_shrink(mask) >= 0.5).astype(np.uint8)


def _common(rng: Rng, group: int) -> _Group:
    # neighbouring groups take turns through kinds and backgrounds: a small set already has all of them
    return _Group(
        background=(group * 3 + group // len(BACKGROUNDS)) % len(BACKGROUNDS),
        object=group % len(OBJECTS),
        colours=rng.uniform(0.08, 0.95, (4, 3)).astype(np.float32),
        pattern=int(rng.integers(3)),
        most=int(rng.choice([1, 1, 2, 3])),
    )


def _place(
    rng: Rng, common: _Group, scene: Field, mask: NDArray[np.bool_], x: Field, y: Field
) -> tuple[Field, NDArray[np.bool_]]:
    """Put one object and its shadow into the scene."""
    size = rng.uniform(0.2, 0.45) / common.most**0.35
    left, top = rng.uniform(0.22, float(x.max()) - 0.22), rng.uniform(0.28, 0.75)
    turn, squeeze = rng.normal(0, 0.25), rng.uniform(0.85, 1.15)
    dx, dy = (x - left) / size, (y - top) / size
    u = (dx * math.cos(turn) + dy * math.sin(turn)) * squeeze
    v = dy * math.cos(turn) - dx * math.sin(turn)
    part = np.zeros(x.shape, np.intp)  # number of the part seen at each pixel; 0 is the background
    for number, formula in enumerate(OBJECTS[common.object](u, v), start=1):
        part[formula < 0] = number
    inside = part > 0
    shadow = gaussian_filter(np.roll(inside, (3, 4), (0, 1)).astype(np.float32), 2.5)
    scene = scene * (1 - 0.4 * shadow)[..., None]
    shade = _pattern(rng, common.pattern, u, v) * _light(u, v)
    scene[inside] = common.colours[part[inside] - 1] * shade[inside, None]
    return scene, mask | inside


def _pattern(rng: Rng, kind: int, u: Field, v: Field) -> Field:
    if kind == 0:
        return 0.85 + 0.3 * clouds(rng, u.shape, 6, 3)
    if kind == 1:
        return np.where(np.sin(11 * (u + 0.4 * v)) > 0.2, 1.1, 0.78).astype(np.float32)
    return np.where(np.hypot((2.6 * u) % 1 - 0.5, (2.6 * v) % 1 - 0.5) < 0.27, 0.72, 1.08).astype(np.float32)


def _light(u: Field, v: Field) -> Field:
    """Brighter to the upper left, as on a round body."""
    return 1.02 - 0.22 * (u + v) - 0.18 * (u * u + v * v)


def _as_photo(rng: Rng, scene: Field) -> Field:
    """Exposure, a cast of colour, and a lens that is never quite sharp."""
    cast = (rng.normal(1, 0.04, 3) * rng.uniform(0.8, 1.15)).astype(np.float32)
    blur = rng.uniform(0.3, 1.0)
    return gaussian_filter(np.clip(scene * cast, 0, 1), (blur, blur, 0))  # type: ignore[no-any-return]


def _shrink(values: NDArray[np.generic]) -> Field:
    """Average over the _FINE x _FINE pixels that become one."""
    height, width = values.shape[0] // _FINE, values.shape[1] // _FINE
    blocks = values.reshape(height, _FINE, width, _FINE, *values.shape[2:])
    return blocks.mean((1, 3), dtype=np.float32)  # type: ignore[no-any-return]
