"""Where a captured step spends its time: python benchmarks/profile_step.py --network resnet20 [--no-sharing]

Prints the kernels of one step, most expensive first, how long the device was busy, and how many kernels ran
side by side. With --trace FILE also a trace for chrome://tracing.
"""

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from engine import BATCH, CMCL, fast_kernels, make_step
from torch.profiler import ProfilerActivity, profile

from cmcl import Ensemble, Options, networks
from cmcl.training.cuda import captured, execution

REPLAYS = 20


def main() -> None:
    """Capture, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--network", choices=BATCH, default="resnet20")
    parser.add_argument("--no-sharing", action="store_true")
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args()
    recipe = replace(CMCL, steps=100, batch_size=BATCH[asked.network], sharing=not asked.no_sharing)
    cut = "stem" if recipe.sharing else None
    ensemble = Ensemble(networks.NETWORKS[asked.network], recipe.members, share_after=cut)
    data = torch.randn(50 * recipe.batch_size, 3, 32, 32), torch.randint(10, (50 * recipe.batch_size,))
    options = Options(device="cuda", quiet=True)
    with fast_kernels(), execution(options, 0):
        made, _ = make_step(ensemble, data, recipe, options, precision="bf16", compile=True, streams=True)
        step = captured(made)
        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            for _ in range(REPLAYS):
                step()
            torch.cuda.synchronize()
    if asked.trace:
        seen.export_chrome_trace(str(asked.trace))
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    report([(e.name, e.time_range.start, e.time_range.end) for e in kernels])


def report(kernels: list[tuple[str, float, float]]) -> None:
    """Name, begin and end of each, in microseconds."""
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    work = sum(end - start for _, start, end in kernels)
    busy, reached = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for name, start, end in kernels:
        total[name] += end - start
        count[name] += 1
    print(f"{span / REPLAYS / 1000:.3f} ms a step, {len(kernels) / REPLAYS:.0f} kernels")
    print(f"some kernel runs {100 * busy / span:.0f} % of the time, {work / busy:.2f} at a time")
    for name, microseconds in total.most_common(40):
        share = 100 * microseconds / work
        print(
            f"{share:5.1f} %  {microseconds / REPLAYS:8.1f} us  {count[name] / REPLAYS:6.1f} x  {name[:110]}"
        )


if __name__ == "__main__":
    main()
