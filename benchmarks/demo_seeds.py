"""What `cmcl demo` gives over many seeds.

    python benchmarks/demo_seeds.py --seeds 5 24 > results/demo-seeds.txt

The recipes were chosen on seeds 0 to 4 (of shapes, 0 and 1), on training images that they do not learn from;
the test images played no part in it. Of digits, beta and K are the library's default. Each run is the demo's
own, alone, on one thread.
"""

import argparse
import platform
import sys
import tempfile
from pathlib import Path
from statistics import stdev

import torch

from cmcl.cli.explore import METHODS, SHOWN, one_thread, scores, train_and_calibrate
from cmcl.reproduction import find
from cmcl.reproduction.environment import commit
from cmcl.reproduction.record import spread, spread_text
from cmcl.training import Options


def main() -> None:
    """Train, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(5, 24), metavar=("FIRST", "LAST"))
    parser.add_argument("--segmentation", action="store_true")
    parser.add_argument("--out", type=Path, help="keep the runs here, and go on with those that are there")
    asked = parser.parse_args()
    seeds = range(asked.seeds[0], asked.seeds[1] + 1)
    stem = "shapes-160" if asked.segmentation else "digits-300"
    with tempfile.TemporaryDirectory() as folder, one_thread():
        out = asked.out or Path(folder)
        found = {method: [measure(f"{stem}-{method}", seed, out) for seed in seeds] for method in METHODS}
    more = " --segmentation" if asked.segmentation else ""
    print(f"$ python benchmarks/demo_seeds.py --seeds {seeds[0]} {seeds[-1]}{more}")
    print(f"torch {torch.__version__}, {platform.machine()}, one thread, commit {commit()}")
    print(f"{len(seeds)} seeds, {seeds[0]} to {seeds[-1]}")
    print(f"{stem}: errors on the test images in percent, mean ± standard deviation\n")
    shown = list(found["cmcl"][0])
    print(f"{'':8}" + "".join(f"{SHOWN[key].replace(' error', '').removesuffix(' %'):>16}" for key in shown))
    for method, rows in found.items():
        texts = (spread_text(spread([row[key] for row in rows])) for key in shown)
        print(f"{method:8}" + "".join(f"{text:>16}" for text in texts))
    for key in [key for key in ("top1", "picked") if key in shown]:
        compare(SHOWN[key], *([row[key] for row in found[method]] for method in ("cmcl", "ie")))
    print()
    for method in METHODS:
        print(
            f"{method:8}{find(f'{stem}-{method}').hash}  top-1 by seed:",
            *(f"{r['top1']:.2f}" for r in found[method]),
        )


def measure(name: str, seed: int, out: Path) -> dict[str, float]:
    """The scores of one run; what is in `out` is not trained again."""
    found = scores(train_and_calibrate(name, seed, out, Options(device="cpu", quiet=True)))
    print(f"{name} seed {seed}: {found}", file=sys.stderr, flush=True)
    return found


def compare(score: str, ours: list[float], theirs: list[float]) -> None:
    """How often CMCL is better than the independent ensemble, seed by seed."""
    pairs = list(zip(ours, theirs, strict=True))
    better, equal = sum(a < b for a, b in pairs), sum(a == b for a, b in pairs)
    gain = [b - a for a, b in pairs]
    name = score.removesuffix(" %")
    print(
        f"\nCMCL's {name} is below IE's in {better} of {len(pairs)} seeds, equal in {equal};",
        f"difference {spread_text(spread(gain))} points, standard error {stdev(gain) / len(gain) ** 0.5:.2f}",
    )


if __name__ == "__main__":
    main()
