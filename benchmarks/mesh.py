"""What several GPUs would give, as a calculation: `python benchmarks/mesh.py > results/mesh-calculation.txt`.

Measured: milliseconds of a step on one H200 (results/engine-benchmark-h200.txt), and bytes by the formula
that tests/test_mesh.py compares with what processes ship. Assumed: bandwidth and latency, below. Nothing here
ran on several GPUs.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from cmcl.networks import NETWORKS
from cmcl.training.mesh import Shape, Sizes, Traffic, traffic

MEASURED = Path(__file__).parents[1] / "results" / "engine-benchmark-h200.txt"
MEMBERS = 5  # of the measured ensembles
# Assumptions: bytes per second that a GPU receives, seconds that a collective takes at least
LINKS = {8: (300e9, 20e-6), 64: (40e9, 60e-6)}  # 8 in one machine by NVLink; 8 machines by InfiniBand


class Measured(NamedTuple):
    """One ensemble of five on one H200, in milliseconds a step, by how the step runs."""

    network: str
    batch: int
    plain: float  # bf16, without graph or compiler: as processes of a mesh run, which capture nothing
    captured: float  # CMCL with sharing and stochastic labels, in a CUDA graph


def measured() -> list[Measured]:
    """The last machine's numbers of each network."""
    found = {}
    for block in MEASURED.read_text().split("\n## ")[1:]:
        head = re.match(r"(\w+), B=(\d+)", block)
        rows = dict(re.findall(rf"^\| ([^|]+) \| {MEMBERS} \| ([\d.]+) \|", block, re.MULTILINE))
        names = "plain loop, bf16, channels last", "engine, CMCL, sharing, stochastic labels"
        if head and all(name in rows for name in names):
            found[head[1]] = Measured(head[1], int(head[2]), *(float(rows[name]) for name in names))
    return list(found.values())


def sizes(network: str, *, sharing: bool) -> Sizes:
    """What one member exchanges, from the network itself."""
    member = NETWORKS[network]().eval()
    with torch.no_grad():
        h = member.stem(torch.zeros(1, 3, 32, 32))
    return Sizes(
        weights=sum(p.numel() for p in member.parameters()),
        features=2 * h.numel() if sharing else 0,  # bf16, as in the measured steps
        channels=tuple(m.num_features for m in member.modules() if isinstance(m, nn.BatchNorm2d)),
    )


def seconds_between(shape: Shape, shipped: Traffic, members: int, layers: int) -> float:
    """Seconds that collectives take by the assumptions: a ring, and a latency for each."""
    gpus = shape.members * shape.data
    speed, latency = LINKS[gpus]
    reduced = shipped.total - shipped.features  # an all-reduce passes every byte twice
    wire = (2 * reduced + shipped.features) * (gpus - 1) / gpus / speed
    collectives = 2 + 2 * (shape.members > 1) + (2 * members if shipped.features else 0)  # with the agreement
    collectives += (1 + 4 * layers) * (shape.data > 1)
    return wire + collectives * latency


def rows(found: Measured, gpus: int) -> list[str]:
    """Lines of the table: a member for each GPU, and a batch for each GPU."""
    apart, split = Shape(gpus, 1), Shape(1, gpus)
    lines = []
    for shape, sharing in ((apart, False), (apart, True), (split, True)):
        members, batch = (gpus, found.batch) if shape == apart else (MEMBERS, gpus * found.batch)
        own = sizes(found.network, sharing=sharing)
        shipped = traffic(shape, members, batch, own)
        between = 1e3 * seconds_between(shape, shipped, members, len(own.channels) * MEMBERS)
        alone = found.plain / MEMBERS if shape == apart else found.plain
        graph = found.captured * (gpus / MEMBERS if shape == apart else gpus)
        cells = [found.network, gpus, shape, members, batch, "yes" if sharing else "no"]
        cells += [f"{shipped.total / 2**20:,.2f}", f"{alone:.1f}", f"{between:.1f}"]
        cells += [f"{alone + between:.1f}", f"{graph:.1f}", f"{graph / (alone + between):.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    """Print the table."""
    heads = "network|> GPUs|mesh|> M|> B|sharing|> MiB a step|> compute ms|> exchange ms|> step ms"
    heads += "|> one GPU ms|> ratio"
    titles = heads.split("|")
    out = [
        "$ python benchmarks/mesh.py",
        "A calculation, not a measurement: nothing of it ran on several GPUs.",
    ]
    for gpus, (speed, latency) in LINKS.items():
        out.append(f"assumed for {gpus} GPUs: {speed / 1e9:g} GB/s a GPU, {latency * 1e6:g} us a collective")
    out += ["", f"| {' | '.join(title.lstrip('> ') for title in titles)} |"]
    out.append(f"|{'|'.join('--:' if title.startswith('>') else '---' for title in titles)}|")
    out += [line for gpus in LINKS for found in measured() for line in rows(found, gpus)]
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
