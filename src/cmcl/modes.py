"""Train and eval mode, put back as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def keep_modes(module: nn.Module) -> Iterator[None]:
    """Afterwards every submodule is in the mode it was in before, train or eval (some may be frozen)."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
