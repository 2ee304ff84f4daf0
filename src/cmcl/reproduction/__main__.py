"""`python -m cmcl.reproduction run RECIPE... --out DIR`: train recipes and leave records, from source.

`campaign CELLS... --out DIR --results DIR` does what is missing of tables and figures, `status` tells what
there is. Exit code 3: the time was over, and the same command goes on from there.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from ..training import Diverged, Interrupted, Options
from ..training.checkpoint import DamagedError
from .campaign import campaign
from .cells import CELLS, select, summarise
from .deadline import parse_budget, stopping_after
from .recipes import find
from .record import load_records
from .run import run


def main() -> int:
    """Parse and do."""
    asked = _parser().parse_args()
    try:
        return int(asked.do(asked))
    except ValueError as error:
        _say(f"cmcl: {error}")
        return 2


def _run(asked: argparse.Namespace) -> int:
    end, code = time.monotonic() + (asked.budget or float("inf")), 0
    tried_out = asked.steps or asked.test_limit
    for name in asked.recipes:
        wanted, left = find(name).hash, end - time.monotonic()
        records = [] if tried_out or asked.results is None else load_records(asked.results)
        have = {r.seed for r in records if r.recipe_hash == wanted and r.complete}
        seeds = [seed for seed in asked.seeds if seed not in have]
        if not seeds:
            _say(f"{name}: has its records")
            continue
        if left <= 0:
            _say(f"{name}: no time left")
            return 3
        places = {"out": asked.out, "results": asked.results, "root": asked.root}
        try:
            with stopping_after(left if asked.budget else None):
                found = run(
                    name,
                    seeds,
                    **places,
                    options=_options(asked),
                    steps=asked.steps,
                    test_limit=asked.test_limit,
                )
        except Interrupted as stop:
            _say(f"{name}: {stop}".replace("go on with resume=True", "the same command goes on"))
            return 3
        except (Diverged, DamagedError) as error:
            _say(f"{name}: {error}")
            code = 1
            continue
        for record in found:
            top1, oracle = record.errors["expected"]["top1"], record.errors["expected"]["oracle"]
            _say(f"{name} seed {record.seed}: top-1 {top1:.2f} oracle {oracle:.2f}, {record.seconds:.0f} s")
    return code


def _campaign(asked: argparse.Namespace) -> int:
    report = campaign(
        select(asked.cells),
        seeds=asked.seeds,
        results=asked.results,
        runs=asked.out,
        root=asked.root,
        budget_seconds=asked.budget,
        shard=asked.part,
        unfinished=asked.unfinished,
        dry_run=asked.dry_run,
        options=_options(asked),
        say=_say,
    )
    for job in report.jobs if asked.dry_run else ():
        started = f", {job.done:.0%} done" if job.done else ""
        _say(f"{job.name} seeds {job.seeds}: {job.seconds / 60:.1f} minutes on {job.device}{started}")
    return 3 if report.left else 0


def _status(asked: argparse.Namespace) -> int:
    _say(json.dumps(summarise(CELLS, load_records(asked.results)), indent=1))
    return 0


def _options(asked: argparse.Namespace) -> Options:
    return Options(
        quiet=asked.quiet, evaluate_every=asked.evaluate_every, checkpoint_seconds=asked.save_every
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cmcl.reproduction", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one, many, status = (commands.add_parser(word) for word in ("run", "campaign", "status"))
    one.set_defaults(do=_run)
    many.set_defaults(do=_campaign)
    status.set_defaults(do=_status)
    one.add_argument("recipes", nargs="+", metavar="RECIPE")
    one.add_argument("--steps", type=int, help="shorten the runs, to try them out")
    one.add_argument("--test-limit", type=int, help="measure on so many test examples only")
    one.add_argument("--results", type=Path, help="folder whose records/ gets the records")
    many.add_argument("cells", nargs="+", metavar="CELLS", help="table1, fig4, ..., ids of cells, or all")
    many.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="the I-th of N parts")
    many.add_argument("--unfinished", action="store_true", help="start also what will not end in time")
    many.add_argument("--dry-run", action="store_true", help="only show the plan")
    for command in (many, status):
        command.add_argument("--results", type=Path, default=Path("results"), help="has the records/")
    for command in (one, many):
        command.add_argument("--root", type=Path, help="folder of the data sets")
        command.add_argument("--out", type=Path, default=Path("runs"), help="folder of run folders")
        command.add_argument("--seeds", type=int, nargs="+", default=[0])
        command.add_argument("--budget", type=parse_budget, help="such as 9m: then save and leave")
        command.add_argument("--evaluate-every", type=int, default=0, metavar="EPOCHS")
        command.add_argument("--save-every", type=float, default=60.0, metavar="SECONDS")
        command.add_argument("--quiet", action="store_true")
    return parser


def _part(text: str) -> tuple[int, int]:
    i, _, n = text.partition("/")
    return int(i), int(n)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
