"""The errors of an ensemble on data it has not learned."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .. import _checks, metrics
from ..data.dataset import ignored
from ..ensemble import Ensemble
from .setup import Data, tensors

AUTO = "auto"


def resolved(ignore_index: int | str | None, targets: Tensor, classes: int, *, dense: bool) -> int | None:
    """The target that counts for nothing; by itself 255 of pixels, where it can be no class."""
    if ignore_index == AUTO:
        return ignored(targets, classes) if dense else None
    if isinstance(ignore_index, str):
        raise ValueError(f"ignore_index must be a number, {AUTO!r} or None. Got {ignore_index!r}.")
    _checks.ignorable(ignore_index, targets)
    return ignore_index


def evaluate(
    ensemble: Ensemble, data: Data, *, batch_size: int = 1000, ignore_index: int | str | None = AUTO
) -> dict[str, float]:
    """Errors in percent: `top1` (the most confident member's where outputs are dense), `oracle`, `member`.

    `cmcl.metrics` gives the same as fractions, 0 to 1. `ignore_index` is as for `fit`.
    """
    if isinstance(data, DataLoader):
        pairs = (_checks.pair("data", batch) for batch in data)
        parts = [(ensemble.predict(x).member_probs.cpu(), y.cpu()) for x, y in pairs]
        if not parts:
            raise ValueError("data must hold at least one batch. Got an empty DataLoader.")
        probs, targets = torch.cat([p for p, _ in parts], 1), torch.cat([y for _, y in parts])
    else:
        images, targets = tensors(data)
        probs, targets = ensemble.predict(images, batch_size=batch_size).member_probs.cpu(), targets.cpu()
    return errors(probs, targets, resolved(ignore_index, targets, probs.shape[2], dense=targets.ndim > 1))


def errors(probs: Tensor, targets: Tensor, ignore: int | None) -> dict[str, float]:
    """Of the members' probabilities (M, N, C, ...), in percent."""
    dense = targets.ndim > 1
    top1 = metrics.picked_error if dense else metrics.top1_error
    return {
        "top1": 100 * top1(probs, targets, ignore_index=ignore),
        "oracle": 100 * metrics.oracle_error(probs, targets, ignore_index=ignore),
        "member": 100 * metrics.member_errors(probs, targets, ignore_index=ignore).mean().item(),
    }
