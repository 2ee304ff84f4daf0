"""Fast gradient sign: against the formula by hand, and as a training step."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cmcl import Ensemble, Options, Recipe, fit
from cmcl.training.batches import Resident
from cmcl.training.step import Step, TrainState

EPSILON = torch.tensor(0.1)
QUIET = Options(quiet=True)
RECIPE = Recipe(method="ie", members=2, steps=10, batch_size=8, lr=0.05, adversarial=0.1)


def adversarial_logits(ensemble, x, y, epsilon, task=None, ignore_index=None):
    cpu = torch.device("cpu")
    state = TrainState(ensemble, RECIPE, 0, 3, 10)
    objective = RECIPE.objective | {"task": task, "ignore_index": ignore_index}
    step = Step(state, Resident(x, y, 8, 0, cpu), objective=objective)
    return step.adversarial_logits(x, y, epsilon)


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5) if norm else nn.Identity()
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


def build(seed=0, norm=False):
    torch.manual_seed(seed)
    return Ensemble(lambda: Net(norm), 2)


def data(n=16):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 6, generator=generator) * torch.arange(1.0, 7.0)
    return x, torch.randint(3, (n,), generator=generator)


def attack(member, x, y, epsilon):
    """A member's own adversarial inputs, as the paper that proposed them writes it."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(member(x), y), x)
    return (x + epsilon * gradient.sign()).detach()


class TestLogits:
    @pytest.mark.parametrize("epsilon", [torch.tensor(0.3), torch.linspace(0, 1, 6)], ids=["one", "by input"])
    def test_by_hand(self, epsilon):
        ensemble, (x, y) = build(), data()
        clean, attacked = adversarial_logits(ensemble, x, y, epsilon)
        for m, member in enumerate(ensemble.members):
            torch.testing.assert_close(clean[m], member(x))
            torch.testing.assert_close(attacked[m], member(attack(member, x, y, epsilon)))

    def test_gradients_reach_the_weights_once_and_not_through_the_attack(self):
        ensemble, (x, y) = build(), data()
        member = ensemble.members[0]
        clean, attacked = adversarial_logits(ensemble, x, y, torch.tensor(0.1))
        (clean[0].sum() + attacked[0].sum()).backward()
        ours = member.first.weight.grad.clone()
        member.zero_grad()
        (member(x).sum() + member(attack(member, x, y, 0.1)).sum()).backward()
        torch.testing.assert_close(ours, member.first.weight.grad)
        assert x.grad is None


class TestAnyNetworkAnyTask:
    """What trains without an attack trains with it."""

    def test_pixels_to_ignore(self):
        """An image (2, 5) under a 1x1 convolution: a pixel's attack is its own, and none where it is ignored."""
        ensemble = Ensemble(lambda: nn.Conv2d(3, 4, 1), 2)
        x, y = torch.randn(6, 3, 2, 5), torch.randint(4, (6, 2, 5))
        y[:, 0, :3] = 255
        clean, attacked = adversarial_logits(ensemble, x, y, EPSILON, ignore_index=255)
        assert attacked[..., 0, :3].equal(clean[..., 0, :3])
        for m, member in enumerate(ensemble.members):
            loss = F.cross_entropy(attacked[m], y, ignore_index=255)
            assert loss > F.cross_entropy(clean[m], y, ignore_index=255)
            own = x.clone().requires_grad_()
            F.cross_entropy(member(own), y, ignore_index=255).backward()
            torch.testing.assert_close(attacked[m], member(x + EPSILON * own.grad.sign()))

    def test_soft_targets(self):
        ensemble, (x, y) = build(), data()
        soft = 0.8 * F.one_hot(y, 3) + 0.2 * torch.rand(16, 3).softmax(1)
        _, attacked = adversarial_logits(ensemble, x, soft, EPSILON, task=soft_cross_entropy)
        for m, member in enumerate(ensemble.members):
            torch.testing.assert_close(attacked[m], member(attack(member, x, soft, EPSILON)))

    def test_the_attack_is_on_the_task(self):
        """Of a task that wants the loss large, the attack makes it small."""
        ensemble, (x, y) = build(), data()
        _, worse = adversarial_logits(ensemble, x, y, -EPSILON)
        _, ours = adversarial_logits(
            ensemble, x, y, EPSILON, task=lambda z, y: -F.cross_entropy(z, y, reduction="none")
        )
        torch.testing.assert_close(ours, worse)


def soft_cross_entropy(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")


def plain_training(ensemble, recipe, x, y):
    """Full batches, so that their order is no matter; a share of each input value's range."""
    epsilon = recipe.adversarial * (x.amax(0) - x.amin(0))
    optimizer = torch.optim.SGD(ensemble.parameters(), recipe.lr, momentum=recipe.momentum)
    for _ in range(recipe.steps):
        total = 0.0
        for member in ensemble.members:
            total = total + F.cross_entropy(member(x), y)
            total = total + F.cross_entropy(member(attack(member, x, y, epsilon)), y)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


class TestTraining:
    def test_against_a_plain_loop(self):
        """float32 in another order of summation: 1e-5 after 10 steps."""
        ours, theirs, clean = build(), build(), build()
        recipe = replace(RECIPE, batch_size=16)
        fit(ours, data(), recipe=recipe, options=QUIET)
        plain_training(theirs, recipe, *data())
        fit(clean, data(), recipe=replace(recipe, adversarial=0.0), options=QUIET)
        for ours_p, theirs_p, clean_p in zip(*(e.parameters() for e in (ours, theirs, clean)), strict=True):
            torch.testing.assert_close(ours_p, theirs_p, rtol=1e-5, atol=1e-5)
            assert not torch.allclose(ours_p, clean_p, atol=1e-3)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
    def test_compiled(self):
        """With batch normalisation: what its compiled backward would like to reuse is needed twice."""
        torch.compiler.reset()
        ours, theirs = build(norm=True), build(norm=True)
        fit(ours, data(), recipe=RECIPE, options=replace(QUIET, compile=True))
        fit(theirs, data(), recipe=RECIPE, options=QUIET)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        torch.compiler.reset()
