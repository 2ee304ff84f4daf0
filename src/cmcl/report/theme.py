"""The palette of page, documents, charts and exported figures. In a chart, tokens such as "@ink" are colours.

Texts have a contrast of 4.5 or more on `page`, `panel` and their tints, lines and marks 3 or more.
"""

from collections.abc import Mapping
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

TOKENS = {  # token: (light, dark)
    "page": ("#fbfbfa", "#12161a"),
    "panel": ("#ffffff", "#1a1f25"),
    "ink": ("#1c2126", "#e8ebee"),
    "muted": ("#5a646e", "#a3aeb8"),
    "line": ("#dfe3e6", "#2f3740"),
    "edge": ("#848e97", "#77828d"),
    "link": ("#0b5c9e", "#7cbcf2"),
    "good": ("#136c3a", "#7fd6a0"),
    "good-tint": ("#e3f4e9", "#173224"),
    "bad": ("#b02a1c", "#ff9d8e"),
    "bad-tint": ("#fdeae7", "#3d1f1b"),
    "open": ("#6a5200", "#e6c66a"),
    "open-tint": ("#faf1d7", "#332b13"),
    "low": ("#f2f5f7", "#232a32"),
    "high": ("#12507f", "#5098d3"),
    "on-low": ("#000000", "#ffffff"),
    "on-high": ("#ffffff", "#000000"),
    "c1": ("#0b62a8", "#63b3f5"),
    "c2": ("#6b747d", "#a9b4bf"),
    "c3": ("#c0561b", "#f29a62"),
    "c4": ("#6f4aa8", "#b99af0"),
    "c5": ("#1b7f79", "#56c7bf"),
    "c6": ("#a3386f", "#ef86b9"),
    "c7": ("#7a6a00", "#d6c34a"),
    "c8": ("#3f5bd1", "#93a5ff"),
}
LIGHT, DARK = ({token: pair[i] for token, pair in TOKENS.items()} for i in (0, 1))
VARIABLES = {token: f"var(--{token})" for token in TOKENS}  # charts in a page follow its theme
TURN = 74  # percent of the way from low to high, from where on-high is easier to read than on-low
COLOURS = [f"c{i}" for i in range(1, 9)]
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 1], [10, 3], [1, 3], [6, 2, 2, 2]]


def variables(theme: Mapping[str, str]) -> str:
    """The declarations of a style sheet that set the tokens: "--ink: #1c2126; ..."."""
    return " ".join(f"--{token}: {colour};" for token, colour in theme.items())


CONFIG = {  # of Vega
    "background": None,
    "font": FONT,
    "padding": 2,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "@muted",
        "titleColor": "@muted",
        "titleFontWeight": 500,
        "titleFontSize": 12,
        "labelFontSize": 11,
        "gridColor": "@line",
        "domainColor": "@edge",
        "tickColor": "@edge",
        "labelLimit": 110,
    },
    "title": {"color": "@ink", "fontSize": 13, "fontWeight": 600, "anchor": "start"},
    "legend": {"labelColor": "@ink", "titleColor": "@muted", "labelFontSize": 11},
    "text": {"color": "@ink"},
    "rule": {"color": "@edge"},
}


def themed(value: Any, theme: Mapping[str, str]) -> Any:
    """A chart with its tokens replaced by colours of the theme."""
    if isinstance(value, dict):
        return {key: themed(entry, theme) for key, entry in value.items()}
    if isinstance(value, list):
        return [themed(entry, theme) for entry in value]
    if isinstance(value, str) and value.startswith("@"):
        return theme.get(value[1:], value)
    return value
