"""Mistakes seen in other ensemble libraries, one test each: ours must not make them."""

import pytest
import torch
import torch.nn.functional as F

import cmcl


@pytest.mark.parametrize("name", cmcl.networks.NETWORKS)
def test_networks_return_logits_not_probabilities(name):
    options = {"size": 32} if name == "cnn" else {}
    with torch.no_grad():
        logits = cmcl.networks.NETWORKS[name](**options).eval()(torch.randn(4, 3, 32, 32))
    sums = logits.sum(1)
    assert not torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
    assert logits.min() < 0


def test_the_loss_takes_logits():
    """A shift of all logits changes nothing, which would not hold for probabilities fed to a softmax."""
    logits, targets = torch.randn(3, 4, 5), torch.randint(5, (4,))
    shifted = cmcl.confident_oracle_loss(logits + 7, targets).total
    torch.testing.assert_close(shifted, cmcl.confident_oracle_loss(logits, targets).total)


def test_the_learning_rate_does_not_depend_on_the_number_of_members():
    """Sum over members, not mean over M*B: a member's gradient is that of training alone."""
    logits, targets = torch.randn(4, 6, 5, requires_grad=True), torch.randint(5, (6,))
    together = torch.autograd.grad(cmcl.independent_loss(logits, targets).total, logits)[0]
    alone = torch.autograd.grad(F.cross_entropy(logits[2], targets), logits)[0]
    torch.testing.assert_close(together[2], alone[2])
