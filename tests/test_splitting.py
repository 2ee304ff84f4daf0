"""Splitting: the two pieces are the network, wrong splits raise, and the layers that are listed really split."""

import copy
import json
import pickle
import random
import sys
from contextlib import nullcontext, suppress
from itertools import product
from threading import Lock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import cmcl
from cmcl import Ensemble, SharedStemEnsemble, shareable_layers
from cmcl.cli.explore import layers as layers_command
from cmcl.splitting import CannotSplitError, split
from lookalikes import KINDS, ResNet, UNet, images, vectors


class Made(nn.Module):
    """A network of named parts (tensors become buffers) and a forward function (self, x)."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def made(run, kind=Made, **parts):
    """A function that builds such a network: two linear layers, and `parts`, copied for each."""

    def build():
        layers = {"a": nn.Linear(4, 4), "act": nn.ReLU(), "b": nn.Linear(4, 3)}
        network = kind(run, **layers | copy.deepcopy(parts))
        for part in network.modules():
            getattr(part, "reset_parameters", lambda: None)()
        return network

    return build


def around(*parts):
    """A function that builds a network with these parts, instances or classes, in the middle."""

    def build():
        middle = [part() if isinstance(part, type) else part for part in parts]
        return nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Linear(5, 3))

    return build


def alone(ensemble, x):
    return torch.stack([member(x.clone()) for member in ensemble.members])


def assert_members_are_themselves(ensemble, x):
    """In an ensemble that shares nothing."""
    ensemble.share_at_test, ensemble.share_prob = "off", 0.0
    torch.testing.assert_close(ensemble(x), alone(ensemble, x))


class Block(nn.Module):
    """A residual block with functional dropout and an input that skips ahead."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.dropout(F.relu(self.bn(self.conv(x))), 0.5, self.training) + x


class Net(nn.Module):
    """Skips across the split point, reads a buffer and a size after it, has arguments with defaults."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.body = nn.Sequential(Block(4), nn.ReLU(), Block(4))
        self.act = nn.ReLU()
        self.head = nn.Linear(4, 10)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, extra=None, axes=(2, 3), flag=True):
        start = self.first(x) * self.scale
        if extra is not None:
            start = start + extra
        h = start
        for block in self.blocks:
            h = block(h)
        h = self.body(h)
        h = self.act(h) * self.scale + start + x.mean(1, keepdim=True) if flag else h
        return self.head(h.mean(axes).view(x.size(0), -1))


@pytest.mark.parametrize(
    "name", ["first", "blocks.0", "blocks.1.conv", "blocks.1", "body.0.bn", "body.1", "body", "act"]
)
def test_stem_then_trunk_is_the_network(name):
    net, x, seen = Net(), torch.randn(2, 3, 6, 6), []
    net.train()
    net.blocks[0].bn.eval()  # frozen
    halves = split(net, name)
    assert net.training
    assert not net.blocks[0].bn.training
    assert list(net.state_dict()) == list(Net().state_dict())
    for mode in (False, True):
        net.train(mode)
        torch.manual_seed(1)
        h, rest = halves.stem(net, x)
        logits = halves.trunk(net, h, rest)
        torch.manual_seed(1)
        with net.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out)):
            torch.testing.assert_close(logits, net(x))
        assert h.equal(seen[-1])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])  # noqa: S301
def test_copies_and_new_dtypes_use_their_own_weights_and_buffers(clone):
    ensemble = Ensemble(Net, 2, share_after="act").eval()
    x = torch.randn(2, 3, 6, 6)
    before = ensemble(x)
    other = clone(ensemble)
    assert other(x).equal(before)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    assert other(x).abs().max() == 0
    assert ensemble(x).equal(before)
    assert ensemble.double()(x.double()).dtype == torch.float64, "buffers read after the split moved too"


class OwnHalves(nn.Module):
    """Cannot be traced (its depth depends on the data), but offers stem and trunk."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def stem(self, x):
        return (F.relu(self.a(x)), x) if x.sum() > 0 else (self.a(x), x)

    def trunk(self, h, x):
        return self.b(h) + x[:, :3]

    def forward(self, x):
        return self.trunk(*self.stem(x))


class HeadOutside(nn.Module):
    """Submodules that happen to be called stem and trunk; forward does more than call them."""

    def __init__(self):
        super().__init__()
        self.stem, self.trunk, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.trunk(self.stem(x).relu()).relu())


@pytest.mark.parametrize(("network", "bypassed"), [(OwnHalves, True), (HeadOutside, False)])
def test_what_is_called_stem_and_trunk(network, bypassed):
    """Methods are used as they are; submodules are traced."""
    x = torch.randn(5, 4)
    assert_members_are_themselves(Ensemble(network, 2, share_after="stem").eval(), x)
    layer = by_name(shareable_layers(network(), x))["stem"]
    assert layer[1:5] == ("method" if bypassed else "Linear", (5,), None, bypassed)


class Quiet(nn.Module):
    """Takes its first features without gradients, as one does with a backbone, and counts quietly."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.act = nn.LSTM(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.head = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            h, _ = self.first(x)
        h = self.act(self.second(h))
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.5)
        return self.head(h - self.mean)


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", ["second", "act"])
def test_no_grad_stays_no_grad(name, around):
    with around():  # where it is split must not matter
        ensemble = Ensemble(Quiet, 2, share_after=name)
    for _ in range(2):
        ensemble(torch.randn(2, 4)).sum().backward()
    for member in ensemble.members:
        assert all(p.grad is None for p in member.first.parameters())
        assert member.second.weight.grad.abs().sum() > 0
        assert not member.mean.requires_grad


def scaled(scale):
    """Decides in Python, by an attribute: the trace freezes it, so members must not share it."""
    return made(
        lambda net, x: net.b(h * net.scale if (h := net.act(net.a(x))) is not x else h), scale=scale
    )()


def test_members_alike_share_one_stem_and_one_trunk():
    """A training loop compiles each function once."""
    for network, name in [(Net, None), (Net, "blocks.0"), (Net, "body.1"), (Net, "act"), (Quiet, "second")]:
        ensemble = Ensemble(network, 5, share_after=name)
        assert len({*ensemble.stems, *ensemble.trunks}) == 2
    ensemble = Ensemble([scaled(1), scaled(2), scaled(3), scaled(2)], share_after="act")
    assert (len(set(ensemble.stems)), len(set(ensemble.trunks))) == (1, 3)
    assert_members_are_themselves(ensemble.eval(), torch.randn(5, 4))
    mixed = Ensemble([scaled(1), around()()])
    assert len({*mixed.stems, *mixed.trunks}) == 2, "without sharing, a trunk is the member itself"


def test_one_compilation_serves_all_members():
    torch.compiler.reset()
    ensemble, x, graphs = Ensemble(Net, 5, share_after="body.1").eval(), torch.randn(2, 3, 6, 6), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    fast = {function: torch.compile(function, backend=count, dynamic=False) for function in ensemble.stems}
    for stem, member in zip(ensemble.stems, ensemble.members, strict=True):
        torch.testing.assert_close(fast[stem](member, x), stem(member, x))
    assert len(graphs) == 1


def plain(net, x):
    return net.b(net.a(x))


def count(net, x):
    net.count += 1
    return net.b(net.a(x))


def average(net, x):
    if net.training:  # and read in eval mode too
        net.count = x.detach().mean()
    return net.b(net.a(x - net.count))


def remember(net, x):
    net.inner.last = net.a(x)
    return net.b(net.inner.last)


def log(net, x):
    net.log.append(h := net.a(x))
    net.seen.add(id(h))
    return net.b(h)


def forget(net, x):
    if hasattr(net, "extra"):
        del net.extra
    return net.b(net.a(x))


def unused(net, x):
    net.act(x)
    return net.b(net.a(x))


def with_hook():
    network = made(plain)()
    network.register_forward_hook(lambda module, inputs, output: 100 * output)
    return network


def replaced():
    network = made(plain)()
    forward = network.forward
    network.forward = lambda x: 100 * forward(x)
    return network


class TwoInputs(Made):
    def forward(self, x, mask):
        return self.b(self.a(x) * mask)


class Uncopyable(nn.ReLU):
    def __deepcopy__(self, memo):
        raise TypeError("there is only one of me")


NUMBERS = np.random.default_rng(0)  # a generator that belongs to no module
ZERO = torch.zeros(())
CANNOT = {  # network, layer, message
    "a typo": (Net, "block.0", "share_after must name a submodule of Net. Got 'block.0'; .* 'blocks"),
    "no name": (Net, 3, "share_after must be a submodule's name. Got int 3"),
    "no submodules": (lambda: nn.ReLU(), "a", "none, it has no submodules"),
    "data-dependent": (
        made(lambda n, x: n.b(n.a(x) if x.sum() > 0 else -n.a(x))),
        "a",
        r"torch.fx cannot trace .*stem\(x\) and trunk\(h\)",
    ),
    "called twice": (made(lambda n, x: n.b(n.a(n.a(x)))), "a", "called once in forward, not 2 times"),
    "never called": (made(plain), "act", "called once in forward, not 0 times"),
    "its output is not used": (made(unused), "act", "nothing after it uses its output"),
    "logits": (made(plain), "b", "it is the network's output"),
    "a buffer that counts": (made(count, count=ZERO), "a", "cannot trace .*count"),
    "an average": (made(average, count=ZERO), "a", "cannot trace .*count"),
    "an attribute": (made(count, count=0), "a", "its forward assigns 'count', .*self.count.add_"),
    "another's": (made(remember, inner=nn.Linear(1, 1)), "a", "its forward assigns 'inner.last'"),
    "a list": (made(log, log=[], seen=set()), "a", "its forward assigns 'log'"),
    "a deleted one": (made(forget, extra=3), "a", "its forward assigns 'extra'"),
    "a constant": (made(lambda n, x: n.b(n.a(x) + torch.ones(4))), "a", "makes a tensor .* use a buffer"),
    "noise": (made(lambda n, x: n.b(n.a(x) + torch.randn(4))), "a", "draws random numbers in Python"),
    "random": (made(lambda n, x: n.b(n.a(x) + random.random())), "a", "draws random numbers in Python"),
    "numpy's": (made(lambda n, x: n.b(n.a(x) + np.random.rand())), "a", "draws random"),  # noqa: NPY002
    "own dice": (
        made(lambda n, x: n.b(n.a(x) + n.dice.random()), dice=random.Random(0)),
        "a",
        "generator of",
    ),
    "hooks": (with_hook, "a", "it has hooks, which a split inside it would leave out"),
    "another forward": (replaced, "a", "forward was replaced .*, which a split inside it would leave out"),
    "hooks around it": (lambda: nn.Sequential(nn.Linear(4, 4), with_hook()), "1.a", "it has hooks"),
    "another argument": (made(plain, TwoInputs), "a", "missing .* 'mask'"),
    "no copies": (around(Uncopyable()), "0", "there is only one of me"),
}


def attributes(network):
    return {
        name: (dict(vars(part)), dict(part._buffers), list(part._modules))
        for name, part in network.named_modules()
    }


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_split_says_why_and_stays_as_it_was(case):
    build, name, message = CANNOT[case]
    network = build()
    before = attributes(network)
    with pytest.raises((ValueError, TypeError), match=message):
        split(network, name)
    assert attributes(network) == before
    assert getattr(network, "log", []) == []
    assert getattr(network, "seen", set()) == set()
    assert network.state_dict().keys() == build().state_dict().keys()


class Buffers(nn.Module):
    """Computes with buffers, whose part it takes depends on the input, and writes into one."""

    def __init__(self):
        super().__init__()
        self.embedding, self.act, self.head = nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 3)
        self.register_buffer("positions", torch.randn(1, 20, 4))
        self.register_buffer("mask", torch.ones(20, 20).tril() / 20)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, *tokens):
        length = tokens[0].size(1)
        h = self.act(self.embedding(tokens[0]) + self.positions[:, :length])
        if self.training:
            self.count.add_(1)
        h = self.mask[:length, :length] @ h
        return self.head(h.mean(1)) * torch.clamp(self.count, max=10)


@pytest.mark.parametrize("name", ["embedding", "act"])
def test_what_is_computed_from_buffers_is_computed_anew(name):
    ensemble = Ensemble(Buffers, 2, share_after=name)
    assert [member.count.item() for member in ensemble.members] == [0, 0], "splitting runs nothing"
    for steps, length in enumerate((5, 8, 20), 1):
        tokens = torch.randint(9, (2, length))
        ensemble.train()(tokens)
        assert [member.count.item() for member in ensemble.members] == [steps, steps]
        assert_members_are_themselves(ensemble.eval(), tokens)
    for member in ensemble.members:
        member.positions.zero_()
    assert_members_are_themselves(ensemble, tokens)


def test_a_cache_is_not_filled_by_tracing():
    def cached(net, x):
        if "mean" not in net.cache:
            net.cache["mean"] = net.a.bias.mean()
        return net.b(net.a(x) + net.cache["mean"])

    network, x = made(cached, cache={})(), torch.randn(2, 4)
    halves = split(network, "a")
    assert network.cache == {}
    assert halves.trunk(network, *halves.stem(network, x)).equal(network(x))


class InPlace(nn.Module):
    """Begins with an operation in place, and has another right after `norm`."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.act, self.head = nn.SiLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.act(self.norm(self.conv(x.mul_(2)))).mean((2, 3)))


class InPlaceHalves(InPlace):
    def stem(self, x):
        return self.act(self.norm(self.conv(x.mul_(2))))

    def trunk(self, h):
        return self.head(h.mean((2, 3)))


@pytest.mark.parametrize(
    ("network", "share_after"),
    [(InPlace, None), (InPlace, "norm"), (InPlace, "act"), (InPlaceHalves, "stem")],
)
@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: torch.compile(e, backend="aot_eager")])
def test_members_that_write_into_their_input_do_not_meet_there(network, share_after, wrap):
    ensemble = Ensemble(network, 3, share_after=share_after, share_prob=0.0).eval()
    x = torch.randn(2, 3, 6, 6)
    given = x.clone()
    together = wrap(ensemble)(x)
    assert x.equal(given), "nor does the input change"
    torch.testing.assert_close(together, alone(ensemble, x))


def test_features_must_be_tensors():
    network = made(lambda net, x: net.b(net.rnn(x)[0]), rnn=nn.LSTM(4, 4))
    with pytest.raises(TypeError, match="features must be tensors. Got tuple from member 0; share after"):
        Ensemble(network, 2, share_after="rnn")(torch.zeros(2, 4))


# ---------------------------------------------------------------- parts around the split stay whole


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


class WithLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)


class Checkpointed(WithLinear):
    """Trades time for memory, in the old way, which is a torch.autograd.Function."""

    def forward(self, x):
        return checkpoint(self.a, x, use_reentrant=True)


class ClampsFeatures(WithLinear):
    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            h.clamp_(min=0)
        return h * h


class Remembers(nn.Module):
    def forward(self, x):
        self.last = x
        return x.relu()


class Hooked(nn.ReLU):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, inputs, output: 100 * output)


class Routed(WithLinear):
    """Sends its input one way or another."""

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x


def gradients(network, run, x):
    network.zero_grad()
    run(x).square().sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("layer", ["0", "2"])
@pytest.mark.parametrize("part", [Act, Checkpointed, ClampsFeatures, Remembers, Hooked, Routed])
def test_outputs_and_gradients_are_those_of_the_whole(part, layer, mode):
    ensemble = Ensemble(around(part), 2, share_after=layer).train(mode)
    x, member = torch.randn(6, 4), ensemble.members[0]
    for inputs in (x, -x):  # a route that a trace would have frozen
        assert_members_are_themselves(ensemble, inputs)
    found = gradients(member, lambda x: ensemble(x)[0], x)
    torch.testing.assert_close(found, gradients(member, member, x))
    if part is Remembers:
        assert member[1].last.shape == (6, 5)


class LayerDrop(nn.Module):
    """Leaves itself out in half of the steps."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x if self.training and self.draw() < 0.5 else -x


class OwnDice(nn.Module):
    def __init__(self):
        super().__init__()
        self.dice = random.Random(0)

    def forward(self, x):
        return x if self.dice.random() < 0.5 else -x


class Unrepeatable(nn.Module):
    def forward(self, x):
        return x + float(NUMBERS.normal())


@pytest.mark.parametrize(
    "part",
    [
        LayerDrop(random.random),
        LayerDrop(lambda: float(torch.rand(1))),
        LayerDrop(np.random.rand),
        Unrepeatable,
        OwnDice,
    ],
    ids=["python", "torch", "numpy", "unknown", "own"],
)
def test_random_decisions_are_made_anew(part, request):
    """Also by generators that nobody knows of: not repeatable is not wrong."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    ensemble = Ensemble(around(part), 2, share_after="0", share_prob=0.0)
    x, unknown = torch.randn(3, 4), "unknown" in request.node.name
    match = "not verified .*: it does not repeat itself"
    with pytest.warns(UserWarning, match=match) if unknown else nullcontext():
        ensemble(x)
    assert len({tuple(ensemble(x)[0].flatten().tolist()) for _ in range(30)}) == (30 if unknown else 2)


class Pyramid(WithLinear):
    """Returns a list, which the code around it unpacks."""

    def forward(self, x):
        return [self.a(x), x]


@pytest.mark.parametrize("unpack", [lambda f: sum(f), lambda f: torch.add(*f)])
def test_a_part_is_looked_into_where_its_output_is_unpacked(unpack):
    def run(net, x):
        return net.b(net.act(unpack(net.two(net.a(x)))))

    network = made(run, two=Pyramid(), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    for name in ("a", "act", "two.a"):
        assert_members_are_themselves(Ensemble(network, 2, share_after=name).eval(), torch.randn(2, 4))


# ---------------------------------------------------------------- verification: what tracing cannot see


def doubled(net, x):
    h = net.a(x)
    return net.b(2 * h if isinstance(h, torch.Tensor) else h)


def tries(net, x):
    h = net.a(x)
    with suppress(Exception):
        h = h * int(h.shape[1])
    return net.b(h)


FOOLED = made(doubled)
OTHERS = "in two pieces its outputs are others"


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("run", [doubled, tries])
def test_what_tracing_takes_for_something_else_is_found_out(run, mode):
    ensemble = Ensemble(made(run), 2, share_after="a").train(mode)
    with pytest.raises(CannotSplitError, match=OTHERS):
        ensemble(torch.randn(6, 4))


class Reverse(torch.autograd.Function):
    """Does nothing on the way, so that tracing meets nothing; turns the gradient round."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


@pytest.mark.parametrize("start", [nn.init.normal_, nn.init.zeros_])  # a head at zero must hide nothing
def test_gradients_of_what_changes_no_output(start):
    def build():
        network = made(lambda net, x: net.b(Reverse.apply(net.a(x))))()
        start(network.b.weight)
        return network

    with pytest.raises(CannotSplitError, match="in two pieces its gradients are others"):
        Ensemble(build, 2, share_after="a")(torch.randn(3, 4))


def test_verification_changes_nothing():
    """Neither weights, nor running statistics, nor random numbers: the first step is as every other."""

    class Norm(nn.BatchNorm1d):
        def __init__(self):
            super().__init__(5)

    ensemble = Ensemble(around(Norm, nn.Dropout), 2, share_after="1")
    x = torch.randn(6, 4)
    random.seed(5)  # not the seed of the verification
    np.random.seed(5)  # noqa: NPY002
    before = {key: value.clone() for key, value in ensemble.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    ensemble.check(x)
    assert ensemble._unverified == {False}
    assert torch.get_rng_state().equal(states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    assert all(value.equal(before[key]) for key, value in ensemble.state_dict().items())
    assert all(p.grad is None for p in ensemble.parameters())


@pytest.mark.parametrize("around_it", [torch.no_grad, torch.inference_mode])
def test_also_where_no_gradients_are_wanted(around_it):
    with around_it(), pytest.raises(CannotSplitError, match=OTHERS):
        Ensemble(FOOLED, 2, share_after="a").eval()(torch.randn(3, 4))
    with around_it():
        assert Ensemble(around(Act), 2, share_after="0").eval()(torch.randn(3, 4)).shape == (2, 3, 3)


def test_a_shared_stem_is_verified_too():
    for freeze, mode in product((False, True), repeat=2):
        ensemble = SharedStemEnsemble(FOOLED, 2, stem="a", freeze=freeze).train(mode)
        with pytest.raises(CannotSplitError, match=f"after 'a': {OTHERS}"):
            ensemble(torch.randn(3, 4))
    # A frozen stem is compared in eval mode, as it was traced: dropout does nothing there.
    network = made(lambda net, x: net.b(net.act(F.dropout(net.a(x), 0.5, net.training))))
    ensemble = SharedStemEnsemble(network, 2, stem="act", freeze=True).train()
    x = torch.randn(3, 4)
    assert ensemble(x).equal(ensemble(x))


def test_every_kind_of_member_is_verified():
    class Other(Made):
        pass

    with pytest.raises(CannotSplitError, match=f"Other cannot be split after 'a': {OTHERS}"):
        Ensemble([made(plain)(), made(doubled, Other)()], share_after="a")(torch.randn(3, 4))


def test_only_logits_are_compared():
    """Other outputs, however large, do not hide them."""
    network = made(lambda net, x: {"logits": doubled(net, x), "h": 1000 * x})
    ensemble = Ensemble(network, 2, share_after="a", output=lambda answer: answer["logits"])
    with pytest.raises(CannotSplitError, match=OTHERS):
        ensemble(torch.randn(3, 4))


def test_checkpointing_around_the_ensemble():
    ensemble = Ensemble(around(nn.ReLU), 2, share_after="0")
    x = torch.randn(6, 4, requires_grad=True)
    checkpoint(ensemble, x, use_reentrant=False).sum().backward()
    assert all(p.grad is not None for p in ensemble.parameters())
    assert ensemble._unverified == {False}


def test_verification_waits_for_enough_examples():
    def build():
        return made(lambda net, x: doubled(net, net.norm(x)), norm=nn.BatchNorm1d(4))()

    ensemble = Ensemble(build, 2, share_after="a")
    for too_few in (0, 1):
        with suppress(ValueError):  # batch normalisation's own
            ensemble(torch.randn(too_few, 4))
    assert ensemble._unverified == {True, False}
    with pytest.raises(CannotSplitError, match="in two pieces"):
        ensemble(torch.randn(2, 4))


def test_a_network_that_asks_for_more_than_two_examples():
    """It is compared on all of them."""
    network = made(lambda net, x: net.sign * net.b(net.a(x).view(8, 4)), sign=1)
    ensemble = Ensemble(network, 2, share_after="a")
    for member in ensemble.members:
        member.sign = -1  # traced as 1
    with pytest.raises(CannotSplitError, match=OTHERS):
        ensemble(torch.randn(8, 4))


def test_sparse_gradients_and_other_default_types():
    ensemble = Ensemble(made(doubled, a=nn.Embedding(9, 4, sparse=True)), 2, share_after="a")
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(CannotSplitError, match=OTHERS):
            ensemble(torch.randint(9, (3,)))
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_cannot_be_verified_is_said_once(monkeypatch):
    ensemble = Ensemble(around(nn.ReLU), 2, share_after="0")
    for member in ensemble.members:
        member.table = torch.ones(1, requires_grad=True) * 2  # torch copies no tensor that was computed
    with pytest.warns(UserWarning, match="not verified .*: it cannot be copied"):
        ensemble(torch.randn(3, 4))
    ensemble(torch.randn(3, 4))
    ensemble = Ensemble(around(nn.ReLU), 2, share_after="0")

    def fail(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(ensemble, "_in_pieces", fail)
    with pytest.warns(UserWarning, match="Sequential was split after .0.,.* there is not enough memory"):
        assert ensemble(torch.randn(3, 4)).shape == (2, 3, 3)


def test_a_network_that_cannot_be_copied_is_split_all_the_same():
    def build():
        network = made(plain)()
        network.lock = Lock()
        return network

    ensemble, x = Ensemble(build, 2, share_after="a", share_at_test="off").eval(), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="not verified .*: it cannot be copied"):
        logits = ensemble(x)
    torch.testing.assert_close(logits, torch.stack([member(x) for member in ensemble.members]))
    assert [layer.problem for layer in shareable_layers(build(), x)][:1] == [None]


def test_pieces_that_fail_and_a_network_that_fails():
    broken = Ensemble(made(plain), 2, share_after="a")
    broken.trunks = [lambda member, h, rest: 1 / 0] * 2
    with pytest.raises(CannotSplitError, match="in two pieces it fails .division by zero"):
        broken(torch.randn(3, 4))

    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Ensemble(around(Fails), 2, share_after="0")(torch.randn(3, 4))


def test_transformed_ensembles_are_not_verified():
    """Under torch.func, torch.compile and torch.export there is nothing to compare; they work as ever."""
    ensemble = Ensemble(around(nn.ReLU), 2, share_after="0", share_at_test="off").eval()
    x = torch.randn(3, 4)
    jacobian = torch.func.jacrev(lambda x: ensemble(x).sum(0))(x)
    assert jacobian.shape == (3, 3, 3, 4)
    exported = torch.export.export(ensemble, (x,)).module()
    assert ensemble._unverified == {True, False}
    torch.testing.assert_close(exported(x), ensemble(x))


# ---------------------------------------------------------------- shareable_layers


def suggested(layers):
    (layer,) = [layer for layer in layers if layer.suggested]
    return layer


def by_name(layers):
    return {layer.name: layer for layer in layers}


@pytest.mark.parametrize("name", KINDS)
def test_every_layer_offered_can_be_split_and_the_others_cannot(name):
    network, inputs, _, expected = KINDS[name]
    net, x = network(), inputs()
    layers = shareable_layers(net, x)
    assert suggested(layers).name == expected
    assert (suggested(layers).problem, suggested(layers).bypassed) == (None, False)
    for layer in layers:
        if layer.problem is not None and layer.shape is not None:
            with pytest.raises(ValueError, match="cannot be split"):
                split(net, layer.name)
        elif layer.problem is None:
            halves = split(net, layer.name)
            for mode in (True, False):
                net.train(mode)
                torch.manual_seed(1)
                h, rest = halves.stem(net, x)
                together = halves.trunk(net, h, rest)
                torch.manual_seed(1)
                torch.testing.assert_close(together, net(x))
            assert tuple(h.shape[1:]) == layer.shape
            tensors = [value for value in rest if isinstance(value, torch.Tensor)]
            assert layer.bypassed or all(t.equal(x) or not t.is_floating_point() for t in tensors), layer


def test_problems_and_skips():
    layers = by_name(shareable_layers(ResNet(), images()))
    assert layers["layer1.0.relu"].problem == "it must be called once in forward, not 2 times"
    assert layers["fc"].problem == "it is the network's output"
    assert layers["layer1.0.conv1"].bypassed
    assert not layers["layer1.0"].bypassed
    assert layers["layer2"].shape == (16, 4, 4)
    layers = by_name(shareable_layers(UNet(), images()))
    assert not layers["down1"].bypassed
    assert all(layers[name].bypassed for name in ("pool", "down2", "bottom", "up2", "merge2", "up1"))


def test_other_outputs_and_dead_ends():
    class Rounds(nn.Module):
        def forward(self, x):
            return x.long()

    def odd(net, x):
        h, state = net.rnn(x)
        net.log(state)
        return net.b(h + net.round(h))

    layers = shareable_layers(made(odd, rnn=nn.GRU(4, 4), log=nn.Tanh(), round=Rounds())(), torch.randn(2, 4))
    assert {layer.name: (layer.shape, layer.problem) for layer in layers} == {
        "rnn": (None, "its output is tuple, not a floating-point tensor"),
        "log": ((4,), "nothing after it uses its output"),
        "round": ((4,), "its output is a torch.int64 tensor of shape (2, 4), not a floating-point tensor"),
        "b": ((3,), "it is the network's output"),
    }
    assert not any(layer.suggested for layer in layers)


class Twice(Routed):
    def forward(self, x):
        return super().forward(x), x


class Unpacks(nn.Module):
    """Calls `join` in another way when `two` is kept whole, and so not known to return a tuple."""

    def __init__(self):
        super().__init__()
        self.two, self.join = Twice(), nn.Bilinear(5, 5, 5)

    def forward(self, x):
        h = self.two(x)
        return self.join(*h) if isinstance(h, tuple) else self.join(h)


@pytest.mark.parametrize(("part", "inside"), [(Routed, "2.a"), (Unpacks, "2.join")])
def test_inside_a_part_that_cannot_be_traced(part, inside):
    """Around it the network can be split."""

    def build():
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), part(), nn.Linear(5, 3))

    network, x = build(), vectors()
    network[0].weight.data *= network[:2](x).sum().sign()  # so that all parts run
    layers = by_name(shareable_layers(network, x))
    assert [name for name in layers if layers[name].problem is None] == ["0", "1", "2"]
    assert layers[inside].problem.startswith("torch.fx cannot trace")
    with pytest.raises(ValueError, match=f"cannot be split after '{inside}': torch.fx cannot trace"):
        Ensemble(build, 2, share_after=inside)


def test_one_of_two_branches():
    """The input goes to the other branch as well: features are suggested where both have met."""
    network = made(
        lambda net, x: net.b(net.pool(net.act(net.wide(x) + net.narrow(x))).flatten(1)),
        wide=nn.Conv2d(3, 4, 3, padding=1),
        narrow=nn.Conv2d(3, 4, 1),
        pool=nn.MaxPool2d(2),
        b=nn.Linear(4 * 16 * 16, 3),
    )
    layers = by_name(shareable_layers(network(), images()))
    assert [layers[name].bypassed for name in ("wide", "narrow", "act")] == [True, True, False]
    assert layers["act"].suggested


def test_a_function_that_builds_a_network():
    with pytest.raises(TypeError, match=r"Got type. Call it first: shareable_layers\(build\(\), x\)"):
        shareable_layers(Routed, vectors())
    with pytest.raises(TypeError, match=r"Got int 3\.$"):
        shareable_layers(3, vectors())


def only_in_eval(net, x):
    h = net.act(net.a(x))
    return net.b(2 * h if net.training and h.mean() > 0 else h)


def skips_in_training(net, x):
    h = net.a(x)
    return net.b(net.act(h) + h if net.training else net.act(h))


def twice_in_training(net, x):
    h = net.a(x)
    return net.b(net.a(h) if net.training else h)


def test_both_modes_count():
    """An ensemble is split in train mode and in eval mode."""
    x = torch.randn(2, 4)
    for layer in shareable_layers(made(only_in_eval)().eval(), x):
        assert layer.problem.startswith("torch.fx cannot trace")
        with pytest.raises(ValueError, match="torch.fx cannot trace"):
            Ensemble(made(only_in_eval), 2, share_after=layer.name)
    layers = by_name(shareable_layers(made(skips_in_training)().eval(), x))
    assert [layers[name].bypassed for name in ("a", "act")] == [False, True]
    layer = shareable_layers(made(twice_in_training)(), x)[0]
    assert layer.problem == "it must be called once in forward, not 2 times"


def test_weights_are_no_features():
    """A parametrization is a submodule too, called with a weight."""

    def normed():
        layers = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 3)
        return nn.Sequential(*layers)

    layers = by_name(shareable_layers(normed(), vectors()))
    assert layers["0.parametrizations.weight"].problem == "its output does not depend on the input"
    assert [name for name, layer in layers.items() if layer.problem is None] == ["0", "1"]
    with pytest.raises(ValueError, match="its output does not depend on the input"):
        Ensemble(normed, 2, share_after="0.parametrizations.weight")
    assert layers["1"].suggested


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_parts_are_layers():
    def scripted():
        return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(6, 5), nn.ReLU())), nn.Linear(5, 3))

    layer = suggested(shareable_layers(scripted(), vectors()))
    assert (layer.name, layer.shape) == ("0", (5,))
    assert Ensemble(scripted, 2, share_after="0")(vectors()).shape == (2, 3, 3)


ROWS = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 1), nn.ReLU(), nn.Conv1d(2, 2, 1), nn.ReLU()


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([nn.Dropout(), nn.Linear(6, 5), nn.Linear(5, 3)], "1"),  # no activation, and no dropout
        ([nn.Linear(6, 5), nn.Dropout(), nn.Tanh(), nn.Linear(5, 3)], "2"),
        ([nn.Linear(6, 3)], None),
        # rows are pooled, or every second is left out: the layer before that, not the first activation
        ([*ROWS, nn.MaxPool1d(2), nn.Flatten(), nn.Linear(6, 2)], "4"),
        ([*ROWS, nn.Conv1d(2, 2, 1, stride=2), nn.Flatten(), nn.Linear(6, 2)], "4"),
        ([*ROWS, nn.Conv1d(2, 2, 3), nn.Flatten(), nn.Linear(8, 2)], "2"),  # only the border is lost
    ],
)
def test_the_suggestion_for_vectors(layers, expected):
    found = shareable_layers(nn.Sequential(*layers), vectors())
    assert [layer.name for layer in found if layer.suggested] == ([expected] if expected else [])


@pytest.mark.parametrize("name", ["cnn", "vggnet17", "resnet20", "fcn"])
def test_our_networks_are_split_where_the_paper_says(name):
    network = cmcl.networks.NETWORKS[name]()
    layer = suggested(shareable_layers(network, images(1)))
    assert (layer.name, layer.bypassed) == ("stem", name == "fcn")
    if name in ("vggnet17", "resnet20"):  # without the names stem and trunk the rule finds the same features
        flat = nn.Sequential(*network.stem, *network.trunk)
        assert suggested(shareable_layers(flat, images(1))).name == str(len(network.stem) - 1)


class Skipping(nn.Module):
    """s[i + 1] = relu(layer i of s[i]) + s[skips[i]], where skips[i] is not None; s[0] is the input."""

    def __init__(self, skips):
        super().__init__()
        self.skips = skips
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in skips)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        states = [x]
        for layer, skip in zip(self.layers, self.skips, strict=True):
            h = torch.relu(layer(states[-1]))
            states.append(h if skip is None else h + states[skip])
        return self.head(states[-1])


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(*(st.none() | st.integers(0, i) for i in range(n)))))
@settings(max_examples=25, deadline=None)
def test_any_pattern_of_skips(skips):
    """A layer is bypassed if a state that is older, but not the input, is added at its layer or later."""
    net, x = Skipping(skips).eval(), torch.randn(2, 3)
    layers = by_name(shareable_layers(net, x))
    for i in range(len(skips)):
        layer = layers[f"layers.{i}"]
        later = [skip for skip in skips[i:] if skip is not None]
        assert layer.problem is None
        assert layer.bypassed == any(1 <= skip <= i for skip in later)
        halves = split(net, layer.name)
        torch.testing.assert_close(halves.trunk(net, *halves.stem(net, x)), net(x))


def test_sizes_of_features_bypass_nothing():
    def reads_sizes(net, x):
        h = net.a(x)
        return net.b(net.act(h).reshape(h.size(0) * 1, h.shape[-1])) * h.dim()

    layers = by_name(shareable_layers(made(reads_sizes)(), torch.randn(2, 4)))
    assert not layers["act"].bypassed


def test_listing_leaves_the_network_as_it_was():
    net = ResNet().train()
    net.bn1.eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    shareable_layers(net, images())
    assert net.training
    assert not net.bn1.training
    assert all(value.equal(before[key]) for key, value in net.state_dict().items())
    hooks = nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


@pytest.fixture
def command():
    app = typer.Typer()
    app.command()(layers_command)
    return lambda *words: CliRunner().invoke(app, words)


class TestLayersCommand:
    def test_ours_by_name(self, command):
        lines = command("resnet20", "--usable").stdout.splitlines()
        assert lines[0].split() == ["share_after", "kind", "output", "note"]
        assert lines[1].split() == ["stem", "Sequential", "16", "×", "32", "×", "32", "suggested"]
        options = ["--input", "1,16,16", "--option", "channels=1", "--option", "size=16", "--json"]
        found = json.loads(command("cnn", *options).stdout)
        assert (found[0]["name"], found[0]["shape"]) == ("stem", [128, 12, 12])
        out = command("lookalikes:Words", "--input", "7", "--tokens", "20").stdout
        assert [line.split()[0] for line in out.splitlines() if "suggested" in line] == ["blocks.0"]

    def test_a_users_own(self, command, tmp_path, monkeypatch):
        (tmp_path / "mynet.py").write_text(
            "from torch import nn\ndef build(width=5):\n    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))\nnumber = 3\ndef wrong():\n    return 3\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", sys.path[:])
        monkeypatch.delitem(sys.modules, "mynet", raising=False)
        out = command("mynet:build", "--input", "4", "--option", "width=7").stdout
        assert [line.split()[0] for line in out.splitlines() if "suggested" in line] == ["1"]
        assert " 7 " in out
        for words, message in {
            ("mynet:nothing",): "mynet must have the function nothing",
            ("mynet:number",): "mynet:number must be a function.* Got int",
            ("mynet:wrong",): "mynet:wrong must return a torch.nn.Module. Got int",
            ("mynet:build", "--option", "depth=2"): "takes the options given.*depth",
            ("noone:build",): "noone must be a Python module",
            ("mynet",): "the network must be one of cnn, .* or MODULE:FUNCTION.* Got 'mynet'",
            ("mynet:build", "--input", "4,x"): "--input must be sizes of one input.*Got '4,x'",
        }.items():
            with pytest.raises((ValueError, TypeError), match=message):
                raise command(*words).exception
