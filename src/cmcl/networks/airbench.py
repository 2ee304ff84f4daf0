"""A small convolutional network that trains fast, after airbench (Jordan 2024).

conv 2×2, GELU | group of w [shared] | group of 4w | group of 4w, global maximum, fully connected
A group: conv 3×3, 2×2 max-pooling, BN, GELU, conv 3×3, BN, GELU.

Unlike airbench, the first convolution is learned, not fixed by whitening, so no data are needed to build it.
"""

from torch import Tensor, nn

from .. import _checks
from .base import SplitNetwork, batch_norm, chain, conv, initialise


class Group(nn.Sequential):
    """Two convolutions and a pooling that halves the size: (B, inputs, H, W) to (B, outputs, H/2, W/2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            conv(inputs, outputs),
            nn.MaxPool2d(2),
            batch_norm(outputs),
            nn.GELU(),
            conv(outputs, outputs),
            batch_norm(outputs),
            nn.GELU(),
        )


class GlobalMaximum(nn.Module):
    """The maximum of each channel over all positions: (B, C, H, W) to (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Maximise over height and width."""
        return x.amax((-2, -1))


def fastcnn(*, classes: int = 10, channels: int = 3, width: int = 64) -> SplitNetwork:
    """Six convolutions in three groups; shared after the first group.

    Images (B, channels, H, W) of at least 9 pixels to logits (B, classes). 2 million parameters by default.
    """
    _checks.at_least(2, classes=classes)
    _checks.at_least(1, channels=channels, width=width)
    first = 24  # filters, twice as many as an RGB image has values in a 2×2 patch
    stem = chain(conv=conv(channels, first, 2, padding=0), gelu=nn.GELU(), group1=Group(first, width))
    trunk = chain(
        group2=Group(width, 4 * width),
        group3=Group(4 * width, 4 * width),
        maximum=GlobalMaximum(),
        classify=nn.Linear(4 * width, classes),
    )
    options = {"classes": classes, "channels": channels, "width": width}
    return initialise(SplitNetwork(stem, trunk, name="fastcnn", options=options))
