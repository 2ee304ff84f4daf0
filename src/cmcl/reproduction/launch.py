"""A campaign whose runs are tasks of a scheduler: SLURM, or processes of this machine. Through submitit.

The scheduler starts a task again that was preempted, and the run resumes from its checkpoint.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import submitit
import torch
from submitit.core.utils import UncompletedJobError

from ..training.checkpoint import Signals
from .campaign import Job, Report, Work, campaign

LOGS = "tasks"  # folder, beside the run folders, of what tasks print
FOREVER = 10**7  # minutes; a local task has no time limit
SLURM: dict[str, Any] = {
    "job_name": "cmcl",
    "time": 24 * 60,  # minutes, after which the task is requeued
    "additional_parameters": {"requeue": True},  # after preemption, or if its node fails
}
REQUEUES = 1000  # after the time limit
POLL = 0.5  # seconds between looks at the tasks
LOOK = 60.0  # seconds between looks at SLURM's queue


@dataclass(frozen=True)
class Task:
    """A campaign of its own over one recipe and seed."""

    work: Work
    how: Mapping[str, Any]  # the other arguments of `campaign`

    def __call__(self) -> Report:
        """Train it; after a signal, exit without an outcome: the scheduler starts the task again."""
        report = campaign(self.work, **self.how)
        if report.stopped:
            raise SystemExit(f"stopped by {report.stopped}; the run is saved")
        return report

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """The same again: submitit requeues it before its time limit."""
        return submitit.helpers.DelayedSubmission(self)


def launch(
    work: Work,
    *,
    launcher: str,
    parallel: int,
    settings: Mapping[str, Any] | None = None,
    say: Callable[[str], Any] = lambda line: None,
    **how: Any,
) -> Report:
    """Train what is missing, each recipe and seed as a task, and wait for all of them.

    SIGINT and SIGTERM cancel the tasks; then their runs are saved.

    Args:
        work, say: as for `campaign`.
        launcher: "slurm": an array of jobs; the folders must be on a disk that all nodes see. "local":
            processes of this machine, which take its GPUs in turn.
        parallel: the number of tasks at a time.
        settings: of sbatch, as submitit names them, such as partition, time, gpus_per_node and mem.
        how: the other arguments of `campaign`; `budget_seconds` is that of each task.
    """
    report = Report(work.missing())
    logs = Path(work.runs) / LOGS / time.strftime("%Y%m%d-%H%M%S")  # process ids are used again
    executor = _executor(launcher, logs, parallel, settings or {})
    todo = list(report.jobs)
    running: dict[int, tuple[Job, submitit.Job[Report]]] = {}  # by slot
    queue = Queue() if launcher == "slurm" else None
    with Signals() as signals:
        while (todo or running) and not signals.received:
            slots = range(len(todo)) if launcher == "slurm" else range(parallel)
            started = dict(zip((slot for slot in slots if slot not in running), todo, strict=False))
            todo = todo[len(started) :]
            tasks = {slot: Task(_part(work, job), how) for slot, job in started.items()}
            for slot, task in _submit(executor, tasks, launcher).items():
                running[slot] = started[slot], task
                say(f"{started[slot].label}: task {task.job_id}, which writes {task.paths.stderr}")
            lost = queue.lacks({task.job_id for _, task in running.values()}) if queue else set()
            for slot, (job, task) in list(running.items()):
                if (done := task.done()) or task.job_id in lost:
                    del running[slot]
                    say(_take(report, job, task, done))
            time.sleep(POLL)
        if running:
            say(f"stopped by {signals.received}: cancelling {len(running)} tasks")
            _cancel([task for _, task in running.values()])
    report.stopped = signals.received
    report.late += [*(job for job, _ in running.values()), *todo]
    return report


def _part(work: Work, job: Job) -> Work:
    """The work of one job."""
    own = [cell for cell in work.cells if cell.name == job.name]
    return replace(work, cells=own, seeds=(job.seed,), shard=(1, 1))


class Queue:
    """SLURM's queue. Where SLURM keeps no accounts, submitit waits forever for a task that was killed."""

    def __init__(self) -> None:
        self._looked, self._missing = time.monotonic(), set[str]()

    def lacks(self, tasks: set[str]) -> set[str]:
        """Those of the tasks that two looks in turn did not find: the file of an outcome may come late."""
        if time.monotonic() - self._looked < LOOK:
            return set()
        command = ["squeue", "--me", "--array", "--noheader", "--format=%i"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        missing = tasks.difference(found.stdout.split()) if found.returncode == 0 else set()
        twice, self._missing, self._looked = missing & self._missing, missing, time.monotonic()
        return twice


def _cancel(tasks: Sequence["submitit.Job[Report]"]) -> None:
    """End tasks, whose runs save themselves; wait for those of this machine."""
    local = [task for task in tasks if isinstance(task, submitit.LocalJob)]
    for task in tasks:
        if task not in local:
            task.cancel(check=False)
    while alive := [task for task in local if not task.done()]:
        for task in alive:  # again and again: what has not begun to train ignores it
            os.kill(int(task.job_id), signal.SIGTERM)  # which passes it on
        time.sleep(POLL)


def _executor(launcher: str, folder: Path, parallel: int, settings: Mapping[str, Any]) -> submitit.Executor:
    if launcher == "local":
        if settings:
            raise ValueError(f"settings must be for slurm. Got {', '.join(settings)} for local.")
        local = submitit.LocalExecutor(folder)
        local.update_parameters(timeout_min=FOREVER)
        return local
    logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns where SLURM keeps no accounts
    try:
        slurm = submitit.SlurmExecutor(folder, max_num_timeout=REQUEUES)
    except RuntimeError as error:
        raise ValueError(f"launcher must be one that this machine has. Got slurm. {error}") from None
    slurm.update_parameters(**SLURM | {"array_parallelism": parallel} | dict(settings))
    return slurm


def _submit(
    executor: submitit.Executor, tasks: Mapping[int, Task], launcher: str
) -> dict[int, submitit.Job[Report]]:
    """The submitted tasks by slot: together, as one array; or one by one, each with its GPU."""
    if launcher == "slurm":
        return dict(zip(tasks, executor.submit_array(list(tasks.values())), strict=True)) if tasks else {}
    named = [int(gpu) for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.isdecimal()]
    gpus = named or list(range(torch.cuda.device_count()))
    found = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is ours: tasks get SIGTERM
    try:
        for slot, task in tasks.items():
            if gpus:
                executor.update_parameters(gpus_per_node=1, visible_gpus=[gpus[slot % len(gpus)]])
            found[slot] = executor.submit(task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return found


def _take(report: Report, job: Job, task: "submitit.Job[Report]", done: bool) -> str:
    """Add the outcome of a task to the report; a line about it."""
    found = Report([], errors={job.label: RuntimeError(f"its task ended early: see {task.paths.stderr}")})
    if done:
        with suppress(UncompletedJobError):
            found = task.result()
    report.records += found.records
    report.late += found.late
    report.errors |= found.errors
    report.progressed |= found.progressed
    seconds = sum(record.seconds for record in found.records)
    return f"{job.label}: {found.left.get(job.label) or f'done in {seconds:.0f} s'}"
