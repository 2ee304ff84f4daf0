"""What several commands share: options, checks of what the user passed, exit codes, tables and JSON."""

import importlib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from .._files import parse_json
from .._messages import first_line

if TYPE_CHECKING:
    from ..training import Options

FAILED, USAGE, TIME_OVER, STOPPED = 1, 2, 3, 130  # exit codes
SAME_COMMAND = "the same command resumes it"

Pairs = list[str] | None
Function = str | None
Run = Annotated[Path, Argument(metavar="RUN", help="A run folder or a saved ensemble.")]
Root = Annotated[Path | None, Option(help="Folder of the datasets. Default: $CMCL_DATA, then ~/.cache/cmcl.")]
RunsFolder = Annotated[Path, Option("--out", "-o", help="Folder that gets the run folders.")]
Seed = Annotated[int, Option(help="Seed of weights, data order, masks and labels.")]
Seeds = Annotated[int, Option(min=1, help="Number of seeds: 5 with --seed 0 means 0 to 4.")]
Device = Annotated[str, Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1.")]
Precision = Annotated[str, Option(help="auto, bf16 or float32.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, Option("--quiet", help="Show no progress.")]
Data = Annotated[
    str | None, Option("--data", metavar="DATASET", help="Dataset to use instead of the run's own.")
]
DataOption = Annotated[
    Pairs, Option("--option", metavar="NAME=VALUE", help="Option of the dataset, such as size=[32,32].")
]
Limit = Annotated[int | None, Option(min=2, help="Use a subset of n test examples.")]
OwnNetwork = Annotated[
    Function,
    Option(
        "--network", metavar="MODULE:FUNCTION", help="Function that builds a member, for your own network."
    ),
]
OwnLogits = Annotated[
    Function,
    Option(
        "--logits", metavar="MODULE:FUNCTION", help="Function that picks the logits, if saved with output=."
    ),
]
Settings = Annotated[Pairs, Option("--set", metavar="FIELD=VALUE", help="Change any field of the recipe.")]
Budget = Annotated[
    str | None, Option(metavar="TIME", help="Time, such as 25m: then save the run and exit with code 3.")
]
EvaluateEvery = Annotated[int, Option(metavar="EPOCHS", help="Evaluate every n epochs; 0: only at the end.")]
SaveEvery = Annotated[float, Option(metavar="SECONDS", help="Time between checkpoints.")]


def parse_pairs(pairs: Sequence[str] | None, option: str) -> dict[str, Any]:
    """The values of NAME=VALUE pairs; a value is JSON where it can be parsed, and text otherwise."""
    values = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"{option} must look like NAME=VALUE. Got {pair!r}.")
        try:
            values[name] = parse_json(value, option)
        except ValueError:
            values[name] = value
    return values


def parse_numbers(text: str | None, kind: type, option: str) -> list[Any] | None:
    """The numbers of a list such as 0.5,0.75."""
    try:
        return None if text is None else [kind(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas, such as 0.5,0.75. Got {text!r}.") from None


def import_function(name: str, subject: str, does: str = "builds a network") -> Callable[..., Any]:
    """A user's function, from a module in the current folder or an installed one."""
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ValueError(f"{subject} MODULE:FUNCTION, such as mynet:build. Got {name!r}.")
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
def input_errors(must: str) -> Iterator[None]:
    """Turn torch's errors about shapes and types of a user's input into `ValueError`: what must hold."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{must} torch says: {first_line(error)}") from error


def check_writable(path: Path | None, option: str, *, folder: bool = False) -> None:
    """Raise before the work if `path`, a file or a folder, could not be written after it."""
    if path is None:
        return
    if not folder and path.exists() and not path.is_file():  # /dev/stdout would become a file for everybody
        raise ValueError(
            f"{option} must name a file. Got {path}, {'a folder' if path.is_dir() else 'a device'}."
        )
    target = path if folder else path.absolute().parent
    there = next(place for place in (target, *target.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        problem = "a file" if there.exists() else "a link to nowhere"
        raise ValueError(
            f"{option} must name a {'folder' if folder else 'file'}. Got {path}, but {there} is {problem}."
        )
    if not os.access(there, os.W_OK):
        raise ValueError(f"{option} must be writable. Got {path}: no permission to write {there}.")


def seed_range(seed: int, seeds: int = 1) -> range:
    """The seeds of --seed and --seeds."""
    from ..training.config import check_seed

    return range(check_seed(seed), check_seed(seed + seeds - 1) + 1)


def check_device(name: str) -> str:
    """The name of a device that this machine has; "auto" becomes one of them."""
    from ..reproduction.environment import usable
    from ..training import Options
    from ..training.cuda import find_device

    return str(usable(find_device(Options(device=name).device)))


def run_options(device: str, precision: str, **more: Any) -> "Options":
    """The `Options` of a run."""
    from ..training import Options

    return Options(device=check_device(device), precision=precision, **more)  # type: ignore[arg-type]


@contextmanager
def stoppable(hint: str = SAME_COMMAND) -> Iterator[None]:
    """Exit with a message and a code if a run was stopped or diverged; `hint` says how to resume."""
    from ..training import Diverged, Interrupted
    from ..training.checkpoint import FolderInUseError

    try:
        yield
    except Interrupted as stop:
        why = "time over" if stop.reason == "max_seconds" else f"stopped by {stop.reason}"
        note(f"{why} at step {stop.step} of {stop.steps}. It is saved in {stop.folder}: {hint}.")
        raise typer.Exit(TIME_OVER) from None
    except Diverged as error:
        note(str(error))
        raise typer.Exit(FAILED) from None
    except FolderInUseError as error:
        raise ValueError(str(error)) from None
    except KeyboardInterrupt:  # while data load, or while a trained ensemble is evaluated
        note(f"stopped. The last checkpoint is kept: {hint}.")
        raise typer.Exit(STOPPED) from None


def note(text: str) -> None:
    """Print a message to stderr."""
    say(f"cmcl: {text}", err=True)


def say(text: str, *, err: bool = False) -> None:
    """Print text, wrapped to the width of a terminal."""
    if (sys.stderr if err else sys.stdout).isatty():
        wrap = textwrap.TextWrapper(
            shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False
        )
        text = "\n".join(map(wrap.fill, text.split("\n")))
    typer.echo(text, err=err)


def print_json(value: Any) -> None:
    """Print JSON to stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
    """Print a table. A column whose name begins with ">" holds numbers; None is shown as a dash."""
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
    """Fit the table to the terminal: numbers stay whole, text folds; the first column only if it must."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(highlight=False, markup=False), Table(box=None, pad_edge=False)
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    needed = sum(w + 2 for i, (w, r) in enumerate(zip(widths, right, strict=True)) if r or i == 0)
    for i, (head, numbers) in enumerate(zip(heads, right, strict=True)):
        whole = numbers or (i == 0 and needed <= console.width)
        table.add_column(head, justify="right" if numbers else "left", no_wrap=whole, overflow="fold")
    for row in cells:
        table.add_row(*row)
    if title is not None:
        console.print(title, style="bold")
    console.print(table)


def number(value: float | None) -> str | None:
    """A number for a table."""
    return None if value is None else f"{value:.2f}"
