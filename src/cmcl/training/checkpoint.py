"""A run folder: checkpoints, telemetry, a lock; and how a run stops (signals, `max_seconds`) and resumes.

A checkpoint is one safetensors file with the JSON state in its header, named after its step and checksum: a
damaged one is recognised without trusting anything else. Nothing is ever unpickled.
"""

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import filelock
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from .._files import parse_json, replacing
from .._messages import warn
from .._schema import Schema
from .config import Options, Recipe
from .mesh import ALONE, Mesh, restarted
from .monitor import TelemetryFile
from .step import TrainState

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{12})\.safetensors")
CUDA_RANDOM = "random.cuda"  # the device's random state; runs elsewhere have none
NOT_SAVED = "buffer."  # begins the names of buffers outside the state_dict
REASONS = ("", "max_seconds", "SIGTERM", "SIGINT")  # to stop; of several processes', the last one counts
SOON = 0.5  # seconds in which a signal to a whole group of processes has reached all of them


class DamagedError(ValueError):
    """All checkpoints of a run are damaged."""


class FolderInUseError(RuntimeError):
    """Another process trains in this folder."""


class Interrupted(RuntimeError):
    """The run was stopped before its end. If it has a folder, it is saved there and can be resumed.

    Attributes:
        step, steps: the steps done, and those of the whole run.
        reason: "SIGINT", "SIGTERM" or "max_seconds".
        folder: the run folder, None if there is none.
    """

    def __init__(self, step: int, steps: int, reason: str, folder: Path | None = None) -> None:
        saved = f"It is saved in {folder}: resume it with resume=True." if folder else "Nothing was saved."
        super().__init__(f"stopped by {reason} at step {step} of {steps}. {saved}")
        self.step, self.steps, self.reason, self.folder = step, steps, reason, folder


# Checkpoint files.


class Facts(Schema):
    """The part of a run's state that is JSON, and the settings that a resumed run must share."""

    step: int
    seconds: float
    recipe: dict[str, Any]
    seed: int
    task: str | None
    data: str
    epochs_below: list[int]


class Checkpoint(NamedTuple):
    """The content of a checkpoint file; tensors are on the CPU."""

    tensors: dict[str, Tensor]
    facts: Facts


class Checkpoints:
    """The checkpoint files in `folder`: the newest and the one before it. Use it under `locked`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._newest: Path | None = None  # the newest one known to be undamaged: read or written here
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, tensors: dict[str, Tensor], facts: Facts) -> Path:
        """Write a checkpoint, then remove all but it and the one before; returns its path."""
        # copies, because safetensors rejects tensors that share memory or are not contiguous
        copies = {
            key: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for key, value in tensors.items()
        }
        data = safetensors.torch.save(copies, metadata={"state": facts.model_dump_json()})
        path = self.folder / f"step-{facts.step:08d}-{sha256(data).hexdigest()[:12]}.safetensors"
        with replacing(path, checkpoints=self.folder) as part:
            part.write_bytes(data)
        self._remove_all_but(path)
        self._newest = path
        return path

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is not damaged, None if there is none; a damaged one is a warning.

        If all are damaged, or one cannot be read, that is an error: starting anew would remove them.
        """
        damaged: dict[Path, str] = {}
        for path in sorted(_paths(self.folder), key=_step_of, reverse=True):
            try:
                found = _read(path)
            except (ValueError, SafetensorError) as error:  # not: a failing disk
                damaged[path] = str(error)
                continue
            for bad, reason in damaged.items():
                warn(f"{bad} is damaged: {reason} Using {path.name} instead.")
            self._newest = path
            return found
        if damaged:
            listed = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
            raise DamagedError(
                f"one checkpoint in {self.folder} must be undamaged. All are damaged ({listed}) To start "
                "anew, remove them, or name another folder."
            )
        return None

    def _remove_all_but(self, new: Path) -> None:
        for path in _paths(self.folder):
            if path not in (new, self._newest):  # older, or damaged
                path.unlink(missing_ok=True)


def last_step(folder: Path) -> int | None:
    """The step in the name of a run's last checkpoint; None if it has no checkpoint."""
    return max(map(_step_of, _paths(folder / "checkpoints")), default=None)


def _paths(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _read(path: Path) -> Checkpoint:
    if not path.is_file():  # a device may have no end
        raise ValueError("it is no file.")
    data = path.read_bytes()
    if sha256(data).hexdigest()[:12] != path.stem.split("-")[2]:
        raise ValueError("its checksum is not the one in its name.")
    tensors = safetensors.torch.load(data)
    # The header again, by hand: safetensors gives the metadata of files only, not of bytes just checked.
    header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], "its header")
    state = header.get("__metadata__", {}).get("state", "")
    facts: Facts = Facts.parse(parse_json(state, "its state"), source="its state")
    if facts.step != _step_of(path):
        raise ValueError(f"its name says step {_step_of(path)}, its content step {facts.step}.")
    return Checkpoint(tensors, facts)


# The run folder.


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process: another one gets `FolderInUseError` until this one leaves or dies."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise FolderInUseError(
            f"{folder} must be used by one run at a time. It is in use by another process. Wait for it, stop "
            "it, or choose another folder."
        ) from None
    except NotImplementedError as error:  # a file system without locks
        warn(f"{folder} cannot be locked ({error}). Let no other process train there.")
    try:
        yield
    finally:
        lock.release()


class RunFolder:
    """Saves a run now and then, stops it after a signal or `max_seconds`, and restores it.

    Without a path nothing is saved, but the run can be stopped all the same. Of a mesh, process 0 alone
    reads and writes the folder.
    """

    def __init__(self, path: str | Path | None, options: Options, mesh: Mesh = ALONE) -> None:
        self.path, self.options, self.mesh = None if path is None else Path(path), options, mesh
        self.checkpoints: Checkpoints | None = None
        self.telemetry: TelemetryFile | None = None
        self.task: str | None = None
        self.data = ""
        self.started = self._saved_at = self._training_since = time.monotonic()
        self._seconds_before = 0.0  # of training, before this call
        self._saved_step: int | None = None
        self._signals = Signals(patient=mesh.size > 1)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            with self.mesh.together():
                if self.path is not None and self.mesh.rank == 0:
                    stack.enter_context(locked(self.path))
                    for place in ("", "checkpoints/"):  # what a killed process left half written
                        for part in self.path.glob(f"{place}.*.????????.part"):
                            part.unlink(missing_ok=True)
                    self.checkpoints = Checkpoints(self.path / "checkpoints")
            stack.enter_context(self._signals)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        if self.telemetry is not None:
            self.telemetry.close()
        self._stack.close()

    def restore(self, state: TrainState, resume: bool, *, task: str | None, data: str) -> None:
        """Load the last checkpoint if `resume`, else check that there is none; then open the telemetry.

        `task` and `data` describe the run; a resumed run must have the same. All processes of a mesh begin
        with the state of process 0. Those that `torchrun` started again resume if they can.
        """
        self.task, self.data = task, data
        self._training_since = time.monotonic()
        with self.mesh.together():
            self._restore(state, resume)
        if self.mesh.size > 1:
            tensors = _tensors(state)
            self.mesh.copy(list(tensors.values()))
            _set_cuda_random(state, tensors)
            facts = state.step, state.monitor.epochs_below, self._seconds_before, self._saved_step
            facts = self.mesh.collected(facts)[0]
            state.step, state.monitor.epochs_below, self._seconds_before, self._saved_step = facts

    def saved_recipe(self, resume: bool) -> Recipe | None:
        """The recipe of the run that `restore` would resume; raises as it does if the folder is taken."""
        with self.mesh.together():
            found = self._latest(resume)
        return self.mesh.collected(found and Recipe.from_json(found.facts.recipe))[0]

    def _restore(self, state: TrainState, resume: bool) -> None:
        if self.path is None or self.checkpoints is None:
            return
        _check_savable(state)
        if (checkpoint := self._latest(resume)) is not None:
            self._check_same_run(checkpoint.facts, state)
            _load(state, checkpoint)
            self._seconds_before, self._saved_step = checkpoint.facts.seconds, state.step
        board = self.path / "tensorboard" if self.options.tensorboard else None
        self.telemetry = TelemetryFile(self.path / "telemetry.jsonl", tensorboard=board, step=state.step)

    def _latest(self, resume: bool) -> Checkpoint | None:
        """The checkpoint to resume from, None for a new run; raises if the folder is that of the other."""
        if self.path is None or self.checkpoints is None:
            return None
        checkpoint = self.checkpoints.latest()
        if resume and checkpoint is None:
            found = [p.name for p in self.path.iterdir() if p.name not in (".lock", "checkpoints")]
            raise ValueError(
                f"{self.path} must hold a checkpoint to resume from. It holds "
                f"{', '.join(sorted(found)) or 'nothing'}. Leave out resume to start a run there."
            )
        if checkpoint is not None and not (resume or restarted()):
            raise ValueError(
                f"{self.path} must be a new folder. It holds a run at step {checkpoint.facts.step}. Pass "
                "resume=True to resume it, or name another folder."
            )
        return checkpoint

    def seconds(self) -> float:
        """Seconds of training, over all the times the run was resumed."""
        return self._seconds_before + time.monotonic() - self._training_since

    def due(self) -> bool:
        """Whether to save or to stop now."""
        waited = time.monotonic() - self._saved_at
        return self.stop_reason() != "" or waited >= self.options.checkpoint_seconds

    def stop_reason(self) -> str:
        """Why the run must stop; empty if it need not."""
        limit = self.options.max_seconds
        over = limit is not None and time.monotonic() - self.started >= limit
        return self._signals.received or ("max_seconds" if over else "")

    def save(self, state: TrainState) -> None:
        """Write a checkpoint, unless this step has one; a diverged run raises `Diverged` instead."""
        state.check_finite()
        if self.path is not None and state.step != self._saved_step:
            state.gather()
            if self.checkpoints is not None:
                self.checkpoints.save(_tensors(state), self._facts(state))
            self._saved_step = state.step
        self._saved_at = time.monotonic()

    def save_if_due(self, state: TrainState) -> None:
        """Write a checkpoint if it is time to, or at the end; if the run must stop, raise `Interrupted`."""
        finished = state.step >= state.steps
        if self.mesh.largest(self.due()) or finished:  # all processes save and stop together
            self.save(state)
            reason = REASONS[self.mesh.largest(REASONS.index(self.stop_reason()))]
            if reason and not (finished and reason == "max_seconds"):
                raise Interrupted(state.step, state.steps, reason, self.path)

    @contextmanager
    def logged(self, row: dict[str, Any], state: TrainState) -> Iterator[None]:
        """Write a row of telemetry after the block. If either fails, keep the state in a checkpoint."""
        try:
            try:
                yield
            finally:
                if self.telemetry is not None:
                    self.telemetry.write(row)
        except Exception:
            if self.mesh.size == 1:  # else the other processes may be elsewhere
                self.save(state)
            raise

    def until_stopped(self, batches: Iterator[int], state: TrainState) -> Iterator[int]:
        """The batches; if loading one fails because a signal ended the DataLoader's workers, stop."""
        while True:
            try:
                size = next(batches, None)
            except (RuntimeError, OSError, EOFError):
                time.sleep(SOON)  # the signal may reach the workers before us
                if self.stop_reason() and self.mesh.size == 1:  # else the others may be elsewhere
                    self.save_if_due(state)
                raise
            if size is None:
                return
            yield size

    def _facts(self, state: TrainState) -> Facts:
        return Facts(
            step=state.step,
            seconds=self.seconds(),
            recipe=state.recipe.to_json(),
            seed=state.seed,
            task=self.task,
            data=self.data,
            epochs_below=list(state.monitor.epochs_below),
        )

    def _check_same_run(self, found: Facts, state: TrainState) -> None:
        ours, before = self._facts(state), Recipe.from_json(found.recipe)  # with fields that came later
        if before.to_json() != ours.recipe:
            state.recipe.check_extends(before)
            if found.step > state.steps:
                raise ValueError(f"steps must be at least {found.step}, those done. Got {state.steps}.")
        for name in ("seed", "task", "data"):
            then, now = getattr(found, name), getattr(ours, name)
            if then != now:
                raise ValueError(f"{name} must be that of the run to resume, {then}. Got {now}.")


def _tensors(state: TrainState) -> dict[str, Tensor]:
    """All tensors of a state, by name."""
    ensemble = state.ensemble
    weights = ensemble.state_dict()
    named: dict[str, Tensor] = {f"ensemble.{key}": tensor for key, tensor in weights.items()}
    named |= {f"{NOT_SAVED}{key}": b for key, b in ensemble.named_buffers() if key not in weights}
    named |= {f"monitor.{i}": tensor for i, tensor in enumerate(state.monitor.tensors())}
    for i, moments in enumerate(state.moments()):
        named |= {f"optimizer.{i}.{key}": tensor for key, tensor in moments.items()}
    if state.average is not None:
        named |= {f"average.{i}": tensor for i, tensor in enumerate(state.average.values)}
    named["random.cpu"] = state.random
    if state.device.type == "cuda":
        named[CUDA_RANDOM] = torch.cuda.get_rng_state()
    return named


def _load(state: TrainState, checkpoint: Checkpoint) -> None:
    """Write a checkpoint of the same run into the state."""
    own, saved = _tensors(state), checkpoint.tensors
    if (CUDA_RANDOM in own) != (CUDA_RANDOM in saved):  # its random numbers cannot be drawn elsewhere
        begun = "CUDA" if CUDA_RANDOM in saved else "another kind of device than CUDA"
        raise ValueError(
            f"device must be of the kind that the run was started on, {begun}. Got {state.device}. Resume it "
            "there, or start anew in another folder."
        )
    ours, theirs = ({key: t.shape for key, t in tensors.items()} for tensors in (own, saved))
    unlike = {key for key in {**own, **saved} if ours.get(key) != theirs.get(key)}
    different = sorted(key for key in unlike if not key.startswith(NOT_SAVED))  # caches come and go
    if different:
        more = f", and {n} more differences" if (n := len(different) - 1) else ""
        raise ValueError(f"networks must be those of the run to resume. Got another {different[0]}{more}.")
    with torch.no_grad():
        for name in own.keys() - unlike:
            own[name].copy_(saved[name])
    _set_cuda_random(state, saved)
    state.monitor.epochs_below = list(checkpoint.facts.epochs_below)
    state.step = checkpoint.facts.step


def _set_cuda_random(state: TrainState, tensors: dict[str, Tensor]) -> None:
    if state.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[CUDA_RANDOM])


def _check_savable(state: TrainState) -> None:
    strange = [key for key in state.ensemble.state_dict() if key.endswith("_extra_state")]
    if strange:
        raise TypeError(
            f"the state of a network must be parameters and buffers to be saved. Got {strange[0]}, from "
            "get_extra_state; keep it in a buffer, or train without out=."
        )


class Signals:
    """While active, SIGINT and SIGTERM only ask the run to stop, so that the loop can end its step and save.

    A second SIGINT raises KeyboardInterrupt at once, unless `patient`: torchrun sends one beside that of the
    terminal, and ends processes that take too long. Signals reach the main thread alone: in any other this
    does nothing. A signal to a whole group of processes ends a DataLoader's workers, too; torch would raise
    an exception for that wherever the loop is, so from then on SIGCHLD is ignored.

    A run inside a run, as those that choose K, passes its signals on: what stops one of them stops both.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.received, self.patient = "", patient
        self._previous: dict[signal.Signals, Any] = {}
        self._outer: Signals | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not None:  # None: not Python's, so it cannot be restored
                    self._previous[number] = signal.signal(number, self._receive)
        outer = getattr(self._previous.get(signal.SIGTERM), "__self__", None)
        if isinstance(outer, Signals):
            self._outer, self.received = outer, self.received or outer.received
        return self

    def __exit__(self, *error: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
        if self._outer is not None:
            self._outer.received, self._outer = self._outer.received or self.received, None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received == name == "SIGINT" and not self.patient:
            raise KeyboardInterrupt
        self.received = name
        child = getattr(signal, "SIGCHLD", None)
        if child is not None and child not in self._previous and signal.getsignal(child) is not None:
            self._previous[child] = signal.signal(child, lambda *_: None)
