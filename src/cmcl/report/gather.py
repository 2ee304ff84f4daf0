"""What there is to report on: records, telemetry and pictures, from folders.

What is damaged is noted and left out; the page says so.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..reproduction.cells import Evidence
from ..reproduction.record import Record, distinct
from .checked import check_gallery, check_row
from .words import METHODS, method_of

Row = dict[str, Any]


@dataclass
class Run:
    """One trained ensemble: its folder's content, as far as there is any."""

    name: str  # of the recipe, or of the folder
    seed: int
    record: Record | None = None
    rows: list[Row] = field(default_factory=list)  # telemetry
    gallery: dict[str, Any] | None = None  # content of gallery.json, with "folder"
    label: str = ""  # for people: the name, with the seed if there are several
    place: str = ""  # the name of the folder that its folder is in
    planned: str | None = None  # the data set's name as recipe.json has it, for a run without a record

    @property
    def data(self) -> str | None:
        """The data set's name; None for one's own."""
        return self.planned if self.record is None else self.record.recipe["data"]

    @property
    def classes(self) -> list[str] | None:
        """The classes' names, if they are known."""
        return None if self.gallery is None else self.gallery["classes"]


@dataclass
class Material:
    """All that was found."""

    runs: list[Run] = field(default_factory=list)  # from run folders
    results: list[Record] = field(default_factory=list)  # from folders with records/
    paper: bool = False  # whether there was such a folder: the paper's tables are shown
    notes: list[str] = field(default_factory=list)  # what could not be read
    left_out: str = ""  # how many runs are not shown, and why

    @cached_property
    def evidence(self) -> Evidence:
        """All records, sorted into the paper's cells."""
        return Evidence.of(self.records)

    @property
    def labels(self) -> dict[str, str]:
        """What to call the runs, by the identity of their records."""
        return {run.record.identity: run.label for run in self.runs if run.record}

    @property
    def records(self) -> list[Record]:
        """All records, each once, by name and seed."""
        runs = [run.record for run in self.runs if run.record is not None]
        return sorted(
            distinct([*self.results, *runs]),
            key=lambda record: (record.name, record.recipe_hash, record.seed),
        )


def gather(sources: Sequence[str | Path]) -> Material:
    """Read run folders, folders of run folders, and results folders.

    Args:
        sources: the folders.
    """
    material = Material()
    for source in map(Path, sources):
        if not source.is_dir():
            raise FileNotFoundError(
                f"sources must be folders of runs or of records. Got {str(source)!r}, which is none."
            )
        kept = source if source.resolve().name == "records" else source / "records"
        if kept.is_dir():
            material.paper = True
            material.results += _records(kept, material.notes)
        inside = [folder for folder in sorted(source.iterdir()) if folder.name != "records"]
        for folder in [source] if _is_run(source) else filter(_is_run, inside):
            material.runs += _runs(folder, material.notes)
    if not material.runs and not material.paper:
        listed = ", ".join(repr(str(source)) for source in sources) or "no folder"
        raise ValueError(
            f"sources must hold runs (record.json, telemetry.jsonl) or records/. Got {listed}. "
            "Name the folder that was given to --out, or to cmcl.record."
        )
    _leave_out(material)
    material.runs = _once(material.runs)
    _tell_apart(material.runs)
    _label(material.runs)
    material.runs.sort(key=_rank)
    return material


def _leave_out(material: Material) -> None:
    """Drop what was measured on part of the test images: its numbers say nothing, and look like others."""
    found = [record for record in material.records if not record.full_test]
    material.results = [record for record in material.results if record.full_test]
    material.runs = [run for run in material.runs if run.record is None or run.record.full_test]
    if found:
        runs = "1 run is" if len(found) == 1 else f"{len(found)} runs are"
        material.left_out = (
            f"{runs} left out, measured on part of the test images only, as cmcl tune does with candidates "
            "that it does not choose."
        )


def _rank(run: Run) -> tuple[str, int, str, int]:
    """By data, then in the order in which methods are always named."""
    method = list(METHODS).index(method_of(run.record.recipe)) if run.record else len(METHODS)
    return run.data or "", method, run.name, run.seed


def _is_run(folder: Path) -> bool:
    marks = ("record.json", "telemetry.jsonl", "recipe.json", "seed*/record.json")
    return folder.is_dir() and any(next(folder.glob(mark), None) for mark in marks)


def _records(folder: Path, notes: list[str]) -> Iterator[Record]:
    for path in sorted(folder.glob("*.json")):
        record = _read_record(path, notes)
        if record is not None:
            yield record


def _read_record(path: Path, notes: list[str]) -> Record | None:
    if not path.exists():
        return None
    try:
        record = Record.load(path)
    except (ValueError, OSError) as error:
        notes.append(f"{_short(path)}: not a record that can be read, left out ({_reason(error, path)})")
        return None
    return record


def _runs(folder: Path, notes: list[str]) -> Iterator[Run]:
    """The runs of a folder: one, or one for each seed that trained there."""
    rows = _telemetry(folder / "telemetry.jsonl", notes)
    homes = sorted((path.parent for path in folder.glob("seed*/record.json")), key=_seed_of) or [folder]
    found: dict[int, Run] = {}
    for home in homes:
        record = _read_record(home / "record.json", notes)
        seed = record.seed if record else _seed_of(home)
        name = record.name if record else folder.name.split("--")[0]
        found[seed] = Run(name, seed, record, gallery=_gallery(home / "gallery", notes))
    for row in rows:
        seed = row.get("seed", next(iter(found)))
        found.setdefault(seed, Run(folder.name.split("--")[0], seed)).rows.append(row)
    for run in found.values():
        run.planned, run.place = _planned(folder), folder.resolve().parent.name
    # A run that was stopped early has telemetry under its true seed, and nothing under the folder's.
    yield from (run for run in found.values() if run.record or run.rows or len(found) == 1)


def _planned(folder: Path) -> str | None:
    try:
        data = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["data"]
    except (ValueError, TypeError, KeyError, OSError):  # old, damaged or not there: the record tells
        return None
    return data if isinstance(data, str) else None


def _seed_of(folder: Path) -> int:
    digits = folder.name.rpartition("seed")[2]
    return int(digits) if digits.isdecimal() else 0


def _telemetry(path: Path, notes: list[str]) -> list[Row]:
    """The rows that are whole; the same epoch twice, after a resumed run, counts as written last."""
    rows: dict[tuple[float, int], Row] = {}
    bad = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line)
            check_row(row)
            rows[row["epoch"], row.get("seed", 0)] = row
        except (ValueError, TypeError, KeyError):
            bad.append(number)
    if bad:
        listed = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        word = "lines" if len(bad) > 1 else "line"
        notes.append(f"{_short(path)}: {word} {listed} cannot be read, left out")
    return [rows[key] for key in sorted(rows)]


def _gallery(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    path = folder / "gallery.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        check_gallery(content, folder)
    except (ValueError, TypeError, KeyError, IndexError, OSError) as error:
        notes.append(f"{_short(path)}: pictures cannot be shown ({_reason(error, path)})")
        return None
    return {**content, "folder": folder}


def _once(runs: list[Run]) -> list[Run]:
    """Without copies of the same run, such as a folder that was named twice."""
    first = {run.record.identity: run for run in reversed(runs) if run.record}
    return [run for run in runs if run.record is None or first[run.record.identity] is run]


def _tell_apart(runs: list[Run]) -> None:
    """Where a seed of a name comes twice, as in few/ie and many/ie, the folder becomes part of the name."""
    named: dict[str, list[Run]] = {}
    for run in runs:
        named.setdefault(run.name, []).append(run)
    for group in named.values():
        seeds, places = {run.seed for run in group}, {(run.place, run.seed) for run in group}
        if len(seeds) < len(group) == len(places):
            for run in group:
                run.name = f"{run.place}/{run.name}"
                run.record = run.record and run.record.model_copy(update={"name": run.name})


def _label(runs: list[Run]) -> None:
    """Names, with the seed where a name comes more than once, and a number where that is not enough."""
    for run in runs:
        alike = [other for other in runs if other.name == run.name]
        run.label = run.name if len(alike) == 1 else f"{run.name} seed {run.seed}"
    for run in runs:
        alike = [other for other in runs if other.label == run.label]
        if len(alike) > 1:
            for number, other in enumerate(alike, start=1):
                other.label += f" ({number})"


def _short(path: Path) -> str:
    return "/".join(path.parts[-3:] if path.name == "gallery.json" else path.parts[-2:])


def _reason(error: Exception, path: Path) -> str:
    """Without the folders of whoever made the report."""
    text = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else str(error)
    return text.replace(str(path), path.name)
