"""A fully convolutional network for iCoseg: a class per pixel.

The paper leaves it open: four layers, "128, 256 and 1 filters", 4×4, stride 2, built on DCGAN's decoder,
softmax over 2 classes, the 2nd activation shared. Ours, every layer 4×4 with stride 2:

down to 128, ReLU | down to 256, ReLU [shared] | up to 128, ReLU | up to one filter per class

with batch normalisation after all but the last, as DCGAN's decoder has it. These are four layers with the
paper's filters in the paper's order, and the 2nd activation is the smallest, where masks cost least.
"""

from torch import Tensor, nn

from .. import _checks
from .base import SplitNetwork, batch_norm, check_filters, conv, initialise


class Down(nn.Module):
    """Two convolutions that halve the size; hands on the image too, for the trunk to read its size."""

    def __init__(self, channels: int, filters: tuple[int, int], normalise: bool) -> None:
        super().__init__()
        first, second = filters
        self.conv1 = conv(channels, first, 4, stride=2, padding=1)
        self.norm1 = batch_norm(first) if normalise else nn.Identity()
        self.relu1 = nn.ReLU()
        self.conv2 = conv(first, second, 4, stride=2, padding=1)
        self.norm2 = batch_norm(second) if normalise else nn.Identity()
        self.relu2 = nn.ReLU()

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, channels, H, W) to features (B, filters[1], H//4, W//4), and the images."""
        half = self.relu1(self.norm1(self.conv1(image)))  # (B, filters[0], H//2, W//2)
        return self.relu2(self.norm2(self.conv2(half))), image


class Up(nn.Module):
    """Two transposed convolutions that bring the features back to the image's size, odd sides included."""

    def __init__(self, filters: tuple[int, int], classes: int, normalise: bool) -> None:
        super().__init__()
        first, second = filters
        self.conv3 = nn.ConvTranspose2d(second, first, 4, stride=2, padding=1, bias=False)
        self.norm3 = batch_norm(first) if normalise else nn.Identity()
        self.relu3 = nn.ReLU()
        self.classify = nn.ConvTranspose2d(first, classes, 4, stride=2, padding=1, bias=False)

    def forward(self, feature: Tensor, image: Tensor) -> Tensor:
        """Features (B, filters[1], H//4, W//4) to logits (B, classes, H, W), the size of the images."""
        height, width = image.shape[-2:]
        half = self.relu3(self.norm3(self.conv3(feature, output_size=[height // 2, width // 2])))
        logits: Tensor = self.classify(half, output_size=[height, width])
        return logits


def fcn(
    *,
    classes: int = 2,
    channels: int = 3,
    filters: tuple[int, int] | list[int] = (128, 256),
    normalise: bool = True,  # batch normalisation as in DCGAN's decoder; the paper does not say
) -> SplitNetwork:
    """Two convolutions down, two transposed convolutions up; shared after the 2nd ReLU.

    Images (B, channels, H, W), sides of at least 4, to logits (B, classes, H, W). 1.06 million parameters
    by default.
    """
    _checks.at_least(2, classes=classes)
    _checks.at_least(1, channels=channels)
    check_filters(filters)
    first, second = filters
    stem = Down(channels, (first, second), normalise)
    trunk = Up((first, second), classes, normalise)
    options = {"classes": classes, "channels": channels, "filters": [first, second], "normalise": normalise}
    return initialise(SplitNetwork(stem, trunk, name="fcn", options=options))
