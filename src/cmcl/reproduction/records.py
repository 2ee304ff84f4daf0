"""A record: one trained ensemble, measured. One JSON file each, so that results merge by copying files."""

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .._files import replacing
from ..data.published import CHECKSUMS
from ..training.config import Recipe
from .paper import Cell

FORMAT = 1  # raise it when an older program could misread what is written
MEASURED = {"errors", "members", "classwise", "calibration", "entropy", "outside", "validation", "format"}


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run found, and all that decided it. JSON values only."""

    name: str  # of the recipe
    recipe: Mapping[str, Any]
    recipe_hash: str
    seed: int
    full_length: bool  # False: shortened, to try something out
    full_test: bool  # False: measured on part of the test set
    test_examples: int
    checksums: Mapping[str, str]  # of the data, by split: "train", "test"
    errors: Mapping[str, Mapping[str, float]]  # by sharing mode: top1, oracle, picked, averaged
    members: list[float]  # error of each member alone
    classwise: list[list[float | None]]  # accuracy, (M, C)
    calibration: Mapping[str, Any]
    entropy: Mapping[str, Any]
    # Of networks of one's own, which no recipe names: class, parameters, digest. Older records lack it.
    network: Mapping[str, Any] | None = None
    task: str | None = None  # the name of a task loss of one's own, which no recipe names either
    learned_from: str | None = None  # own data, as far as it is known: how many examples, with which labels
    weights: str | None = None  # checksum of what was learned; older records lack it
    outside: str | None = None  # the set of things never seen that `entropy` and AUROC tell of
    validation: Mapping[str, float] | None = None  # errors on what was held out
    steps: int
    seconds: float  # of the whole run, all seeds that trained together
    together: list[int]  # those seeds
    device: str
    precision: str
    versions: Mapping[str, str | None]
    commit: str | None
    resumed_with: list[Mapping[str, Any]] = field(default_factory=list)  # all stretches, if not all are alike
    format: int = FORMAT

    @property
    def complete(self) -> bool:
        """Whether nothing was cut short."""
        return self.full_length and self.full_test

    @property
    def identity(self) -> str:
        """The same for all records of one trained ensemble on one set of test data, wherever measured."""
        # Equal weights may belong to networks that answer differently, as with other dropout at test.
        told: Any = [self.weights, self.recipe_hash, self.network, self.task]
        if self.weights is None:
            told = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in MEASURED}
        return json.dumps([told, self.checksums, self.test_examples, self.full_test], sort_keys=True)

    @property
    def file_name(self) -> str:
        """Readable; no two runs of a named recipe on one set of data share it."""
        return file_name(self.name, self.recipe_hash, self.seed)

    def save(self, path: Path) -> None:
        """Write one JSON file, whole or not at all; a line for each field."""
        lines = [f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in asdict(self).items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def save_if_new(self, path: Path) -> None:
        """Write it, unless the very same is there."""
        if Record.read(path) != self:
            self.save(path)

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """What `save` wrote, or None where there is no whole record."""
        try:
            return cls.load(path)
        except (FileNotFoundError, ValueError):
            return None

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read what `save` wrote."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] not in range(1, FORMAT + 1):
                raise ValueError(f"format {values['format']} is of a later version of cmcl: upgrade it")
            known = {f.name for f in fields(cls)}
            record = cls(**{key: value for key, value in values.items() if key in known})
            record._check()
            return record
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"{path} must be a record of a run. Got something else ({reason}). Move it away."
            ) from None

    def _check(self) -> None:
        """Raise unless the numbers of tables and budgets are there."""
        numbers = [self.seconds, *self.members, *(self.errors["expected"][key] for key in ("top1", "oracle"))]
        if not self.members or not all(map(math.isfinite, numbers)):
            raise ValueError("its errors must be numbers")
        if not (isinstance(self.name, str) and isinstance(self.recipe_hash, str) and type(self.seed) is int):
            raise ValueError("name, recipe_hash and seed must be text, text and a whole number")
        Recipe.from_json(self.recipe)
        if not self.together or not {"data", "network", "sharing"} <= set(self.recipe):
            raise ValueError("recipe must name its data and network, and together its seeds")


def distinct(records: Iterable["Record"]) -> list["Record"]:
    """Without further copies of the same run's record."""
    return list({record.identity: record for record in records}.values())


def file_name(name: str, recipe_hash: str, seed: int) -> str:
    """Of the record of a run."""
    return f"{name}--{recipe_hash}--seed{seed}.json"


def load_records(results: str | Path) -> list[Record]:
    """All records in `results`/records, in the order of their names. A damaged one is a warning."""
    found = []
    for path in sorted((Path(results) / "records").glob("*.json")):
        try:
            found.append(Record.load(path))
        except (ValueError, OSError) as error:
            warnings.warn(f"left out: {error}", stacklevel=1)
    return found


def known_checksums(records: Iterable[Record]) -> dict[str, Mapping[str, str]]:
    """Of every set, what its checksums should be: as written here, else what most records have."""
    votes: dict[str, Counter[str]] = {}
    for record in records:
        votes.setdefault(record.recipe["data"], Counter())[json.dumps(record.checksums, sort_keys=True)] += 1
    return {data: json.loads(count.most_common(1)[0][0]) for data, count in votes.items()} | CHECKSUMS


def fills(
    record: Record,
    cell: Cell,
    checksums: Mapping[str, Mapping[str, str]] = CHECKSUMS,
    *,
    outside: bool = True,
) -> bool:
    """Whether a record may stand in a cell: same recipe, same data, full length, full test set.

    Anything else of the same name is partial. Figure 2 needs data from `outside` as well.
    """
    expected = checksums.get(cell.recipe.data or "", record.checksums)
    seen_outside = record.outside is not None or not outside or not cell.where[0].startswith("fig2")
    same = record.recipe_hash == cell.recipe.hash and record.checksums == expected
    return same and record.complete and seen_outside


def summarise(
    cells: Sequence[Cell], records: Sequence[Record], *, mode: str = "expected"
) -> list[dict[str, Any]]:
    """Every cell with the paper's numbers and ours; `mode` is that of feature sharing at test time."""
    checksums = known_checksums(records)
    return [_summary(cell, records, checksums, mode) for cell in cells]


def _summary(
    cell: Cell, records: Sequence[Record], checksums: Mapping[str, Mapping[str, str]], mode: str
) -> dict[str, Any]:
    found = standing(cell, records, checksums)
    partial = [r.file_name for r in records if r.name == cell.name and not fills(r, cell, checksums)]
    return {
        "id": cell.id,
        "recipe": cell.name,
        "paper": {key: cell.paper and cell.paper[key] for key in ("oracle", "top1")},  # None in figures
        "ours": {key: spread([_error(r, cell, key, mode) for r in found]) for key in ("oracle", "top1")}
        if found
        else None,
        "records": [record.file_name for record in found],
        "partial": partial,
    }


def standing(
    cell: Cell, records: Sequence[Record], checksums: Mapping[str, Mapping[str, str]]
) -> list[Record]:
    """The records that a cell's numbers are made from: one of each seed."""
    own = {record.seed: record for record in records if fills(record, cell, checksums)}
    return [own[seed] for seed in sorted(own)]


def _error(record: Record, cell: Cell, key: str, mode: str) -> float:
    return fmean(record.members) if cell.single else record.errors[mode][key]


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Mean, sample deviation (None for one value) and number."""
    std = round(stdev(values), 6) if len(values) > 1 else None
    return {"mean": round(fmean(values), 6), "std": std, "n": len(values)}


def choose(records: Iterable[Record], *, on: str = "validation") -> dict[str, Any]:
    """The recipe with the lowest mean top-1 error on held-out data, or on="test", the test set."""
    if on not in {"validation", "test"}:
        raise ValueError(f"on must be 'validation' or 'test'. Got {on!r}.")
    errors: dict[str, list[float]] = {}
    recipes: dict[str, Mapping[str, Any]] = {}
    for record in records:
        found = record.validation if on == "validation" else record.errors["expected"]
        if record.complete and found is not None:
            errors.setdefault(record.name, []).append(found["top1"])
            recipes[record.name] = record.recipe
    if not errors:
        raise ValueError(f"records must hold a complete one with errors on {on}. Got none. Run `grid` first.")
    best = min(errors, key=lambda name: (fmean(errors[name]), name))
    return {"name": best, "recipe": recipes[best], "chosen_on": on, "top1": spread(errors[best])}
