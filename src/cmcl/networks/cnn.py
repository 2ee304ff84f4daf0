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

import torch
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


class DropoutPool(nn.Module):
    """Dropout, then 2×2 max-pooling; at test the mean of what that gives in training.

    To shrink the values at test, as the program does, is not that mean: of four values one or another is
    mostly kept, so that the maximum loses far less to dropout than each value does.
    """

    def __init__(self, drop: PlainDropout | nn.Dropout) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """(..., H, W), nothing negative, to (..., H/2, W/2)."""
        if self.training:
            return F.max_pool2d(self.drop(x), 2)
        keep = 1 - self.drop.p
        kept = 1 / keep if isinstance(self.drop, nn.Dropout) else 1.0  # what becomes of a kept value of 1
        height, width = (side // 2 * 2 for side in x.shape[-2:])
        corners = [x[..., i:height:2, j:width:2] for i in (0, 1) for j in (0, 1)]
        largest_first = torch.stack(corners).sort(0, descending=True).values.unbind()
        # the k-th largest is the maximum if it is kept and all larger ones are dropped
        terms = [keep * (1 - keep) ** k * value for k, value in enumerate(largest_first)]
        return kept * sum(terms[1:], terms[0])


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
    expected_pooling: bool = False,  # the program's; True: at test the mean of what training sees
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
    if expected_pooling and not drop_before_pool:
        raise ValueError("expected_pooling must go with drop_before_pool: else there is nothing to expect.")
    first, second = filters
    side = _side_after_two_poolings(size, kernel, padding)
    drop = partial(nn.Dropout if rescale_dropout else PlainDropout, dropout)
    drop_and_pool = partial(_drop_and_pool, drop, before=drop_before_pool, expected=expected_pooling)
    stem = chain(conv1=conv(channels, first, kernel, padding=padding), relu1=nn.ReLU())
    trunk = chain(
        **drop_and_pool(1),
        conv2=conv(first, second, kernel, padding=padding),
        relu2=nn.ReLU(),
        **drop_and_pool(2),
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


def _drop_and_pool(
    drop: Callable[[], PlainDropout | nn.Dropout], number: int, *, before: bool, expected: bool
) -> dict[str, nn.Module]:
    if expected:
        return {f"pool{number}": DropoutPool(drop())}
    dropping: dict[str, nn.Module] = {f"drop{number}": drop()}
    pooling = {f"pool{number}": nn.MaxPool2d(2)}
    return {**dropping, **pooling} if before else {**pooling, **dropping}


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
