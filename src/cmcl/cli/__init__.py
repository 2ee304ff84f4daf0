"""The `cmcl` command, a file for each group of commands.

What a command needs is imported inside it, so that `--help` is instant. A user's mistake ends with exit code
2 and one line on stderr; CMCL_DEBUG=1 shows the traceback instead.
"""

import os
import sys

import typer

from . import data

app = typer.Typer(
    help="Confident multiple choice learning: ensembles of deep networks that know what they know.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line and exit."""
    try:
        code = app(prog_name="cmcl", standalone_mode=False)
    except Exception as error:
        if os.environ.get("CMCL_DEBUG") == "1" or not _is_users_mistake(error):
            raise
        if message := _one_line(error):  # empty after a bare `cmcl`, which has printed its help
            typer.echo(f"cmcl: {message}", err=True)
        code = 2
    sys.exit(code or 0)


def _is_users_mistake(error: Exception) -> bool:
    # a mistake on the command line itself is an exception of click, which typer carries along unnamed
    known = (ValueError, TypeError, OSError, ImportError)
    return isinstance(error, known) or hasattr(error, "format_message")


def _one_line(error: Exception) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(text.split())
