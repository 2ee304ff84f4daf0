"""Muon: torch's update for matrices, convolutions as matrices, AdamW for the rest, captured and resumed."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import cmcl
from cmcl.training.muon import RMS, Muon, orthogonal
from cmcl.training.optim import make_optimizer

RECIPE = cmcl.Recipe(members=3, steps=12, batch_size=32, optimizer="muon", lr=0.01, weight_decay=0.1)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 10)
    )


def test_singular_values_become_about_one():
    matrices = torch.randn(4, 6, 20, generator=torch.Generator().manual_seed(0))
    for given in (matrices, matrices.mT):
        found = torch.linalg.svdvals(orthogonal(given))
        assert (found > 0.6).all()
        assert (found < 1.3).all()
    flat = torch.diag(torch.tensor([3.0, 2.0, 1.0]))[None]
    assert torch.allclose(orthogonal(flat)[0], torch.diag(orthogonal(flat)[0].diagonal()), atol=1e-5), (
        "the singular vectors stay"
    )


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (5, 5)])
def test_the_steps_are_those_of_torch(shape):
    """torch computes the iteration in bfloat16, so the updates agree to about its precision."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(w) for w in torch.randn(shape).repeat(2, 1, 1))
    bias = nn.Parameter(torch.zeros(3))
    mine = Muon([ours], [bias], 0.02, momentum=0.9, weight_decay=0.1)
    other = torch.optim.Muon([theirs], 0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    start = ours.detach().clone()
    for _ in range(5):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        bias.grad = torch.ones(3)
        mine.step()
        other.step()
    moved, wanted = ours.detach() - start, theirs.detach() - start
    assert torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0) > 0.999
    assert moved.norm() / wanted.norm() == pytest.approx(1, abs=0.02)
    assert torch.allclose(bias, torch.full((3,), -0.1), atol=1e-4), "AdamW: the sign, five times lr"


def test_a_convolution_is_a_matrix_and_equal_shapes_do_not_mix():
    torch.manual_seed(0)
    convolutions = [nn.Parameter(torch.randn(4, 2, 3, 3)) for _ in range(3)]
    matrices = [nn.Parameter(w.detach().flatten(1).clone()) for w in convolutions]
    for convolution, matrix in zip(convolutions, matrices, strict=True):
        convolution.grad = torch.randn(4, 2, 3, 3)
        matrix.grad = convolution.grad.flatten(1)
    together = Muon(convolutions, [], 0.1, momentum=0.9, weight_decay=0.0)
    together.step()
    for matrix in matrices:
        Muon([matrix], [], 0.1, momentum=0.9, weight_decay=0.0).step()
    for convolution, matrix in zip(convolutions, matrices, strict=True):
        assert torch.allclose(convolution.flatten(1), matrix, atol=1e-6)


def test_the_size_of_an_update_is_about_adams():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(30, 50))
    weight.grad = torch.randn(30, 50)
    Muon([weight], [], 1.0, momentum=0.0, weight_decay=0.0).step()
    rms = weight.detach().square().mean().sqrt()
    assert rms == pytest.approx(RMS, rel=0.3)


def test_a_step_whose_loss_is_nan_is_skipped():
    weight, bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
    optimizer = Muon([weight], [bias], 0.1, momentum=0.9, weight_decay=0.1)
    before = [t.detach().clone() for t in (weight, bias, optimizer.state[weight]["momentum_buffer"])]
    weight.grad, bias.grad = torch.full((3, 4), float("nan")), torch.full((3,), float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = (weight, bias, optimizer.state[weight]["momentum_buffer"])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.found_inf = torch.zeros(())
    weight.grad, bias.grad = torch.randn(3, 4), torch.randn(3)
    optimizer.step()
    assert not torch.equal(weight, before[0])
    assert torch.isfinite(weight).all()


def test_weights_of_layers_are_matrices_and_the_rest_is_adamws():
    ensemble = cmcl.Ensemble(network, 2)
    optimizer = make_optimizer(ensemble, RECIPE)
    first, rest = optimizer.param_groups
    assert {p.ndim for p in first["params"]} == {2, 4}
    assert {p.ndim for p in rest["params"]} == {1}
    assert first["weight_decay"] == 0.1
    assert rest["weight_decay"] == 0
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(ensemble.parameters()))


class Diagonal(nn.Module):
    """A weight that is computed from a vector."""

    def forward(self, diagonal):
        return torch.diag(diagonal)

    def right_inverse(self, weight):
        return weight.diagonal().clone()


def test_a_vector_that_a_weight_is_computed_from_is_adamws():
    def diagonal():
        layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", Diagonal())
        return nn.Sequential(layer, nn.Linear(4, 2))

    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(diagonal, 3)
    before = [p.detach().clone() for p in ensemble.parameters()]
    cmcl.fit(ensemble, (torch.randn(32, 4), torch.arange(32) % 2), recipe=RECIPE)
    assert not any(torch.equal(p, old) for p, old in zip(ensemble.parameters(), before, strict=True))


def fit(recipe, **how):
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(network, 3)
    train = cmcl.data.load("digits")[:300]
    result = cmcl.fit(ensemble, train, recipe=recipe, options=cmcl.Options(quiet=True, device="cpu"), **how)
    return ensemble, result


def test_fit_learns_and_a_resumed_run_is_the_same(tmp_path):
    recipe = replace(RECIPE, steps=60, lr=0.02)
    whole, result = fit(recipe)
    assert result.rows[-1]["loss"] < result.rows[0]["loss"] / 2
    fit(replace(recipe, steps=20), out=tmp_path)
    resumed, _ = fit(recipe, out=tmp_path, resume=True)
    for key, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_follows_the_schedule():
    recipe = replace(RECIPE, schedule="linear", steps=30)
    losses = []
    for capture in (False, True):
        torch.manual_seed(0)
        ensemble = cmcl.Ensemble(network, 3)
        options = cmcl.Options(quiet=True, device="cuda", precision="float32", compile=False, capture=capture)
        result = cmcl.fit(ensemble, cmcl.data.load("digits")[:300], recipe=recipe, options=options)
        losses.append([row["loss"] for row in result.rows])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
