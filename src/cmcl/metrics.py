"""Metrics of an ensemble, from the members' probabilities and the true classes.

M members, N examples, C classes, P pixels (1 where an example has one label). `member_probs` is (M, N, C)
with `targets` (N,), or dense (M, N, C, H, W) with (N, H, W). Errors are fractions, 0 to 1; `percent` converts
them for tables and records. A dense example's value is the mean over its pixels except those marked
`ignore_index`; examples without a pixel left do not count.

`min_ade`, `min_fde`, `distortion`, `score_ece` and `voronoi_nll` score hypotheses of any kind, such as
trajectories. The functions take whole arrays; `Accumulator` takes batches and gives the same numbers.
"""

import math
import sys
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from . import _checks

LARGEST = 2**21  # probabilities worked on at a time, which bounds the memory beside the input
PIXELS = 2**16  # of dense targets in a batch: their probabilities are members times classes as many
MEANS = ("top1_error", "oracle_error", "picked_error", "nll", "brier", "entropy")  # over examples


class Accumulator:
    """Metrics over batches: keeps sums and counts, so memory does not grow with the number of examples.

        scores = Accumulator()
        for images, targets in loader:
            scores.update(ensemble.predict(images).member_probs, targets)
        scores.compute()["top1_error"]

    Args:
        bins: of the expected calibration error.
        curves: compute AURC, AUROC and FPR95 too, which need the score of every example (or pixel).
    """

    def __init__(self, *, bins: int = 15, curves: bool = False) -> None:
        _checks.positive("bins", bins)
        self.bins, self.curves = int(bins), curves
        self._sums: dict[str, Tensor] = {}
        self._scores: dict[str, list[Tensor]] = {}

    def update(self, member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> None:
        """Add a batch of predictions and its true classes."""
        _check(member_probs, targets, ignore_index)
        probs = member_probs.reshape(*member_probs.shape[:3], -1)
        labels = targets.reshape(len(targets), -1).long()
        counts = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
        if not counts.any():
            return
        for part in counts.any(1).nonzero()[:, 0].split(max(1, LARGEST * len(labels) // probs.numel())):
            kept = counts[part]
            self._update(_precise(probs[:, part]), labels[part].masked_fill(~kept, 0), kept)

    def _update(self, probs: Tensor, targets: Tensor, counts: Tensor) -> None:
        """The formula of every metric: probs (M, N, C, P), targets and counts (N, P), False where ignored."""

        def pixel_mean(values: Tensor) -> Tensor:  # (..., N, P) to (..., N); in float64, so that 9/10 is 0.9
            return (values * counts).sum(-1, dtype=torch.float64) / counts.sum(-1)

        averaged = probs.mean(0)  # (N, C, P)
        confidence, predicted = averaged.max(1)  # (N, P)
        correct = predicted == targets
        member_correct = probs.max(2).indices == targets  # (M, N, P); max is 10x faster than argmax here
        member_errors = pixel_mean(~member_correct)  # (M, N)
        chosen = mean_entropy(probs, 2).argmin(0, keepdim=True)  # (1, N)
        true = averaged.gather(1, targets[:, None])  # (N, 1, P)
        distance = averaged.scatter(1, targets[:, None], true - 1)  # p minus the one-hot true class
        by_example = {
            "top1_error": pixel_mean(~correct),
            "oracle_error": member_errors.amin(0),
            "picked_error": member_errors.gather(0, chosen)[0],
            "member_errors": member_errors,
            "nll": pixel_mean(-true[:, 0].clamp(min=torch.finfo(true.dtype).tiny).log()),
            "brier": pixel_mean(distance.square().sum(1)),
            "entropy": mean_entropy(averaged, 1),
        }
        self._add(**{name: value.sum(-1, dtype=torch.float64) for name, value in by_example.items()})
        # From here on the Q examples or pixels that count.
        labels, hits = targets[counts], member_correct[:, counts].double()  # (Q,), (M, Q)
        confidence = confidence[counts].clamp(0, 1)  # rounding may carry a mean above 1
        self._add(
            examples=counts.new_tensor(len(targets), dtype=torch.long),
            class_correct=hits.new_zeros(len(probs), probs.shape[2]).index_add_(1, labels, hits),
            class_count=labels.bincount(minlength=probs.shape[2]),
            bins=_binned(confidence, correct[counts], self.bins),
        )
        if self.curves:
            self._keep(confidence=confidence, correct=correct[counts], entropy=by_example["entropy"])

    def update_ood(self, member_probs: Tensor) -> None:
        """Add a batch of predictions on out-of-distribution data, for AUROC and FPR95."""
        _check_probs("ood", member_probs, 2)
        values = mean_entropy(_precise(member_probs).mean(0), 1)  # (N,)
        self._add(ood_entropy=values.sum(dtype=torch.float64), ood_examples=torch.tensor(len(values)))
        if self.curves:
            self._keep(ood_entropy=values)

    def merge(self, other: "Accumulator") -> None:
        """Add what another accumulator holds, such as that of another process."""
        self._add(**other._sums)
        for name, values in other._scores.items():
            self._keep(**{name: torch.cat(values)})

    def compute(self) -> dict[str, float]:
        """All metrics that are one number, by name; `member_error` is the mean over members.

        The confidence of ECE and AURC is the averaged prediction's highest probability. `entropy`,
        `ood_entropy`, AUROC and FPR95 are of the averaged prediction.
        """
        sums = self._nonempty_sums()
        values = {name: (sums[name] / sums["examples"]).item() for name in MEANS}
        values["member_error"] = self.member_errors.mean().item()
        count, confidence, correct = sums["bins"]
        values["ece"] = ((confidence - correct).abs().sum() / count.sum()).item()
        if "ood_entropy" in sums:
            values["ood_entropy"] = (sums["ood_entropy"] / sums["ood_examples"]).item()
        if self.curves:
            values["aurc"] = self.risks.mean().item()
        if "ood_entropy" in self._scores:
            entropies = torch.cat(self._scores["entropy"]), torch.cat(self._scores["ood_entropy"])
            values |= {"auroc": auroc(*entropies), "fpr95": fpr95(*entropies)}
        return values

    @property
    def member_errors(self) -> Tensor:
        """Error of each member alone, (M,)."""
        sums = self._nonempty_sums()
        return sums["member_errors"] / sums["examples"]

    @property
    def classwise_accuracy(self) -> Tensor:
        """Each member's accuracy on the examples (or pixels) of each class, (M, C); NaN if there are none."""
        sums = self._nonempty_sums()
        return sums["class_correct"] / sums["class_count"]

    @property
    def reliability(self) -> tuple[Tensor, Tensor, Tensor]:
        """Count, mean confidence and accuracy of `bins` bins of equal width; NaN where a bin is empty."""
        bins = self._nonempty_sums()["bins"]
        count, confidence, correct = torch.cat([bins[:, :-2], bins[:, -2:].sum(1, keepdim=True)], 1)
        return count.long(), confidence / count, correct / count

    @property
    def risks(self) -> Tensor:
        """The error among the 1, 2, ..., N most confident averaged predictions, (N,); needs `curves`."""
        return risk_coverage(torch.cat(self._scores["confidence"]), torch.cat(self._scores["correct"]))[1]

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _keep(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._scores.setdefault(name, []).append(value.cpu())

    def _nonempty_sums(self) -> dict[str, Tensor]:
        if "examples" not in self._sums:
            raise ValueError("targets must hold more than ignore_index. Got nothing else.")
        return self._sums


def top1_error(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Error of the averaged prediction: the mean of the members' probabilities."""
    return _accumulated(member_probs, targets, ignore_index).compute()["top1_error"]


def oracle_error(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Fraction of examples that no member gets right; dense: mean over images of the best member's error."""
    return _accumulated(member_probs, targets, ignore_index).compute()["oracle_error"]


def picked_error(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Error of the most confident member of each example: lowest entropy, then lowest index.

    The choice looks at all pixels: which of them are ignored is not known at test time.
    """
    return _accumulated(member_probs, targets, ignore_index).compute()["picked_error"]


def member_errors(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """Error of each member alone, (M,)."""
    return _accumulated(member_probs, targets, ignore_index).member_errors


def nll(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Mean of -log p(true class) in nats, p averaged over members and at least the smallest normal number."""
    return _accumulated(member_probs, targets, ignore_index).compute()["nll"]


def brier(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Mean of the squared distance from p to the one-hot true class, 0 to 2; p averaged over members."""
    return _accumulated(member_probs, targets, ignore_index).compute()["brier"]


def ece(member_probs: Tensor, targets: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> float:
    """Expected calibration error of the averaged prediction, all examples (or pixels) pooled.

    Bins [a, b) of equal width; confidence 1 has a bin of its own, as in torchmetrics.
    """
    return _accumulated(member_probs, targets, ignore_index, bins=bins).compute()["ece"]


def classwise_accuracy(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """Each member's accuracy on the examples (or pixels) of each class, (M, C); NaN for a class with none."""
    return _accumulated(member_probs, targets, ignore_index).classwise_accuracy


def specialised_classes(
    member_probs: Tensor, targets: Tensor, threshold: float = 0.9, *, ignore_index: int | None = None
) -> Tensor:
    """Which classes each member is a specialist of, (M, C) bool: its accuracy there is above `threshold`."""
    _checks.probability("threshold", threshold)
    return classwise_accuracy(member_probs, targets, ignore_index=ignore_index) > threshold


def summary(
    member_probs: Tensor,
    targets: Tensor,
    *,
    ood: Tensor | None = None,
    bins: int = 15,
    ignore_index: int | None = None,
) -> dict[str, float]:
    """All metrics that are one number, as `Accumulator.compute`; with `ood`, other data's `member_probs`."""
    scores = _accumulated(member_probs, targets, ignore_index, bins=bins, curves=True)
    if ood is not None:
        scores.update_ood(ood)
    return scores.compute()


def entropy(probs: Tensor, *, dim: int = 2, pixelwise: bool = False) -> Tensor:
    """Entropy in nats of probabilities whose classes are axis `dim`: (M, N, C) to (M, N); 0 log 0 = 0.

    Dense (M, N, C, H, W) gives the pixel mean (M, N), or (M, N, H, W) with `pixelwise`. For the averaged
    probabilities (N, C, ...) pass dim=1.
    """
    _check_probs("probs", probs, dim)
    return torch.special.entr(probs).sum(dim) if pixelwise else mean_entropy(probs, dim % probs.ndim)


def mean_entropy(probs: Tensor, dim: int) -> Tensor:
    """The entropy of `entropy`, the pixel mean if dense, without a check, which would wait for a GPU."""
    # vectorized, as torch.special.entr is not; the log of 0 is made a number, so that 0 times it is 0
    values: Tensor = (probs * -probs.clamp(min=torch.finfo(probs.dtype).tiny).log()).sum(dim)
    return values.flatten(dim).mean(dim) if values.ndim > dim else values


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Area under the ROC curve for detecting out-of-distribution data, the positive class.

    A higher score, such as the entropy, means more out-of-distribution. 1 is perfect, 0.5 is chance.
    """
    from sklearn.metrics import roc_auc_score  # slow to import

    return float(roc_auc_score(*_ranked(scores_in, scores_out)))


def fpr95(scores_in: Tensor, scores_out: Tensor) -> float:
    """False positive rate at the strictest threshold that detects at least 95 % of out-of-distribution data.

    A higher score, such as the entropy, means more out-of-distribution, the positive class here.
    """
    from sklearn.metrics import roc_curve  # slow to import

    fpr, tpr, _ = roc_curve(*_ranked(scores_in, scores_out), drop_intermediate=False)
    return float(fpr[tpr >= 0.95][0])


def risk_coverage(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Coverages 1/N, 2/N, ..., 1 and the error among that fraction of most confident predictions, both (N,).

    Among equal confidences the error is spread evenly: the mean over all orders of the tied.
    """
    _check_scores("confidence", confidence)
    if not isinstance(correct, Tensor) or correct.shape != confidence.shape or correct.dtype != torch.bool:
        raise ValueError(
            f"correct must be boolean, shape {tuple(confidence.shape)}. Got {_checks.kind(correct)}."
        )
    _checks.same_device("correct", correct, confidence)
    _, group, sizes = torch.unique(confidence, return_inverse=True, return_counts=True)
    errors = torch.zeros_like(sizes, dtype=torch.float64).index_add_(0, group, (~correct).double())
    most_confident_first = group.sort(descending=True).values
    kept = torch.arange(1, len(confidence) + 1, dtype=torch.float64, device=confidence.device)
    return kept / len(confidence), (errors / sizes)[most_confident_first].cumsum(0) / kept


def aurc(confidence: Tensor, correct: Tensor) -> float:
    """Area under the risk-coverage curve: its mean over the coverages 1/N, ..., 1. Lower is better."""
    return risk_coverage(confidence, correct)[1].mean().item()


# Metrics of several hypotheses: M hypotheses, N examples, T steps of a trajectory, D values.


def min_ade(hypotheses: Tensor, targets: Tensor) -> float:
    """minADE: mean distance to the target over the steps, of the best hypothesis, mean over examples.

    `hypotheses` is (M, N, T, D) and `targets` (N, T, D).
    """
    return float(_distances(hypotheses, targets).mean(2).amin(0).mean())


def min_fde(hypotheses: Tensor, targets: Tensor) -> float:
    """minFDE: the same at the last step only; each example has a best hypothesis of its own there."""
    return float(_distances(hypotheses, targets)[..., -1].amin(0).mean())


def distortion(losses: Tensor) -> float:
    """Mean over examples, and targets, of the smallest loss (M, N) or (M, N, T): the oracle loss."""
    _checks.losses(losses)
    return float(losses.amin(0).double().mean())


def score_ece(scores: Tensor, losses: Tensor, *, bins: int = 15) -> float:
    """Expected calibration error of scores (M, N), logits: are hypotheses with probability p best as often?

    All M probabilities of an example count, not only the largest.
    """
    _checks.floating(scores=scores)
    _checks.losses(losses, scores)
    _checks.positive("bins", bins)
    if losses.ndim != 2:
        raise ValueError(f"losses must be (members, examples). Got {tuple(losses.shape)}.")
    probs = scores.softmax(0)  # (M, N)
    best = losses.argmin(0) == torch.arange(len(losses), device=losses.device)[:, None]  # (M, N)
    count, confidence, correct = _binned(probs.flatten(), best.flatten(), bins)
    return float((confidence - correct).abs().sum() / count.sum())


def voronoi_nll(
    hypotheses: Tensor,
    scores: Tensor,
    targets: Tensor,
    *,
    bandwidth: float,
    samples: int = 1000,
    generator: torch.Generator | None = None,
) -> float:
    """Mean negative log-likelihood of targets (N, D) under a Voronoi mixture (Letzelter et al. 2024).

    Each hypothesis (M, N, D) has a Gaussian of standard deviation `bandwidth`, truncated to the points that
    are nearer to it than to the others, and the probability `scores.softmax(0)`. The mass of a Gaussian
    inside its cell is estimated by `samples` draws.
    """
    _checks.floating(hypotheses=hypotheses, scores=scores, targets=targets)
    _checks.positive("samples", samples)
    if not isinstance(bandwidth, Real) or not 0 < bandwidth <= sys.float_info.max:
        raise ValueError(f"bandwidth must be a finite number above 0. Got {_checks.kind(bandwidth)}.")
    if hypotheses.ndim != 3 or targets.shape != hypotheses.shape[1:] or scores.shape != hypotheses.shape[:2]:
        raise ValueError(
            "hypotheses must be (members, examples, values), scores (members, examples) and targets "
            f"(examples, values). Got {tuple(hypotheses.shape)}, {tuple(scores.shape)} and "
            f"{tuple(targets.shape)}."
        )
    _, n, d = hypotheses.shape
    everyone = torch.arange(n, device=targets.device)
    nearest = (hypotheses - targets).norm(dim=2).argmin(0)  # (N,)
    own = hypotheses[nearest, everyone]  # (N, D)
    inside = torch.zeros(n, device=targets.device)
    for _ in range(samples):
        points = own + bandwidth * torch.randn(n, d, generator=generator, device=targets.device)
        inside += (hypotheses - points).norm(dim=2).argmin(0) == nearest
    mass = (inside + 1) / (samples + 1)  # never 0
    gaussian = (targets - own).square().sum(1) / (2 * bandwidth**2)  # (N,): -log density, less its constant
    constant = d * math.log(bandwidth * math.sqrt(2 * math.pi))
    log_probs = scores.log_softmax(0)[nearest, everyone]  # (N,)
    return float((gaussian + mass.log() - log_probs).double().mean() + constant)


def examples_per_batch(targets: Tensor, largest: int) -> int:
    """A batch size for evaluation: `largest`, or less where targets (N, H, W) are dense."""
    pixels = targets[:1].numel() if targets.ndim > 1 else 0
    return max(1, min(largest, PIXELS // pixels)) if pixels else largest


def percent(fractions: float | Tensor) -> Any:
    """Fractions in percent with 6 decimals, for tables and records: a number, or nested lists of a tensor.

    NaN, which JSON does not have, becomes None.
    """
    if isinstance(fractions, Tensor) and fractions.ndim:
        return [percent(row) for row in fractions]
    return None if math.isnan(value := float(fractions)) else round(100 * value, 6)


def _accumulated(
    member_probs: Tensor, targets: Tensor, ignore_index: int | None, **options: Any
) -> Accumulator:
    scores = Accumulator(**options)
    scores.update(member_probs, targets, ignore_index=ignore_index)
    return scores


def _precise(probs: Tensor) -> Tensor:
    """At least float32, for the means over members."""
    return probs.to(torch.promote_types(probs.dtype, torch.float32))


def _binned(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Count, sum of confidence and number correct by bin, (3, bins + 1): the last is for confidence 1."""
    edges = torch.linspace(0, 1, bins + 1, device=confidence.device)
    bin_ = torch.bucketize(confidence.float(), edges, right=True) - 1
    values = (torch.ones_like(confidence), confidence, correct)
    return torch.stack([bin_.bincount(value.double(), minlength=bins + 1) for value in values])


def _ranked(scores_in: Tensor, scores_out: Tensor) -> tuple[Any, Any]:
    """Labels, 1 for out-of-distribution data, and ranks instead of scores: scikit-learn takes no infinity."""
    _check_scores("scores_in", scores_in)
    _check_scores("scores_out", scores_out)
    _checks.same_device("scores_out", scores_out, scores_in)
    _, ranks = torch.unique(torch.cat([scores_in, scores_out]), return_inverse=True)
    return (torch.arange(len(ranks)) >= len(scores_in)).numpy(), ranks.cpu().numpy()


def _check(member_probs: Tensor, targets: Tensor, ignore_index: int | None) -> None:
    _check_probs("member_probs", member_probs, 2)
    if not member_probs.numel():
        raise ValueError(f"member_probs must hold at least one example. Got {_checks.kind(member_probs)}.")
    expected = (member_probs.shape[1], *member_probs.shape[3:])
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.shape != expected:
        raise ValueError(
            f"targets must be an integer tensor of shape {expected}. Got {_checks.kind(targets)}."
        )
    _checks.same_device("targets", targets, member_probs)
    _checks.label_range(targets.long(), member_probs.shape[2], ignore_index)


def _check_probs(name: str, probs: Tensor, dim: int) -> None:
    _checks.floating(**{name: probs})
    if not -probs.ndim <= dim < probs.ndim:
        hint = f" Add the members' axis: {name}[None]." if probs.ndim == dim == 2 else ""
        raise ValueError(f"{name} must have its classes on axis {dim}. Got {_checks.kind(probs)}.{hint}")
    if torch.compiler.is_compiling() or not probs.numel():
        return
    tolerance = max(5e-3, 8 * torch.finfo(probs.dtype).eps)  # they may come from half precision
    if not (probs.min() >= 0 and (probs.sum(dim) - 1).abs().max() <= tolerance):  # NaN fails as well
        raise ValueError(
            f"{name} must be at least 0 and sum to 1 over axis {dim}. Got values from {probs.min():.3g} to "
            f"{probs.max():.3g}; if these are logits, apply softmax({dim}) first."
        )


def _check_scores(name: str, scores: Tensor) -> None:
    if not isinstance(scores, Tensor) or scores.ndim != 1 or len(scores) == 0 or scores.isnan().any():
        raise ValueError(
            f"{name} must be a tensor (N,) without NaN, N at least 1. Got {_checks.kind(scores)}."
        )


def _distances(hypotheses: Tensor, targets: Tensor) -> Tensor:
    """Euclidean distances (M, N, T)."""
    _checks.floating(hypotheses=hypotheses, targets=targets)
    if hypotheses.ndim != 4 or targets.shape != hypotheses.shape[1:]:
        raise ValueError(
            "hypotheses must be (members, examples, steps, values) and targets (examples, steps, values). "
            f"Got {tuple(hypotheses.shape)} and {tuple(targets.shape)}."
        )
    distances: Tensor = (hypotheses - targets).norm(dim=3)
    return distances
