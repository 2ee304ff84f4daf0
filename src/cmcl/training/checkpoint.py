"""A run that is stopped, killed or out of disk goes on from its last whole checkpoint.

A checkpoint is one safetensors file, the JSON state in its header, named after its step and checksum: a
damaged one is known without trusting anything else. Nothing is ever unpickled.
"""

import json
import re
import warnings
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from .. import _checks
from .._files import replacing

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{12})\.safetensors")


class DamagedError(ValueError):
    """All checkpoints of a run are damaged."""


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
        _checks.positive("keep", keep)
        self.folder, self.keep = folder, keep
        self._damaged: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(".step-*.part"):
            part.unlink(missing_ok=True)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove those that are no longer needed; returns its path."""
        data = safetensors.torch.save(_snapshot(tensors), metadata={"state": json.dumps(state)})
        path = self.folder / f"step-{step:08d}-{sha256(data).hexdigest()[:12]}.safetensors"
        with replacing(path, checkpoints=self.folder) as part:
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
