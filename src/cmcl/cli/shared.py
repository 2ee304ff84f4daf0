"""What several commands do: read values, check, print tables and JSON, end a run."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..telling import first_line

if TYPE_CHECKING:
    from ..training import Options

TIME_OVER = 3  # exit code: the same command goes on
FAILED = 1


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON where it can be read so, and text otherwise."""
    values = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"{option} must look like NAME=VALUE. Got {pair!r}.")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


def import_function(name: str, place: str, does: str = "builds a network") -> Callable[..., Any]:
    """A user's function, from a module that lies where he is or is installed; `place` is what named it."""
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ValueError(f"{place} MODULE:FUNCTION, such as mynet:build. Got {name!r}.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{module} must be a Python module that can be imported from {here}. {error}."
        ) from error
    except AttributeError as error:
        raise ValueError(f"{module} must have the function {function}. {error}.") from error
    if not callable(found):
        raise TypeError(f"{name} must be a function that {does}. Got {type(found).__name__}.")
    return found  # type: ignore[no-any-return]


@contextmanager
def users_shapes(what: str) -> Iterator[None]:
    """What torch says of shapes or types that the user gave, as his mistake: `what` must hold."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{what} torch says: {first_line(error)}") from error


def check_writable(path: Path | None, option: str, *, replaced: bool = False) -> None:
    """A file to write in the end must be possible there: said before the work, not after it.

    One that is `replaced` is written beside the old one, so its folder counts.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} must name a file. Got the folder {path}.")
    if replaced and path.exists() and not path.is_file():  # /dev/stdout would become a file for everybody
        raise ValueError(f"{option} must name a file, which is replaced. Got {path}, which is none.")
    there = path if path.exists() and not replaced else _nearest_existing(path.absolute().parent)
    if there != path and not there.is_dir():
        raise ValueError(f"{option} must name a file in a folder. Got {path}, but {there} is a file.")
    _check_permission(path, there, option)


def check_writable_folder(path: Path | None, option: str) -> None:
    """The same of a folder to write into, which need not be there yet."""
    if path is None:
        return
    there = _nearest_existing(path)
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise ValueError(f"{option} must name a folder. Got {path}, but {place} is a link to nowhere.")
    if not there.is_dir():
        got = f"the file {path}" if there == path else f"{path}, but {there} is a file"
        raise ValueError(f"{option} must name a folder. Got {got}. Name another.")
    _check_permission(path, there, option)


def _nearest_existing(path: Path) -> Path:
    """Folders that are missing can be made, in the nearest one that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _check_permission(path: Path, there: Path, option: str) -> None:
    if not os.access(there, os.W_OK):
        raise ValueError(f"{option} must be a place to write to. Got {path}: no permission to write {there}.")


def check_device(name: str) -> str:
    """The name of a device that is there, "auto" made one of them."""
    from ..reproduction.environment import usable
    from ..training.setup import find_device

    try:
        device = find_device(name)
    except RuntimeError:
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:1. Got {name!r}.") from None
    return str(usable(device))


def engine_options(device: str, precision: str, **more: Any) -> "Options":
    """How a run is carried out."""
    from ..training import Options

    return Options(device=check_device(device), precision=precision, **more)  # type: ignore[arg-type]


@contextmanager
def ending(cure: str = "the same command goes on") -> Iterator[None]:
    """A run that was stopped leaves with exit code 3, one that diverged with 1, each with its one line."""
    from ..training import Diverged, Interrupted
    from ..training.locking import FolderInUseError

    try:
        yield
    except Interrupted as stop:
        note(str(stop).replace("go on with resume=True", cure))  # that is for Python
        raise typer.Exit(TIME_OVER) from None
    except Diverged as error:
        note(str(error))
        raise typer.Exit(FAILED) from None
    except FolderInUseError as error:
        raise ValueError(str(error)) from None


def note(text: str) -> None:
    """A line on stderr, where it is in no program's way."""
    typer.echo(f"cmcl: {text}", err=True)


def print_json(value: Any) -> None:
    """For programs."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
    """For people. A column whose name begins with ">" holds numbers; None is shown as a dash."""
    heads = [name.removeprefix(">") for name in columns]
    right = [name.startswith(">") for name in columns]
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(heads, right, cells, title)
        return
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for row in (heads, *cells) if title is None else ([title], heads, *cells):
        padded = [f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(row, widths, right, strict=False)]
        typer.echo("  ".join(padded).rstrip())


def _print_rich(heads: list[str], right: list[bool], cells: list[list[str]], title: str | None) -> None:
    """As wide as the terminal. The first column has the name, to be copied: the others shrink before it."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(highlight=False, markup=False), Table(box=None, pad_edge=False)
    for i, (head, numbers) in enumerate(zip(heads, right, strict=True)):
        table.add_column(head, justify="right" if numbers else "left", no_wrap=i == 0)
    for row in cells:
        table.add_row(*row)
    if title is not None:
        console.print(title, style="bold")
    console.print(table)


def number(value: float | None, digits: int = 2) -> str | None:
    """A number for a table."""
    return None if value is None else f"{value:.{digits}f}"
