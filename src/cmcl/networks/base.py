"""What the networks have in common: the split into stem and trunk, a few layers, the initialisation."""

from collections import OrderedDict
from collections.abc import Mapping
from math import prod, sqrt
from typing import Any

from torch import Tensor, nn

from .. import _checks


class SplitNetwork(nn.Module):
    """A network split after the layer whose features are shared.

    `stem(x)` gives the feature that is shared, or a tuple `(feature, *others)` whose others are not shared;
    `trunk(feature, *others)` gives the logits. `NETWORKS[name](**options)` builds the same architecture
    again; `options` holds JSON values only.
    """

    forward_is_stem_then_trunk = True  # so that `cmcl.splitting` need not trace it

    def __init__(self, stem: nn.Module, trunk: nn.Module, *, name: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.stem = stem
        self.trunk = trunk
        self.name = name
        self.options = dict(options)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of this network alone, nothing shared."""
        shared = self.stem(x)
        logits: Tensor = self.trunk(*shared) if isinstance(shared, tuple) else self.trunk(shared)
        return logits


def chain(**layers: nn.Module) -> nn.Sequential:
    """The layers one after the other, under their names."""
    return nn.Sequential(OrderedDict(layers))


def conv(
    inputs: int, outputs: int, kernel: int = 3, *, stride: int = 1, padding: int | None = None
) -> nn.Conv2d:
    """A convolution without bias, padded to keep the size (odd kernels) unless `padding` says otherwise."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2 if padding is None else padding, bias=False)


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation with the constants of the authors' code."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1)


class ConvBNReLU(nn.Sequential):
    """3×3 convolution, batch normalisation, ReLU: one box of the paper's figure 5."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(OrderedDict(conv=conv(inputs, outputs), norm=batch_norm(outputs), relu=nn.ReLU()))


def halving_pool(window: int) -> nn.MaxPool2d:
    """Max-pooling that halves both sides: window 2 is the authors' code's, 3 the paper's.

    The paper's stride of 1 would never shrink anything, so the stride is 2 for both.
    """
    return nn.MaxPool2d(window, stride=2, padding=(window - 1) // 2)


class GlobalAverage(nn.Module):
    """The mean of each channel over all positions: (B, C, H, W) to (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Average over height and width."""
        return x.mean((-2, -1))


def initialise(network: SplitNetwork) -> SplitNetwork:
    """Draw the weights as the authors' code does; biases start at 0. Returns the network.

    Convolutions: normal, standard deviation sqrt(2 / (k*k*C_out)). Fully connected: uniform within
    ±sqrt(3 / fan_in).
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            # A transposed convolution is some convolution's adjoint: shape[0] is that one's C_out.
            nn.init.normal_(layer.weight, std=sqrt(2 / (layer.weight.shape[0] * prod(layer.kernel_size))))
        elif isinstance(layer, nn.Linear):
            bound = sqrt(3 / layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.zeros_(layer.bias)
    return network


def check_filters(filters: tuple[int, int] | list[int]) -> None:
    """Raise unless filters are two whole numbers of at least 1."""
    if not isinstance(filters, tuple | list) or len(filters) != 2:
        raise ValueError(f"filters must be two numbers, one per convolution. Got {filters!r}.")
    for number in filters:
        _checks.at_least(1, **{"each of filters": number})
