"""Drawn scenes with foreground masks: the dataset for segmentation that needs no file.

The images of a group show the same kind of object in the same colours before the same kind of background, at
other places, sizes and angles: like iCoseg, but endless, and the same everywhere for one seed.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from .dataset import Dataset, hold_out
from .images import parse_size
from .registry import SHAPES

Field = NDArray[np.floating[Any]]  # (H,W), or (H,W,3) for colours
Parts = list[Field]  # of an object: each is the region where the field is negative; later ones are on top
SMALLEST = 8  # pixels; in smaller scenes some objects would vanish
# Backgrounds are clouds of two colours, of so many cells, each stretched to so many times its width.
BACKGROUNDS = (
    ((0.35, 0.58, 0.88), (0.97, 0.97, 0.97), 2, 2.0),  # sky
    ((0.15, 0.25, 0.09), (0.46, 0.72, 0.28), 24, 0.35),  # grass
    ((0.54, 0.45, 0.32), (0.79, 0.66, 0.46), 3, 1.0),  # sand
    ((0.08, 0.28, 0.42), (0.38, 0.58, 0.72), 3, 4.0),  # water
    ((0.30, 0.16, 0.12), (0.72, 0.39, 0.29), 12, 1.0),  # stone
    ((0.08, 0.11, 0.04), (0.45, 0.60, 0.20), 6, 1.0),  # leaves
)


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
    images, masks = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*drawn, strict=True))
    return Dataset(images, masks, SHAPES.classes, split, "drawn", tuple(names[i] for i in chosen))


def draw(
    seed: int, group: int, index: int, size: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Image (3,H,W) and mask (H,W) number `index` of a group."""
    common = np.random.default_rng([seed, group])  # what the images of the group have in common
    colours = common.uniform(0.08, 0.95, (4, 3)).astype(np.float32)  # of the object's parts
    tint, most = common.uniform(-0.12, 0.12, 3), int(common.choice([1, 1, 2, 3]))
    # groups take turns through objects and backgrounds, so that a small dataset already has all of them
    dark, light, cells, stretch = BACKGROUNDS[(group + group // len(OBJECTS)) % len(BACKGROUNDS)]
    rng = np.random.default_rng([seed, group, index + 1])
    height, width = 2 * size[0], 2 * size[1]  # drawn at twice the size, then averaged: smooth edges
    y, x = np.mgrid[:height, :width].astype(np.float32) / height
    clouds = _clouds(rng, (height, width), cells, stretch)[..., None]
    scene, mask = (1 - clouds) * dark + clouds * light + tint, np.zeros((height, width), bool)
    for _ in range(rng.integers(1, most + 1)):
        u, v = _place(rng, x, y, rng.uniform(0.2, 0.45) / most**0.35)
        part = np.zeros(x.shape, np.intp)  # number of the part at each pixel; 0: background
        for number, field in enumerate(OBJECTS[group % len(OBJECTS)](u, v), start=1):
            part[field < 0] = number
        inside = part > 0
        shadow = gaussian_filter(np.roll(inside, (3, 4), (0, 1)).astype(np.float32), 2.5)
        scene = scene * (1 - 0.4 * shadow)[..., None]
        shade = 1.02 - 0.22 * (u + v) - 0.18 * (u * u + v * v)  # light from the upper left
        scene[inside] = colours[part[inside] - 1] * shade[inside, None]
        mask |= inside
    blur = rng.uniform(0.3, 1.0)
    photo = gaussian_filter(np.clip(scene * rng.uniform(0.8, 1.15), 0, 1), (blur, blur, 0))
    noisy = np.clip(_halved(photo) * 255 + rng.normal(0, 2.5, (*size, 3)), 0, 255)
    return noisy.astype(np.uint8).transpose(2, 0, 1).copy(), (_halved(mask) >= 0.5).astype(np.uint8)


def _clouds(rng: np.random.Generator, shape: tuple[int, int], cells: int, stretch: float) -> Field:
    """Fractal noise in 0..1: random grids of ever more cells, smoothly enlarged and added up."""
    total = np.zeros(shape, np.float32)
    for octave in range(4):
        n = cells * 2**octave
        grid = rng.random((max(2, round(n * stretch)) + 1, n + 1), dtype=np.float32)
        total += np.asarray(Image.fromarray(grid).resize(shape[::-1], Image.Resampling.BICUBIC)) / 2**octave
    return (total - total.min()) / max(float(np.ptp(total)), 1e-6)  # type: ignore[no-any-return]


def _place(rng: np.random.Generator, x: Field, y: Field, size: float) -> tuple[Field, Field]:
    """Coordinates of an object, about -1..1: u to its right, v down."""
    dx = (x - rng.uniform(0.22, float(x.max()) - 0.22)) / size
    dy = (y - rng.uniform(0.28, 0.75)) / size
    cos, sin = math.cos(turn := rng.normal(0, 0.25)), math.sin(turn)
    return (dx * cos + dy * sin) * rng.uniform(0.85, 1.15), dy * cos - dx * sin


def _halved(values: NDArray[np.generic]) -> Field:
    """The averages of 2 x 2 pixels."""
    height, width = values.shape[0] // 2, values.shape[1] // 2
    blocks = values.reshape(height, 2, width, 2, *values.shape[2:])
    return blocks.mean((1, 3), dtype=np.float32)  # type: ignore[no-any-return]


def _ellipse(u: Field, v: Field, a: float, b: float) -> Field:
    return (u / a) ** 2 + (v / b) ** 2 - 1


def _box(u: Field, v: Field, a: float, b: float) -> Field:
    return np.maximum(abs(u) - a, abs(v) - b)  # type: ignore[no-any-return]


def _petals(u: Field, v: Field, n: int, depth: float) -> Field:
    return np.hypot(u, v) - (1 - depth) - depth * np.cos(n * np.arctan2(u, -v))  # type: ignore[no-any-return]


def _kite(u: Field, v: Field) -> Parts:
    body = abs(u) / 0.68 + np.where(v < 0, -v / 0.75, v) - 1
    return [body, np.maximum(body, u * v)]


def _fish(u: Field, v: Field) -> Parts:
    tail = np.maximum(abs(v) - 0.9 * (u - 0.35), u - 0.98)
    return [tail, _ellipse(u + 0.2, v, 0.78, 0.46), _ellipse(u + 0.62, v + 0.1, 0.09, 0.09)]


def _house(u: Field, v: Field) -> Parts:
    roof = np.maximum(abs(u) * 0.75 - (v + 0.85), v + 0.1)
    return [
        _box(u, v - 0.4, 0.72, 0.52),
        roof,
        _box(u - 0.3, v - 0.6, 0.14, 0.32),
        _box(u + 0.3, v - 0.3, 0.18, 0.16),
    ]


OBJECTS: tuple[Callable[[Field, Field], Parts], ...] = (
    lambda u, v: [_ellipse(u, v, 0.9, 0.9), np.maximum(_ellipse(u, v, 0.9, 0.9), abs(v) - 0.16)],  # a ball
    lambda u, v: [_petals(u, v, 5, 0.32)],  # a star
    lambda u, v: [_petals(u, v, 7, 0.2), _ellipse(u, v, 0.36, 0.36)],  # a flower
    _kite,
    _fish,
    _house,
)
