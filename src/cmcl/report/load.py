"""Loads records, telemetry and galleries from folders.

A file that cannot be read is skipped with a warning, and the report lists it.
"""

import os
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, Field

from .._files import parse_json, read_json
from .._schema import Schema
from ..reproduction.cells import Evidence
from ..reproduction.gallery import Gallery
from ..reproduction.record import Record

METHODS = {"single": "single network", "ie": "IE", "mcl": "MCL", "cmcl": "CMCL"}  # in the order of tables
LARGEST = 64 * 2**20  # bytes of telemetry
T = TypeVar("T")


class Row(Schema):
    """One epoch of telemetry: what the report draws of it."""

    model_config = ConfigDict(extra="ignore")

    epoch: float
    loss: float | None = None
    top1: float | None = None
    oracle: float | None = None
    specialist_entropy: float | None = None
    nonspecialist_entropy: float | None = None
    dead_members: list[int] = Field(default_factory=list)


@dataclass
class Run:
    """One trained ensemble, as far as it is known."""

    name: str  # of the recipe, or of the folder
    seed: int = 0
    record: Record | None = None  # None: not finished, or not evaluated
    rows: list[Row] = field(default_factory=list)
    gallery: Gallery | None = None
    data: str | None = None  # name of the dataset; None: the user's own
    parent: str = ""  # name of the folder that holds the run folder
    label: str = ""  # its own
    title: str = ""  # its method; its recipe too, where several have that method

    @classmethod
    def of(cls, record: Record, label: str = "") -> "Run":
        """The run of a record; with a label, known by that."""
        name = label or record.name
        return cls(name, record.seed, record, data=record.recipe["data"], label=name, title=name)

    @property
    def measured(self) -> Record:
        """The record of a run that has one."""
        assert self.record is not None
        return self.record

    @property
    def method(self) -> str | None:
        """A key of METHODS; None without a record."""
        return None if self.record is None else method_of(self.record)

    @property
    def dataset(self) -> tuple[str | None, str | None]:
        """A dataset by name, the user's own by the checksum of its test set."""
        return self.data, self.record.checksums.get("test") if self.record and self.data is None else None


@dataclass
class Inputs:
    """Everything that a report is made from."""

    runs: list[Run] = field(default_factory=list)  # of run folders
    results: list[Run] = field(default_factory=list)  # of folders with records/
    paper: bool = False  # whether there was such a folder: the report has the paper's tables
    skipped: list[str] = field(default_factory=list)  # files that could not be read, and why
    excluded: int = 0  # runs that were evaluated on part of the test set

    @property
    def measured(self) -> list[Run]:
        """All runs with a record, each once, by name and seed."""
        found = {run.record.identity: run for run in (*self.results, *self.runs) if run.record}
        return sorted(found.values(), key=lambda run: (run.name, run.measured.recipe_hash, run.seed))

    @cached_property
    def evidence(self) -> Evidence:
        """All records, sorted into the paper's cells."""
        return Evidence.of([run.measured for run in self.measured])

    def read(self, path: Path, reader: Callable[[Path], T]) -> T | None:
        """What `reader` returns; None where there is no file, or, with a warning, none that can be read."""
        if not os.path.lexists(path):
            return None
        try:
            return reader(path)
        except (ValueError, OSError) as error:
            self.skip(path, str(error))
            return None

    def skip(self, path: Path, reason: str) -> None:
        """Warn about a file, and note it for the page, which shows no folders of whoever makes it."""
        short = reason.removeprefix(f"{path}: ").replace(f"{path.parent}{os.sep}", "")
        short = textwrap.shorten(short, 200, placeholder=" ...")
        warnings.warn(f"skipped {path}: {short}", stacklevel=3)
        self.skipped.append(f"{'/'.join(path.parts[-3:])}: {short}")


def method_of(record: Record) -> str:
    """A key of METHODS: one member alone is a single network."""
    return "single" if len(record.members) == 1 else str(record.recipe["method"])


def load(sources: Sequence[str | Path]) -> Inputs:
    """Read run folders, folders of run folders, and results folders (with records/)."""
    inputs = Inputs()
    for source in map(Path, sources):
        if not source.is_dir():
            raise FileNotFoundError(f"sources must be folders of runs or records. Got {str(source)!r}.")
        records = source if source.resolve().name == "records" else source / "records"
        if records.is_dir():
            inputs.paper = True
            found = [inputs.read(path, Record.load) for path in sorted(records.glob("*.json"))]
            inputs.results += [Run.of(record) for record in found if record]
        folders = [source] if _is_run(source) else filter(_is_run, sorted(source.iterdir()))
        inputs.runs += [_load_run(folder, inputs) for folder in folders]
    if not inputs.runs and not inputs.paper:
        listed = ", ".join(repr(str(source)) for source in sources) or "no folder"
        raise ValueError(
            f"sources must hold runs (record.json, telemetry.jsonl) or records/. Got {listed}. "
            "Name the folder that was given to --out, or to cmcl.record."
        )
    _exclude(inputs)
    _label(inputs.runs)
    inputs.runs.sort(key=_rank)
    return inputs


def _is_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in ("record.json", "telemetry.jsonl", "recipe.json"))


def _load_run(folder: Path, inputs: Inputs) -> Run:
    name, _, rest = folder.name.partition("--")
    seed = rest.rpartition("seed")[2]
    run = Run(name, int(seed) if seed.isdecimal() and len(seed) < 20 else 0, label=name)
    if record := inputs.read(folder / "record.json", Record.load):
        run = Run.of(record)
    elif isinstance(recipe := inputs.read(folder / "recipe.json", read_json), dict):
        run.data = recipe["data"] if isinstance(recipe.get("data"), str) else None
    run.parent = folder.resolve().parent.name
    run.rows = _telemetry(folder / "telemetry.jsonl", inputs)
    run.gallery = inputs.read(folder / "gallery" / "gallery.json", Gallery.load)
    return run


def _telemetry(path: Path, inputs: Inputs) -> list[Row]:
    """The rows that can be read; of an epoch that a resumed run repeated, the last."""
    rows, bad = {}, []
    for number, line in enumerate((inputs.read(path, _lines) or []), start=1):
        try:
            row = Row.parse(parse_json(line, path))
            rows[row.epoch] = row
        except ValueError:
            bad.append(str(number))
    if bad:
        inputs.skip(path, f"lines {', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''} cannot be read")
    return [rows[epoch] for epoch in sorted(rows)]


def _lines(path: Path) -> list[str]:
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise ValueError(f"telemetry must be a file of at most {LARGEST} bytes.")
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _exclude(inputs: Inputs) -> None:
    """Drop copies, and runs evaluated on part of the test set: their numbers compare with no others."""
    inputs.excluded = sum(not run.measured.full_test for run in inputs.measured)
    first = {run.record.identity: run for run in reversed(inputs.runs) if run.record}
    inputs.runs = [
        run
        for run in inputs.runs
        if run.record is None or (run.record.full_test and first[run.record.identity] is run)
    ]
    inputs.results = [run for run in inputs.results if run.measured.full_test]


def _label(runs: Sequence[Run]) -> None:
    """Give every run a label of its own: its name, with parent folder, seed and number as needed."""
    for group in grouped(runs, lambda run: run.name):
        seeds, places = {run.seed for run in group}, {(run.parent, run.seed) for run in group}
        if len(seeds) < len(group) == len(places):
            for run in group:
                run.name = f"{run.parent}/{run.name}"
    for group in grouped(runs, lambda run: run.name):
        for run in group:
            run.label = run.name if len(group) == 1 else f"{run.name} seed {run.seed}"
    for group in grouped(runs, lambda run: run.label):
        for number, run in enumerate(group if len(group) > 1 else [], start=1):
            run.label += f" ({number})"
    for group in grouped(runs, lambda run: (run.dataset, run.method)):
        method, alone = group[0].method, len({run.name for run in group}) == 1
        for run in group:
            run.title = METHODS[method] + ("" if alone else f" ({run.name})") if method else run.name


def grouped(runs: Iterable[Run], key: Callable[[Run], Any]) -> list[list[Run]]:
    """Runs with equal keys together, in the order of their first."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _rank(run: Run) -> tuple[str, int, str, int]:
    """By dataset, then in the order of METHODS."""
    method = list(METHODS).index(run.method) if run.method else len(METHODS)
    return run.data or "", method, run.name, run.seed
