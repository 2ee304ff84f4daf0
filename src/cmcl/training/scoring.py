"""The errors of an ensemble on data it was not trained on, and the temperature that calibrates it there."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .. import _checks, calibration, metrics
from ..data.dataset import Dataset, not_ignored
from ..ensemble import Ensemble
from .batches import Batch, Data, tensors
from .mesh import ALONE, Mesh
from .preflight import AUTO, as_data, inputs_of, resolved

LARGEST = 2**22  # probabilities that a temperature is fitted to: more examples would hardly change it


def evaluate(
    ensemble: Ensemble,
    data: Data,
    *,
    batch_size: int = 1000,
    ignore_index: int | str | None = AUTO,
    flip: bool | None = None,
) -> dict[str, float]:
    """Errors in percent: `top1` (averaged), `picked` (most confident member), `oracle`, `member` (mean).

    Memory does not grow with the number of examples. `cmcl.metrics` gives the same as fractions, 0 to 1.
    `data` and `ignore_index` are as for `fit`, `flip` as for `Ensemble.predict`.
    """
    return evaluate_together(ensemble, data, batch_size, ignore_index, ALONE, flip=flip)


def evaluate_together(
    ensemble: Ensemble,
    data: Data,
    batch_size: int,
    ignore_index: int | str | None,
    mesh: Mesh,
    *,
    flip: bool | None = None,
) -> dict[str, float]:
    """`evaluate`, with the batches dealt out to the processes of a mesh, all of which get the result."""
    if ensemble.share_at_test == "sampled":  # masks are drawn from batch to batch
        mesh = ALONE
    own, scores = metrics.Accumulator(), metrics.Accumulator()
    for probs, targets, ignore in _predictions(ensemble, data, batch_size, ignore_index, flip, mesh):
        own.update(probs, targets, ignore_index=ignore)
    for part in mesh.collected(own):
        scores.merge(part)
    return errors(scores)


def held_out_temperature(
    ensemble: Ensemble,
    data: Dataset | Batch,
    *,
    batch_size: int = 1000,
    ignore_index: int | str | None = AUTO,
) -> float:
    """The temperature of the averaged prediction on held-out data, by `calibration.fit_temperature`.

    Memory is bounded: it is fitted to a random part of the examples, or pixels, if there are very many.
    """
    generator, parts = torch.Generator().manual_seed(0), []
    for probs, targets, ignore in _predictions(ensemble, data, batch_size, ignore_index):
        averaged, labels = probs.mean(0).movedim(1, -1).flatten(0, -2), targets.flatten()  # (Q, C), (Q,)
        fraction = LARGEST / (averaged.shape[1] * tensors(data)[1].numel())
        kept = not_ignored(labels, ignore) & (torch.rand(len(labels), generator=generator) < fraction)
        parts.append((averaged[kept], labels[kept]))
    averaged, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return calibration.fit_temperature(averaged[None], labels)


def errors(scores: metrics.Accumulator) -> dict[str, float]:
    """The errors of a test set in percent."""
    found = scores.compute()
    return {name: metrics.percent(found[f"{name}_error"]) for name in ("top1", "picked", "oracle", "member")}


def _predictions(
    ensemble: Ensemble,
    data: Data,
    batch_size: int,
    ignore_index: int | str | None,
    flip: bool | None = None,
    mesh: Mesh = ALONE,
) -> Iterator[tuple[Tensor, Tensor, int | None]]:
    """Each batch of members' probabilities (M, b, C, ...), with its targets and the one not counted.

    Of a mesh, every process gets batches of its own.
    """
    batches = islice(_batches(as_data("data", data, ensemble), batch_size), mesh.rank, None, mesh.size)
    for images, targets in batches:
        probs = ensemble.member_probs(inputs_of(ensemble.transform, images), flip=flip)
        ignore = resolved(ignore_index, targets, probs.shape[2])
        yield probs.cpu(), targets.cpu(), ignore


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
