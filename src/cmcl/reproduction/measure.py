"""What a trained ensemble is worth: everything a record tells of it, as JSON values.

Errors are in percent. M members, N examples, C classes.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import metrics
from ..data.dataset import default_ignore_index, not_ignored
from ..ensemble import Ensemble
from ..telling import watched

BINS = 50  # of an entropy histogram, from 0 to log C
RELIABILITY_BINS = 15
COVERAGES = 100  # points of the risk-coverage curve


class Answers(NamedTuple):
    """What an ensemble's members answered: probabilities (M, N, C, ...), on the CPU."""

    test: Tensor  # mode "expected" of feature sharing
    drawn: Tensor  # mode "sampled"; the same tensor where nothing is shared
    ood: Tensor | None = None  # of OOD images


def ask(
    ensemble: Ensemble,
    images: Tensor,
    *,
    ood: Tensor | None = None,
    batch_size: int = 1000,
    seed: int = 0,
    title: str = "",
) -> Answers:
    """Everything that is measured of an ensemble comes from these answers; on a CPU they take their time.

    Args:
        ensemble: whom to ask.
        images: transformed or raw.
        ood: out-of-distribution images.
        batch_size: images at a time.
        seed: of the masks in mode "sampled".
        title: of a bar on the terminal; none without it.
    """
    of = partial(predict, ensemble, batch_size=batch_size)
    test = of(images, title=title)
    drawn = test
    if ensemble.share_after is not None:
        drawn = of(images, mode="sampled", seed=seed, title=title and f"{title}, masks drawn")
    unseen = None if ood is None else of(ood, title=title and f"{title}, OOD")
    return Answers(test, drawn, unseen)


def measure(answers: Answers, targets: Tensor) -> dict[str, Any]:
    """Errors in both sharing modes, and the rest in mode "expected"."""
    probs, drawn, unseen = answers
    ignore = default_ignore_index(targets, probs.shape[2])
    members = metrics.member_errors(probs, targets, ignore_index=ignore)
    classwise = metrics.classwise_accuracy(probs, targets, ignore_index=ignore)  # (M, C)
    return {
        "errors": {"expected": errors(probs, targets), "sampled": errors(drawn, targets)},
        "members": metrics.percent(members),
        "classwise": metrics.percent(classwise),
        "calibration": _calibration(probs, targets, unseen),
        "entropy": _entropies(probs, targets, unseen),
    }


def predict(
    ensemble: Ensemble,
    images: Tensor,
    *,
    mode: str = "expected",
    batch_size: int = 1000,
    seed: int = 0,
    title: str = "",
) -> Tensor:
    """The members' probabilities (M, N, C, ...), on the CPU; with a bar, if it has a `title`."""
    before, ensemble.share_at_test = ensemble.share_at_test, mode
    device = next(ensemble.parameters()).device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            parts = watched(images.cpu().split(batch_size), title)
            return torch.cat([ensemble.predict(part).member_probs for part in parts], 1)
    finally:
        ensemble.share_at_test = before


def errors(probs: Tensor, targets: Tensor) -> dict[str, float]:
    """In percent: of the averaged prediction, of the most confident member, of the best member."""
    ignore = default_ignore_index(targets, probs.shape[2])
    scores = metrics.Accumulator()
    scores.update(probs, targets, ignore_index=ignore)
    found = scores.compute()
    return {name: metrics.percent(found[f"{name}_error"]) for name in ("top1", "picked", "oracle")}


def _calibration(probs: Tensor, targets: Tensor, unseen: Tensor | None) -> dict[str, Any]:
    """Of the averaged answer: ECE in percent, the other numbers as they are."""
    ignore = default_ignore_index(targets, probs.shape[2])
    scores = metrics.Accumulator(bins=RELIABILITY_BINS, curves=True)
    scores.update(probs, targets, ignore_index=ignore)
    if unseen is not None:
        scores.update_ood(unseen)
    found = scores.compute()
    names = [name for name in ("nll", "brier", "aurc", "auroc", "fpr95") if name in found]
    confidence, answer = probs.mean(0).max(1)
    counts = not_ignored(targets, ignore)
    risk = metrics.risk_coverage(confidence[counts].clamp(0, 1), (answer == targets)[counts])[1]
    points = (torch.arange(1, COVERAGES + 1) * len(risk) / COVERAGES).ceil().long() - 1
    count, confidence, accuracy = scores.reliability
    return {
        "ece": metrics.percent(found["ece"]),
        **{name: round(found[name], 6) for name in names},
        "reliability": {
            "count": count.tolist(),
            "confidence": metrics.percent(confidence),
            "accuracy": metrics.percent(accuracy),
        },
        "risk_coverage": metrics.percent(risk[points]),  # the error among the 1 %, 2 %, ... most confident
    }


def _entropies(probs: Tensor, targets: Tensor, unseen: Tensor | None) -> dict[str, Any]:
    """Histograms of figure 2: of each member by what it is a specialist of, and of the averaged answer."""
    top = math.log(probs.shape[2])
    found: dict[str, Any] = {"bins": BINS, "largest": round(top, 6)}
    own = metrics.entropy(probs)  # (M, N)
    if targets.ndim == 1:
        special = metrics.specialised_classes(probs, targets)[:, targets]  # (M, N): does m know the class
        found["specialised"] = [
            _histogram(values[mine], top) for values, mine in zip(own, special, strict=True)
        ]
        found["other"] = [_histogram(values[~mine], top) for values, mine in zip(own, special, strict=True)]
    else:
        found["test"] = [_histogram(values, top) for values in own]
    found["averaged"] = _histogram(metrics.entropy(probs.mean(0), dim=1), top)
    if unseen is not None:
        found["ood"] = [_histogram(values, top) for values in metrics.entropy(unseen)]
        found["averaged_ood"] = _histogram(metrics.entropy(unseen.mean(0), dim=1), top)
    return found


def _histogram(values: Tensor, top: float) -> list[int]:
    counts = torch.histc(values.double().clamp(0, top), BINS, 0, top).long().tolist()
    return list(counts)
