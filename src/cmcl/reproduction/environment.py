"""What a run ran on: versions, device, commit. None of it should change a number, and all of it might.

A run may be stopped and go on elsewhere: its folder keeps the facts of every stretch of its training.
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
from .._files import needing_room
from ..training import Options
from ..training.setup import find_device

FACTS = ("device", "precision", "versions", "commit")
STRETCHES = "environment.jsonl"  # in a run folder: a line each time it is started or resumed


def facts(options: Options) -> dict[str, Any]:
    """All of it, as fields of a record."""
    device = usable(find_device(options.device))
    usual = "bf16" if device.type == "cuda" else "float32"
    return {
        "device": device_name(device),
        "precision": usual if options.precision == "auto" else options.precision,
        "versions": versions(),
        "commit": commit(),
    }


def keep(folder: Path, step: int, now: dict[str, Any]) -> None:
    """Note that training goes on from `step` with these facts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STRETCHES
    with needing_room(path, folder / "checkpoints"), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step} | now) + "\n")


def stretches(folder: Path) -> list[dict[str, Any]]:
    """What the training in a folder ran on, from its first step to its last.

    A stretch that another one went back behind, or that was refused before its first step, left nothing.
    """
    path = folder / STRETCHES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept: list[dict[str, Any]] = []
    for line in lines:
        try:
            one = json.loads(line)
            kept = [*(before for before in kept if before["step"] < one["step"]), one]
        except (ValueError, TypeError, KeyError):  # cut short by a kill
            continue
    return kept


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Stretches as fields of a record: the first, and all of them if they are not alike."""
    first, *others = ({key: one[key] for key in FACTS} for one in found)
    alike = found[0]["step"] == 0 and all(other == first for other in others)
    return first | {"resumed_with": [] if alike else list(found)}


def versions() -> dict[str, str | None]:
    """Of all that may change a number."""
    return {
        "cmcl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def usable(device: torch.device) -> torch.device:
    """The device, if this machine has it and it computes."""
    try:
        torch.ones(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is a RuntimeError
        reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ValueError(
            f"device must be one that can compute here. Got {str(device)!r} ({reason}). Use cpu."
        ) from None
    return device


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's kind and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def commit() -> str | None:
    """The commit of the program, "-dirty" if files were changed; None outside a checkout.

    A copy without its history is told by the variable CMCL_COMMIT.
    """
    if told := os.environ.get("CMCL_COMMIT"):
        return told
    here = Path(__file__).resolve().parents[1]
    try:
        # Only if git knows this very package: it may be installed below somebody else's checkout.
        _git(here, "ls-files", "--error-unmatch", "__init__.py")
        return _git(here, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
