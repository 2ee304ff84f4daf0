"""Networks of torchvision and timm as members: where they are cut, and whether both halves are the network.

    python benchmarks/any_network.py [--out results/any-network.txt]

Needs torchvision and timm. For every network: the place that `shareable_layers` suggests and its features,
how far the cut network's logits are from the whole one's, and how many of its parameters one step of CMCL
reaches with a gradient. Weights are random, nothing is downloaded.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import timm
import torch
import torchvision
from torch import nn

import cmcl
from cmcl.reproduction.environment import commit, versions

# Names by library and size of the images in pixels.
NETWORKS = """
torchvision 64: resnet18 resnet50 resnext50_32x4d wide_resnet50_2 vgg11_bn alexnet densenet121 squeezenet1_1
torchvision 64: mobilenet_v2 mobilenet_v3_small shufflenet_v2_x0_5 mnasnet0_5 regnet_y_400mf efficientnet_b0
torchvision 64: efficientnet_v2_s convnext_tiny swin_t swin_v2_t googlenet
torchvision 224: vit_b_32 maxvit_t inception_v3
timm 64: resnet18 resnet26d efficientnet_b0 tf_efficientnetv2_b0 convnext_atto convnextv2_atto regnetx_002
timm 64: mobilenetv3_small_050 densenet121 dla34 ghostnet_100 hrnet_w18_small nfnet_f0 poolformer_s12
timm 64: repvgg_a0 rexnet_100 fastvit_t8 inception_next_tiny
timm 224: vit_tiny_patch16_224 deit_tiny_patch16_224 mixer_s32_224 swin_tiny_patch4_window7_224 levit_128s
timm 224: eva02_tiny_patch14_224 beit_base_patch16_224 cait_xxs24_224 coat_tiny xcit_nano_12_p16_224
timm 256: mobilevit_xxs edgenext_xx_small maxvit_nano_rw_256
"""
AUXILIARY = ("googlenet", "inception_v3")  # have further heads, only for training


def networks() -> Iterator[tuple[str, Callable[[], nn.Module], int]]:
    """(library and name, how to build it, size of its images)"""
    for line in NETWORKS.strip().splitlines():
        where, names = line.split(": ")
        library, size = where.split()
        for name in names.split():
            options = {"aux_logits": False, "init_weights": False} if name in AUXILIARY else {}
            create = torchvision.models.get_model if library == "torchvision" else timm.create_model
            yield f"{library} {name}", partial(create, name, num_classes=4, **options), int(size)


def check(build: Callable[[], nn.Module], size: int) -> str:
    """One row: places, suggestion, features, difference, parameters reached."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, size, size)
    places = cmcl.shareable_layers(build(), x)
    usable = [place for place in places if place.problem is None]
    found = next((place for place in places if place.suggested), None)
    if found is None:
        return f"{len(usable):4}/{len(places):<4} none suggested: {places[0].problem}"
    ensemble = cmcl.Ensemble(build, 2, share_after=found.name, share_at_test="off").eval()
    for zeros in [p for p in ensemble.parameters() if not p.any()]:  # heads and last layers that start silent
        nn.init.normal_(zeros, std=0.1)
    with torch.no_grad():
        alone = torch.stack([member(x) for member in ensemble.members])
        apart = (ensemble(x) - alone).abs().max() / alone.abs().max()
    cmcl.confident_oracle_loss(ensemble.train()(x), torch.tensor([0, 1])).total.backward()
    parameters = list(ensemble.parameters())
    reached = sum(p.grad is not None for p in parameters)
    features = "x".join(map(str, found.shape or ()))
    counts = f"{reached}/{len(parameters)}"
    return f"{len(usable):4}/{len(places):<4} {found.name:32} {features:12} {apart:9.1e} {counts:>11}"


def main() -> None:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a file that keeps what is printed")
    parser.add_argument("--only", default="", help="networks whose name contains this")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say("$ python benchmarks/any_network.py --out results/any-network.txt")
    used = versions() | {"torchvision": torchvision.__version__, "timm": timm.__version__}
    say(f"commit {commit()}, " + ", ".join(f"{name} {version}" for name, version in used.items() if version))
    say(f"{'network':42} usable/all {'suggested':31} {'features':16} {'apart':5} {'gradients':>11}")
    failed = 0
    for name, build, size in networks():
        if arguments.only not in name:
            continue
        began = time.perf_counter()
        try:
            row = check(build, size)
        except Exception as error:  # one network that fails must not hide the others
            failed += 1
            row = f"FAILED: {type(error).__name__}: {error}"
        say(f"{name:42} {row} {time.perf_counter() - began:5.1f} s")
    say(f"{failed} failed")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
