"""The run that test_kill.py and benchmarks/faults.py kill: it tells every place that it comes to, and waits there.

It runs in a process of a fork server, which has imported torch before: starting it takes no time.
"""

import os
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import test_train
from cmcl.training import batches, checkpoint, monitor, step


def train(parent, folder, steps, settings):
    """Train in a folder, from its last checkpoint if it has one; `parent` answers each place, or kills."""
    warnings.simplefilter("ignore")

    def tell(place):
        parent.send(place)
        try:
            parent.recv()
        except EOFError:  # the parent is gone
            os._exit(3)

    announce(tell)
    test_train.fit(
        test_train.small(),
        test_train.data(),
        recipe=replace(test_train.RECIPE, epochs=None, steps=steps, **settings),
        seed=2,
        out=folder,
        resume=checkpoint.last_step(folder) is not None,
        options=replace(test_train.QUIET, checkpoint_seconds=0.0),
    )
    parent.send("done")


def announce(tell):
    """Let `tell` hear of every place that a run comes to, from now on."""

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

    @contextmanager
    def announced_replacing(path, **options):
        with replacing(path, **options) as part:
            tell("write: nothing yet")
            yield Half(part)

    def file_of(handle):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        if name.startswith(".step-"):
            return "write: before fsync of the file"
        return (
            "after a rename, before fsync of the folder"
            if name == "checkpoints"
            else "before fsync of the rows"
        )

    checkpoint.replacing = announced_replacing
    before(os, "fsync", file_of)
    before(checkpoint.Checkpoints, "_remove_all_but", lambda *_: "after a checkpoint, older ones still there")
    before(step.Step, "__call__", lambda *_: "before a step")
    before(step.Step, "forward", lambda *_: "inside a step: forward")
    before(monitor.TelemetryFile, "write", lambda *_: "before a row")
    before(monitor.TelemetryFile, "__init__", lambda *_: "before rewinding the rows")
    before(batches.Resident, "advance", lambda *_: "inside a step: weights changed")
