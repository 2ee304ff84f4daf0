"""The charts of records: altair in, Vega-Lite out, with the numbers of each as a table.

A figure is a row of small panels, which the page lays out by its width. M members, C classes.
"""

from collections.abc import Container, Sequence

from ..reproduction.claims import median_entropy, pooled, specialisation
from ..reproduction.record import Record
from .drawing import (
    Figure,
    Point,
    altair,
    colour,
    dash,
    methods_of,
    named,
    number,
    panel,
    percent,
    series,
    tips,
)
from .tables import Column, Table, Value
from .themes import TURN
from .words import CLASSES, data_name


def heat_maps(
    id: str, title: str, records: Sequence[tuple[str, Record]], classes: list[str] | None = None
) -> Figure:
    """Figure 1: each member's accuracy on each class."""
    alt = altair()
    panels, rows = [], []
    for label, record in records:
        names = (
            classes or CLASSES.get(record.recipe["data"]) or list(map(str, range(len(record.classwise[0]))))
        )
        points = [
            {"class": names[c] if c < len(names) else str(c), "member": m, "accuracy": value}
            for m, row in enumerate(record.classwise)
            for c, value in enumerate(row)
            if value is not None
        ]
        base = alt.Chart(alt.Data(values=points)).encode(
            x=alt.X("member:O", title="member", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("class:N", title=None, sort=names, axis=alt.Axis(labelOverlap=True)),
            tooltip=["class:N", "member:O", alt.Tooltip("accuracy:Q", format=".1f", title="accuracy, %")],
        )
        shade = alt.Color("accuracy:Q", scale=alt.Scale(domain=[0, 100], interpolate="rgb"), legend=None)
        ink = alt.condition(f"datum.accuracy > {TURN}", alt.value("@on-high"), alt.value("@on-low"))
        text = base.mark_text(fontSize=11).encode(text=alt.Text("accuracy:Q", format=".0f"), color=ink)
        cells, count = base.mark_rect().encode(color=shade), len(record.classwise[0])
        roomy = count * ROW <= TALLEST  # else the numbers have no room in their cells
        panels.append(panel(label, cells + text if roomy else alt.layer(cells), min(count * ROW, TALLEST)))
        rows.append([Value(label), number(specialisation(record), 1)])
    numbers = Table(
        f"{id}-numbers",
        "Points between the best and the worst member of a class, mean over the classes",
        [Column("Run", numeric=False), Column("Points")],
        rows,
    )
    caption = "Accuracy of each member on each class, in percent. Specialists have light and dark cells."
    return Figure(id, title, caption, panels, numbers, scale=("0 %", "100 %"))


ROW, TALLEST = 24, 720  # pixels: a class of a heat map, and all of them
GROUPS = {  # what a record has entropies of; None: named by the set that they come from
    "specialised": "own classes",
    "other": "other classes",
    "test": "test images",
    "ood": None,
}
AVERAGED = {"averaged": "test images", "averaged_ood": None}


def entropies(
    id: str, title: str, records: Sequence[tuple[str, Record]], *, averaged: Container[str] = ()
) -> Figure:
    """Figure 2: how unsure the members are of their own classes, of others, and of what they never saw.

    Args:
        id: of the figure.
        title: of the figure.
        records: a panel for each.
        averaged: methods of which the averaged answer is shown instead, as the paper does for IE.
    """
    alt = altair()
    panels, rows, used = [], [], []
    for label, record in records:
        top = record.entropy["largest"]
        points: list[Point] = []
        groups = AVERAGED if record.recipe["method"] in averaged else GROUPS
        for key, name in groups.items():
            histogram, name = pooled(record, key), name or data_name(record.ood)
            if not sum(histogram):
                continue
            used.append(name)
            width, share = top / len(histogram), 100 / sum(histogram)
            points += [
                {
                    "from": round(i * width, 3),
                    "to": round((i + 1) * width, 3),
                    "group": name,
                    "share": round(count * share, 2),
                }
                for i, count in enumerate(histogram)
            ]
            points.append(points[-1] | {"from": points[-1]["to"]})  # a step ends where the next would begin
            rows.append([Value(label), Value(name), number(100 * (median_entropy(histogram) or 0), 0)])
        legend = series(used)
        steps = alt.Chart(alt.Data(values=points)).encode(
            x=alt.X(
                "from:Q", title="entropy, nats", scale=alt.Scale(domain=[0, top]), axis=alt.Axis(grid=False)
            ),
            y=percent("share", "share, %", [p["share"] for p in points]).stack(None),
            color=colour("group", legend),
            tooltip=[
                "group:N",
                alt.Tooltip("from:Q", title="entropy from"),
                alt.Tooltip("to:Q", title="to"),
                alt.Tooltip("share:Q", title="share, %"),
            ],
        )
        outline = steps.mark_line(interpolate="step-after", strokeWidth=2).encode(
            strokeDash=dash("group", legend)
        )
        chart = steps.mark_area(interpolate="step-after", opacity=0.15) + outline
        panels.append(panel(label, chart, 190))
    numbers = Table(
        f"{id}-numbers",
        "Median entropy as a share of the largest",
        [Column("Run", numeric=False), Column("Images", numeric=False), Column("Median, %")],
        rows,
        keys=2,
    )
    caption = (
        "Entropy of the members' answers, all members together. Left is sure, right is silent. "
        "Shares are on a scale that widens the small ones."
    )
    if any(record.recipe["method"] in averaged for _, record in records):
        caption += " Of the independent ensemble it is the averaged answer's, as in the paper."
    if GROUPS["specialised"] in used:
        caption += " Own classes: those on which a member is right for more than 90 % of the images."
    return Figure(id, title, caption, panels, numbers, legend=series(used))


def reliability(id: str, title: str, records: Sequence[tuple[str, Record]]) -> Figure:
    """Whether answers given with 80 % confidence are right in 80 % of the cases."""
    alt = altair()
    points: list[Point] = []
    names = named(records)
    for label, record in records:
        bins = record.calibration["reliability"]
        columns = zip(bins["count"], bins["confidence"], bins["accuracy"], strict=True)
        points += [
            {"run": names[label], "label": label, "images": n, "confidence": c, "accuracy": a}
            for n, c, a in columns
            if n and c is not None and a is not None
        ]
    legend = methods_of(records)
    ideal = alt.Chart(alt.Data(values=[{"x": 0, "y": 0}, {"x": 100, "y": 100}])).mark_line(
        color="@edge", strokeDash=[3, 3], strokeWidth=1
    )
    chart = alt.Chart(alt.Data(values=points)).encode(
        x=alt.X("confidence:Q", title="confidence, %", scale=alt.Scale(domain=[0, 100])),
        y=alt.Y("accuracy:Q", title="accuracy, %", scale=alt.Scale(domain=[0, 100])),
        color=colour("run", legend),
        detail="label:N",
        tooltip=["label:N", "images:Q", *tips(confidence=".1f", accuracy=".1f")],
    )
    points_marked = chart.mark_circle(opacity=0.9).encode(
        size=alt.Size("images:Q", legend=None, scale=alt.Scale(range=[15, 160]))
    )
    drawn = ideal.encode(x="x:Q", y="y:Q") + chart.mark_line(strokeWidth=1.5) + points_marked
    rows = [[Value(label), number(record.calibration["ece"], 2)] for label, record in records]
    numbers = Table(
        f"{id}-numbers",
        "Expected calibration error",
        [Column("Run", numeric=False), Column("ECE, %")],
        rows,
    )
    caption = (
        "Confidence of the averaged answer against how often it is right; a circle's size tells how many "
        "images. On the dotted line confidence is honest; above it, too modest; below it, too bold."
    )
    return Figure(id, title, caption, [panel("", drawn, 260)], numbers, legend=legend)


def risk_coverage(id: str, title: str, records: Sequence[tuple[str, Record]]) -> Figure:
    """What is gained by not answering where the ensemble is unsure."""
    alt = altair()
    points: list[Point] = []
    rows, names = [], named(records)
    for label, record in records:
        risks = record.calibration["risk_coverage"]
        points += [
            {
                "run": names[label],
                "label": label,
                "coverage": 100 * (i + 1) // len(risks),
                "error": round(risk, 3),
            }
            for i, risk in enumerate(risks)
        ]
        at = [risks[max(0, round(len(risks) * share) - 1)] for share in (0.5, 0.8, 0.9, 1)]
        rows.append([Value(label), *(number(risk, 2) for risk in at)])
    legend = methods_of(records)
    chart = (
        alt.Chart(alt.Data(values=points))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("coverage:Q", title="answered, %", axis=alt.Axis(tickCount=5)),
            y=percent("error", "error among them, %", [point["error"] for point in points]),
            color=colour("run", legend),
            strokeDash=dash("run", legend),
            detail="label:N",
            tooltip=["label:N", "coverage:Q", alt.Tooltip("error:Q", format=".2f", title="error, %")],
        )
    )
    columns = [Column("Run", numeric=False), *(Column(f"{share} % answered") for share in (50, 80, 90, 100))]
    numbers = Table(f"{id}-numbers", "Error among the most confident answers, %", columns, rows)
    caption = "Error among the most confident answers, when only so many of the images are answered at all."
    return Figure(id, title, caption, [panel("", chart, 260)], numbers, legend=legend)
