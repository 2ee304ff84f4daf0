"""The default network of `CMCLClassifier`, not one of the paper's."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .. import _checks


class Plain(nn.Sequential):
    """Layers one after the other; `plain(**options)` builds the same architecture again."""

    name = ""  # only `plain` gives one: a slice of its layers cannot be built from the options
    options: Mapping[str, Any] = {}


def plain(*, shape: Sequence[int], classes: int, hidden: int = 64) -> Plain:
    """One hidden layer for vectors, two convolutions for images; `share_after="relu"`.

    Args:
        shape: of one input, (features,) or (channels, height, width); images may have another size.
        classes: number of outputs.
        hidden: width.
    """
    if not isinstance(shape, Sequence) or len(shape) not in (1, 3):
        raise ValueError(f"shape must be (features,) or (channels, height, width). Got {shape!r}.")
    for size in shape:
        _checks.at_least(1, **{"each of shape": size})
    _checks.at_least(2, classes=classes)
    _checks.at_least(1 if len(shape) == 1 else 2, hidden=hidden)
    layers = _for_vectors if len(shape) == 1 else _for_images
    network = Plain(OrderedDict(layers(shape[0], classes, hidden)))
    network.name = "plain"
    network.options = {"shape": list(shape), "classes": classes, "hidden": hidden}
    return network


def _for_vectors(features: int, classes: int, hidden: int) -> dict[str, nn.Module]:
    return {"hidden": nn.Linear(features, hidden), "relu": nn.ReLU(), "classify": nn.Linear(hidden, classes)}


def _for_images(channels: int, classes: int, hidden: int) -> dict[str, nn.Module]:
    return {
        "conv1": nn.Conv2d(channels, hidden // 2, 3, padding=1),
        "relu": nn.ReLU(),
        "pool": nn.MaxPool2d(2, ceil_mode=True),
        "conv2": nn.Conv2d(hidden // 2, hidden, 3, padding=1),
        "relu2": nn.ReLU(),
        "average": nn.AdaptiveAvgPool2d(2),
        "flatten": nn.Flatten(),
        "classify": nn.Linear(4 * hidden, classes),
    }
