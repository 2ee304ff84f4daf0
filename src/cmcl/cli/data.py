"""`cmcl data`: download datasets and inspect them."""

from typing import Annotated, Any

import typer

from ..data.registry import DATASETS
from .common import AsJson, DataOption, Root, parse_pairs, print_json, print_table, seed_range

app = typer.Typer(help="Download datasets and inspect them.", no_args_is_help=True)
DOWNLOADS = [name for name, info in DATASETS.items() if info.downloads]


@app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the datasets."""
    rows = [(name, info.description) for name, info in DATASETS.items()]
    if as_json:
        print_json([{"name": name, "description": description} for name, description in rows])
    else:
        print_table(("name", "description"), rows)


@app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="DATASET", help=f"{' or '.join(DOWNLOADS)}.")],
    root: Root = None,
    site: Annotated[str | None, typer.Option(help="Another address that serves the same files.")] = None,
) -> None:
    """Download a dataset from its own site."""
    from ..data import fetch

    for path in fetch(name, root=root, site=site):
        typer.echo(path)


@app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(metavar="DATASET", help="A name from `cmcl data list`.")],
    root: Root = None,
    validation: Annotated[
        float | None, typer.Option(help="Hold out this fraction of the training split.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the held-out split.")] = 0,
    option: DataOption = None,
    as_json: AsJson = False,
) -> None:
    """Load a dataset and describe it.

    Counts, class histogram, channel means and standard deviations.
    """
    from ..data import check

    report = check(
        name,
        root=root,
        validation=validation,
        seed=seed_range(seed)[0],
        options=parse_pairs(option, "--option"),
    )
    if as_json:
        print_json(report)
    else:
        typer.echo(_describe(report))


def _describe(report: dict[str, Any]) -> str:
    width = max(map(len, report["classes"]))
    lines = [f"{report['dataset']}: " + ", ".join(f"{n:,} {split}" for split, n in report["counts"].items())]
    lines += [f"  {name:<{width}}  {count:,}" for name, count in report["classes"].items()]
    lines += [f"  {key:<4}  " + "  ".join(f"{x:.4f}" for x in report[key]) for key in ("mean", "std")]
    lines += ["  agrees with the published dataset"] if report["published"] else []
    lines += [f"  note: {note}" for note in report["notes"]]
    return "\n".join(lines)
