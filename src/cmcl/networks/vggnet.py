"""VGGNet-17: 16 convolutions and a fully connected layer, the paper's figure 5 (a).

64, 64 [shared] | 128, 128 | 256 ×4 | 512 ×4 | 512 ×4 | global average pooling, fully connected

each number a 3×3 convolution with batch normalisation and ReLU; max-pooling between the groups.
"""

from torch import nn

from .. import _checks
from .base import ConvBNReLU, GlobalAverage, SplitNetwork, chain, halving_pool, initialise

LATER_GROUPS = ((128, 2), (256, 4), (512, 4), (512, 4))  # (filters, convolutions), after the two of the stem


def vggnet17(
    *,
    classes: int = 10,
    channels: int = 3,
    pool: int = 2,  # the authors' window; the paper writes 3
) -> SplitNetwork:
    """VGGNet with 17 layers; shared after the 2nd ReLU.

    Images (B, channels, H, W), sides of at least 16, to logits (B, classes). 20.04 million parameters by
    default.
    """
    _checks.at_least(2, classes=classes)
    _checks.at_least(1, channels=channels)
    _checks.choice("pool", pool, (2, 3))
    inputs = 64
    groups: dict[str, nn.Module] = {}
    for group, (filters, convolutions) in enumerate(LATER_GROUPS, start=2):
        groups[f"pool{group - 1}"] = halving_pool(pool)
        for number in range(1, convolutions + 1):
            groups[f"conv{group}_{number}"] = ConvBNReLU(inputs, filters)
            inputs = filters
    stem = chain(conv1_1=ConvBNReLU(channels, 64), conv1_2=ConvBNReLU(64, 64))
    trunk = chain(**groups, average=GlobalAverage(), classify=nn.Linear(inputs, classes))
    options = {"classes": classes, "channels": channels, "pool": pool}
    return initialise(SplitNetwork(stem, trunk, name="vggnet17", options=options))
