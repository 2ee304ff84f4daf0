"""GoogLeNet-18: a convolution, eight inception modules, a fully connected layer: figure 5 (b, c).

conv32 [shared] | inception of width 1, 2 | 2, 2, 2, 4 | 4, 4 | global average pooling, fully connected

with max-pooling between the groups. 18 layers: 3×3 and 5×5 convolutions and the last; 1×1 do not count.
"""

import torch
from torch import Tensor, nn

from .. import _checks
from .base import ConvBNReLU, GlobalAverage, SplitNetwork, batch_norm, chain, conv, halving_pool, initialise

LATER_GROUPS = ((1, 2), (2, 2, 2, 4), (4, 4))  # the width factors of the inception modules


class Inception(nn.Module):
    """Four views of the same features side by side, 192 × `width` channels."""

    def __init__(self, inputs: int, width: int, pool: int = 2) -> None:
        super().__init__()
        f = width
        # Pads right and below only for a window of 2, as the authors' "same" pooling does.
        around = ((pool - 1) // 2, pool // 2) * 2
        self.point = chain(conv=conv(inputs, 64 * f, 1), relu=nn.ReLU())
        self.three = chain(reduce=conv(inputs, 32 * f, 1), relu=nn.ReLU(), conv=conv(32 * f, 64 * f, 3))
        self.five = chain(reduce=conv(inputs, 16 * f, 1), relu=nn.ReLU(), conv=conv(16 * f, 32 * f, 5))
        self.pooled = chain(
            pad=nn.ConstantPad2d(around, -torch.inf),
            pool=nn.MaxPool2d(pool, stride=1),
            conv=conv(inputs, 32 * f, 1),
        )
        self.norm = batch_norm(192 * f)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, inputs, H, W) to (B, 192 * width, H, W)."""
        views = torch.cat([self.point(x), self.three(x), self.five(x), self.pooled(x)], dim=1)
        features: Tensor = self.relu(self.norm(views))
        return features


def googlenet18(
    *,
    classes: int = 10,
    channels: int = 3,
    pool: int = 2,  # the authors' window, between and inside the modules; the paper writes 3
) -> SplitNetwork:
    """GoogLeNet with 18 layers; shared after the 1st ReLU.

    Images (B, channels, H, W), sides of at least 8, to logits (B, classes). 3.54 million parameters by
    default.
    """
    _checks.at_least(2, classes=classes)
    _checks.at_least(1, channels=channels)
    _checks.choice("pool", pool, (2, 3))
    inputs = 32
    groups: dict[str, nn.Module] = {}
    for group, widths in enumerate(LATER_GROUPS, start=2):
        groups[f"pool{group - 1}"] = halving_pool(pool)
        for number, width in enumerate(widths, start=1):
            groups[f"inception{group}_{number}"] = Inception(inputs, width, pool)
            inputs = 192 * width
    stem = chain(conv1=ConvBNReLU(channels, 32))
    trunk = chain(**groups, average=GlobalAverage(), classify=nn.Linear(inputs, classes))
    options = {"classes": classes, "channels": channels, "pool": pool}
    return initialise(SplitNetwork(stem, trunk, name="googlenet18", options=options))
