"""A run that is killed 25 times (SIGKILL), anywhere, and resumed each time ends with bit-identical weights.

The child tells every place that it comes to, and waits there. The parent kills it at a random one (a third of
the time at the next one inside a checkpoint's write), or lets it go and kills it a random moment later. Then it
looks for itself: a kill inside a checkpoint's write has left the unfinished file behind. Run with -s to see the
landings. benchmarks/faults.py counts these and other faults for docs/reference/reliability.md.
"""

import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass

import pytest

import kill_child
from cmcl.training.checkpoint import Checkpoints

KILLS, SEED = 25, 20260
STEPS = 80  # 5 an epoch

SETTINGS = {  # of the recipe
    "a plain recipe": {},
    "exact labels, the default": {"labels": "exact"},
    "augmentation and averaged weights": {"augment": {"flip": True, "crop": 1, "mixup": 0.2}, "ema": 0.2},
}
WRITES = ("write: nothing yet", "write: half", "write: all", "write: before fsync")

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["__main__", "pytest", "cmcl.training", "torch._dynamo"])  # what takes time


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
        self.folder, self.moment = folder, 0
        self.connection, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=kill_child.train, args=(theirs, folder, STEPS, settings or {}))
        self.process.start()
        theirs.close()

    def next(self):
        """The place it is at now; "done" at the end."""
        self.moment += 1
        try:
            return self.connection.recv()
        except EOFError:
            raise AssertionError(f"the child ended by itself, with {self.wait()}") from None

    def go(self):
        self.connection.send("go")

    def signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self):
        """Its exit code."""
        self.process.join()
        self.connection.close()
        return self.process.exitcode

    def kill(self, place, waiting):
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL
        checkpoints = self.folder / "checkpoints"
        parts = list(checkpoints.glob(".step-*.part"))
        steps = [int(path.name.split("-")[1]) for path in checkpoints.glob("step-*")]
        return Landing(place, waiting, len(parts), max(steps, default=0))


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
            child.wait()
            raise AssertionError(f"the run was over after {len(landings)} kills: give it more steps")
    return landings


def run_on(folder, settings=None):
    """From where it is to the end; returns the last checkpoint."""
    child = Child(folder, settings)
    while child.next() != "done":
        child.go()
    assert child.wait() == 0
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
    assert kill_child.test_train.told(tmp_path / "killed") == kill_child.test_train.told(tmp_path / "whole")
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))
