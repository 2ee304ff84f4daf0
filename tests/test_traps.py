"""Mistakes seen in other ensemble libraries, one test each: ours must not make them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cmcl
from cmcl import Ensemble, Recipe


def test_evaluation_is_in_eval_mode_from_the_first_epoch():
    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.seen = nn.Linear(4, 3), set()

        def forward(self, x):
            self.seen.add((self.training, len(x)))
            return self.fc(x)

    train, test = (torch.randn(8, 4), torch.randint(3, (8,))), (torch.randn(5, 4), torch.randint(3, (5,)))
    ensemble = Ensemble(Spy, 1)
    recipe = Recipe(method="ie", members=1, epochs=1, batch_size=8, lr=0.01)
    cmcl.fit(ensemble, train, recipe=recipe, test=test, options=cmcl.Options(quiet=True))
    seen = ensemble.members[0].seen
    assert (False, 5) in seen
    assert (True, 5) not in seen
    assert (True, 8) in seen


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


def test_what_is_chosen_by_is_not_the_test_set():
    """With a validation share, the looks on the way are at the held-out part, never at the test set."""
    train = cmcl.data.load("digits", split="train")[:200]
    looked = []

    class Watched(Ensemble):
        def forward(self, x):
            looked.append((self.training, len(x)))
            return super().forward(x)

    ensemble = Watched(
        lambda: cmcl.networks.cnn(channels=1, size=8, filters=(2, 3), kernel=3, padding=1, hidden=None), 1
    )
    recipe = Recipe(method="ie", members=1, epochs=2, batch_size=50, lr=0.01, validation=0.2)
    test = cmcl.data.load("digits", split="test")[:77]
    cmcl.fit(ensemble, train, recipe=recipe, test=test, options=cmcl.Options(quiet=True, evaluate_every=1))
    scored = [n for training, n in looked if not training]
    assert scored[:3] == [2, 2, 2], "whether train, the held-out part and test fit"
    assert len(scored) == 3 + 3
    assert scored.count(77) == 1, "the test set once, at the end"
    assert scored[-1] == 77
