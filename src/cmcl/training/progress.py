"""The progress of a run, for a person who watches it."""

import math
import sys
import time
from datetime import timedelta
from typing import Any, Self

import rich.progress
from rich.console import Console
from rich.table import Column

FORMATS = {  # the numbers of a row that a person wants to see
    "seed": "seed {}",
    "loss": "loss {:.4f}",
    "top1": "top-1 {:.2f} %",
    "oracle": "oracle {:.2f} %",
    "lr": "lr {:.3g}",
    "images_per_second": "{:,.0f} images/s",
}
REFRESH_SECONDS = 0.25  # drawing the bar takes about a millisecond


class Progress:
    """Progress on stderr: a bar on a terminal, a line an epoch when piped, nothing when `quiet`."""

    def __init__(self, epochs: int, *, quiet: bool = False) -> None:
        self.epochs = epochs
        self._numbers: dict[str, Any] = {}  # the last known
        self._console = Console(stderr=True, quiet=quiet)
        # isatty as well, because FORCE_COLOR alone would fill a log file with bars.
        live = self._console.is_interactive and self._console.file.isatty() and not quiet
        self._bar = _bar(self._console) if live else None
        self._drawn = -math.inf
        self._first: tuple[float, float] | None = None  # (time, epochs done), since when speed is measured

    def advance(self, done: float, **numbers: Any) -> None:
        """Show the progress after a step.

        Args:
            done: epochs done since the run began, 2.5 in the middle of the third.
            numbers: entries of a row that are known already (loss, lr, ...); the rest stays as it was.
        """
        if self._bar is None:
            return
        now = time.monotonic()
        self._first = self._first or (now, done)
        self._numbers.update(numbers)
        if now - self._drawn >= REFRESH_SECONDS:
            self._draw(self._bar, done, now)

    def log(self, row: dict[str, Any]) -> None:
        """Show an epoch's row: epoch, loss, lr, images_per_second and, where known, top1 and oracle."""
        self._numbers.update(row)
        if self._bar:
            self._draw(self._bar, row["epoch"], time.monotonic())
        else:
            self.say(f"{self._count(row['epoch'])} {_describe(row)}")

    def say(self, text: str) -> None:
        """Show a line."""
        if not self._console.quiet:  # which would format it all the same
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.add_task("", total=self.epochs, count=self._count(1), numbers="", left="")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def _draw(self, bar: rich.progress.Progress, done: float, now: float) -> None:
        self._drawn = now
        count = self._count(min(math.floor(done) + 1, self.epochs))  # the current one
        left = self._left(done, now)
        room = self._console.width - _bar_width(self._console) - len(count) - len(left) - 4
        bar.update(
            bar.task_ids[0],
            completed=done,
            count=count,
            numbers=_describe(self._numbers, room),
            left=left,
            refresh=True,
        )

    def _count(self, epoch: int) -> str:
        return f"epoch {epoch}/{self.epochs}"

    def _left(self, done: float, now: float) -> str:
        """The time to the end at the mean speed of this process: a resumed run's past took no time here."""
        if not self._first or done <= self._first[1]:
            return ""
        began, before = self._first
        seconds = (now - began) / (done - before) * max(0.0, self.epochs - done)
        return f"{timedelta(seconds=round(seconds))} left"


def _bar(console: Console) -> rich.progress.Progress:
    """A bar that is drawn on demand, without a thread that would compete with training."""
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.fields[count]}"),
        rich.progress.BarColumn(bar_width=_bar_width(console)),
        rich.progress.TextColumn("{task.fields[left]}"),
        rich.progress.TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
        console=console,
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),  # a file that results go to must not lose them to the terminal
    )


def _bar_width(console: Console) -> int:
    return 20 if console.width > 110 else 8


def _describe(row: dict[str, Any], room: float = math.inf) -> str:
    """The numbers of a row, as far as they are known and fit into a line; the most important come first."""
    parts = [form.format(row[key]) for key, form in FORMATS.items() if row.get(key) is not None]
    while len(", ".join(parts)) > room and parts:
        parts.pop()
    return ", ".join(parts)
