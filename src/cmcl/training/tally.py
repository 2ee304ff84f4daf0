"""What a step leaves behind for the telemetry: sums on the device, read once an epoch.

M members, B batch, C classes.
"""

from typing import Any

import torch
from torch import Tensor

from ..objectives import OracleLoss

BATCH = (
    "examples",
    "loss",
    "task",
    "kl",
    "winners_entropy",
    "losers_entropy",
)  # sums over examples, added to by every batch or piece of one
STEP = ("steps", "gradient_norm")  # once a step


class Tally:
    """Sums over the steps of an epoch for one ensemble."""

    def __init__(self, members: int, classes: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(BATCH) + len(STEP), dtype=torch.float64, device=device)
        self.wins = torch.zeros(members, classes, dtype=torch.float64, device=device)  # dense: one column
        self.seen = torch.zeros(classes, dtype=torch.float64, device=device)
        self.bad = torch.full((members,), torch.inf, dtype=torch.float64, device=device)

    def state(self) -> list[Tensor]:
        """The tensors that a step changes."""
        return [self.sums, self.wins, self.seen, self.bad]

    def reset(self) -> None:
        """A new epoch."""
        for tensor in (self.sums, self.wins, self.seen):
            tensor.zero_()
        self.bad.fill_(torch.inf)

    def read(self) -> dict[str, Any]:
        """The epoch so far as plain numbers: one copy from the device."""
        parts = [self.sums, self.wins.flatten(), self.seen]
        flat = torch.cat(parts).cpu()
        sums, wins, seen = flat.split([len(part) for part in parts])
        named = dict(zip((*BATCH, *STEP), sums.tolist(), strict=True))
        examples, steps = max(named.pop("examples"), 1.0), max(named.pop("steps"), 1.0)
        row: dict[str, Any] = {name: named[name] / (steps if name in STEP else examples) for name in named}
        wins = wins.reshape(self.wins.shape)  # (M, C)
        won, lost = wins.sum(), len(wins) * seen.sum() - wins.sum()
        row["winners_entropy"] = named["winners_entropy"] / max(won.item(), 1.0)
        row["losers_entropy"] = named["losers_entropy"] / max(lost.item(), 1.0)
        row["win_rates"] = (wins.sum(1) / seen.sum().clamp(min=1)).tolist()
        if len(seen) > 1:
            row["win_rates_by_class"] = (wins / seen.clamp(min=1)).tolist()
        return row

    def broken(self) -> Tensor:
        """1 once a member's loss has not been finite, else 0; on the device."""
        return self.bad.isfinite().any().float()

    def count_more(self, loss: Tensor, batch: int) -> None:
        """Add to the loss of a batch that is counted already."""
        self.sums[BATCH.index("loss")] += loss.detach() * batch

    def count_step(self, gradient_norm: Tensor) -> None:
        """Add what is known once a step. A gradient is all members' fault if no member's loss is."""
        known = gradient_norm.isfinite() | self.bad.isfinite().any()
        self.bad.copy_(torch.where(known, self.bad, self.sums[len(BATCH)]))
        self.sums[len(BATCH) :] += torch.stack([gradient_norm.new_ones(()), gradient_norm])


@torch.no_grad()
def count(
    tally: Tally,
    loss: OracleLoss,
    logits: Tensor,
    targets: Tensor,
    *,
    beta: float,
    ignore_index: int | None = None,
) -> None:
    """Add one batch. `targets` are classes (B,), or anything else for dense outputs.

    Examples that count for nothing, wholly ignored ones, are nobody's to win.
    """
    v = loss.assignment  # (M, B)
    lost = ~v
    if ignore_index is not None:
        counted = (targets != ignore_index).reshape(len(targets), -1).any(1)  # (B,)
        v, lost = v & counted, lost & counted
    log_p = logits.float().log_softmax(2).clamp(min=-1e4)  # a class masked out by -inf has 0 * -inf else
    entropy = -(log_p.exp() * log_p).sum(2).reshape(*v.shape, -1).mean(2)  # (M, B)
    batch = v.shape[1]
    values = [
        loss.total.new_ones(()),
        loss.total,
        loss.task.where(v, 0).sum() / batch,
        loss.kl.where(lost, 0).sum() / batch,
        entropy.where(v, 0).sum() / batch,
        entropy.where(lost, 0).sum() / batch,
    ]
    tally.sums[: len(BATCH)] += torch.stack(values) * batch
    if len(tally.seen) == 1:  # not by class
        tally.wins.add_(v.double().sum(1, keepdim=True))
        tally.seen.add_(batch if ignore_index is None else counted.sum())
    else:
        tally.wins.index_add_(1, targets.long(), v.double())
        tally.seen.index_add_(0, targets.long(), torch.ones(batch, dtype=torch.float64, device=v.device))
    used = torch.where(loss.assignment, loss.task, loss.kl if beta else torch.zeros_like(loss.kl))  # (M, B)
    finite = used.isfinite().all(1)  # (M,)
    tally.bad.copy_(torch.minimum(tally.bad, torch.where(finite, torch.inf, tally.sums[len(BATCH)])))
