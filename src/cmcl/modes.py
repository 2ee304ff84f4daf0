"""Train and eval mode, put back as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakKeyDictionary

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


@dataclass
class _Asked:
    """Who asks a module at the moment: how many threads, and what was in train mode before the first."""

    threads: int = 0
    training: list[nn.Module] = field(default_factory=list)


_asked: WeakKeyDictionary[nn.Module, _Asked] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def in_eval(module: nn.Module) -> Iterator[None]:
    """All of it in eval mode, for any number of threads: the first one sets it, the last one puts back.

    If each put back what it had found, one would train batch normalisation while another still computes.
    """
    with _lock:
        asked = _asked.setdefault(module, _Asked())
        if asked.threads == 0:
            asked.training = [part for part in module.modules() if part.training]
            if asked.training:
                module.eval()
        asked.threads += 1
    try:
        yield
    finally:
        with _lock:
            asked.threads -= 1
            if asked.threads == 0:
                for part in asked.training:
                    part.training = True
                asked.training = []
