"""The `cmcl` command. What a command needs is imported inside it, so that `--help` is instant.

A user's mistake ends with exit code 2 and one line on stderr; CMCL_DEBUG=1 shows the traceback instead.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Confident multiple choice learning: ensembles of deep networks that know what they know.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Get data sets and look at them.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Root = Annotated[
    Path | None, typer.Option(help="Folder that holds the sets. Default: $CMCL_DATA, then ~/.cache/cmcl.")
]


@data_app.command("list")
def data_list() -> None:
    """List the sets."""
    from .data import DATASETS

    for name, description in DATASETS.items():
        typer.echo(f"{name:<9} {description}")


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="SET", help="cifar10 or svhn.")],
    root: Root = None,
    site: Annotated[str | None, typer.Option(help="Another address that serves the same files.")] = None,
) -> None:
    """Download a set from its own site; a download that was cut off goes on."""
    from .data import fetch

    for path in fetch(name, root=root, site=site):
        typer.echo(path)


@data_app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(metavar="SET", help="A name from `cmcl data list`.")],
    root: Root = None,
    validation: Annotated[
        float | None, typer.Option(help="Hold out this share of the training split.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides what is held out.")] = 0,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of the set itself, such as size=[32,32].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load a set and print counts, class histogram, channel means and deviations."""
    from .data import check

    report = check(name, root=root, validation=validation, seed=seed, options=_options(option or []))
    typer.echo(json.dumps(report, indent=2) if as_json else _describe(report))


def _options(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON where it can be read so, and text otherwise."""
    options = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"--option must look like NAME=VALUE. Got {pair!r}.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _describe(report: dict[str, Any]) -> str:
    width = max(map(len, report["classes"]))
    lines = [f"{report['set']}: " + ", ".join(f"{n:,} {split}" for split, n in report["counts"].items())]
    lines += [f"  {name:<{width}}  {count:,}" for name, count in report["classes"].items()]
    lines += [f"  {key:<4}  " + "  ".join(f"{x:.4f}" for x in report[key]) for key in ("mean", "std")]
    lines += ["  agrees with what is known of the published set"] if report["published"] else []
    lines += [f"  note: {note}" for note in report["notes"]]
    return "\n".join(lines)


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


if __name__ == "__main__":
    main()
