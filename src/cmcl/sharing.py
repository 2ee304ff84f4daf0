"""Feature sharing (section 4.1). M members, B batch; a member's features h are (B, ...), all of one shape."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _checks

if TYPE_CHECKING:
    from .objectives import Part

MODES = ("sampled", "expected", "off")


def share_features(
    features: Sequence[Tensor] | Tensor,
    *,
    prob: float = 0.7,
    mode: str = "sampled",
    masks: Tensor | None = None,
    generator: torch.Generator | None = None,
    part: "Part | None" = None,
) -> list[Tensor]:
    """The shared features of each member: h_m + sum over n != m of mask_nm * h_n.

    Masks are Bernoulli(prob) per value and ordered pair, not rescaled; gradients reach the others' stems.

    Args:
        features: the members' features, M tensors (B, ...) of one shape, or stacked, (M, B, ...).
        prob: lambda of the paper, the probability that a value is shared.
        mode: "sampled" draws masks; "expected" uses `prob` instead of them; "off" shares nothing.
        masks: (M, M, B, ...) boolean, to use instead: masks[n, m] is what m gets of n. n = m is not read.
        generator: source of the masks. It does not pass through torch.compile.
        part: of an ensemble that several processes train. Features are those of all members, for the
            examples of this process; the result is that of its members.

    Returns:
        M shared features (B, ...). Autograd keeps boolean masks only, M - 1 bytes per feature value.
    """
    _checks.choice("mode", mode, MODES)
    _checks.probability("prob", prob)
    _check(features, masks, mode)
    if mode == "off":
        return list(features)
    mine = range(len(features)) if part is None else range(len(features))[part.members]
    shared = []
    for m, own in enumerate(features):
        others = [n for n in range(len(features)) if n != m]
        given = None if masks is None else [masks[n, m] for n in others]
        drawn = given or _masks(own, len(others), prob, mode, generator, part)
        if m in mine:  # the masks of the others are drawn all the same
            for n, mask in zip(others, drawn, strict=True):
                own = own + features[n] * mask
            shared.append(own)
    return shared


def _masks(
    h: Tensor, count: int, prob: float, mode: str, generator: torch.Generator | None, part: "Part | None"
) -> list[Any]:
    if mode == "expected":
        return [prob] * count
    # Drawing is what sharing costs, so 60 random bits make several masks: four if 15 bits suffice for prob.
    for width in (15, 30, 60):
        level = round(prob * 2**width)
        if abs(level / 2**width - prob) <= 1e-3 * min(prob, 1 - prob):
            break
    each = 60 // width
    # Without a generator the argument must be absent: then torch.compile draws inside the kernel that adds.
    source: dict[str, Any] = {} if generator is None else {"generator": generator}
    shape = h.shape if part is None else (part.shape[1], *h.shape[1:])
    bits = [torch.randint(2**60, shape, device=h.device, **source) for _ in range(0, count, each)]
    if part is not None:
        bits = [drawn[part.examples] for drawn in bits]
    shifts = [width * (n % each) for n in range(count)]
    return [(bits[n // each] & ((2**width - 1) << s)) < (level << s) for n, s in enumerate(shifts)]


def _check(features: Sequence[Tensor] | Tensor, masks: Tensor | None, mode: str) -> None:
    """Features must agree in shape; masks, only if features are shared, are (M, M, B, ...) boolean."""
    if masks is not None and mode == "off":
        raise ValueError("masks must be left out where no features are shared. Got some.")
    if not len(features):
        raise ValueError("features must hold one tensor a member. Got none.")
    for m, h in enumerate(features):
        if not isinstance(h, Tensor):
            raise TypeError(
                f"features must be tensors. Got {_checks.kind(h)} from member {m}; share after a module that "
                "returns one tensor."
            )
        if h.shape != features[0].shape:
            raise ValueError(
                "shared features must have one shape for all members. "
                f"Got {tuple(features[0].shape)} from member 0 and {tuple(h.shape)} from member {m}; "
                "share after another module, or use members that agree there."
            )
        _checks.same_device(f"features[{m}]", h, features[0])
    if masks is not None:
        expected = (len(features), len(features), *features[0].shape)
        if not isinstance(masks, Tensor) or masks.dtype != torch.bool or masks.shape != expected:
            raise ValueError(
                f"masks must be a boolean tensor of shape {expected}. Got {_checks.kind(masks)}."
            )
        _checks.same_device("masks", masks, features[0])
