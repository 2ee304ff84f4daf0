"""A run that is killed 25 times (SIGKILL), anywhere, and resumed each time ends with bit-identical weights.

The child tells every place that it comes to, and waits there. The parent kills it at a random one (a third of
the time at the next one inside a checkpoint's write), or lets it go and kills it a random moment later. Then it
looks for itself: a kill inside a checkpoint's write has left the unfinished file behind. Run with -s to see the
landings. benchmarks/faults.py counts these and other faults for docs/reference/reliability.md.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cmcl.training.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]
KILLS, SEED = 25, 20260
STEPS = 80  # 5 an epoch

SETTINGS = {  # of the recipe
    "a plain recipe": {},
    "augmentation and averaged weights": {"augment": {"flip": True, "crop": 1, "mixup": 0.2}, "ema": 0.2},
}
WRITES = ("write: nothing yet", "write: half", "write: all", "write: before fsync")

# Where a run can be. Each place is announced on stdout, and left only when the parent allows it.
CHILD = '''
import os, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
import cmcl._files, cmcl.training.checkpoint
from cmcl.training import batches, checkpoint, monitor, step
from dataclasses import replace
import test_train as t

def tell(place):
    """The parent answers with a line, or kills."""
    print(place, flush=True)
    if sys.stdin.readline() != "go\\n":
        os._exit(3)

def before(owner, name, place):
    function = getattr(owner, name)
    def announced(*arguments, **options):
        tell(place(*arguments))
        return function(*arguments, **options)
    setattr(owner, name, announced)

class Half(type(Path())):
    """A path whose bytes are written in two halves."""
    def write_bytes(self, data):
        with open(self, "wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            tell("write: half of the file")
            file.write(data[len(data) // 2 :])
        tell("write: all of the file")

replacing = checkpoint.replacing
from contextlib import contextmanager
@contextmanager
def announced_replacing(path, **options):
    with replacing(path, **options) as part:
        tell("write: nothing yet")
        yield Half(part)

checkpoint.replacing = announced_replacing
def file_of(handle):
    name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
    if name.startswith(".step-"):
        return "write: before fsync of the file"
    return "after a rename, before fsync of the folder" if name == "checkpoints" else "before fsync of the rows"

before(os, "fsync", file_of)
before(checkpoint.Checkpoints, "_remove_all_but", lambda *_: "after a checkpoint, older ones still there")
before(step.Step, "__call__", lambda *_: "before a step")
before(step.Step, "forward", lambda *_: "inside a step: forward")
before(monitor.TelemetryFile, "write", lambda *_: "before a row")
before(monitor.TelemetryFile, "__init__", lambda *_: "before rewinding the rows")
before(batches.Resident, "advance", lambda *_: "inside a step: weights changed")

import json
recipe = replace(t.RECIPE, epochs=None, steps=int(sys.argv[4]), **json.loads(sys.argv[5]))
ensemble = t.small()
t.fit(ensemble, t.data(), recipe=recipe, seed=2, out=sys.argv[3],
      resume=checkpoint.last_step(Path(sys.argv[3])) is not None,
      options=replace(t.QUIET, checkpoint_seconds=0.0))
print("done", flush=True)
'''


@dataclass
class Landing:
    """Where a kill struck: the place as announced, and what was left on the disk."""

    place: str
    waiting: bool  # or on the way from there to the next place
    unfinished: int  # temporary files of a checkpoint that the kill left behind
    newest: int  # step of the newest checkpoint there is

    @property
    def in_a_write(self):
        return self.unfinished > 0


class Child:
    """The run in a process of its own, which goes from place to place only when told to."""

    def __init__(self, folder, settings=None):
        command = [sys.executable, "-W", "ignore", "-c", CHILD, str(ROOT / "src"), str(ROOT / "tests")]
        self.folder = folder
        self.process = subprocess.Popen(
            [*command, str(folder), str(STEPS), json.dumps(settings or {})],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.moment = 0

    def next(self):
        """The place it is at now; "done" at the end."""
        place = self.process.stdout.readline().strip()
        assert place, f"the child ended by itself, with {self.process.wait()}"
        self.moment += 1
        return place

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self, place, waiting):
        self.process.send_signal(signal.SIGKILL)
        self.close()
        assert self.process.returncode == -signal.SIGKILL
        checkpoints = self.folder / "checkpoints"
        parts = list(checkpoints.glob(".step-*.part"))
        steps = [int(path.name.split("-")[1]) for path in checkpoints.glob("step-*")]
        return Landing(place, waiting, len(parts), max(steps, default=0))

    def close(self):
        with suppress(BrokenPipeError, ValueError):
            self.process.communicate()


def killed_run(folder, settings=None, kills=KILLS, seed=SEED):
    """A run with so many kills; the landings."""
    chance, landings = random.Random(seed), []
    while len(landings) < kills:
        child = Child(folder, settings)
        wanted = chance.choice(WRITES) if len(landings) % 3 == 0 else ""
        moment = chance.randint(1, 30)
        while (place := child.next()) != "done":
            if child.moment >= moment and place.startswith(wanted):
                waiting = len(landings) % 3 < 2
                if not waiting:
                    child.go()
                    time.sleep(chance.uniform(0, 0.003))
                landings.append(child.kill(place, waiting))
                break
            child.go()
        else:
            child.close()
            raise AssertionError(f"the run was over after {len(landings)} kills: give it more steps")
    return landings


def run_on(folder, settings=None):
    """From where it is to the end; returns the last checkpoint."""
    child = Child(folder, settings)
    while child.next() != "done":
        child.go()
    child.close()
    assert child.process.returncode == 0
    return Checkpoints(folder / "checkpoints").latest()


def same_end(ours, theirs):
    """Weights, optimiser, random states: everything but the time that it took."""
    assert ours.facts.step == theirs.facts.step == STEPS
    assert ours.tensors.keys() == theirs.tensors.keys()
    return all(value.equal(theirs.tensors[key]) for key, value in ours.tensors.items())


def table(landings):
    lines = ["| kill | where | unfinished files left | newest checkpoint |", "|--:|---|--:|--:|"]
    for i, landing in enumerate(landings, start=1):
        where = landing.place if landing.waiting else f"on from: {landing.place}"
        lines.append(f"| {i} | {where} | {landing.unfinished} | {landing.newest} |")
    inside = sum(landing.in_a_write for landing in landings)
    places = len({landing.place for landing in landings})
    lines.append(f"\n{len(landings)} kills at {places} places, {inside} of them inside a checkpoint's write")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_killed_25_times_and_bit_identical(tmp_path, settings):
    from test_train import told

    expected = run_on(tmp_path / "whole", settings)
    landings = killed_run(tmp_path / "killed", settings)
    last = run_on(tmp_path / "killed", settings)
    print("\n" + table(landings))  # noqa: T201
    assert len(landings) == KILLS
    assert sum(landing.in_a_write for landing in landings) >= 5
    for landing in landings:  # the announcement was true
        assert not landing.waiting or landing.in_a_write == landing.place.startswith("write"), landing
    assert len({landing.place for landing in landings}) >= 5
    assert same_end(last, expected)
    assert told(tmp_path / "killed") == told(tmp_path / "whole")
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))
