"""The figures of the campaign `cmcl reproduce modern`: does CMCL help members that are trained well?"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import altair as alt
import torch

from ..networks import NETWORKS
from ..reproduction.cells import MODERN_CELLS, Cell, Evidence, Records
from ..reproduction.recipes import find
from ..reproduction.record import Record, spread
from ..reproduction.significance import LEVEL, Comparison
from .figures import Figure, Point, chart_of, colour_of, dash_of, numbers_of, panel_of, risk_at, series
from .tables import Value, dataset_title, number

METHODS = {
    "single": "one network, 5x the weights",
    "ie": "IE",
    "cmcl": "CMCL",
    "cmcl-sharing": "CMCL with sharing",
    "cmcl-paper-beta": "CMCL, beta = 0.75",
    "cmcl-sharing-paper-beta": "CMCL with sharing, beta = 0.75",
}
LEGEND = series(METHODS.values(), {"IE": "ie", "CMCL": "cmcl", METHODS["single"]: "single"})
COVERAGE = 80  # percent of the images
COLUMNS = {  # of the table beside the figure -> its key in `_scores`
    "Top-1, %": "top1",
    "Oracle, %": "oracle",
    "ECE, %": "ece",
    "Scaled ECE, %": "scaled_ece",
    "AUROC": "auroc",
    f"Risk at {COVERAGE} %": "risk",
}


def error_against_seconds(records: Records) -> Figure | None:
    """Top-1 error against the seconds of training, a line for each method; None without records."""
    points: list[Point] = []
    rows = []
    for cell, found in _measured(records).items():
        errors = spread([record.scores["top1"] for record in found])
        # the fastest run: the first of a process is compiled, and others may have shared the device
        seconds, std = min(record.seconds for record in found), errors["std"] or 0.0
        points.append(
            {
                **_about(cell),
                "seconds": round(seconds, 3),
                "error": round(errors["mean"], 4),
                "low": round(errors["mean"] - std, 4),
                "high": round(errors["mean"] + std, 4),
                "n": errors["n"],
            }
        )
        columns = zip(*map(_scores, found), strict=True)
        means = [None if None in column else fmean(column) for column in columns]
        rows.append([*_names(cell), *map(number, (*means, seconds)), number(len(found), 0)])
    caption = (
        "Top-1 error, mean over the seeds; bars: standard deviation. Training time: of the fastest run; that "
        "of a single run includes its compilation."
    )
    heads = ["Network", "Method", *COLUMNS, "Seconds", "n"]
    x = alt.X("seconds:Q", title="training, s").scale(type="log", nice=False, padding=18).axis(tickCount=5)
    y = alt.Y("error:Q", title="top-1 error, %").scale(zero=False).axis(tickCount=5)
    return _figure("modern-seconds", "Error against training time", caption, points, x, y, heads, rows)


def gain_against_size(records: Records) -> Figure | None:
    """IE's top-1 error less CMCL's, in points, against a member's weights; None without two sizes.

    The intervals are Welch's for the difference of two means, which needs two seeds of each.
    """
    measured = _measured(records)
    baselines = {cell.where[1]: found for cell, found in measured.items() if cell.where[2] == "ie"}
    points: list[Point] = []
    rows = []
    for cell, found in measured.items():
        _, base, method = cell.where
        if not method.startswith("cmcl") or base not in baselines:
            continue
        pair = Comparison.of(baselines[base], found)
        size, gain = _weights(base), pair.difference
        low = high = p = None
        if pair.interval and min(pair.mine["n"], pair.other["n"]) > 1:
            (low, high), p = (round(end, 4) for end in pair.interval), pair.p_value
        points.append(_about(cell) | {"weights": size, "error": round(gain, 4), "low": low, "high": high})
        counts = Value(f"{pair.other['n']} and {pair.mine['n']}")
        rows.append([*_names(cell), number(size, 0), *map(number, (gain, low, high)), number(p, 4), counts])
    if len({point["weights"] for point in points}) < 2:
        return None
    caption = (
        "IE's top-1 error less CMCL's, in points: above 0, CMCL errs less. "
        f"Bars: {1 - LEVEL:.0%} confidence intervals by Welch's t-test over the seeds."
    )
    heads = ["Network", "Method", "Weights of a member", "Gain, points", "Low", "High", "p", "n"]
    x = alt.X("weights:Q", title="weights of a member").scale(type="log", nice=False, padding=18)
    y = alt.Y("error:Q", title="gain, points")
    return _figure("modern-size", "CMCL's gain over IE", caption, points, x, y, heads, rows)


def _measured(records: Records) -> dict[Cell, list[Record]]:
    """The records of each cell that has any."""
    filling = Evidence.of(records).filling
    return {cell: filling[cell.id] for cell in MODERN_CELLS if filling[cell.id]}


def _scores(record: Record) -> list[float | None]:
    """The values of COLUMNS."""
    more = {"auroc": record.calibration.get("auroc"), "risk": risk_at(record, COVERAGE)}
    return [(record.scores | more).get(key) for key in COLUMNS.values()]


def _about(cell: Cell) -> Point:
    data = dataset_title(cell.recipe.data)
    kind = cell.recipe.network  # a line joins widths of one
    return {"data": data, "network": cell.where[1], "kind": kind, "method": METHODS[cell.where[2]]}


def _names(cell: Cell) -> list[Value]:
    return [Value(cell.where[1]), Value(METHODS[cell.where[2]])]


def _weights(base: str) -> int:
    """The number of parameters of a member."""
    recipe = find(f"{base}-modern-ie")
    with torch.device("meta"):
        network = NETWORKS[str(recipe.network)](**recipe.network_options)
    return sum(p.numel() for p in network.parameters())


def _figure(
    id: str,
    title: str,
    caption: str,
    points: Sequence[Point],
    x: Any,
    y: Any,
    heads: Sequence[str],
    rows: Sequence[Sequence[Value]],
) -> Figure | None:
    """A panel for each dataset: points with bars from `low` to `high`, and lines over a network's widths."""
    used = {point["method"] for point in points}
    legend = [one for one in LEGEND if one.name in used]
    colour, dash = colour_of("method", legend), dash_of("method", legend)
    panels = []
    for data in dict.fromkeys(point["data"] for point in points):
        own = [point for point in points if point["data"] == data]
        chart = chart_of(own).encode(x=x, y=y, color=colour, tooltip=["network:N", "method:N", "error:Q"])
        lines = chart.mark_line(strokeWidth=1.5).encode(strokeDash=dash, detail="kind:N")
        drawn = lines + chart.mark_circle(size=50, opacity=1)
        if known := [point for point in own if point["low"] is not None]:
            bars = chart_of(known).mark_rule(strokeWidth=1.5)
            drawn += bars.encode(x=x, y="low:Q", y2="high:Q", color=colour)
        if id == "modern-size":
            zero = chart_of([{"error": 0}]).mark_rule(color="@edge", strokeDash=[3, 3])
            drawn += zero.encode(y="error:Q")
        panels.append(panel_of(data, drawn, 260))
    numbers = numbers_of(id, "Mean over the seeds", heads, rows, keys=2)
    return Figure(id, title, caption, panels, numbers, legend=legend) if panels else None
