"""`cmcl reproduce`: the paper's tables and figures, as far as the time reaches, and how far they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Budget, Device, Precision, Quiet, Results, Root, Runs
from .shared import (
    FAILED,
    TIME_OVER,
    check_writable_folder,
    engine_options,
    note,
    number,
    print_json,
    print_table,
)
from .stopping import on_ctrl_c

if TYPE_CHECKING:
    from ..reproduction import Cell
    from ..reproduction.campaign import Job, Report

GO_ON = "the same command goes on"
SEARCHES = ("heldout", "test")


def reproduce(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="table1|table2|table3|fig1|fig2|fig3|fig4|all", help="Or ids of cells."),
    ] = None,
    root: Root = None,
    out: Runs = Path("runs"),
    results: Results = Path("results"),
    seeds: Annotated[int, typer.Option(min=1, help="How many: 5 is 0 to 4.")] = 1,
    cells: Annotated[str, typer.Option(metavar="I/N", help="The I-th of N parts, for N machines.")] = "1/1",
    budget: Budget = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Start also what will not end in time; it saves itself.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the runs and their costs.")] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Only list the cells, the paper's and ours.")
    ] = False,
    search: Annotated[
        str | None,
        typer.Option(
            metavar="heldout|test",
            help="Try CMCL with the paper's betas and Ks; choose on held-out data, or on the test set, "
            "as the paper presumably did.",
        ),
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train what is missing of the paper's tables and figures.

    A finished run is never repeated: start the same command again, here or on another machine that has
    the records.
    """
    from ..reproduction.cells import select

    if not what and not status:
        raise ValueError("name what to reproduce: table1, table2, table3, fig1, fig2, fig3, fig4 or all.")
    chosen, shard = select(what or ["all"]), _part(cells)
    if status:
        _status(chosen, results, as_json)
        return
    from ..reproduction.campaign import plan

    searched = _search(chosen, search)
    wanted = [cell for several in searched.values() for cell in several] if search else chosen
    how: dict[str, Any] = {
        "seeds": range(seeds),
        "results": results,
        "runs": out,
        "root": root,
        "shard": shard,
    }
    how["options"] = engine_options(device, precision, quiet=quiet or dry_run)
    with on_ctrl_c(GO_ON):
        if not dry_run and plan(wanted, **how):  # where nothing is missing, nothing is written
            check_writable_folder(out, "--out")
            check_writable_folder(results, "--results")
        report = _campaign(
            wanted, **how, budget=budget, unfinished=unfinished, dry_run=dry_run, say=not as_json
        )
    if dry_run:
        _print_plan(report.jobs, as_json)
        return
    choices = {name: _choice(several, results, search) for name, several in searched.items()}
    if as_json:
        done = [record.file_name for record in report.records]
        print_json({"done": done, "left": report.left} | ({"chosen": choices} if search else {}))
    else:
        for name, choice in choices.items():
            typer.echo(_describe_choice(name, choice))
    if (code := _code(report)) == TIME_OVER:
        note(_go_on(report))
    raise typer.Exit(code)


def _campaign(cells: "Sequence[Cell]", *, budget: str | None, say: bool, **more: Any) -> "Report":
    from ..reproduction.campaign import campaign, parse_budget

    seconds = None if budget is None else parse_budget(budget)
    return campaign(cells, budget_seconds=seconds, say=typer.echo if say else lambda line: None, **more)


def _code(report: "Report") -> int:
    """0: all is there. 3: time was over. 1: something failed. Only missing data is a mistake, and says so."""
    missing = [r for r in report.left.values() if r.startswith("FileNotFoundError: ")]
    if missing and len(missing) == len(report.left) and not report.records:
        raise FileNotFoundError(missing[0].removeprefix("FileNotFoundError: "))
    return TIME_OVER if report.late else FAILED if report.left else 0


def _go_on(report: "Report") -> str:
    """What to do next; the same again would do nothing, if nothing is short enough for the budget."""
    if report.moved:
        return f"not all is done: {GO_ON}."
    shortest = min(report.late, key=lambda job: job.seconds)
    return (
        f"nothing came of it: of what there was no time for, the shortest run is expected to take "
        f"{_duration(shortest.seconds)} on {shortest.device}. "
        "Give it a longer --budget, or --unfinished to start what will need several."
    )


def _part(text: str) -> tuple[int, int]:
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ValueError(f"--cells must look like 2/3, the second of three parts. Got {text!r}.")
    return int(i), int(n)


def _status(cells: "Sequence[Cell]", results: Path, as_json: bool) -> None:
    from ..reproduction.cells import summarise
    from ..reproduction.record import load_records

    summary = summarise(cells, load_records(results))
    if as_json:
        print_json(summary)
        return
    rows = []
    for cell in summary:
        ours, paper = cell["ours"] or {}, cell["paper"]
        numbers = [value for key in ("top1", "oracle") for value in (paper[key], ours.get(key))]
        partial = f"{len(cell['partial'])} partial" if cell["partial"] and not ours else ""
        n = ours["top1"]["n"] if ours else partial or None
        rows.append((cell["id"], *(_spread(v) if isinstance(v, dict) else number(v) for v in numbers), n))
    columns = ("cell", ">paper top-1 %", ">ours", ">paper oracle %", ">ours", ">seeds")
    print_table(columns, rows)
    done = sum(cell["ours"] is not None for cell in summary)
    typer.echo(f"\n{done} of {len(summary)} cells have a record in {results}/records.")


def _spread(value: dict[str, Any]) -> str:
    return f"{value['mean']:.2f}" + ("" if value["std"] is None else f" ± {value['std']:.2f}")


def _print_plan(jobs: "list[Job]", as_json: bool) -> None:
    import torch

    if as_json:
        keys = ("name", "seeds", "cells", "seconds", "done", "device")
        print_json([{key: getattr(job, key) for key in keys} for job in jobs])
        return
    rows = [
        (
            job.name,
            ",".join(map(str, job.seeds)),
            ", ".join(dict.fromkeys(cell.split("/")[0] for cell in job.cells)),
            _duration(job.seconds),
            f"{job.done:.0%}" if job.done else None,
        )
        for job in jobs
    ]
    print_table(("recipe", "seeds", "fills", ">expected", ">done"), rows)
    total = _duration(sum(job.seconds for job in jobs))
    where = f"{jobs[0].device}{'' if torch.cuda.is_available() else ' (no GPU was found)'}" if jobs else ""
    typer.echo(f"\n{len(jobs)} runs, {total} in all, on {where}." if jobs else "Nothing is missing.")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m" if minutes else "<1m"


def _search(cells: "Sequence[Cell]", how: str | None) -> "dict[str, list[Cell]]":
    from ..data.registry import nearest
    from ..reproduction.cells import search

    if how is None:
        return {}
    if how not in SEARCHES:
        raise ValueError(f"--search must be heldout or test. Got {how!r}. {nearest(how, list(SEARCHES))}")
    found = search(cells, on_test=how == "test")
    if not found:
        raise ValueError("--search must have a CMCL recipe to search. Got none in these cells. Try table3.")
    return found


def _choice(cells: "Sequence[Cell]", results: Path, how: str | None) -> dict[str, Any] | None:
    """The best of a search, once all of it is there."""
    from ..reproduction.cells import choose
    from ..reproduction.record import load_records

    hashes = {cell.name: cell.recipe.hash for cell in cells}
    records = [r for r in load_records(results) if hashes.get(r.name) == r.recipe_hash and r.complete]
    if {record.name for record in records} != set(hashes):
        return None
    choice = choose(records, on="test" if how == "test" else "validation")
    return {key: choice["recipe"][key] for key in ("beta", "overlap")} | {
        key: choice[key] for key in ("name", "chosen_on", "top1")
    }


def _describe_choice(name: str, choice: dict[str, Any] | None) -> str:
    if choice is None:
        return f"{name}: the search is not finished"
    on = "the test set, as the paper presumably chose" if choice["chosen_on"] == "test" else "held-out data"
    best = f"beta {choice['beta']:g}, K {choice['overlap']}"
    return (
        f"{name}: {best}, chosen on {on} (top-1 {_spread(choice['top1'])} % there). On all data: "
        f"cmcl train {name} --beta {choice['beta']:g} --overlap {choice['overlap']}"
    )
