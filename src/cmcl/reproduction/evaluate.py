"""One pass over a test set: every number that a record reports.

Sums and counts over batches, so memory does not grow with the number of examples, except for the scores of
the risk-coverage curve and AUROC. Errors are in percent. M members, N examples, C classes.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import calibration, metrics
from .._messages import progress_bar
from ..data.dataset import default_ignore_index
from ..ensemble import Ensemble
from ..training.preflight import inputs_of
from ..training.scoring import LARGEST, errors
from .gallery import GalleryBuilder

BINS = 50  # of an entropy histogram, from 0 to log C
COVERAGES = 100  # points of the risk-coverage curve
FEWEST = 100  # examples for two temperatures
SPECIALISED = 0.9  # accuracy above which a member specialises in a class


def evaluate_run(
    ensemble: Ensemble,
    images: Tensor,
    targets: Tensor,
    *,
    ood: Tensor | None = None,
    batch_size: int = 1000,
    seed: int = 0,
    title: str = "",
    gallery: GalleryBuilder | None = None,
) -> dict[str, Any]:
    """The fields of a record about predictions: errors in both sharing modes, the rest in mode "expected".

    Args:
        ensemble: to evaluate.
        images: transformed, or raw if the ensemble has a transform.
        targets: their classes.
        ood: out-of-distribution images.
        batch_size: images at a time.
        seed: of the masks in mode "sampled".
        title: of a progress bar on the terminal; none without it.
        gallery: collects images for the report.
    """
    entropies = Entropies()
    averaged: list[Tensor] = []  # predictions, if a temperature must be fitted to them

    def watch(probs: Tensor, start: int | None) -> None:
        entropies.update(probs, None if start is None else targets[start : start + probs.shape[1]])
        if start is not None and ensemble.temperature is None and targets.ndim == 1:
            step = _step(targets, probs.shape[2])
            averaged.append(probs.mean(0)[-start % step :: step])
        if gallery is not None and start is not None:
            gallery.update(probs, start)

    measured = partial(scored, ensemble, images, targets, batch_size=batch_size)
    scores, scaled = measured(mode="expected", ood=ood, curves=True, title=title, watch=watch)
    sampled = errors = recorded_errors(scores)
    if ensemble.share_after is not None:
        again, _ = measured(mode="sampled", seed=seed, title=title and f"{title}, sampled masks")
        sampled = recorded_errors(again)
    after = {}
    if averaged and len(known := torch.cat(averaged)) >= FEWEST:
        found = calibration.cross_fitted_ece(known[None], targets[:: _step(targets, known.shape[1])])
        after = {"cross_fitted_ece": metrics.percent(found)}
    if ensemble.temperature is not None:
        after = {
            "temperature": ensemble.temperature,
            "scaled_ece": metrics.percent(scaled.compute()["ece"]),
            "scaled_reliability": reliability_bins(scaled),
        }
    return {
        "errors": {"expected": errors, "sampled": sampled},
        "members": metrics.percent(scores.member_errors),
        "classwise": metrics.percent(scores.classwise_accuracy),
        "calibration": _calibration(scores) | after,
        "entropy": entropies.compute(scores.classwise_accuracy > SPECIALISED),
    }


def _step(targets: Tensor, classes: int) -> int:
    """The distance between examples of which enough remain to fit temperatures to."""
    return max(1, len(targets) * classes // LARGEST)


def scored(
    ensemble: Ensemble,
    images: Tensor,
    targets: Tensor,
    *,
    ood: Tensor | None = None,
    mode: str | None = None,
    curves: bool = False,
    batch_size: int = 1000,
    seed: int = 0,
    title: str = "",
    watch: Callable[[Tensor, int | None], None] = lambda probs, start: None,
) -> tuple[metrics.Accumulator, metrics.Accumulator]:
    """The metrics of the members' predictions, and of the averaged one after temperature scaling.

    `watch` is called with each batch of predictions and the index of its first image, None for OOD images.
    """
    scores, scaled, start = metrics.Accumulator(curves=curves), metrics.Accumulator(), 0
    how: dict[str, Any] = {"mode": mode, "batch_size": metrics.examples_per_batch(targets, batch_size)}
    for probs in predictions(ensemble, images, **how, seed=seed, title=title):
        part, ignore = targets[start : start + probs.shape[1]], default_ignore_index(targets, probs.shape[2])
        scores.update(probs, part, ignore_index=ignore)
        if ensemble.temperature is not None:
            averaged = calibration.apply_temperature(probs, ensemble.temperature)
            scaled.update(averaged[None], part, ignore_index=ignore)
        watch(probs, start)
        start += probs.shape[1]
    for probs in () if ood is None else predictions(ensemble, ood, **how, title=title and f"{title}, OOD"):
        scores.update_ood(probs)
        watch(probs, None)
    return scores, scaled


def predictions(
    ensemble: Ensemble,
    images: Tensor,
    *,
    mode: str | None = None,
    batch_size: int = 1000,
    seed: int = 0,
    title: str = "",
) -> Iterator[Tensor]:
    """The members' probabilities (M, b, C, ...) batch by batch, on the CPU; `mode` of feature sharing."""
    before, ensemble.share_at_test = ensemble.share_at_test, mode or ensemble.share_at_test
    device = next(ensemble.parameters()).device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            for part in progress_bar(images.cpu().split(batch_size), title):
                yield ensemble.member_probs(inputs_of(ensemble.transform, part.to(device))).cpu()
    finally:
        ensemble.share_at_test = before


def recorded_errors(scores: metrics.Accumulator) -> dict[str, float]:
    """Errors in percent, as in a record, which has each member's beside them."""
    return {key: value for key, value in errors(scores).items() if key != "member"}


def _calibration(scores: metrics.Accumulator) -> dict[str, Any]:
    """Of the averaged prediction: ECE in percent, the other numbers as they are."""
    found = scores.compute()
    names = [name for name in ("nll", "brier", "aurc", "auroc", "fpr95") if name in found]
    risks = scores.risks
    points = (torch.arange(1, COVERAGES + 1) * len(risks) / COVERAGES).ceil().long() - 1
    return {
        "ece": metrics.percent(found["ece"]),
        **{name: round(found[name], 6) for name in names},
        "reliability": reliability_bins(scores),
        "risk_coverage": metrics.percent(risks[points]),  # the error of the 1 %, 2 %, ... most confident
    }


def reliability_bins(scores: metrics.Accumulator) -> dict[str, list[Any]]:
    """The bins of a reliability diagram, in percent."""
    count, confidence, accuracy = scores.reliability
    percent = {"confidence": metrics.percent(confidence), "accuracy": metrics.percent(accuracy)}
    return {"count": count.tolist(), **percent}


class Entropies:
    """Histograms of figure 2: of each member by whether it specialises in the class, and of the average."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # (M, BINS); of the average (BINS,); "classes": (M, C, BINS)
        self._classes = 0

    def update(self, probs: Tensor, targets: Tensor | None) -> None:
        """Add predictions (M, N, C, ...); without targets they are out-of-distribution."""
        self._classes = probs.shape[2]
        own, average = metrics.entropy(probs), metrics.entropy(probs.mean(0), dim=1)[None]  # (M, N), (1, N)
        if targets is None:
            found = {"ood": self._counts(own)[:, 0], "averaged_ood": self._counts(average)[0, 0]}
        else:
            found = {"averaged": self._counts(average)[0, 0]}
            if targets.ndim > 1:
                found["test"] = self._counts(own)[:, 0]
            else:
                found["classes"] = self._counts(own, targets.long(), self._classes)
        for name, counts in found.items():
            self._sums[name] = counts + self._sums.get(name, 0)

    def _counts(self, values: Tensor, group: Tensor | int = 0, groups: int = 1) -> Tensor:
        """(rows, groups, BINS) of values (rows, N) and the group of each example (N,)."""
        bins = (values.double() / math.log(self._classes) * BINS).long().clamp(0, BINS - 1)
        place = (torch.arange(len(values))[:, None] * groups + group) * BINS + bins
        count = place.flatten().bincount(minlength=len(values) * groups * BINS)
        return count.view(len(values), groups, BINS)

    def compute(self, specialised: Tensor) -> dict[str, Any]:
        """The histograms; `specialised` (M, C) says in which classes each member specialises."""
        sums = dict(self._sums)
        if (by_class := sums.pop("classes", None)) is not None:
            own = specialised[:, :, None]
            sums |= {"specialised": (by_class * own).sum(1), "other": (by_class * ~own).sum(1)}
        lists = {name: counts.tolist() for name, counts in sums.items()}
        return {"bins": BINS, "largest": round(math.log(self._classes), 6), **lists}
