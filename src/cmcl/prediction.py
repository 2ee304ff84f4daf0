"""What an ensemble answers, from its members' logits. M members, B batch, C classes."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .metrics import entropy

BRIGHT = 16  # what transforms make of white stays below; only an image of 0 to 255 goes beyond


class Prediction(NamedTuple):
    """What an ensemble answers, and how sure each member is."""

    probs: Tensor  # (B, C, ...)           mean of the members' probabilities
    member_probs: Tensor  # (M, B, C, ...)
    entropy: Tensor  # (M, B)              of each member's answer, in nats; pixel mean if dense
    chosen: Tensor  # (B,)                 the most confident member: lowest entropy


def answer(logits: Tensor) -> Prediction:
    """Of logits (M, B, C, ...); probabilities are at least float32."""
    member_probs = logits.softmax(2, dtype=torch.promote_types(logits.dtype, torch.float32))
    uncertainty = entropy(member_probs)
    return Prediction(member_probs.mean(0), member_probs, uncertainty, uncertainty.argmin(0))


def notice_raw(x: Tensor, transform: Any) -> None:
    """Warn of float images that look raw, of 0 to 1 or 0 to 255, where the transform would give others."""
    image = x.is_floating_point() and x.ndim == 4 and x.numel() > 0
    if transform is None or not transform.is_fitted or not image or x.min() < 0 or 1 < x.max() <= BRIGHT:
        return
    try:
        black = transform.transform(torch.zeros_like(x[:1], dtype=torch.uint8))
    except ValueError:  # not of the kind that it takes: what they are is the caller's business
        return
    if black.min() < 0:
        warnings.warn(
            "float inputs are taken as transformed already, and these look raw: no value is below 0. Pass "
            "raw images as uint8, or ensemble.transform.transform(images).",
            stacklevel=4,  # past predict, and torch's no_grad around it
        )
