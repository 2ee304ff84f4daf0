"""Does Muon pay? SGD, AdamW and Muon at equal epochs, on one CPU core.

    apt-get install dataset-fashion-mnist
    python benchmarks/muon.py > results/muon-cpu.txt

The data and the network are those of benchmarks/modern.py: one `fastcnn` of width 16, with its augmentation
and linear one-cycle learning rate. The largest learning rate of each optimizer is chosen on other training
images, with seed 100; then more seeds are measured on the test images.
"""

import argparse
import time
from dataclasses import replace
from statistics import fmean, stdev

import torch
from modern import HELD_OUT, TRAIN, load, recipe

import cmcl
from cmcl.data import from_arrays

WIDTH = 16
RATES = {"sgd": (0.1, 0.2, 0.4, 0.8), "adamw": (0.002, 0.005, 0.01), "muon": (0.002, 0.005, 0.01, 0.02)}


def train(optimizer: str, lr: float, seed: int, epochs: int, *, test: bool) -> tuple[float, float]:
    """The error in percent, on test images or on other training images, and CPU seconds."""
    images, labels = load("train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    other = load("t10k") if test else (images[order[-5000:]], labels[order[-5000:]])
    mine = order[: TRAIN + HELD_OUT]
    train = from_arrays(images[mine], labels[mine], classes=[str(c) for c in range(10)])
    how = replace(recipe(lr, epochs, members=1, method="ie"), optimizer=optimizer)
    torch.manual_seed(seed)
    ensemble = cmcl.Ensemble(lambda: cmcl.networks.fastcnn(classes=10, channels=1, width=WIDTH), 1)
    began = time.process_time()
    cmcl.fit(ensemble, train, recipe=how, seed=seed, options=cmcl.Options(device="cpu", quiet=True))
    return cmcl.evaluate(ensemble, other)["top1"], time.process_time() - began


def main() -> None:
    """Choose learning rates, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = f"{TRAIN} images, {options.epochs} epochs, torch {torch.__version__}, one CPU thread"
    print(f"one fastcnn of width {WIDTH}, Fashion-MNIST 14x14, {facts}", flush=True)
    found: dict[str, list[tuple[float, float]]] = {}
    for optimizer, rates in RATES.items():
        errors = {lr: train(optimizer, lr, 100, options.epochs, test=False)[0] for lr in rates}
        texts = ", ".join(f"lr {lr:g}: {error:.2f} %" for lr, error in errors.items())
        print(f"{optimizer:5} on other training images, {texts}", flush=True)
        best = min(errors, key=errors.__getitem__)
        runs = [train(optimizer, best, seed, options.epochs, test=True) for seed in range(options.seeds)]
        found[optimizer] = runs
        tops, seconds = zip(*runs, strict=True)
        spread = f"{fmean(tops):.2f} ± {stdev(tops):.2f} %"
        took = f"{fmean(seconds):.1f} CPU seconds"
        print(f"{optimizer:5} lr {best:g}: test error {spread}, n = {len(runs)}, {took}", flush=True)
    for optimizer in ("adamw", "muon"):
        ratios = [fmean(r[i] for r in found[optimizer]) / fmean(r[i] for r in found["sgd"]) for i in (0, 1)]
        print(f"{optimizer} / sgd: error {ratios[0]:.3f}, CPU time {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
