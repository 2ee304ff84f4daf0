"""Does CMCL help members that are trained well? A small version for one CPU core.

    apt-get install dataset-fashion-mnist              # Debian's package of Fashion-MNIST
    python benchmarks/modern.py --out results/modern-cpu.json > results/modern-cpu.txt

Fashion-MNIST, halved to 14x14 pixels; 4,000 training images, drawn anew for each seed, 400 more for the
temperature, all 10,000 test images. `fastcnn` members of two widths with flips, shifts, label smoothing, SGD
and a linear one-cycle learning rate, chosen for IE on other training images (--choose-lr). One network of the
same cost, five times a member's multiplications, stands beside them. This is no substitute for CIFAR-10 and a
GPU: `cmcl reproduce modern`.
"""

import argparse
import gzip
import json
import time
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats

import cmcl
from cmcl import metrics
from cmcl.data import from_arrays
from cmcl.training.config import Augment, Recipe

FOLDER = Path("/usr/share/datasets/fashion-mnist")
TRAIN, HELD_OUT, BATCH, EPOCHS = 4000, 400, 128, 15
WIDTHS = {8: 19, 16: 38}  # of a member -> of one network with about five times its multiplications
SETTINGS = {
    "single, iso-cost": {"members": 1, "method": "ie"},
    "ie": {"method": "ie"},
    "cmcl default": {"method": "cmcl"},
    "cmcl k4 beta 0.75": {"method": "cmcl", "overlap": 4, "beta": 0.75},
    "cmcl k4 beta 0.75 sharing": {"method": "cmcl", "overlap": 4, "beta": 0.75, "sharing": True},
}
COLUMNS = ("top1", "oracle", "member", "ece", "scaled_ece")


def load(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 1, 14, 14) uint8 and classes (N,)."""
    images, labels = (
        np.frombuffer(gzip.decompress((FOLDER / f"{split}-{part}.gz").read_bytes()), np.uint8)[skip:]
        for part, skip in (("images-idx3-ubyte", 16), ("labels-idx1-ubyte", 8))
    )
    halved = F.avg_pool2d(torch.tensor(images).view(-1, 1, 28, 28).float(), 2)
    return halved.round().byte(), torch.tensor(labels).long()


def recipe(lr: float, epochs: int, **setting: object) -> Recipe:
    """The same training for every setting."""
    fields = {
        "epochs": epochs,
        "batch_size": BATCH,
        "lr": lr,
        "nesterov": True,
        "weight_decay": 5e-4,
        "schedule": "linear",
        "warmup": 0.2,
        "label_smoothing": 0.1,
        "augment": Augment(flip="alternating", crop=1),
        "validation": HELD_OUT / (TRAIN + HELD_OUT),
        "sharing": False,
    }
    return Recipe(**fields | setting)


def run(width: int, setting: str, seed: int, lr: float, epochs: int, test: bool = True) -> dict[str, float]:
    """Errors and ECE in percent on the test images, or else the error on other training images."""
    images, labels = load("train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    mine = order[: TRAIN + HELD_OUT]
    train = from_arrays(images[mine], labels[mine], classes=[str(c) for c in range(10)])
    if test:
        images, labels = load("t10k")
    else:
        images, labels = images[order[-5000:]], labels[order[-5000:]]
    how = recipe(lr, epochs, **SETTINGS[setting])
    if how.members == 1:
        width = WIDTHS[width]
    torch.manual_seed(seed)
    ensemble = cmcl.Ensemble(
        lambda: cmcl.networks.fastcnn(classes=10, channels=1, width=width),
        how.members,
        share_after="stem" if how.sharing else None,
    )
    result = cmcl.fit(ensemble, train, recipe=how, seed=seed, options=cmcl.Options(device="cpu", quiet=True))
    raw, scaled = metrics.Accumulator(), metrics.Accumulator()
    for x, y in zip(images.split(1000), labels.split(1000), strict=True):
        found = ensemble.predict(x)
        raw.update(found.member_probs, y)
        scaled.update(found.probs[None], y)
    values, after = raw.compute(), scaled.compute()["ece"]
    errors = {name: metrics.percent(values[f"{name}_error"]) for name in ("top1", "oracle", "member")}
    errors |= {"ece": metrics.percent(values["ece"]), "scaled_ece": metrics.percent(after)}
    return errors | {"temperature": ensemble.temperature, "seconds": result.seconds}


def table(rows: list[dict]) -> str:
    """Means and standard deviations over seeds, and paired t-tests of the top-1 error against IE."""
    lines = []
    for width in dict.fromkeys(row["width"] for row in rows):
        lines += ["", f"fastcnn, width {width}", f"{'':28}" + "".join(f"{c + ' %':>16}" for c in COLUMNS)]
        own = {s: [r for r in rows if (r["width"], r["setting"]) == (width, s)] for s in SETTINGS}
        for setting, found in own.items():
            if not found:
                continue
            spread = [f"{fmean(r[c] for r in found):.2f} ± {stdev(r[c] for r in found):.2f}" for c in COLUMNS]
            line = f"{setting:28}" + "".join(f"{text:>16}" for text in spread)
            if setting != "ie" and len(found) == len(own["ie"]):
                gains = [i["top1"] - r["top1"] for i, r in zip(own["ie"], found, strict=True)]
                test = stats.ttest_1samp(gains, 0)
                low, high = test.confidence_interval()
                line += (
                    f"   gain over IE {fmean(gains):+.2f} [{low:+.2f}, {high:+.2f}], p = {test.pvalue:.2g}"
                )
            lines.append(line + f"   n = {len(found)}")
    return "\n".join(lines)


def main() -> None:
    """Run what `--out` lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--choose-lr", metavar="LR,LR", help="only print IE's held-out errors (seed 100)")
    parser.add_argument("--out", type=Path, default=Path("modern-cpu.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.choose_lr:
        for width in WIDTHS:
            for lr in map(float, options.choose_lr.split(",")):
                found = run(width, "ie", 100, lr, options.epochs, test=False)
                print(f"width {width} lr {lr}: {found['top1']:.2f} %, {found['seconds']:.0f} s", flush=True)
        return
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(r["width"], r["setting"], r["seed"]) for r in rows}
    for seed in range(options.seeds):
        for width in WIDTHS:
            for setting in SETTINGS:
                if (width, setting, seed) in done:
                    continue
                began = time.perf_counter()
                found = run(width, setting, seed, options.lr, options.epochs)
                rows.append({"width": width, "setting": setting, "seed": seed} | found)
                options.out.write_text(json.dumps(rows, indent=1) + "\n")
                error, seconds = found["top1"], time.perf_counter() - began
                print(f"width {width:2} seed {seed} {setting:28} {error:6.2f} % {seconds:5.0f} s", flush=True)
    facts = f"{TRAIN:,} images, {options.epochs} epochs, batch {BATCH}, lr {options.lr}"
    print(f"\nFashion-MNIST 14x14, {facts}, torch {torch.__version__}, one CPU thread")
    print(table([row for row in rows if row["seed"] < options.seeds]))


if __name__ == "__main__":
    main()
