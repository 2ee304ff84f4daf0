"""Checks of arguments. A message says what must hold, what was received, and how to fix it.

Shapes and types are always checked. Values (NaN, label range) are checked where that is free: on eager CPU
tensors, or everywhere with CMCL_DEBUG=1, because on a GPU it would wait for the device.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._messages import warn


def members(logits: Tensor) -> int:
    """The number of members M of logits (M, B, C, ...)."""
    floating(logits=logits)
    if logits.ndim < 3 or 0 in logits.shape:
        raise ValueError(
            "logits must have shape (members, batch, classes) or (members, batch, classes, height, width), "
            f"none of them 0. Got {tuple(logits.shape)}; stack the members' outputs along a new first axis."
        )
    if logits.shape[2] < 2:
        raise ValueError(f"logits must have at least 2 classes on axis 2. Got shape {tuple(logits.shape)}.")
    return logits.shape[0]


def objective(logits: Tensor, targets: Tensor, beta: float, samples: int, *, own_task: bool) -> None:
    """Shapes, types and ranges of an objective's arguments; unless the task reads the targets its own way."""
    if not isinstance(beta, Real):
        raise TypeError(f"beta must be a number. Got {kind(beta)}.")
    if not 0 <= beta <= sys.float_info.max:
        raise ValueError(f"beta must be a finite number, 0 or more. Got {beta}.")
    positive("samples", samples)
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a tensor. Got {kind(targets)}.")
    same_device("targets", targets, logits)
    expected = (logits.shape[1], *logits.shape[3:])
    if not own_task and (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool):
        raise TypeError(
            f"targets must be class indices, an integer tensor. Got {kind(targets)}. The default task is "
            "classification (cross-entropy): convert class indices by targets.long(); for soft or continuous "
            "targets pass task=, a function of a member's logits and the targets."
        )
    fits = targets.shape[:1] == expected[:1] if own_task else targets.shape == expected
    if not fits:
        raise ValueError(
            f"targets must have shape {expected} for logits of shape {tuple(logits.shape)}. "
            f"Got {tuple(targets.shape)}."
        )


def floating(**tensors: Tensor) -> None:
    """Raise unless all are floating-point tensors."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor. Got {kind(value)}.")


def overlaps(overlap: int | Tensor, m: int) -> None:
    """The overlap must be between 1 and the number of members; a tensor () is not read."""
    if isinstance(overlap, Tensor) and overlap.ndim == 0:
        return
    if isinstance(overlap, bool) or not isinstance(overlap, Integral):
        raise TypeError(f"overlap must be an integer. Got {kind(overlap)}.")
    if not 1 <= overlap <= m:
        raise ValueError(f"overlap must be between 1 and {m} (the number of members). Got {overlap}.")


def losses(values: Tensor, scores: Tensor | None = None) -> None:
    """Losses must be (M, B) or (M, B, T); scores, if any, (M, B)."""
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.ndim not in (2, 3):
        raise TypeError(
            "losses must be a floating-point tensor (members, batch) or (members, batch, targets). Got "
            f"{kind(values)}; reduce the loss of each hypothesis to one number per example."
        )
    if scores is not None and (not isinstance(scores, Tensor) or scores.shape != values.shape[:2]):
        raise ValueError(f"scores must have shape {tuple(values.shape[:2])}. Got {kind(scores)}.")


def labels(drawn: Tensor, logits: Tensor) -> None:
    """Drawn labels must be (S, M, B, ...) class indices for logits (M, B, C, ...)."""
    expected = (*logits.shape[:2], *logits.shape[3:])
    if drawn.dtype != torch.int64:
        raise TypeError(f"labels must be an int64 tensor. Got {kind(drawn)}.")
    if drawn.ndim != len(expected) + 1 or drawn.shape[1:] != expected or len(drawn) == 0:
        raise ValueError(
            f"labels must have shape (samples, {', '.join(map(str, expected))}) for these logits. "
            f"Got {tuple(drawn.shape)}."
        )
    same_device("labels", drawn, logits)
    if _may_look(drawn) and not (drawn.min() >= 0 and drawn.max() < logits.shape[2]):
        raise ValueError(
            f"labels must be between 0 and {logits.shape[2] - 1}. Got {drawn.min()} to {drawn.max()}."
        )


def unreduced(values: Tensor, like: Tensor) -> Tensor:
    """A task loss must keep one value per example (and pixel)."""
    if not isinstance(values, Tensor):
        raise TypeError(f"task must return a tensor. Got {kind(values)}.")
    if values.shape != like.shape:
        raise ValueError(
            f"task must return unreduced values of shape {tuple(like.shape)}. Got {tuple(values.shape)}; "
            'pass reduction="none" to the loss.'
        )
    return values


def values(logits: Tensor, targets: Tensor, ignore_index: int | None, *, own_task: bool) -> None:
    """Raise for NaN logits and labels outside the classes, where the check is free."""
    if not _may_look(logits):
        return
    no_numbers(logits)
    if hint := normalised(logits):
        _warn_once(hint)
    if not own_task:
        label_range(targets, logits.shape[2], ignore_index)


def normalised(logits: Tensor) -> str | None:
    """A warning if logits (M, B, C, ...) are probabilities or their logarithms, else None."""
    for part in (logits[:, :1].detach(), logits.detach()):  # most are not, as the first example shows
        if (part >= 0).all() and ((part.double().sum(2) - 1).abs() < 1e-4).all():
            kind_of, layer = "probabilities (every row sums to 1)", "softmax"
        elif (part <= 0).all() and (part.double().logsumexp(2).abs() < 1e-4).all():
            kind_of, layer = "log-probabilities (logsumexp of every row is 0)", "log_softmax"
        else:
            return None
    return (
        f"logits look like {kind_of}. The loss and the ensemble apply the softmax themselves: let the "
        f"network return its last layer's output, without {layer}."
    )


@cache
def _warn_once(text: str) -> None:
    warn(text)


def label_range(targets: Tensor, classes: int, ignore_index: int | None = None) -> None:
    """Raise unless labels are class indices or `ignore_index`."""
    if not targets.numel():
        return
    numbers = targets.long()  # torch finds no lowest and highest uint16
    low, high = (numbers if ignore_index is None else numbers.where(numbers != ignore_index, 0)).aminmax()
    if int(low) < 0 or int(high) >= classes:  # as ints: a narrow type would take 300 for another number
        counted = numbers if ignore_index is None else numbers[numbers != ignore_index]
        low, high = counted.aminmax()
        from_1 = int(low) >= 1 and int(high) == classes
        hint = "subtract 1" if from_1 else "name a value to skip by ignore_index"
        raise ValueError(
            f"targets must be between 0 and {classes - 1} (classes on axis 2). "
            f"Got {int(low)} to {int(high)}; labels start at 0: {hint}."
        )


def ignorable(ignore_index: object, targets: Tensor) -> None:
    """Raise unless ignore_index is None, or an integer within the range of the targets' type."""
    if ignore_index is None:
        return
    if not isinstance(ignore_index, Integral) or isinstance(ignore_index, bool):
        raise TypeError(f"ignore_index must be a whole number, or None. Got {kind(ignore_index)}.")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return
    limits = torch.iinfo(targets.dtype)
    if not limits.min <= int(ignore_index) <= limits.max:  # torch would take it for another number
        raise ValueError(
            f"ignore_index must be a number that targets can be, {limits.min} to {limits.max} for "
            f"{targets.dtype}. Got {ignore_index}; convert them by targets.long()."
        )


def no_numbers(logits: Tensor) -> None:
    """Logits must be numbers; -inf is one, for a class that is masked out."""
    if not logits.numel() or logits.amax() < math.inf:  # which NaN is not
        return
    bad = (~(logits < math.inf)).flatten(1).any(1).nonzero().flatten().tolist()
    raise ValueError(
        f"logits must not be NaN or +inf. Got that from member {bad}. Look for NaN in the inputs; if "
        "there is none, the training diverged: lower the learning rate."
    )


def inputs(x: Tensor) -> Tensor:
    """An ensemble takes a tensor whose first axis is the batch."""
    if not isinstance(x, Tensor) or x.ndim == 0:
        hint = " Convert it by torch.from_numpy." if isinstance(x, np.ndarray) else ""
        raise TypeError(f"x must be a tensor with the batch on its first axis. Got {kind(x)}.{hint}")
    return x


def not_finite(examples: Tensor) -> str:
    """The part of a message that says where examples (N, ...) hold NaN or infinity; empty if nowhere."""
    if not examples.is_floating_point() or not examples.numel():
        return ""
    if torch.stack(examples.aminmax()).isfinite().all():  # in one pass, and without a copy of them
        return ""
    bad = (~examples.reshape(len(examples), -1).isfinite().all(1)).nonzero().flatten().tolist()
    return f"NaN or infinity in {len(bad)} of {len(examples)} examples, first in number {bad[0]}"


def is_pair(value: object) -> bool:
    """Whether it is two tensors, as (images, targets) are."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(torch.is_tensor, value))


def pair(name: str, batch: Any) -> tuple[Tensor, Tensor]:
    """A batch must be (images, targets)."""
    if not is_pair(batch):
        got = ", ".join(map(kind, batch if isinstance(batch, tuple | list) else [batch]))
        raise TypeError(f"batches of {name} must be (images, targets), two tensors. Got {got}.")
    images, targets = batch
    return images, targets


def positive(name: str, value: int) -> None:
    """Raise unless a value is an integer of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer. Got {kind(value)}.")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more. Got {value}.")


def at_least(minimum: int, **options: int) -> None:
    """Raise unless options are Python integers (they are saved as JSON) of at least `minimum`."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}. Got {value!r}.")


def choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise unless a value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}. Got {value!r}.")


def probability(name: str, value: float) -> None:
    """Raise unless a value is a number between 0 and 1."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number. Got {kind(value)}.")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1. Got {value}.")


def same_device(name: str, value: Tensor, reference: Tensor) -> None:
    """Raise unless two tensors are on one device."""
    if value.device != reference.device:
        raise ValueError(
            f"{name} must be on {reference.device} like the rest. Got {value.device}; "
            f"call {name}.to({str(reference.device)!r}) first."
        )


_blind: ContextVar[bool] = ContextVar("_blind", default=False)


@contextmanager
def blindly() -> Iterator[None]:
    """Skip the checks of values, for a caller that checks them itself, as the training loop does."""
    before = _blind.set(True)
    try:
        yield
    finally:
        _blind.reset(before)


def _may_look(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return (tensor.device.type == "cpu" and not _blind.get()) or os.environ.get("CMCL_DEBUG") == "1"


def kind(value: object) -> str:
    """The description of a value in an error message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return (
        f"{type(value).__name__} {value!r}" if isinstance(value, str | int | float) else type(value).__name__
    )
