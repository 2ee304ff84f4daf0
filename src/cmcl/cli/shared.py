"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Root = Annotated[
    Path | None, typer.Option(help="Folder that holds the sets. Default: $CMCL_DATA, then ~/.cache/cmcl.")
]
