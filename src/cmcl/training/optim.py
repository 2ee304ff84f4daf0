"""The recipe's optimizer, made so that a CUDA graph can hold its step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..ensemble import Ensemble
from .config import Recipe
from .cuda import copy_all
from .muon import Muon


def parameter_groups(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters: those with weight decay, and the others.

    Weight decay applies to the weights of convolutions and linear layers only; where such a weight is
    computed (spectral or weight normalisation, pruning), to the parameters it is computed from, except
    magnitudes and what a parametrisation adds of its own.
    """
    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    weights = {id(p) for layer in layers for p in _behind_weight(layer)}
    trained = [p for p in network.parameters() if p.requires_grad]
    return [p for p in trained if id(p) in weights], [p for p in trained if id(p) not in weights]


def make_optimizer(network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer for an ensemble, its state ready and on the device, its lr a tensor on CUDA."""
    decayed, free = parameter_groups(network)
    decay = recipe.weight_decay
    parts = [(decayed, decay), (free, 0.0)] if decay else [([*decayed, *free], 0.0)]  # each costs a step
    groups = [{"params": params, "weight_decay": value} for params, value in parts]
    device = next(iter((*decayed, *free))).device
    lr: Any = torch.tensor(recipe.lr, device=device) if device.type == "cuda" else recipe.lr
    if recipe.optimizer == "muon":
        matrices = [p for p in decayed if p.ndim > 1]
        rest = [*(p for p in decayed if p.ndim < 2), *free]
        return Muon(matrices, rest, lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    if recipe.optimizer == "sgd":
        sgd = torch.optim.SGD(groups, lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True)
        return _ready(sgd)
    kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    return _ready(kind(groups, lr, fused=True, capturable=device.type == "cuda"))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Change the learning rate where the captured graph reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class WeightAverage:
    """The exponential moving average of an ensemble's parameters and BatchNorm statistics.

    Args:
        ensemble: its values now are the first average.
        steps: the average is over about this number of steps.
        members: those whose averages are updated.
    """

    def __init__(self, ensemble: Ensemble, steps: float, members: slice = slice(None)) -> None:
        tensors = _averaged(ensemble)
        self._own: list[Tensor] = [tensor.detach() for tensor in tensors]
        self.values = [tensor.clone() for tensor in self._own]
        self._of = dict(zip(map(id, tensors), self.values, strict=True))
        trained = _averaged(nn.ModuleList(list(ensemble.members)[members]))
        self._trained = [tensor.detach() for tensor in trained]
        self._updated = self.of(trained)
        self._average: Any = get_ema_multi_avg_fn(1 - 1 / max(steps, 1.0))

    def of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The averages of parameters and buffers, of those that have one."""
        return [self._of[id(tensor)] for tensor in tensors if id(tensor) in self._of]

    def update(self) -> None:
        """Update the averages with the current weights, without waiting for the device."""
        self._average(self._updated, self._trained, None)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the ensemble's weights and their averages."""
        now = [tensor.clone() for tensor in self._own]
        copy_all(self._own, self.values)
        copy_all(self.values, now)

    @contextmanager
    def used(self) -> Iterator[None]:
        """The ensemble with the averages for the time of a block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()


def _averaged(module: nn.Module) -> list[Tensor]:
    """Parameters and BatchNorm statistics."""
    parts = [m for m in module.modules() if getattr(m, "running_mean", None) is not None]
    statistics: list[Any] = [buffer for part in parts for buffer in (part.running_mean, part.running_var)]
    return [*module.parameters(), *statistics]


def _behind_weight(layer: nn.Module) -> list[nn.Parameter]:
    """A layer's weight, or what it is computed from, but not the magnitude of weight normalisation."""
    if not parametrize.is_parametrized(layer, "weight"):
        names = ("weight", "weight_v", "weight_orig")  # _v: older weight_norm; _orig: spectral_norm, prune
        return [p for name, p in layer.named_parameters(recurse=False) if name in names]
    originals: Any = layer.get_submodule("parametrizations.weight")
    if isinstance(originals[0], parametrizations._WeightNorm):
        return [originals.original1]
    return list(originals.parameters(recurse=False))


def _ready(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Moments of 0, as the first step would make them: a graph needs them before it is recorded."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            if isinstance(optimizer, torch.optim.SGD):
                if group["momentum"]:
                    state["momentum_buffer"] = torch.zeros_like(p)
            else:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    return optimizer
