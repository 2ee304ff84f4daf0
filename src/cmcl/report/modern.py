"""The figures of the campaign `cmcl reproduce modern`: does CMCL help members that are trained well?"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import altair as alt
import torch
from scipy import stats

from ..networks import NETWORKS
from ..reproduction.cells import MODERN_CELLS, Cell, fills, known_checksums
from ..reproduction.recipes import find
from ..reproduction.record import Record, spread
from .figures import Figure, Panel, Point, series
from .tables import Column, Table, Value, dataset_title, number

METHODS = {
    "single": "one network, 5x the weights",
    "ie": "IE",
    "cmcl": "CMCL",
    "cmcl-sharing": "CMCL with sharing",
}
LEGEND = series(METHODS.values(), {"IE": "ie", "CMCL": "cmcl", METHODS["single"]: "single"})
COLUMNS = {  # of the table beside the figure -> its key in `Record.scores`
    "Top-1, %": "top1",
    "Oracle, %": "oracle",
    "ECE, %": "ece",
    "Scaled ECE, %": "scaled_ece",
    "AUROC": "auroc",
    "Risk at 80 %": "risk",
}
COVERAGE = 80  # percent of the images
CONFIDENCE = 0.95


def error_against_seconds(records: Sequence[Record]) -> Figure | None:
    """Top-1 error against the seconds of training, a line for each method; None without records."""
    points: list[Point] = []
    rows = []
    for cell, found in _measured(records).items():
        errors = spread([record.errors["expected"]["top1"] for record in found])
        seconds, std = fmean(record.seconds for record in found), errors["std"] or 0.0
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
        scores = [{**r.scores, "auroc": r.calibration.get("auroc"), "risk": _risk(r)} for r in found]
        means = [_mean([one.get(key) for one in scores]) for key in COLUMNS.values()]
        rows.append([*_names(cell), *map(number, (*means, seconds)), number(len(found), 0)])
    if not points:
        return None
    caption = "Top-1 error against training time, mean over the seeds; bars: standard deviation."
    numbers = _numbers("modern-seconds", ["Network", "Method", *COLUMNS, "Seconds", "n"], rows)
    x = alt.X("seconds:Q", title="training, s").scale(type="log", nice=False, padding=18)
    y = alt.Y("error:Q", title="top-1 error, %").scale(zero=False)
    return _figure("Error against training time", caption, points, x, y, numbers)


def gain_against_size(records: Sequence[Record]) -> Figure | None:
    """By how many points CMCL's top-1 error is below IE's, against a member's weights; None without both.

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
        ours, theirs = ([r.errors["expected"]["top1"] for r in side] for side in (found, baselines[base]))
        gain, (low, high), p = _difference(theirs, ours)
        size = _weights(base)
        points.append(_about(cell) | {"weights": size, "error": round(gain, 4), "low": low, "high": high})
        counts = Value(f"{len(ours)} and {len(theirs)}")
        rows.append([*_names(cell), number(size, 0), *map(number, (gain, low, high)), number(p, 4), counts])
    if not points:
        return None
    caption = (
        "IE's top-1 error less CMCL's, in points: above 0, CMCL errs less. "
        f"Bars: {CONFIDENCE:.0%} confidence intervals by Welch's t-test over the seeds."
    )
    heads = ["Network", "Method", "Weights of a member", "Gain, points", "Low", "High", "p", "n"]
    x = alt.X("weights:Q", title="weights of a member").scale(type="log", nice=False, padding=18)
    y = alt.Y("error:Q", title="gain, points")
    return _figure("CMCL's gain over IE", caption, points, x, y, _numbers("modern-size", heads, rows))


def _measured(records: Sequence[Record]) -> dict[Cell, list[Record]]:
    """The records of each cell that has any, one for each seed."""
    checksums = known_checksums(records)
    found = {
        cell: {record.seed: record for record in records if fills(record, cell, checksums)}
        for cell in MODERN_CELLS
    }
    return {cell: [seeds[seed] for seed in sorted(seeds)] for cell, seeds in found.items() if seeds}


def _about(cell: Cell) -> Point:
    data = dataset_title(cell.recipe.data)
    kind = cell.recipe.network  # a line joins widths of one
    return {"data": data, "network": cell.where[1], "kind": kind, "method": METHODS[cell.where[2]]}


def _names(cell: Cell) -> list[Value]:
    return [Value(cell.where[1]), Value(METHODS[cell.where[2]])]


def _risk(record: Record) -> float:
    """The error of the most confident predictions."""
    risks = record.calibration["risk_coverage"]
    return risks[len(risks) * COVERAGE // 100 - 1]


def _weights(base: str) -> int:
    """The number of parameters of a member."""
    recipe = find(f"{base}-modern-ie")
    with torch.device("meta"):
        network = NETWORKS[str(recipe.network)](**recipe.network_options)
    return sum(p.numel() for p in network.parameters())


def _difference(
    one: Sequence[float], other: Sequence[float]
) -> tuple[float, tuple[float | None, float | None], float | None]:
    """The difference of two means with its interval and p-value, which need two values on each side."""
    gain = fmean(one) - fmean(other)
    if min(len(one), len(other)) < 2 or len({*one, *other}) == 1:
        return gain, (None, None), None
    test = stats.ttest_ind(one, other, equal_var=False)
    interval = test.confidence_interval(CONFIDENCE)
    return gain, (round(float(interval.low), 4), round(float(interval.high), 4)), float(test.pvalue)


def _mean(values: Sequence[Any]) -> float | None:
    return None if None in values else fmean(values)


def _numbers(id: str, heads: Sequence[str], rows: Sequence[Sequence[Value]]) -> Table:
    numeric = [any(row[i].sort is not None for row in rows) for i in range(len(heads))]
    columns = [Column(head, numeric=flag) for head, flag in zip(heads, numeric, strict=True)]
    return Table(id, "Mean over the seeds", columns, rows, keys=2)


def _figure(title: str, caption: str, points: Sequence[Point], x: Any, y: Any, numbers: Table) -> Figure:
    """A panel for each dataset: points with bars from `low` to `high`, and lines over a network's widths."""
    used = {point["method"] for point in points}
    legend = [one for one in LEGEND if one.name in used]
    names, colours, dashes = zip(*((s.name, f"@{s.colour}", s.dash) for s in legend), strict=True)
    colour = alt.Color("method:N", legend=None).scale(domain=names, range=colours)
    dash = alt.StrokeDash("method:N", legend=None).scale(domain=names, range=dashes)
    panels = []
    for data in dict.fromkeys(point["data"] for point in points):
        own = [point for point in points if point["data"] == data]
        chart = _chart(own).encode(x=x, y=y, color=colour, tooltip=["network:N", "method:N", "error:Q"])
        drawn = chart.mark_line(strokeWidth=1.5).encode(strokeDash=dash, detail="kind:N") + chart.mark_circle(
            size=50, opacity=1
        )
        if known := [point for point in own if point["low"] is not None]:
            bars = _chart(known).mark_rule(strokeWidth=1.5)
            drawn += bars.encode(x=x, y="low:Q", y2="high:Q", color=colour)
        if numbers.id == "modern-size":
            zero = _chart([{"error": 0}]).mark_rule(color="@edge", strokeDash=[3, 3])
            drawn += zero.encode(y="error:Q")
        spec = drawn.properties(height=260).to_dict()
        panels.append(Panel(data, {key: v for key, v in spec.items() if key not in ("config", "$schema")}))
    return Figure(numbers.id, title, caption, panels, numbers, legend=legend)


def _chart(points: Sequence[Point]) -> Any:
    return alt.Chart(alt.Data(values=list(points)))  # type: ignore[no-untyped-call]
