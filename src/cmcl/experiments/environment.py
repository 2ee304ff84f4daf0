"""What a run ran on: versions, device, commit. None of it should change a number, and all of it might."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..engine import Options
from ..engine.setup import find_device


def facts(options: Options) -> dict[str, Any]:
    """All of it, as fields of a record."""
    device = find_device(options.device)
    usual = "bf16" if device.type == "cuda" else "float32"
    return {
        "device": device_name(device),
        "precision": usual if options.precision == "auto" else options.precision,
        "versions": versions(),
        "commit": commit(),
    }


def versions() -> dict[str, str | None]:
    """Of all that may change a number."""
    return {
        "cmcl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's kind and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


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
