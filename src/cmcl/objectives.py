"""The objectives of the paper: IE, MCL and CMCL are one formula (section 3, Algorithm 1).

M members, B batch, C classes, S samples, K overlap. Logits are (M, B, C), or dense (M, B, C, H, W).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _checks

TaskLoss = Callable[[Tensor, Tensor], Tensor]  # one member's logits (B, C, ...), targets -> (B, ...)


class OracleLoss(NamedTuple):
    """A loss, and the values it is made of."""

    total: Tensor  # ()      sum over members, mean over the batch
    assignment: Tensor  # (M, B) v of eq. 3: True where a member is a specialist for an example
    task: Tensor  # (M, B)  task loss, pixel mean if dense; with gradients
    kl: Tensor  # (M, B)    exact KL(U || P), pixel mean if dense; with gradients

    def backward(self) -> None:
        """Call `total.backward()`."""
        self.total.backward()


def confident_oracle_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    beta: float = 0.75,
    overlap: int = 1,
    labels: str | Tensor = "exact",
    samples: int = 1,
    task: TaskLoss | None = None,
    ignore_index: int | None = None,
    generator: torch.Generator | None = None,
) -> OracleLoss:
    """The confident oracle loss, eq. 3 of the paper, with v chosen as in Algorithm 1.

        L = min_v  mean_i sum_m  v_mi * task_mi + beta * (1 - v_mi) * KL(U || P_mi),   sum_m v_mi = K

    Specialists (v = 1) learn the label; the others learn a near-uniform prediction.
    beta = 0 is multiple choice learning (eq. 1), overlap = M the independent ensemble (eq. 2).

    Args:
        logits: (M, B, C) or (M, B, C, H, W), before the softmax.
        targets: classes, (B,) or (B, H, W).
        beta: weight of the KL-to-uniform term.
        overlap: K, the number of specialists per example. Ties go to the lowest member index.
        labels: "exact" for the KL itself (version 0 of Algorithm 1); "sampled" for stochastic labels
            (version 1, section 4.2); or the drawn labels themselves, (S, M, B) or (S, M, B, H, W).
        samples: S, random labels per member and example with labels="sampled".
        task: `task(member_logits, targets)` returns unreduced values, (B,) or (B, H, W). The default
            is cross-entropy; class weights, label smoothing and soft targets come this way.
        ignore_index: pixels (or examples) with this target count 0. The mean stays over the whole batch.
        generator: source of the sampled labels. It does not pass through torch.compile.

    Returns:
        An `OracleLoss`. `task` and `kl` are exact whatever `labels` says: only `total` is sampled.
    """
    own_task = task is not None and ignore_index is None  # only the task knows what its targets mean
    _checks.objective(logits, targets, beta, overlap, samples, own_task=own_task)
    _checks.ignorable(ignore_index, targets)
    _checks.values(logits, targets, ignore_index, own_task=own_task)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()  # a KL over many classes does not survive 8 bits of mantissa
    counted = None if ignore_index is None else targets != ignore_index  # (B, ...)
    if counted is not None:
        targets = targets.where(counted, 0)  # any class: its value is not counted

    log_p = logits.log_softmax(2)  # (M, B, C, ...)
    kl = -log_p.mean(2) - math.log(log_p.shape[2])  # (M, B, ...): KL(U || P)
    if task is None:  # all members at once
        every = targets.expand(len(logits), *targets.shape).flatten(0, 1)  # (M * B, ...)
        values = _cross_entropy(logits.flatten(0, 1), every).unflatten(0, logits.shape[:2])  # (M, B, ...)
    else:
        values = torch.stack([_checks.unreduced(task(z, targets), z[:, 0]) for z in logits])
    drawn = _draw(labels, log_p, samples, generator)  # (S, M, B, ...), or None
    penalty = kl if drawn is None else _sampled_kl(log_p, drawn)  # (M, B, ...)

    values, kl, penalty = (_per_example(value, counted) for value in (values, kl, penalty))  # (M, B)
    # The exact KL, even with sampled labels: the assignment must not be noisy.
    v = specialists((values - _times(beta, kl)).detach(), overlap)
    total = torch.where(v, values, _times(beta, penalty)).sum(0).mean()
    return OracleLoss(total, v, values, kl)


def independent_loss(
    logits: Tensor, targets: Tensor, *, task: TaskLoss | None = None, ignore_index: int | None = None
) -> OracleLoss:
    """The loss of an independent ensemble, eq. 2: mean_i sum_m task_mi. Arguments as above; overlap = M."""
    m = _checks.members(logits)
    return confident_oracle_loss(logits, targets, overlap=m, task=task, ignore_index=ignore_index)


def oracle_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    overlap: int = 1,
    task: TaskLoss | None = None,
    ignore_index: int | None = None,
) -> OracleLoss:
    """The oracle loss of MCL, eq. 1: mean_i min_m task_mi, of the K best. Arguments as above; beta = 0."""
    return confident_oracle_loss(
        logits, targets, beta=0.0, overlap=overlap, task=task, ignore_index=ignore_index
    )


def specialists(scores: Tensor, overlap: int) -> Tensor:
    """The assignment v (M, B) that minimises eq. 3: the K smallest scores task - beta * KL per example."""
    ranks = scores.argsort(dim=0, stable=True).argsort(dim=0)  # stable: ties go to the lowest member index
    return ranks < overlap


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets.long(), reduction="none")


def _times(beta: float, values: Tensor) -> Tensor:
    return beta * values if beta else torch.zeros_like(values)  # 0 * inf, of a masked class, is NaN


def _draw(
    labels: str | Tensor, log_p: Tensor, samples: int, generator: torch.Generator | None
) -> Tensor | None:
    if isinstance(labels, Tensor):
        _checks.labels(labels, log_p)
        return labels
    _checks.choice("labels", labels, ("exact", "sampled"))
    if labels == "exact":
        return None
    members, batch, classes, *pixels = log_p.shape
    shape = (samples, members, batch, *pixels)
    return torch.randint(classes, shape, device=log_p.device, generator=generator)


def _sampled_kl(log_p: Tensor, drawn: Tensor) -> Tensor:
    """-log p(label) - log C, mean over S uniform labels: its expectation is the exact KL (section 4.2)."""
    return -log_p.gather(2, drawn.movedim(0, 2)).mean(2) - math.log(log_p.shape[2])


def _per_example(values: Tensor, counted: Tensor | None) -> Tensor:
    """Mean over the pixels that count: (M, B, ...) -> (M, B). An example with none of them gives 0."""
    if counted is None:
        return values.flatten(2).mean(2) if values.ndim > 2 else values
    counted = counted.reshape(1, len(counted), -1)  # (1, B, pixels)
    values = torch.where(counted, values.reshape(*values.shape[:2], -1), 0.0)
    return values.sum(2) / counted.sum(2).clamp(min=1)
