"""The errors of an ensemble on data it has not learned."""

import torch
from torch.utils.data import DataLoader

from .. import metrics
from ..data.dataset import IGNORE
from ..ensemble import Ensemble
from .setup import Data, tensors


def evaluate(ensemble: Ensemble, data: Data, *, batch_size: int = 1000) -> dict[str, float]:
    """Errors in percent: `top1` (the most confident member's where outputs are dense), `oracle`, `member`."""
    if isinstance(data, DataLoader):
        parts = [(ensemble.predict(x).member_probs.cpu(), y) for x, y in data]
        probs, targets = torch.cat([p for p, _ in parts], 1), torch.cat([y for _, y in parts])
    else:
        images, targets = tensors(data)
        probs, targets = ensemble.predict(images, batch_size=batch_size).member_probs.cpu(), targets.cpu()
    dense = targets.ndim > 1
    ignore = IGNORE if dense else None
    top1 = metrics.picked_error if dense else metrics.top1_error
    return {
        "top1": 100 * top1(probs, targets, ignore_index=ignore),
        "oracle": 100 * metrics.oracle_error(probs, targets, ignore_index=ignore),
        "member": 100 * metrics.member_errors(probs, targets, ignore_index=ignore).mean().item(),
    }
