"""What tracing cannot see is kept whole, refused, or found out by running the pieces against the network."""

import random
from contextlib import nullcontext, suppress
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cmcl
from cmcl import Ensemble, shareable_layers
from cmcl.pretrained import SharedStemEnsemble
from cmcl.splitting import CannotSplitError


class Swish(torch.autograd.Function):
    """With a backward of its own, as activations that save memory have."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * s * (1 + x * (1 - s))


class Act(nn.Module):
    def forward(self, x):
        return Swish.apply(x)


class Checkpointed(nn.Module):
    """Trades time for memory, in the old way, which is a torch.autograd.Function."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        return checkpoint(self.a, x, use_reentrant=True)


class Doubles(nn.Module):
    """Asks what its input is, and a symbol is something else."""

    def forward(self, x):
        return 2 * x if isinstance(x, torch.Tensor) else x


class Tries(nn.Module):
    def forward(self, x):
        try:
            return x * int(x.shape[1])
        except Exception:
            return x


class ClampsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return self.a(x)


class ClampsFeatures(ClampsWeights):
    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            h.clamp_(min=0)
        return h * h


class Norm(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(5)


class Reverse(torch.autograd.Function):
    """Does nothing on the way, so that tracing meets nothing; turns the gradient round."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


def around(*parts):
    """A network with these parts in the middle; parts are instances or classes."""

    def build():
        middle = [part() if isinstance(part, type) else part for part in parts]
        return nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Linear(5, 3))

    return build


def gradients(network, run, x):
    for p in network.parameters():
        p.grad = None
    run(x).square().sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("place", ["0", "2"])
@pytest.mark.parametrize("part", [Act, Checkpointed, ClampsWeights, ClampsFeatures])
def test_outputs_and_gradients_are_those_of_the_whole(part, place, mode):
    torch.manual_seed(0)
    ensemble = Ensemble(around(part), 2, share_after=place, share_at_test="off", share_prob=0.0).train(mode)
    x, member = torch.randn(6, 4), ensemble.members[0]
    torch.testing.assert_close(ensemble(x)[0], member(x))
    found = gradients(member, lambda x: ensemble(x)[0], x)
    torch.testing.assert_close(found, gradients(member, member, x))


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("part", [Doubles, Tries])
def test_what_tracing_takes_for_something_else_is_found_out(part, mode):
    ensemble = Ensemble(around(part), 2, share_after="0").train(mode)
    with pytest.raises(CannotSplitError, match="in two pieces its outputs are others"):
        ensemble(torch.randn(6, 4))


class Root(nn.Module):
    """The same at the top, where nothing can be kept whole."""

    def __init__(self, middle):
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(4, 5), nn.Linear(5, 3), middle

    def forward(self, x):
        return self.b(self.middle(self.a(x)))


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (Swish.apply, "Swish is a torch.autograd.Function, whose gradient would be lost"),
        (lambda x: x + random.random(), "it draws random numbers in Python"),
        (lambda x: x + float(torch.rand(1)), "it draws random numbers in Python"),
        (lambda x: x + np.random.rand(), "it draws random numbers in Python"),  # noqa: NPY002
    ],
)
def test_refused_where_it_cannot_be_kept_whole(middle, reason):
    with pytest.raises(CannotSplitError, match=reason):
        Ensemble(lambda: Root(middle), 2, share_after="a")


def test_gradients_of_what_does_nothing():
    ensemble = Ensemble(lambda: Root(Reverse.apply), 2, share_after="a")
    with pytest.raises(CannotSplitError, match="in two pieces its gradients are others"):
        ensemble(torch.randn(3, 4))


class LayerDrop(nn.Module):
    """Leaves itself out in half of the steps."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x if self.training and self.draw() < 0.5 else -x


@pytest.mark.parametrize("draw", [random.random, lambda: float(torch.rand(1)), np.random.rand])
def test_random_decisions_are_made_anew(draw):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    ensemble = Ensemble(around(LayerDrop(draw)), 2, share_after="0", share_prob=0.0)
    x = torch.randn(3, 4)
    seen = {tuple(ensemble(x)[0].flatten().tolist()) for _ in range(30)}
    assert len(seen) == 2


def hooked():
    network = around(nn.Identity)()
    network.register_forward_hook(lambda module, inputs, output: 100 * output)
    return network


def replaced():
    network = around(nn.Identity)()
    plain = network.forward
    network.forward = lambda x: 100 * plain(x)
    return network


@pytest.mark.parametrize(
    ("build", "reason"), [(hooked, "it has hooks"), (replaced, "its forward was replaced")]
)
def test_what_surrounds_forward(build, reason):
    """Around the place it is refused, elsewhere such a part is kept whole, hook and all."""
    with pytest.raises(CannotSplitError, match=f"{reason}.* which a split inside it would leave out"):
        Ensemble(build, 2, share_after="0")

    def outer():
        return nn.Sequential(nn.Linear(4, 4), build())

    with pytest.raises(CannotSplitError, match=reason):
        Ensemble(outer, 2, share_after="1.0")
    ensemble = Ensemble(outer, 2, share_after="0", share_at_test="off").eval()
    x = torch.randn(3, 4)
    torch.testing.assert_close(ensemble(x)[1], ensemble.members[1](x))


class Logs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.log, self.seen = nn.Linear(4, 4), nn.Linear(4, 3), [], set()

    def forward(self, x):
        h = self.a(x)
        self.log.append(h)
        self.seen.add(id(h))
        return self.b(h)


def test_lists_are_put_back():
    network = Logs()
    with pytest.raises(CannotSplitError, match="its forward assigns 'log'"):
        Ensemble([network, Logs()], share_after="a")
    assert network.log == []
    assert network.seen == set()


class TwiceInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.a(x)
        return self.b(self.a(h) if self.training else h)


def test_calls_are_counted_in_both_modes():
    place = shareable_layers(TwiceInTraining(), torch.randn(2, 4))[0]
    assert place.problem == "it must be called once in forward, not 2 times"


class Knot(nn.Module):
    """Uses a part of its first block again, later."""

    def __init__(self):
        super().__init__()
        self.block, self.middle, self.head = (
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            nn.Linear(4, 4),
            nn.ReLU(),
        )

    def forward(self, x):
        return self.head(self.block[0](self.middle(self.block(x))))


def test_a_part_of_the_stem_that_is_used_again():
    with pytest.raises(CannotSplitError, match=r"'block.0' is used before and after it"):
        SharedStemEnsemble(Knot, 2, stem="block")


def test_nothing_is_touched():
    """Neither weights, nor running statistics, nor random numbers: the first step is as every other."""
    torch.manual_seed(0)
    ensemble = Ensemble(around(Norm, nn.Dropout), 2, share_after="1")
    x = torch.randn(6, 4)
    before = {key: value.clone() for key, value in ensemble.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    ensemble.check(x)
    assert ensemble._unverified == {False}
    assert torch.get_rng_state().equal(states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    assert all(value.equal(before[key]) for key, value in ensemble.state_dict().items())
    assert all(p.grad is None for p in ensemble.parameters())


@pytest.mark.parametrize("around_it", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_also_where_no_gradients_are_wanted(around_it):
    ensemble = Ensemble(around(Doubles), 2, share_after="0").eval()
    with around_it(), pytest.raises(CannotSplitError, match="in two pieces its outputs are others"):
        ensemble(torch.randn(3, 4))
    ensemble = Ensemble(around(Act), 2, share_after="0").eval()
    with around_it():
        assert ensemble(torch.randn(3, 4)).shape == (2, 3, 3)


def test_one_stem_is_checked_too():
    for freeze, mode in product((False, True), repeat=2):
        ensemble = SharedStemEnsemble(around(Doubles), 2, stem="0", freeze=freeze).train(mode)
        with pytest.raises(CannotSplitError, match="after '0': in two pieces its outputs are others"):
            ensemble(torch.randn(3, 4))


def test_a_frozen_stem_is_compared_as_it_was_cut():
    """In eval mode, where its dropout does nothing."""

    def build():
        return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 5), nn.Linear(5, 3))

    ensemble = SharedStemEnsemble(build, 2, stem="1", freeze=True).train()
    assert ensemble(torch.randn(3, 4)).shape == (2, 3, 3)


def test_every_kind_of_member_is_checked():
    ensemble = Ensemble([around(nn.ReLU)(), Other()], share_after="0")
    with pytest.raises(CannotSplitError, match="Other cannot be split after '0': in two pieces its outputs"):
        ensemble(torch.randn(3, 4))


class Other(nn.Sequential):
    def __init__(self):
        super().__init__(*around(Doubles)())


def test_only_logits_count():
    """Other outputs, however large, do not hide them."""

    class Talks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.part, self.b = nn.Linear(4, 5), Doubles(), nn.Linear(5, 3)

        def forward(self, x):
            h = self.a(x)
            return {"logits": self.b(self.part(h)), "h": 1000 * h}

    ensemble = Ensemble(Talks, 2, share_after="a", output=lambda answer: answer["logits"])
    with pytest.raises(CannotSplitError, match="in two pieces its outputs are others"):
        ensemble(torch.randn(3, 4))


class Unrepeatable(nn.Module):
    """Draws from a generator that nobody knows of."""

    numbers = np.random.default_rng(0)

    def forward(self, x):
        return x + float(self.numbers.normal())


class OwnDice(nn.Module):
    def __init__(self):
        super().__init__()
        self.dice = random.Random(0)

    def forward(self, x):
        return x if self.dice.random() < 0.5 else -x


@pytest.mark.parametrize("part", [Unrepeatable, OwnDice])
def test_generators_of_ones_own(part):
    """Not repeatable is not wrong; what is kept whole draws anew."""
    if part is Unrepeatable:  # a decision in Python, so that it is kept whole
        part = type(
            "Kept",
            (Unrepeatable,),
            {"forward": lambda self, x: Unrepeatable.forward(self, x) if x.sum() else x},
        )
    ensemble = Ensemble(around(part), 2, share_after="0", share_prob=0.0)
    x = torch.randn(3, 4)
    told = pytest.warns(UserWarning, match="not verified .*: it does not repeat itself")
    with told if part is not OwnDice else nullcontext():
        ensemble(x)
    assert len({tuple(ensemble(x)[0].flatten().tolist()) for _ in range(20)}) > 1


def test_a_part_that_remembers_is_kept_whole():
    class Remembers(nn.Module):
        def forward(self, x):
            self.last = x
            return x.relu()

    ensemble = Ensemble(around(Remembers), 2, share_after="0", share_prob=0.0)
    x = torch.randn(3, 4)
    torch.testing.assert_close(ensemble(x)[1], ensemble.members[1](x))
    assert ensemble.members[0][1].last.shape == (3, 5)


def test_checkpointing_around_the_ensemble():
    ensemble = Ensemble(around(nn.ReLU), 2, share_after="0")
    x = torch.randn(6, 4, requires_grad=True)
    checkpoint(ensemble, x, use_reentrant=False).sum().backward()
    assert all(p.grad is not None for p in ensemble.parameters())
    assert ensemble._unverified == {False}


def test_nothing_to_judge_is_not_judged_for_ever():
    ensemble = Ensemble(around(Norm, Doubles), 2, share_after="0")
    for too_few in (0, 1):
        with suppress(ValueError):  # batch normalisation's own
            ensemble(torch.randn(too_few, 4))
    assert ensemble._unverified == {True, False}
    with pytest.raises(CannotSplitError, match="in two pieces"):
        ensemble(torch.randn(2, 4))


def test_a_head_that_starts_at_zero_hides_nothing():
    def build():
        network = Root(Reverse.apply)
        nn.init.zeros_(network.b.weight)
        return network

    with pytest.raises(CannotSplitError, match="in two pieces its gradients are others"):
        Ensemble(build, 2, share_after="a")(torch.randn(3, 4))


def test_sparse_gradients_and_other_default_types():
    def build():
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), Doubles(), nn.Linear(8, 3))

    before = torch.get_default_dtype()
    ensemble = Ensemble(build, 2, share_after="0")
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(CannotSplitError, match="in two pieces its outputs are others"):
            ensemble(torch.randint(9, (3, 2)))
    finally:
        torch.set_default_dtype(before)


def test_too_little_memory_is_no_fault_of_the_cut(monkeypatch):
    ensemble = Ensemble(around(nn.ReLU), 2, share_after="0")

    def fail(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(ensemble, "_in_pieces", fail)
    with pytest.warns(UserWarning, match="Sequential was split after .0.,.* there is not enough memory"):
        assert ensemble(torch.randn(3, 4)).shape == (2, 3, 3)


def test_too_little_memory_for_the_whole():
    class Hungry(nn.Module):
        calls = 0

        def forward(self, x):
            Hungry.calls += isinstance(x, torch.Tensor) and not isinstance(x, torch.fx.Proxy)
            if Hungry.calls == 1:
                raise torch.OutOfMemoryError("no")
            return x.relu()

    ensemble = Ensemble(around(Hungry), 2, share_after="0")
    Hungry.calls = 0
    with pytest.warns(UserWarning, match="not verified .*: there is not enough memory"):
        ensemble(torch.randn(3, 4))


def test_a_network_that_cannot_be_copied_is_not_judged_and_that_is_said():
    class Alone(nn.Module):
        def forward(self, x):
            return x.relu()

        def __deepcopy__(self, memo):
            raise TypeError("there is only one of me")

    ensemble = Ensemble(
        [nn.Sequential(nn.Linear(4, 5), Alone(), nn.Linear(5, 3)) for _ in range(2)], share_after="0"
    )
    with pytest.warns(UserWarning, match="not verified .*: it cannot be copied .there is only one of me"):
        ensemble(torch.randn(3, 4))
    ensemble(torch.randn(3, 4))  # said once


def test_a_network_that_asks_for_more_than_two_examples():
    """It is compared on all of them."""

    class Eight(nn.Module):
        sign = 1

        def forward(self, x):
            return self.sign * x.view(8, 5)

    ensemble = Ensemble(around(Eight), 2, share_after="0", share_prob=0.0)
    for member in ensemble.members:
        member[1].sign = -1  # traced as 1
    with pytest.raises(CannotSplitError, match="in two pieces its outputs are others"):
        ensemble(torch.randn(8, 4))


def test_transformed_ensembles_are_left_alone():
    """Under torch.func, torch.compile and torch.export there is nothing to compare; they work as ever."""
    ensemble = Ensemble(around(nn.ReLU), 2, share_after="0", share_at_test="off").eval()
    x = torch.randn(3, 4)
    jacobian = torch.func.jacrev(lambda x: ensemble(x).sum(0))(x)
    assert jacobian.shape == (3, 3, 3, 4)
    exported = torch.export.export(ensemble, (x,)).module()
    torch.testing.assert_close(exported(x), ensemble(x))


def test_the_whole_network_fails_by_itself():
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError("mine")

    ensemble = Ensemble(around(Fails), 2, share_after="0")
    with pytest.raises(ZeroDivisionError, match="mine"):
        ensemble(torch.randn(3, 4))


def test_cmcl_trains_through_gradients_of_ones_own():
    torch.manual_seed(0)
    ensemble = Ensemble(around(Act), 2, share_after="0")
    start = [p.clone() for p in ensemble.parameters()]
    recipe = cmcl.Recipe(members=2, overlap=1, steps=3, batch_size=8, lr=0.1)
    options = cmcl.Options(device="cpu", quiet=True)
    cmcl.fit(ensemble, (torch.randn(16, 4), torch.randint(3, (16,))), recipe=recipe, options=options)
    assert not any(p.equal(q) for p, q in zip(start, ensemble.parameters(), strict=True))
