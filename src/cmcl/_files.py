"""Files that are written completely or not at all, and readers whose errors name the file."""

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

LIMIT = "which takes no file so large (a limit, or the kind of disk)", "Raise the limit"
STALE = 3600.0  # seconds without a write, after which a temporary file is left over from a killed process
DEEPEST = 100  # levels of JSON values; ours have at most 6
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the disk, a quota, a limit on file sizes


class DiskFullError(OSError):
    """A file did not fit on the disk; what was written before is intact."""


@contextmanager
def replacing(path: Path, checkpoints: Path | None = None) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it once all is written and on the disk.

    After a failure (a full disk, an interrupt) nothing new is left, and what was at `path` still is. Files
    that killed processes left half-written are removed. `checkpoints` is as for `needing_room`.
    """
    path = path.resolve() if path.is_symlink() else path  # the link stays
    if os.path.lexists(path) and not path.is_file():  # /dev/null would become a file for everybody
        raise ValueError(f"{path} must be a file to be replaced. Got something else. Name another place.")
    _remove_stale(path.parent)
    with needing_room(path, checkpoints):
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        part.touch(exist_ok=False)  # with the permissions of any new file, unlike tempfile's
        try:
            yield part
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(path)
            _sync_folder(path.parent)
        finally:
            part.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    for part in folder.glob(".*.????????.part"):  # as `replacing` names them
        with suppress(OSError):  # another process may remove it first, or own it
            if part.is_file() and time.time() - part.stat().st_mtime > STALE:
                part.unlink()


@contextmanager
def needing_room(path: Path, checkpoints: Path | None = None) -> Iterator[None]:
    """Turns the error of a full disk, while `path` is written, into one that says what to do.

    Where `path` belongs to a run, `checkpoints` is the folder that it would be resumed from.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        free = f"which has {shutil.disk_usage(path.parent).free / 1e6:.1f} MB left ({error.strerror})"
        room, hint = (free, "Free some space") if error.errno != errno.EFBIG else LIMIT
        if checkpoints is None:
            then = "or name another place"
        elif any(checkpoints.glob("step-*.safetensors")):
            then = "then resume: the checkpoints written before are intact"
        else:
            then = "then start the run again: it had no checkpoint yet"
        raise DiskFullError(error.errno, f"{path} must fit on its disk, {room}. {hint}, {then}") from error


def read_json(path: Path, *, largest: int = 64 * 2**20) -> Any:
    """The content of a JSON file. Everything that is wrong with it raises `ValueError` with its path.

    Devices, pipes and files above `largest` bytes are never read, so a bad link cannot hang the caller.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} must be a JSON file. Got {'something else' if path.exists() else 'nothing'}."
        )
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"{path} must be a JSON file of at most {largest} bytes. Got {size}.")
    return parse_json(path.read_bytes(), path)


def parse_json(text: str | bytes, source: object) -> Any:
    """JSON values of a text; damage, deep nesting and huge integers raise `ValueError` with the source."""
    try:
        values = json.loads(text)
        deep = nested_too_deep(values)
    except RecursionError:
        deep = True
    except ValueError as error:  # damage, bytes that are not UTF-8, an integer of thousands of digits
        raise ValueError(f"{source} must be JSON. Got text that cannot be parsed: {error}.") from None
    if deep:
        raise ValueError(f"{source} must be JSON. Got values nested too deep.")
    return values


def nested_too_deep(values: Any) -> bool:
    """Whether JSON values are nested so deep that a function that walks them could run out of stack."""
    level = [values]
    for _ in range(DEEPEST):
        nests = [one for one in level if isinstance(one, dict | list | tuple)]
        level = [value for one in nests for value in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return True


def open_binary(path: Path, *, hint: str) -> BinaryIO:
    """Open for reading; the error of a failure says what is wrong, and ends with `hint`."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} must exist. Got no such file. {hint}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{path} must be a file. Got a folder. {hint}") from None
    except PermissionError:
        message = f"{path} must be readable. Got no read permission. Give it with: chmod u+r '{path}'."
        raise PermissionError(message) from None


def digest(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file, in hex; it detects damage, not forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _sync_folder(folder: Path) -> None:
    """The rename itself reaches the disk only with its folder (not needed, nor possible, on Windows)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
