"""The report: records and run folders as an HTML page, as Markdown, or as figures for a paper."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .._files import replacing
from .._messages import needing_extra

FORMATS = ("html", "md", "svg", "png", "pdf")
EXTRA = {"altair", "jinja2", "vl_convert"}  # Markdown needs none of them


def write(sources: Sequence[str | Path], out: str | Path, *, format: str = "html") -> Path:
    """Write a report and return its path.

    Args:
        sources: run folders, folders of run folders, or a results folder (one with records/).
        out: the file to write; for figures (svg, png, pdf) a folder that gets a file for each.
        format: "html", "md", "svg", "png" or "pdf". All but "md" need the extra `report`.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}. Got {format!r}.")
    from . import load, markdown

    inputs, out = load.load(sources), Path(out)
    if format in ("svg", "png", "pdf"):
        extra("page").save_figures(inputs, out, format)
        return out
    text = markdown.render(inputs) if format == "md" else extra("page").render(inputs)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as part:
        part.write_text(text, encoding="utf-8")
    return out


def extra(name: str) -> Any:
    """A module of this package that needs the extra `report`; raises `ImportError` with a hint."""
    with needing_extra("report", *EXTRA):
        return import_module(f"{__name__}.{name}")
