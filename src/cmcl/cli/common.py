"""Options, checks, exit codes and output that several commands share."""

import json
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from .._files import parse_json
from .._messages import first_line
from ..data.registry import nearest

if TYPE_CHECKING:
    from ..training import Options

FAILED, USAGE, TIME_OVER, STOPPED = 1, 2, 3, 130  # exit codes
HIGH_ECE = 5.0  # percent
FOLDED = 12  # least width of a column of texts
PATIENCE = 3  # seconds in which torchrun ends the other processes after process 0
FUNCTION = "MODULE:FUNCTION"
SAME_COMMAND = "the same command resumes it"

Pairs = list[str] | None
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
    str | None,
    Option("--network", metavar=FUNCTION, help="Function that builds a member, for your own network."),
]
OwnLogits = Annotated[
    str | None,
    Option("--logits", metavar=FUNCTION, help="Function that picks the logits, if saved with output=."),
]
Flip = Annotated[
    bool | None, Option("--flip/--no-flip", help="Average with mirror images. Default: as trained.")
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


def check_choice(option: str, value: str | None, valid: Iterable[str]) -> None:
    """Raise unless `value` is one of the valid names, or None."""
    names = list(valid)
    if value is not None and value not in names:
        raise ValueError(
            f"{option} must be one of {', '.join(names)}. Got {value!r}. {nearest(value, names)}"
        )


def nearest_folder(path: Path) -> str:
    """A hint for a folder that does not exist: the closest name beside it."""
    parent = path.absolute().parent
    return (
        nearest(path.name, sorted(p.name for p in parent.iterdir() if p.is_dir())) if parent.is_dir() else ""
    )


def check_writable(path: Path | None, option: str, *, folder: bool = False) -> None:
    """Raise before the work if `path`, a file or a folder, could not be written after it."""
    if path is None:
        return
    target = path.absolute() if folder else path.absolute().parent
    there = next(place for place in (target, *target.parents) if os.path.lexists(place))
    problem = None
    if not folder and path.exists() and not path.is_file():  # /dev/stdout would become a file for everybody
        there, problem = path, "is a folder" if path.is_dir() else "is a device"
    elif not there.is_dir():
        problem = "is a file" if there.exists() else "is a link to nowhere"
    elif not os.access(there, os.W_OK):
        problem = "gives no permission to write"
    if problem:
        kind = "folder" if folder else "file"
        raise ValueError(f"{option} must name a {kind} that can be written. Got {path}: {there} {problem}.")


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


def run_options(device: str, precision: str, *, here: bool = True, **more: Any) -> "Options":
    """The `Options` of a run; the device is checked if the run is carried out `here`."""
    from ..training import Options

    found = check_device(device) if here else device
    return Options(device=found, precision=precision, **more)  # type: ignore[arg-type]


@contextmanager
def stoppable(hint: str = SAME_COMMAND) -> Iterator[None]:
    """Exit with a message and a code if a run is interrupted or diverges; `hint` says how to resume."""
    from ..training import Diverged, Interrupted
    from ..training.checkpoint import FolderInUseError
    from ..training.mesh import ProcessLost

    try:
        yield
    except Interrupted as stop:
        why = "time over" if stop.reason == "max_seconds" else f"stopped by {stop.reason}"
        saved = f"It is saved in {stop.folder}" if stop.folder else "It was choosing K, and begins that again"
        note_end(f"{why} at step {stop.step} of {stop.steps}. {saved}: {hint}.")
        raise typer.Exit(TIME_OVER) from None
    except (Diverged, ProcessLost) as error:
        note_end(str(error))
        raise typer.Exit(FAILED) from None
    except FolderInUseError as error:
        raise ValueError(str(error)) from None
    except KeyboardInterrupt:  # while data load, or while a trained ensemble is evaluated
        note_end(f"stopped. The last checkpoint is kept: {hint}.")
        raise typer.Exit(STOPPED) from None


def several_processes() -> bool:
    """Whether `torchrun` started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"


def other_process() -> bool:
    """Whether torchrun started it and it is not process 0, which prints for all."""
    return several_processes() and os.environ.get("RANK") != "0"


def note(text: str) -> None:
    """Print a message to stderr."""
    if not other_process():
        say(f"cmcl: {text}", err=True)


def note_end(text: str) -> None:
    """Print why the process ends; another than process 0 only if it is not ended by the same."""
    if other_process():
        time.sleep(PATIENCE)
        text = f"process {os.environ['RANK']}: {text}"
    say(f"cmcl: {text}", err=True)


def say(text: str, *, err: bool = False) -> None:
    """Print text, wrapped to the width of a terminal."""
    if (sys.stderr if err else sys.stdout).isatty():
        wrap = textwrap.TextWrapper(
            shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False
        )
        text = "\n".join(map(wrap.fill, text.split("\n")))
    typer.echo(text, err=err)


def say_unscaled(run: object, data: str | None = None, network: str | None = None, ece: float = 0.0) -> None:
    """Print that a run is not scaled, or what its high ECE comes from, and the command that fixes it."""
    own = ["--network", network] if network and ":" in network else []
    why = "The probabilities are not scaled"
    if ece > HIGH_ECE:
        why = f"ECE {ece:.1f} %: near-uniform members make CMCL underconfident"
    say(f"{why}. Fit a temperature:")
    # a line of its own and not wrapped, to be copied
    typer.echo(shlex.join(["cmcl", "calibrate", str(run), *(["--data", data] if data else []), *own]))


def print_json(value: Any) -> None:
    """Print JSON to stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    title: str | None = None,
    best: int | None = None,
) -> None:
    """Print a table. A column whose name begins with ">" holds numbers; None is shown as a dash.

    On a terminal it fits the width: numbers stay whole, text folds, the first column only if it must; the row
    with the lowest number in the column `best` is bold; a mean ± its spread counts as the mean.
    """
    from rich.console import Console
    from rich.table import Table

    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    heads = [name.removeprefix(">") for name in columns]
    right = [name.startswith(">") for name in columns]
    widths = [max(map(len, column)) + 2 for column in zip(heads, *cells, strict=True)]
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else sum(widths))
    least = [width if number else min(width, FOLDED) for width, number in zip(widths, right, strict=True)]
    console.width = max(console.width, sum(least))  # rather than cut numbers
    needed = widths[0] + sum(width for width, number in zip(widths[1:], right[1:], strict=True) if number)
    table = Table(box=None, pad_edge=False)
    for i, (head, number) in enumerate(zip(heads, right, strict=True)):
        whole = number or (i == 0 and needed <= console.width)
        table.add_column(head, justify="right" if number else "left", no_wrap=whole, overflow="fold")
    known: dict[int, float] = {}
    if best is not None:
        known = {i: float(str(row[best]).split()[0]) for i, row in enumerate(rows) if row[best] is not None}
    lowest = min(known, key=known.__getitem__) if len(known) > 1 else None
    for i, row in enumerate(cells):
        table.add_row(*row, style="bold" if i == lowest else None)
    with console.capture() as drawn:
        console.print(table)
    lines = [line.rstrip() for line in drawn.get().splitlines()]
    typer.echo("\n".join(lines if title is None else [title, *lines]))


def number(value: float | None) -> str | None:
    """A number for a table."""
    return None if value is None else f"{value:.2f}"
