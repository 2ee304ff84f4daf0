"""The small CNN of Tables 1 and 2.

| layer | program (our default) | paper |
|---|---|---|
| conv1, ReLU [shared], dropout, 2×2 pool | 128 filters 5×5, no padding | padding not said |
| conv2, ReLU, dropout, 2×2 pool | 256 filters 5×5, no padding | padding not said |
| hidden, ReLU, dropout | 1024 units | not there |
| classify | fully connected | fully connected |
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from .base import SplitNetwork, chain, check_filters, conv, initialise


class PlainDropout(nn.Module):
    """Dropout as the program has it: kept values unchanged in training, all values times `1 - p` at test."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop in training, shrink at test."""
        # torch's own divides by the keep probability in training; multiplying undoes that.
        return F.dropout(x, self.p, self.training) * (1 - self.p)

    def extra_repr(self) -> str:
        """The drop probability, for `print`."""
        return f"p={self.p}"


def cnn(
    *,
    classes: int = 10,
    channels: int = 3,
    size: int = 32,  # side of the square input: the first fully connected layer depends on it
    filters: tuple[int, int] | list[int] = (128, 256),
    kernel: int = 5,
    padding: int = 0,  # the program's; the paper does not say, and 2 keeps the size
    hidden: int | None = 1024,  # the program's; None is the paper's single fully connected layer
    dropout: float = 0.5,
    rescale_dropout: bool = False,  # the program's; True is torch's, rescaled in training
    drop_before_pool: bool = True,  # the program's; the paper's "applied to all layers" fits both
) -> SplitNetwork:
    """Two convolutions and one or two fully connected layers; shared after the 1st ReLU.

    Images (B, channels, size, size) to logits (B, classes). 7.39 million parameters by default.
    """
    checks.at_least(2, classes=classes)
    checks.at_least(1, channels=channels, size=size, kernel=kernel, hidden=1 if hidden is None else hidden)
    checks.at_least(0, padding=padding)
    check_filters(filters)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1. Got {dropout}.")
    first, second = filters
    side = _side_after_two_poolings(size, kernel, padding)
    drop = partial(nn.Dropout if rescale_dropout else PlainDropout, dropout)
    stem = chain(conv1=conv(channels, first, kernel, padding=padding), relu1=nn.ReLU())
    trunk = chain(
        **_drop_and_pool(1, drop, drop_before_pool),
        conv2=conv(first, second, kernel, padding=padding),
        relu2=nn.ReLU(),
        **_drop_and_pool(2, drop, drop_before_pool),
        flatten=nn.Flatten(),
        **_head(second * side * side, hidden, classes, drop),
    )
    options = {
        "classes": classes,
        "channels": channels,
        "size": size,
        "filters": list(filters),
        "kernel": kernel,
        "padding": padding,
        "hidden": hidden,
        "dropout": dropout,
        "rescale_dropout": rescale_dropout,
        "drop_before_pool": drop_before_pool,
    }
    return initialise(SplitNetwork(stem, trunk, name="cnn", options=options))


def _side_after_two_poolings(size: int, kernel: int, padding: int) -> int:
    lost = kernel - 1 - 2 * padding  # what one convolution takes off each side's length
    smallest = max(1, 4 + 3 * lost)
    if size < smallest:
        raise ValueError(
            f"size must be at least {smallest} for two convolutions and two poolings "
            f"with kernel {kernel} and padding {padding}. Got {size}."
        )
    return ((size - lost) // 2 - lost) // 2


def _drop_and_pool(number: int, drop: Callable[[], nn.Module], drop_first: bool) -> dict[str, nn.Module]:
    dropping = {f"drop{number}": drop()}
    pooling = {f"pool{number}": nn.MaxPool2d(2)}
    return {**dropping, **pooling} if drop_first else {**pooling, **dropping}


def _head(
    features: int, hidden: int | None, classes: int, drop: Callable[[], nn.Module]
) -> dict[str, nn.Module]:
    if hidden is None:
        return {"classify": nn.Linear(features, classes)}
    return {
        "hidden": nn.Linear(features, hidden),
        "relu3": nn.ReLU(),
        "drop3": drop(),
        "classify": nn.Linear(hidden, classes),
    }
