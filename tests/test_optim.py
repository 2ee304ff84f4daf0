"""The optimizers, what weight decay falls on, and averaged weights."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from cmcl import Ensemble, Recipe
from cmcl.training.optim import WeightAverage, make_optimizer, set_lr

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


def test_muon_leaves_vectors_to_adamw():
    """A weight that is computed from a vector is no matrix to orthogonalise."""

    class Diagonal(nn.Module):
        def forward(self, vector):
            return vector.diag()

        def right_inverse(self, weight):
            return weight.diag().clone()

    def build():
        layer = nn.Linear(4, 4)
        return parametrize.register_parametrization(layer, "weight", Diagonal(), unsafe=True)

    ensemble = Ensemble([build(), nn.Linear(4, 2)])
    optimizer = make_optimizer(ensemble, Recipe(members=2, steps=1, optimizer="muon", momentum=0.9))
    matrix = ensemble.members[1].weight
    assert [[p is matrix for p in group["params"]] for group in optimizer.param_groups] == [
        [True],
        [False] * 3,
    ]


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


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_the_optimizer_that_is_asked_for(name, kind):
    ensemble = Ensemble(lambda: nn.Linear(4, 4), 2)
    optimizer = make_optimizer(ensemble, Recipe(members=2, steps=1, optimizer=name, weight_decay=0.2, lr=0.5))
    assert type(optimizer) is kind
    found = [(len(group["params"]), group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    assert found == [(2, 0.2, 0.5), (2, 0.0, 0.5)]
    set_lr(optimizer, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_without_decay_there_is_one_group_in_the_same_order():
    ensemble = Ensemble(lambda: nn.Linear(4, 4), 2)
    plain = make_optimizer(ensemble, Recipe(members=2, steps=1))
    with_decay = make_optimizer(ensemble, RECIPE)
    assert len(plain.param_groups) == 1
    assert list(map(id, plain.state)) == list(map(id, with_decay.state))


@pytest.mark.parametrize(
    ("changes", "moments"),
    [
        (dict(momentum=0.9), {"momentum_buffer"}),
        (dict(momentum=0.0), set()),
        (dict(optimizer="adam"), {"step", "exp_avg", "exp_avg_sq"}),
    ],
)
def test_the_moments_are_there_before_the_first_step(changes, moments):
    ensemble = Ensemble(lambda: nn.Linear(4, 4), 2)
    optimizer = make_optimizer(ensemble, Recipe(members=2, steps=1, **changes))
    for p in ensemble.parameters():
        assert optimizer.state[p].keys() == moments
        assert not any(moment.any() for moment in optimizer.state[p].values())


class TestWeightAverage:
    def networks(self):
        ensemble = Ensemble(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 2)
        return (
            ensemble,
            [m[0].weight for m in ensemble.members],
            [m[1].running_mean for m in ensemble.members],
        )

    def set_to(self, tensors, value):
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(value)

    def test_by_hand(self):
        """Over 4 steps: 3/4 of the last average and 1/4 of the weights."""
        ensemble, weights, means = self.networks()
        self.set_to([*weights, *means], 0.0)
        average = WeightAverage(ensemble, 4)
        for value in (16.0, 32.0):  # 4, then 3 + 8
            self.set_to([*weights, *means], value)
            average.update()
        assert [average.of([t])[0].unique().tolist() for t in (*weights, *means)] == [[11.0]] * 4

    def test_over_less_than_a_step_it_is_the_weights(self):
        ensemble, weights, _ = self.networks()
        average = WeightAverage(ensemble, 0.5)
        self.set_to(weights, 3.0)
        average.update()
        assert average.of(weights)[1].unique().tolist() == [3.0]

    def test_swapped_for_a_block(self):
        ensemble, weights, means = self.networks()
        self.set_to([*weights, *means], 1.0)
        average = WeightAverage(ensemble, 4)
        self.set_to([*weights, *means], 5.0)
        with suppress(KeyError), average.used():
            during = [t.unique().item() for t in (*weights, *means)]
            raise KeyError
        assert during == [1.0] * 4
        assert [t.unique().item() for t in (*weights, *means)] == [5.0] * 4

    def test_only_members_of_this_process_are_updated(self):
        ensemble, weights, _ = self.networks()
        self.set_to(weights, 0.0)
        average = WeightAverage(ensemble, 2, slice(1, 2))
        self.set_to(weights, 4.0)
        average.update()
        assert [t.unique().item() for t in average.of(weights)] == [0.0, 2.0]
