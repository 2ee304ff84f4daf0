"""`cmcl reproduce --launcher slurm` on a SLURM of one node, started here: tasks are killed and preempted."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("submitit")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not shutil.which("slurmctld") or os.geteuid() != 0, reason="needs SLURM, and root"),
]
RECIPES = ("digits-single", "digits-ie", "digits-cmcl")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=10
"""


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def slurm(monkeypatch):
    """A function that runs a command of SLURM and returns what it prints."""
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as name:
        folder, host, started = Path(name), socket.gethostname().split(".")[0], []
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        for path in (folder, key):
            shutil.chown(path, "munge")
        folder.chmod(0o755)
        for sub in ("state", "spool"):
            (folder / sub).mkdir()
        (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, ports=free_ports(2)))
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        munge = ["runuser", "-u", "munge", "--", "munged", "--foreground"]
        munge += [f"--{option}={folder / file}" for option, file in files.items()]

        def start(*command):
            log = (folder / f"{command[0]}-{len(started)}.out").open("w")
            with log:
                started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

        def run(*command):
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

        try:
            start(*munge)
            wait_for(lambda: (folder / "munge.socket").exists(), "munged")
            start("slurmctld", "-D")
            start("slurmd", "-D", "-N", host)
            states = ("idle", "mixed", "allocated")
            wait_for(
                lambda: run("sinfo", "--noheader", "--format=%T").startswith(states), "a node", seconds=60
            )
            yield run
            run("scancel", "--user", "root", "--full", "--signal=KILL")
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait()


def wait_for(found, what, seconds=300):
    until = time.monotonic() + seconds
    while not (value := attempt(found)):
        assert time.monotonic() < until, f"waited too long for {what}"
        time.sleep(0.1)
    return value


def attempt(found):
    try:
        return found()
    except subprocess.CalledProcessError:  # the controller does not answer yet
        return None


def reproduce(folder, *options):
    command = [sys.executable, "-m", "cmcl", "reproduce", *RECIPES, "--seeds", "2", "--device", "cpu"]
    return [*command, *options, "--out", str(folder / "runs"), "--results", str(folder / "results")]


def checkpointed(folder):
    """Names of the unfinished runs that have a checkpoint."""
    paths = {path.parent.parent for path in (folder / "runs").glob("*/checkpoints/step-*")}
    return sorted(path.name for path in paths if not (path / "record.json").exists())


def starts(folder):
    """How often each task was started, by the log that it appends to."""
    logs = sorted((folder / "runs" / "tasks").glob("*/*_log.out"))
    return {log.name.removesuffix("_0_log.out"): log.read_text().count("Starting with") for log in logs}


def processes(task):
    """The ids of the processes that train a task."""
    environment = f"SLURM_ARRAY_TASK_ID={task}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, own = (path / "cmdline").read_bytes(), (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"submitit.core._submit" in command and b"srun" not in command and environment in own:
            found.append(int(path.name))
    return [pid for pid in found if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]]


def test_an_array_of_cells_killed_preempted_and_requeued(slurm, tmp_path, capsys):
    events = []
    began = time.monotonic()

    def tell(text):
        events.append(f"{time.monotonic() - began:5.0f} s  {text}")

    log = tmp_path / "reproduce.log"
    options = ("--launcher", "slurm", "--jobs", "2", "--slurm", "partition=low", "--save-every", "0.2")
    with log.open("w") as file:
        command = subprocess.Popen(reproduce(tmp_path, *options), stdout=file, stderr=subprocess.STDOUT)
    wait_for(lambda: checkpointed(tmp_path) or command.poll() is not None, "a checkpoint")
    tell(f"checkpoint of {checkpointed(tmp_path)[0]}")
    array = re.search(r"task (\d+)_0", log.read_text())[1]

    running = slurm("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i").split()
    victim = running[0]
    for pid in wait_for(lambda: processes(victim.split("_")[1]), "its process"):
        os.kill(pid, 9)
    tell(f"task {victim}: its process was killed by SIGKILL")
    wait_for(
        lambda: "JobState=FAILED" in slurm("scontrol", "show", "job", victim), "the end of the killed task"
    )
    slurm("scontrol", "requeue", victim)
    tell(f"task {victim}: scontrol requeue")

    wait_for(lambda: len(checkpointed(tmp_path)) > 1 or command.poll() is not None, "another checkpoint")
    preempted = slurm("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i").split()
    urgent = slurm(
        "sbatch", "--parsable", "-p", "high", "--exclusive", f"-o{tmp_path}/urgent", "--wrap", "sleep 3"
    )
    wait_for(lambda: "JobState=RUNNING" in slurm("scontrol", "show", "job", urgent), "the urgent job")
    tell(f"job {urgent} of a higher priority takes the node: tasks {', '.join(preempted)} are preempted")
    code = command.wait()
    tell(f"cmcl reproduce ended with code {code}")
    text = log.read_text()
    assert code == 0, text

    records = sorted((tmp_path / "results" / "records").glob("*.json"))
    assert [path.name.split("--")[0::2] for path in records] == [
        [recipe, f"seed{seed}.json"] for recipe in sorted(RECIPES) for seed in (0, 1)
    ]
    counts = starts(tmp_path)
    assert len(counts) == len(records) == 6, "an array of six tasks"
    assert all(name.startswith(f"{array}_") for name in counts)
    assert {name for name, count in counts.items() if count > 1} == {victim, *preempted}
    resumed = {
        path.parent.name: [json.loads(line)["step"] for line in path.read_text().splitlines()]
        for path in (tmp_path / "runs").glob("*/environment.jsonl")
    }
    assert sum(len(steps) > 1 for steps in resumed.values()) >= 1, "runs resumed from their checkpoints"
    again = subprocess.run(reproduce(tmp_path, "--json"), capture_output=True, text=True)
    assert again.returncode == 0, again
    assert json.loads(again.stdout) == {"done": [], "left": {}}

    shutil.rmtree(tmp_path / "plain", ignore_errors=True)
    subprocess.run(reproduce(tmp_path / "plain", "--json"), check=True, capture_output=True)
    equal = [
        json.loads(path.read_text())["weights"]
        == json.loads((tmp_path / "plain" / "results" / "records" / path.name).read_text())["weights"]
        for path in records
    ]
    assert all(equal), "the weights of runs that nobody stopped"

    with capsys.disabled():
        print(f"\n{slurm('sinfo', '--version')}, one node of 2 CPUs")
        print(f"$ cmcl reproduce {' '.join(RECIPES)} --seeds 2 {' '.join(options)}")
        said = [line for line in text.splitlines() if "accounting storage is disabled" not in line]
        print("\n".join(said).replace(str(tmp_path), "DIR") + "\n")
        print("\n".join(events))
        print("\ntask, times started: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
        for name, steps in sorted(resumed.items()):
            print(f"{name}: started at steps {', '.join(map(str, steps))}")
        print(
            f"\n{len(records)} records, each once; weights equal to those of runs that nobody stopped: {sum(equal)} of 6"
        )


def test_sigterm_cancels_the_tasks(slurm, tmp_path, capsys):
    """Those that run save themselves; those that wait are gone."""
    log = tmp_path / "reproduce.log"
    options = ("--launcher", "slurm", "--jobs", "2", "--save-every", "0.2")
    with log.open("w") as file:
        command = subprocess.Popen(reproduce(tmp_path, *options), stdout=file, stderr=subprocess.STDOUT)
    wait_for(lambda: checkpointed(tmp_path) or command.poll() is not None, "a checkpoint")
    command.terminate()
    assert command.wait() == 3, log.read_text()
    wait_for(lambda: not slurm("squeue", "--noheader"), "the end of the tasks")
    text = log.read_text()
    assert re.search(r"stopped by SIGTERM: cancelling \d tasks", text)
    assert text.endswith("cmcl: stopped by SIGTERM: the same command resumes it.\n")
    logs = [path.read_text() for path in tmp_path.glob("runs/tasks/*/*.err")]
    assert any("stopped by SIGTERM; the run is saved" in log for log in logs)
    with capsys.disabled():
        last = "\n".join(text.splitlines()[-2:])
        print(f"\n$ cmcl reproduce {' '.join(RECIPES)} --seeds 2 {' '.join(options)}  # then SIGTERM\n{last}")
        print(f"in the queue: {slurm('squeue', '--noheader', '--format=%i') or 'nothing'}")


def test_a_task_that_nobody_requeues_is_reported(slurm, tmp_path, capsys):
    """This SLURM keeps no accounts: only its queue tells that the task has ended."""
    log = tmp_path / "reproduce.log"
    options = ("--launcher", "slurm", "--jobs", "2", "--save-every", "0.2")
    with log.open("w") as file:
        command = subprocess.Popen(reproduce(tmp_path, *options), stdout=file, stderr=subprocess.STDOUT)
    wait_for(lambda: checkpointed(tmp_path) or command.poll() is not None, "a checkpoint")
    victim = slurm("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i").split()[0]
    for pid in wait_for(lambda: processes(victim.split("_")[1]), "its process"):
        os.kill(pid, 9)
    assert command.wait() == 1, log.read_text()
    label = re.search(rf"(.*): task {victim},", log.read_text())[1]
    (line,) = [line for line in log.read_text().splitlines() if "its task ended early" in line]
    assert line.startswith(f"{label}: ")
    assert len(list((tmp_path / "results" / "records").glob("*.json"))) == 5, "the others ended"
    with capsys.disabled():
        print(
            f"\n$ cmcl reproduce {' '.join(RECIPES)} --seeds 2 {' '.join(options)}  # task {victim}: SIGKILL"
        )
        print(f"{line}\ncode {command.returncode}".replace(str(tmp_path), "DIR"))
