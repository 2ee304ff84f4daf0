"""The layer table of a network, as the paper's figure 5 draws it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Row = tuple[str, str, str, str, str]
HEADER: Row = ("layer", "kind", "output", "parameters", "features")


def describe(
    network: nn.Module,
    *,
    size: int | tuple[int, int] = 32,  # height and width of the image that is sent through
    channels: int = 3,
    depth: int | None = None,  # 2 folds `trunk.block.conv` into `trunk.block`; None shows every layer
    share_after: str = "stem",  # the submodule whose last layer is marked
) -> str:
    """A Markdown table of the layers in the order they run: output shape, parameters, where it is shared.

    Works for any module that takes images (B, channels, H, W). Shapes leave out the batch.
    """
    rows: list[Row] = []

    def record(name: str, layer: nn.Module, _inputs: Any, output: Any) -> None:
        rows.append((name, _kind(layer), _shape(output), _parameters(layer), ""))

    shown = [(name, layer) for name, layer in network.named_modules() if _is_row(name, layer, depth)]
    hooks = [layer.register_forward_hook(partial(record, name)) for name, layer in shown]
    modes = [(layer, layer.training) for layer in network.modules()]
    height, width = (size, size) if isinstance(size, int) else size
    like = next(network.parameters(), torch.empty(0))
    try:
        with torch.no_grad():  # and in eval mode: batch statistics stay as they are
            network.eval()(like.new_zeros(1, channels, height, width))
    finally:
        for hook in hooks:
            hook.remove()
        for layer, mode in modes:
            layer.training = mode
    shared = [i for i, (name, *_) in enumerate(rows) if f"{name}.".startswith(f"{share_after}.")]
    if shared:
        rows[shared[-1]] = (*rows[shared[-1]][:4], "shared here")
    return _markdown([*rows, ("total", "", "", _parameters(network), "")])


def _is_row(name: str, layer: nn.Module, depth: int | None) -> bool:
    level = name.count(".") + 1 if name else 0
    is_leaf = next(layer.children(), None) is None
    return is_leaf if depth is None or level < depth else level == depth


def _kind(layer: nn.Module) -> str:
    """The layer's class, with window and stride where it has them: `Conv2d 3×3`, `MaxPool2d 2×2 /2`."""
    kind = type(layer).__name__
    if hasattr(layer, "kernel_size"):
        kernel, stride = (n if isinstance(n, tuple) else (n, n) for n in (layer.kernel_size, layer.stride))
        kind += f" {kernel[0]}×{kernel[-1]}" + (f" /{stride[0]}" if stride[0] != 1 else "")
    return kind


def _shape(output: Any) -> str:
    first = output[0] if isinstance(output, tuple) else output
    return " × ".join(map(str, first.shape[1:])) if isinstance(first, Tensor) else ""


def _parameters(layer: nn.Module) -> str:
    count = sum(parameter.numel() for parameter in layer.parameters())
    return f"{count:,}" if count else ""


def _markdown(rows: list[Row]) -> str:
    """The rows under the header, columns padded so that the text reads well as it is."""
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    rule[3] = rule[3][:-1] + ":"  # numbers to the right
    a, b, c, d, e = widths
    line = f"| {{:<{a}}} | {{:<{b}}} | {{:<{c}}} | {{:>{d}}} | {{:<{e}}} |"
    return "\n".join(line.format(*row) for row in (HEADER, rule, *rows))
