"""Feature sharing (section 4.1). M members, B batch; a member's features h are (B, ...), all of one shape."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks

MODES = ("sampled", "expected", "off")


def share_features(
    features: Sequence[Tensor] | Tensor,
    *,
    prob: float = 0.7,
    mode: str = "sampled",
    masks: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """What each member goes on with: h_m + sum over n != m of mask_nm * h_n.

    Masks are Bernoulli(prob) per value and ordered pair, not rescaled; gradients reach the others' stems.

    Args:
        features: the members' features, M tensors (B, ...) of one shape, or stacked, (M, B, ...).
        prob: lambda of the paper, the probability that a value is passed on.
        mode: "sampled" draws masks; "expected" puts `prob` in their place; "off" leaves each member alone.
        masks: (M, M, B, ...) boolean, to use instead: masks[n, m] is what m gets of n. n = m is not read.
        generator: source of the masks. It does not pass through torch.compile.

    Returns:
        M mixed features (B, ...). Autograd keeps boolean masks only, M - 1 bytes per feature value.
    """
    _checks.choice("mode", mode, MODES)
    _checks.probability("prob", prob)
    _checks.features(features, masks, shared=mode != "off")
    if mode == "off":
        return list(features)
    mixed = []
    for m, own in enumerate(features):
        others = [n for n in range(len(features)) if n != m]
        given = None if masks is None else [masks[n, m] for n in others]
        for n, mask in zip(others, given or _masks(own, len(others), prob, mode, generator), strict=True):
            own = own + features[n] * mask
        mixed.append(own)
    return mixed


def _masks(h: Tensor, count: int, prob: float, mode: str, generator: torch.Generator | None) -> list[Any]:
    if mode == "expected":
        return [prob] * count
    # Drawing is what sharing costs, so 60 random bits make four masks; 15 bits meet prob to 1 in 32,768.
    bits = [torch.randint(2**60, h.shape, device=h.device, generator=generator) for _ in range(0, count, 4)]
    shifts, level = [15 * (n % 4) for n in range(count)], round(prob * 2**15)
    return [(bits[n // 4] & (0x7FFF << shift)) < (level << shift) for n, shift in enumerate(shifts)]
