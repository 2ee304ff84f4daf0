"""The paper's point in a minute: IE, MCL and CMCL with five small networks on scikit-learn's digits.

    python examples/digits.py [--seed 0]

300 images to learn from, 1,497 to be tested on. MCL has the best oracle error (some member is right) and the
worst top-1 error (nobody knows which); CMCL repairs the second.
"""

import argparse

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import cmcl

K = 3  # members that learn each example


def data(seed: int) -> tuple[torch.Tensor, ...]:
    """Training and test images (N, 1, 8, 8) in 0..1, and their labels."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order].float().reshape(-1, 1, 8, 8) / 16, labels[order]
    return images[:300], labels[:300], images[300:], labels[300:]


def network() -> torch.nn.Module:
    """The paper's small CNN, shrunk to 8 x 8 pixels."""
    return cmcl.networks.cnn(
        channels=1,
        size=8,
        filters=(8, 16),
        kernel=3,
        padding=1,
        hidden=None,
        dropout=0.25,
        rescale_dropout=True,
    )


def train(method: str, images: torch.Tensor, labels: torch.Tensor, seed: int) -> cmcl.Ensemble:
    """60 epochs of one of the three methods, from the same start."""
    torch.manual_seed(seed)
    ensemble = cmcl.Ensemble(network, 5, share_after="stem" if method == "CMCL" else None)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.01)
    for _ in track(range(60), f"{method:5}"):
        for batch in torch.randperm(len(images)).split(30):
            logits = ensemble(images[batch])
            if method == "IE":
                loss = cmcl.independent_loss(logits, labels[batch])
            elif method == "MCL":
                loss = cmcl.oracle_loss(logits, labels[batch])
            else:
                loss = cmcl.confident_oracle_loss(logits, labels[batch], overlap=K, labels="sampled")
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
    return ensemble


def main() -> None:
    """Train, test, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.set_num_threads(1)  # layers this small lose more to a second thread than they gain
    images, labels, test_images, test_labels = data(seed)
    table = Table(title=f"Errors on {len(test_images):,} test images in %, seed {seed}")
    for column in ("method", "top-1", "oracle", "ECE", "members alone"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in ("IE", "MCL", "CMCL"):
        probs = train(method, images, labels, seed).predict(test_images).member_probs
        alone = cmcl.metrics.member_errors(probs, test_labels)
        scores = [
            getattr(cmcl.metrics, name)(probs, test_labels) for name in ("top1_error", "oracle_error", "ece")
        ]
        numbers = [f"{100 * score:.1f}" for score in scores]
        table.add_row(method, *numbers, f"{100 * alone.min():.0f} to {100 * alone.max():.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
