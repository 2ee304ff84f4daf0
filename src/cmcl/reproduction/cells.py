"""The paper's tables and figures as cells: each with its recipe and the records that fill it.

The paper's numbers come from targets.json only. M members, K overlap.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Union

from ..data.registry import CHECKSUMS, nearest
from ..training.config import Recipe
from .recipes import DEFAULT_RUNS, FIGURE4A, HELD_OUT, MODERN_RUNS, find, grid, table2_name
from .record import Record, distinct, spread

TARGETS: dict[str, Any] = json.loads((Path(__file__).parent / "targets.json").read_text(encoding="utf-8"))
# campaigns beside the paper's
DEFAULT = "default"  # the library's default against IE
MODERN = "modern"  # today's training
KEYS = ("oracle", "top1", "picked")

Checksums = Mapping[str, Mapping[str, str]]  # by dataset, by split
Records = Union[Sequence[Record], "Evidence"]


@dataclass(frozen=True, eq=False)
class Cell:
    """A number or a curve of the paper, and the recipe that reproduces it."""

    id: str  # "table3/cifar10-resnet20-cmcl"
    name: str  # of the recipe
    where: tuple[str, ...]  # ("table3", "resnet20", "cmcl", "cifar10"): table or figure, row, column
    paper: Mapping[str, float] | None = None  # {"oracle", "top1"} in percent; None: a figure, not a number
    single: bool = False  # one network alone: the mean over IE's members, for all errors

    @property
    def recipe(self) -> Recipe:
        """What to train."""
        return find(self.name)

    def errors(self, record: Record) -> dict[str, float]:
        """The cell's errors according to a record."""
        return {key: record.scores["member" if self.single else key] for key in KEYS}


def select(words: Sequence[str]) -> list[Cell]:
    """The cells of tables and figures ("table1", "fig4a"), or by id; "all"; or "default", "modern"."""
    names = {cell: ("all", cell.where[0].rstrip("abc"), cell.where[0], cell.id) for cell in CELLS}
    names |= {cell: (cell.where[0], cell.where[0], cell.where[0], cell.id) for cell in BESIDE_PAPER}
    valid = list(dict.fromkeys(name for several in zip(*names.values(), strict=True) for name in several))
    for word in words:
        if word not in valid:
            hint = nearest(word, valid) if get_close_matches(word, valid) else nearest("", valid[:9])
            raise ValueError(f"cells must be a table, a figure or ids. Got {word!r}. {hint}")
    return [cell for cell in (*CELLS, *BESIDE_PAPER) if set(names[cell]) & set(words)]


def search(cells: Sequence[Cell], *, on_test: bool = False) -> dict[str, list[Cell]]:
    """For every CMCL recipe of these cells, a cell for each beta and K that the paper tried.

    Part of the training set is held out to choose by; with `on_test` nothing is, and the choice is made on
    the test set, as the paper presumably did. The names of such recipes say so.
    """
    names = dict.fromkeys(cell.name for cell in cells if cell.recipe.method == "cmcl")
    held_out = 0.0 if on_test else HELD_OUT
    return {
        name: [Cell(f"search/{one}", one, ("search", name)) for one in grid(name, validation=held_out)]
        for name in names
    }


@dataclass(frozen=True)
class Evidence:
    """All records, sorted into the cells that they fill."""

    records: Sequence[Record]
    cells: Mapping[str, Mapping[str, Any]]  # by id, as `summarise` describes them, in the paper's order
    filling: Mapping[str, list[Record]]  # the records behind a cell's numbers, by its id; "modern" too

    @classmethod
    def of(cls, records: Records) -> "Evidence":
        """Sort records; an `Evidence` stays as it is."""
        if isinstance(records, Evidence):
            return records
        checksums = known_checksums(records)
        filling = {cell.id: _filling(cell, records, checksums) for cell in (*CELLS, *BESIDE_PAPER)}
        return cls(records, {row["id"]: row for row in summarise(CELLS, records)}, filling)

    def in_figure(self, figure: str) -> list[Record]:
        """The records of a figure's panel, such as "fig1a"."""
        return distinct(r for cell in CELLS if cell.where[0] == figure for r in self.filling[cell.id])


def techniques(recipe: Mapping[str, Any]) -> list[str]:
    """What a recipe, as in a record, adds to its method."""
    used = {
        "feature sharing": recipe["sharing"],
        "stochastic labels": recipe.get("labels") == "sampled",
        "adversarial training": recipe.get("adversarial"),
    }
    return [name for name in used if used[name]]


def known_checksums(records: Iterable[Record]) -> dict[str, Mapping[str, str]]:
    """The expected checksums of every dataset: the published ones, else those of most records."""
    votes: dict[str, Counter[str]] = {}
    for record in records:
        votes.setdefault(record.recipe["data"], Counter())[json.dumps(record.checksums, sort_keys=True)] += 1
    return {data: json.loads(count.most_common(1)[0][0]) for data, count in votes.items()} | CHECKSUMS


def fills(record: Record, cell: Cell, checksums: Checksums = CHECKSUMS, *, ood: bool = True) -> bool:
    """Whether a record counts for a cell: same recipe, same data, full length, full test set.

    Figure 2 also needs OOD data; `ood=False` waives that.
    """
    expected = checksums.get(cell.recipe.data or "", record.checksums)
    has_ood = record.ood is not None or not ood or not cell.where[0].startswith("fig2")
    same = record.recipe_hash == cell.recipe.hash and record.checksums == expected
    return same and record.complete and has_ood


def _filling(cell: Cell, records: Sequence[Record], checksums: Checksums) -> list[Record]:
    """The records that fill a cell, one for each seed."""
    own = {record.seed: record for record in records if fills(record, cell, checksums)}
    return [own[seed] for seed in sorted(own)]


def summarise(cells: Sequence[Cell], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every cell with the paper's numbers and ours."""
    checksums, rows = known_checksums(records), []
    for cell in cells:
        found = _filling(cell, records, checksums)
        errors, printed = [cell.errors(record) for record in found], cell.paper or {}
        partial = [r.file_name for r in records if r.name == cell.name and not fills(r, cell, checksums)]
        rows.append(
            {
                "id": cell.id,
                "recipe": cell.name,
                "paper": {key: printed.get(key) for key in ("oracle", "top1")},  # None in figures
                "ours": {key: spread([one[key] for one in errors]) for key in KEYS} if errors else None,
                "records": [record.file_name for record in found],
                "partial": partial,
            }
        )
    return rows


def choose(
    cells: Sequence[Cell], records: Sequence[Record], *, on_test: bool = False
) -> dict[str, Any] | None:
    """The cell of a search with the lowest mean top-1 error on held-out data, or on the test set.

    None until every cell has a complete record.
    """
    errors: dict[str, list[float]] = {cell.name: [] for cell in cells}
    hashes = {cell.name: cell.recipe.hash for cell in cells}
    for record in records:
        found = record.errors["expected"] if on_test else record.validation
        if hashes.get(record.name) == record.recipe_hash and record.complete and found is not None:
            errors[record.name].append(found["top1"])
    if not all(errors.values()):
        return None
    best = min(cells, key=lambda cell: (fmean(errors[cell.name]), cell.name))
    return {
        "beta": best.recipe.beta,
        "overlap": best.recipe.overlap,
        "name": best.name,
        "chosen_on": "test" if on_test else "validation",
        "top1": spread(errors[best.name]),
    }


def _cells() -> Iterator[Cell]:
    yield from _printed()
    for figure, methods in {"fig1": ("mcl", "cmcl", "ie"), "fig2": ("mcl", "cmcl", "ie-adversarial")}.items():
        for panel, method in zip("abc", methods, strict=True):
            name = f"cifar10-cnn-{method}"  # CMCL with the exact gradient
            yield Cell(f"{figure}{panel}/{name}", name, (figure + panel, method))
    for method in ("ie", "mcl", "cmcl"):
        yield Cell(f"fig3/icoseg-fcn-m5-{method}", f"icoseg-fcn-m5-{method}", ("fig3", method))
    for m, method, name in FIGURE4A:
        yield Cell(f"fig4a/cifar10-resnet20-m{m}-{method}", name, ("fig4a", method, f"m{m}"))
    for m in range(1, 6):
        for method in ("ie", "mcl", "cmcl"):
            name = f"icoseg-fcn-m{m}-{method if m > 1 else 'ie'}"
            yield Cell(f"fig4bc/icoseg-fcn-m{m}-{method}", name, ("fig4bc", method, f"m{m}"))


def _printed() -> Iterator[Cell]:
    """Every number of Tables 1-3."""
    for row in TARGETS["table1"]["rows"]:
        marks = ("-sharing" if row["sharing"] else "") + ("-sampled" if row["stochastic_labels"] else "")
        name = f"cifar10-cnn-{row['method']}{marks}"
        yield Cell(f"table1/{name}", name, ("table1", row["method"] + marks), _errors(row))
    for m in (5, 10):
        for row in TARGETS["table2"]["rows"]:
            label = row["method"] + (f"-k{row['k']}" if row["k"] else "")
            name = table2_name(m, row["method"], row["k"])
            yield Cell(
                f"table2/cifar10-cnn-m{m}-{label}", name, ("table2", label, f"m{m}"), _errors(row[f"m{m}"])
            )
    networks = dict.fromkeys(row["network"] for row in TARGETS["table3"]["rows"])
    for network, data in product(networks, ("cifar10", "svhn")):
        for row in (row for row in TARGETS["table3"]["rows"] if row["network"] == network):
            method, single, stem = row["method"], row["method"] == "single", f"{data}-{network}"
            name = f"{stem}-{'ie' if single else method}"
            yield Cell(
                f"table3/{stem}-{method}", name, ("table3", network, method, data), _errors(row[data]), single
            )


def _errors(row: Mapping[str, float]) -> dict[str, float]:
    return {"oracle": row["oracle"], "top1": row["top1"]}


CELLS: tuple[Cell, ...] = tuple(_cells())
DEFAULT_CELLS = tuple(Cell(f"{DEFAULT}/{name}", name, (DEFAULT, how)) for how, name in DEFAULT_RUNS.items())
MODERN_CELLS = tuple(Cell(f"{MODERN}/{name}", name, (MODERN, base, how)) for base, how, name in MODERN_RUNS)
BESIDE_PAPER = (*DEFAULT_CELLS, *MODERN_CELLS)
ABSTRACT = [cell for cell in CELLS if cell.where[:2] == ("table3", "resnet20")]  # its main comparison
# Beside it: the small CNN, where CMCL alone is not better than IE, and IE with adversarial training.
SMALL = {"table1/cifar10-cnn-ie", "fig2c/cifar10-cnn-ie-adversarial"}
SMALL |= {f"table1/cifar10-cnn-cmcl{more}" for more in ("", "-sharing-sampled")}
BESIDE = [cell for cell in CELLS if cell.id in SMALL]
