"""From a recipe to the untrained ensemble, and whether it fits the data: said before the first step."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..data.dataset import Dataset, default_ignore_index, not_ignored
from ..data.registry import nearest
from ..data.transforms import Transform
from ..ensemble import Ensemble, in_eval
from ..networks import NETWORKS
from ..telling import first_line
from ..training.config import Recipe
from .kinds import in_words, is_a


def build(recipe: Recipe, seed: int, transform: Transform | None = None) -> Ensemble:
    """The untrained ensemble: its weights depend on network, members and seed alone."""
    if recipe.network is None:
        raise ValueError(
            "recipe.network must name a network. Got None. Build the ensemble and call cmcl.fit."
        )
    network, options = named("network", recipe.network, NETWORKS), recipe.network_options
    _check_options(recipe.network, options, network)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ensemble = Ensemble(
            lambda: network(**options),
            recipe.members,
            share_after="stem" if recipe.sharing else None,
            share_prob=recipe.share_prob,
        )
    ensemble.transform = transform
    return ensemble


def _check_options(network: str, options: Mapping[str, Any], build: Callable[..., Any]) -> None:
    """Refuse misspelt names and values of a wrong kind: the text "False" would count as true."""
    known = inspect.signature(build).parameters
    for name, value in options.items():
        if name not in known:
            cure = nearest(name, list(known))
            raise ValueError(f"network_options must be options of {network}. Got {name!r}. {cure}")
        if not is_a(value, kind := known[name].annotation):
            raise ValueError(f"network_options.{name} must be {in_words(kind)}. Got {value!r}.")


def check_fits(ensemble: Ensemble, train: Dataset, recipe: Recipe) -> None:
    """Two images through the network, before anything is written: does it take them and answer their kind?"""
    images, targets = train.images[:2], train.targets
    shape = " x ".join(map(str, images.shape[1:]))
    must = f"network {recipe.network} must fit the data {recipe.data}, images of {shape}"
    cure = "Choose another network, or set network_options (channels, size, classes)."
    try:
        with torch.no_grad(), in_eval(ensemble):
            logits = ensemble(images.float() if images.dtype == torch.uint8 else images)  # (M, N, C, ...)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{must}. Got a network that refuses them ({first_line(error)}). {cure}") from None
    if logits.shape[3:] != targets.shape[1:]:
        sizes = (targets.shape[1:], logits.shape[3:])
        kinds = [f"an answer per {'pixel' if len(size) else 'image'}" for size in sizes]
        raise ValueError(f"{must} with {kinds[0]}. Got a network with {kinds[1]}. {cure}")
    classes = int(targets[not_ignored(targets, default_ignore_index(targets, logits.shape[2]))].max()) + 1
    if logits.shape[2] < classes:
        raise ValueError(f"{must} of {classes} classes. Got a network for {logits.shape[2]}. {cure}")


def named(field: str, name: str, known: Mapping[str, Any]) -> Any:
    """What a field of a recipe names."""
    if name not in known:
        raise ValueError(f"recipe.{field} must be a known name. Got {name!r}. {nearest(name, list(known))}")
    return known[name]
