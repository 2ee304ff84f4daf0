"""What the small CNN's dropout does at test, before max-pooling: trained ensembles, three treatments.

    python benchmarks/dropout_at_test.py RUN... --root DATA [--device cuda]

"shrunk" is the program's, every value times the chance to be kept; "expected" the mean of the pooled maximum
over the masks (`expected_pooling`); "drawn" are masks as in training, answers averaged over so many draws.
Prints errors on the test images and, since what was learned must show there in any case, on training images.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cmcl
from cmcl.cli.runs import find_ensembles, open_ensemble
from cmcl.data.dataset import Dataset, spread
from cmcl.experiments.environment import commit, device_name, versions
from cmcl.networks.cnn import DropoutPool, PlainDropout

Treatment = Callable[[nn.Module], nn.Module]  # dropout -> what pools


class Drawn(nn.Module):
    """Dropout as in training, whatever the mode."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.p, self.kept = drop.p, 1.0 if isinstance(drop, nn.Dropout) else 1 - drop.p

    def forward(self, x: Tensor) -> Tensor:
        """Drop; torch's own divides what is kept."""
        return F.dropout(x, self.p, training=True) * self.kept


def shrunk(drop: nn.Module) -> nn.Module:
    """The program's."""
    return nn.Sequential(drop, nn.MaxPool2d(2))


def drawn(drop: nn.Module) -> nn.Module:
    """As in training."""
    return nn.Sequential(Drawn(drop), nn.MaxPool2d(2))


TREATMENTS: dict[str, tuple[Treatment, int]] = {  # what pools, and how often it is asked
    "shrunk": (shrunk, 1),
    "expected": (DropoutPool, 1),
    "drawn once": (drawn, 1),
    "drawn 8 times": (drawn, 8),
}


MEASURES = (cmcl.metrics.top1_error, cmcl.metrics.oracle_error)


def treat(member: nn.Module, pool: Treatment) -> None:
    """Give a network's two poolings, and its third dropout, a treatment; its weights stay."""
    kind = nn.Dropout if member.options["rescale_dropout"] else PlainDropout
    drop = kind(member.options["dropout"])
    trunk = member.trunk
    for number in (1, 2):
        if hasattr(trunk, f"drop{number}"):
            setattr(trunk, f"drop{number}", nn.Identity())
        setattr(trunk, f"pool{number}", pool(drop))
    if hasattr(trunk, "drop3"):
        trunk.drop3 = Drawn(drop) if pool is drawn else drop


def errors(ensemble: cmcl.Ensemble, data: Dataset, draws: int) -> str:
    """A line's part: top-1, oracle, one member alone, all in percent, and the NLL of the averaged answer."""
    probs = torch.stack([ensemble.predict(data.images).member_probs.cpu() for _ in range(draws)]).mean(0)
    members = (probs.argmax(2) != data.targets).double().mean().item()
    right = probs.mean(0).gather(1, data.targets[:, None]).clamp_min(1e-12)
    top1, oracle = (measure(probs, data.targets) for measure in MEASURES)
    percents = (top1, oracle, members)
    return " ".join(f"{100 * percent:6.2f}" for percent in percents) + f" {-right.log().mean().item():6.3f}"


def main() -> None:
    """Measure every ensemble under every treatment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train-images", type=int, default=2000)
    parser.add_argument("--limit", type=int, help="test images")
    given = parser.parse_args()
    test, train = (cmcl.data.load("cifar10", split=split, root=given.root) for split in ("test", "train"))
    test, train = spread(test, given.limit), spread(train, given.train_images)
    print(f"{device_name(torch.device(given.device))}, torch {versions()['torch']}, commit {commit()}")
    print(f"{len(test):,} test images | {len(train):,} training images; top-1, oracle, one member alone, NLL")
    for run in given.runs:
        for place in find_ensembles(run):
            ensemble = open_ensemble(place, root=given.root, device=given.device)
            print(place.parent.name if place.name == "ensemble" else place.name)
            for name, (pool, draws) in TREATMENTS.items():
                for member in ensemble.members:
                    treat(member, pool)
                found = " | ".join(errors(ensemble, data, draws) for data in (test, train))
                print(f"  {name:14s} {found}", flush=True)


if __name__ == "__main__":
    main()
