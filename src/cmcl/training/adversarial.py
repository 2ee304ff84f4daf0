"""Fast gradient sign: the inputs that hurt each member most, a small step away (the baseline of figure 2c).

M members, B batch. After Lakshminarayanan et al. (2017): epsilon is a share of each input value's range.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ensemble import Ensemble
from ..objectives import TaskLoss, independent_loss


def adversarial_logits(
    ensemble: Ensemble,
    x: Tensor,
    targets: Tensor,
    epsilon: Tensor,
    *,
    task: TaskLoss | None = None,
    ignore_index: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits (M, B, C, ...) of the inputs (B, ...), and of each member's own adversarial inputs.

    Members are taken one by one, without feature sharing; epsilon has the shape of one input, or is a number.
    `task` and `ignore_index` are those of `independent_loss`, which the adversarial inputs raise.
    """
    clean = [x.detach().requires_grad_() for _ in ensemble.members]
    logits = _each(ensemble, clean)
    # A member's loss depends on its own copy of x alone, so one backward pass serves all members.
    total = independent_loss(logits, targets, task=task, ignore_index=ignore_index).total
    gradients = torch.autograd.grad(total, clean, retain_graph=True)
    attacked = [(x + epsilon * gradient.sign()).detach() for gradient in gradients]
    return logits, _each(ensemble, attacked)


def _each(ensemble: Ensemble, inputs: list[Tensor]) -> Tensor:
    calls = [partial(_call, member, own) for member, own in zip(ensemble.members, inputs, strict=True)]
    return ensemble.logits(ensemble.run(calls))


def _call(member: nn.Module, x: Tensor) -> Any:
    return member(x)
