"""The tables: the paper's with ours beside them, and a summary of all records. Errors are in percent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..reproduction.cells import CELLS, TARGETS, Cell, Evidence, Records
from ..reproduction.claims import Comparison
from ..reproduction.record import Record, distinct
from ..reproduction.record import spread as summed
from ..reproduction.significance import significant
from . import story
from .comparing import repeats
from .words import DATA, METHODS, NETWORKS, data_name, method_of, spread

Summary = Mapping[str, Any]  # as `summarise` returns it


@dataclass(frozen=True)
class Value:
    """One cell of a table."""

    text: str
    sort: float | None = None  # to sort by, if not by the text
    mark: str | None = None  # a key of MARKS
    worse: bool = False  # than the paper, by more than a little
    link: str | None = None  # name of the recipe whose records are behind it
    missing: bool = False


@dataclass(frozen=True)
class Column:
    """The head of a column; neighbours of one `group` get a common head."""

    title: str
    group: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of values under columns."""

    id: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    note: str = ""  # how to read it
    source: str = ""  # where its numbers come from
    keys: int = field(default=1)  # columns that name a row


NOT_MEASURED = Value("not measured", missing=True)
MARKS = {"same": "✓", "near": "≈", "other": "✗"}  # which side of IE ours lies on, as in the paper or not
WORSE, MUCH = "▲", 0.5  # points of top-1 error above the paper's, from where it is called worse


def paper_tables(records: Records) -> list[Table]:
    """Tables 1 to 3."""
    found = Evidence.of(records)
    keys = {
        "table1": ("Method",),
        "table2": ("Members", "Method", "K"),
        "table3": ("Network", "Data", "Method"),
    }
    return [_paper_table(name, keys[name], found) for name in keys]


def _paper_table(name: str, keys: tuple[str, ...], found: Evidence) -> Table:
    columns = [Column(key, numeric=False) for key in keys]
    for title in ("Oracle error, %", "Top-1 error, %"):
        columns += [Column(word, title) for word in ("paper", "ours", "diff.")]
    columns.append(Column("n"))
    cells = [cell for cell in CELLS if cell.where[0] == name]
    if name == "table2":  # all of five members, then all of ten
        cells.sort(key=lambda cell: cell.where[2] == "m10")
    if name == "table3":  # by network, then by data
        cells.sort(key=lambda cell: (list(NETWORKS).index(cell.where[1]), cell.where[3]))
    rows = []
    for cell in cells:
        row = [Value(text) for text in _keys(cell)]
        for key in ("oracle", "top1"):
            row += _compared(found, cell.id, _rival(cell), key)
        rows.append([*row, _count(found.cells[cell.id])])
    number = name.removeprefix("table")
    caption = f"Table {number}. {TARGETS[name]['caption']}"
    source = story.made_on(record for cell in cells for record in found.standing(cell.id))
    return Table(name, caption, columns, rows, note=legend(rows), source=source, keys=len(keys))


def legend(rows: Iterable[Sequence[Value]]) -> str:
    """How to read the marks that stand in these rows, and no others."""
    values = [value for row in rows for value in row]
    lines = []
    if any(value.mark for value in values):
        lines.append(
            f"{MARKS['same']}: ours lies on the same side of IE as the paper's number does; "
            f"{MARKS['other']}: it does not; {MARKS['near']}: the difference is not significant (p > "
            "0.05). No mark: fewer than two runs of either, or nothing to compare (the single "
            "network is the mean of IE's own members)."
        )
    if any(value.worse for value in values):
        lines.append(f"{WORSE}: worse than the paper by more than {MUCH:g} points of top-1 error.")
    spreads = any("±" in value.text for value in values)
    lines.append(f"{'Mean ± standard deviation over n' if spreads else 'n:'} runs with different seeds.")
    return " ".join(lines)


def _keys(cell: Cell) -> tuple[str, ...]:
    if cell.where[0] == "table1":
        method, *marks = cell.where[1].split("-")
        words = {"sharing": "feature sharing", "sampled": "stochastic labels"}
        return (" + ".join([METHODS[method], *(words[mark] for mark in marks)]),)
    if cell.where[0] == "table2":
        method, _, k = cell.where[1].partition("-k")
        return cell.where[2].replace("m", "M="), METHODS[method], f"K={k}" if k else "–"
    _, network, method, data = cell.where
    return NETWORKS[network], DATA[data], METHODS[method]


def _rival(cell: Cell) -> str:
    """The independent ensemble that a cell is compared with."""
    same = [(*cell.where[:1], "ie", *cell.where[2:])]
    if cell.where[0] == "table3":
        same = [(*cell.where[:2], "ie", *cell.where[3:])]
    return next(other.id for other in CELLS if other.where in same)


def _compared(found: Evidence, cell: str, rival: str, key: str) -> list[Value]:
    """The paper's number, ours, and the difference."""
    own = found.cells[cell]
    printed, ours = own["paper"][key], own["ours"]
    paper = Value(f"{printed:.2f}", printed)
    if ours is None:
        partial = f"{len(own['partial'])} partial" if own["partial"] else ""
        missing = Value(partial, link=own["recipe"], missing=True) if partial else NOT_MEASURED
        return [paper, missing, Value("–", missing=True)]
    mean = ours[key]["mean"]
    worse = key == "top1" and mean - printed > MUCH
    value = Value(spread(ours[key]), mean, _side(found, cell, rival, key), worse, own["recipe"])
    return [paper, value, Value(_signed(mean - printed), mean - printed)]


def _side(found: Evidence, cell: str, rival: str, key: str) -> str | None:
    """Whether ours lies on the side of IE where the paper's number lies, as a key of MARKS.

    None for IE itself, for the single network (the mean of the same IE's members is above it nearly always),
    for ties in the paper, and where one run alone could be chance.
    """
    mine, other = found.error(cell, key), found.error(rival, key)
    if mine is None or other is None or found.standing(cell) == found.standing(rival):
        return None
    own, ie = (found.cells[id]["paper"][key] for id in (cell, rival))
    if own == ie or min(mine["n"], other["n"]) < 2:
        return None
    if not significant(*Comparison.of(found.standing(cell), found.standing(rival), key)):
        return "near"
    return "same" if (mine["mean"] < other["mean"]) == (own < ie) else "other"


def _count(own: Summary) -> Value:
    n = 0 if own["ours"] is None else own["ours"]["top1"]["n"]
    return Value(str(n), n, link=own["recipe"] if n else None)


def _signed(value: float) -> str:
    text = f"{value:+.2f}".replace("-", "−")
    return "0.00" if text[1:] == "0.00" else text


def headline_table(records: Records) -> Table:
    """ResNet-20 on CIFAR-10 and SVHN: what the paper's abstract is about."""
    found = Evidence.of(records)
    columns = [Column("Method", numeric=False)]
    columns += [
        Column(word, f"{DATA[data]}, %") for data in ("cifar10", "svhn") for word in ("paper", "ours", "n")
    ]
    rows, behind = [], []
    for method in METHODS:
        row = [Value(METHODS[method])]
        for data in ("cifar10", "svhn"):
            own, rival = (f"table3/{data}-resnet20-{name}" for name in (method, "ie"))
            paper, ours, _ = _compared(found, own, rival, "top1")
            row += [paper, ours, _count(found.cells[own])]
            behind += found.standing(own)
        rows.append(row)
    source = story.made_on(behind)
    return Table("headline", "Top-1 error of five ResNet-20", columns, rows, note=legend(rows), source=source)


def summary_table(records: Sequence[Record], labels: Mapping[str, str] | None = None) -> Table:
    """Every record in a row; before the seeds of a recipe, their mean."""
    columns = [Column("Run", numeric=False)]
    columns += [Column(title) for title in ("Top-1, %", "Oracle, %", "Member, %", "ECE, %")]
    columns += [Column("Method", numeric=False), Column("Data", numeric=False)]
    columns += [Column("Seed"), Column("Seconds")]
    rows = []
    for group in repeats(distinct(records)):
        rows += [_mean_row(group)] if len(group) > 1 and group[0].complete else []
        rows += [_summary_row(record, (labels or {}).get(record.identity, record.name)) for record in group]
    note = (
        "Top-1: the ensemble's answer; for segmentation, the most confident member's. Oracle: the best "
        "member's for each image. Member: the mean member's. ECE: expected calibration error. Of several "
        "seeds the mean ± standard deviation comes first. Seconds: of the whole run."
    )
    source = story.made_on(records)
    return Table("summary", "Errors on the test set", columns, rows, note=note, source=source)


def _summary_row(record: Record, name: str) -> list[Value]:
    row = [Value(name + ("" if record.complete else " (partial)"), link=record.name)]
    row += [Value(f"{number:.2f}", number) for number in _summed_up(record)]
    row += [Value(METHODS[method_of(record.recipe)]), Value(data_name(record.recipe["data"]))]
    return [*row, Value(str(record.seed), record.seed), Value(_seconds(record), record.seconds)]


def _mean_row(records: Sequence[Record]) -> list[Value]:
    first = records[0]
    spreads = [summed(column) for column in zip(*map(_summed_up, records), strict=True)]
    names = list(dict.fromkeys(record.name for record in records))
    row = [Value(f"{_from_to(names)}: mean", link=first.name)]
    row += [Value(spread(found), found["mean"]) for found in spreads]
    row += [Value(METHODS[method_of(first.recipe)]), Value(data_name(first.recipe["data"]))]
    return [*row, Value(f"n = {len(records)}"), Value("")]


def _from_to(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]}"


def _summed_up(record: Record) -> tuple[float, ...]:
    """Top-1, oracle, member and calibration error."""
    errors = record.errors["expected"]
    return errors["top1"], errors["oracle"], fmean(record.members), record.calibration["ece"]


def _seconds(record: Record) -> str:
    return f"{record.seconds:,.0f}"
