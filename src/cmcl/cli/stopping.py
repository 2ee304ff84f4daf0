"""Ctrl-C while a command loads, plans or measures. A training has its own way to stop: `shared.ending`."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from .shared import note

STOPPED = 130  # exit code, as shells have it


@contextmanager
def on_ctrl_c(cure: str) -> Iterator[None]:
    """Leave with one line that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"stopped. What was saved is kept: {cure}.")
        raise typer.Exit(STOPPED) from None
