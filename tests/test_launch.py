"""Runs as tasks of a scheduler: what a task does after a signal, and processes of this machine. SLURM: cluster/."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import cmcl
from cmcl.reproduction import Cell, campaign
from cmcl.reproduction.campaign import Work
from cmcl.reproduction.recipes import RECIPES
from cmcl.reproduction.record import load_records
from cmcl.training.checkpoint import last_step
from test_campaign import LONG, MCL, TINIES

submitit = pytest.importorskip("submitit")
launch = pytest.importorskip("cmcl.reproduction.launch")
OPTIONS = cmcl.Options(device="cpu", quiet=True)


@pytest.fixture
def work(monkeypatch, tmp_path):
    for name, recipe in TINIES.items():
        monkeypatch.setitem(RECIPES, name, recipe)
    return Work((), tmp_path / "results", tmp_path / "runs", options=OPTIONS)


def test_a_task_is_a_campaign_over_one_recipe_and_seed(work):
    task = launch.Task(replace(work, cells=[MCL], seeds=(3,)), {})
    again = task.checkpoint()
    report = pickle.loads(pickle.dumps(task))()  # noqa: S301
    assert [(record.name, record.seed) for record in report.records] == [("tiny-mcl", 3)]
    assert pickle.loads(pickle.dumps(report)).left == {}  # noqa: S301
    assert again.function is task, "what submitit requeues before the time limit"
    assert task().records == [], "it has its record"


def test_the_settings_of_sbatch_that_the_guide_names_exist():
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "many-machines.md").read_text()
    listed = re.search(r"names it: (.+?), \.\.\.", guide, re.DOTALL)[1]
    named = {*re.findall(r"--slurm ([a-z_]+)=", guide), *re.findall(r"`(\w+)`", listed)}
    assert {"partition", "gpus_per_node", "mem", "cpus_per_task"} <= named
    assert named <= submitit.SlurmExecutor._valid_parameters()


def test_a_task_without_time_left_says_so(work):
    report = launch.Task(replace(work, cells=[LONG]), {"budget_seconds": 0.01, "unfinished": True})()
    assert report.left == {"tiny-long seed 0": "no time left"}


def test_a_task_after_a_signal_exits_without_an_outcome(work, monkeypatch):
    """So that the scheduler, which starts it again, does not take it for finished."""

    def stop(*rest, **more):
        raise cmcl.Interrupted(3, 9, "SIGTERM")

    monkeypatch.setattr(campaign, "run", stop)
    with pytest.raises(SystemExit, match="stopped by SIGTERM; the run is saved"):
        launch.Task(replace(work, cells=[MCL]), {})()


def test_the_queue_of_slurm_lacks_what_two_looks_did_not_find(monkeypatch, tmp_path):
    squeue = tmp_path / "squeue"
    squeue.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(launch, "LOOK", 0.0)
    queue, looks = launch.Queue(), []
    for answer in ("echo 7_0 7_2", "exit 1", "echo 7_0 7_1", "echo 7_1", "echo 7_1"):
        squeue.write_text(f"#!/bin/sh\n{answer}\n")
        looks.append(queue.lacks({"7_0", "7_1"}))
    assert looks == [set(), set(), set(), set(), {"7_0"}]
    monkeypatch.setattr(launch, "LOOK", 60.0)
    assert queue.lacks({"7_0"}) == set(), "not yet"


def test_mistakes(work, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="Got slurm. Could not detect"):
        launch.launch(work, launcher="slurm", parallel=1)
    with pytest.raises(ValueError, match="settings must be for slurm. Got partition for local."):
        launch.launch(work, launcher="local", parallel=1, settings={"partition": "gpu"})


def test_mistakes_on_the_command_line(mistake, monkeypatch, tmp_path):
    err = mistake("reproduce", "fig1", "--slurm", "a=1")
    assert "--slurm must be used with --launcher slurm. Got None." in err
    assert "--launcher must be one of local, slurm." in mistake("reproduce", "fig1", "--launcher", "pbs")
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.delitem(sys.modules, "cmcl.reproduction.launch")
    words = ("digits-single", "--launcher", "local", "--out", tmp_path / "runs", "--results", tmp_path / "r")
    message = "this needs submitit. Install it with: pip install 'confident-mcl[slurm]'."
    assert mistake("reproduce", *words) == f"cmcl: {message}\n"


@pytest.mark.slow
def test_processes_of_this_machine_one_of_which_is_killed(tmp_path):
    """It is reported with its log; the others end; the same command resumes it."""
    command = [sys.executable, "-m", "cmcl", "reproduce", "digits-ie", "--seeds", "3", "--device", "cpu"]
    command += ["--launcher", "local", "--jobs", "2", "--save-every", "0.2", "--json"]
    command += ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    victim = killed_at_a_checkpoint(tmp_path / "runs", process)
    out, _ = process.communicate()
    (label,) = json.loads(out)["left"]
    assert process.returncode == 1
    assert label == f"digits-ie seed {victim}"
    assert "its task ended early: see " in json.loads(out)["left"][label]
    assert len(json.loads(out)["done"]) == 2
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == {
        "done": [f for f in files(tmp_path) if f"seed{victim}" in f],
        "left": {},
    }
    assert len(files(tmp_path)) == 3
    (run,) = (tmp_path / "runs").glob(f"digits-ie--*--seed{victim}")
    steps = [json.loads(line)["step"] for line in (run / "environment.jsonl").read_text().splitlines()]
    assert steps[0] == 0
    assert steps[1] > 0, "resumed"


def living(session):
    """The processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, of, *_ = (path / "stat").read_text().rpartition(")")[2].split()
            found += [int(path.name)] if state != "Z" and int(of) == session else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_the_tasks(tmp_path, number):
    """SIGTERM to the command alone, SIGINT to all as by Ctrl-C: the runs are saved, and no task lives on."""
    command = [sys.executable, "-m", "cmcl", "reproduce", "digits-ie", "--seeds", "3", "--device", "cpu"]
    command += ["--launcher", "local", "--jobs", "2", "--save-every", "0.2"]
    command += ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    while not (saved := list(tmp_path.glob("runs/digits-ie--*/checkpoints/step-*"))):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid if number == signal.SIGTERM else -process.pid, number)
    out, err = process.communicate()
    assert living(process.pid) == []
    assert process.returncode == 3
    assert f"stopped by {number.name}: cancelling 2 tasks" in out
    assert err.endswith(f"stopped by {number.name}: the same command resumes it.\n")
    logs = [path.read_text() for path in tmp_path.glob("runs/tasks/*/*.err")]
    assert sum("stopped by SIGTERM; the run is saved" in log for log in logs) >= 1
    assert last_step(saved[0].parents[1]) > 0
    assert files(tmp_path) == []


def files(folder):
    return [record.file_name for record in load_records(folder / "results")]


def killed_at_a_checkpoint(runs, process):
    """The seed of a task whose process is killed once it has a checkpoint."""
    while process.poll() is None:
        for path in runs.glob("digits-ie--*/checkpoints/step-*"):
            seed = path.parents[1].name[-1]
            for one in Path("/proc").glob("[0-9]*"):
                try:
                    command = (one / "cmdline").read_bytes()
                    held = [os.readlink(fd) for fd in (one / "fd").iterdir()]
                except OSError:
                    continue
                if b"submitit" in command and str(path.parents[1] / ".lock") in held:
                    os.kill(int(one.name), signal.SIGKILL)
                    return seed
        time.sleep(0.05)
    raise AssertionError("no task had a checkpoint")


def test_the_cells_of_a_task_are_those_of_its_recipe(work, monkeypatch):
    """The figures that a recipe fills decide whether its record is complete."""
    told = []
    monkeypatch.setattr(
        launch, "_submit", lambda executor, tasks, launcher: told.extend(tasks.values()) or {}
    )
    cells = [MCL, Cell("other/tiny-mcl", "tiny-mcl", ("other",)), LONG]

    class Enough(Exception):
        pass

    def enough(seconds):
        raise Enough

    monkeypatch.setattr(launch.time, "sleep", enough)
    with pytest.raises(Enough):
        launch.launch(replace(work, cells=cells, seeds=(0, 1)), launcher="local", parallel=5)
    found = [([cell.id for cell in task.work.cells], *task.work.seeds) for task in told]
    mcl = ["test/tiny-mcl", "other/tiny-mcl"]
    assert sorted(found) == sorted([(mcl, 0), (mcl, 1), (["test/tiny-long"], 0), (["test/tiny-long"], 1)])
