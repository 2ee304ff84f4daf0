"""The colours, once for page, charts and exported figures: tokens such as "@ink" stand for them in a chart.

Texts have a contrast of 4.5 or more on `page`, `panel` and their tints, lines and marks 3 or more.
"""

from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

LIGHT = {
    "page": "#fbfbfa",
    "panel": "#ffffff",
    "ink": "#1c2126",
    "muted": "#5a646e",
    "line": "#dfe3e6",
    "edge": "#848e97",
    "link": "#0b5c9e",
    "good": "#136c3a",
    "good-tint": "#e3f4e9",
    "bad": "#b02a1c",
    "bad-tint": "#fdeae7",
    "open": "#6a5200",
    "open-tint": "#faf1d7",
    "low": "#f2f5f7",
    "high": "#12507f",
    "on-low": "#000000",
    "on-high": "#ffffff",
    "c1": "#0b62a8",
    "c2": "#6b747d",
    "c3": "#c0561b",
    "c4": "#6f4aa8",
    "c5": "#1b7f79",
    "c6": "#a3386f",
    "c7": "#7a6a00",
    "c8": "#3f5bd1",
}
DARK = {
    "page": "#12161a",
    "panel": "#1a1f25",
    "ink": "#e8ebee",
    "muted": "#a3aeb8",
    "line": "#2f3740",
    "edge": "#77828d",
    "link": "#7cbcf2",
    "good": "#7fd6a0",
    "good-tint": "#173224",
    "bad": "#ff9d8e",
    "bad-tint": "#3d1f1b",
    "open": "#e6c66a",
    "open-tint": "#332b13",
    "low": "#232a32",
    "high": "#5098d3",
    "on-low": "#ffffff",
    "on-high": "#000000",
    "c1": "#63b3f5",
    "c2": "#a9b4bf",
    "c3": "#f29a62",
    "c4": "#b99af0",
    "c5": "#56c7bf",
    "c6": "#ef86b9",
    "c7": "#d6c34a",
    "c8": "#93a5ff",
}
TURN = 74  # percent of the way from low to high, from where on-high is easier to read than on-low
COLOURS = [f"c{i}" for i in range(1, 9)]
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 1], [10, 3], [1, 3], [6, 2, 2, 2]]


def config(theme: dict[str, str]) -> dict[str, Any]:
    """Vega's configuration."""
    return {
        "background": None,
        "font": FONT,
        "padding": 2,
        "view": {"stroke": None},
        "axis": {
            "labelColor": theme["muted"],
            "titleColor": theme["muted"],
            "titleFontWeight": 500,
            "titleFontSize": 12,
            "labelFontSize": 11,
            "gridColor": theme["line"],
            "domainColor": theme["edge"],
            "tickColor": theme["edge"],
            "labelLimit": 110,
        },
        "title": {"color": theme["ink"], "fontSize": 13, "fontWeight": 600, "anchor": "start"},
        "legend": {"labelColor": theme["ink"], "titleColor": theme["muted"], "labelFontSize": 11},
        "text": {"color": theme["ink"]},
        "rule": {"color": theme["edge"]},
        "range": {"heatmap": [theme["low"], theme["high"]]},
    }


def filled(value: Any, theme: dict[str, str]) -> Any:
    """A chart with the tokens' colours in their places."""
    if isinstance(value, dict):
        return {key: filled(entry, theme) for key, entry in value.items()}
    if isinstance(value, list):
        return [filled(entry, theme) for entry in value]
    if isinstance(value, str) and value.startswith("@"):
        return theme.get(value[1:], value)
    return value
