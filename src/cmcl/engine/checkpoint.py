"""A run that is stopped, killed or out of disk goes on from its last whole checkpoint.

A checkpoint is one safetensors file, the JSON state in its header, named after its step and checksum: a
damaged one is known without trusting anything else. Nothing is ever unpickled.
"""

import errno
import json
import os
import platform
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from .. import checks
from ..files import replacing

if sys.platform != "win32":
    import fcntl

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{12})\.safetensors")
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the disk, a quota, a limit on file sizes


class DiskFullError(OSError):
    """A file did not fit on the disk; the checkpoints written before are intact."""


class DamagedError(ValueError):
    """All checkpoints of a run are damaged."""


class FolderInUseError(RuntimeError):
    """Another process trains in this folder."""


class Checkpoint(NamedTuple):
    """What `Checkpoints.save` was given: tensors, on the CPU, and JSON values."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run in `folder`, of which the last `keep` stay.

    Open it under `locked`: opening removes what a killed process left half written, and must not take away
    the file that a living one is writing.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        checks.positive("keep", keep)
        self.folder, self.keep = folder, keep
        self._damaged: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(".step-*.part"):
            part.unlink(missing_ok=True)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove those that are no longer needed; returns its path."""
        data = safetensors.torch.save(_snapshot(tensors), metadata={"state": json.dumps(state)})
        path = self.folder / f"step-{step:08d}-{sha256(data).hexdigest()[:12]}.safetensors"
        with needing_room(path), replacing(path) as part:
            part.write_bytes(data)
        self._damaged.discard(path)  # the same bytes again, whole this time
        self._make_newest(path)
        return path

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, None if there is none; each damaged one is a warning.

        If all are damaged, or one cannot be read, that is an error: to begin anew would remove them.
        """
        damaged: dict[Path, str] = {}
        for path in reversed(self._paths()):
            try:
                found = _read(path)
            except (IsADirectoryError, ValueError, SafetensorError) as error:  # a failing disk is no damage
                damaged[path] = str(error)
                continue
            self._damaged |= damaged.keys()
            for bad, reason in damaged.items():
                warnings.warn(f"{bad} is damaged: {reason}. Using {path.name} instead.", stacklevel=2)
            return found
        if damaged:
            listed = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
            raise DamagedError(
                f"one checkpoint in {self.folder} must be whole. All are damaged ({listed}). To begin anew, "
                "remove them, or name another folder."
            )
        return None

    def _paths(self) -> list[Path]:
        """Oldest first; of two at one step (a kill before the older was removed) the one written first."""
        paths = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (_step(path), path.stat().st_mtime_ns))

    def _make_newest(self, new: Path) -> None:
        """Remove all but `new` and the last few before it.

        Whatever claims to be as far as `new`, or farther, is damaged (the run would have gone on from there)
        or the same step once more: `new` takes its place.
        """
        paths = self._paths()
        before = [path for path in paths if _step(path) < _step(new) and path not in self._damaged]
        kept = {new, *before[::-1][: self.keep - 1]}
        for path in paths:
            if path not in kept:
                path.unlink(missing_ok=True)


@contextmanager
def needing_room(path: Path) -> Iterator[None]:
    """Turns the error of a full disk, while `path` is written, into one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        free = shutil.disk_usage(path.parent).free / 1e6
        raise DiskFullError(
            error.errno,
            f"{path} must fit on its disk, which has {free:.1f} MB left ({error.strerror}). "
            "Free some space, then resume: the checkpoints written before are intact",
        ) from error


def _snapshot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies, because safetensors refuses tensors that share memory or are not contiguous."""
    return {
        key: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for key, value in tensors.items()
    }


def _step(path: Path) -> int:
    return _parts(path)[0]


def _parts(path: Path) -> tuple[int, str]:
    """Step and checksum in a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    assert match, "only names that match are ever listed"
    return int(match[1]), match[2]


def _read(path: Path) -> Checkpoint:
    step, checksum = _parts(path)
    data = path.read_bytes()
    if not sha256(data).hexdigest().startswith(checksum):
        raise ValueError("its checksum is not the one in its name")
    tensors = safetensors.torch.load(data)
    # The header again, by hand: safetensors gives the metadata of files only, not of bytes just checked.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    if "state" not in header.get("__metadata__", {}):
        raise ValueError("it holds no state of a run, so another program wrote it")
    return Checkpoint(step, tensors, json.loads(header["__metadata__"]["state"]))


_held: set[int] = set()  # open lock files


def _leave_locks_to_parent() -> None:
    """A forked data-loading worker must not hold the lock on after its parent was killed."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks_to_parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process: another one is refused until this one leaves or dies.

    Where the system or the file system has no locks, a warning says so and nothing is held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)  # stays: removing it would be a race
    _held.add(handle)
    try:
        _lock(handle, folder)
        yield
    finally:
        if handle in _held:
            _held.remove(handle)
            os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        if sys.platform == "win32":
            raise OSError(errno.ENOLCK, "no flock on this system")
        # The kernel lets go of it when the process dies, however it dies.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 1000).decode(errors="replace") or "another process"
        raise FolderInUseError(
            f"{folder} must be used by one run at a time. It is in use by {owner}. "
            "Wait for it, stop it, or choose another folder."
        ) from None
    except OSError as error:
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}). Make sure that no other process trains there.",
            stacklevel=4,  # the `with locked(folder)`
        )
    else:
        with needing_room(folder / ".lock"):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())


class Interrupt:
    """While active, SIGINT and SIGTERM only ask to stop, so that the loop can end its step and save.

    A second SIGINT raises KeyboardInterrupt at once. Signals reach the main thread alone: in any other
    this does nothing. A signal to a whole group of processes ends a DataLoader's workers, too; torch would
    tell of that by an exception wherever the loop is, so from then on it is not told.
    """

    def __init__(self) -> None:
        self.asked = False
        self.name = ""
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not None:  # None: not Python's, so not to be put back
                    self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _ask(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.name == name == "SIGINT":
            raise KeyboardInterrupt
        self.asked, self.name = True, name
        self._ignore_dying_children()

    def _ignore_dying_children(self) -> None:
        if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGCHLD) is not None and signal.SIGCHLD not in self._previous:
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
