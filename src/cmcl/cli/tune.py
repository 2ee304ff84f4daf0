"""`cmcl tune`: beta and K of a recipe, chosen on held-out data."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Device, Precision, Quiet, Root, Runs
from .runs import refuse_arrays
from .shared import (
    check_writable,
    check_writable_folder,
    ending,
    engine_options,
    note,
    number,
    parse_pairs,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from ..training.config import Recipe

SEARCHED = {"beta": "--betas", "overlap": "--overlaps", "validation": "--validation"}  # fields of a recipe
USUAL = {"--root": None, "--out": Path("runs"), "--seeds": 1, "--device": "auto", "--precision": "auto"}


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
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Any other field of the recipe.")
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
    from ..reproduction.tuning import check_plot
    from ..reproduction.tuning import plot as draw
    from ..reproduction.tuning import tune as search

    name, changed = _changed(recipe, setting or [])
    if plot is not None:
        check_plot(plot)
    check_writable(plot, "--plot")
    check_writable_folder(out, "--out")
    with ending():
        result = search(
            name,
            out=out,
            recipe=changed,
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
    title = f"{name}: held-out top-1 error in %, {validation:.0%} of the training set"
    print_table((">beta", ">K", *(f">{length}" for length in lengths)), _rows(result), title=title)
    typer.echo(f"\nchosen: beta {result['beta']:g}, K {result['overlap']}; test error {result['test']:.2f} %")
    typer.echo(f"trained without the {validation:.0%} held out: {result['run']}")
    given = {"--root": root, "--out": out, "--seeds": seeds, "--device": device, "--precision": precision}
    options = [word for key, value in given.items() if value != USUAL[key] for word in (key, str(value))]
    typer.echo(f"to train it on all data: {_train(recipe, result, setting or [], options)}")


def _changed(recipe: str, setting: Sequence[str]) -> "tuple[str, Recipe]":
    """The recipe to search, and its name."""
    from ..reproduction.recipes import find
    from .train import change, changed_name

    changes = parse_pairs(setting, "--set")
    if searched := [name for name in SEARCHED if name in changes]:
        raise ValueError(
            f"--set must name a field that is not searched. Got {searched[0]}. Use {SEARCHED[searched[0]]}."
        )
    base = replace(find(recipe), overlap=1)  # the recipe's own K may be more than the members of --set
    changed = change(base, changes)
    refuse_arrays(changed.data, "data", "cmcl.reproduction.tuning")
    return changed_name(recipe, base, changed), changed


def _train(recipe: str, result: dict[str, Any], setting: Sequence[str], options: Sequence[str]) -> str:
    """The command that trains the chosen one, all that it needs included."""
    chosen = ["--beta", f"{result['beta']:.15g}", "--overlap", str(result["overlap"])]
    fields = [word for pair in setting for word in ("--set", pair)]
    return shlex.join(["cmcl", "train", recipe, *chosen, *fields, *options])


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
