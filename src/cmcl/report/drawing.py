"""What a chart is made of: panels, legend, numbers. Colours are tokens of `themes`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..reproduction.record import Record
from .tables import Table, Value
from .themes import COLOURS, DASHES
from .words import METHODS, method_of

Point = dict[str, Any]
TICKS = [0, 1, 2, 5, 10, 20, 50, 100]


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
    """Panels with a common legend, and what they show in numbers."""

    id: str
    title: str
    caption: str
    panels: Sequence[Panel]
    numbers: Table
    legend: Sequence[Series] = ()
    narrow: bool = False  # panels that are fine at half the width
    scale: tuple[str, str] | None = None  # what the lightest and the darkest colour mean


def altair() -> Any:
    """The library that describes charts, or how to get it."""
    return library("altair")


def vl_convert() -> Any:
    """The library that draws them, or how to get it."""
    return library("vl_convert")


def library(name: str) -> Any:
    """A library of the extra `report`, or how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the report needs {name.replace('_', '-')}. Install it with: pip install 'confident-mcl[report]'"
        ) from error


def vega_lite_version() -> str:
    """What altair speaks, as vl-convert names it."""
    return ".".join(altair().SCHEMA_VERSION.lstrip("v").split(".")[:2])


def series(names: Iterable[str], methods: dict[str, str] | None = None) -> list[Series]:
    """A colour for each name: that of its method where no other name has it, else the next free one."""
    names, methods = list(dict.fromkeys(names)), methods or {}
    order = ("cmcl", "ie", "mcl", "single")
    used = [methods.get(name) for name in names]
    fixed = {n: order.index(m) for n, m in zip(names, used, strict=True) if m in order and used.count(m) == 1}
    free = [i for i in range(len(COLOURS)) if i not in fixed.values()] or [0]
    others = [name for name in names if name not in fixed]
    found: list[Series] = []
    for name in names:
        # once all colours are in use they come again, with another dash
        turn, place = (0, 0) if name in fixed else divmod(others.index(name), len(free))
        i = fixed[name] if name in fixed else free[place]
        found.append(Series(name, COLOURS[i], DASHES[(i + turn) % len(DASHES)]))
    return found


def named(records: Sequence[tuple[str, Record]]) -> dict[str, str]:
    """The series that each label belongs to: itself, or its recipe where that has several."""
    names = [record.name for _, record in records]
    return {label: record.name if names.count(record.name) > 1 else label for label, record in records}


def methods_of(records: Sequence[tuple[str, Record]]) -> list[Series]:
    """A series for each recipe."""
    names = named(records)
    methods = {names[label]: method_of(record.recipe) for label, record in records}
    return series(methods, methods)


def colour(field: str, legend: Sequence[Series]) -> Any:
    """The colours of a legend; the page draws it."""
    scale = {"domain": [s.name for s in legend], "range": [f"@{s.colour}" for s in legend]}
    alt = altair()
    return alt.Color(f"{field}:N", scale=alt.Scale(**scale), legend=None)


def dash(field: str, legend: Sequence[Series]) -> Any:
    """The dashes of a legend, for those who see no colours."""
    alt = altair()
    scale = alt.Scale(domain=[s.name for s in legend], range=[s.dash for s in legend])
    return alt.StrokeDash(f"{field}:N", scale=scale, legend=None)


def tips(**formats: str) -> list[Any]:
    """Percentages to show on hover."""
    alt = altair()
    return [alt.Tooltip(f"{name}:Q", format=form, title=f"{name}, %") for name, form in formats.items()]


def percent(field: str, title: str | None, values: Sequence[float]) -> Any:
    """A vertical axis of errors that widens the small ones: some methods err a hundred times as often."""
    alt = altair()
    top = next((tick for tick in TICKS if tick >= max(values, default=0)), TICKS[-1])
    scale = alt.Scale(type="symlog", constant=1, domain=[0, top], nice=False)
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(values=[t for t in TICKS if t <= top]))


def panel(title: str, chart: Any, height: float) -> Panel:
    """A chart as wide as its place."""
    spec = chart.properties(width="container", height=height).to_dict()
    del spec["config"]  # the theme brings it
    spec.pop("$schema")
    return Panel(title, spec)


def number(value: float, digits: int) -> Value:
    """A number in a table."""
    return Value(f"{value:.{digits}f}", value)


def method_label(record: Record) -> str:
    """For a panel of the paper's figures."""
    name = METHODS[method_of(record.recipe)]
    return f"{name}, adversarially trained" if record.recipe.get("adversarial") else name
