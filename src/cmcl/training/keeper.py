"""A run and its folder: saved now and then, stopped by a signal, resumed."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from .checkpoint import Checkpoint, Checkpoints
from .interrupt import Interrupt
from .locking import locked
from .state import State


class Interrupted(RuntimeError):
    """The run was asked to stop; if it has a folder, it is saved there and can be resumed."""


class Keeper:
    """Holds the folder of a run, if it has one, while the run goes on.

    Args:
        out: the folder; None: nothing is saved, but signals stop the run all the same.
        state: what to save.
        steps: of the whole run.
        every: seconds between checkpoints.
    """

    def __init__(self, out: Path | None, state: State, steps: int, every: float) -> None:
        self.out, self.state, self.steps, self.every = out, state, steps, every
        self.checkpoints: Checkpoints | None = None
        self.interrupt = Interrupt()
        self._saved = time.monotonic()
        self._started = time.perf_counter()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.out is not None:
                stack.enter_context(locked(self.out))
                self.checkpoints = Checkpoints(self.out / "checkpoints")
                self.state.check()
            stack.enter_context(self.interrupt)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def restore(self, resume: bool) -> None:
        """Go back to the last checkpoint, if there is one."""
        if self.checkpoints is None or not (checkpoint := self.checkpoints.latest()):
            return
        if not resume:
            raise ValueError(f"{self.out} must be a new folder. {self._what_it_holds(checkpoint)}")
        self.state.restore(checkpoint)
        self._started = time.perf_counter() - checkpoint.state["seconds"]

    def _what_it_holds(self, checkpoint: Checkpoint) -> str:
        step = f"It holds a run at step {checkpoint.step}"
        if other := self.state.unlike(checkpoint):
            return f"{step}, with other {' and '.join(other)}. Name another folder."
        if checkpoint.step >= self.steps:
            return f"{step}, finished. Pass resume=True to have its weights again, or name another folder."
        return f"{step}. Pass resume=True to go on with it, or name another folder."

    def seconds(self) -> float:
        """Of training, over all the times the run was resumed."""
        return time.perf_counter() - self._started

    def due(self) -> bool:
        """Whether it is time to save, or to stop."""
        return self.interrupt.asked or time.monotonic() - self._saved >= self.every

    def save(self) -> None:
        """Write a checkpoint."""
        if self.checkpoints is not None:
            facts = self.state.facts() | {"seconds": self.seconds()}
            self.checkpoints.save(self.state.step, self.state.tensors(), facts)
        self._saved = time.monotonic()

    def save_or_stop(self) -> None:
        """Write a checkpoint; if a signal came, leave after it."""
        self.save()
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Leave if a signal came."""
        if not self.interrupt.asked:
            return
        how = "Nothing was saved: no out= folder was given."
        if self.checkpoints is not None:
            how = f"It is saved in {self.out}: go on with resume=True."
        raise Interrupted(
            f"stopped by {self.interrupt.name} at step {self.state.step} of {self.steps}. {how}"
        )
