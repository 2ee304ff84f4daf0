"""A campaign: train the missing cells of the paper, one run after the other, as far as the time allows.

It can be stopped and started again, on any machine that has the records so far: finished runs are never
repeated, interrupted ones are resumed.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from ..data.registry import DATASETS
from ..training import Diverged, Interrupted, Options
from ..training.checkpoint import DamagedError, FolderInUseError, last_step
from ..training.config import Recipe
from ..training.cuda import find_device
from .cells import DEFAULT, MODERN, Cell, fills, known_checksums
from .environment import device_name
from .recipes import find
from .record import Record, load_records
from .runner import ending_at, load_data, load_ood, run, run_folder

MORE_SEEDS = ("more seeds",)
LARGE = ("vggnet17", "googlenet18")
ORDER = (  # words of a cell's `where`; seed 0 of each, then the other seeds of FIRST
    *(("table3", "resnet20"), ("table1",), (DEFAULT,), ("fig1",), ("fig2",), ("fig4bc",), ("fig3",)),
    *(("table3", network, data) for data in ("cifar10", "svhn") for network in LARGE),
    ("table2", "m5"),
    MORE_SEEDS,
    *(("fig4a",), ("table2", "m10"), (MODERN,)),
)
# their seeds come at MORE_SEEDS: the headline's, and those of the default
FIRST = (*(("table3", "resnet20", method) for method in ("ie", "cmcl")), (DEFAULT,))
# of one run; the campaign continues with the next
SKIPPED = (Diverged, DamagedError, FolderInUseError, FileNotFoundError, torch.OutOfMemoryError)
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Job:
    """One run: a recipe and a seed."""

    name: str
    seed: int
    cells: tuple[str, ...]  # ids of the cells that it fills
    seconds: float | None  # expected for the remaining steps, from records of this device; None: unknown
    done: float  # fraction of the steps, if it was interrupted
    device: str

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name} seed {self.seed}"


@dataclass(frozen=True)
class Work:
    """What is wanted, and the folders that hold what is there."""

    cells: Sequence[Cell]  # of the paper's tables and figures
    results: str | Path  # folder whose records/ is read and written
    runs: str | Path  # folder of run folders
    seeds: Sequence[int] = (0,)  # wanted for each cell; the first seed of all cells comes first
    root: str | Path | None = None  # folder of the datasets
    shard: tuple[int, int] = (1, 1)  # (i, n): the i-th of n parts, 1 to n, for n machines
    options: Options = field(default_factory=Options)  # how the runs are carried out

    def missing(self) -> list[Job]:
        """What is missing, in the order in which it should be trained, with its expected time."""
        i, n = self.shard
        if not 1 <= i <= n:
            raise ValueError(f"shard must be i/n with i between 1 and n. Got {i}/{n}.")
        records, device = load_records(self.results), _device(self.options)
        named: dict[str, list[Cell]] = {}  # the most important cell of a recipe first
        for cell in sorted(self.cells, key=_rank):
            named.setdefault(cell.name, []).append(cell)
        ranked: list[tuple[int, Job]] = []
        for name in list(named)[i - 1 :: n]:  # by recipe, before anything is left out: shards never move
            own, recipe = named[name], find(name)
            have, whole = _seeds_done(own, records, self.root), expected_seconds(recipe, records, device)
            early = any(set(words) <= set(cell.where) for words in FIRST for cell in own)
            later = ORDER.index(MORE_SEEDS) if early else len(ORDER) + 1
            for seed in (seed for seed in self.seeds if seed not in have):
                step = last_step(run_folder(self.runs, name, recipe, seed)) or 0
                done = min(step / _steps(recipe), 1.0)
                seconds = None if whole is None else whole * (1 - done)
                rank = _rank(own[0]) if seed == self.seeds[0] else later
                job = Job(name, seed, tuple(cell.id for cell in own), seconds, done, device)
                ranked.append((rank, job))
        return [job for _, job in sorted(ranked, key=lambda pair: pair[0])]


@dataclass
class Report:
    """The outcome of a campaign."""

    jobs: list[Job]  # everything that was missing when it began, in order
    records: list[Record] = field(default_factory=list)
    late: list[Job] = field(default_factory=list)  # not finished for lack of time, or after a signal
    errors: dict[str, Exception] = field(default_factory=dict)  # of runs that failed, by label
    progressed: bool = False  # whether any run is further than before
    stopped: str = ""  # the signal that interrupted it

    @property
    def left(self) -> dict[str, str]:
        """The unfinished runs by label, and why."""
        why = f"stopped by {self.stopped}" if self.stopped else "no time left"
        return dict.fromkeys((job.label for job in self.late), why) | {
            label: f"{type(e).__name__}: {e}" for label, e in self.errors.items()
        }


def campaign(
    work: Work,
    *,
    budget_seconds: float | None = None,
    unfinished: bool = False,
    say: Callable[[str], Any] = lambda line: None,
) -> Report:
    """Train what is missing and write its records.

    Args:
        work: the cells, folders and options.
        budget_seconds: start nothing that is expected to take longer; a run that is late saves itself.
        unfinished: also start runs that will not end in time, to resume them in the next campaign.
        say: called with a line of text for each run.
    """
    end = None if budget_seconds is None else time.monotonic() + budget_seconds
    report = Report(work.missing())
    sets, loaded = None, None  # the data of the last run: the next one often has the same
    for job in report.jobs:
        own = [cell for cell in work.cells if cell.name == job.name]
        if job.seed in _seeds_done(
            own, load_records(work.results), work.root
        ):  # by another process meanwhile
            say(f"{job.label}: has its record by now")
            continue
        left = float("inf") if end is None else end - time.monotonic()
        if left <= 0 or ((job.seconds or 0) > left and not unfinished):
            report.late.append(job)
            continue
        say(f"{job.label}: started" + (f", expected to take {job.seconds:.0f} s" if job.seconds else ""))
        recipe, how = find(job.name), ending_at(end, work.options)
        try:
            if loaded != (wanted := (recipe.data, recipe.preprocess, recipe.subset, recipe.validation)):
                sets, loaded = load_data(recipe, root=work.root), wanted
            (record,) = run(
                job.name, (job.seed,), out=work.runs, results=work.results, sets=sets, options=how
            )
        except Interrupted as stop:
            report.progressed = True
            report.stopped = "" if stop.reason == "max_seconds" else stop.reason
            report.late.append(job)
            break
        except SKIPPED as error:
            report.errors[job.label] = error
            continue
        report.records.append(record)
        report.progressed = True
        say(f"{job.label}: done in {record.seconds:.0f} s")
    for label, reason in report.left.items():
        say(f"{label}: {reason}")
    return report


def expected_seconds(recipe: Recipe, records: Sequence[Record], device: str) -> float | None:
    """The training time of a recipe by the seconds per step of the most similar records of the device.

    None where no record has the same network and image size. Time grows with the number of members.
    """

    def similar(record: Record) -> tuple[bool, ...]:
        keys = "batch_size", "network_options", "adversarial", "sharing", "data", "members", "method"
        same = (record.recipe.get(key) == getattr(recipe, key) for key in keys)
        return record.recipe_hash == recipe.hash, *same

    ran = [
        r
        for r in records
        if (r.device, r.mesh) == (device, None)
        and r.steps
        and r.recipe["network"] == recipe.network
        and _image_size(r.recipe["data"]) == _image_size(recipe.data)
    ]
    if not ran:
        return None
    closest = max(map(similar, ran))
    times = [r.seconds / r.steps / r.recipe["members"] for r in ran if similar(r) == closest]
    # of two the lower: the other may have shared the device
    return float(median_low(times) * recipe.members * _steps(recipe))


def parse_budget(text: str) -> float:
    """Seconds of "90s", "25m", "1.5h" or "1h30m"; a bare number has no unit and raises."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    whole = "".join(number + unit for number, unit in parts) == text
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not whole or not 0 < seconds < float("inf"):
        raise ValueError(f"budget must be a time above 0, such as 90s, 25m or 1h30m. Got {text!r}.")
    return seconds


def _device(options: Options) -> str:
    """The device of the runs; one that this machine lacks is that of a scheduler's tasks."""
    try:
        return device_name(find_device(options.device))
    except ValueError:
        return options.device


def _image_size(data: str | None) -> tuple[int, int, int] | None:
    return DATASETS[data].shape if data in DATASETS else None


def _steps(recipe: Recipe) -> int:
    sizes = DATASETS[recipe.data].sizes if recipe.data in DATASETS else {}
    return recipe.total_steps(sizes.get("train", 1000))


def _seeds_done(cells: list[Cell], records: list[Record], root: str | Path | None) -> set[int]:
    """The seeds whose records fill all cells that can be filled here: figure 2 cannot without OOD data."""
    checksums = known_checksums(records)
    done = {r.seed for r in records if all(fills(r, cell, checksums) for cell in cells)}
    without = {r.seed for r in records if all(fills(r, cell, checksums, ood=False) for cell in cells)}
    return without if without > done and load_ood(cells[0].recipe.data, root) is None else done


def _rank(cell: Cell) -> int:
    words = {*cell.where, cell.where[0].rstrip("abc")}
    return next((rank for rank, wanted in enumerate(ORDER) if set(wanted) <= words), len(ORDER))
