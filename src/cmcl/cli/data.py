"""`cmcl data`: get data sets and look at them."""

from typing import Annotated, Any

import typer

from .options import AsJson, Root
from .shared import parse_pairs, print_json

app = typer.Typer(help="Get data sets and look at them.", no_args_is_help=True)


@app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the sets."""
    from ..data import DATASETS

    if as_json:
        print_json([{"name": name, "what": description} for name, description in DATASETS.items()])
        return
    for name, description in DATASETS.items():
        typer.echo(f"{name:<9} {description}")


@app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="SET", help="cifar10 or svhn.")],
    root: Root = None,
    site: Annotated[str | None, typer.Option(help="Another address that serves the same files.")] = None,
) -> None:
    """Download a set from its own site, or go on with a download."""
    from ..data import fetch

    for path in fetch(name, root=root, site=site):
        typer.echo(path)


@app.command("check")
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
    as_json: AsJson = False,
) -> None:
    """Load a set and print what is in it.

    Counts, class histogram, channel means and deviations.
    """
    from ..data import check

    report = check(
        name, root=root, validation=validation, seed=seed, options=parse_pairs(option or [], "--option")
    )
    if as_json:
        print_json(report)
    else:
        typer.echo(_describe(report))


def _describe(report: dict[str, Any]) -> str:
    width = max(map(len, report["classes"]))
    lines = [f"{report['set']}: " + ", ".join(f"{n:,} {split}" for split, n in report["counts"].items())]
    lines += [f"  {name:<{width}}  {count:,}" for name, count in report["classes"].items()]
    lines += [f"  {key:<4}  " + "  ".join(f"{x:.4f}" for x in report[key]) for key in ("mean", "std")]
    lines += ["  agrees with what is known of the published set"] if report["published"] else []
    lines += [f"  note: {note}" for note in report["notes"]]
    return "\n".join(lines)
