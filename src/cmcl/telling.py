"""What a person is told of what went wrong, and of what things are called."""

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, TypeVar

Part = TypeVar("Part")


def tell(text: str) -> None:
    """A warning at the user's own line, each time: Python would tell an equal one only once in a process."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("cmcl", "torch"):
        frame = frame.f_back
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def private_torch(path: str, instead: Any) -> Any:
    """A private attribute of torch by its full path; where this torch has none, `instead` and one warning."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        import torch

        tell(f"torch {torch.__version__} has no {path}; cmcl works without it, with fewer checks or slower.")
        return instead


def watched(parts: Sequence[Part], title: str) -> Iterable[Part]:
    """The parts one by one, with a bar for whoever watches a terminal; without a title there is none."""
    from rich.console import Console
    from rich.progress import track

    hidden = not title or not sys.stderr.isatty()
    return track(parts, title, console=Console(stderr=True), disable=hidden, transient=True)


def first_line(error: BaseException) -> str:
    """What to tell of an error within a sentence: its first line, or its name."""
    return str(error).strip().partition("\n")[0].strip().rstrip(".") or type(error).__name__


def without_addresses(text: str) -> str:
    """What Python prints of an object, but for its place in memory, which is another in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
