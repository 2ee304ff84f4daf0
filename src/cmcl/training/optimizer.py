"""The recipe's optimiser, made so that a CUDA graph can hold its step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ..ensemble import Ensemble
from .config import Recipe


def make_optimizer(ensembles: Sequence[Ensemble], recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimiser over all members, its state ready and on the device, its lr a tensor on CUDA.

    Weight decay falls on the weights of convolutions and linear layers only; where such a weight is computed
    (spectral or weight normalisation, pruning), on the parameters it is computed from, except magnitudes
    and what a parametrisation brings of its own.
    """
    modules = [module for ensemble in ensembles for module in ensemble.modules()]
    layers = [m for m in modules if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    weights = {id(p) for layer in layers for p in _behind_weight(layer)}
    learning = {id(p): p for e in ensembles for p in e.parameters() if p.requires_grad}
    if not learning:
        raise ValueError("an ensemble must have weights that learn. Got none with requires_grad=True.")
    decayed = [p for key, p in learning.items() if key in weights]
    free = [p for key, p in learning.items() if key not in weights]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": free, "weight_decay": 0.0}]
    device = next(iter(learning.values())).device
    lr: Any = torch.tensor(recipe.lr, device=device) if device.type == "cuda" else recipe.lr
    if recipe.optimizer == "sgd":
        return _ready(
            torch.optim.SGD(groups, lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True)
        )
    kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    return _ready(kind(groups, lr, fused=True, capturable=device.type == "cuda"))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Change the learning rate where the captured graph reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


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
    """Momenta of 0 from the start, as the first step would make them: a graph needs them to be there."""
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
