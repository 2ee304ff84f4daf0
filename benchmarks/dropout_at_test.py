"""What the small CNN's dropout does at test, before max-pooling: trained ensembles under three treatments.

    python benchmarks/dropout_at_test.py RUN... --root DATA [--device cuda]

"shrunk" is the program's, every value times the chance to be kept; "expected" the mean of each pooled maximum
over the masks (`expected_pooling`); "drawn" are masks as in training, answers averaged over so many draws.
Prints errors on the test images and, since what was learned must show there in any case, on training images;
with --held-out, for runs that were trained with that `--validation`, on what they did not see of those.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cmcl
from cmcl.cli.loading import find_saved
from cmcl.data.dataset import Dataset, evenly_spaced, split_validation
from cmcl.networks import SplitNetwork
from cmcl.networks.convnet import DropoutPool, PlainDropout
from cmcl.reproduction.environment import commit, device_name, versions

TREATMENTS = {"shrunk": 1, "expected": 1, "drawn once": 1, "drawn 8 times": 8}  # how often each is asked


class Drawn(nn.Module):
    """Dropout as in training, whatever the mode."""

    def __init__(self, p: float, *, rescale: bool) -> None:
        super().__init__()
        self.p, self.scale = p, 1 if rescale else 1 - p

    def forward(self, x: Tensor) -> Tensor:
        """Drop; torch's own divides what is kept, which `scale` undoes."""
        return F.dropout(x, self.p, training=True) * self.scale


def treat(member: SplitNetwork, treatment: str) -> None:
    """Give a network's two poolings, and its third dropout, a treatment; its weights stay."""
    options, trunk = member.options, member.trunk
    if not options["drop_before_pool"]:
        raise ValueError("networks must drop before they pool. Got one that pools first.")
    p, rescale = options["dropout"], options["rescale_dropout"]
    plain = partial(nn.Dropout if rescale else PlainDropout, p)
    drop = partial(Drawn, p, rescale=rescale) if treatment.startswith("drawn") else plain
    halving = nn.Sequential(drop(), nn.MaxPool2d(2))
    pool = DropoutPool(p, rescale=rescale) if treatment == "expected" else halving
    given = {"drop1": nn.Identity(), "pool1": pool, "drop2": nn.Identity(), "pool2": pool, "drop3": drop()}
    for name, layer in given.items():
        if hasattr(trunk, name):
            setattr(trunk, name, layer)


def errors(ensemble: cmcl.Ensemble, data: Dataset, draws: int) -> str:
    """In percent: top-1, oracle, one member alone; and the NLL of the averaged answer."""
    probs = torch.stack([ensemble.predict(data.images).member_probs.cpu() for _ in range(draws)]).mean(0)
    top1, oracle = (
        100 * measure(probs, data.targets) for measure in (cmcl.metrics.top1_error, cmcl.metrics.oracle_error)
    )
    member = 100 * (probs.argmax(2) != data.targets).double().mean().item()
    right = probs.mean(0).gather(1, data.targets[:, None]).clamp_min(1e-12)
    nll = -right.log().mean().item()
    return f"top1 {top1:6.2f} oracle {oracle:6.2f} members {member:6.2f} nll {nll:6.3f}"


def main() -> None:
    """Measure every ensemble under every treatment."""
    parser = argparse.ArgumentParser(description="Dropout before max-pooling, treated in three ways at test.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train-images", type=int, default=2000)
    parser.add_argument("--held-out", type=float, help="the runs' `--validation`")
    parser.add_argument("--limit", type=int, help="test images")
    given = parser.parse_args()
    test, train = (cmcl.data.load("cifar10", split=split, root=given.root) for split in ("test", "train"))
    name, other = "train", evenly_spaced(train, given.train_images)
    if given.held_out:
        name, other = "held-out", split_validation(train, given.held_out)[1]
    test = evenly_spaced(test, given.limit)
    print(f"{device_name(torch.device(given.device))}, torch {versions()['torch']}, commit {commit()}")
    print(f"{len(test):,} test images, {len(other):,} {name} images")
    for saved in map(find_saved, given.runs):
        ensemble = saved.load(root=given.root, device=given.device)
        run = saved.folder.parent if saved.folder.name == "ensemble" else saved.folder
        if given.held_out and json.loads((run / "recipe.json").read_text())["validation"] != given.held_out:
            parser.error(f"--held-out must be what {run.name} was trained with, as --validation.")
        print("##", run.name)
        for treatment, draws in TREATMENTS.items():
            for member in ensemble.members:
                treat(member, treatment)
            on_test, on_other = (errors(ensemble, data, draws) for data in (test, other))
            print(f"{treatment:14s} test {on_test} | {name} {on_other}", flush=True)


if __name__ == "__main__":
    main()
