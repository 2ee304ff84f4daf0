"""A run folder: checkpoints, telemetry, a lock; and how a run stops (signals, `max_seconds`) and resumes.

A checkpoint is one safetensors file with the JSON state in its header, named after its step and checksum: a
damaged one is recognised without trusting anything else. Nothing is ever unpickled.
"""

import re
import signal
import threading
import time
import warnings
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

from .. import _checks
from .._files import parse_json, replacing
from .._schema import Schema
from .config import Options
from .monitor import TelemetryFile
from .step import TrainState

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{12})\.safetensors")
CUDA_RANDOM = "random.cuda"  # the device's random state; runs elsewhere have none
NOT_SAVED = "buffer."  # begins the names of buffers outside the state_dict
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
    """The state of a run that is JSON, and what tells it from other runs."""

    step: int
    seconds: float
    recipe: dict[str, Any]
    seed: int
    task: str | None
    data: str
    epochs_below: list[int]

    def differences(self, other: "Facts") -> list[str]:
        """The names of what makes two runs different."""
        names = ("recipe", "seed", "task", "data")
        return [name for name in names if getattr(self, name) != getattr(other, name)]


class Checkpoint(NamedTuple):
    """The content of a checkpoint file; tensors are on the CPU."""

    tensors: dict[str, Tensor]
    facts: Facts


class Checkpoints:
    """The checkpoint files in `folder`, of which the last `keep` stay. Use it under `locked`."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        _checks.positive("keep", keep)
        self.folder, self.keep = folder, keep
        self._damaged: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(".step-*.part"):  # a killed process left them half written
            part.unlink(missing_ok=True)

    def save(self, tensors: dict[str, Tensor], facts: Facts) -> Path:
        """Write a checkpoint, then remove those that are no longer needed; returns its path."""
        # copies, because safetensors rejects tensors that share memory or are not contiguous
        copies = {
            key: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for key, value in tensors.items()
        }
        data = safetensors.torch.save(copies, metadata={"state": facts.model_dump_json()})
        path = self.folder / f"step-{facts.step:08d}-{sha256(data).hexdigest()[:12]}.safetensors"
        with replacing(path, checkpoints=self.folder) as part:
            part.write_bytes(data)
        self._damaged.discard(path)  # the same bytes again, undamaged this time
        self._remove_all_but(path)
        return path

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is not damaged, None if there is none; a damaged one is a warning.

        If all are damaged, or one cannot be read, that is an error: starting anew would remove them.
        """
        damaged: dict[Path, str] = {}
        for path in reversed(self._paths()):
            try:
                found = _read(path)
            except (IsADirectoryError, ValueError, SafetensorError) as error:  # not: a failing disk
                damaged[path] = str(error)
                continue
            self._damaged |= damaged.keys()
            for bad, reason in damaged.items():
                warnings.warn(f"{bad} is damaged: {reason} Using {path.name} instead.", stacklevel=2)
            return found
        if damaged:
            listed = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
            raise DamagedError(
                f"one checkpoint in {self.folder} must be undamaged. All are damaged ({listed}) To start "
                "anew, remove them, or name another folder."
            )
        return None

    def _paths(self) -> list[Path]:
        """Oldest first; of two at one step (a kill before the older was removed) the one written first."""
        paths = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (_step_of(path), path.stat().st_mtime_ns))

    def _remove_all_but(self, new: Path) -> None:
        """Keep `new` and the last few before it.

        A file of the same or a later step is damaged (the run would have resumed from it), or is replaced.
        """
        paths = self._paths()
        before = [path for path in paths if _step_of(path) < _step_of(new) and path not in self._damaged]
        kept = {new, *before[::-1][: self.keep - 1]}
        for path in paths:
            if path not in kept:
                path.unlink(missing_ok=True)


def last_step(folder: Path) -> int | None:
    """The step in the name of a run's last checkpoint; None if it has no checkpoint."""
    names = [path for path in (folder / "checkpoints").glob("step-*") if NAME.fullmatch(path.name)]
    return max(map(_step_of, names), default=None)


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _read(path: Path) -> Checkpoint:
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
        warnings.warn(f"{folder} cannot be locked ({error}). Let no other process train there.", stacklevel=4)
    try:
        yield
    finally:
        lock.release()


class RunFolder:
    """Saves a run now and then, stops it after a signal or `max_seconds`, and restores it.

    Without a path nothing is saved, but the run can be stopped all the same.
    """

    def __init__(self, path: Path | None, options: Options) -> None:
        self.path, self.options = path, options
        self.checkpoints: Checkpoints | None = None
        self.telemetry: TelemetryFile | None = None
        self.started = self._saved_at = self._training_since = time.monotonic()
        self._before = 0.0  # seconds of training before this call
        self._saved_step: int | None = None
        self._signals = Signals()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.path is not None:
                stack.enter_context(locked(self.path))
                for part in self.path.rglob(".*.part"):  # as in `Checkpoints`
                    part.unlink(missing_ok=True)
                self.checkpoints = Checkpoints(self.path / "checkpoints")
            stack.enter_context(self._signals)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        if self.telemetry is not None:
            self.telemetry.close()
        self._stack.close()

    def describe(self, *, steps: int, task: str | None, data: str) -> None:
        """Set what tells this run from others, and its length."""
        self.steps, self.task, self.data = steps, task, data

    def restore(self, state: TrainState, resume: bool) -> None:
        """Restore the state from the last checkpoint, if `resume`; else there must be none."""
        self._training_since = time.monotonic()
        if self.checkpoints is None:
            return
        _check_savable(state)
        checkpoint = self.checkpoints.latest()
        if not resume and checkpoint is not None:
            raise ValueError(f"{self.path} must be a new folder. {self._content(checkpoint.facts, state)}")
        if resume and checkpoint is None:
            folder = self.checkpoints.folder.parent
            found = [p.name for p in folder.iterdir() if p.name not in (".lock", "checkpoints")]
            raise ValueError(
                f"{folder} must hold a checkpoint to resume from. It holds "
                f"{', '.join(sorted(found)) or 'nothing'}. Leave out resume to start a run there."
            )
        if checkpoint is not None:
            self._check_same_run(checkpoint.facts, state)
            _load(state, checkpoint)
            self._before, self._saved_step = checkpoint.facts.seconds, state.step

    def open_telemetry(self, epoch: float) -> None:
        """Open the telemetry, without rows after `epoch`."""
        if self.path is not None:
            board = self.path / "tensorboard" if self.options.tensorboard else None
            self.telemetry = TelemetryFile(self.path / "telemetry.jsonl", tensorboard=board, epoch=epoch)

    def log(self, row: dict[str, Any]) -> None:
        """Write a row of telemetry."""
        if self.telemetry is not None:
            self.telemetry.write(row)

    def seconds(self) -> float:
        """Seconds of training, over all the times the run was resumed."""
        return self._before + time.monotonic() - self._training_since

    def due(self) -> bool:
        """Whether to save or to stop now."""
        return (
            self.stop_reason() != "" or time.monotonic() - self._saved_at >= self.options.checkpoint_seconds
        )

    def stop_reason(self) -> str:
        """Why the run must stop; empty if it need not."""
        limit = self.options.max_seconds
        over = limit is not None and time.monotonic() - self.started >= limit
        return self._signals.received or ("max_seconds" if over else "")

    def save(self, state: TrainState) -> None:
        """Write a checkpoint, unless this step has one."""
        if self.checkpoints is not None and state.step != self._saved_step:
            self.checkpoints.save(_tensors(state), self._facts(state))
            self._saved_step = state.step
        self._saved_at = time.monotonic()

    @contextmanager
    def saved_on_error(self, state: TrainState) -> Iterator[None]:
        """If evaluation or telemetry fails, keep what was learned."""
        try:
            yield
        except Exception:
            self.save(state)
            raise

    def save_or_stop(self, state: TrainState) -> None:
        """Write a checkpoint; if the run must stop, raise `Interrupted`."""
        self.save(state)
        reason, finished = self.stop_reason(), state.step >= self.steps
        if reason and not (finished and reason == "max_seconds"):
            raise Interrupted(state.step, self.steps, reason, self.path)

    def until_stopped(self, batches: Iterator[int], state: TrainState) -> Iterator[int]:
        """The batches; if loading one fails because a signal ended the DataLoader's workers, stop."""
        while True:
            try:
                size = next(batches, None)
            except (RuntimeError, OSError, EOFError):
                time.sleep(SOON)  # the signal may reach the workers before us
                if self.stop_reason():
                    self.save_or_stop(state)
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

    def _content(self, found: Facts, state: TrainState) -> str:
        step = f"It holds a run at step {found.step}"
        if different := found.differences(self._facts(state)):
            return f"{step}, with another {' and '.join(different)}. Name another folder."
        if found.step >= self.steps:
            return f"{step}, finished. Pass resume=True to load its weights, or name another folder."
        return f"{step}. Pass resume=True to resume it, or name another folder."

    def _check_same_run(self, found: Facts, state: TrainState) -> None:
        ours = self._facts(state)
        for name in found.differences(ours):
            then, now = getattr(found, name), getattr(ours, name)
            if name == "recipe":
                keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
                then, now = (", ".join(f"{key}={r.get(key)!r}" for key in keys) for r in (then, now))
            raise ValueError(f"{name} must be that of the run to resume, {then}. Got {now}.")


def _tensors(state: TrainState) -> dict[str, Tensor]:
    """All tensors of a state, by name."""
    ensemble = state.ensemble
    weights = ensemble.state_dict()
    named: dict[str, Tensor] = {f"ensemble.{key}": tensor for key, tensor in weights.items()}
    named |= {f"{NOT_SAVED}{key}": b for key, b in ensemble.named_buffers() if key not in weights}
    named |= {f"monitor.{i}": tensor for i, tensor in enumerate(state.monitor.tensors())}
    for i, moments in enumerate(state.optimizer.state.values()):
        named |= {f"optimizer.{i}.{key}": tensor for key, tensor in moments.items()}
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
    if state.device.type == "cuda":
        torch.cuda.set_rng_state(saved[CUDA_RANDOM])
    state.monitor.epochs_below = list(checkpoint.facts.epochs_below)
    state.step = checkpoint.facts.step


def _check_savable(state: TrainState) -> None:
    strange = [key for key in state.ensemble.state_dict() if key.endswith("_extra_state")]
    if strange:
        raise TypeError(
            f"the state of a network must be parameters and buffers to be saved. Got {strange[0]}, from "
            "get_extra_state; keep it in a buffer, or train without out=."
        )


class Signals:
    """While active, SIGINT and SIGTERM only ask the run to stop, so that the loop can end its step and save.

    A second SIGINT raises KeyboardInterrupt at once. Signals reach the main thread alone: in any other this
    does nothing. A signal to a whole group of processes ends a DataLoader's workers, too; torch would raise
    an exception for that wherever the loop is, so from then on SIGCHLD is ignored.
    """

    def __init__(self) -> None:
        self.received = ""
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not None:  # None: not Python's, so it cannot be restored
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received == name == "SIGINT":
            raise KeyboardInterrupt
        self.received = name
        child = getattr(signal, "SIGCHLD", None)
        if child is not None and child not in self._previous and signal.getsignal(child) is not None:
            self._previous[child] = signal.signal(child, lambda *_: None)
