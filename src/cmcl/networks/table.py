"""The layer table of a network, as the paper's figure 5 draws it."""

from collections.abc import Callable
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

    def record(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda layer, _, output: rows.append(
            (name, _kind(layer), _shape(output), _parameters(layer), "")
        )

    shown = [(name, layer) for name, layer in network.named_modules() if _is_row(name, layer, depth)]
    hooks = [layer.register_forward_hook(record(name)) for name, layer in shown]
    try:
        _run_once(network, channels, size)
    finally:
        for hook in hooks:
            hook.remove()
    shared = [i for i, (name, *_) in enumerate(rows) if f"{name}.".startswith(f"{share_after}.")]
    if shared:
        rows[shared[-1]] = (*rows[shared[-1]][:4], "shared here")
    return _markdown([*rows, ("total", "", "", _parameters(network), "")])


def _is_row(name: str, layer: nn.Module, depth: int | None) -> bool:
    level = name.count(".") + 1 if name else 0
    is_leaf = next(layer.children(), None) is None
    return is_leaf if depth is None or level < depth else level == depth


def _run_once(network: nn.Module, channels: int, size: int | tuple[int, int]) -> None:
    """Send one black image through, leaving the network as it was: statistics, modes and gradients."""
    height, width = (size, size) if isinstance(size, int) else size
    like = next(network.parameters(), torch.empty(0))
    image = torch.zeros(1, channels, height, width, dtype=like.dtype, device=like.device)
    modes = [(layer, layer.training) for layer in network.modules()]
    try:
        with torch.no_grad():
            network.eval()(image)
    finally:
        for layer, mode in modes:
            layer.training = mode


def _kind(layer: nn.Module) -> str:
    """The layer's class, with window and stride where it has them: `Conv2d 3×3`, `MaxPool2d 2×2 /2`."""
    kind = type(layer).__name__
    if hasattr(layer, "kernel_size"):
        high, wide = _pair(layer.kernel_size)
        kind += f" {high}×{wide}"
        stride = _pair(layer.stride or layer.kernel_size)[0]
        kind += f" /{stride}" if stride != 1 else ""
    return kind


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _shape(output: Any) -> str:
    first = output[0] if isinstance(output, tuple) else output
    return " × ".join(map(str, first.shape[1:])) if isinstance(first, Tensor) else ""


def _parameters(layer: nn.Module) -> str:
    count = sum(parameter.numel() for parameter in layer.parameters())
    return f"{count:,}" if count else ""


def _markdown(rows: list[Row]) -> str:
    """The rows under the header, columns padded so that the text reads well as it is."""
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    rule = [("-" * width) for width in widths]
    rule[3] = rule[3][:-1] + ":"  # numbers to the right
    lines = [
        [
            f"{cell:>{w}}" if i == 3 else f"{cell:<{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (HEADER, *rows)
    ]
    lines.insert(1, rule)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
