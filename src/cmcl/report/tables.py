"""Tables, and the paper's with ours beside them. Errors are in percent."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..data.registry import DATASETS
from ..networks import NETWORKS
from ..reproduction.cells import ABSTRACT, BESIDE, CELLS, TARGETS, Cell, Evidence, Records, techniques
from ..reproduction.record import Record, distinct, spread_text
from ..reproduction.significance import LEVEL, Comparison
from .load import METHODS


@dataclass(frozen=True)
class Value:
    """One cell of a table."""

    text: str
    sort: float | None = None  # to sort by, if not by the text
    mark: str | None = None  # a key of MARKS
    worse: bool = False  # than the paper
    link: str | None = None  # name of the recipe whose records are behind it
    missing: bool = False
    best: bool = False  # of its rivals in the column


@dataclass(frozen=True)
class Column:
    """The head of a column; neighbours of one `group` get a common head."""

    title: str
    group: str = ""
    numeric: bool = True
    lower: bool = False  # lower is better


@dataclass(frozen=True)
class Table:
    """Rows of values under columns."""

    id: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    note: str = ""  # how to read it
    source: str = ""  # where its numbers come from
    keys: int = 1  # columns that name a row


# Ours is on the paper's side of IE, not significantly different from IE, or on the other side.
MARKS = {"same": "✓", "near": "≈", "other": "✗"}
WORSE, MUCH = "▲", 0.5  # points of top-1 error above the paper's, from which ours is marked


def number(value: float | None, digits: int = 2) -> Value:
    """A number in a table."""
    return Value("–") if value is None else Value(f"{value:.{digits}f}", value)


def names(*titles: str) -> list[Column]:
    """Columns of texts."""
    return [Column(title, numeric=False) for title in titles]


def dataset_title(name: str | None) -> str:
    """The title of a dataset."""
    return "own data" if name is None else DATASETS[name].title if name in DATASETS else name


def paper_table(name: str, records: Records) -> Table:
    """One of "table1", "table2" and "table3", with our numbers beside the paper's."""
    found, heads = Evidence.of(records), PAPER_KEYS[name]
    columns = names(*heads)
    for error in ("Top-1", "Oracle"):
        columns += [Column(w, f"{error} error, %", lower=w != "diff.") for w in ("paper", "ours", "diff.")]
    cells = [cell for cell in CELLS if cell.where[0] == name]
    rows = []
    for cell in cells:
        row = [Value(text) for text in _keys(cell)]
        row += [value for key in ("top1", "oracle") for value in _compared(found, cell, key)]
        rows.append([*row, _count(found, cell)])
    rivals = [cell.where[1:2] + cell.where[3:] if name == "table3" else cell.where[2:] for cell in cells]
    for column in (len(heads) + 1, len(heads) + 4):
        rows = with_best(rows, column, rivals)
    caption = f"Table {name.removeprefix('table')}. {TARGETS[name]['caption']}"
    source = origin(record for cell in cells for record in found.filling[cell.id])
    return Table(name, caption, [*columns, Column("n")], rows, legend(rows), source, keys=len(heads))


def with_best(
    rows: Sequence[list[Value]], column: int, rivals: Sequence[object] | None = None
) -> list[list[Value]]:
    """The rows with the lowest number of a column marked, among rows of equal `rivals` if given."""
    rivals = [None] * len(rows) if rivals is None else rivals
    found = []
    for row, group in zip(rows, rivals, strict=True):
        values = [r[column].sort for r, g in zip(rows, rivals, strict=True) if g == group]
        known = [value for value in values if value is not None]
        best = bool(known) and row[column].sort == min(known) < max(known)
        found.append([*row[:column], replace(row[column], best=best), *row[column + 1 :]])
    return found


def headline_table(records: Records) -> Table:
    """The numbers of the paper's abstract, and those of the small CNN beside them."""
    found = Evidence.of(records)
    datasets = list(dict.fromkeys(cell.where[-1] for cell in ABSTRACT))
    columns = names("Method", "Network")
    for data in datasets:
        columns += [Column(w, f"{dataset_title(data)}, %", lower=w != "n") for w in ("paper", "ours", "n")]
    lines = [[c for data in datasets for c in ABSTRACT if c.where[2:] == (m, data)] for m in METHODS]
    lines += [[cell] for cell in BESIDE]
    rows, networks = [], [NETWORKS[str(cells[0].recipe.network)].title for cells in lines]
    for cells, network in zip(lines, networks, strict=True):
        row = [Value(_method(cells[0])), Value(network)]
        for cell in cells:
            row += [*_compared(found, cell, "top1")[:2], _count(found, cell)]
        rows.append(row + [Value("–", missing=True)] * (len(columns) - len(row)))
    for column in range(3, len(columns), 3):
        rows = with_best(rows, column, networks)
    source = origin(record for cell in (*ABSTRACT, *BESIDE) for record in found.filling[cell.id])
    return Table("headline", "Top-1 error of five networks", columns, rows, legend(rows), source, keys=2)


def legend(rows: Iterable[Sequence[Value]]) -> str:
    """How to read the marks in these rows."""
    values = [value for row in rows for value in row]
    lines = []
    if any(value.mark for value in values):
        lines.append(
            f"{MARKS['same']}: ours is on the same side of IE as the paper's number; {MARKS['other']}: on "
            f"the other; {MARKS['near']}: the difference from IE is not significant (p > {LEVEL:g}). No "
            "mark: fewer than two runs of either, or nothing to compare."
        )
    if any(value.worse for value in values):
        lines.append(f"{WORSE}: worse than the paper by more than {MUCH:g} points of top-1 error.")
    if any(value.best for value in values):
        lines.append("Bold: our lowest error for a network and dataset.")
    several = any("±" in value.text for value in values)
    lines.append(f"{'Mean ± standard deviation over n' if several else 'n:'} runs with different seeds.")
    return " ".join(lines)


def origin(records: Iterable[Record]) -> str:
    """The machines, versions and commits behind some numbers; empty without records."""
    found = distinct(records)
    machines = dict.fromkeys(f"{r.device} ({r.precision}, torch {r.versions.get('torch')})" for r in found)
    commits = dict.fromkeys((r.commit or "unknown")[:7] for r in found)
    resumed = sum(bool(r.resumed_with) for r in found)
    text = f"Trained on {', '.join(machines)}, commit {', '.join(commits)}." if found else ""
    more = f" {resumed} of {len(found)} runs resumed on another machine, version or commit (see the records)."
    return text + (more if resumed else "")


PAPER_KEYS = {
    "table1": ("Method",),
    "table2": ("Method", "Members", "K"),
    "table3": ("Method", "Network", "Data"),
}


def _keys(cell: Cell) -> tuple[str, ...]:
    """The texts that name a row."""
    if cell.where[0] == "table1":
        return (_method(cell),)
    if cell.where[0] == "table2":
        k = cell.where[1].partition("-k")[2]
        return METHODS[cell.recipe.method], cell.where[2].replace("m", "M="), f"K={k}" if k else "–"
    return _method(cell), NETWORKS[cell.where[1]].title, dataset_title(cell.where[3])


def _method(cell: Cell) -> str:
    """The method of a row, with what Table 1 adds to it."""
    if cell.single:
        return f"{METHODS['single']} (mean of IE's members)"
    more = techniques(cell.recipe.to_json()) if cell.where[0] != "table3" else []
    return " + ".join([METHODS[cell.recipe.method], *more])


def _compared(found: Evidence, cell: Cell, key: str) -> list[Value]:
    """The paper's number, ours, and the difference."""
    own = found.cells[cell.id]
    printed, ours = own["paper"][key], own["ours"]
    if ours is None:
        partial = Value(f"{len(own['partial'])} partial", link=own["recipe"], missing=True)
        missing = partial if own["partial"] else Value("not measured", missing=True)
        return [number(printed), missing, Value("–", missing=True)]
    mean, text = ours[key]["mean"], spread_text(ours[key])
    if printed is None:  # a figure of the paper, without a number
        return [number(None), Value(text, mean, link=own["recipe"]), Value("–")]
    worse = key == "top1" and mean - printed > MUCH
    value = Value(text, mean, _side(found, cell, key), worse, own["recipe"])
    return [number(printed), value, Value(signed(mean - printed), mean - printed)]


def _side(found: Evidence, cell: Cell, key: str) -> str | None:
    """A key of MARKS; None for IE itself, the single network, ties in the paper, and single runs."""
    place = 2 if cell.where[0] == "table3" else 1
    rival_where = (*cell.where[:place], "ie", *cell.where[place + 1 :])
    rival = next(other for other in CELLS if other.where == rival_where)
    mine, other = found.filling[cell.id], found.filling[rival.id]
    printed, ie = cell.paper[key], rival.paper[key]  # type: ignore[index]
    if cell.single or printed == ie or min(len(mine), len(other)) < 2:
        return None
    pair = Comparison.of(mine, other, key)
    if not pair.significant:
        return "near"
    return "same" if (pair.gain > 0) == (printed < ie) else "other"


def _count(found: Evidence, cell: Cell) -> Value:
    n = len(found.filling[cell.id])
    return Value(str(n), n, link=cell.name if n else None)


def signed(value: float) -> str:
    """A difference; never a negative zero."""
    text = f"{value:+.2f}".replace("-", "−")
    return "0.00" if text[1:] == "0.00" else text
