"""The report: what records and run folders tell, as a page, as Markdown, as figures for a paper."""

from collections.abc import Sequence
from pathlib import Path

from .._files import replacing

FORMATS = ("html", "md", "svg", "png", "pdf")


def write(sources: Sequence[str | Path], out: str | Path, *, format: str = "html") -> Path:
    """Write a report and return where it is.

    Args:
        sources: run folders, folders of run folders, or a results folder (one with records/).
        out: the file to write; for figures (svg, png, pdf) a folder that gets a file for each.
        format: "html", "md", "svg", "png" or "pdf".
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}. Got {format!r}.")
    from .gather import gather

    material, out = gather(sources), Path(out)
    if format == "html":
        from .page import render as text_of
    elif format == "md":
        from .markdown import render as text_of
    else:
        from .figures import save

        save(material, out, format)
        return out
    text = text_of(material)
    if not text.strip():
        raise ValueError(
            "runs must have records for tables. Got runs that were not measured: cmcl.record does that; or "
            "write a page (html), which shows how they learned."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as part:
        part.write_text(text, encoding="utf-8")
    return out
