"""The errors of an ensemble on data it has not learned."""

from collections.abc import Iterator

from torch import Tensor
from torch.utils.data import DataLoader

from .. import _checks, metrics
from ..data.dataset import default_ignore_index
from ..ensemble import Ensemble
from .setup import Data, tensors

AUTO = "auto"
PIXELS = 2**16  # of dense targets in a batch: their probabilities are members times classes as many


def resolved(ignore_index: int | str | None, targets: Tensor, classes: int, *, dense: bool) -> int | None:
    """The target that counts for nothing; by itself 255 of pixels, where it can be no class."""
    if ignore_index == AUTO:
        return default_ignore_index(targets, classes) if dense else None
    if isinstance(ignore_index, str):
        raise ValueError(f"ignore_index must be a number, {AUTO!r} or None. Got {ignore_index!r}.")
    _checks.ignorable(ignore_index, targets)
    return ignore_index


def evaluate(
    ensemble: Ensemble, data: Data, *, batch_size: int = 1000, ignore_index: int | str | None = AUTO
) -> dict[str, float]:
    """Errors in percent: `top1` (averaged), `picked` (most confident member), `oracle`, `member` (mean).

    Memory does not grow with the number of examples. `cmcl.metrics` gives the same as fractions, 0 to 1.
    `ignore_index` is as for `fit`.
    """
    scores = metrics.Accumulator()
    for images, targets in _batches(data, batch_size):
        probs = ensemble.predict(images).member_probs.cpu()
        ignore = resolved(ignore_index, targets, probs.shape[2], dense=targets.ndim > 1)
        scores.update(probs, targets.cpu(), ignore_index=ignore)
    return errors(scores)


def errors(scores: metrics.Accumulator) -> dict[str, float]:
    """The errors of a test set in percent."""
    found = scores.compute()
    return {name: metrics.percent(found[f"{name}_error"]) for name in ("top1", "picked", "oracle", "member")}


def _batches(data: Data, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(data, DataLoader):
        batch = None
        for batch in data:
            yield _checks.pair("data", batch)
        if batch is None:
            raise ValueError("data must hold at least one batch. Got an empty DataLoader.")
        return
    images, targets = tensors(data)
    pixels = max(1, targets[:1].numel())
    size = min(batch_size, max(1, PIXELS // pixels)) if targets.ndim > 1 else batch_size
    yield from zip(images.split(size), targets.split(size), strict=True)
