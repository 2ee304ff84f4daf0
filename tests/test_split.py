"""Cutting networks: the two halves together are the network, whatever crosses the cut."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cmcl import Ensemble
from cmcl.splitting import split


class Block(nn.Module):
    """A residual block with functional dropout and an input that skips ahead."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.dropout(F.relu(self.bn(self.conv(x))), 0.5, self.training) + x


class Net(nn.Module):
    """Skips across the cut, reads a buffer and a size after it, and has an argument with a default."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.body = nn.Sequential(Block(4), nn.ReLU(), Block(4))
        self.act = nn.ReLU()
        self.head = nn.Linear(4, 10)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, extra=None, flag=True):
        start = self.first(x) * self.scale
        if extra is not None:
            start = start + extra
        h = start
        for block in self.blocks:
            h = block(h)
        h = self.body(h)
        h = self.act(h) * self.scale + start + x.mean(1, keepdim=True) if flag else h
        return self.head(h.mean((2, 3)).view(x.size(0), -1))


NAMES = ["first", "blocks.0", "blocks.1.conv", "blocks.1", "body.0.bn", "body.1", "body", "act"]


@pytest.mark.parametrize("name", NAMES)
def test_stem_then_trunk_is_the_network(name):
    net, x = Net(), torch.randn(2, 3, 6, 6)
    halves = split(net, name)
    for mode in (False, True):
        net.train(mode)
        torch.manual_seed(1)
        h, rest = halves.stem(net, x)
        logits = halves.trunk(net, h, rest)
        torch.manual_seed(1)
        torch.testing.assert_close(logits, net(x))


@pytest.mark.parametrize("name", ["blocks.1.conv", "body.1", "act"])
def test_the_shared_feature_is_that_modules_output(name):
    net, x = Net().eval(), torch.randn(2, 3, 6, 6)
    seen = []
    with net.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out)):
        net(x)
        h, _ = split(net, name).stem(net, x)
    assert h.equal(seen[0])


def test_functional_dropout_follows_the_mode():
    """Tracing freezes self.training; the cut must not."""
    ensemble = Ensemble(Net, 2, share_after="blocks.0")
    x = torch.randn(2, 3, 6, 6)
    ensemble.share_at_test = "off"
    ensemble.eval()
    assert ensemble(x).equal(ensemble(x))
    assert torch.allclose(ensemble(x), torch.stack([member(x) for member in ensemble.members]), atol=1e-6)
    ensemble.train()
    zeros = torch.zeros(2, 2, 2, 4, 6, 6, dtype=torch.bool)
    assert not ensemble(x, masks=zeros).equal(ensemble(x, masks=zeros))


def test_splitting_leaves_the_network_as_it_was():
    net = Net()
    net.train()
    net.blocks[0].bn.eval()  # frozen
    keys = list(net.state_dict())
    split(net, "body.1")
    assert net.training
    assert not net.blocks[0].bn.training
    assert list(net.state_dict()) == keys


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
    assert ensemble.double()(x.double()).dtype == torch.float64, "buffers read after the cut moved too"


class OwnHalves(nn.Module):
    """Cannot be traced (its depth depends on the data), but says itself where it is cut."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def stem(self, x):
        return (F.relu(self.a(x)), x) if x.sum() > 0 else (self.a(x), x)

    def trunk(self, h, x):
        return self.b(h) + x[:, :3]

    def forward(self, x):
        return self.trunk(*self.stem(x))


def test_a_network_that_offers_stem_and_trunk_needs_no_tracing():
    ensemble = Ensemble(OwnHalves, 3, share_after="stem", share_at_test="off").eval()
    x = torch.randn(2, 4)
    torch.testing.assert_close(ensemble(x), torch.stack([member(x) for member in ensemble.members]))


class Reuses(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.unused = nn.Linear(4, 4), nn.ReLU(), nn.ReLU()
        self.logger = nn.Identity()

    def forward(self, x):
        self.logger(x)
        return self.act(self.a(self.act(x)))


CANNOT = {
    "a typo": (
        Net,
        "block.0",
        "share_after must name a submodule of Net. Got 'block.0'; the nearest are 'blocks",
    ),
    "data-dependent": (
        OwnHalves,
        "a",
        "torch.fx cannot trace it .*two methods, stem\\(x\\) and trunk\\(h\\)",
    ),
    "called twice": (Reuses, "act", "must be called once in forward, not 2 times"),
    "never called": (Reuses, "unused", "must be called once in forward, not 0 times"),
    "its output is not used": (Reuses, "logger", "nothing after it uses its output"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_cut_says_why_and_the_way_out(case):
    network, name, message = CANNOT[case]
    with pytest.raises(ValueError, match=message):
        Ensemble(network, 2, share_after=name)


class HeadOutside(nn.Module):
    """Submodules that happen to be called stem and trunk; forward does more than call them."""

    def __init__(self):
        super().__init__()
        self.stem, self.trunk, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.trunk(self.stem(x).relu()).relu())


def test_submodules_called_stem_and_trunk_are_not_taken_for_the_whole():
    ensemble = Ensemble(HeadOutside, 2, share_after="stem", share_at_test="off").eval()
    x = torch.randn(5, 4)
    torch.testing.assert_close(ensemble(x), torch.stack([member(x) for member in ensemble.members]))


class TwoInputs(Reuses):
    def forward(self, x, mask):
        return self.a(x) * mask


class OnlyArgs(Reuses):
    def forward(self, *args):
        return self.a(args[0])


class ListDefault(Reuses):
    def forward(self, x, sizes=(1, 2)):
        return self.act(self.a(x))


class Counts(Reuses):
    """Assigns a buffer; `self.count.add_(1)` would do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.act(self.a(x))


class Averages(Counts):
    """Assigns a buffer in training only, and reads it in eval mode too."""

    def forward(self, x):
        if self.training:
            self.count = x.detach().mean()
        return self.act(self.a(x - self.count))


class Remembers(Reuses):
    """Assigns what is no buffer, in a part that tracing looks into."""

    def __init__(self):
        super().__init__()
        self.inner = Reuses()
        self.inner.last = None

    def forward(self, x):
        self.inner.last = self.a(x)
        return self.act(self.inner.last)


class Fails(Counts):
    def forward(self, x):
        self.count = self.a(x).mean()
        return self.act(self.count) if self.count > 0 else self.count


class MakesNoise(Reuses):
    def forward(self, x):
        return self.act(self.a(x) + torch.randn(4))


FROZEN = {
    "a buffer that counts": (Counts, "its forward assigns 'count', .*self.count.add_"),
    "an average": (Averages, "its forward assigns 'count'"),
    "another attribute": (Remembers, "its forward assigns 'inner.last'"),
    "needs another argument": (TwoInputs, "its forward needs 'mask' besides the input"),
    "no named input": (OnlyArgs, "its forward must name its input"),
    "a container for a default": (ListDefault, "its forward needs 'sizes' besides the input"),
    "noise that tracing would freeze": (MakesNoise, "it draws random numbers in Python, which a trace would"),
}


@pytest.mark.parametrize("case", FROZEN)
def test_what_tracing_would_get_wrong_is_refused(case):
    network, message = FROZEN[case]
    with pytest.raises(ValueError, match=message):
        split(network(), "a")


@pytest.mark.parametrize("build", [MakesNoise, Counts, Averages, Remembers, Fails])
def test_refusing_leaves_the_network_as_it_was(build):
    def attributes(network):
        return {
            name: (dict(vars(part)), dict(part._buffers), list(part._modules))
            for name, part in network.named_modules()
        }

    network = build()
    before = attributes(network)
    with pytest.raises(ValueError, match=f"{build.__name__} cannot be split after 'a'"):
        split(network, "a")
    assert attributes(network) == before
    assert network.state_dict().keys() == build().state_dict().keys()


class Buffers(nn.Module):
    """Computes with buffers, whose part it takes depends on the input, and writes into one."""

    def __init__(self):
        super().__init__()
        self.embedding, self.act, self.head = nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 3)
        self.register_buffer("positions", torch.randn(1, 20, 4))
        self.register_buffer("mask", torch.ones(20, 20).tril() / 20)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens):
        length = tokens.size(1)
        h = self.act(self.embedding(tokens) + self.positions[:, :length])
        if self.training:
            self.count.add_(1)
        h = self.mask[:length, :length] @ h
        return self.head(h.mean(1)) * torch.clamp(self.count, max=10)


@pytest.mark.parametrize("name", ["embedding", "act"])
def test_what_is_computed_from_buffers_is_computed_anew(name):
    ensemble = Ensemble(Buffers, 2, share_after=name, share_prob=0.0)
    assert [member.count.item() for member in ensemble.members] == [0, 0], "cutting runs nothing"
    for steps, length in enumerate((5, 8, 20), 1):  # not the length it was cut with
        tokens = torch.randint(9, (2, length))
        ensemble.train()(tokens)
        assert [member.count.item() for member in ensemble.members] == [steps, steps]
        ensemble.eval()
        alone = torch.stack([member(tokens) for member in ensemble.members])
        torch.testing.assert_close(ensemble(tokens), alone)
    for member in ensemble.members:
        member.positions.zero_()
    alone = torch.stack([member(tokens) for member in ensemble.members])
    torch.testing.assert_close(ensemble(tokens), alone)


class Caches(Reuses):
    """Keeps a value in a dict, by device."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        if "mean" not in self.cache:
            self.cache["mean"] = self.a.bias.mean()
        return self.act(self.a(x) + self.cache["mean"])


def test_a_cache_is_not_filled_by_tracing():
    network, x = Caches(), torch.randn(2, 4)
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
    alone = torch.stack([member(x.clone()) for member in ensemble.members])
    torch.testing.assert_close(together, alone)


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
    with around():  # where it is cut must not matter
        ensemble = Ensemble(Quiet, 2, share_after=name)
    for _ in range(2):
        ensemble(torch.randn(2, 4)).sum().backward()
    for member in ensemble.members:
        assert all(p.grad is None for p in member.first.parameters())
        assert member.second.weight.grad.abs().sum() > 0
        assert not member.mean.requires_grad


def test_logits_are_no_features():
    with pytest.raises(ValueError, match="cannot be split after 'head': it is the network's output"):
        Ensemble(HeadOutside, 2, share_after="head")


def test_features_must_be_tensors():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    with pytest.raises(
        TypeError, match="features must be tensors. Got tuple from member 0; share after a module"
    ):
        Ensemble(Recurrent, 2, share_after="rnn")(torch.zeros(2, 4))


def functions(ensemble):
    """How many functions a training loop compiles for the members."""
    return len({*ensemble.stems, *ensemble.trunks})


@pytest.mark.parametrize("members", [5, 10])
@pytest.mark.parametrize("share_after", [None, "blocks.0", "body.1", "act"])
def test_members_alike_share_one_stem_and_one_trunk(members, share_after):
    assert functions(Ensemble(Net, members, share_after=share_after)) == 2
    assert functions(Ensemble(Quiet, members, share_after="second")) == 2


class Scaled(nn.Module):
    """Decides in Python, by an attribute: the trace freezes it, so members must not share it."""

    def __init__(self, scale):
        super().__init__()
        self.a, self.act, self.b, self.scale = nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), scale

    def forward(self, x):
        h = self.act(self.a(x))
        return self.b(h * self.scale if self.scale > 1 else h)


def test_members_that_differ_have_functions_of_their_own():
    ensemble = Ensemble([Scaled(1), Scaled(2), Scaled(3), Scaled(2)], share_after="act", share_at_test="off")
    assert len(set(ensemble.stems)) == 1
    assert len(set(ensemble.trunks)) == 3
    x = torch.randn(5, 4)
    alone = torch.stack([member(x) for member in ensemble.eval().members])
    torch.testing.assert_close(ensemble(x), alone)
    mixed = Ensemble(
        [Scaled(1), nn.Sequential(OrderedDict(a=nn.Linear(4, 5), act=nn.ReLU(), b=nn.Linear(5, 3)))]
    )
    assert functions(mixed) == 2, "without sharing, a trunk is the member itself"


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
