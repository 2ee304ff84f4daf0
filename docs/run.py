"""Run the Python blocks of pages and write down what they print: python docs/run.py [PAGE...]

A block ```python may be followed by a block ```output, which holds what it prints. One with title="FILE" is
saved as this file, for a block ```sh, which runs if an ```output follows. Pictures that the blocks save are
copied to docs/pictures if the page shows them. A test runs the same and compares.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
BLOCK = re.compile(
    r"^```(?:python(?: title=\"(?P<file>\S+)\")?|(?P<shell>sh)(?=\n[^`]*```\n\n```output\n))\n(?P<code>.*?)^```\n"
    r"(?P<output>\n```output\n(?P<printed>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")


def outputs(text: str, folder: Path) -> Iterator[tuple[re.Match[str], str]]:
    """Run the blocks of a page one after the other in a folder, as a reader would: each with what it prints."""
    names = {"__name__": "page"}
    (folder / "zoo").symlink_to(ROOT / "zoo")  # as in a checkout
    for block in BLOCK.finditer(text):
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
            if block["file"]:
                Path(block["file"]).write_text(block["code"], encoding="utf-8")
            elif block["shell"]:
                sys.stdout.write(shell(block["code"]))
            else:
                exec(compile(block["code"], "page", "exec"), names)
        yield block, "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def shell(commands: str) -> str:
    """What commands print to stdout; those of this Python come first."""
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": paths, "OMP_NUM_THREADS": "1"}  # torchrun warns without
    done = subprocess.run(
        ["sh", "-e"], input=commands, env=os.environ | more, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the commands of a page must run. Got {done.stderr}")
    return done.stdout


def executed(text: str, folder: Path) -> str:
    """The page with the present outputs."""
    parts, at = [], 0
    for block, printed in outputs(text, folder):
        parts.append(text[at : block.end()])
        if block["output"]:
            parts[-1] = parts[-1].removesuffix(block["output"]) + f"\n```output\n{printed}```\n"
        at = block.end()
    return "".join([*parts, text[at:]])


def alike(one: str, other: str, tolerance: float = 0.25) -> bool:
    """Whether outputs have the same words, and numbers that agree as well as two computers do.

    Training in float32 differs between processors: errors may differ by 2 points, other numbers by a quarter.
    """
    if NUMBER.sub("#", one).split() != NUMBER.sub("#", other).split():
        return False
    mine, theirs = (
        [float(number.replace(",", "")) for number in NUMBER.findall(text)] for text in (one, other)
    )
    return all(abs(a - b) <= max(2, tolerance * abs(b)) for a, b in zip(mine, theirs, strict=True))


def pictures_of(text: str, folder: Path) -> list[Path]:
    """The pictures of a page that its blocks have saved."""
    shown = re.findall(r"!\[[^\]]*\]\(\S*pictures/(\S+)\)", text)
    return [folder / name for name in shown if (folder / name).exists()]


def main(pages: list[str]) -> None:
    """Write the outputs of pages; without arguments, of all that have any."""
    paths = [Path(page) for page in pages] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if "```output\n" not in text:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path.write_text(executed(text, Path(folder)), encoding="utf-8")
            for picture in pictures_of(text, Path(folder)):
                shutil.copy(picture, PICTURES)
        sys.stdout.write(f"{os.path.relpath(path, ROOT)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
