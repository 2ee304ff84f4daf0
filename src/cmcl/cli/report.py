"""`cmcl report`: a page, tables or figures from records."""

from pathlib import Path
from typing import Annotated

import typer

from .shared import check_writable, check_writable_folder

FORMATS = {"html": "report.html", "md": "report.md", "svg": "figures", "png": "figures", "pdf": "figures"}
PLACES = ("results", "runs", "cmcl-demo")  # where records are looked for


def report(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUNS|results", help="Run folders, folders of them, or a folder with records/."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File, or folder for figures; else report.html and so on."),
    ] = None,
    format: Annotated[str, typer.Option(help=f"{', '.join(FORMATS)}.")] = "html",
) -> None:
    """Write a page, tables or figures from records."""
    from ..data.registry import nearest

    if format not in FORMATS:
        raise ValueError(
            f"--format must be one of {', '.join(FORMATS)}. Got {format!r}. {nearest(format, list(FORMATS))}"
        )
    found, place = _existing(sources or []), out or Path(FORMATS[format])
    if format in {"html", "md"}:
        check_writable(place, "--out", replaced=True)
    else:
        check_writable_folder(place, "--out")
    from ..report import write

    typer.echo(write(found, place, format=format))


def _existing(sources: list[Path]) -> list[Path]:
    """The folders, all there; without any, the first usual one."""
    from ..data.registry import nearest

    if not sources:
        sources = [Path(name) for name in PLACES if Path(name).is_dir()][:1]
        if not sources:
            places = " or ".join(f"{name}/" for name in PLACES)
            raise FileNotFoundError(f"here must be {places} to report on. Got none. Name a run's folder.")
    for path in sources:
        if not path.is_dir():
            beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
            raise FileNotFoundError(
                f"{path} must be a folder with records. {nearest(path.name, sorted(beside))}"
            )
    return sources
