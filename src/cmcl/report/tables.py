"""The tables: the paper's with ours beside them, and a summary of all runs. Errors are in percent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..data.registry import DATASETS
from ..networks import NETWORKS
from ..reproduction.cells import ABSTRACT, BESIDE, CELLS, SETTINGS, TARGETS, Cell, Evidence, Records
from ..reproduction.claims import Comparison
from ..reproduction.record import Record, distinct, spread
from ..reproduction.significance import LEVEL, significant
from .load import METHODS, Run, errors


@dataclass(frozen=True)
class Value:
    """One cell of a table."""

    text: str
    sort: float | None = None  # to sort by, if not by the text
    mark: str | None = None  # a key of MARKS
    worse: bool = False  # than the paper
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
    keys: int = 1  # columns that name a row


NOT_MEASURED = Value("not measured", missing=True)
MARKS = {"same": "✓", "near": "≈", "other": "✗"}  # the side of IE that ours is on, against the paper's
WORSE, MUCH = "▲", 0.5  # points of top-1 error above the paper's, from which ours is marked
ERRORS = {"top1": "Top-1", "picked": "Picked", "oracle": "Oracle", "member": "Member", "ece": "ECE"}
NOTE = (
    "Top-1: error of the averaged prediction. Picked: of the most confident member's. Oracle: of the best "
    "member for each example. Member: mean over the members. ECE: expected calibration error. Mean ± "
    "standard deviation over seeds comes before the single runs."
)


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
    found = Evidence.of(records)
    heads = {
        "table1": ("Method",),
        "table2": ("Members", "Method", "K"),
        "table3": ("Network", "Data", "Method"),
    }
    columns = names(*heads[name])
    columns += [Column(w, f"{e} error, %") for e in ("Oracle", "Top-1") for w in ("paper", "ours", "diff.")]
    cells = sorted((cell for cell in CELLS if cell.where[0] == name), key=_order)
    rows = []
    for cell in cells:
        row = [Value(text) for text in _keys(cell)]
        row += [value for key in ("oracle", "top1") for value in _compared(found, cell, key)]
        rows.append([*row, _count(found, cell)])
    caption = f"Table {name.removeprefix('table')}. {TARGETS[name]['caption']}"
    source = origin(record for cell in cells for record in found.standing(cell.id))
    note = " ".join(filter(None, (SETTINGS.get(name), legend(rows))))
    return Table(name, caption, [*columns, Column("n")], rows, note, source, keys=len(heads[name]))


def headline_table(records: Records) -> Table:
    """The numbers of the paper's abstract, and those of the small CNN beside them."""
    found = Evidence.of(records)
    datasets = list(dict.fromkeys(cell.where[-1] for cell in ABSTRACT))
    columns = names("Network", "Method")
    columns += [Column(w, f"{dataset_title(data)}, %") for data in datasets for w in ("paper", "ours", "n")]
    rows = []
    for method in METHODS:
        cells = [c for data in datasets for c in ABSTRACT if c.where[2:] == (method, data)]
        rows.append([Value(NETWORKS[cells[0].where[1]].title), Value(_method(cells[0], method))])
        rows[-1] += [value for cell in cells for value in _headline_values(found, cell)]
    for cell in BESIDE:
        title = NETWORKS[str(cell.recipe.network)].title
        method = "IE + adversarial training" if cell.recipe.adversarial else _keys(cell)[0]
        none = [Value("–", missing=True)] * 3 * (len(datasets) - 1)
        rows.append([Value(title), Value(method), *_headline_values(found, cell), *none])
    source = origin(record for cell in (*ABSTRACT, *BESIDE) for record in found.standing(cell.id))
    return Table("headline", "Top-1 error of five networks", columns, rows, legend(rows), source, keys=2)


def _headline_values(found: Evidence, cell: Cell) -> list[Value]:
    return [*_compared(found, cell, "top1")[:2], _count(found, cell)]


def _method(cell: Cell, method: str) -> str:
    return f"{METHODS[method]} (mean of IE's members)" if cell.single else METHODS[method]


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


def _order(cell: Cell) -> tuple[Any, ...]:
    """Table 2 by number of members, Table 3 by network and dataset; Table 1 as printed."""
    if cell.where[0] == "table2":
        return (int(cell.where[2][1:]),)
    return (list(NETWORKS).index(cell.where[1]), cell.where[3]) if cell.where[0] == "table3" else ()


def _keys(cell: Cell) -> tuple[str, ...]:
    if cell.where[0] == "table1":
        method, *extras = cell.where[1].split("-")
        words = {"sharing": "feature sharing", "sampled": "stochastic labels"}
        return (" + ".join([METHODS[method], *(words[extra] for extra in extras)]),)
    if cell.where[0] == "table2":
        method, _, k = cell.where[1].partition("-k")
        return cell.where[2].replace("m", "M="), METHODS[method], f"K={k}" if k else "–"
    _, network, method, data = cell.where
    return NETWORKS[network].title, dataset_title(data), _method(cell, method)


def _compared(found: Evidence, cell: Cell, key: str) -> list[Value]:
    """The paper's number, ours, and the difference."""
    own = found.cells[cell.id]
    printed, ours = own["paper"][key], own["ours"]
    paper = number(printed)
    if ours is not None and printed is None:  # a figure of the paper, without a number
        return [paper, Value(spread_text(ours[key]), ours[key]["mean"], link=own["recipe"]), Value("–")]
    if ours is None:
        partial = Value(f"{len(own['partial'])} partial", link=own["recipe"], missing=True)
        return [paper, partial if own["partial"] else NOT_MEASURED, Value("–", missing=True)]
    mean = ours[key]["mean"]
    worse = key == "top1" and mean - printed > MUCH
    value = Value(spread_text(ours[key]), mean, _side(found, cell, key), worse, own["recipe"])
    return [paper, value, Value(signed(mean - printed), mean - printed)]


def _side(found: Evidence, cell: Cell, key: str) -> str | None:
    """A key of MARKS; None for IE itself, the single network, ties in the paper, and single runs."""
    place = 2 if cell.where[0] == "table3" else 1
    rival_where = (*cell.where[:place], "ie", *cell.where[place + 1 :])
    rival = next(other for other in CELLS if other.where == rival_where)
    mine, other = found.standing(cell.id), found.standing(rival.id)
    printed, ie = cell.paper[key], rival.paper[key]  # type: ignore[index]
    if cell.single or cell is rival or printed == ie or min(len(mine), len(other)) < 2:
        return None
    pair = Comparison.of(mine, other, key)
    if not significant(*pair):
        return "near"
    return "same" if (pair.gain > 0) == (printed < ie) else "other"


def _count(found: Evidence, cell: Cell) -> Value:
    n = len(found.standing(cell.id))
    return Value(str(n), n, link=cell.name if n else None)


def signed(value: float) -> str:
    """A difference; never a negative zero."""
    text = f"{value:+.2f}".replace("-", "−")
    return "0.00" if text[1:] == "0.00" else text


def spread_text(found: Mapping[str, Any]) -> str:
    """Mean, and the standard deviation if there is one."""
    mean = f"{found['mean']:.2f}"
    return mean if found["std"] is None else f"{mean} ± {found['std']:.2f}"


def run_table(groups: Sequence[Sequence[Run]]) -> Table:
    """A row for each run, and before the seeds of a recipe their mean; `groups` as `repeats` returns them."""
    columns = names("Run") + [Column(title) for title in ERRORS.values()]
    columns += [*names("Method", "Data"), Column("Seed"), Column("Seconds")]
    rows = []
    for group in groups:
        if len(group) > 1 and group[0].measured.complete:
            rows.append(_mean_row(group))
        rows += [_run_row(run) for run in group]
    source = origin(run.measured for group in groups for run in group)
    return Table("summary", "Errors on the test set, %", columns, rows, NOTE, source)


def _run_row(run: Run) -> list[Value]:
    record = run.measured
    name = Value(run.label + ("" if record.complete else " (partial)"), link=record.name)
    numbers = [number(value) for value in errors(record).values()]
    seconds = Value(f"{record.seconds:,.0f}", record.seconds)
    return [name, *numbers, *_about(run), Value(str(run.seed), run.seed), seconds]


def _mean_row(group: Sequence[Run]) -> list[Value]:
    spreads = [spread(column) for column in zip(*(errors(r.measured).values() for r in group), strict=True)]
    listed = list(dict.fromkeys(run.name for run in group))
    name = ", ".join(listed) if len(listed) <= 3 else f"{listed[0]} to {listed[-1]}"
    row = [Value(f"{name}: mean", link=group[0].measured.name)]
    row += [Value(spread_text(found), found["mean"]) for found in spreads]
    return [*row, *_about(group[0]), Value(f"n = {len(group)}"), Value("")]


def _about(run: Run) -> list[Value]:
    return [Value(METHODS[run.method or "ie"]), Value(dataset_title(run.data))]
