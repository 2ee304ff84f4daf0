"""Faults and their outcomes, counted: kills, signals, full disks, broken inputs.

    PYTHONPATH=src python benchmarks/faults.py --kills 12

Writes results/faults.json, from which docs/make.py makes the table of docs/reference/reliability.md. Needs
Linux, and root for the disks. Tests do the same with other counts: test_kill, test_mesh, test_launch,
test_checkpoint.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import test_kill  # noqa: E402
import test_launch  # noqa: E402
import test_mesh  # noqa: E402
import test_train  # noqa: E402
from cmcl._files import DiskFullError  # noqa: E402
from cmcl.data.images import ImageReader  # noqa: E402
from cmcl.reproduction.record import Record, load_records  # noqa: E402
from cmcl.training.checkpoint import Checkpoints, DamagedError, Facts  # noqa: E402

DISKS = [8192 * i for i in range(1, 15)]  # bytes
IDENTICAL = "weights, optimizer and random states bit-identical"


def row(fault, where, count, good, outcome):
    """A row of the table; `good` of `count` ended as `outcome` says."""
    print(f"{fault}, {where}: {good} of {count}: {outcome}", flush=True)
    return {"fault": fault, "where": where, "count": count, "as_expected": good, "outcome": outcome}


def kills(folder, name, settings, count, wholes):
    """SIGKILL anywhere, up to 25 times in a run; resumed each time."""
    landings, good = [], 0
    for start in range(0, count, test_kill.KILLS):
        own, part = folder / str(start), min(test_kill.KILLS, count - start)
        landings += test_kill.killed_run(own, settings, part, seed=start)
        good += part * test_kill.same_end(test_kill.run_on(own, settings), wholes[name])
    inside = sum(landing.in_a_write for landing in landings)
    places = len({landing.place for landing in landings})
    where = f"{name}; {places} places, {inside} inside a checkpoint's write"
    return row("SIGKILL", where, count, good, f"resumed each time; {IDENTICAL}")


def signals(folder, name, settings, count, wholes):
    """SIGTERM and SIGINT anywhere: the run saves itself and ends; resumed each time."""
    chance, good = random.Random(1), 0
    for i in range(count):
        child = test_kill.Child(folder, settings)
        for _ in range(chance.randint(1, 12)):
            assert child.next() != "done", "give it more steps"
            child.go()
        child.next()
        child.signal(signal.SIGTERM if i % 2 else signal.SIGINT)
        with suppress(AssertionError, BrokenPipeError):
            while True:
                child.go()
                child.next()
        good += child.wait() == 1 and not list((folder / "checkpoints").glob(".*"))
    equal = test_kill.same_end(test_kill.run_on(folder, settings), wholes[name])
    return row("SIGTERM, SIGINT", name, count, good * equal, f"saved itself, resumed each time; {IDENTICAL}")


def launched(folder, count):
    """SIGKILL of a task of `cmcl reproduce --launcher local`; the same command resumes it."""
    command = [sys.executable, "-m", "cmcl", "reproduce", "digits-ie", "--seeds", "1", "--device", "cpu"]
    command += ["--quiet", "--launcher", "local", "--save-every", "0.1", "--json"]

    def start(where):
        paths = ["--out", str(where / "runs"), "--results", str(where / "results")]
        return subprocess.Popen([*command, *paths], stdout=subprocess.PIPE, text=True)

    for _ in range(count):
        process = start(folder / "killed")
        test_launch.killed_at_a_checkpoint(folder / "killed" / "runs", process)
        process.communicate()
    for where in ("killed", "whole"):
        start(folder / where).communicate()
    (ours,), (theirs,) = (load_records(folder / where / "results") for where in ("killed", "whole"))
    outcome = "the same command resumed it; one record, weights bit-identical"
    return row(
        "SIGKILL of a task", "--launcher local", count, count * (ours.weights == theirs.weights), outcome
    )


def meshes(folder, case, mesh, count):
    """SIGKILL of any process of a mesh; torchrun starts all of them again."""
    folder.mkdir()
    script, steps = folder / "slow.py", 10 * count + 20
    script.write_text(test_mesh.SLOW_RUN)
    told = test_mesh.killed_run(folder / "killed", script, case, mesh, steps, count)
    whole = test_mesh.uninterrupted(folder / "whole", steps, case)
    moved = test_mesh.largest_difference(test_mesh.final_tensors(folder / "killed").tensors, whole.tensors)
    slowest = max(seconds for *_, seconds in told)
    where = f"{case} on {mesh}; all others had stopped within {slowest:.1f} s"
    outcome = f"torchrun resumed it; the end of one process but for rounding, {moved:.0e} at most"
    return row("SIGKILL of a process", where, count, count * (moved < 1e-4 and slowest < 60), outcome)


def full_disks(folder):
    """A disk that is full at some step; then there is room, and the run resumes."""
    recipe = replace(test_train.RECIPE, epochs=None, steps=20)
    options = replace(test_train.QUIET, checkpoint_seconds=0.0)

    def train(where, resume):
        ensemble = test_train.small()
        test_train.fit(
            ensemble, test_train.data(), recipe=recipe, seed=2, out=where, resume=resume, options=options
        )
        return test_train.weights(ensemble)

    expected, good, full = train(folder / "whole", False), 0, 0
    for size in DISKS:
        disk = folder / str(size)
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
        try:
            try:
                found = train(disk / "run", False)
            except DiskFullError:
                full += 1
                subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
                found = train(disk / "run", any((disk / "run" / "checkpoints").glob("step-*")))
            good += test_train.identical(found, expected)
        finally:
            subprocess.run(["umount", disk], check=True)
    where = f"{min(DISKS) // 1024} to {max(DISKS) // 1024} KiB; {full} too small for the run"
    outcome = (
        "an error that names the file; with more room resumed, or started without a checkpoint; bit-identical"
    )
    return row("full disk", where, len(DISKS), good, outcome)


def broken(folder, count):
    """Bytes flipped, cut, inserted: in checkpoints, records and images."""
    chance = random.Random(2)
    state = {"w": torch.arange(5000.0)}
    facts = {"seconds": 1.0, "recipe": {}, "seed": 0, "task": None, "data": "", "epochs_below": []}
    record = sorted((ROOT / "results" / "records").glob("*.json"))[0].read_bytes()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)).save(folder / "x.png")
    image = (folder / "x.png").read_bytes()

    def damaged(data):
        data, kind = bytearray(data), chance.randrange(3)
        at = chance.randrange(len(data))
        if kind == 0:
            data[at] ^= chance.randint(1, 255)
        elif kind == 1:
            del data[at:]
        else:
            data[at:at] = chance.randbytes(chance.randint(1, 50))
        return bytes(data)

    def checkpoint(i):
        checkpoints = Checkpoints(folder / f"c{i}")
        for step in (1, 2):
            path = checkpoints.save(state, Facts(step=step, **facts))
        path.write_bytes(damaged(path.read_bytes()))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            return checkpoints.latest().facts.step == 1 and len(told) == 1

    def both(i):
        checkpoints = Checkpoints(folder / f"b{i}")
        for step in (1, 2):
            checkpoints.save(state, Facts(step=step, **facts))
        for path in (folder / f"b{i}").glob("step-*"):
            path.write_bytes(damaged(path.read_bytes()))
        try:
            checkpoints.latest()
        except DamagedError:
            return True
        return False

    def bad_record(i):
        (folder / "r.json").write_bytes(damaged(record))
        with suppress(ValueError):  # otherwise it is still a record, with another number in it
            Record.load(folder / "r.json")
        return True

    def bad_image(i):
        (folder / "y.png").write_bytes(damaged(image))
        found = ImageReader("RGB")[folder / "y.png"][1]
        return isinstance(found, str) or found.shape[0] == 3

    kinds = {
        "the newest checkpoint": (checkpoint, "a warning; the checkpoint before it is used"),
        "all checkpoints": (both, "an error that names them; nothing is removed"),
        "a record": (bad_record, "an error that names the file, or a record if it is still one"),
        "an image": (bad_image, "reported with its name, or read if it is still an image"),
    }
    return [
        row("damaged bytes", where, count, sum(check(i) for i in range(count)), outcome)
        for where, (check, outcome) in kinds.items()
    ]


def main():
    """Count, and write results/faults.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=25, help="of each kind of recipe; half as many signals")
    parser.add_argument("--processes", type=int, default=6, help="killed processes of each mesh")
    parser.add_argument("--tasks", type=int, default=3, help="killed tasks of the launcher")
    parser.add_argument("--broken", type=int, default=1000, help="of each kind of file")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "broken").mkdir()
        (folder / "disks").mkdir()
        rows += broken(folder / "broken", options.broken)
        rows.append(full_disks(folder / "disks"))
        wholes = {}
        for i, (kind, settings) in enumerate(test_kill.SETTINGS.items()):
            wholes[kind] = test_kill.run_on(folder / f"whole{i}", settings)
            rows.append(kills(folder / f"killed{i}", kind, settings, options.kills, wholes))
            rows.append(signals(folder / f"signalled{i}", kind, settings, max(1, options.kills // 2), wholes))
        for case, mesh in (("ema", "members=2,data=1"), ("augmented", "members=1,data=2")):
            rows.append(meshes(folder / f"mesh-{case}", case, mesh, options.processes))
        rows.append(launched(folder / "launched", options.tasks))
    where = f"TMPDIR={os.environ['TMPDIR']} " if "TMPDIR" in os.environ else ""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    about = {
        "command": " ".join([f"{where}PYTHONPATH=src python benchmarks/faults.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "device": "CPU",
        "seconds": round(time.monotonic() - began),
        "commit": commit.stdout.strip(),
    }
    (ROOT / "results" / "faults.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    sys.exit(any(one["as_expected"] != one["count"] for one in rows))


if __name__ == "__main__":
    main()
