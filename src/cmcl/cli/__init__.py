"""The `cmcl` command; one module for each family of commands.

A command imports what it needs when it runs, so `--help` loads neither torch nor pydantic. A user's mistake
exits with code 2 and one message on stderr; CMCL_DEBUG=1 shows the traceback. Exit code 1: something failed.
3: the time was over or a signal stopped the run, and the same command resumes it (`train` with --resume).
"""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from . import data, explore, inference, reproduce, train
from .common import STOPPED, USAGE, note, note_end, other_process, several_processes

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": explore.demo,
    "list": explore.show,
    "train": train.train,
    "tune": train.tune,
    "evaluate": inference.evaluate,
    "predict": inference.predict,
    "calibrate": inference.calibrate,
    "export": inference.export,
    "layers": explore.layers,
    "reproduce": reproduce.reproduce,
    "report": reproduce.report,
}

app = typer.Typer(
    help="Confident multiple choice learning: train, evaluate and use ensembles of specialised networks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: three times as fast, and shorter
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cmcl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if several_processes() and context.invoked_subcommand != "train":
        raise ValueError(
            f"torchrun must start `cmcl train`. Got {context.invoked_subcommand}. Start it without torchrun."
        )


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line and exit."""
    with warnings.catch_warnings(), Path(os.devnull).open("w") as nowhere:
        warnings.showwarning = lambda message, *_, **__: note(_one_line(str(message)))
        if other_process():
            warnings.simplefilter("ignore")
            sys.stdout = nowhere
        sys.exit(_run())


def _run() -> int:
    try:
        return app(prog_name="cmcl", standalone_mode=False) or 0
    except KeyboardInterrupt:
        return _stopped()
    except SystemExit as stop:  # click exits with 1 when the reader of a pipe, such as `head`, is gone
        if isinstance(stop.__context__, BrokenPipeError):
            return 0
        raise
    except Exception as error:
        if type(error).__name__ == "Abort":  # click's KeyboardInterrupt
            return _stopped()
        if os.environ.get("CMCL_DEBUG") == "1" or not _is_users_mistake(error):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # a bare `cmcl`: the help itself
            typer.echo(_message(error), err=True)
        elif message := _one_line(_message(error)):  # empty in older versions of typer, which print the help
            note_end(message)
        return USAGE


def _stopped() -> int:
    note("stopped.")
    return STOPPED


def _is_users_mistake(error: Exception) -> bool:
    # typer carries its own copy of click, so click's exceptions are known by their method
    return isinstance(error, ValueError | TypeError | OSError | ImportError) or hasattr(
        error, "format_message"
    )


def _message(error: Exception) -> str:
    return error.format_message() if hasattr(error, "format_message") else str(error)


def _one_line(text: str) -> str:
    return " ".join(text.split())
