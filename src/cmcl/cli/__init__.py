"""The `cmcl` command, a file for each group of commands.

What a command needs is imported inside it, so that `--help` is instant. A user's mistake ends with exit code
2 and one line on stderr; CMCL_DEBUG=1 shows the traceback instead. Exit code 3: the time was over or the run
was stopped, and the same command goes on (`cmcl train` with --resume).
"""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from .. import __version__
from . import (
    calibrate,
    data,
    demo,
    evaluate,
    export,
    layers,
    listing,
    predict,
    report,
    reproduce,
    train,
    tune,
)
from .shared import note

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "list": listing.show,
    "train": train.train,
    "evaluate": evaluate.evaluate,
    "predict": predict.predict,
    "reproduce": reproduce.reproduce,
    "report": report.report,
    "tune": tune.tune,
    "reject": calibrate.reject,
    "layers": layers.places,
    "export": export.export,
}

app = typer.Typer(
    help="Confident multiple choice learning: ensembles of deep networks that know what they know.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: three times as fast, and shorter
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cmcl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line and exit."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(_flat(str(message)))
        sys.exit(_run())


def _run() -> int:
    try:
        return app(prog_name="cmcl", standalone_mode=False) or 0
    except KeyboardInterrupt:
        return _stopped()
    except Exception as error:
        if type(error).__name__ == "Abort":  # what becomes of Ctrl-C inside a command
            return _stopped()
        if os.environ.get("CMCL_DEBUG") == "1" or not _is_users_mistake(error):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # a bare `cmcl`: the help itself, in its lines
            typer.echo(_words(error), err=True)
        elif message := _flat(_words(error)):  # of older versions of typer, which print the help themselves
            note(message)
        return 2


def _stopped() -> int:
    note("stopped.")
    return 130


def _is_users_mistake(error: Exception) -> bool:
    # a mistake on the command line itself is an exception of click, which typer carries along unnamed
    known = (ValueError, TypeError, OSError, ImportError)
    return isinstance(error, known) or hasattr(error, "format_message")


def _words(error: Exception) -> str:
    return error.format_message() if hasattr(error, "format_message") else str(error)


def _flat(text: str) -> str:
    return " ".join(text.split())
