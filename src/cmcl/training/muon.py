"""Muon (Jordan 2024) in a form that a CUDA graph can hold: for matrices, with AdamW for the rest.

`torch.optim.Muon` reads the learning rate as a Python number in every step, and does not skip a step whose
loss is NaN. The update is the same (tests/test_muon.py). Matrices of one shape, as members have, are one
batched product.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, by Jordan
ITERATIONS = 5
RMS = 0.2  # of an update, about AdamW's: one learning rate serves both (Liu et al. 2025)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, for `matrices`; AdamW without weight decay for `rest`.

    Args:
        matrices: weights of two and more dimensions; a convolution is a matrix (filters, everything else).
        rest: all other parameters.
        lr: of both; a tensor where a graph reads it.
        momentum: of the matrices, with Nesterov's look-ahead.
        weight_decay: of the matrices.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        rest: Sequence[nn.Parameter],
        lr: Any,
        *,
        momentum: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([{"params": list(matrices)}], defaults)
        on_cuda = any(p.is_cuda for p in rest)
        how: dict[str, Any] = {"fused": True, "capturable": on_cuda, "weight_decay": 0.0}
        self.rest = torch.optim.AdamW([{"params": list(rest)}], lr, **how)
        self.rest.state = self.state  # one state, as others save and restore it
        self.param_groups += self.rest.param_groups
        self.found_inf: Tensor | None = None  # above 0: the step is skipped, as by fused optimizers of torch
        for p in matrices:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        for p in rest:
            zero = torch.zeros((), dtype=torch.float32, device=p.device)
            self.state[p] |= {"step": zero, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        self.rest.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.rest.step()
        group, shapes = self.param_groups[0], defaultdict[torch.Size, list[nn.Parameter]](list)
        for p in group["params"]:
            if p.grad is not None:
                shapes[p.shape].append(p)
        for same in shapes.values():
            self._update(same, group)

    def _update(self, same: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        buffers = [self.state[p]["momentum_buffer"] for p in same]
        grads, before, weights = map(_stacked, ([p.grad for p in same], buffers, same))
        after = before.lerp(grads, 1 - group["momentum"])  # (n, rows, columns)
        update = orthogonal(grads.lerp(after, group["momentum"])).to(weights.dtype)
        size = RMS * max(weights.shape[1:]) ** 0.5
        moved = weights * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * size * update
        if self.found_inf is not None:
            skipped = self.found_inf > 0
            moved, after = torch.where(skipped, weights, moved), torch.where(skipped, before, after)
        for p, buffer, weight, mean in zip(same, buffers, moved, after, strict=True):
            p.copy_(weight.view_as(p))
            buffer.copy_(mean.view_as(p))


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly orthogonal matrices (n, rows, columns) near the given ones: singular values become about 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _stacked(tensors: Sequence[Any]) -> Tensor:
    return torch.stack([tensor.flatten(1) for tensor in tensors])
