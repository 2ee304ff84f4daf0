"""The errors of an ensemble on data it was not trained on."""

from collections.abc import Iterator

from torch import Tensor
from torch.utils.data import DataLoader

from .. import _checks, metrics
from ..ensemble import Ensemble
from .batches import Data, tensors
from .preflight import AUTO, as_data, inputs_of, resolved


def evaluate(
    ensemble: Ensemble, data: Data, *, batch_size: int = 1000, ignore_index: int | str | None = AUTO
) -> dict[str, float]:
    """Errors in percent: `top1` (averaged), `picked` (most confident member), `oracle`, `member` (mean).

    Memory does not grow with the number of examples. `cmcl.metrics` gives the same as fractions, 0 to 1.
    `data` and `ignore_index` are as for `fit`.
    """
    scores = metrics.Accumulator()
    for images, targets in _batches(as_data("data", data, ensemble), batch_size):
        logits = next(ensemble.stream(inputs_of(ensemble.transform, images), len(images)))
        _checks.no_numbers(logits)
        ignore = resolved(ignore_index, targets, logits.shape[2], dense=targets.ndim > 1)
        scores.update(logits.float().softmax(2).cpu(), targets.cpu(), ignore_index=ignore)
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
    size = metrics.examples_per_batch(targets, batch_size)
    yield from zip(images.split(size), targets.split(size), strict=True)
