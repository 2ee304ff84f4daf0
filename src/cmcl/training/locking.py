"""One run in a folder at a time."""

import errno
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .._files import needing_room

if sys.platform != "win32":
    import fcntl


class FolderInUseError(RuntimeError):
    """Another process trains in this folder."""


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
        with needing_room(folder / ".lock", checkpoints=folder / "checkpoints"):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
