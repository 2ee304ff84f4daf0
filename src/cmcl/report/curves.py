"""Charts of things that change: over a run's epochs, and with the number of members. M members, C classes."""

from collections.abc import Sequence
from typing import Any

from ..reproduction.cells import CELLS, Evidence
from .drawing import Figure, Panel, Point, Series, altair, colour, dash, number, panel, percent, series
from .gather import Run
from .tables import Column, Table, Value
from .words import METHODS, method_of

QUANTITIES = {  # of telemetry
    "loss": "training loss",
    "top1": "top-1 error, %",
    "oracle": "oracle error, %",
    "winners_entropy": "entropy of the winners, nats",
    "losers_entropy": "entropy of the losers, nats",
}
MOST_POINTS = 24_000  # of all maps of who wins what together: about 1 MB


def training(id: str, title: str, runs: Sequence[Run]) -> Figure:
    """Loss, errors and entropies over the epochs."""
    methods = {run.name: method_of(run.record.recipe) for run in runs if run.record}
    legend = series([run.name for run in runs], methods)
    panels = []
    for key, name in QUANTITIES.items():
        curves = [_curve(run, key) for run in runs]
        # losers without entropy are no losers: in an independent ensemble there are none
        points = [point for curve in curves if any(p["value"] for p in curve) for point in curve]
        if len({point["epoch"] for point in points}) > 1:
            panels.append(_line_panel(name, points, legend, errors=name.endswith("%")))
    columns = [Column("Run", numeric=False), Column("Epochs"), Column("Last loss"), Column("Last top-1, %")]
    numbers = Table(f"{id}-numbers", "After the last epoch", columns, [_ending(run) for run in runs])
    caption = (
        "Winners are the members that learn an example, losers those that are to stay silent on it. "
        "Errors are on a scale that widens the small ones."
    )
    return Figure(id, title, caption, panels, numbers, legend=legend)


def _curve(run: Run, key: str) -> list[Point]:
    rows = [row for row in run.rows if row.get(key) is not None]
    return [
        {"run": run.name, "label": run.label, "epoch": row["epoch"], "value": round(row[key], 4)}
        for row in _thinned(rows, 120)
    ]


def _line_panel(name: str, points: list[Point], legend: Sequence[Series], *, errors: bool) -> Panel:
    alt = altair()
    y = percent("value", None, [p["value"] for p in points]) if errors else alt.Y("value:Q", title=None)
    chart = (
        alt.Chart(alt.Data(values=points))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1)),
            y=y,
            color=colour("run", legend),
            strokeDash=dash("run", legend),
            detail="label:N",
            tooltip=["label:N", "epoch:Q", alt.Tooltip("value:Q", title=name)],
        )
    )
    return panel(name, chart, 190)


def _ending(run: Run) -> list[Value]:
    last = run.rows[-1]
    top1 = next((row["top1"] for row in reversed(run.rows) if row.get("top1") is not None), None)
    loss = last.get("loss")
    return [
        Value(run.label),
        number(last["epoch"], 0),
        Value("–") if loss is None else number(loss, 4),
        Value("–") if top1 is None else number(top1, 2),
    ]


def wins(id: str, title: str, run: Run, runs: int) -> Figure:
    """Who learns what over time: by member and class, or by member where there are no classes.

    Args:
        id: of the figure.
        title: of the figure.
        run: whose telemetry.
        runs: so many share the room that there is.
    """
    by_class = [row for row in run.rows if row.get("win_rates_by_class")]
    grids = [(row["epoch"], row["win_rates_by_class"]) for row in by_class]
    shape = {(len(rates), len(rates[0])) for _, rates in grids}
    if len(shape) == 1 and len(grids) > 1:
        m, c = shape.pop()
        grids = _thinned(grids, max(6, MOST_POINTS // (runs * m * c)))
        panels = [_class_panel(member, grids, run.classes) for member in range(m)]
        caption = "Share of the images of each class that a member was chosen to learn, epoch by epoch."
    else:
        panels = [_member_panel([row for row in run.rows if row.get("win_rates")])]
        caption = "Share of the images that each member was chosen to learn, epoch by epoch."
    last = run.rows[-1].get("win_rates") or []
    rows = [[Value(f"member {i}"), number(100 * rate, 1)] for i, rate in enumerate(last)]
    columns = [Column("Member", numeric=False), Column("Won, %")]
    numbers = Table(f"{id}-numbers", "Share of all images won in the last epoch", columns, rows)
    scale = ("never", "always") if len(panels) > 1 else None
    legend = [] if scale else series(f"member {i}" for i in range(len(last)))
    return Figure(id, title, caption, panels, numbers, legend=legend, narrow=len(panels) > 1, scale=scale)


def _class_panel(member: int, grids: Sequence[tuple[float, Any]], classes: list[str] | None) -> Panel:
    alt = altair()
    count = len(grids[0][1][member])
    names = classes if classes is not None and len(classes) == count else list(map(str, range(count)))
    points = [
        {"epoch": epoch, "class": names[c], "won": round(100 * rate)}
        for epoch, rates in grids
        for c, rate in enumerate(rates[member])
    ]
    steps = [epoch for epoch, _ in grids]
    marked = [steps[0], steps[len(steps) // 2], steps[-1]]
    chart = (
        alt.Chart(alt.Data(values=points))
        .mark_rect()
        .encode(
            x=alt.X("epoch:O", title="epoch", axis=alt.Axis(values=marked, labelAngle=0)),
            y=alt.Y("class:N", title=None, sort=names, axis=alt.Axis(labelOverlap=True)),
            color=alt.Color("won:Q", scale=alt.Scale(domain=[0, 100]), legend=None),
            tooltip=["epoch:O", "class:N", alt.Tooltip("won:Q", title="won, %")],
        )
    )
    return panel(f"member {member}", chart, max(60, min(15 * count, 400)))


def _member_panel(rows: Sequence[dict[str, Any]]) -> Panel:
    points = [
        {
            "run": f"member {m}",
            "label": f"member {m}",
            "epoch": row["epoch"],
            "value": round(100 * rate, 2),
        }
        for row in _thinned(rows, 120)
        for m, rate in enumerate(row["win_rates"])
    ]
    return _line_panel("won, %", points, series(point["run"] for point in points), errors=False)


def against_members(id: str, title: str, evidence: Evidence) -> Figure | None:
    """Figure 4: errors against M; None as long as nothing of it is measured."""
    alt = altair()
    found = [(cell, ours) for cell in CELLS if (ours := evidence.cells[cell.id]["ours"])]
    panels, rows = [], []
    for where, key, name in (
        ("fig4a", "top1", "a: CIFAR-10, ResNet-20, top-1 error, %"),
        ("fig4bc", "picked", "b: iCoseg, error of the most confident member, %"),
        ("fig4bc", "top1", "b: iCoseg, error of the averaged prediction, %"),
        ("fig4bc", "oracle", "c: iCoseg, oracle error, %"),
    ):
        points = [
            {
                "method": SHARING if cell.where[1] == "ie-sharing" else METHODS[cell.where[1]],
                "members": int(cell.where[2].removeprefix("m")),
                "error": round(ours[key]["mean"], 3),
                "n": ours[key]["n"],
            }
            for cell, ours in found
            if cell.where[0] == where
        ]
        rows += [
            [
                Value(name),
                Value(p["method"]),
                number(p["members"], 0),
                number(p["error"], 2),
                number(p["n"], 0),
            ]
            for p in points
        ]
        if len({point["members"] for point in points}) > 1:  # one point is no curve
            chart = (
                alt.Chart(alt.Data(values=points))
                .mark_line(point=True, strokeWidth=2)
                .encode(
                    x=alt.X("members:O", title="members", axis=alt.Axis(labelAngle=0)),
                    y=alt.Y("error:Q", title=None, scale=alt.Scale(zero=False)),
                    color=colour("method", METHOD_SERIES),
                    strokeDash=dash("method", METHOD_SERIES),
                    tooltip=["method:N", "members:O", "error:Q", "n:Q"],
                )
            )
            panels.append(panel(name, chart, 220))
    if not panels:
        return None
    columns = [Column("Panel", numeric=False), Column("Method", numeric=False)]
    columns += [Column(title) for title in ("Members", "Error, %", "n")]
    numbers = Table(f"{id}-numbers", "Measured so far", columns, rows, keys=3)
    caption = "Error against the number of members, mean over the runs there are."
    return Figure(id, title, caption, panels, numbers, legend=METHOD_SERIES)


SHARING = "IE with sharing"
METHOD_SERIES = series(("CMCL", "IE", "MCL", SHARING), {"CMCL": "cmcl", "IE": "ie", "MCL": "mcl"})


def _thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
