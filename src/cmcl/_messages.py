"""Warnings, and parts of messages. This module loads without torch, so that `cmcl --help` starts fast."""

import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

Part = TypeVar("Part")


def warn(text: str) -> None:
    """Warn at the user's own line, every time: Python would show an equal warning only once in a process."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("cmcl", "torch"):
        frame = frame.f_back
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


@cache
def private_torch(path: str, instead: Any) -> Any:
    """A private attribute of torch by its full path; `instead`, and one warning, if this torch has none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        import torch

        warn(f"torch {torch.__version__} has no {path}; cmcl works without it, with fewer checks or slower.")
        return instead


@contextmanager
def needing_extra(extra: str, *packages: str) -> Iterator[None]:
    """Say how to install an extra of this package, where the block imports one of its packages in vain."""
    try:
        yield
    except ImportError as error:
        if error.name not in packages:
            raise
        hint = f"Install it with: pip install 'confident-mcl[{extra}]'"
        raise ImportError(f"this needs {error.name}. {hint}.", name=error.name) from error


def progress_bar(parts: Sequence[Part], title: str) -> Iterable[Part]:
    """The parts one by one, with a progress bar on a terminal; none without a title."""
    from rich.console import Console
    from rich.progress import track

    hidden = not title or not sys.stderr.isatty()
    return track(parts, title, console=Console(stderr=True), disable=hidden, transient=True)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, to be used in a sentence; its class if there is none."""
    return str(error).strip().partition("\n")[0].strip().rstrip(".") or type(error).__name__


def without_addresses(text: str) -> str:
    """What Python prints of an object, without its address in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
