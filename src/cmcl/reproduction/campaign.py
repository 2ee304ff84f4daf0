"""A campaign: the cells of the paper, one run after the other, as far as the time reaches.

It can be stopped and started again, on any machine that has the records so far: what is done is never done
twice, what was interrupted goes on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..training import Diverged, Interrupted, Options
from ..training.checkpoint import DamagedError
from ..training.locking import FolderInUseError
from ..training.setup import find_device
from .cells import Cell, fills, known_checksums
from .costs import EXAMPLES, at_its_own_speed, expected_seconds
from .deadline import parse_budget, stopping_after
from .environment import device_name
from .recipes import find
from .record import Record, load_records
from .run import load_ood, reached, run, run_folder

__all__ = ["Job", "Report", "campaign", "parse_budget", "plan"]

MORE_SEEDS = ("more seeds",)
ORDER = (  # words that a cell's `where` holds; one seed of each, until it says otherwise
    *(("table3", "resnet20"), ("table1",), ("fig1",), ("fig2",), ("fig4bc",), ("fig3",)),
    MORE_SEEDS,  # of those that matter most
    *(("fig4a",), ("table3", "vggnet17"), ("table2", "m5"), ("table3", "googlenet18"), ("table2", "m10")),
)
FIRST = (("table3", "resnet20", "cifar10"), ("table1",))  # get more seeds before the rest has one
# of one run; on to the next
SKIPPED = (Diverged, DamagedError, FolderInUseError, FileNotFoundError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Job:
    """Seeds of one recipe that are to be trained together."""

    name: str
    seeds: tuple[int, ...]
    cells: tuple[str, ...]  # ids of what it fills
    seconds: float  # expected, from where it stands
    done: float = 0.0  # share of the steps that an interrupted run has behind it
    device: str = ""  # that the seconds are expected on


@dataclass
class Report:
    """What a campaign did."""

    jobs: list[Job]  # all that was missing when it began, in order
    records: list[Record] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # run -> why it was not finished
    late: list[Job] = field(default_factory=list)  # of those, what there was no time for
    moved: bool = False  # whether anything is further than before


def campaign(
    cells: Sequence[Cell],
    *,
    seeds: Sequence[int] = (0,),
    results: str | Path,
    runs: str | Path,
    root: str | Path | None = None,
    cache: str | Path | None = None,
    budget_seconds: float | None = None,
    shard: tuple[int, int] = (1, 1),
    unfinished: bool = False,
    dry_run: bool = False,
    options: Options | None = None,
    say: Callable[[str], Any] = lambda line: None,
) -> Report:
    """Train what is missing of these cells and write its records.

    Args:
        cells: places of the paper.
        seeds: wanted for each; the first of all cells comes first, the others train together.
        results: folder whose records/ is read and written.
        runs: folder of run folders.
        root: folder of the data sets.
        cache: folder for preprocessed data.
        budget_seconds: start nothing that is not expected to end by then; what is late saves itself.
        shard: (i, n): the i-th of n parts, 1 to n, for n machines.
        unfinished: start also what will not end in time, to go on with it in the next campaign.
        dry_run: only plan.
        options: how runs are carried out.
        say: gets a line of text for each run.
    """
    options = options or Options()
    begun = time.monotonic()
    places: dict[str, Any] = {"results": results, "runs": runs, "root": root}
    report = Report(plan(cells, seeds=seeds, **places, shard=shard, options=options))
    for planned in [] if dry_run else report.jobs:
        records = load_records(results)  # another process may have brought some meanwhile
        job = _what_is_missing(planned, cells, records, root)
        if not job.seeds:
            say(f"{_label(planned)}: has its records by now")
            continue
        left = None if budget_seconds is None else budget_seconds - (time.monotonic() - begun)
        seconds, *_ = _outlook(job.name, job.seeds, records, runs, options)
        if left is not None and (left <= 0 or (seconds > left and not unfinished)):
            report.left[_label(job)] = f"expected to take {seconds:.0f} s, {max(left, 0):.0f} s left"
            report.late.append(replace(job, seconds=seconds))
            continue
        say(f"{_label(job)}: started, expected to take {seconds:.0f} s")
        try:
            with stopping_after(left):
                done = run(
                    job.name, job.seeds, out=runs, results=results, root=root, cache=cache, options=options
                )
        except Interrupted as stop:
            report.moved = True
            report.late.append(job)
            report.left[_label(job)] = str(stop).replace(
                "go on with resume=True", "the next campaign goes on"
            )
            break
        except SKIPPED as error:
            report.left[_label(job)] = f"{type(error).__name__}: {error}"
            continue
        report.records += done
        report.moved = True
        say(f"{_label(job)}: done in {done[0].seconds:.0f} s")
    for label, reason in report.left.items():
        say(f"{label}: {reason}")
    return report


def plan(
    cells: Sequence[Cell],
    *,
    seeds: Sequence[int],
    results: str | Path,
    runs: str | Path,
    root: str | Path | None = None,
    shard: tuple[int, int] = (1, 1),
    options: Options | None = None,
) -> list[Job]:
    """What is missing, in the order in which it should be trained, with its expected cost."""
    i, n = shard
    if not 1 <= i <= n:
        raise ValueError(f"shard must be i/n with i between 1 and n. Got {i}/{n}.")
    records = load_records(results)
    named: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=_rank):
        named.setdefault(cell.name, []).append(cell)
    ranked: list[tuple[int, Job]] = []
    for name in list(named)[i - 1 :: n]:  # by recipe, before anything is left out: shards never move
        for rank, missing in _missing(named[name], seeds, records, root):
            outlook = _outlook(name, missing, records, runs, options or Options())
            ranked.append((rank, Job(name, missing, tuple(cell.id for cell in named[name]), *outlook)))
    return [job for _, job in sorted(ranked, key=lambda pair: pair[0])]


def _missing(
    cells: list[Cell], seeds: Sequence[int], records: list[Record], root: str | Path | None
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(rank, seeds): the first seed alone, as early as its cells; then all others together."""
    have = _seeds_done(cells, records, root)
    if seeds and seeds[0] not in have:
        yield min(map(_rank, cells)), (seeds[0],)
    if others := tuple(seed for seed in seeds[1:] if seed not in have):
        early = any(set(words) <= set(cell.where) for words in FIRST for cell in cells)
        yield ORDER.index(MORE_SEEDS) if early else len(ORDER) + 1, others


def _seeds_done(cells: list[Cell], records: list[Record], root: str | Path | None) -> set[int]:
    """Those whose records fill all that can be filled here: figure 2 cannot, without its unseen data."""
    checksums = known_checksums(records)
    done = {r.seed for r in records if all(fills(r, cell, checksums) for cell in cells)}
    but_one = {r.seed for r in records if all(fills(r, cell, checksums, ood=False) for cell in cells)}
    return but_one if but_one > done and load_ood(cells[0].recipe.data, root) is None else done


def _what_is_missing(job: Job, cells: Sequence[Cell], records: list[Record], root: str | Path | None) -> Job:
    """The job without the seeds that have their records by now."""
    done = _seeds_done([cell for cell in cells if cell.name == job.name], records, root)
    return replace(job, seeds=tuple(seed for seed in job.seeds if seed not in done))


def _rank(cell: Cell) -> int:
    words = {*cell.where, cell.where[0].rstrip("abc")}
    return next((rank for rank, wanted in enumerate(ORDER) if set(wanted) <= words), len(ORDER))


def _outlook(
    name: str, seeds: tuple[int, ...], records: list[Record], runs: str | Path, options: Options
) -> tuple[float, float, str]:
    """Expected seconds to the end, the share of the steps that is done, and the device they are for."""
    recipe, device = find(name), find_device(options.device)
    folder, cpu, on = run_folder(runs, name, recipe, seeds), device.type == "cpu", device_name(device)
    steps = recipe.total_steps(EXAMPLES.get(recipe.data or "", 1000))
    done = min(reached(folder) / steps, 1.0)
    seconds = at_its_own_speed(folder, steps, on, cpu=cpu)
    if seconds is None:
        seconds = expected_seconds(recipe, len(seeds), records, on, cpu=cpu) * (1 - done)
    return seconds, done, on


def _label(job: Job) -> str:
    return f"{job.name} seed {', '.join(map(str, job.seeds))}"
