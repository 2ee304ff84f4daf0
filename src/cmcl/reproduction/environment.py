"""What a run ran on: versions, device, commit. None of it should change a number, and all of it might.

A run may be resumed elsewhere: its folder keeps the environment of every part.
"""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .._files import needing_room, parse_json
from ..training import Options
from ..training.cuda import find_device

FIELDS = ("device", "mesh", "precision", "versions", "commit")  # of a record
HISTORY = "environment.jsonl"  # in a run folder: a line each time it is started or resumed


def current(options: Options, mesh: str | None = None) -> dict[str, Any]:
    """The environment now, as fields of a record; `mesh` of the processes that train together, if several."""
    device = usable(find_device(options.device))
    return {
        "device": device_name(device),
        "mesh": mesh,
        "precision": options.precision_on(device.type),
        "versions": versions(),
        "commit": commit(),
    }


def append(folder: Path, step: int, environment: dict[str, Any]) -> None:
    """Record that training continues from `step` in this environment."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / HISTORY
    with needing_room(path, folder / "checkpoints"), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step} | environment) + "\n")


def history(folder: Path) -> list[dict[str, Any]]:
    """The environments of a run from its first step to its last.

    A part that a later one repeated from an earlier step contributed nothing and is left out.
    """
    path = folder / HISTORY
    lines = path.read_bytes().splitlines() if path.is_file() else []
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            one = parse_json(line, path)
            found = [*(before for before in found if before["step"] < one["step"]), one]
        except (ValueError, TypeError, KeyError):  # cut short by a kill
            continue
    return found


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A history as fields of a record: the first environment, and all of them if they differ."""
    first, *others = ({key: one.get(key) for key in FIELDS} for one in found)  # earlier ones have no mesh
    same = found[0]["step"] == 0 and all(other == first for other in others)
    return first | {"resumed_with": [] if same else list(found)}


def versions() -> dict[str, str | None]:
    """The versions of everything that may change a number."""
    python, cuda = platform.python_version(), torch.version.cuda
    return {"cmcl": __version__, "python": python, "torch": torch.__version__, "cuda": cuda}


def usable(device: torch.device) -> torch.device:
    """The device, if this machine has it and can compute on it."""
    try:
        torch.ones(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is a RuntimeError
        reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ValueError(
            f"device must be one that can compute here. Got {str(device)!r} ({reason}). Use cpu."
        ) from None
    return device


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's type and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def commit() -> str | None:
    """The commit of this package, "-dirty" if files were changed; None outside a checkout.

    The variable CMCL_COMMIT replaces it, for copies without their history.
    """
    if given := os.environ.get("CMCL_COMMIT"):
        return given

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parents[1]), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # it may be installed below another checkout
        return git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None
