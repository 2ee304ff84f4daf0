"""The arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a saved ensemble.")]
Root = Annotated[
    Path | None, typer.Option(help="Folder that holds the sets. Default: $CMCL_DATA, then ~/.cache/cmcl.")
]
Seed = Annotated[int, typer.Option(help="Of weights, data order, masks and labels.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")]
Precision = Annotated[str, typer.Option(help="auto, bf16 or float32.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Results = Annotated[Path, typer.Option(help="Folder whose records/ has the records.")]
Runs = Annotated[Path, typer.Option(help="Folder of run folders.")]
Data = Annotated[str | None, typer.Option("--data", metavar="SET", help="Instead of the run's own set.")]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="Of --data, such as size=[32,32]."),
]
OwnNetwork = Annotated[
    str | None,
    typer.Option("--network", metavar="MODULE:FUNCTION", help="Builds a member, if it is your own network."),
]
OwnOutput = Annotated[
    str | None,
    typer.Option("--output", metavar="MODULE:FUNCTION", help="Picks the logits, if it was saved with one."),
]
Budget = Annotated[
    str | None, typer.Option(metavar="TIME", help="Such as 25m: then save, and leave with exit code 3.")
]
