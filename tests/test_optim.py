"""Weight decay where a layer's weight is computed: it falls on what the weight is computed from."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from cmcl import Ensemble, Recipe
from cmcl.training.optim import make_optimizer

RECIPE = Recipe(members=2, steps=1, lr=0.5, momentum=0.0, weight_decay=0.2)


class Product(nn.Module):
    """A weight of low rank."""

    def forward(self, left, right):
        return left @ right

    def right_inverse(self, weight):
        return weight[:, :2].clone(), weight[:2].clone()


def product(layer):
    return parametrize.register_parametrization(layer, "weight", Product(), unsafe=True)


def normalised_twice(layer):
    parametrizations.weight_norm(layer)
    return parametrize.register_parametrization(layer, "weight", nn.Identity())


NEW, OLD = "parametrizations.weight.original", "ignore:.*is deprecated:FutureWarning"
CASES = [
    (lambda layer: layer, {"weight"}),
    (parametrizations.weight_norm, {NEW + "1"}),
    (parametrizations.spectral_norm, {NEW}),
    (parametrizations.orthogonal, {NEW}),
    (weight_norm, {"weight_v"}),
    (spectral_norm, {"weight_orig"}),
    (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), {"weight_orig"}),
]


def decayed(make):
    """The parameters of one layer that shrink though their gradient is 0, by lr * weight_decay."""
    layer = make()
    ensemble = Ensemble([layer, nn.Linear(2, 2)])
    optimizer = make_optimizer(ensemble, RECIPE)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for p in ensemble.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moved = {name for name, p in layer.named_parameters() if not p.equal(before[name])}
    for name in moved:
        torch.testing.assert_close(layer.get_parameter(name).detach(), before[name] * (1 - 0.5 * 0.2))
    return moved


@pytest.mark.filterwarnings(OLD)
@pytest.mark.parametrize(
    "layer", [lambda: nn.Linear(6, 4), lambda: nn.Conv2d(6, 4, 3), lambda: nn.Linear(1, 4)]
)
@pytest.mark.parametrize(("wrap", "names"), CASES)
def test_computed_weights(layer, wrap, names):
    assert decayed(lambda: wrap(layer())) == names


def test_all_factors_of_a_product():
    assert decayed(lambda: product(nn.Linear(6, 4))) == {NEW + "0", NEW + "1"}


def test_weight_normalisation_and_more():
    assert decayed(lambda: normalised_twice(nn.Linear(4, 4))) == {NEW + "1"}


def test_biases_stay_free():
    """Also where the bias is the computed one."""
    layer = nn.Linear(6, 4)
    parametrize.register_parametrization(layer, "bias", nn.Identity())
    assert decayed(lambda: layer) == {"weight"}


def test_parameters_that_are_shared_or_frozen():
    """A shared weight is there once, a frozen one is left out."""
    member = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    member[1].weight = member[0].weight
    member[2].requires_grad_(False)
    optimizer = make_optimizer(Ensemble([member, nn.Linear(4, 4)]), RECIPE)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
