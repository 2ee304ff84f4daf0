"""The objectives: IE, MCL and CMCL are one formula (section 3, Algorithm 1), and so are their successors.

    loss = mean_i sum_m  q_mi * task_mi + beta * (1 - q_mi) * KL_mi

`assign` chooses the weights q: 1 for the K specialists of an example and 0 for the others in the paper.
To add an objective: a term or rule here, its field in `Recipe`, `Recipe.objective` and `LATER` of config.py.

M members, B batch, C classes, S samples, K overlap, T targets. Logits: (M, B, C), or dense (M, B, C, H, W).
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _checks

TaskLoss = Callable[[Tensor, Tensor], Tensor]  # one member's logits (B, C, ...), targets -> (B, ...)
Rule = str | Callable[[Tensor], Tensor]  # "hard", "relaxed", "annealed"; or losses (M, B) -> weights (M, B)
Scalar = float | Tensor  # a tensor () can follow a schedule inside a CUDA graph
RULES = ("hard", "relaxed", "annealed")


class Part(Protocol):
    """The part of an ensemble and of a batch that one of several processes computes, of `training.mesh`.

    Specialists are chosen among all members, and random numbers are drawn for all members and examples.
    """

    shape: tuple[int, int]  # (M, B) of the whole
    members: slice  # of this process
    examples: slice

    def of_all_members(self, scores: Tensor) -> Tensor:
        """The scores of all members, from those of this process's members: both for its examples."""


class OracleLoss(NamedTuple):
    """A loss, and the values it is made of."""

    total: Tensor  # ()      sum over members, mean over the batch
    assignment: Tensor  # (M, B) v of eq. 3: True where a member is a specialist for an example
    task: Tensor  # (M, B)  task loss, pixel mean if dense; with gradients
    kl: Tensor  # (M, B)    exact KL(U || P), or KL(teacher || P); pixel mean if dense; with gradients
    weights: Tensor  # (M, B) q, the weight of the task loss; the assignment itself under the hard rule

    def backward(self) -> None:
        """Call `total.backward()`."""
        self.total.backward()


def confident_oracle_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    beta: float = 0.25,
    overlap: int | Tensor | None = None,
    labels: str | Tensor = "exact",
    samples: int = 1,
    rule: Rule = "hard",
    epsilon: Scalar = 0.05,
    temperature: Scalar = 1.0,
    others: str | Tensor = "uniform",
    teacher_temperature: float = 1.0,
    task: TaskLoss | None = None,
    ignore_index: int | None = None,
    generator: torch.Generator | None = None,
    part: Part | None = None,
) -> OracleLoss:
    """The confident oracle loss, eq. 3 of the paper, with v chosen as in Algorithm 1.

        L = min_v  mean_i sum_m  v_mi * task_mi + beta * (1 - v_mi) * KL(U || P_mi),   sum_m v_mi = K

    Specialists (v = 1) learn the label; the others learn a near-uniform prediction.
    beta = 0 is multiple choice learning (eq. 1), overlap = M the independent ensemble (eq. 2).

    Args:
        logits: (M, B, C) or (M, B, C, H, W), before the softmax.
        targets: classes, (B,) or (B, H, W).
        beta: weight of the KL-to-uniform term. The paper has 0.75.
        overlap: K, the number of specialists per example. If not given, M - 1, or 1 for the annealed rule.
            Ties go to the lowest member index. The paper has K = 1 in Table 1 and K = 4 of 5 in Table 3.
        labels: "exact" for the KL itself (version 0 of Algorithm 1); "sampled" for stochastic labels
            (version 1, section 4.2); or the drawn labels themselves, (S, M, B) or (S, M, B, H, W).
        samples: S, random labels per member and example with labels="sampled".
        rule, epsilon, temperature: how examples are assigned, see `assign`.
        others: what non-specialists learn: "uniform" (CMCL), "none" (MCL), or teacher logits of the shape of
            `logits`, such as those of each member's own earlier weights (MCL-KD): then `kl` is
            KL(teacher || P) at `teacher_temperature`, times its square.
        task: `task(member_logits, targets)` returns unreduced values, (B,) or (B, H, W). The default
            is cross-entropy; class weights, label smoothing and soft targets come this way.
        ignore_index: pixels (or examples) with this target count 0. The mean stays over the whole batch.
        generator: source of the sampled labels. It does not pass through torch.compile.
        part: which members and examples the logits belong to, if several processes train the ensemble.

    Returns:
        An `OracleLoss`. `task` and `kl` are exact whatever `labels` says: only `total` is sampled.
    """
    beta = 0.0 if isinstance(others, str) and others == "none" else beta
    members = _checks.members(logits) if part is None else part.shape[0]
    if overlap is None:
        overlap = 1 if rule == "annealed" else max(1, members - 1)
    own_task = task is not None and ignore_index is None  # only the task knows what its targets mean
    _checks.overlaps(overlap, members)
    _checks.objective(logits, targets, beta, samples, own_task=own_task)
    _checks.ignorable(ignore_index, targets)
    _checks.values(logits, targets, ignore_index, own_task=own_task)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()  # a KL over many classes does not survive 8 bits of mantissa
    counted = None if ignore_index is None else targets != ignore_index  # (B, ...)
    if counted is not None:
        targets = targets.where(counted, 0)  # any class: its value is not counted

    log_p = logits.log_softmax(2)  # (M, B, C, ...)
    if isinstance(others, Tensor):
        kl = _distillation(logits, others, teacher_temperature)  # (M, B, ...): KL(teacher || P)
    else:
        _checks.choice("others", others, ("uniform", "none"))
        kl = -math.log(log_p.shape[2]) - log_p.mean(2)  # (M, B, ...): KL(U || P)
    if task is None:  # cross-entropy
        every = targets.long().expand(len(logits), *targets.shape).flatten(0, 1)  # (M * B, ...)
        values = F.nll_loss(log_p.flatten(0, 1), every, reduction="none")
        values = values.unflatten(0, logits.shape[:2])  # (M, B, ...)
    else:
        values = torch.stack([_checks.unreduced(task(z, targets), z[:, 0]) for z in logits])
    drawn = _draw(labels, log_p, samples, generator, part)  # (S, M, B, ...), or None
    if drawn is not None and isinstance(others, Tensor):
        raise ValueError('labels must be "exact" if others are teacher logits. Got sampled labels.')

    values, kl = _per_example(values, counted), _per_example(kl, counted)  # (M, B)
    weighted = _times(beta, kl)
    # The exact KL, even with sampled labels: the assignment must not be noisy.
    scores = (values - weighted).detach()
    if part is not None:
        scores = part.of_all_members(scores)
    v = specialists(scores, overlap)
    q = v.to(scores.dtype)
    if rule != "hard":
        q = assign(scores, overlap=overlap, rule=rule, epsilon=epsilon, temperature=temperature)
    if part is not None:
        v, q = v[part.members], q[part.members]
    penalty = kl if drawn is None else _per_example(_sampled_kl(log_p, drawn), counted)  # (M, B)
    if rule == "hard":  # q is 0 or 1
        terms = torch.where(v, values, weighted if drawn is None else _times(beta, penalty))
    else:
        terms = _times(q, values) + _times(beta * (1 - q), penalty)
    return OracleLoss(terms.sum() / terms.shape[1], v, values, kl, q)


def loss_and_gradient(
    logits: Tensor, targets: Tensor, *, beta: float, overlap: int | Tensor
) -> tuple[OracleLoss, Tensor]:
    """`confident_oracle_loss` of targets (B,), and its gradient with respect to logits (M, B, C).

        gradient_mi = (v_mi * (P_mi - Y_i) + beta * (1 - v_mi) * (P_mi - U)) / B

    Y_i is 1 for the label and 0 for the other classes. In closed form, without autograd and checks, which for
    a small network on a CPU cost as much as the loss itself.
    """
    (_, batch, classes), dtype = logits.shape, logits.dtype
    z = logits.detach().float() if dtype in (torch.float16, torch.bfloat16) else logits.detach()
    log_p = z.log_softmax(2)
    labels = targets.long().expand(logits.shape[:2])[..., None]  # (M, B, 1)
    task, kl = -log_p.gather(2, labels)[..., 0], -math.log(classes) - log_p.mean(2)  # (M, B)
    weighted = _times(beta, kl)
    v = specialists(task - weighted, overlap)  # Algorithm 1
    total = torch.where(v, task, weighted).sum() / batch
    q = v.to(task.dtype)
    specialist, other = (q / batch)[..., None], ((1 - q) * (beta / batch))[..., None]
    gradient = log_p.exp_().mul_(specialist + other).sub_(other / classes)
    gradient.scatter_add_(2, labels, -specialist)
    return OracleLoss(total, v, task, kl, q), gradient.to(dtype)


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


class WinnerTakesAll(NamedTuple):
    """A winner-takes-all loss, and the values it is made of."""

    total: Tensor  # ()             task + score
    assignment: Tensor  # (M, B, ...) True for the K best hypotheses of an example, or of each target
    task: Tensor  # ()              weighted losses: sum over hypotheses, mean over the rest
    score: Tensor  # ()             cross-entropy between scores and winners; 0 without scores

    def backward(self) -> None:
        """Call `total.backward()`."""
        self.total.backward()


def winner_takes_all(
    losses: Tensor,
    *,
    overlap: int | Tensor = 1,
    rule: Rule = "hard",
    epsilon: Scalar = 0.05,
    temperature: Scalar = 1.0,
    scores: Tensor | None = None,
) -> WinnerTakesAll:
    """The winner-takes-all loss for any output: regression, trajectories, sequences.

    Args:
        losses: (M, B), the unreduced loss of each hypothesis; or (M, B, T) for T targets of an example, each
            of which trains its nearest hypothesis.
        overlap, rule, epsilon, temperature: how examples are assigned, see `assign`.
        scores: (M, B) logits. They learn by cross-entropy which hypothesis wins, so that
            `scores.softmax(0)` are the probabilities of the hypotheses (resilient MCL).
    """
    _checks.losses(losses, scores)
    q = assign(losses, overlap=overlap, rule=rule, epsilon=epsilon, temperature=temperature)
    task = _times(q, losses).sum(0).mean()
    v = specialists(losses.detach(), overlap)
    score = task.new_zeros(())
    if scores is not None:
        wins = v.reshape(*v.shape[:2], -1).double().mean(2)  # (M, B): fraction of the targets won
        score = F.cross_entropy(scores.T, (wins / wins.sum(0)).to(scores.dtype).T)
    return WinnerTakesAll(task + score, v, task, score)


def assign(
    losses: Tensor,
    *,
    overlap: int | Tensor = 1,
    rule: Rule = "hard",
    epsilon: Scalar = 0.05,
    temperature: Scalar = 1.0,
) -> Tensor:
    """Weights q (M, B), detached: how much each member learns each example.

    "hard" (the paper): 1 for the K members with the smallest loss, 0 for the others.
    "relaxed" (Rupprecht et al. 2017): 1 - epsilon for those K; the others share K * epsilon equally.
    "annealed" (Perera et al. 2024): softmin of losses / temperature over the members, K = 1.

    Overlap, epsilon and temperature may be tensors (): an overlap that falls from M to its value is evolving
    winner-takes-all (Makansi et al. 2019), a temperature that falls to 0 is annealed MCL.

    Args:
        losses: (M, B), or (M, B, ...).
        overlap: K. Ties go to the lowest member index.
        rule: one of the names above, or a function from losses (M, B) to weights of the same shape.
        epsilon: of the relaxed rule, 0 to 1. Above 1 - K / M, the others would learn more than the K.
        temperature: of the annealed rule, above 0.
    """
    _checks.floating(losses=losses)
    _checks.overlaps(overlap, len(losses))
    losses = losses.detach()
    if callable(rule):
        weights = rule(losses).detach()
        if weights.shape != losses.shape:
            raise ValueError(
                f"rule must return weights of shape {tuple(losses.shape)}. Got {tuple(weights.shape)}."
            )
        return weights
    _checks.choice("rule", rule, RULES)
    if rule == "annealed":
        if not isinstance(overlap, Tensor) and overlap != 1:
            raise ValueError(f"overlap must be 1 with rule='annealed'. Got {overlap}.")
        if not isinstance(temperature, Tensor) and not temperature > 0:
            raise ValueError(f"temperature must be above 0; use rule='hard' for 0. Got {temperature}.")
        return (-losses / temperature).softmax(0)
    v = specialists(losses, overlap)
    if rule == "hard":
        return v.to(losses.dtype)
    if not isinstance(epsilon, Tensor):
        _checks.probability("epsilon", epsilon)
    # on the device of the losses without a copy, which a CUDA graph cannot hold
    k = overlap.to(losses.dtype) if isinstance(overlap, Tensor) else losses.new_full((), overlap)
    rest = len(losses) - k  # without others, the K = M members keep all of the weight
    best, other = 1 - epsilon * (rest > 0), k * epsilon / rest.clamp(min=1)
    return torch.where(v, best, other).to(losses.dtype)


def specialists(scores: Tensor, overlap: int | Tensor) -> Tensor:
    """The assignment v (M, B) that minimises eq. 3: the K smallest scores task - beta * KL per example."""
    ranks = scores.argsort(dim=0, stable=True).argsort(dim=0)  # stable: ties go to the lowest member index
    return ranks < overlap


def _times(weights: Scalar, values: Tensor) -> Tensor:
    """weights * values, and 0 where a weight is 0: 0 * inf, of a masked class, would be NaN."""
    if isinstance(weights, Tensor):
        return torch.where(weights != 0, weights * values, 0)
    return weights * values if weights else torch.zeros_like(values)


def _distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(teacher || P) at a temperature, times its square (Hinton et al. 2015): (M, B, ...)."""
    if teacher.shape != logits.shape:
        raise ValueError(
            f"others must have the shape of logits, {tuple(logits.shape)}. Got {tuple(teacher.shape)}."
        )
    if not temperature > 0:
        raise ValueError(f"teacher_temperature must be above 0. Got {temperature}.")
    ours, theirs = ((z / temperature).log_softmax(2) for z in (logits, teacher.detach().to(logits.dtype)))
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(2) * temperature**2


def _draw(
    labels: str | Tensor,
    log_p: Tensor,
    samples: int,
    generator: torch.Generator | None,
    part: Part | None,
) -> Tensor | None:
    if isinstance(labels, Tensor):
        _checks.labels(labels, log_p)
        return labels
    _checks.choice("labels", labels, ("exact", "sampled"))
    if labels == "exact":
        return None
    members, batch, classes, *pixels = log_p.shape
    shape = (samples, *(part.shape if part is not None else (members, batch)), *pixels)
    drawn = torch.randint(classes, shape, device=log_p.device, generator=generator)
    return drawn if part is None else drawn[:, part.members, part.examples]


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
