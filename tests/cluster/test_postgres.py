"""`cmcl tune` by two workers on one PostgreSQL database, started here; one of them is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from wsgiref.util import setup_testing_defaults

import pytest

optuna = pytest.importorskip("optuna")
dashboard = pytest.importorskip("optuna_dashboard")
pytest.importorskip("psycopg")
BINARIES = [*Path("/usr/lib/postgresql").glob("*/bin"), Path(shutil.which("pg_ctl") or "/").parent]
BIN = next((folder for folder in BINARIES if (folder / "pg_ctl").exists()), None)
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(BIN is None, reason="needs PostgreSQL")]
TUNE = ["tune", "digits-cmcl", "--betas", "0.25,0.75,1.5", "--overlaps", "1,3,4", "--device", "cpu"]


@pytest.fixture
def database():
    """The URL of an empty database, on a socket in a folder of its own."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as name:
        data = Path(name) / "data"
        user = []
        if os.geteuid() == 0:  # the server refuses to be root
            user = ["runuser", "-u", "postgres", "--"]
            shutil.chown(name, "postgres")

        def server(*command):
            subprocess.run([*user, *map(str, command)], cwd=name, check=True, stdout=subprocess.DEVNULL)

        server(BIN / "initdb", "--pgdata", data, "--auth", "trust", "--username", "postgres")
        options = f"-c listen_addresses='' -c unix_socket_directories={name}"
        control = [BIN / "pg_ctl", "--pgdata", data, "--log", data / "log", "--wait"]
        server(*control, "--options", options, "start")
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={name}"
        finally:
            server(*control, "--mode", "immediate", "stop")


def worker(database, out):
    command = [sys.executable, "-m", "cmcl", *TUNE, "--storage", database, "--out", str(out)]
    log = out / f"worker-{time.monotonic_ns()}.log"
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT), log


@contextmanager
def opened(database):
    storage = optuna.storages.RDBStorage(database)
    yield storage
    storage.remove_session()
    storage.engine.dispose()


def trials(database):
    with opened(database) as storage:
        names = optuna.get_all_study_names(storage)
        return [t for n in names for t in optuna.load_study(study_name=n, storage=storage).trials]


def shown(database, path):
    """What optuna-dashboard answers."""
    request = {"PATH_INFO": path}
    setup_testing_defaults(request)
    with opened(database) as storage:
        return json.loads(b"".join(dashboard.wsgi(storage)(request, lambda *given: None)))


def test_two_workers_and_one_is_killed(database, tmp_path, capsys):
    (killed, log), (other, other_log) = (worker(database, tmp_path) for _ in range(2))
    while not log.read_text().count("held-out top-1"):  # it has begun, and will begin another
        assert killed.poll() is None, log.read_text()
        time.sleep(0.05)
    time.sleep(0.5)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    left = [t for t in trials(database) if t.state == optuna.trial.TrialState.RUNNING]
    assert other.wait() == 0, other_log.read_text()

    found = trials(database)
    ended = {trial.state.name for trial in found}
    assert ended <= {"COMPLETE", "PRUNED", "FAIL"}
    lost = [trial for trial in found if trial.state == optuna.trial.TrialState.FAIL]
    assert len(lost) == 1, "the one of the killed worker"
    assert lost[0].number in {trial.number for trial in left}
    (again,) = [trial for trial in found if trial.system_attrs.get("failed_trial") == lost[0].number]
    assert again.user_attrs == lost[0].user_attrs
    finished = [trial.user_attrs["candidate"] for trial in found if trial not in lost]
    assert len(finished) == len(set(finished)) == 9, "every candidate once"

    (study,) = shown(database, "/api/studies")["study_summaries"]
    states = [trial["state"] for trial in shown(database, f"/api/studies/{study['study_id']}")["trials"]]
    assert [state.upper() for state in states] == [trial.state.name for trial in found]

    result = json.loads((tmp_path / "tuning-digits-cmcl.json").read_text())
    assert len(result["rungs"][0]["rows"]) == 9
    complete = [trial for trial in found if trial.state == optuna.trial.TrialState.COMPLETE]
    best = min(complete, key=lambda trial: trial.value)
    assert result["held_out"] == pytest.approx(best.value, abs=1e-6)
    records = [path.parent.name for path in tmp_path.glob("*/record.json")]
    measured = {row["name"] for rung in result["rungs"] for row in rung["rows"]}
    assert {name.split("--")[0] for name in records} == measured
    assert len(records) == sum(len(rung["rows"]) for rung in result["rungs"]), "nothing was trained twice"

    text = other_log.read_text().replace(str(tmp_path), "DIR")
    with capsys.disabled():
        print(
            f"\n$ cmcl {' '.join(TUNE)} --storage postgresql+psycopg://... --out DIR  # two workers, one killed"
        )
        for trial in found:
            note = f", again of trial {lost[0].number}" if trial is again else ""
            note = ", its worker was killed" if trial in lost else note
            print(f"trial {trial.number:2}  {trial.user_attrs['candidate']:28} {trial.state.name}{note}")
        print(f"optuna-dashboard shows {len(states)} trials of {study['study_name']}")
        print(f"\nThe other worker:\n{text}")
