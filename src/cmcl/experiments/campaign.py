"""A campaign: the cells of the paper, one run after the other, as far as the time reaches.

It can be stopped and started again, on any machine that has the records so far: what is done is never done
twice, what was interrupted goes on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engine import Diverged, Interrupted, Options
from ..engine.checkpoint import FolderInUseError
from ..engine.setup import find_device
from .costs import EXAMPLES, expected_seconds
from .deadline import parse_budget, stopping_after
from .environment import device_name
from .paper import Cell
from .recipes import find
from .records import Record, fills, known_checksums, load_records
from .run import run, run_folder

__all__ = ["Job", "Report", "campaign", "parse_budget", "plan"]

MORE_SEEDS = ("more seeds",)
ORDER = (  # words that a cell's `where` holds; one seed of each, until it says otherwise
    *(("table3", "resnet20"), ("table1",), ("fig1",), ("fig2",), ("fig4bc",), ("fig3",)),
    MORE_SEEDS,  # of those that matter most
    *(("fig4a",), ("table3", "vggnet17"), ("table2", "m5"), ("table3", "googlenet18"), ("table2", "m10")),
)
FIRST = (("table3", "resnet20", "cifar10"), ("table1",))  # get more seeds before the rest has one
SKIPPED = (Diverged, FolderInUseError, FileNotFoundError, torch.OutOfMemoryError)  # on to the next run


@dataclass(frozen=True)
class Job:
    """Seeds of one recipe that are to be trained together."""

    name: str
    seeds: tuple[int, ...]
    cells: tuple[str, ...]  # ids of what it fills
    seconds: float  # expected, from where it stands
    done: float = 0.0  # share of the steps that an interrupted run has behind it


@dataclass
class Report:
    """What a campaign did."""

    jobs: list[Job]  # all that was missing when it began, in order
    records: list[Record] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # run -> why it was not finished


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
    report = Report(plan(cells, seeds=seeds, results=results, runs=runs, shard=shard, options=options))
    for job in [] if dry_run else report.jobs:
        left = None if budget_seconds is None else budget_seconds - (time.monotonic() - begun)
        seconds, _ = _outlook(job.name, job.seeds, load_records(results), runs, options)  # learned meanwhile
        if left is not None and (left <= 0 or (seconds > left and not unfinished)):
            report.left[_label(job)] = f"expected to take {seconds:.0f} s, {max(left, 0):.0f} s left"
            continue
        say(f"{_label(job)}: started, expected to take {seconds:.0f} s")
        try:
            with stopping_after(left):
                done = run(
                    job.name, job.seeds, out=runs, results=results, root=root, cache=cache, options=options
                )
        except Interrupted as stop:
            report.left[_label(job)] = str(stop)
            break
        except SKIPPED as error:
            report.left[_label(job)] = f"{type(error).__name__}: {error}"
            continue
        report.records += done
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
        for rank, missing in _missing(named[name], seeds, records):
            outlook = _outlook(name, missing, records, runs, options or Options())
            ranked.append((rank, Job(name, missing, tuple(cell.id for cell in named[name]), *outlook)))
    return [job for _, job in sorted(ranked, key=lambda pair: pair[0])]


def _missing(
    cells: list[Cell], seeds: Sequence[int], records: list[Record]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(rank, seeds): the first seed alone, as early as its cells; then all others together."""
    checksums = known_checksums(records)
    have = {r.seed for r in records if all(fills(r, cell, checksums) for cell in cells)}
    if seeds and seeds[0] not in have:
        yield min(map(_rank, cells)), (seeds[0],)
    if others := tuple(seed for seed in seeds[1:] if seed not in have):
        early = any(set(words) <= set(cell.where) for words in FIRST for cell in cells)
        yield ORDER.index(MORE_SEEDS) if early else len(ORDER) + 1, others


def _rank(cell: Cell) -> int:
    words = {*cell.where, cell.where[0].rstrip("abc")}
    return next((rank for rank, wanted in enumerate(ORDER) if set(wanted) <= words), len(ORDER))


def _outlook(
    name: str, seeds: tuple[int, ...], records: list[Record], runs: str | Path, options: Options
) -> tuple[float, float]:
    """Expected seconds to the end, and the share of the steps that an interrupted run has behind it."""
    recipe, device = find(name), find_device(options.device)
    kept = (run_folder(runs, name, recipe, seeds) / "checkpoints").glob("step-*.safetensors")
    reached = max((int(path.name.split("-")[1]) for path in kept), default=0)
    done = min(reached / recipe.total_steps(EXAMPLES.get(recipe.data or "", 1000)), 1.0)
    cpu = device.type == "cpu"
    return expected_seconds(recipe, len(seeds), records, device_name(device), cpu=cpu) * (1 - done), done


def _label(job: Job) -> str:
    return f"{job.name} seed {', '.join(map(str, job.seeds))}"
