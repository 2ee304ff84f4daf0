"""`cmcl tune`: beta and K of a recipe, chosen on held-out data."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import AsJson, Device, Precision, Quiet, Root, Runs
from .shared import (
    check_writable,
    check_writable_folder,
    ending,
    engine_options,
    note,
    number,
    print_json,
    print_table,
)


def tune(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A CMCL recipe from `cmcl list`.")],
    root: Root = None,
    out: Runs = Path("runs"),
    betas: Annotated[
        str | None, typer.Option(metavar="B,B,...", help="To try. Default: the paper's.")
    ] = None,
    overlaps: Annotated[
        str | None, typer.Option(metavar="K,K,...", help="To try. Default: the paper's.")
    ] = None,
    validation: Annotated[float, typer.Option(help="Share of the training set to choose by.")] = 0.1,
    eta: Annotated[int, typer.Option(min=2, help="One of so many goes on, and trains so much longer.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, help="A candidate's error is the mean over so many.")] = 1,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture: .svg or .png.")] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Choose beta and K on held-out data.

    By successive halving: the better candidates train longer. The test set is looked at once, in the end. A
    command that was stopped goes on where it was.
    """
    from ..tuning import check_plot
    from ..tuning import plot as draw
    from ..tuning import tune as search

    if plot is not None:
        check_plot(plot)
    check_writable(plot, "--plot")
    check_writable_folder(out, "--out")
    with ending():
        result = search(
            recipe,
            out=out,
            betas=_numbers(betas, float, "--betas"),
            overlaps=_numbers(overlaps, int, "--overlaps"),
            validation=validation,
            eta=eta,
            seeds=list(range(seeds)),
            root=root,
            options=engine_options(device, precision, quiet=True),
            say=(lambda line: None) if quiet else note,
        )
    if plot is not None:
        draw(result, plot)
    if as_json:
        print_json(result)
        return
    lengths = [rung["length"] for rung in result["rungs"]]
    title = f"{recipe}: held-out top-1 error in %, {validation:.0%} of the training set"
    print_table((">beta", ">K", *(f">{length}" for length in lengths)), _rows(result), title=title)
    typer.echo(f"\nchosen: beta {result['beta']:g}, K {result['overlap']}; test error {result['test']:.2f} %")


def _rows(result: dict[str, Any]) -> list[list[Any]]:
    """A line for each candidate, the longest lived and best first."""
    errors: dict[str, list[float]] = {}
    values = {row["name"]: row for row in result["rungs"][0]["rows"]}
    for rung in result["rungs"]:
        for row in rung["rows"]:
            errors.setdefault(row["name"], []).append(row["held_out"])
    order = sorted(errors, key=lambda name: (-len(errors[name]), errors[name][-1]))
    rungs = len(result["rungs"])
    return [
        [
            f"{values[name]['beta']:g}",
            values[name]["overlap"],
            *(number(error) for error in errors[name]),
            *[None] * (rungs - len(errors[name])),
        ]
        for name in order
    ]


def _numbers(text: str | None, kind: type, option: str) -> list[Any] | None:
    try:
        return None if text is None else [kind(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas, such as 0.5,0.75. Got {text!r}.") from None
