"""Augmentation on the training device: all members see the same augmented batch.

Every function draws from torch's default generator with tensor operations only, so a CUDA graph can hold it.
To add one: a field of `Augment` in config.py, a function here, its check in preflight.py, the next `SCHEMA`.
B batch, C classes. Images are (B, channels, H, W); dense targets (B, H, W) move with them.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Tensor

from .config import Augment

Batch = tuple[Tensor, Tensor]  # images, targets
Augmentation = Callable[[Tensor, Tensor, torch.Generator], Batch]  # (images, targets, generator)
LEVELS = 4096  # quantiles of the Beta distribution in a table: it has no sampler that a graph can hold


def augmented(how: Augment, classes: int, own: Augmentation | None) -> Augmentation:
    """The user's own augmentation, if any, and after it that of the recipe."""

    def apply(images: Tensor, targets: Tensor, generator: torch.Generator) -> Batch:
        if own is not None:
            images, targets = own(images, targets, generator)
        return augment(images, targets, how, classes)

    return apply


def augment(images: Tensor, targets: Tensor, how: Augment, classes: int) -> Batch:
    """Augmented images, and targets; with mixup or cutmix, targets are probabilities (B, C)."""
    if how.flip is True:
        images, targets = flip(images, targets, _coin(images))
    if how.crop:
        images, targets = crop(images, targets, how.crop)
    if how.jitter:
        images = jitter(images, how.jitter)
    if how.cutout:
        images = cutout(images, how.cutout)
    if how.mixup or how.cutmix:
        images, targets = mix(images, F.one_hot(targets.long(), classes).to(images.dtype), how)
    return images, targets


def flip(images: Tensor, targets: Tensor, which: Tensor) -> Batch:
    """Mirror the examples marked in `which` (B,) horizontally."""
    images = torch.where(which[:, None, None, None], images.flip(-1), images)
    if _are_masks(targets, images):
        targets = torch.where(which[:, None, None], targets.flip(-1), targets)
    return images, targets


def crop(images: Tensor, targets: Tensor, pixels: int) -> Batch:
    """Shift each example by up to `pixels` in both directions; the border is reflected."""
    size, device = images.shape[-2:], images.device
    batch = torch.arange(len(images), device=device)
    shifts = torch.randint(-pixels, pixels + 1, (2, len(images), 1), device=device)
    rows, columns = (
        _reflected(torch.arange(n, device=device) + s, n) for n, s in zip(size, shifts, strict=True)
    )
    where = (batch[:, None, None], rows[:, :, None], columns[:, None, :])  # (B, H, W) together
    if _are_masks(targets, images):
        targets = targets[where]
    return images.permute(0, 2, 3, 1)[where].permute(0, 3, 1, 2).contiguous(), targets


def _are_masks(targets: Tensor, images: Tensor) -> bool:
    """Whether targets are (B, H, W): a class for each pixel."""
    return targets.shape[1:] == images.shape[-2:]


def _reflected(index: Tensor, size: int) -> Tensor:
    """Indices mirrored at both borders: -1 becomes 1, and size becomes size - 2."""
    return (size - 1) - ((size - 1) - index.abs()).abs()


def cutout(images: Tensor, size: int) -> Tensor:
    """Set a square of `size` pixels at a random position to 0, the mean of standardised images."""
    side = torch.full((len(images),), float(size), device=images.device)
    return torch.where(_square(images, side), 0, images)


def jitter(images: Tensor, strength: float) -> Tensor:
    """Scale the contrast of each image, and shift its brightness, by up to `strength`."""
    scale, shift = strength * (2 * torch.rand(2, len(images), 1, 1, 1, device=images.device) - 1)
    mean = images.mean((1, 2, 3), keepdim=True)
    changed: Tensor = (images - mean) * (1 + scale.to(images.dtype)) + mean + shift.to(images.dtype)
    return changed


def mix(images: Tensor, targets: Tensor, how: Augment) -> Batch:
    """Mix each example with the one before: mixup (a mean), cutmix (a square), or either by chance."""
    pair = images, images.roll(1, 0), targets, targets.roll(1, 0)
    if not how.cutmix:
        return _mixup(*pair, how.mixup)
    if not how.mixup:
        return _cutmix(*pair, how.cutmix)
    (x, y), (x2, y2), which = _mixup(*pair, how.mixup), _cutmix(*pair, how.cutmix), _coin(images)
    return torch.where(which[:, None, None, None], x, x2), torch.where(which[:, None], y, y2)


def _mixup(x: Tensor, x2: Tensor, y: Tensor, y2: Tensor, alpha: float) -> Batch:
    part = _beta(alpha, x)  # (B,)
    return torch.lerp(x2, x, part[:, None, None, None]), torch.lerp(y2, y, part[:, None])


def _cutmix(x: Tensor, x2: Tensor, y: Tensor, y2: Tensor, alpha: float) -> Batch:
    side = (1 - _beta(alpha, x)).sqrt() * min(x.shape[-2:])
    inside = _square(x, side)  # (B, 1, H, W)
    part = 1 - inside.to(x.dtype).mean((1, 2, 3))  # of the image that is left
    return torch.where(inside, x2, x), torch.lerp(y2, y, part[:, None])


def _square(images: Tensor, side: Tensor) -> Tensor:
    """(B, 1, H, W): True inside a square of `side` (B,) pixels around a random centre, cut at the border."""
    height, width = images.shape[-2:]
    y, x = torch.rand(2, len(images), 1, device=images.device)
    half = side[:, None] / 2
    rows = ((torch.arange(height, device=images.device) + 0.5 - y * height).abs() < half)[:, :, None]
    columns = ((torch.arange(width, device=images.device) + 0.5 - x * width).abs() < half)[:, None, :]
    inside: Tensor = (rows & columns)[:, None]
    return inside


def _coin(images: Tensor) -> Tensor:
    return torch.rand(len(images), device=images.device) < 0.5


def _beta(alpha: float, images: Tensor) -> Tensor:
    """A draw of Beta(alpha, alpha) for each example, from a table of quantiles."""
    table = _quantiles(alpha, images.device, images.dtype)
    return table[torch.randint(LEVELS, (len(images),), device=images.device)]


@cache
def _quantiles(alpha: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    levels = [(i + 0.5) / LEVELS for i in range(LEVELS)]
    return torch.tensor(betaincinv(alpha, alpha, levels), device=device).to(dtype)
