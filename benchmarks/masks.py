"""A step of the engine with other ways to draw the masks of feature sharing.

    python benchmarks/masks.py cnn:5 cnn:10

The arguments are networks with their numbers of members. "separate" names a generator, which is what the
library did: every draw is a kernel that writes its numbers. "fused" names none, as the library does now: the
compiler draws where the masks are used. "15 bits" makes four masks of a draw; "rand" draws a number for each
mask. The first two come twice, as a measure of the noise; the bottom line is a step without sharing.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from engine import CMCL, Bench, engine, header
from torch import Tensor

import cmcl.sharing


def bits(width: int, *, named: bool) -> Callable[..., list[Any]]:
    """Masks of so many bits, from draws of 60; `named`: the generator is passed on, even if it is None."""

    def masks(h: Tensor, count: int, prob: float, mode: str, generator: torch.Generator | None) -> list[Any]:
        if mode == "expected":
            return [prob] * count
        source = {"generator": generator} if named else {}
        each, level = 60 // width, round(prob * 2**width)
        drawn = [torch.randint(2**60, h.shape, device=h.device, **source) for _ in range(0, count, each)]
        shifts = [width * (n % each) for n in range(count)]
        return [(drawn[n // each] & ((2**width - 1) << s)) < (level << s) for n, s in enumerate(shifts)]

    return masks


def rand(h: Tensor, count: int, prob: float, mode: str, generator: torch.Generator | None) -> list[Any]:
    """A number for each mask."""
    return [prob if mode == "expected" else torch.rand(h.shape, device=h.device) < prob for _ in range(count)]


WAYS = {
    "15 bits, separate": bits(15, named=True),
    "15 bits, fused": bits(15, named=False),
    "rand, fused": rand,
}


def main() -> None:
    """Measure, and print a line for each."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="NETWORK:MEMBERS")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--steps", type=int, default=800 if cuda else 4)
    parser.add_argument("--epoch", type=int, default=200 if cuda else 2)
    parser.add_argument("--batch", type=int)
    arguments = parser.parse_args()
    print(header(arguments, "masks"), flush=True)
    first, second, *_ = WAYS
    for case in arguments.cases:
        network, members = case.split(":")
        bench = Bench(network, arguments, float("inf"))
        recipe = replace(CMCL, members=int(members), overlap=1)
        for way in (*WAYS, first, second, None):
            if way is not None:
                cmcl.sharing._masks = WAYS[way]
            torch.compiler.reset()
            begun = time.perf_counter()
            milliseconds = 1000 * engine(bench, replace(recipe, sharing=way is not None))
            took = time.perf_counter() - begun
            print(
                f"{case} {way or 'no sharing'}: {milliseconds:.3f} ms a step ({took:.0f} s in all)",
                flush=True,
            )


if __name__ == "__main__":
    main()
