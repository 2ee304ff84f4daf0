"""The first try of a new user: CMCL beside an independent ensemble on the digits, 10 epochs, nothing tuned.

    python benchmarks/newcomer.py > results/newcomer.txt

Twenty random splits into 1,438 training and 359 test images. The networks are that of the quickstart, with
its optimizer, and that of `CMCLClassifier`; beta, K and labels are the defaults. "k3 sampled" is what the
documentation once recommended to start with: K = 3, beta = 0.75 and sampled labels.
"""

import argparse
import platform
from dataclasses import replace

import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import cmcl

RECIPE = cmcl.Recipe(epochs=10, batch_size=64, optimizer="adam", lr=0.01, decay=0.1)
FORMER = {"overlap": 3, "beta": 0.75, "labels": "sampled"}
CASES = {  # the first of each group is what the others are compared with
    "CNN of the quickstart": {
        "independent ensemble": {"method": "ie"},
        "CMCL": {},
        "CMCL, shared features": {"sharing": True},
        "CMCL, shared, k3 sampled": {"sharing": True, **FORMER},
    },
    "CMCLClassifier": {"independent ensemble": {"method": "ie"}, "CMCL": {}, "CMCL, k3 sampled": FORMER},
}


def network() -> nn.Module:
    """A member as in docs/start/quickstart.md."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)
    )


def error(group: str, options: dict, seed: int) -> float:
    """The top-1 error of one split, in percent."""
    x, y = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(x, y, test_size=359, stratify=y, random_state=seed)
    if group == "CMCLClassifier":
        mean, std = x.mean(0), x.std(0) + 1e-6
        x, test_x = (((part - mean) / std).clip(-10, 10).astype(np.float32) for part in (x, test_x))
        model = cmcl.CMCLClassifier(epochs=10, random_state=seed, **options)
        return 100 * (1 - model.fit(x, y).score(test_x, test_y))
    train, test = (
        (torch.tensor(15 * images).to(torch.uint8).view(-1, 1, 8, 8), torch.tensor(classes))
        for images, classes in ((x, y), (test_x, test_y))
    )
    torch.manual_seed(seed)
    ensemble = cmcl.Ensemble(network, members=5, share_after="1" if options.get("sharing") else None)
    recipe = replace(RECIPE, **options)
    quiet = cmcl.Options(quiet=True, device="cpu")
    return cmcl.fit(ensemble, train, recipe=recipe, seed=seed, test=test, options=quiet).scores["top1"]


def main() -> None:
    """Train all of them, and print means and paired tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--splits", type=int, default=20)
    splits = parser.parse_args().splits
    torch.set_num_threads(1)
    print(f"$ python benchmarks/newcomer.py --splits {splits}")
    print(f"torch {torch.__version__}, {platform.machine()}, one thread")
    for group, cases in CASES.items():
        print(f"\n{group}, 10 epochs: top-1 error in %, mean ± standard deviation over {splits} splits")
        errors = {name: [error(group, o, s) for s in range(splits)] for name, o in cases.items()}
        first = next(iter(errors.values()))
        for name, ours in errors.items():
            line = f"{name:26}{np.mean(ours):6.2f} ± {np.std(ours, ddof=1):.2f}"
            if ours is not first:
                gaps = np.subtract(ours, first)
                line += (
                    f"  difference {gaps.mean():+.2f}, lower in {(gaps < 0).sum()}, higher in "
                    f"{(gaps > 0).sum()}, Wilcoxon p = {stats.wilcoxon(gaps).pvalue:.2g}"
                )
            print(line, flush=True)


if __name__ == "__main__":
    main()
