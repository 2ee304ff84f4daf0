"""How good an ensemble is: functions of the members' probabilities and the true classes.

M members, N examples, C classes, P pixels (1 where an example has one answer). `member_probs` is (M, N, C)
with `targets` (N,), or dense (M, N, C, H, W) with (N, H, W). Errors are fractions, 0 to 1, where
`cmcl.evaluate`, `result.scores` and records have percent. An image's value is the mean over its pixels
except those marked `ignore_index`; images with no pixel left do not count.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _checks


class _Case(NamedTuple):
    probs: Tensor  # (M, N, C, P)
    targets: Tensor  # (N, P), 0 where ignored
    counts: Tensor  # (N, P) bool, False where ignored


def top1_error(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Share of wrong answers when the members' probabilities are averaged."""
    case = _check(member_probs, targets, ignore_index)
    return _image_mean(_answers(case.probs.mean(0), 1) != case.targets, case).mean().item()


def oracle_error(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Share of examples that no member gets right; dense: mean of the best member's pixel error per image."""
    return _errors(_check(member_probs, targets, ignore_index)).amin(0).mean().item()


def picked_error(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Share of wrong answers when the most confident member answers alone: lowest entropy, then lowest index.

    The choice looks at all pixels: which of them are ignored is not known at test time.
    """
    case = _check(member_probs, targets, ignore_index)
    chosen = entropy(case.probs).argmin(0, keepdim=True)  # (1, N)
    return _errors(case).gather(0, chosen).mean().item()


def member_errors(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """Share of wrong answers of each member alone, (M,)."""
    return _errors(_check(member_probs, targets, ignore_index)).mean(1)


def classwise_accuracy(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """Each member's accuracy on the examples (or pixels) of each class, (M, C); NaN for a class with none."""
    probs, labels, counts = _check(member_probs, targets, ignore_index)
    right = (_answers(probs, 2) == labels)[:, counts].double()  # (M, all that count)
    hits = right.new_zeros(len(probs), probs.shape[2]).index_add_(1, labels[counts], right)
    return hits / labels[counts].bincount(minlength=probs.shape[2])


def specialised_classes(
    member_probs: Tensor, targets: Tensor, threshold: float = 0.9, *, ignore_index: int | None = None
) -> Tensor:
    """Which classes each member is a specialist of, (M, C) bool: its accuracy there is above `threshold`."""
    _checks.probability("threshold", threshold)
    return classwise_accuracy(member_probs, targets, ignore_index=ignore_index) > threshold


def entropy(probs: Tensor, *, dim: int = 2, pixelwise: bool = False) -> Tensor:
    """Entropy in nats of probabilities whose classes are axis `dim`: (M, N, C) to (M, N); 0 log 0 = 0.

    Dense (M, N, C, H, W) gives the pixel mean (M, N), or (M, N, H, W) with `pixelwise`. For the averaged
    probabilities (N, C, ...) pass dim=1.
    """
    _check_probs("probs", probs, dim)
    dim %= probs.ndim
    values: Tensor = torch.special.entr(probs).sum(dim)
    return values if pixelwise or values.ndim == dim else values.flatten(dim).mean(dim)


def nll(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Mean of -log p(true class) in nats, p averaged over members and at least the smallest normal number."""
    case = _check(member_probs, targets, ignore_index)
    p = case.probs.mean(0).gather(1, case.targets[:, None])[:, 0]  # (N, P)
    return _image_mean(-p.clamp(min=torch.finfo(p.dtype).tiny).log(), case).mean().item()


def brier(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """Mean of the squared distance from p to the one-hot true class, 0 to 2; p averaged over members."""
    case = _check(member_probs, targets, ignore_index)
    p = case.probs.mean(0)  # (N, C, P)
    truth = F.one_hot(case.targets, p.shape[1]).movedim(-1, 1)
    return _image_mean((p - truth).square().sum(1), case).mean().item()


def ece(member_probs: Tensor, targets: Tensor, *, bins: int = 15, ignore_index: int | None = None) -> float:
    """Expected calibration error of the averaged probabilities, all examples (or pixels) pooled.

    Bins [a, b) of equal width, by torchmetrics, which gives confidence 1 a bin of its own.
    """
    from torchmetrics.functional.classification import multiclass_calibration_error  # slow to import

    _checks.positive("bins", bins)
    probs, labels = _pooled(_check(member_probs, targets, ignore_index))
    # Rounding may carry a mean above 1, and torchmetrics would then take the probabilities for logits.
    return multiclass_calibration_error(probs.clamp(0, 1), labels, probs.shape[1], bins).item()


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Area under the ROC curve for telling data from outside (positive) from data of the known kind.

    A higher score, such as the entropy, means more out-of-distribution. 1 is perfect, 0.5 is chance.
    """
    from torchmetrics.functional.classification import binary_auroc  # slow to import

    return binary_auroc(*_ranked(scores_in, scores_out)).item()


def fpr95(scores_in: Tensor, scores_out: Tensor) -> float:
    """Share of known data flagged at the strictest threshold that flags at least 95 % of data from outside.

    A higher score, such as the entropy, means more out-of-distribution, the positive class here.
    """
    from torchmetrics.functional.classification import binary_roc  # slow to import

    false_positives, true_positives, _ = binary_roc(*_ranked(scores_in, scores_out))
    return false_positives[true_positives >= 0.95][0].item()


def risk_coverage(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Coverage 1/N, 2/N, ..., 1 and the error among the so many most confident answers, both (N,).

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


def summary(
    member_probs: Tensor,
    targets: Tensor,
    *,
    outside: Tensor | None = None,
    bins: int = 15,
    ignore_index: int | None = None,
) -> dict[str, float]:
    """All metrics that are one number, by name; `member_error` is the members' mean.

    AURC takes the averaged prediction's highest probability for its confidence. With `outside`, the
    `member_probs` of other data, AUROC and FPR95 of the averaged prediction's entropy come too.
    """
    by_image = (top1_error, oracle_error, picked_error, nll, brier)
    values = {
        metric.__name__: metric(member_probs, targets, ignore_index=ignore_index) for metric in by_image
    }
    values["member_error"] = member_errors(member_probs, targets, ignore_index=ignore_index).mean().item()
    values["ece"] = ece(member_probs, targets, bins=bins, ignore_index=ignore_index)
    probs, labels = _pooled(_check(member_probs, targets, ignore_index))
    confidence, answer = probs.max(1)
    values["aurc"] = aurc(confidence, answer == labels)
    if outside is not None:
        _check_probs("outside", outside, 2)
        scores = entropy(member_probs.mean(0), dim=1), entropy(outside.mean(0), dim=1)
        values |= {"auroc": auroc(*scores), "fpr95": fpr95(*scores)}
    return values


def _answers(probs: Tensor, dim: int) -> Tensor:
    """The likeliest class, the lowest of equals."""
    return probs.max(dim).indices  # ten times as fast as argmax along a middle axis


def _errors(case: _Case) -> Tensor:
    """Share of wrong pixels per member and example, (M, N)."""
    return _image_mean(_answers(case.probs, 2) != case.targets, case)


def _image_mean(values: Tensor, case: _Case) -> Tensor:
    """Mean of (..., N, P) over the pixels that count, (..., N); in float64, so that 9/10 is 0.9."""
    return (values * case.counts).sum(-1, dtype=torch.float64) / case.counts.sum(-1)


def _pooled(case: _Case) -> tuple[Tensor, Tensor]:
    """Averaged probabilities (Q, C) and targets (Q,) of all Q examples or pixels that count."""
    return case.probs.mean(0).movedim(1, -1)[case.counts], case.targets[case.counts]


def _check(member_probs: Tensor, targets: Tensor, ignore_index: int | None) -> _Case:
    _check_probs("member_probs", member_probs, 2)
    if not member_probs.numel():
        raise ValueError(f"member_probs must hold at least one example. Got {_checks.kind(member_probs)}.")
    expected = (member_probs.shape[1], *member_probs.shape[3:])
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.shape != expected:
        raise ValueError(
            f"targets must be an integer tensor of shape {expected}. Got {_checks.kind(targets)}."
        )
    _checks.same_device("targets", targets, member_probs)
    if member_probs.dtype in (torch.float16, torch.bfloat16):
        member_probs = member_probs.float()  # means over members are to be better than that
    probs = member_probs.reshape(*member_probs.shape[:3], -1)
    labels = targets.reshape(len(targets), -1).long()
    counts = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    images = counts.any(1)
    if not images.any():
        raise ValueError(f"targets must hold more than ignore_index. Got nothing but {ignore_index}.")
    low, high = labels[counts].aminmax()
    if low < 0 or high >= probs.shape[2]:
        raise ValueError(f"targets must be between 0 and {probs.shape[2] - 1}. Got {low} to {high}.")
    return _Case(probs[:, images], labels.masked_fill(~counts, 0)[images], counts[images])


def _check_probs(name: str, probs: Tensor, dim: int) -> None:
    if not isinstance(probs, Tensor) or not probs.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor. Got {_checks.kind(probs)}.")
    if not -probs.ndim <= dim < probs.ndim:
        cure = f" Add the members' axis: {name}[None]." if probs.ndim == dim == 2 else ""
        raise ValueError(f"{name} must have its classes on axis {dim}. Got {_checks.kind(probs)}.{cure}")
    tolerance = max(5e-3, 8 * torch.finfo(probs.dtype).eps)  # they may come from half precision
    if torch.compiler.is_compiling() or not probs.numel():  # values not to be looked at, or none
        return
    if not (probs.min() >= 0 and (probs.sum(dim) - 1).abs().max() <= tolerance):  # NaN fails as well
        raise ValueError(
            f"{name} must be at least 0 and sum to 1 over axis {dim}. Got values from {probs.min():.3g} to "
            f"{probs.max():.3g}; if this looks like logits, apply softmax({dim}) first."
        )


def _check_scores(name: str, scores: Tensor) -> None:
    if not isinstance(scores, Tensor) or scores.ndim != 1 or len(scores) == 0 or scores.isnan().any():
        raise ValueError(
            f"{name} must be a tensor (N,) without NaN, N at least 1. Got {_checks.kind(scores)}."
        )


def _ranked(scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks within 0 to 1, equal where scores are, and labels: 1 for data from outside."""
    _check_scores("scores_in", scores_in)
    _check_scores("scores_out", scores_out)
    _checks.same_device("scores_out", scores_out, scores_in)
    # torchmetrics squeezes scores above 1 through a sigmoid, which would merge the large ones.
    _, ranks = torch.unique(torch.cat([scores_in, scores_out]), return_inverse=True)
    is_out = torch.arange(len(ranks), device=ranks.device) >= len(scores_in)
    return ranks.double() / len(ranks), is_out.long()
