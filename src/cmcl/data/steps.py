"""The steps of preprocessing: contrast normalisation, ZCA whitening, mean and deviation, chains of them.

B images of a chunk, C channels, D = C*H*W values of an image.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .transform import Chunks, Transform

_BLOCK = 512  # columns of the covariance computed together
_MAX_DIMENSIONS = 1 << 14  # a ZCA matrix of that side already takes 2 GiB in float64


@dataclass(eq=False)
class GCN(Transform):
    """Global contrast normalisation: subtract each image's mean, then scale its contrast.

    Args:
        scale: the contrast that every image gets.
        by: "norm" scales the L2 norm to `scale`, as pylearn2 did for the paper's CIFAR-10 (no bias added);
            "deviation" scales the standard deviation.

    A constant image becomes zero. There is no inverse: mean and contrast of each image are forgotten.
    """

    kind = "gcn"
    learns = False
    scale: float = 55.0
    by: str = "norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by not in {"norm", "deviation"}:
            raise ValueError(f"by must be 'norm' or 'deviation'. Got {self.by!r}.")
        if not self.scale > 0:
            raise ValueError(f"scale must be positive. Got {self.scale}.")

    def _fit(self, chunks: Chunks) -> None:
        """Nothing to learn: every image is normalised by itself."""

    def _apply(self, x: Tensor) -> Tensor:
        x = x - x.mean((1, 2, 3), keepdim=True)
        contrast = x.square().sum((1, 2, 3), keepdim=True).sqrt()  # (B,1,1,1)
        if self.by == "deviation":
            contrast = contrast / math.sqrt(x.shape[1:].numel())
        # below pylearn2's limit of 1e-8 there is no contrast to scale, only rounding
        return x * torch.where(contrast < 1e-8 * self.scale, 1.0, self.scale / contrast)

    def _invert(self, x: Tensor) -> Tensor:
        message = (
            "inverse must be asked of steps that keep what they need. Got gcn, which forgets each image's "
            "mean and contrast. Invert the later steps of the chain alone: chain.steps[-1].inverse(values)."
        )
        raise ValueError(message)


@dataclass(eq=False)
class ZCA(Transform):
    """ZCA whitening: directions of covariance eigenvalue e come out with variance e / (e + bias).

    Args:
        bias: added to the eigenvalues, so that directions that hold only noise are not blown up.

    The inverse is exact up to rounding.
    """

    kind = "zca"
    bias: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bias > 0:
            raise ValueError(f"bias must be positive. Got {self.bias}.")

    def _fit(self, chunks: Chunks) -> None:
        mean, covariance = _moments(chunks)
        eigenvalues, vectors = torch.linalg.eigh(covariance, UPLO="L")
        # rounding can leave eigenvalues of -1e-16
        matrix = (vectors * (eigenvalues.clamp_min(0) + self.bias).rsqrt()) @ vectors.T  # (D,D)
        self._set_tensors({"mean": mean.float(), "matrix": matrix.float()})

    def _apply(self, x: Tensor) -> Tensor:
        self._check_size(x)
        centred = x.flatten(1) - self._learned("mean", x.device)
        return (centred @ self._learned("matrix", x.device)).view_as(x)

    def _invert(self, x: Tensor) -> Tensor:
        self._check_size(x)
        if ("inverse", x.device) not in self._work:
            self._work["inverse", x.device] = torch.linalg.inv(self._learned("matrix", x.device))
        restored = x.flatten(1) @ self._learned("inverse", x.device) + self._learned("mean", x.device)
        return restored.view_as(x)

    def _check_size(self, x: Tensor) -> None:
        fitted, got = self._tensors["mean"].numel(), x.shape[1:].numel()
        if fitted != got:
            message = (
                f"images must have {fitted} values each, as at the fit. Got {got} ({tuple(x.shape[1:])})."
            )
            raise ValueError(message)


def _moments(chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Mean (D,) and covariance (D,D), its lower triangle only, in one pass.

    float64 makes the textbook formula safe.
    """
    first = next(chunks())
    d = first[0].numel()
    if d > _MAX_DIMENSIONS:
        message = (
            f"images for zca must have at most {_MAX_DIMENSIONS} values each. Got {d}. "
            "Use smaller images, or mean_std."
        )
        raise ValueError(message)
    n, total, squares = 0, first.new_zeros(d), first.new_zeros(d, d)
    for chunk in chunks():
        x = chunk.flatten(1)
        n += len(x)
        total += x.sum(0)
        for start in range(0, d, _BLOCK):  # from the diagonal down: little more than half the work
            block = slice(start, start + _BLOCK)
            squares[start:, block].addmm_(x[:, start:].T, x[:, block])
    _check_finite(squares)
    mean = total / n
    return mean, squares.div_(n).addr_(mean, mean, alpha=-1)


def _check_finite(sums: Tensor) -> None:
    """What is not finite in any image shows in the sums over all of them."""
    if not sums.isfinite().all():
        raise ValueError("images must be finite. Got NaN or infinity. Clean them before the fit.")


@dataclass(eq=False)
class MeanStd(Transform):
    """Per channel: subtract the mean, divide by the deviation. The inverse is exact up to rounding."""

    kind = "mean_std"

    def _fit(self, chunks: Chunks) -> None:
        n, total, squares = 0, torch.zeros(()), torch.zeros(())
        for x in chunks():
            n += x.numel() // x.shape[1]
            total = total.to(x) + x.sum((0, 2, 3))
            squares = squares.to(x) + x.square().sum((0, 2, 3))
        _check_finite(squares)
        mean = total / n  # (C,)
        variance = (squares / n - mean.square()).clamp_min(0)
        deviation = torch.where(variance > 0, variance.sqrt(), 1.0)  # a constant channel only loses its mean
        self._set_tensors({"mean": mean.view(-1, 1, 1), "std": deviation.view(-1, 1, 1)})

    def _apply(self, x: Tensor) -> Tensor:
        self._check_channels(x)
        return (x - self._learned("mean", x.device)) / self._learned("std", x.device)

    def _invert(self, x: Tensor) -> Tensor:
        self._check_channels(x)
        return x * self._learned("std", x.device) + self._learned("mean", x.device)

    def _check_channels(self, x: Tensor) -> None:
        fitted = len(self._tensors["mean"])
        if x.shape[1] != fitted:
            raise ValueError(f"images must have {fitted} channels, one for each mean. Got {x.shape[1]}.")


@dataclass(eq=False)
class Normalize(MeanStd):
    """Per channel, a known mean and deviation in place of fitted ones: what a pretrained network wants.

    Args:
        mean: one number for each channel, for images of 0 to 1, as torchvision and timm tell them.
        std: the same of the deviation.

    The images themselves are of 0 to 255, as everywhere here: x becomes (x / 255 - mean) / std. Mean 0 and
    deviation 1 are x / 255. The inverse is exact up to rounding.
    """

    kind = "normalize"
    learns = False
    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mean, self.std = _constants("mean", self.mean), _constants("std", self.std)
        if len(self.std) != len(self.mean) or not all(self.std):
            raise ValueError(
                f"std must be {len(self.mean)} positive numbers, as many as mean. Got {self.std}."
            )
        mean, std = (torch.tensor(own, dtype=torch.float64).view(-1, 1, 1) for own in (self.mean, self.std))
        self._set_tensors({"mean": 255 * mean, "std": 255 * std})

    def _fit(self, chunks: Chunks) -> None:
        """Nothing to learn: the numbers are known."""


def _constants(name: str, given: Sequence[float]) -> list[float]:
    """One a channel. Those for images of 0 to 255 would make all images alike, and nothing would tell."""
    try:
        numbers = [float(number) for number in given]
    except TypeError:
        raise TypeError(f"{name} must be a list of numbers, one for each channel. Got {given!r}.") from None
    if not numbers or not all(0 <= number <= 1 for number in numbers):
        raise ValueError(
            f"{name} must be numbers from 0 to 1, one for each channel: those for images of 0 to 1. "
            f"Got {numbers}. Divide those for images of 0 to 255 by 255."
        )
    return numbers


@dataclass(eq=False)
class Chain(Transform):
    """Several transforms, one after the other; each is fitted to what the earlier ones give."""

    kind = "chain"
    steps: Sequence[Transform]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.steps:
            raise ValueError("steps must hold at least one transform. Got none.")
        if len({id(step) for step in self.steps}) < len(self.steps):  # it would learn over what it learned
            message = "steps must be different objects. Got one of them twice."
            raise ValueError(f"{message} Make a second one, such as Chain([MeanStd(), MeanStd()]).")

    @property
    def needs_fit(self) -> bool:
        """Whether any step learns from data."""
        return any(step.needs_fit for step in self.steps)

    def parameters(self) -> dict[str, Any]:
        """Kind and parameters of every step as JSON values."""
        return {"kind": self.kind, "steps": [step.parameters() for step in self.steps]}

    def _fit(self, chunks: Chunks) -> None:
        for i, step in enumerate(self.steps):
            earlier = Chain(self.steps[:i])._apply if i else _unchanged
            step.source = self.source if step.needs_fit else None
            step._fit(lambda apply=earlier: map(apply, chunks()))  # type: ignore[misc]

    def _apply(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step._apply(x)
        return x

    def _invert(self, x: Tensor) -> Tensor:
        for step in reversed(self.steps):
            x = step._invert(x)
        return x

    def _get_tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{k}": v for i, step in enumerate(self.steps) for k, v in step._get_tensors().items()}

    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for i, step in enumerate(self.steps):
            step.source = self.source if step.needs_fit else None
            own = {k.removeprefix(f"{i}."): v for k, v in tensors.items() if k.startswith(f"{i}.")}
            step._set_tensors(own)


def _unchanged(x: Tensor) -> Tensor:
    return x
