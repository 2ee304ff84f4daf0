"""Time and memory of the data layer on the real sets: CMCL_DATA=DIR python benchmarks/data.py

Each row runs in a process of its own. `peak` is the highest memory above what the process held before, also
as a multiple of the bytes that the call returns; CPU seconds are those of all threads together. The files are
read once beforehand, so that times are warm.
"""

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import cmcl.data.cifar10
import cmcl.data.icoseg
import cmcl.data.svhn  # noqa: F401  (imported here, so that no row pays for it)
from cmcl.data import Dataset, load
from cmcl.data.transforms import GCN, ZCA, Compose


@dataclass
class Row:
    """One measurement."""

    name: str
    limit: str


ROWS = {
    "cifar10": Row("CIFAR-10 train, python batches", "2 s, 1.5x"),
    "svhn": Row("SVHN train, .mat", "2.2x"),
    "icoseg": Row("iCoseg train, 75x125", "-"),
    "whiten": Row("GCN + ZCA of 50,000 x 3072: fit and apply", "90 s, 3 GB"),
}


def peak() -> int:
    """Highest resident memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(key: str) -> None:
    """Print one row."""
    data: Dataset | None = load("cifar10") if key == "whiten" else None
    torch.eye(64, dtype=torch.float64) @ torch.eye(64, dtype=torch.float64)  # threads and libraries are up
    before, start, cpu_start = _resident(), time.perf_counter(), time.process_time()
    images = whiten(data) if data else load(key).images
    seconds, cpu, above = time.perf_counter() - start, time.process_time() - cpu_start, peak() - before
    ratio = f"{above / images.nbytes:.2f}x of {images.nbytes / 2**20:,.0f} MiB"
    row = ROWS[key]
    times = f"{seconds:>7.2f} s  {cpu:>6.2f} s CPU"
    print(f"{row.name:<44}{times}  {above / 2**30:>5.2f} GiB  {ratio:<20}  limit {row.limit}")


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def whiten(data: Dataset) -> Tensor:
    """What the paper's CIFAR-10 went through."""
    return Compose([GCN(), ZCA()]).fit(data).transform(data.images)


def measure_agreement() -> None:
    """Whitened CIFAR-10 against pylearn2's formulas, in float64 from end to end."""
    train = load("cifar10")
    values = whiten(train).flatten(1)
    x = train.images.flatten(1).double()
    x -= x.mean(1, keepdim=True)
    x *= 55 / x.square().sum(1, keepdim=True).sqrt()
    x -= x.mean(0)
    e, vectors = torch.linalg.eigh(x.T @ x / len(x))
    difference = (x @ ((vectors * (e + 0.1).rsqrt()) @ vectors.T) - values).abs().max()
    centred = values.double() - values.double().mean(0)
    whitened = torch.linalg.eigvalsh(centred.T @ centred / len(x))
    print(f"largest |float32 - float64 reference| of all values: {difference:.1e} (limit 1e-3)")
    print(f"largest |eigenvalue - e/(e+0.1)| of 3,072: {(whitened - e / (e + 0.1)).abs().max():.1e}")
    print(f"deviation of the whitened values {values.std():.4f}; {(e > 0.1).sum()} eigenvalues above 0.1")


def main() -> None:
    """Run every row twice and print the second: the first warms the disk's cache."""
    print("$ CMCL_DATA=DIR python benchmarks/data.py")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(
        f"torch {torch.__version__}, {device}, load of other work before the start: {os.getloadavg()[0]:.1f}"
    )
    for key in ROWS:
        command = [sys.executable, __file__, key]
        if key != "whiten":
            subprocess.run(command, check=True, capture_output=True)
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
    measure_agreement()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        main()
