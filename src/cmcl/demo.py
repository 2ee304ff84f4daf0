"""The paper's point in a minute: one network, an independent ensemble, MCL and CMCL, without a download.

MCL has the lowest oracle error (some member is right) and the worst top-1 error (nobody knows which); CMCL
repairs the second.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .reproduction.record import Record
from .reproduction.run import run
from .training import Options

METHODS = {"single": "one network", "ie": "independent ensemble", "mcl": "MCL", "cmcl": "CMCL"}


def demo(
    out: str | Path,
    *,
    segmentation: bool = False,
    seed: int = 3,
    quiet: bool = False,
    say: Callable[[str], Any] = lambda line: None,
) -> dict[str, Any]:
    """Train the four, and write a report page.

    Args:
        out: folder of the run folders and of the page. What is finished there is only measured again.
        segmentation: on drawn scenes, instead of handwritten digits.
        seed: of weights, data order, masks and labels. Of 0 to 4, on which the recipes were chosen, 3 is
            the one in the middle by how far CMCL is below IE on the digits.
        quiet: no progress bars.
        say: gets a line of text before and after each training.

    Returns:
        `top1`, `oracle` and `ece` in percent for each of "single", "ie", "mcl", "cmcl"; and `report`, the
        path of the page, or None without the extra `report`.
    """
    from .report import write

    found: dict[str, Any] = {}
    options = Options(device="cpu", quiet=quiet, evaluate_every=3)
    with one_thread():
        for i, (method, title) in enumerate(METHODS.items(), 1):
            name = f"{'shapes-160' if segmentation else 'digits-300'}-{method}"
            say(f"{i}/{len(METHODS)} {title} ({name})")
            begun = time.perf_counter()
            (record,) = run(name, (seed,), out=out, options=options)
            found[method] = scores(record)
            say(f"    top-1 error {found[method]['top1']:.1f} %, {time.perf_counter() - begun:.0f} s")
    try:
        return found | {"report": str(write([out], Path(out) / "report.html"))}
    except ImportError as error:  # without the extra `report`
        say(f"no report page: {error}")
        return found | {"report": None}


def scores(record: Record) -> dict[str, float]:
    """What the demo shows of a record, in percent."""
    errors = record.errors["expected"]
    return {"top1": errors["top1"], "oracle": errors["oracle"], "ece": record.calibration["ece"]}


@contextmanager
def one_thread() -> Iterator[None]:
    """Layers this small lose more to a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
