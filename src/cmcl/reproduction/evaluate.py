"""One pass over a test set: every number that a record reports, and the images that the report shows.

Sums and counts over batches, so memory does not grow with the number of examples, except for the scores of
the risk-coverage curve and AUROC. Errors are in percent. M members, N examples, C classes.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from .. import _checks, metrics
from .._files import replacing
from .._messages import progress_bar
from ..data.dataset import Dataset, default_ignore_index, not_ignored
from ..ensemble import Ensemble

BINS = 50  # of an entropy histogram, from 0 to log C
COVERAGES = 100  # points of the risk-coverage curve
SPECIALISED = 0.9  # accuracy above which a member specialises in a class
GALLERY_FORMAT = 1
DISPUTED, SCENES = 12, 6  # images shown of a classifier, and of a segmentation


def evaluate_run(
    ensemble: Ensemble,
    images: Tensor,
    targets: Tensor,
    *,
    ood: Tensor | None = None,
    batch_size: int = 1000,
    seed: int = 0,
    title: str = "",
    gallery: "Gallery | None" = None,
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
    scores, entropies, start = metrics.Accumulator(curves=True), Entropies(), 0
    batch_size = metrics.examples_per_batch(targets, batch_size)
    for probs in predictions(ensemble, images, batch_size=batch_size, title=title):
        part = targets[start : start + probs.shape[1]]
        scores.update(probs, part, ignore_index=default_ignore_index(targets, probs.shape[2]))
        entropies.update(probs, part)
        if gallery is not None:
            gallery.update(probs, start)
        start += probs.shape[1]
    sampled = errors = _errors(scores)
    if ensemble.share_after is not None:
        label = title and f"{title}, sampled masks"
        batches = predictions(ensemble, images, mode="sampled", seed=seed, batch_size=batch_size, title=label)
        sampled = _errors(accumulated(batches, targets))
    if ood is not None:
        for probs in predictions(ensemble, ood, batch_size=batch_size, title=title and f"{title}, OOD"):
            scores.update_ood(probs)
            entropies.update(probs, None)
    return {
        "errors": {"expected": errors, "sampled": sampled},
        "members": metrics.percent(scores.member_errors),
        "classwise": metrics.percent(scores.classwise_accuracy),
        "calibration": _calibration(scores),
        "entropy": entropies.compute(scores.classwise_accuracy > SPECIALISED),
    }


def evaluate_errors(ensemble: Ensemble, data: Dataset, *, batch_size: int = 1000) -> dict[str, float]:
    """Errors in percent, as in a record."""
    size = metrics.examples_per_batch(data.targets, batch_size)
    return _errors(accumulated(predictions(ensemble, data.images, batch_size=size), data.targets))


def predictions(
    ensemble: Ensemble,
    images: Tensor,
    *,
    mode: str = "expected",
    batch_size: int = 1000,
    seed: int = 0,
    title: str = "",
) -> Iterator[Tensor]:
    """The members' probabilities (M, b, C, ...) batch by batch, on the CPU."""
    before, ensemble.share_at_test = ensemble.share_at_test, mode
    device = next(ensemble.parameters()).device
    raw = images.dtype == torch.uint8 and ensemble.transform is not None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            for part in progress_bar(images.cpu().split(batch_size), title):
                inputs = ensemble.transform.transform(part.to(device)) if raw else part
                for logits in ensemble.stream(inputs, batch_size):
                    _checks.no_numbers(logits)
                    yield logits.softmax(2, dtype=torch.promote_types(logits.dtype, torch.float32)).cpu()
    finally:
        ensemble.share_at_test = before


def accumulated(batches: Iterator[Tensor], targets: Tensor) -> metrics.Accumulator:
    """The metrics of predictions for these targets."""
    scores, start = metrics.Accumulator(), 0
    for probs in batches:
        part = targets[start : start + probs.shape[1]]
        scores.update(probs, part, ignore_index=default_ignore_index(targets, probs.shape[2]))
        start += probs.shape[1]
    return scores


def _errors(scores: metrics.Accumulator) -> dict[str, float]:
    found = scores.compute()
    return {name: metrics.percent(found[f"{name}_error"]) for name in ("top1", "picked", "oracle")}


def _calibration(scores: metrics.Accumulator) -> dict[str, Any]:
    """Of the averaged prediction: ECE in percent, the other numbers as they are."""
    found, (count, confidence, accuracy) = scores.compute(), scores.reliability
    names = [name for name in ("nll", "brier", "aurc", "auroc", "fpr95") if name in found]
    risks = scores.risks
    points = (torch.arange(1, COVERAGES + 1) * len(risks) / COVERAGES).ceil().long() - 1
    return {
        "ece": metrics.percent(found["ece"]),
        **{name: round(found[name], 6) for name in names},
        "reliability": {
            "count": count.tolist(),
            "confidence": metrics.percent(confidence),
            "accuracy": metrics.percent(accuracy),
        },
        "risk_coverage": metrics.percent(risks[points]),  # the error of the 1 %, 2 %, ... most confident
    }


class Entropies:
    """Histograms of figure 2: of each member by whether it specialises in the class, and of the average."""

    def __init__(self) -> None:
        self._members: Tensor | None = None  # (M, C, BINS) by class; (M, 1, BINS) for segmentation
        self._averaged = torch.zeros(BINS, dtype=torch.long)
        self._ood: Tensor | None = None  # (M, 1, BINS)
        self._averaged_ood = torch.zeros(BINS, dtype=torch.long)
        self._classes, self._dense = 0, False

    def update(self, probs: Tensor, targets: Tensor | None) -> None:
        """Add predictions (M, N, C, ...); without targets they are out-of-distribution."""
        own, average = metrics.entropy(probs), metrics.entropy(probs.mean(0), dim=1)[None]  # (M, N), (1, N)
        self._classes = probs.shape[2]
        everyone = torch.zeros(probs.shape[1], dtype=torch.long)
        if targets is None:
            self._ood = self._counts(own, everyone, 1) + (0 if self._ood is None else self._ood)
            self._averaged_ood += self._counts(average, everyone, 1)[0, 0]
            return
        self._dense = targets.ndim > 1
        groups = (everyone, 1) if self._dense else (targets.long(), self._classes)
        self._members = self._counts(own, *groups) + (0 if self._members is None else self._members)
        self._averaged += self._counts(average, everyone, 1)[0, 0]

    def _counts(self, values: Tensor, group: Tensor, groups: int) -> Tensor:
        """(rows, groups, BINS) of values (rows, N) and the group of each example (N,)."""
        bins = (values.double() / math.log(self._classes) * BINS).long().clamp(0, BINS - 1)
        place = (torch.arange(len(values))[:, None] * groups + group) * BINS + bins
        count = place.flatten().bincount(minlength=len(values) * groups * BINS)
        return count.view(len(values), groups, BINS)

    def compute(self, specialised: Tensor) -> dict[str, Any]:
        """The histograms; `specialised` (M, C) says in which classes each member specialises."""
        assert self._members is not None
        found: dict[str, Any] = {"bins": BINS, "largest": round(math.log(self._classes), 6)}
        if self._dense:
            found["test"] = self._members[:, 0].tolist()
        else:
            found["specialised"] = (self._members * specialised[:, :, None]).sum(1).tolist()
            found["other"] = (self._members * ~specialised[:, :, None]).sum(1).tolist()
        found["averaged"] = self._averaged.tolist()
        if self._ood is not None:
            found |= {"ood": self._ood[:, 0].tolist(), "averaged_ood": self._averaged_ood.tolist()}
        return found


class Candidate(NamedTuple):
    """An image that the gallery may show."""

    score: float
    image: int  # its index
    classes: Tensor  # predicted by each member: (M,), or (M, H, W)
    confidence: Tensor  # (M,), or (M, H, W)
    entropy: Tensor  # (M,)
    errors: Tensor  # fraction of wrong pixels (M,)
    averaged: tuple[int, float]  # class and confidence of the averaged prediction


class Gallery:
    """Collects the test images that show most about the members: gallery.json and small PNG files.

    Args:
        test: the test set.
        images: the same images as people see them (N, channels, height, width).
    """

    def __init__(self, test: Dataset, images: Tensor) -> None:
        self.test, self.images, self.dense = test, images, test.targets.ndim > 1
        self.classes, self.size = 0, SCENES if self.dense else DISPUTED
        self.best: dict[Any, Candidate] = {}  # by image, or by group of images of a segmentation

    def update(self, probs: Tensor, start: int) -> None:
        """Add predictions (M, n, C, ...) for the images from `start` on."""
        self.classes = probs.shape[2]
        targets = self.test.targets[start : start + probs.shape[1]]
        errors = _pixel_errors(probs, targets) if self.dense else torch.zeros(probs.shape[:2])
        scores = errors.amax(0) - errors.amin(0) if self.dense else disputed(probs)
        seen: set[Any] = set()
        for i in scores.argsort(descending=True, stable=True).tolist():
            group = self._group(start + i)
            if group in seen or len(seen) == self.size:
                continue
            seen.add(group)
            if group not in self.best or self.best[group].score < scores[i]:
                self.best[group] = _candidate(float(scores[i]), start + i, probs[:, i], errors[:, i])
        self.best = {self._group(one.image): one for one in self._chosen()}

    def _group(self, index: int) -> Any:
        return self.test.groups[index] if self.dense and self.test.groups else index

    def _chosen(self) -> list[Candidate]:
        return sorted(self.best.values(), key=lambda one: (-one.score, one.image))[: self.size]

    def write(self, folder: Path) -> None:
        """Write the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        items = [self._scene(folder, c) if self.dense else self._disputed(folder, c) for c in self._chosen()]
        for item in items if self.test.groups else ():
            item["group"] = self.test.groups[item["index"]]  # type: ignore[index]
        task = "segmentation" if self.dense else "classification"
        content = {"format": GALLERY_FORMAT, "task": task, "classes": list(self.test.classes), "items": items}
        with replacing(folder / "gallery.json") as part:
            part.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")

    def _disputed(self, folder: Path, one: Candidate) -> dict[str, Any]:
        columns = zip(one.classes.tolist(), one.confidence, one.entropy, strict=True)
        return {
            "index": one.image,
            "image": _save(folder / f"{one.image}.png", self.images[one.image]),
            "target": int(self.test.targets[one.image]),
            "members": [
                {"prediction": a, "confidence": _round(c), "entropy": _round(h)} for a, c, h in columns
            ],
            "ensemble": {"prediction": one.averaged[0], "confidence": round(one.averaged[1], 4)},
            "chosen": int(one.entropy.argmin()),
        }

    def _scene(self, folder: Path, one: Candidate) -> dict[str, Any]:
        i = one.image
        return {
            "index": i,
            "image": _save(folder / f"{i}.png", self.images[i]),
            "truth": _save(folder / f"{i}-truth.png", _grey(self.test.targets[i], self.classes)),
            "members": [
                {
                    "mask": _save(folder / f"{i}-member{m}.png", _grey(classes, self.classes)),
                    "error": _round(100 * one.errors[m]),
                    "entropy": _round(one.entropy[m]),
                }
                for m, classes in enumerate(one.classes)
            ],
            "chosen": int(one.entropy.argmin()),
        }


def disputed(probs: Tensor) -> Tensor:
    """How confidently the members contradict each other, (N,): products of confidences over such pairs."""
    confidence, predicted = probs.double().max(2)  # (M, N)
    votes = confidence.new_zeros(probs.shape[1], probs.shape[2]).scatter_add_(1, predicted.T, confidence.T)
    return (votes.sum(1).square() - votes.square().sum(1)) / 2


def _candidate(score: float, index: int, probs: Tensor, errors: Tensor) -> Candidate:
    """From the probabilities (M, C, ...) of one image."""
    confidence, classes = probs.max(1)
    average = probs.mean(0)
    averaged = (int(average.argmax()), float(average.max())) if average.ndim == 1 else (0, 0.0)
    entropy = metrics.entropy(probs[:, None])[:, 0]
    return Candidate(score, index, classes, confidence, entropy, errors, averaged)


def _pixel_errors(probs: Tensor, targets: Tensor) -> Tensor:
    """Fraction of wrong pixels, (M, N)."""
    counts = not_ignored(targets, default_ignore_index(targets, probs.shape[2]))
    wrong = (probs.max(2).indices != targets) & counts
    return wrong.flatten(2).sum(2) / counts.flatten(1).sum(1).clamp(min=1)


def _grey(labels: Tensor, classes: int) -> Tensor:
    """Classes as shades from black to white; ignored pixels in between."""
    shades = (labels.double() * 255 / (classes - 1)).clamp(0, 255)
    counts = not_ignored(labels, default_ignore_index(labels, classes))
    return shades.where(counts, 128.0).to(torch.uint8)[None]


def _save(path: Path, image: Tensor) -> str:
    if image.is_floating_point():  # whatever its scale, from its darkest to its brightest value
        low, high = image.aminmax()
        image = ((image - low) * 255 / (high - low).clamp(min=1e-12)).to(torch.uint8)
    pixels = image.permute(1, 2, 0).cpu().numpy()  # (H, W, channels)
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels[..., :3]).save(path, optimize=True)
    return path.name


def _round(value: Tensor) -> float:
    return round(float(value), 4)
