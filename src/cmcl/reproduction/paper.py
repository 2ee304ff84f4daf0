"""The paper's tables and figures as data: cells, each with the recipe that should give its numbers.

The numbers come from targets.json and from nowhere else. M members, K overlap.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..data.files import nearest
from ..training.config import Recipe
from .recipes import HELD_OUT, find, grid, table2_name

TARGETS: dict[str, Any] = json.loads((Path(__file__).parent / "targets.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, eq=False)
class Cell:
    """A place of the paper, and the recipe that should give its numbers."""

    id: str  # "table3/cifar10-resnet20-cmcl"
    name: str  # of the recipe
    where: tuple[str, ...]  # ("table3", "resnet20", "cmcl", "cifar10"): table or figure, row, column
    paper: Mapping[str, float] | None = None  # {"oracle", "top1"} in percent; None: a figure, not a number
    single: bool = False  # one network alone: the mean of the members, for both errors

    @property
    def recipe(self) -> Recipe:
        """What to train."""
        return find(self.name)


def select(words: Sequence[str]) -> list[Cell]:
    """The cells of tables and figures ("table1", "fig4", "fig4a"), or by their ids; "all"."""
    names = {cell: ("all", cell.where[0].rstrip("abc"), cell.where[0], cell.id) for cell in CELLS}
    valid = list(dict.fromkeys(name for several in zip(*names.values(), strict=True) for name in several))
    for word in words:
        if word not in valid:
            cure = nearest(word, valid) if get_close_matches(word, valid) else nearest("", valid[:9])
            raise ValueError(f"cells must be those of a table or figure, or ids. Got {word!r}. {cure}")
    return [cell for cell in CELLS if set(names[cell]) & set(words)]


def search(cells: Sequence[Cell], *, on_test: bool = False) -> dict[str, list[Cell]]:
    """For every CMCL recipe of these cells, a cell for each beta and K that the paper tried.

    Part of the training set is held out to choose by; with `on_test` nothing is, and the choice is made on
    the test set, as the paper presumably made it. Such recipes have it in their names.
    """
    names = dict.fromkeys(cell.name for cell in cells if cell.recipe.method == "cmcl")
    held_out = 0.0 if on_test else HELD_OUT
    return {
        name: [Cell(f"search/{one}", one, ("search", name)) for one in grid(name, validation=held_out)]
        for name in names
    }


def _cells() -> Iterator[Cell]:
    yield from _printed()
    for figure, methods in {"fig1": ("mcl", "cmcl", "ie"), "fig2": ("mcl", "cmcl", "ie-adversarial")}.items():
        for panel, method in zip("abc", methods, strict=True):
            name = f"cifar10-cnn-{method}"  # CMCL with the exact gradient
            yield Cell(f"{figure}{panel}/{name}", name, (figure + panel, method))
    for method in ("ie", "mcl", "cmcl"):
        yield Cell(f"fig3/icoseg-fcn-m5-{method}", f"icoseg-fcn-m5-{method}", ("fig3", method))
    for m, method, name in (
        (5, "ie", "cifar10-resnet20-ie-sharing"),
        (5, "cmcl", "cifar10-resnet20-cmcl"),
        (10, "ie", "cifar10-resnet20-m10-ie-sharing"),
        (10, "cmcl", "cifar10-resnet20-m10-cmcl"),
    ):
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
    for row in TARGETS["table2"]["rows"]:
        for m in (5, 10):
            label = row["method"] + (f"-k{row['k']}" if row["k"] else "")
            name = table2_name(m, row["method"], row["k"])
            yield Cell(
                f"table2/cifar10-cnn-m{m}-{label}", name, ("table2", label, f"m{m}"), _errors(row[f"m{m}"])
            )
    for row in TARGETS["table3"]["rows"]:
        network, method, single = row["network"], row["method"], row["method"] == "single"
        for data in ("cifar10", "svhn"):
            stem = f"{data}-{network}"
            name = f"{stem}-{'ie' if single else method}"
            where = ("table3", network, method, data)
            yield Cell(f"table3/{stem}-{method}", name, where, _errors(row[data]), single)


def _errors(row: Mapping[str, float]) -> dict[str, float]:
    return {"oracle": row["oracle"], "top1": row["top1"]}


CELLS: tuple[Cell, ...] = tuple(_cells())
