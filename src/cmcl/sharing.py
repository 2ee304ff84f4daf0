"""Feature sharing between members (section 4.1).

M members, B batch; a member's features h are (B, ...), of one shape for all members.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks

MODES = ("sampled", "expected", "off")


def share_features(
    features: Sequence[Tensor],
    *,
    prob: float = 0.7,
    mode: str = "sampled",
    masks: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """What each member goes on with: h_m + sum over n != m of mask_nm * h_n.

    Masks are Bernoulli(prob), one per example, position, channel and ordered pair (n, m). Nothing is
    rescaled, and gradients flow into the other members' stems.

    Args:
        features: the members' features, M tensors (B, ...) of one shape.
        prob: lambda of the paper, the probability that a value is passed on.
        mode: "sampled" draws the masks; "expected" puts `prob` in their place, deterministic;
            "off" leaves each member alone.
        masks: drawn masks to use instead, (M, M, B, ...) boolean: masks[n, m] is what reaches m of n's
            features. The diagonal is not read.
        generator: source of the masks. It does not pass through torch.compile.

    Returns:
        M mixed features (B, ...). Autograd keeps boolean masks only, M - 1 bytes per feature value.
    """
    checks.choice("mode", mode, MODES)
    checks.probability("prob", prob)
    checks.features(features, masks, shared=mode != "off")
    if mode == "off":
        return list(features)
    mixed = []
    for m, own in enumerate(features):
        for n, h in enumerate(features):
            if n != m:  # one mask at a time, so that memory stays small
                own = own + h * (_mask(h, prob, mode, generator) if masks is None else masks[n, m])
        mixed.append(own)
    return mixed


def _mask(h: Tensor, prob: float, mode: str, generator: torch.Generator | None) -> Tensor | float:
    if mode == "expected":
        return prob
    # float32 whatever the features are: bf16 has too few values below 1 for a rate of 0.7
    return torch.rand(h.shape, device=h.device, dtype=torch.float32, generator=generator) < prob
