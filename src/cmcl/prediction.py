"""What an ensemble answers, from its members' logits. M members, B batch, C classes."""

from typing import NamedTuple

import torch
from torch import Tensor

from .metrics import entropy


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
