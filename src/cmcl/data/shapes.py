# mypy: disable-error-code="no-any-return"
# (numpy types the arithmetic of mixed arrays as Any)
"""Drawn scenes with foreground masks: the dataset for segmentation that needs no file.

The images of a group show the same kind of object in the same colours before the same kind of background, at
other places, sizes and angles: like iCoseg, but endless, and the same everywhere for one seed.

x and y are coordinates of the scene, whose height is 1; u (right) and v (down) those of an object, in -1..1.
"""

import math
from collections.abc import Sequence
from functools import partial
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
Rng = np.random.Generator
SMALLEST = 8  # pixels; in smaller scenes some objects would vanish
BACKGROUNDS = ("sky", "meadow", "sand", "water", "bricks", "planks", "leaves", "landscape")
OBJECTS = ("ball", "star", "flower", "kite", "mushroom", "fish", "tree", "balloon", "house", "car")


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
    colours = common.uniform(0.08, 0.95, (4, 3)).astype(np.float32)  # of the parts of an object
    pattern, most = int(common.integers(3)), int(common.choice([1, 1, 2, 3]))
    # groups take turns through objects and backgrounds: a small dataset already has all of them
    background = BACKGROUNDS[(group * 3 + group // len(BACKGROUNDS)) % len(BACKGROUNDS)]
    rng = np.random.default_rng([seed, group, index + 1])
    height, width = 2 * size[0], 2 * size[1]  # drawn at twice the size, then averaged: smooth edges
    y, x = np.mgrid[:height, :width].astype(np.float32) / height
    scene, mask = _background(background, rng, x, y, colours), np.zeros((height, width), bool)
    for _ in range(rng.integers(1, most + 1)):
        u, v = _coordinates(rng, x, y, rng.uniform(0.2, 0.45) / most**0.35)
        part = np.zeros(x.shape, np.intp)  # number of the part at each pixel; 0: background
        for number, field in enumerate(_parts(OBJECTS[group % len(OBJECTS)], u, v), start=1):
            part[field < 0] = number
        inside = part > 0
        shadow = gaussian_filter(np.roll(inside, (3, 4), (0, 1)).astype(np.float32), 2.5)
        scene = scene * (1 - 0.4 * shadow)[..., None]
        light = 1.02 - 0.22 * (u + v) - 0.18 * (u * u + v * v)  # from the upper left, as on a round body
        shade = _pattern(rng, pattern, u, v) * light
        scene[inside] = colours[part[inside] - 1] * shade[inside, None]
        mask |= inside
    cast = (rng.normal(1, 0.04, 3) * rng.uniform(0.8, 1.15)).astype(np.float32)
    blur = rng.uniform(0.3, 1.0)
    photo = gaussian_filter(np.clip(scene * cast, 0, 1), (blur, blur, 0))
    image = np.clip(_halved(photo) * 255 + rng.normal(0, 2.5, (*size, 3)), 0, 255)
    return image.astype(np.uint8).transpose(2, 0, 1).copy(), (_halved(mask) >= 0.5).astype(np.uint8)


def _coordinates(rng: Rng, x: Field, y: Field, size: float) -> tuple[Field, Field]:
    left, top = rng.uniform(0.22, float(x.max()) - 0.22), rng.uniform(0.28, 0.75)
    turn, squeeze = rng.normal(0, 0.25), rng.uniform(0.85, 1.15)
    dx, dy = (x - left) / size, (y - top) / size
    u = (dx * math.cos(turn) + dy * math.sin(turn)) * squeeze
    return u, dy * math.cos(turn) - dx * math.sin(turn)


def _pattern(rng: Rng, kind: int, u: Field, v: Field) -> Field:
    """Clouds, stripes or dots."""
    if kind == 0:
        return 0.85 + 0.3 * _clouds(rng, u.shape, 6, 3)
    if kind == 1:
        return np.where(np.sin(11 * (u + 0.4 * v)) > 0.2, 1.1, 0.78).astype(np.float32)
    return np.where(np.hypot((2.6 * u) % 1 - 0.5, (2.6 * v) % 1 - 0.5) < 0.27, 0.72, 1.08).astype(np.float32)


def _halved(values: NDArray[np.generic]) -> Field:
    """The averages of 2 x 2 pixels."""
    blocks = values.reshape(values.shape[0] // 2, 2, values.shape[1] // 2, 2, *values.shape[2:])
    return blocks.mean((1, 3), dtype=np.float32)


def _clouds(rng: Rng, shape: tuple[int, ...], cells: int, octaves: int = 4, stretch: float = 1.0) -> Field:
    """Fractal noise in 0..1: random grids of ever more cells, smoothly enlarged and added up."""
    total = np.zeros(shape, np.float32)
    for octave in range(octaves):
        n = cells * 2**octave
        grid = rng.random((max(2, round(n * stretch)) + 1, n + 1), dtype=np.float32)
        large = Image.fromarray(grid).resize([shape[1], shape[0]], Image.Resampling.BICUBIC)
        total += np.asarray(large) / 2**octave
    low, high = total.min(), total.max()
    return (total - low) / max(float(high - low), 1e-6)


def _background(kind: str, rng: Rng, x: Field, y: Field, colours: Field) -> Field:
    """The colours (H,W,3) behind the objects, tinted by the first colour of the group."""
    clouds = partial(_clouds, rng, x.shape)

    def tinted(red: float, green: float, blue: float, by: float) -> Field:
        return np.array([red, green, blue], np.float32) + by * (colours[0] - 0.5)

    match kind:
        case "sky":
            blue = tinted(0.35, 0.58, 0.88, by=0.25)
            pale = _mix(y, blue, 0.4 * blue + 0.55)
            white = np.clip(3 * clouds(2, 5, stretch=2) - 1.6, 0, 0.9)
            return pale + white[..., None] * (0.97 - pale)
        case "meadow":
            green = tinted(0.28, 0.46, 0.16, by=0.2)
            blades = 0.6 * clouds(24, 2, stretch=0.35) + 0.4 * clouds(2, 3)
            return _mix(blades, 0.55 * green, 1.45 * green + 0.05) * (0.85 + 0.25 * y)[..., None]
        case "sand":
            ripples = np.sin(40 * y + 9 * clouds(2, 3)) * 0.06
            grain = 0.75 + 0.35 * clouds(3, 5) + ripples
            return tinted(0.72, 0.6, 0.42, by=0.25) * grain[..., None]
        case "water":
            deep, waves = tinted(0.08, 0.28, 0.42, by=0.15), clouds(3, 5, stretch=4)
            return _mix(waves, deep, deep + 0.3) + 0.5 * np.clip(6 * waves - 4.3, 0, 1)[..., None]
        case "bricks":
            rows = y * 9 + 0.1 * clouds(3)
            columns = x * 4.5 + 0.5 * (np.floor(rows) % 2) + rng.random()
            row, column = np.floor(rows).astype(int) % 16, np.floor(columns).astype(int) % 16
            shade = 0.7 + 0.35 * rng.random((16, 16), dtype=np.float32)[row, column]
            wall = tinted(0.55, 0.3, 0.22, by=0.3) * (shade + 0.25 * clouds(12, 3))[..., None]
            return np.where(((rows % 1 < 0.14) | (columns % 1 < 0.07))[..., None], np.float32(0.62), wall)
        case "planks":
            position = x * 5 + rng.random()
            board = rng.random(8, dtype=np.float32)[np.floor(position).astype(int) % 8]
            grain = np.sin(55 * position + 14 * clouds(2, 4, stretch=0.5) + 40 * board)
            shade = 0.75 + 0.3 * board + 0.08 * grain - 0.5 * (position % 1 < 0.04)
            return tinted(0.52, 0.36, 0.22, by=0.3) * shade[..., None]
        case "leaves":
            light = tinted(0.45, 0.6, 0.2, by=0.25)
            return _mix(np.clip(2.2 * clouds(6, 4) - 0.6, 0, 1), 0.18 * light, light)
    horizon = 0.35 + 0.3 * rng.random() + 0.12 * (_clouds(rng, (1, x.shape[1]), 3, 4) - 0.5)
    ground = _background("meadow" if colours[1][0] > 0.5 else "sand", rng, x, y, colours)
    return np.where((y > horizon)[..., None], ground, _background("sky", rng, x, y / 0.6, colours))


def _mix(weight: Field, first: Field, second: Field) -> Field:
    return first + weight[..., None] * (second - first)


def _parts(kind: str, u: Field, v: Field) -> list[Field]:
    """The parts of an object: each is the region where its field is negative, and later ones are on top."""
    match kind:
        case "ball":
            return [
                _ellipse(u, v, 0.9, 0.9),
                np.maximum(_ellipse(u, v, 0.9, 0.9), abs(v + 0.3 * u * u) - 0.16),
            ]
        case "star":
            return [_petals(u, v, 5, 0.32)]
        case "flower":
            return [_petals(u, v, 7, 0.2), _ellipse(u, v, 0.36, 0.36)]
        case "kite":
            body = abs(u) / 0.68 + np.where(v < 0, -v / 0.75, v) - 1
            return [body, np.maximum(body, u * v)]
        case "mushroom":
            cap = np.maximum(_ellipse(u, v - 0.05, 0.95, 0.9), v - 0.1)
            return [_box(u, v - 0.45, 0.24 + 0.08 * v, 0.48), cap]
        case "fish":
            tail = np.maximum(abs(v) - 0.9 * (u - 0.35), u - 0.98)
            return [tail, _ellipse(u + 0.2, v, 0.78, 0.46), _ellipse(u + 0.62, v + 0.1, 0.09, 0.09)]
        case "tree":
            low = np.minimum(_ellipse(u - 0.3, v + 0.15, 0.5, 0.42), _ellipse(u + 0.3, v + 0.12, 0.52, 0.42))
            return [_box(u, v - 0.6, 0.13, 0.4), np.minimum(low, _ellipse(u, v + 0.5, 0.52, 0.48))]
        case "balloon":
            taper = np.maximum(abs(u) - 0.62 + 0.75 * v, abs(v - 0.35) - 0.3)
            gores = np.minimum(_ellipse(u, v + 0.28, 0.72, 0.7), taper)
            ropes = np.maximum(abs(abs(u) - 0.12) - 0.02, abs(v - 0.7) - 0.15)
            return [gores, np.maximum(gores, np.sin(9 * u)), ropes, _box(u, v - 0.88, 0.17, 0.11)]
        case "house":
            roof = np.maximum(abs(u) * 0.75 - (v + 0.85), v + 0.1)
            door, window = _box(u - 0.3, v - 0.6, 0.14, 0.32), _box(u + 0.3, v - 0.3, 0.18, 0.16)
            return [_box(u, v - 0.4, 0.72, 0.52), roof, door, window]
    cabin, window = (
        np.maximum(abs(u) - side - 0.3 * (v + 0.45), abs(v + middle) - height)
        for side, middle, height in ((0.42, 0.22, 0.26), (0.34, 0.2, 0.16))
    )
    wheels = np.minimum(_ellipse(u - 0.52, v - 0.42, 0.22, 0.22), _ellipse(u + 0.52, v - 0.42, 0.22, 0.22))
    return [_box(u, v - 0.2, 0.95, 0.24), cabin, window, wheels]


def _ellipse(u: Field, v: Field, a: float, b: float) -> Field:
    return (u / a) ** 2 + (v / b) ** 2 - 1


def _box(u: Field, v: Field, a: float | Field, b: float) -> Field:
    return np.maximum(abs(u) - a, abs(v) - b)


def _petals(u: Field, v: Field, n: int, depth: float) -> Field:
    return np.hypot(u, v) - (1 - depth) - depth * np.cos(n * np.arctan2(u, -v))
