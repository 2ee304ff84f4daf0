"""ResNet-20: 19 convolutions of 3×3 and a fully connected layer.

conv16, three blocks of 16 [shared] | three of 32 | three of 64, BN, ReLU | global average, fully connected

The first convolution has no batch normalisation and no ReLU, as in the authors' code: only so does the first
group end with the 6th ReLU, which the paper names.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .. import _checks
from .base import GlobalAverage, SplitNetwork, batch_norm, chain, conv, initialise


class Shortcut(nn.Module):
    """Where a block halves the size: 2×2 averages, and zero channels added on both sides."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.added = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, inputs, H, W) to (B, outputs, H/2, W/2), rounded up as the convolution does."""
        halved = F.avg_pool2d(x, 2, ceil_mode=True)
        return F.pad(halved, (0, 0, 0, 0, self.added, self.added))


class Block(nn.Module):
    """Two convolutions whose result is added to their input; halves the size where it widens."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        widens = inputs != outputs
        self.residual = chain(
            conv1=conv(inputs, outputs, stride=2 if widens else 1),
            norm1=batch_norm(outputs),
            relu=nn.ReLU(),
            conv2=conv(outputs, outputs),
            norm2=batch_norm(outputs),
        )
        self.shortcut = Shortcut(inputs, outputs) if widens else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, inputs, H, W) to (B, outputs, H', W')."""
        features: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return features


def resnet20(*, classes: int = 10, channels: int = 3, width: int = 16) -> SplitNetwork:
    """ResNet with 20 layers; shared after the 6th ReLU.

    Images (B, channels, H, W) of any size to logits (B, classes). 0.27 million parameters by default; `width`
    is the number of filters of the first group, which the others double.
    """
    _checks.at_least(2, classes=classes)
    _checks.at_least(1, channels=channels, width=width)
    stem = chain(conv=conv(channels, width), **_group(1, width, width))
    trunk = chain(
        **_group(2, width, 2 * width),
        **_group(3, 2 * width, 4 * width),
        norm=batch_norm(4 * width),
        relu=nn.ReLU(),
        average=GlobalAverage(),
        classify=nn.Linear(4 * width, classes),
    )
    options = {"classes": classes, "channels": channels, "width": width}
    return initialise(SplitNetwork(stem, trunk, name="resnet20", options=options))


def _group(number: int, inputs: int, outputs: int) -> dict[str, nn.Module]:
    """Three blocks; the first takes the features from `inputs` to `outputs` channels."""
    widths = (inputs, outputs, outputs)
    return {f"block{number}_{i}": Block(width, outputs) for i, width in enumerate(widths, start=1)}
