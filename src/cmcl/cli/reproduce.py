"""`cmcl reproduce` and `cmcl report`: train what is missing of the paper's results, and show records."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from .._messages import needing_extra
from . import common

if TYPE_CHECKING:
    from ..reproduction import Cell
    from ..reproduction.campaign import Job, Report

WHAT = "table1, table2, table3, fig1, fig2, fig3, fig4 or all; default, modern"
SEARCH = "Try the paper's values of beta and K; choose on held-out data or on test data."
SEARCHES = ("heldout", "test")
LAUNCHERS = ("local", "slurm")
FORMATS = {"html": "report.html", "md": "report.md", "svg": "figures", "png": "figures", "pdf": "figures"}
SOURCES = ("results", "runs", "cmcl-demo")  # folders that `cmcl report` looks for


def reproduce(
    what: Annotated[
        list[str] | None, Argument(metavar="WHAT", help=f"{WHAT}; or ids of cells, or recipes.")
    ] = None,
    root: common.Root = None,
    out: common.RunsFolder = Path("runs"),
    results: Annotated[Path, Option(help="Folder whose records/ holds the records.")] = Path("results"),
    seed: common.Seed = 0,
    seeds: common.Seeds = 1,
    part: Annotated[str, Option(metavar="I/N", help="The I-th of N parts, for N machines.")] = "1/1",
    budget: common.Budget = None,
    unfinished: Annotated[
        bool, Option("--unfinished", help="Also start runs that exceed the budget.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list the runs and their expected time.")] = False,
    status: Annotated[bool, Option("--status", help="Only list the paper's results and ours.")] = False,
    search: Annotated[str | None, Option(metavar="heldout|test", help=SEARCH)] = None,
    launcher: Annotated[
        str | None, Option(metavar="local|slurm", help="Start each run as a task of a scheduler.")
    ] = None,
    jobs: Annotated[int, Option(min=1, help="Number of tasks of --launcher at a time.")] = 1,
    slurm: Annotated[
        common.Pairs, Option(metavar="NAME=VALUE", help="Setting of sbatch, such as partition=gpu.")
    ] = None,
    evaluate_every: common.EvaluateEvery = 0,
    save_every: common.SaveEvery = 60.0,
    device: common.Device = "auto",
    precision: common.Precision = "auto",
    quiet: common.Quiet = False,
    as_json: common.AsJson = False,
) -> None:
    """Train what is missing of the paper's tables and figures.

    A finished run is never repeated, and an interrupted one resumes: start the same command again, here or on
    another machine that has the records. With --launcher it waits for its tasks; Ctrl-C cancels them.
    """
    if not what and not status:
        raise ValueError(f"name what to reproduce: {WHAT}. Got nothing.")
    from ..reproduction.cells import choose
    from ..reproduction.record import load_records

    chosen, shard = _cells(what or ["all"]), _part(part)
    if status:
        _status(chosen, results, as_json)
        return
    searched = _search(chosen, search)
    wanted = [cell for several in searched.values() for cell in several] if search else chosen
    common.check_choice("--launcher", launcher, LAUNCHERS)
    if slurm and launcher != "slurm":
        raise ValueError(f"--slurm must be used with --launcher slurm. Got {launcher}.")
    with common.stoppable():
        from ..reproduction.campaign import Work, campaign, parse_budget

        options = common.run_options(
            device,
            precision,
            here=launcher is None,
            quiet=quiet,
            evaluate_every=evaluate_every,
            checkpoint_seconds=save_every,
        )
        work = Work(wanted, results, out, common.seed_range(seed, seeds), root, shard, options)
        seconds = None if budget is None else parse_budget(budget)
        missing = work.missing()
        if dry_run:
            _print_plan(missing, as_json)
            return
        if missing:  # otherwise nothing is written
            common.check_writable(out, "--out", folder=True)
            common.check_writable(results, "--results", folder=True)
        say = (lambda line: None) if as_json else common.say
        how: dict[str, Any] = {"budget_seconds": seconds, "unfinished": unfinished, "say": say}
        if launcher is None:
            report = campaign(work, **how)
        else:
            with needing_extra("slurm", "submitit"):
                from ..reproduction.launch import launch
            settings = common.parse_pairs(slurm, "--slurm")
            report = launch(work, **how, launcher=launcher, parallel=jobs, settings=settings)
    records, on_test = load_records(results) if search else [], search == "test"
    choices = {name: choose(several, records, on_test=on_test) for name, several in searched.items()}
    if as_json:
        done = [record.file_name for record in report.records]
        common.print_json({"done": done, "left": report.left} | ({"chosen": choices} if search else {}))
    else:
        for name, choice in choices.items():
            common.say(_describe_choice(name, choice))
    if (code := _exit_code(report)) == common.TIME_OVER:
        common.note(_hint(report))
    raise typer.Exit(code)


def _cells(words: Sequence[str]) -> "list[Cell]":
    """The cells of tables, figures and ids; a recipe by name is a cell of its own."""
    from ..reproduction.cells import Cell, select
    from ..reproduction.recipes import RECIPES

    recipes = [Cell(f"recipe/{word}", word, ("recipe",)) for word in words if word in RECIPES]
    return select([word for word in words if word not in RECIPES]) + recipes


def _part(text: str) -> tuple[int, int]:
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ValueError(f"--part must look like 2/3, the second of three parts. Got {text!r}.")
    return int(i), int(n)


def _exit_code(report: "Report") -> int:
    """0: all is there. 3: the time was over. 1: a run failed. Missing data alone is the user's mistake."""
    missing = [error for error in report.errors.values() if isinstance(error, FileNotFoundError)]
    if missing and len(missing) == len(report.left) and not report.records:
        raise missing[0]
    return common.TIME_OVER if report.late else common.FAILED if report.left else 0


def _hint(report: "Report") -> str:
    """How to continue; the same command would do nothing if no run is short enough for the budget."""
    if report.stopped:
        return f"stopped by {report.stopped}: {common.SAME_COMMAND}."
    if report.progressed:
        return f"time is over: {common.SAME_COMMAND}."
    seconds = min(job.seconds or 0.0 for job in report.late)
    return (
        f"no run was started: the shortest is expected to take {_duration(seconds)} on "
        f"{report.late[0].device}. Pass a longer --budget, or --unfinished to start runs that need several."
    )


def _status(cells: "Sequence[Cell]", results: Path, as_json: bool) -> None:
    from ..reproduction.cells import summarise
    from ..reproduction.record import load_records, spread_text

    summary = summarise(cells, load_records(results))
    if as_json:
        common.print_json(summary)
        return
    rows = []
    for cell in summary:
        ours, paper = cell["ours"] or {}, cell["paper"]
        numbers = [value for key in ("top1", "oracle") for value in (paper[key], ours.get(key))]
        partial = f"{len(cell['partial'])} partial" if cell["partial"] and not ours else ""
        n = ours["top1"]["n"] if ours else partial or None
        rows.append(
            (cell["id"], *(spread_text(v) if isinstance(v, dict) else common.number(v) for v in numbers), n)
        )
    columns = ("cell", ">paper top-1 %", ">ours", ">paper oracle %", ">ours", ">seeds")
    common.print_table(columns, rows)
    done = sum(cell["ours"] is not None for cell in summary)
    common.say(f"\n{done} of {len(summary)} cells have a record in {results}/records.")


def _print_plan(jobs: "Sequence[Job]", as_json: bool) -> None:
    import torch

    if as_json:
        keys = ("name", "seed", "cells", "seconds", "done", "device")
        common.print_json([{key: getattr(job, key) for key in keys} for job in jobs])
        return
    if not jobs:
        common.say("Nothing is missing.")
        return
    rows = [
        (
            job.name,
            job.seed,
            ", ".join(dict.fromkeys(cell.split("/")[0] for cell in job.cells)),
            "unknown" if job.seconds is None else _duration(job.seconds),
            f"{job.done:.0%}" if job.done else None,
        )
        for job in jobs
    ]
    common.print_table(("recipe", ">seed", "for", ">expected", ">done"), rows)
    known, total = [job.seconds for job in jobs if job.seconds is not None], f"{len(jobs)} runs"
    if known:
        total += f", {_duration(sum(known))} in all"
    if len(known) < len(jobs):
        total += f", {len(jobs) - len(known)} of unknown time"
    gpu = "" if torch.cuda.is_available() else " (no GPU was found)"
    common.say(f"\n{total}, on {jobs[0].device}{gpu}.")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m" if minutes else "<1m"


def _search(cells: "Sequence[Cell]", how: str | None) -> "dict[str, list[Cell]]":
    from ..reproduction.cells import search

    if how is None:
        return {}
    common.check_choice("--search", how, SEARCHES)
    found = search(cells, on_test=how == "test")
    if not found:
        raise ValueError("--search must have a CMCL recipe to search. Got none in these cells. Try table3.")
    return found


def _describe_choice(name: str, choice: dict[str, Any] | None) -> str:
    from ..reproduction.record import spread_text

    if choice is None:
        return f"{name}: the search is not finished"
    on = "test data, as the paper presumably did" if choice["chosen_on"] == "test" else "held-out data"
    best = f"beta {choice['beta']:g}, K {choice['overlap']}"
    return (
        f"{name}: {best}, chosen on {on} (top-1 {spread_text(choice['top1'])} % there). On all data: "
        f"cmcl train {name} --beta {choice['beta']:g} --overlap {choice['overlap']}"
    )


def report(
    sources: Annotated[
        list[Path] | None,
        Argument(metavar="FOLDER", help="Run folders, folders of them, or a folder with records/."),
    ] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="File to write, or folder for figures.")] = None,
    format: Annotated[str, Option(help=f"{', '.join(FORMATS)}.")] = "html",
) -> None:
    """Write a page, tables or figures from records."""
    common.check_choice("--format", format, FORMATS)
    folders = sources or [Path(name) for name in SOURCES if Path(name).is_dir()][:1]
    if not folders:
        usual = " or ".join(f"{name}/" for name in SOURCES)
        raise FileNotFoundError(f"{usual} must exist to report on. Got none. Name a run folder.")
    for path in folders:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} must be a folder with records. {common.nearest_folder(path)}")
    file = out or Path(FORMATS[format])
    common.check_writable(file, "--out", folder=format not in {"html", "md"})
    from ..report import write

    typer.echo(write(folders, file, format=format))
