"""`cmcl demo`: the main job on data that need no download."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson, Quiet, Seed
from .shared import check_writable_folder, ending, number, print_json, print_table
from .stopping import on_ctrl_c

NOISE = "One seed on so few test images is noisy: {where} has means over {seeds} seeds."
MORE_SEEDS = {  # for --segmentation, or not
    False: NOISE.format(where="the README", seeds="twenty"),
    True: NOISE.format(where="results/demo-seeds-segmentation.txt", seeds="five"),
}
ECE = (
    "CMCL's ECE is high because members that keep silent, as they should, are averaged in: it is right more "
    "often than it is sure. One number, a temperature, mends that: docs/rejecting.md."
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report page.")] = Path("cmcl-demo"),
    segmentation: Annotated[
        bool, typer.Option("--segmentation", help="On drawn scenes, instead of handwritten digits.")
    ] = False,
    seed: Seed = 3,  # as in cmcl.demo, which says why
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare one network, IE, MCL and CMCL in about a minute.

    The data need no download, and the folder gets a report page.
    """
    check_writable_folder(out, "--out")
    live = sys.stderr.isatty() and not quiet

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    with on_ctrl_c("the same command goes on"):
        from .. import demo as module

        with ending():
            found = module.demo(out, segmentation=segmentation, seed=seed, quiet=not live, say=say)
    if as_json:
        print_json(found)
        return
    rows = [
        (title, *(number(found[method][key]) for key in ("top1", "oracle", "ece")))
        for method, title in module.METHODS.items()
    ]
    print_table(("method", ">top-1 error %", ">oracle error %", ">ECE %"), rows)
    page = found["report"] or "pip install 'confident-mcl[report]', then cmcl report " + str(out)
    typer.echo(f"\noracle: some member is right. top-1: the ensemble is. The report: {page}")
    typer.echo(f"\n{MORE_SEEDS[segmentation]}\n{ECE}")
