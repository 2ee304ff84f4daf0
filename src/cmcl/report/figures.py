"""The figures as files for a paper: SVG, PNG or PDF, drawn by vl-convert."""

from pathlib import Path
from typing import Any

from .drawing import Figure, vega_lite_version, vl_convert
from .gather import Material
from .sections import sections
from .themes import LIGHT, config, filled

WIDTH = 260  # of a panel, in points
COLUMNS = 3


def save(material: Material, folder: Path, format: str) -> list[Path]:
    """Write a file for each figure and return their paths.

    Args:
        material: what there is.
        folder: where to; it is made if needed.
        format: "svg", "png" or "pdf".
    """
    found = [figure for section in sections(material, []) for figure in section.figures]
    if not found:
        raise ValueError(
            "sources must hold something to draw. Got no figure of the paper, and no run that is finished "
            "and measured on all test images."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return [_save(figure, folder / f"{figure.id}.{format}") for figure in found]


def _save(figure: Figure, path: Path) -> Path:
    spec = filled(_joined(figure), LIGHT)
    more = {"vl_version": vega_lite_version()} | ({"scale": 2} if path.suffix == ".png" else {})
    content = getattr(vl_convert(), f"vegalite_to_{path.suffix[1:]}")(spec, **more)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _joined(figure: Figure) -> dict[str, Any]:
    """All panels in one chart, the legend under the first."""
    panels = [{**panel.spec, "width": WIDTH, "title": panel.title} for panel in figure.panels]
    if figure.legend:
        panels[0] = _with_legend(panels[0])
    style = config(LIGHT) | {"background": "white"}
    apart = {"scale": {"color": "independent", "strokeDash": "independent"}}  # a legend is its panel's own
    return {"concat": panels, "columns": COLUMNS, "config": style, "resolve": apart}


def _with_legend(value: Any) -> Any:
    """The chart with a legend of its series, which the page draws itself."""
    if isinstance(value, list):
        return [_with_legend(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    below = (
        {"legend": {"title": None, "orient": "bottom", "symbolOpacity": 1}} if _names_series(value) else {}
    )
    return {key: _with_legend(entry) for key, entry in value.items()} | below


def _names_series(channel: dict[str, Any]) -> bool:
    """Whether it is a colour or a dash for names, not a size or a shade."""
    return channel.get("type") == "nominal" and "domain" in (channel.get("scale") or {})
