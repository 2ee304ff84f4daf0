"""Telemetry: sums and counts on the device, rows once an epoch, and a warning about dead members.

A row is a dict of JSON values; "epoch" is the number of epochs done. M members, B batch, C classes, N steps.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._files import needing_room, parse_json, replacing
from .._messages import warn
from ..metrics import mean_entropy
from ..objectives import OracleLoss
from .mesh import MeshPart

# sums over examples
BATCH = ("examples", "loss", "task", "kl", "specialist_entropy", "nonspecialist_entropy")
# logits, and steps, that are counted together at most: larger tensors would be new memory each time
KEPT, KEPT_STEPS = 2**16, 256
PATIENCE = 3  # epochs under a tenth of the fair share that make a member dead


class Monitor:
    """Sums over the steps of an epoch, on the device; `row` reads them once."""

    def __init__(self, members: int, classes: int, overlap: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(BATCH), dtype=torch.float64, device=device)
        # examples by specialist and class and, last, by class; one class if they are not counted by class
        self.examples = torch.zeros(members + 1, classes, dtype=torch.float64, device=device)
        # sums over steps: each member's loss, the gradient norm and, last, 0, which stays finite
        self.losses = torch.zeros(members + 2, dtype=torch.float64, device=device)
        # after how many steps each of these sums was finite; of the last, after all
        self.finite = torch.zeros_like(self.losses)
        # of steps that are not counted yet: what `keep` was given, and the gradient norms
        self._kept: list[tuple[Tensor, ...]] = []
        self._norms: list[Tensor] = []
        self._beta = 0.0
        self._fine = torch.zeros((), device=device)
        self.fair_share = overlap / members
        self.epochs_below = [0] * members  # in a row, under a tenth of the fair share

    def tensors(self) -> list[Tensor]:
        """The tensors that a step changes."""
        self.count_kept()
        return [self.sums, self.examples, self.losses, self.finite]

    @torch.no_grad()
    def count(
        self,
        loss: OracleLoss,
        logits: Tensor,
        targets: Tensor,
        *,
        beta: float,
        ignore_index: int | None = None,
        part: MeshPart | None = None,
    ) -> None:
        """Add one batch. Examples whose targets are all `ignore_index` have no specialist.

        With `part`, loss and logits are of what this process computes, and targets of the whole batch.
        """
        entropy = mean_entropy(logits.float().softmax(2), 2)  # (M, B)
        if part is not None:
            loss, entropy = part.of_all(loss, entropy)
        v, others, batch = loss.assignment, ~loss.assignment, len(targets)  # (M, B)
        used = torch.where(v, loss.task, loss.kl if beta else 0.0)
        counted = v.new_ones(batch)
        if ignore_index is not None:
            counted = (targets != ignore_index).reshape(batch, -1).any(1)
            v, others = v & counted, others & counted
        values = torch.stack([loss.task, loss.kl, entropy, entropy])  # (4, M, B)
        examples, total, rest = self.sums.split([1, 1, len(BATCH) - 2])
        examples.add_(batch)
        total.add_(loss.total, alpha=batch)
        rest.add_(values.where(torch.stack([v, others, v, others]), 0).sum((1, 2)))
        learned = torch.cat([v, counted[None]]).double()  # (M + 1, B)
        if self.examples.shape[1] > 1:
            self.examples.index_add_(1, targets.long(), learned)
        else:
            self.examples.add_(learned.sum(1, keepdim=True))
        self.losses[:-2].add_(used.sum(1))

    def keep(self, loss: OracleLoss, logits: Tensor, targets: Tensor, *, beta: float) -> None:
        """`count` the batch of a step, but later and with others: on a CPU, small operations cost most.

        Batches are of one size, and all their targets count. The losses are checked in `count_step` as ever.
        """
        if len(self._kept) >= min(KEPT_STEPS, KEPT / logits.numel()):
            self.count_kept()
        self._beta = beta
        self._kept.append((*loss[:4], logits.detach(), targets))

    @torch.no_grad()
    def count_kept(self) -> None:
        """Count what was kept. The sums are those of `count` and `count_step`, of float32 to the bit."""
        if not self._kept:
            return
        totals, v, task, kl, logits, targets = map(torch.stack, zip(*self._kept, strict=True))
        (steps, _, batch), beta = v.shape, self._beta
        entropy = mean_entropy(logits.float().softmax(3), 3)  # (N, M, B)
        values = torch.stack([task, kl, entropy, entropy], 1)  # (N, 4, M, B)
        rows = values.where(torch.stack([v, ~v, v, ~v], 1), 0).sum((2, 3))
        used = torch.where(v, task, kl if beta else 0.0).sum(2)
        self._in_turn(self.sums, [totals.new_full((steps, 1), batch), totals[:, None].double() * batch, rows])
        self._in_turn(self.losses, [used, torch.stack(self._norms)[:, None], totals.new_zeros(steps, 1)])
        self.finite.add_(self.losses.abs() < math.inf, alpha=steps)
        seen = torch.cat([v, v.new_ones(steps, 1, batch)], 1).double().transpose(0, 1).flatten(1)
        if self.examples.shape[1] > 1:
            self.examples.index_add_(1, targets.flatten().long(), seen)
        else:
            self.examples.add_(seen.sum(1, keepdim=True))
        self._kept.clear()
        self._norms.clear()

    @staticmethod
    def _in_turn(sums: Tensor, parts: list[Tensor]) -> None:
        """Add rows one after the other: the result does not depend on how many there are."""
        rows = torch.cat([part.double() for part in parts], 1)
        sums.copy_(torch.cat([sums[None], rows]).cumsum(0)[-1])

    def count_more(self, loss: Tensor, batch: int) -> None:
        """Add to the loss of a batch that is counted already."""
        self.sums[BATCH.index("loss")] += loss.detach() * batch

    def count_step(self, gradient_norm: Tensor) -> Tensor:
        """Add one step; returns 1.0 once a member's loss or gradient has not been finite, else 0.0."""
        if self._kept:
            if math.isfinite(self._kept[-1][0] + gradient_norm + self.losses.sum()):
                self._norms.append(gradient_norm)
                return self._fine
            total, v, task, kl, logits, targets = self._kept.pop()
            self.count_kept()
            self.count(OracleLoss(total, v, task, kl, v), logits, targets, beta=self._beta)
        self.losses[-2].add_(gradient_norm)
        finite = self.losses.abs() < math.inf  # which NaN is not
        self.finite.add_(finite)
        return (~finite).any().float()

    @property
    def diverged(self) -> Tensor:
        """Of each member, the first step of this epoch that was not finite, or infinity.

        A gradient that is not finite counts for all members if no loss explains it.
        """
        members, gradient, steps = self.finite.split([len(self.finite) - 2, 1, 1])
        explained = members.min() <= gradient
        first = torch.minimum(members, torch.where(explained, steps, gradient))
        return first.where(first < steps, torch.inf)

    def steps(self) -> int:
        """The steps of this epoch so far; waits for the device."""
        self.count_kept()
        return int(self.finite[-1])

    def row(self) -> dict[str, Any]:
        """The means of the epoch so far as plain numbers: one copy from the device."""
        self.count_kept()
        parts = [self.sums, self.losses[-2:-1], self.finite[-1:], self.examples.flatten()]
        sums, norm, steps, counts = torch.cat(parts).cpu().split([len(part) for part in parts])
        counts = counts.reshape(self.examples.shape)
        named = dict(zip(BATCH, sums.tolist(), strict=True))
        examples = max(named.pop("examples"), 1.0)
        row: dict[str, Any] = {name: total / examples for name, total in named.items()}
        row["gradient_norm"] = norm.item() / max(steps.item(), 1.0)
        assigned, seen = counts[:-1], counts[-1]  # (M, C), (C,)
        specialists, all_pairs = assigned.sum().item(), len(assigned) * seen.sum().item()
        row["specialist_entropy"] = named["specialist_entropy"] / max(specialists, 1.0)
        row["nonspecialist_entropy"] = named["nonspecialist_entropy"] / max(all_pairs - specialists, 1.0)
        row["specialist_fraction"] = (assigned.sum(1) / seen.sum().clamp(min=1)).tolist()
        if len(seen) > 1:
            row["specialist_fraction_by_class"] = (assigned / seen.clamp(min=1)).tolist()
        return row

    def reset(self) -> None:
        """Start a new epoch."""
        for tensor in self.tensors():
            tensor.zero_()

    def find_dead_members(self, row: dict[str, Any]) -> None:
        """Warn of members that hardly learn, and add them to the row.

        Each is reported once, and again only if it recovered in between.
        """
        for m, fraction in enumerate(row["specialist_fraction"]):
            self.epochs_below[m] = self.epochs_below[m] + 1 if fraction < self.fair_share / 10 else 0
        dead = [m for m, epochs in enumerate(self.epochs_below) if epochs == PATIENCE]
        if dead:
            row["dead_members"] = dead
            warn(
                f"member {dead} was a specialist for under a tenth of its fair share ({self.fair_share:.0%} "
                f"of the examples) for {PATIENCE} epochs, and hardly learns. Try a larger overlap, a smaller "
                "beta or a warm start (a few epochs as an independent ensemble)."
            )


class TelemetryFile:
    """Rows as JSON lines in the file `path` and, if asked, as scalars in the folder `tensorboard`."""

    def __init__(self, path: Path, *, tensorboard: Path | None = None, step: int = 0) -> None:
        """Drop the rows after `step`, to resume from a checkpoint of that step; 0 starts anew."""
        self.path, self.checkpoints = path, path.parent / "checkpoints"
        kept: list[str] = []
        if path.exists() and not path.is_file():  # a device may have no end
            raise ValueError(f"{path} must be a file. Got something else. Remove it, or name another folder.")
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [f"{line}\n" for line in lines if _step(line) <= step]
            with replacing(path, self.checkpoints) as part:
                part.write_text("".join(kept), encoding="utf-8")
        self.board = _summary_writer(tensorboard, len(kept) + 1) if tensorboard else None

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. The file is opened for each, so that nothing is lost if the process is killed."""
        with needing_room(self.path, self.checkpoints), self.path.open("ab") as file:
            file.write((json.dumps(finite(row), allow_nan=False) + "\n").encode())
        if self.board:
            for name, value in _scalars({key: row[key] for key in row if key not in ("epoch", "seed")}):
                self.board.add_scalar(name, value, row["epoch"])
            self.board.flush()

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self.board:
            self.board.close()


def _summary_writer(folder: Path, purge_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoard must be installed for Options(tensorboard=True). Install it with: pip install "
            "tensorboard"
        ) from error
    return SummaryWriter(str(folder), purge_step=purge_step)


def finite(value: Any) -> Any:
    """NaN and infinity as null: JSON has no such numbers, and strict readers reject the whole line."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def _scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested dicts and lists, named like specialist_fraction/3."""
    if isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _scalars(entry, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _step(line: str) -> float:
    """The step of a line; infinity if a kill or a full disk cut it short."""
    try:
        return float(parse_json(line, "telemetry")["step"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return math.inf
