# mypy: disable-error-code="no-any-return"
# (numpy types the arithmetic of mixed arrays as Any)
"""Backgrounds and objects of the `shapes` set: functions of coordinates, drawn with numpy.

A background is (H,W,3) in 0..1. An object is a list of parts, each the region (H,W) where a formula of the
object's own coordinates u (right) and v (down), both about -1..1, is negative; later parts lie on top.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Field = NDArray[np.floating[Any]]  # (H,W), or (H,W,3) for colours
Colour = NDArray[np.floating[Any]]  # (3,)
Rng = np.random.Generator


def clouds(rng: Rng, shape: tuple[int, int], cells: int, octaves: int = 4, stretch: float = 1.0) -> Field:
    """Fractal noise in 0..1: random grids of ever more cells, smoothly enlarged and added up."""
    total = np.zeros(shape, np.float32)
    for octave in range(octaves):
        n = cells * 2**octave
        grid = rng.random((max(2, round(n * stretch)) + 1, n + 1), dtype=np.float32)
        smooth = Image.fromarray(grid).resize(shape[::-1], Image.Resampling.BICUBIC)
        total += np.asarray(smooth) / 2**octave
    low, high = total.min(), total.max()
    return (total - low) / max(float(high - low), 1e-6)


def mix(weight: Field, first: Colour, second: Colour) -> Field:
    """first where the weight is 0, second where it is 1: (H,W,3)."""
    return first + weight[..., None] * (second - first)


def _sky(rng: Rng, x: Field, y: Field, colours: Field) -> Field:
    blue = np.array([0.35, 0.58, 0.88], np.float32) + 0.25 * (colours[0] - 0.5)
    pale = mix(y, blue, 0.4 * blue + 0.55)
    white = np.clip(3 * clouds(rng, x.shape, 2, 5, stretch=2) - 1.6, 0, 0.9)
    return pale + white[..., None] * (0.97 - pale)


def _meadow(rng: Rng, x: Field, y: Field, colours: Field) -> Field:
    green = np.array([0.28, 0.46, 0.16], np.float32) + 0.2 * (colours[0] - 0.5)
    blades = 0.6 * clouds(rng, x.shape, 24, 2, stretch=0.35) + 0.4 * clouds(rng, x.shape, 2, 3)
    return mix(blades, 0.55 * green, 1.45 * green + 0.05) * (0.85 + 0.25 * y)[..., None]


def _sand(rng: Rng, x: Field, y: Field, colours: Field) -> Field:
    base = np.array([0.72, 0.6, 0.42], np.float32) + 0.25 * (colours[0] - 0.5)
    ripples = np.sin(40 * y + 9 * clouds(rng, x.shape, 2, 3)) * 0.06
    return base * (0.75 + 0.35 * clouds(rng, x.shape, 3, 5) + ripples)[..., None]


def _water(rng: Rng, x: Field, y: Field, colours: Field) -> Field:
    deep = np.array([0.08, 0.28, 0.42], np.float32) + 0.15 * (colours[0] - 0.5)
    waves = clouds(rng, x.shape, 3, 5, stretch=4)
    glints = np.clip(6 * waves - 4.3, 0, 1)
    return mix(waves, deep, deep + 0.3) + 0.5 * glints[..., None]


def _bricks(rng: Rng, x: Field, y: Field, colours: Field) -> Field:
    rows = y * 9 + 0.1 * clouds(rng, x.shape, 3)
    columns = x * 4.5 + 0.5 * (np.floor(rows) % 2) + rng.random()
    tint = rng.random((16, 16), dtype=np.float32)[
        np.floor(rows).astype(int) % 16, np.floor(columns).astype(int) % 16
    ]
    joint = (rows % 1 < 0.14) | (columns % 1 < 0.07)
    clay = np.array([0.55, 0.3, 0.22], np.float32) + 0.3 * (colours[0] - 0.5)
    wall = clay * (0.7 + 0.35 * tint + 0.25 * clouds(rng, x.shape, 12, 3))[..., None]
    return np.where(joint[..., None], np.float32(0.62), wall)


def _planks(rng: Rng, x: Field, y: Field, colours: Field) -> Field:
    position = x * 5 + rng.random()
    board = rng.random(8, dtype=np.float32)[np.floor(position).astype(int) % 8]
    grain = np.sin(55 * position + 14 * clouds(rng, x.shape, 2, 4, stretch=0.5) + 40 * board)
    wood = np.array([0.52, 0.36, 0.22], np.float32) + 0.3 * (colours[0] - 0.5)
    shade = 0.75 + 0.3 * board + 0.08 * grain - 0.5 * (position % 1 < 0.04)
    return wood * shade[..., None]


def _leaves(rng: Rng, x: Field, y: Field, colours: Field) -> Field:
    depth = clouds(rng, x.shape, 6, 4)
    light = np.array([0.45, 0.6, 0.2], np.float32) + 0.25 * (colours[0] - 0.5)
    return mix(np.clip(2.2 * depth - 0.6, 0, 1), 0.18 * light, light)


def _landscape(rng: Rng, x: Field, y: Field, colours: Field) -> Field:
    horizon = 0.35 + 0.3 * rng.random() + 0.12 * (clouds(rng, (1, x.shape[1]), 3, 4) - 0.5)
    ground = (_meadow if colours[1][0] > 0.5 else _sand)(rng, x, y, colours)
    return np.where((y > horizon)[..., None], ground, _sky(rng, x, y / 0.6, colours))


BACKGROUNDS: tuple[Callable[[Rng, Field, Field, Field], Field], ...] = (
    _sky,
    _meadow,
    _sand,
    _water,
    _bricks,
    _planks,
    _leaves,
    _landscape,
)


def _ellipse(u: Field, v: Field, a: float | Field, b: float) -> Field:
    return (u / a) ** 2 + (v / b) ** 2 - 1


def _box(u: Field, v: Field, a: float | Field, b: float) -> Field:
    return np.maximum(abs(u) - a, abs(v) - b)


def _petals(u: Field, v: Field, n: int, depth: float) -> Field:
    return np.hypot(u, v) - (1 - depth) - depth * np.cos(n * np.arctan2(u, -v))


def _ball(u: Field, v: Field) -> list[Field]:
    return [_ellipse(u, v, 0.9, 0.9), np.maximum(_ellipse(u, v, 0.9, 0.9), abs(v + 0.3 * u * u) - 0.16)]


def _star(u: Field, v: Field) -> list[Field]:
    return [_petals(u, v, 5, 0.32)]


def _flower(u: Field, v: Field) -> list[Field]:
    return [_petals(u, v, 7, 0.2), _ellipse(u, v, 0.36, 0.36)]


def _kite(u: Field, v: Field) -> list[Field]:
    body = abs(u) / 0.68 + np.where(v < 0, -v / 0.75, v) - 1
    return [body, np.maximum(body, u * v)]


def _mushroom(u: Field, v: Field) -> list[Field]:
    cap = np.maximum(_ellipse(u, v - 0.05, 0.95, 0.9), v - 0.1)
    return [_box(u, v - 0.45, 0.24 + 0.08 * v, 0.48), cap]


def _fish(u: Field, v: Field) -> list[Field]:
    tail = np.maximum(abs(v) - 0.9 * (u - 0.35), u - 0.98)
    return [tail, _ellipse(u + 0.2, v, 0.78, 0.46), _ellipse(u + 0.62, v + 0.1, 0.09, 0.09)]


def _tree(u: Field, v: Field) -> list[Field]:
    crown = np.minimum(_ellipse(u - 0.3, v + 0.15, 0.5, 0.42), _ellipse(u + 0.3, v + 0.12, 0.52, 0.42))
    return [_box(u, v - 0.6, 0.13, 0.4), np.minimum(crown, _ellipse(u, v + 0.5, 0.52, 0.48))]


def _balloon(u: Field, v: Field) -> list[Field]:
    taper = np.maximum(abs(u) - 0.62 + 0.75 * v, abs(v - 0.35) - 0.3)
    gores = np.minimum(_ellipse(u, v + 0.28, 0.72, 0.7), taper)
    ropes = np.maximum(abs(abs(u) - 0.12) - 0.02, abs(v - 0.7) - 0.15)
    return [gores, np.maximum(gores, np.sin(9 * u)), ropes, _box(u, v - 0.88, 0.17, 0.11)]


def _house(u: Field, v: Field) -> list[Field]:
    roof = np.maximum(abs(u) * 0.75 - (v + 0.85), v + 0.1)
    return [
        _box(u, v - 0.4, 0.72, 0.52),
        roof,
        _box(u - 0.3, v - 0.6, 0.14, 0.32),
        _box(u + 0.3, v - 0.3, 0.18, 0.16),
    ]


def _car(u: Field, v: Field) -> list[Field]:
    cabin = np.maximum(abs(u) - 0.42 - 0.3 * (v + 0.45), abs(v + 0.22) - 0.26)
    wheels = np.minimum(_ellipse(u - 0.52, v - 0.42, 0.22, 0.22), _ellipse(u + 0.52, v - 0.42, 0.22, 0.22))
    window = np.maximum(abs(u) - 0.34 - 0.3 * (v + 0.45), abs(v + 0.2) - 0.16)
    return [_box(u, v - 0.2, 0.95, 0.24), cabin, window, wheels]


OBJECTS: tuple[Callable[[Field, Field], list[Field]], ...] = (
    _ball,
    _star,
    _flower,
    _kite,
    _mushroom,
    _fish,
    _tree,
    _balloon,
    _house,
    _car,
)
