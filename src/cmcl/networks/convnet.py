"""The small CNN of Tables 1 and 2.

| layer | authors' code (our default) | paper |
|---|---|---|
| conv1, ReLU [shared], dropout, 2×2 pool | 128 filters 5×5, no padding | padding not said |
| conv2, ReLU, dropout, 2×2 pool | 256 filters 5×5, no padding | padding not said |
| hidden, ReLU, dropout | 1024 units | not there |
| classify | fully connected | fully connected |
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _checks
from .base import SplitNetwork, chain, check_filters, conv, initialise


class PlainDropout(nn.Module):
    """Dropout of the authors' code: kept values stay in training, all values times `1 - p` at test."""

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


class DropoutPool(nn.Module):
    """Dropout, then 2×2 max-pooling; at test the mean of what that gives in training.

    The authors' code shrinks the values at test, which is not that mean: mostly one of four values is kept,
    so that the maximum loses far less to dropout than each value does.

    Args:
        p: the drop probability.
        rescale: whether what is kept is divided by `1 - p`, as in torch's dropout.
    """

    def __init__(self, p: float, *, rescale: bool) -> None:
        super().__init__()
        self.p, self.rescale = p, rescale

    def forward(self, x: Tensor) -> Tensor:
        """(..., H, W), nothing negative, to (..., H/2, W/2)."""
        if self.training:
            pooled = F.max_pool2d(F.dropout(x, self.p), 2)
        else:
            # The k-th largest is the maximum if it is kept and all k larger ones are dropped: (1 - p) p^k.
            # What is kept was divided by 1 - p.
            first, second, third, fourth = _descending(x)
            pooled = first + self.p * (second + self.p * (third + self.p * fourth))
        return pooled if self.rescale else pooled * (1 - self.p)

    def extra_repr(self) -> str:
        """The options, for `print`."""
        return f"p={self.p}, rescale={self.rescale}"


def _descending(x: Tensor) -> tuple[Tensor, ...]:
    """The four values of each 2×2 window (..., H/2, W/2), the largest first. `sort` would be slower."""
    height, width = (side // 2 * 2 for side in x.shape[-2:])
    a, b, c, d = (x[..., i:height:2, j:width:2] for i in (0, 1) for j in (0, 1))
    (a, b), (c, d) = (torch.maximum(a, b), torch.minimum(a, b)), (torch.maximum(c, d), torch.minimum(c, d))
    first, low = torch.maximum(a, c), torch.minimum(a, c)
    high, last = torch.maximum(b, d), torch.minimum(b, d)
    return first, torch.maximum(low, high), torch.minimum(low, high), last


def cnn(
    *,
    classes: int = 10,
    channels: int = 3,
    size: int = 32,  # side of the square input: the first fully connected layer depends on it
    filters: tuple[int, int] | list[int] = (128, 256),
    kernel: int = 5,
    padding: int = 0,  # the authors' code; the paper does not say, and 2 keeps the size
    hidden: int | None = 1024,  # the authors' code; None is the paper's single fully connected layer
    dropout: float = 0.5,
    rescale_dropout: bool = False,  # the authors' code; True is torch's, rescaled in training
    drop_before_pool: bool = True,  # the authors' code; the paper's "applied to all layers" fits both
    expected_pooling: bool = False,  # the authors' code; True: at test the mean of what training sees
) -> SplitNetwork:
    """Two convolutions and one or two fully connected layers; shared after the 1st ReLU.

    Images (B, channels, size, size) to logits (B, classes). 7.39 million parameters by default.
    """
    _checks.at_least(2, classes=classes)
    _checks.at_least(1, channels=channels, size=size, kernel=kernel, hidden=1 if hidden is None else hidden)
    _checks.at_least(0, padding=padding)
    check_filters(filters)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1. Got {dropout}.")
    if expected_pooling and not drop_before_pool:
        raise ValueError("expected_pooling must go with drop_before_pool=True. Got False.")
    first, second = filters
    features = second * _side_after_two_poolings(size, kernel, padding) ** 2
    drop = partial(nn.Dropout if rescale_dropout else PlainDropout, dropout)

    def drop_and_pool(number: int) -> dict[str, nn.Module]:
        if expected_pooling:
            return {f"pool{number}": DropoutPool(dropout, rescale=rescale_dropout)}
        parts: dict[str, nn.Module] = {f"drop{number}": drop(), f"pool{number}": nn.MaxPool2d(2)}
        return parts if drop_before_pool else dict(reversed(parts.items()))

    stem = chain(conv1=conv(channels, first, kernel, padding=padding), relu1=nn.ReLU())
    trunk = chain(
        **drop_and_pool(1),
        conv2=conv(first, second, kernel, padding=padding),
        relu2=nn.ReLU(),
        **drop_and_pool(2),
        flatten=nn.Flatten(),
        **(
            {}
            if hidden is None
            else {"hidden": nn.Linear(features, hidden), "relu3": nn.ReLU(), "drop3": drop()}
        ),
        classify=nn.Linear(features if hidden is None else hidden, classes),
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
        "expected_pooling": expected_pooling,
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
