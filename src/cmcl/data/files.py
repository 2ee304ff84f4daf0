"""Where data live, and how their files are opened."""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

HOME = Path("~/.cache/cmcl")


def data_root(root: str | Path | None = None) -> Path:
    """The folder that holds the sets: the argument, else `CMCL_DATA`, else `~/.cache/cmcl`."""
    return Path(root or os.environ.get("CMCL_DATA") or HOME).expanduser()


def cache_root(folder: str | Path | None = None) -> Path:
    """The folder for what can be computed again: the argument, else `CMCL_CACHE`, else `~/.cache/cmcl`."""
    return Path(folder or os.environ.get("CMCL_CACHE") or HOME).expanduser()


def nearest(name: str, valid: list[str]) -> str:
    """A cure for a misspelt name: the closest valid one, or all of them."""
    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Valid names: {', '.join(valid) or 'none'}."


def open_binary(path: Path, *, cure: str) -> BinaryIO:
    """Open for reading; a failure says in one line what must hold and how to get there."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} must exist. Got no such file. {cure}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{path} must be a file. Got a folder. {cure}") from None
    except PermissionError:
        message = f"{path} must be readable. Got no read permission. Give it with: chmod u+r '{path}'."
        raise PermissionError(message) from None
