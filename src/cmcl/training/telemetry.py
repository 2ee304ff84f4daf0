"""What a run tells while it goes: JSON lines, TensorBoard, an alarm for dead members.

A row is a dict of JSON values; "epoch" is the number of epochs done, "seed" tells repeats apart.
"""

import io
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .._files import needing_room, replacing


class Telemetry:
    """Rows as JSON lines in the file `path` and, if asked, as scalars in the folder `tensorboard`."""

    def __init__(self, path: Path | None, *, tensorboard: Path | None = None) -> None:
        self.path = path
        one = path or tensorboard
        self.checkpoints = one and one.parent / "checkpoints"  # of the run that is told of
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            for part in path.parent.glob(f".{path.name}.*.part"):
                part.unlink(missing_ok=True)
        self.events = tensorboard and tensorboard / f"events.out.tfevents.{time.time_ns()}"
        if self.events:
            self.events.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.events, _event(file_version="brain.Event:2"))

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        if self.path:
            self._append(self.path, (json.dumps(finite(row), allow_nan=False) + "\n").encode())
        if self.events:
            numbers = {key: value for key, value in row.items() if key not in ("epoch", "seed")}
            named = _scalars(numbers, f"seed-{row['seed']}" if "seed" in row else "")
            values = [{"tag": name, "simple_value": value} for name, value in named]
            step = math.ceil(row["epoch"])  # takes whole steps only
            self._append(self.events, _event(step=step, summary={"value": values}))

    def rewind(self, epoch: float) -> None:
        """Drop what was written after `epoch`, to go on from a checkpoint made then; 0 starts anew."""
        if self.path and self.path.exists():
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
            with replacing(self.path, self.checkpoints) as part:
                kept = [f"{line}\n" for line in lines if _epoch(line) <= epoch]
                part.write_text("".join(kept), encoding="utf-8")
        if self.events:
            # TensorBoard's files only grow: this hides the rows from here on instead.
            self._append(self.events, _event(step=math.floor(epoch) + 1, session_log={"status": "START"}))

    def _append(self, path: Path, data: bytes) -> None:
        """Opened for each row, once an epoch: nothing is lost in a buffer when the process is killed."""
        with needing_room(path, self.checkpoints), path.open("ab") as file:
            file.write(data)


def _event(**content: Any) -> bytes:
    """An entry of TensorBoard's files.

    Not from its own writer, which has a thread: that one fails late on a full disk, and out of our reach.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoard must be installed to write for it. Install it with: pip install tensorboard"
        ) from error
    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
    return record.getvalue()


def finite(value: Any) -> Any:
    """NaN and infinity as null: JSON has no such numbers, and strict readers refuse the whole line."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def _scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested dicts and lists, named like wins/3."""
    if isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _scalars(entry, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _epoch(line: str) -> float:
    """When a line was written; never, if a kill or a full disk cut it short."""
    try:
        return float(json.loads(line)["epoch"])
    except (ValueError, TypeError, KeyError):
        return math.inf


class DeadMembers:
    """The alarm for members that win next to nothing, so that only the others learn.

    Args:
        members: M, the number of members.
        overlap: K, the members that learn each example; K/M of the examples is a member's fair share.
        patience: epochs in a row under a tenth of the fair share that make a member dead.
    """

    def __init__(self, members: int, overlap: int, patience: int = 3) -> None:
        self.members, self.patience = members, patience
        self.fair_share = overlap / members
        self._epochs_below = [0] * members

    def update(self, win_rates: Sequence[float]) -> list[int]:
        """The members that are dead as of this epoch; each is named once, and again only if it recovered.

        Args:
            win_rates: for each member the share of this epoch's examples that it won, 0 to 1.
        """
        if len(win_rates) != self.members:
            raise ValueError(f"win_rates must have one entry a member, {self.members}. Got {len(win_rates)}.")
        for m, rate in enumerate(win_rates):
            self._epochs_below[m] = self._epochs_below[m] + 1 if rate < self.fair_share / 10 else 0
        return [m for m, epochs in enumerate(self._epochs_below) if epochs == self.patience]

    def warning(self, members: Sequence[int]) -> str:
        """What to tell about members that `update` named."""
        names = ", ".join(map(str, members))
        return (
            f"{'Members' if len(members) > 1 else 'Member'} {names} won under a tenth of the fair share "
            f"({self.fair_share:.0%} of the examples) for {self.patience} epochs: next to nothing is learned "
            "there. Try a larger overlap, a smaller beta or a warm start (a few epochs as an independent "
            "ensemble)."
        )

    def state(self) -> dict[str, Any]:
        """All that the next `update` depends on, as JSON values."""
        return {"epochs_below": list(self._epochs_below)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        epochs_below = state["epochs_below"]
        if len(epochs_below) != self.members:
            raise ValueError(f"state must be of {self.members} members. Got {len(epochs_below)}.")
        self._epochs_below = list(epochs_below)
