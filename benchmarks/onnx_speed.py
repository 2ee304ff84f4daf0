"""How fast an exported ONNX file is on a CPU beside `Ensemble.predict`, both from raw images to the answer.

    python benchmarks/onnx_speed.py [--threads 1] [--rounds 15] [--out results/onnx-speed.txt]

zoo/svhn-resnet20-cmcl on random images. The two take turns, so that what else the machine does falls on both;
a round is one ratio, of the fastest of some calls each. Medians over the rounds.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import onnxruntime
import torch

import cmcl
from cmcl.export import export
from cmcl.reproduction.environment import commit, device_name, versions

ZOO = Path(__file__).parents[1] / "zoo" / "svhn-resnet20-cmcl"
CALLS = {1: 20, 64: 3}  # images -> calls of each in a round


def fastest(call: Callable[[], object], calls: int) -> float:
    """Milliseconds."""
    took = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        took.append(1000 * (time.perf_counter() - began))
    return min(took)


def session(path: str, threads: int) -> onnxruntime.InferenceSession:
    """With as many threads as PyTorch has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Print and keep a line for each number of images."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a file that keeps what is printed")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ensemble = cmcl.load(ZOO)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        export(ensemble, Path(folder) / "model.onnx", images)
        onnx = session(f"{folder}/model.onnx", arguments.threads)
    used = versions() | {"onnxruntime": onnxruntime.__version__}
    out = f" --out {arguments.out}" if arguments.out else ""
    lines = [
        f"$ python benchmarks/onnx_speed.py --threads {arguments.threads} --rounds {arguments.rounds}{out}",
        f"commit {commit()}, " + ", ".join(f"{name} {version}" for name, version in used.items() if version),
        f"{device_name(torch.device('cpu'))}, load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores",
    ]
    for count, calls in CALLS.items():
        x = images[:count]
        rounds = [
            (
                fastest(lambda x=x: ensemble.predict(x), calls),
                fastest(lambda x=x: onnx.run(None, {"input": x.numpy()}), calls),
            )
            for _ in range(arguments.rounds + 1)
        ][1:]  # the first warms up
        ratios = sorted(ours / theirs for ours, theirs in rounds)
        ours, theirs = (median(column) for column in zip(*rounds, strict=True))
        lines += [
            f"{count} images: predict {ours:.1f} ms, ONNX {theirs:.1f} ms, ratio {median(ratios):.2f}",
            f"  each round, sorted: {' '.join(f'{ratio:.2f}' for ratio in ratios)}",
        ]
    print(*lines, sep="\n")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
