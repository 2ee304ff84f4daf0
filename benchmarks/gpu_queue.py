"""Train the next missing cells for a given time, one run after the other; the same command continues.

    python benchmarks/gpu_queue.py 50m --root my-data              # all cells, the default, today's training
    python benchmarks/gpu_queue.py 2h --root my-data --seeds 5 modern
    python benchmarks/gpu_queue.py 2m digits-ie digits-cmcl        # a try on any computer

The order is that of `cmcl reproduce`: seed 0 of every cell, other seeds of the headline and the default, the
rest.
Compiled code is kept in RUNS/.inductor, so that a network of one shape is compiled once on this machine. All
runs are trained in one process, which keeps the data of the last one. A run that is not finished in time is
saved, and the next call resumes it. Records go to RESULTS/records; copy that folder and RUNS to continue
elsewhere. --dry-run lists what is missing, with the expected time.
"""

import argparse
import os
import sys
from pathlib import Path


def main() -> None:
    """Run the queue; exits with 0 if nothing is missing, with 3 if the time was over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("time", help="such as 90s, 50m or 1h30m, with everything but the start of Python")
    every = ["all", "default", "modern"]
    parser.add_argument("what", nargs="*", default=every, help="as for `cmcl reproduce`")
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--root", help="folder of the datasets")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    options, more = parser.parse_known_args()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((options.out / ".inductor").absolute()))

    from cmcl import cli  # after the environment is set

    words = ["reproduce", *options.what, "--seeds", options.seeds, "--budget", options.time, "--unfinished"]
    words += ["--out", str(options.out), "--results", str(options.results), "--quiet", *more]
    sys.argv = ["cmcl", *words, *(["--root", options.root] if options.root else [])]
    cli.main()


if __name__ == "__main__":
    main()
