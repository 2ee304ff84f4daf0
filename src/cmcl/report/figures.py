"""The figures of page, files and documents: altair in, Vega-Lite out, with the numbers of each as a table.

A figure is a row of small panels. Colours are tokens of `theme`. M members, C classes.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from ..data.registry import DATASETS
from ..reproduction.cells import CELLS, Evidence
from ..reproduction.claims import median_entropy, pooled, specialisation
from ..reproduction.record import Record
from .load import METHODS, Run
from .tables import Column, Table, Value, dataset_title, number
from .theme import COLOURS, CONFIG, DASHES, LIGHT, TURN, VARIABLES, themed

Point = dict[str, Any]
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])  # as vl-convert names it
TICKS = [0, 1, 2, 5, 10, 20, 50, 100]
ROW, TALLEST = 24, 720  # pixels: a class of a heat map, and all of them
WIDTH, COLUMNS = 260, 3  # of the panels in a file
PAGE_WIDTH = 330  # of a panel in a page, which scales it
FILES = (".svg", ".png", ".pdf")
EPOCHS = 120  # points of a curve at most
FEWEST = 5  # images of a bin whose accuracy is drawn
ROLES = re.compile(r' (?:role="graphics-[a-z]+"|aria-roledescription="[^"]*"|aria-hidden="true")')


@dataclass(frozen=True)
class Series:
    """A name with its colour and dash."""

    name: str
    colour: str  # a token
    dash: list[int]


@dataclass(frozen=True)
class Panel:
    """One small chart."""

    title: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """Panels with a common legend, and their numbers."""

    id: str
    title: str
    caption: str
    panels: Sequence[Panel]
    numbers: Table
    legend: Sequence[Series] = ()
    scale: tuple[str, str] | None = None  # what the lightest and the darkest colour mean


def heat_maps(id: str, title: str, runs: Sequence[Run], classes: Sequence[str] = ()) -> Figure:
    """Figure 1: each member's accuracy on each class."""
    rows = [[Value(run.title), number(specialisation(run.measured), 1)] for run in runs]
    numbers = numbers_of(
        id, "Points between the best and the worst member of a class, mean", ["Method", "Points"], rows
    )
    caption = "Accuracy of each member on each class, in percent. Specialists have light and dark cells."
    panels = [_heat_map(run, classes) for run in runs]
    return Figure(id, title, caption, panels, numbers, scale=("0 %", "100 %"))


def _heat_map(run: Run, classes: Sequence[str]) -> Panel:
    known = DATASETS[run.data].classes if run.data in DATASETS else ()
    count = len(run.measured.classwise[0])
    labels = [*(classes or known)[:count], *map(str, range(len(classes or known), count))]
    points = [
        {"class": labels[c], "member": m, "accuracy": value}
        for m, row in enumerate(run.measured.classwise)
        for c, value in enumerate(row)
        if value is not None
    ]
    base = chart_of(points).encode(
        x=alt.X("member:O", title="member", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("class:N", title=None, sort=labels, axis=alt.Axis(labelOverlap=True)),
    )
    cells = _shaded(base, "accuracy")
    if count * ROW > TALLEST:  # the numbers do not fit into their cells
        return panel_of(run.title, cells, TALLEST)
    ink = alt.condition(f"datum.accuracy > {TURN}", alt.value("@on-high"), alt.value("@on-low"))
    text = base.mark_text(fontSize=11, aria=False)
    text = text.encode(text=alt.Text("accuracy:Q", format=".0f"), color=ink)
    return panel_of(run.title, cells + text, count * ROW)


def _shaded(base: Any, field: str, **more: Any) -> Any:
    """Cells from light to dark, for values from 0 to 100."""
    scale = alt.Scale(domain=[0, 100], range=[0, 1])
    dark = base.mark_rect(color="@high").encode(opacity=alt.Opacity(f"{field}:Q", scale=scale, legend=None))
    return base.mark_rect(color="@low", aria=False).encode(**more) + dark


GROUPS = {"specialised": "own classes", "other": "other classes", "test": "test images", "ood": "OOD"}
AVERAGED = {"averaged": "test images", "averaged_ood": "OOD"}


def entropies(id: str, title: str, runs: Sequence[Run], *, averaged: Container[str | None] = ()) -> Figure:
    """Figure 2: entropy of the predictions for own classes, other classes and OOD images.

    `averaged` are methods whose averaged prediction is shown instead, as in the paper for IE.
    """
    groups = [_groups(run, AVERAGED if run.method in averaged else GROUPS) for run in runs]
    legend = series(name for found in groups for name in found)
    panels, rows = [], []
    for run, found in zip(runs, groups, strict=True):
        largest = run.measured.entropy["largest"]
        points = [point for name, counts in found.items() for point in _steps(name, counts, largest)]
        panels.append(panel_of(run.title, _histograms(points, legend, largest), 170))
        rows += [
            [Value(run.title), Value(name), number(100 * (median_entropy(counts) or 0), 0)]
            for name, counts in found.items()
        ]
    heads = ["Method", "Images", "Median, %"]
    numbers = numbers_of(id, "Median entropy in percent of the largest", heads, rows, keys=2)
    caption = "Entropy of the predictions of all members: 0 is certain, the largest is uniform."
    if any(run.method in averaged for run in runs):
        caption += " For the independent ensemble, of the averaged prediction."
    if any(GROUPS["specialised"] in found for found in groups):
        caption += " Own classes: those on which a member's accuracy is above 90 %."
    return Figure(id, title, caption, panels, numbers, legend=legend)


def _groups(run: Run, groups: Mapping[str, str]) -> dict[str, list[float]]:
    """The histograms of the groups that have any predictions, by name."""
    ood = dataset_title(run.measured.ood)
    found = {
        f"{name} ({ood})" if name == "OOD" else name: pooled(run.measured, k) for k, name in groups.items()
    }
    return {name: counts for name, counts in found.items() if sum(counts)}


def _steps(name: str, histogram: Sequence[float], largest: float) -> list[Point]:
    width, unit = largest / len(histogram), 100 / sum(histogram)
    points = [
        {"from": round(i * width, 3), "group": name, "percent": round(n * unit, 2)}
        for i, n in enumerate(histogram)
    ]
    return [*points, points[-1] | {"from": round(largest, 3)}]  # a step ends where the next would begin


def _histograms(points: list[Point], legend: Sequence[Series], largest: float) -> Any:
    steps = chart_of(points).encode(
        x=alt.X("from:Q", title="entropy, nats").scale(domain=[0, largest]).axis(grid=False, tickCount=5),
        y=_percent("percent", "predictions, %", points).stack(None),
        color=colour_of("group", legend),
    )
    line = steps.mark_line(interpolate="step-after", strokeWidth=2).encode(
        strokeDash=dash_of("group", legend)
    )
    return steps.mark_area(interpolate="step-after", opacity=0.15) + line


def reliability(id: str, title: str, runs: Sequence[Run]) -> Figure:
    """Accuracy against confidence of the averaged prediction, before and after temperature scaling."""
    legend, panels = _legend(runs), []
    for name, key in (("as trained", "reliability"), ("after temperature scaling", "scaled_reliability")):
        points = [
            {"run": run.title, "label": run.label, "images": n, "confidence": c, "accuracy": a}
            for run in runs
            for bins in [dict[str, Any](run.measured.calibration).get(key)]
            if bins
            for n, c, a in zip(bins["count"], bins["confidence"], bins["accuracy"], strict=True)
            if n >= FEWEST and c is not None and a is not None
        ]
        if points:
            panels.append(panel_of(name, _calibrated(points, legend), 240))
    columns = {"ece": "ECE, %", "temperature": "Temperature", "scaled_ece": "Scaled ECE, %"}
    rows = []
    for run in runs:
        found: Mapping[str, Any] = run.measured.calibration
        rows.append([Value(run.title), *(number(found.get(key)) for key in columns)])
    name = "Expected calibration error before and after temperature scaling"
    numbers = numbers_of(id, name, ["Method", *columns.values()], rows)
    caption = (
        "Confidence of the averaged prediction against its accuracy; the size of a circle is the number of "
        f"images, at least {FEWEST}. On the diagonal it is calibrated, above underconfident, below "
        "overconfident."
    )
    if not any("scaled_ece" in run.measured.calibration for run in runs):
        caption += (
            " Temperature scaling fixes both: train with held-out data (validation), or run cmcl calibrate."
        )
    return Figure(id, title, caption, panels, numbers, legend=legend)


def _calibrated(points: list[Point], legend: Sequence[Series]) -> Any:
    diagonal = chart_of([{"x": 0, "y": 0}, {"x": 100, "y": 100}]).encode(x="x:Q", y="y:Q")
    x = alt.X("confidence:Q", title="confidence, %", scale=alt.Scale(domain=[0, 100]))
    y = alt.Y("accuracy:Q", title="accuracy, %", scale=alt.Scale(domain=[0, 100]))
    size = alt.Size("images:Q", legend=None, scale=alt.Scale(range=[15, 160]))
    circles = (
        chart_of(points).mark_circle(opacity=0.9).encode(x=x, y=y, color=colour_of("run", legend), size=size)
    )
    line = diagonal.mark_line(color="@edge", strokeWidth=1, aria=False)
    return line + _curves(points, legend, x=x).encode(y=y) + circles


def risk_coverage(id: str, title: str, runs: Sequence[Run]) -> Figure:
    """Error of the most confident predictions against their number: selective prediction."""
    points: list[Point] = []
    rows, legend, shown = [], _legend(runs), (50, 80, 90, 100)
    for run in runs:
        risks = run.measured.calibration["risk_coverage"]
        points += [
            {"run": run.title, "label": run.label, "coverage": 100 * i // len(risks), "error": round(risk, 3)}
            for i, risk in enumerate(risks, start=1)
        ]
        rows.append([Value(run.title), *(number(risk_at(run.measured, percent)) for percent in shown)])
    chart = _curves(points, legend, x=alt.X("coverage:Q", title="coverage, %", axis=alt.Axis(tickCount=5)))
    heads = ["Method", *(f"{percent} % coverage" for percent in shown)]
    numbers = numbers_of(id, "Error of the most confident predictions, %", heads, rows)
    caption = "Risk: error of the most confident predictions. Coverage: the fraction of images predicted."
    panel = panel_of("", chart.encode(y=_percent("error", "risk, %", points)), 240)
    return Figure(id, title, caption, [panel], numbers, legend=legend)


def risk_at(record: Record, coverage: int) -> float:
    """The error of the most confident predictions, a percentage of all."""
    risks = record.calibration["risk_coverage"]
    return risks[max(0, round(len(risks) * coverage / 100) - 1)]


QUANTITIES = {  # of telemetry
    "loss": "training loss",
    "top1": "top-1 error, %",
    "oracle": "oracle error, %",
    "specialist_entropy": "entropy of specialists, nats",
    "nonspecialist_entropy": "entropy of non-specialists, nats",
}


def training(id: str, title: str, runs: Sequence[Run]) -> Figure:
    """Loss, errors and entropies over the epochs."""
    legend, panels = _legend(runs), []
    for key, name in QUANTITIES.items():
        curves = [_curve(run, key) for run in runs]
        # in an independent ensemble all members are specialists: the others have no entropy
        points = [point for curve in curves if any(p["value"] for p in curve) for point in curve]
        if len({point["epoch"] for point in points}) > 1:
            x = alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1))
            y = alt.Y("value:Q", title=None)
            chart = _curves(points, legend, x=x)
            y = _percent("value", None, points) if name.endswith("error, %") else y
            panels.append(panel_of(name, chart.encode(y=y), 170))
    rows = []
    for run in runs:
        last, top1 = run.rows[-1], [row.top1 for row in run.rows if row.top1 is not None]
        dead = ", ".join(map(str, sorted({member for row in run.rows for member in row.dead_members})))
        ending = [number(last.epoch, 0), number(last.loss, 4), number(top1[-1] if top1 else None)]
        rows.append([Value(run.label), *ending, Value(dead or "none")])
    heads = ["Run", "Epochs", "Last loss", "Last top-1, %", "Dead members"]
    numbers = numbers_of(id, "After the last epoch", heads, rows)
    caption = "Specialists of an example learn its label; the others learn a uniform prediction."
    return Figure(id, title, caption, panels, numbers, legend=legend)


def _curve(run: Run, key: str) -> list[Point]:
    rows = [row for row in run.rows if getattr(row, key) is not None]
    return [
        {"run": run.title, "label": run.label, "epoch": row.epoch, "value": round(getattr(row, key), 4)}
        for row in thinned(rows, EPOCHS)
    ]


FIGURE4 = (
    ("fig4a", "top1", "a: CIFAR-10, ResNet-20, top-1 error, %"),
    ("fig4bc", "picked", "b: iCoseg, picked error, %"),
    ("fig4bc", "top1", "b: iCoseg, top-1 error, %"),
    ("fig4bc", "oracle", "c: iCoseg, oracle error, %"),
)


def against_members(id: str, title: str, evidence: Evidence) -> Figure | None:
    """Figure 4: errors against M; None as long as no curve has two points."""
    panels, rows = [], []
    for where, key, name in FIGURE4:
        points = [
            {
                "run": f"{METHODS[method]}{' with sharing' if extra else ''}",
                "label": cell.where[1],
                "members": int(cell.where[2].removeprefix("m")),
                "error": round(ours[key]["mean"], 3),
                "n": ours[key]["n"],
            }
            for cell in CELLS
            if cell.where[0] == where and (ours := evidence.cells[cell.id]["ours"])
            for method, _, extra in [cell.where[1].partition("-")]
        ]
        if len({point["members"] for point in points}) > 1:
            x = alt.X("members:O", title="members", axis=alt.Axis(labelAngle=0))
            y = alt.Y("error:Q", title=None, scale=alt.Scale(zero=False))
            panels.append(panel_of(name, _curves(points, METHOD_SERIES, x=x, point=True).encode(y=y), 200))
        rows += [
            [Value(name), Value(p["run"]), number(p["members"], 0), number(p["error"]), number(p["n"], 0)]
            for p in points
        ]
    if not panels:
        return None
    heads = ["Panel", "Method", "Members", "Error, %", "n"]
    numbers = numbers_of(id, "Measured so far", heads, rows, keys=3)
    caption = "Error against the number of members, mean over the seeds."
    legend = [one for one in METHOD_SERIES if any(row[1].text == one.name for row in rows)]
    return Figure(id, title, caption, panels, numbers, legend=legend)


def tuning(result: Mapping[str, Any]) -> Figure:
    """The rounds of `cmcl tune`: held-out error by beta and K; the kept candidates have a frame."""
    panels, rows = [], []
    betas = sorted({row["beta"] for row in result["rungs"][0]["rows"]})
    for rung in result["rungs"]:
        highest = max(row["held_out"] for row in rung["rows"]) or 1
        # at most TURN percent dark, so that every number can be read
        points = [{**row, "shade": TURN * row["held_out"] / highest} for row in rung["rows"]]
        base = chart_of(points).encode(
            x=alt.X("beta:O", title="beta", scale=alt.Scale(domain=betas), axis=alt.Axis(labelAngle=0)),
            y=alt.Y("overlap:O", title="K", sort="descending"),
        )
        frame = base.mark_rect(strokeWidth=2.5, filled=False).encode(
            stroke=alt.condition("datum.kept", alt.value("@c3"), alt.value("@panel"))
        )
        text = base.mark_text(fontSize=11).encode(
            text=alt.Text("held_out:Q", format=".1f"), color=alt.value("@on-low")
        )
        cells = _shaded(base, "shade") + frame + text
        panels.append(panel_of(rung["length"], cells, 40 * len({row["overlap"] for row in points})))
        keys = ("beta", "overlap", "held_out")
        rows += [[Value(rung["length"]), *(number(row[key]) for key in keys)] for row in points]
    heads = ["Round", "Beta", "K", "Held-out error, %"]
    numbers = numbers_of("tuning", "Held-out errors", heads, rows, keys=3)
    title = f"{result['recipe']}: chosen beta {result['beta']:g}, K {result['overlap']}"
    return Figure("tuning", title, "Held-out error in percent.", panels, numbers)


def numbers_of(
    id: str, caption: str, heads: Sequence[str], rows: Sequence[Sequence[Value]], keys: int = 1
) -> Table:
    """The numbers of the figure `id`; a column is numeric if its values can be sorted."""
    numeric = [any(row[i].sort is not None for row in rows) for i in range(len(heads))]
    columns = [Column(head, numeric=flag) for head, flag in zip(heads, numeric, strict=True)]
    return Table(f"{id}-numbers", caption, columns, rows, keys=keys)


def series(labels: Iterable[str], methods: Mapping[str, str | None] | None = None) -> list[Series]:
    """A colour for each name: its method's if no other name has that method, else the next free one."""
    used = {name: (methods or {}).get(name) for name in labels}
    order, count = ("cmcl", "ie", "mcl", "single"), Counter(used.values())
    fixed = {name: (order.index(m), 0) for name, m in used.items() if m in order and count[m] == 1}
    free = [i for i in range(len(COLOURS)) if (i, 0) not in fixed.values()]
    # once all colours are in use they repeat with another dash
    others = ((i, turn) for turn in range(len(used)) for i in free)
    places = {name: fixed[name] if name in fixed else next(others) for name in used}
    return [Series(name, COLOURS[i], DASHES[(i + turn) % len(DASHES)]) for name, (i, turn) in places.items()]


METHOD_SERIES = series(("CMCL", "IE", "MCL", "IE with sharing"), {"CMCL": "cmcl", "IE": "ie", "MCL": "mcl"})


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def check_file(path: Path) -> None:
    """Raise unless `save` can write a file of this name; ask before hours of work."""
    if path.suffix not in FILES:
        raise ValueError(f"a figure must be {', '.join(FILES)}. Got {path.name!r}.")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as .svg, .png or .pdf."""
    check_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scale = {"scale": 2} if path.suffix == ".png" else {}
    draw = getattr(vl_convert, f"vegalite_to_{path.suffix[1:]}")
    content = draw(joined(figure), vl_version=VEGA_LITE, **scale)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def inline_svg(panel: Panel) -> str:
    """A panel for a page, whose theme it follows; `data-tip` describes each mark."""
    fit = {"width": PAGE_WIDTH, "autosize": {"type": "fit-x", "contains": "padding"}, "config": CONFIG}
    text = vl_convert.vegalite_to_svg(themed(panel.spec | fit, VARIABLES), vl_version=VEGA_LITE)
    return ROLES.sub("", text).replace(" aria-label=", " data-tip=")


def joined(figure: Figure) -> dict[str, Any]:
    """All panels in one chart in the light theme, with the legend under the first."""
    panels = [{**panel.spec, "width": WIDTH, "title": panel.title} for panel in figure.panels]
    if figure.legend:
        panels[0] = _with_legend(panels[0])
    style = CONFIG | {"background": "white"}
    resolve = {"scale": {"color": "independent", "strokeDash": "independent"}}
    whole = {"concat": panels, "columns": COLUMNS, "config": style, "resolve": resolve}
    found: dict[str, Any] = themed(whole, LIGHT)
    return found


def _with_legend(value: Any) -> Any:
    """The chart with a legend for colours and dashes of names."""
    if isinstance(value, list):
        return [_with_legend(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    named = value.get("type") == "nominal" and "domain" in (value.get("scale") or {})
    below = {"legend": {"title": None, "orient": "bottom", "symbolOpacity": 1}} if named else {}
    return {key: _with_legend(entry) for key, entry in value.items()} | below


def _legend(runs: Sequence[Run]) -> list[Series]:
    return series([run.title for run in runs], {run.title: run.method for run in runs})


def chart_of(points: Sequence[Point]) -> Any:
    """A chart of these points, without marks yet."""
    return alt.Chart(alt.Data(values=list(points)))  # type: ignore[no-untyped-call]


def _curves(points: Sequence[Point], legend: Sequence[Series], x: Any, *, point: bool = False) -> Any:
    """A line for each label in the colour and dash of its run."""
    lines = chart_of(points).mark_line(strokeWidth=2, point=point)
    return lines.encode(
        x=x, color=colour_of("run", legend), strokeDash=dash_of("run", legend), detail="label:N"
    )


def colour_of(field: str, legend: Sequence[Series]) -> Any:
    """The colours of a field's names."""
    scale = alt.Scale(domain=[s.name for s in legend], range=[f"@{s.colour}" for s in legend])
    return alt.Color(f"{field}:N", scale=scale, legend=None)  # the page has its own legend


def dash_of(field: str, legend: Sequence[Series]) -> Any:
    """The dashes of a field's names."""
    scale = alt.Scale(domain=[s.name for s in legend], range=[s.dash for s in legend])
    return alt.StrokeDash(f"{field}:N", scale=scale, legend=None)


def _percent(field: str, title: str | None, points: Sequence[Point]) -> Any:
    """A vertical axis that widens small percentages: errors of methods differ by a factor of a hundred."""
    highest = max((point[field] for point in points), default=0)
    top = next((tick for tick in TICKS if tick >= highest), TICKS[-1])
    scale = alt.Scale(type="symlog", constant=1, domain=[0, top], nice=False)
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(values=[t for t in TICKS if t <= top]))


def panel_of(title: str, chart: Any, height: float) -> Panel:
    """A panel with a chart, without altair's own configuration."""
    spec = chart.properties(height=height).to_dict()
    return Panel(title, {key: value for key, value in spec.items() if key not in ("config", "$schema")})
