"""`cmcl demo`: the main job on data that need no download."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .shared import AsJson, Quiet, ending, number, print_json, print_table


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report page.")] = Path("cmcl-demo"),
    segmentation: Annotated[
        bool, typer.Option("--segmentation", help="On drawn scenes, instead of handwritten digits.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights, data order, masks and labels.")] = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare one network, IE, MCL and CMCL in about a minute.

    The data need no download, and the folder gets a report page.
    """
    from .. import demo as module

    live = sys.stderr.isatty() and not quiet

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    with ending():
        found = module.demo(
            out,
            segmentation=segmentation,
            seed=seed,
            quiet=not live,
            say=say,
        )
    if as_json:
        print_json(found)
        return
    rows = [
        (title, *(number(found[method][key]) for key in ("top1", "oracle", "ece")))
        for method, title in module.METHODS.items()
    ]
    print_table(("method", ">top-1 error %", ">oracle error %", ">ECE %"), rows)
    typer.echo(f"\noracle: some member is right. top-1: the ensemble is. The report: {found['report']}")
