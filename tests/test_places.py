"""Where features can be shared: every place that is offered really cuts, and every refusal says why."""

import json
import sys

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import cmcl
from cmcl import Ensemble, shareable_layers
from cmcl.cli.explore import layers as places_command
from cmcl.splitting import split
from lookalikes import KINDS, ResNet, UNet, images, mlp, vectors


def suggested(places):
    (place,) = [place for place in places if place.suggested]
    return place


@pytest.mark.parametrize("name", KINDS)
def test_the_suggestion(name):
    network, inputs, _, expected = KINDS[name]
    place = suggested(shareable_layers(network(), inputs()))
    assert place.name == expected
    assert place.problem is None
    assert not place.bypassed


@pytest.mark.parametrize("name", KINDS)
def test_every_place_offered_can_be_cut_and_the_others_cannot(name):
    network, inputs, *_ = KINDS[name]
    net, x = network().eval(), inputs()
    for place in shareable_layers(net, x):
        if place.problem is None:
            halves = split(net, place.name)
            h, rest = halves.stem(net, x)
            assert tuple(h.shape[1:]) == place.shape
            tensors = [value for value in rest if isinstance(value, torch.Tensor)]
            assert place.bypassed or all(t.equal(x) or not t.is_floating_point() for t in tensors), place
            torch.testing.assert_close(halves.trunk(net, h, rest), net(x))
        elif place.shape is not None:
            with pytest.raises(ValueError, match="cannot be split"):
                split(net, place.name)


def by_name(places):
    return {place.name: place for place in places}


def test_why_not():
    places = by_name(shareable_layers(ResNet(), images()))
    assert places["layer1.0.relu"].problem == "it is called 2 times"
    assert places["fc"].problem == "it is the network's output"
    assert places["layer1.0.conv1"].bypassed
    assert not places["layer1.0"].bypassed
    assert places["layer2"].shape == (16, 4, 4)


def test_skips_pass_by_all_of_a_u_net_but_its_first_level():
    places = by_name(shareable_layers(UNet(), images()))
    assert not places["down1"].bypassed
    assert all(places[name].bypassed for name in ("pool", "down2", "bottom", "up2", "merge2", "up1"))


def test_other_outputs_and_dead_ends():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.log, self.head = nn.GRU(6, 5), nn.Tanh(), nn.Linear(5, 3)

        def forward(self, x):
            h, state = self.rnn(x)
            self.log(state)
            return self.head(h)

    places = by_name(shareable_layers(Odd(), vectors()))
    assert places["rnn"].problem == "its output is a tuple, not one tensor"
    assert places["rnn"].shape is None
    assert places["log"].problem == "nothing after it uses its output"
    assert not any(place.suggested for place in places.values())


def test_what_cannot_be_traced():
    class Depends(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.b(self.a(x) if x.sum() > 0 else -self.a(x))

    for place in shareable_layers(Depends(), vectors()):
        assert place.problem.startswith("torch.fx cannot trace it")


class Routed(nn.Module):
    """Sends its input one way or another."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x


class Unpacks(nn.Module):
    """Calls `join` in another way when `two` is kept whole, and so not known to return a tuple."""

    def __init__(self):
        super().__init__()
        self.two, self.join = Twice(), nn.Bilinear(5, 5, 5)

    def forward(self, x):
        h = self.two(x)
        return self.join(*h) if isinstance(h, tuple) else self.join(h)


class Twice(Routed):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize("part", [Routed, Unpacks])
def test_inside_a_part_that_cannot_be_traced(part):
    """Around it the network can be cut; inside, the reason names the part."""

    def build():
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), part(), nn.Linear(5, 3))

    network, x, inside = build(), vectors(), "2.join" if part is Unpacks else "2.a"
    network[0].weight.data *= network[:2](x).sum().sign()  # so that all parts run
    places = by_name(shareable_layers(network, x))
    assert [name for name in places if places[name].problem is None] == ["0", "1", "2"]
    assert places[inside].problem.startswith("torch.fx cannot trace '2', which holds it (")
    with pytest.raises(ValueError, match=f"cannot be split after '{inside}': torch.fx cannot trace it"):
        Ensemble(build, 2, share_after=inside)
    for name in ("0", "1", "2"):
        ensemble = Ensemble(build, 2, share_after=name, share_at_test="off").eval()
        for sign in (1, -1):  # both ways, not only the one that a trace would have taken
            torch.testing.assert_close(ensemble(sign * x)[0], ensemble.members[0](sign * x))


def test_one_of_two_branches():
    """The input goes to the other branch as well: features are suggested where both have met."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
            self.act, self.pool, self.head = nn.ReLU(), nn.MaxPool2d(2), nn.LazyLinear(3)

        def forward(self, x):
            x = self.act(self.wide(x) + self.narrow(x))
            return self.head(self.pool(x).flatten(1))

    x = images()
    network = Branches()
    network(x)
    places = by_name(shareable_layers(network, x))
    assert [places[name].bypassed for name in ("wide", "narrow", "act")] == [True, True, False]
    assert places["act"].suggested


def test_a_function_that_builds_a_network():
    with pytest.raises(TypeError, match=r"Got type. Call it first: shareable_layers\(build\(\), x\)"):
        shareable_layers(Routed, vectors())


class Stochastic(nn.Module):
    """Is traced in eval mode, and not in train mode."""

    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)

    def forward(self, x):
        h = self.act(self.a(x))
        if self.training and h.mean() > 0:
            h = 2 * h
        return self.b(h)


class SkipsInTraining(Stochastic):
    def forward(self, x):
        h = self.a(x)
        return self.b(self.act(h) + h if self.training else self.act(h))


def test_both_modes_count():
    """An ensemble is cut in train mode and in eval mode."""
    for place in shareable_layers(Stochastic().eval(), vectors()):
        assert place.problem.startswith("torch.fx cannot trace it")
        with pytest.raises(ValueError, match="torch.fx cannot trace it"):
            Ensemble(Stochastic, 2, share_after=place.name)
    places = by_name(shareable_layers(SkipsInTraining().eval(), vectors()))
    assert [places[name].bypassed for name in ("a", "act")] == [False, True]


def test_weights_are_no_features():
    """A parametrization is a submodule too, called with a weight."""

    def normed():
        layers = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 3)
        return nn.Sequential(*layers)

    places = by_name(shareable_layers(normed(), vectors()))
    assert places["0.parametrizations.weight"].problem == "its output does not depend on the input"
    assert [name for name, place in places.items() if place.problem is None] == ["0", "1"]
    with pytest.raises(ValueError, match="its output does not depend on the input"):
        Ensemble(normed, 2, share_after="0.parametrizations.weight")
    assert places["1"].suggested


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_parts_are_places():
    def scripted():
        return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(6, 5), nn.ReLU())), nn.Linear(5, 3))

    place = suggested(shareable_layers(scripted(), vectors()))
    assert (place.name, place.shape) == ("0", (5,))
    assert Ensemble(scripted, 2, share_after="0")(vectors()).shape == (2, 3, 3)


@pytest.mark.parametrize("name", ["cnn", "resnet20", "fcn"])
def test_our_networks_are_cut_where_the_paper_says(name):
    place = suggested(shareable_layers(cmcl.networks.NETWORKS[name](), images(1)))
    assert place.name == "stem"
    assert place.bypassed == (name == "fcn")


@pytest.mark.parametrize("name", ["vggnet17", "resnet20"])
def test_the_rule_finds_the_papers_place_by_itself(name):
    """Without being told of stem and trunk, the rule ends up at the same features."""
    network = cmcl.networks.NETWORKS[name]()
    flat = nn.Sequential(*network.stem, *network.trunk)  # the same layers, unnamed
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
    """A place is crossed if a state that is older, but not the input, is added at its layer or later."""
    net, x = Skipping(skips).eval(), torch.randn(2, 3)
    places = by_name(shareable_layers(net, x))
    for i in range(len(skips)):
        place = places[f"layers.{i}"]
        later = [skip for skip in skips[i:] if skip is not None]
        assert place.problem is None
        assert place.bypassed == any(1 <= skip <= i for skip in later)
        halves = split(net, place.name)
        torch.testing.assert_close(halves.trunk(net, *halves.stem(net, x)), net(x))


def test_methods_called_stem_and_trunk():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

        def stem(self, x):
            return self.a(x).relu()

        def trunk(self, h):
            return self.b(h)

        def forward(self, x):
            return self.trunk(self.stem(x))

    place = suggested(shareable_layers(Own(), vectors()))
    assert place[:4] == ("stem", "method", (5,), None)


def test_looking_leaves_the_network_as_it_was():
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


def test_a_function_is_no_network():
    with pytest.raises(TypeError, match="network must be a torch.nn.Module. Got function"):
        shareable_layers(mlp, vectors())


@pytest.fixture
def command():
    app = typer.Typer()
    app.command()(places_command)
    return lambda *words: CliRunner().invoke(app, words)


class TestCommand:
    def test_ours_by_name(self, command):
        lines = command("resnet20", "--usable").stdout.splitlines()
        assert lines[0].split() == ["share_after", "kind", "output", "note"]
        assert lines[1].split() == ["stem", "Sequential", "16", "×", "32", "×", "32", "suggested"]

    def test_json(self, command):
        found = json.loads(
            command(
                "cnn", "--input", "1,16,16", "--option", "channels=1", "--option", "size=16", "--json"
            ).stdout
        )
        assert found[0]["name"] == "stem"
        assert found[0]["shape"] == [128, 12, 12]

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
            ("noone:build",): "noone must be a Python module that can be imported",
            ("mynet",): "the network must be one of cnn, .* or MODULE:FUNCTION.* Got 'mynet'",
            ("mynet:build", "--input", "4,x"): "--input must be sizes of one input.*Got '4,x'",
        }.items():
            with pytest.raises((ValueError, TypeError), match=message):
                raise command(*words).exception

    def test_words(self, command):
        out = command("lookalikes:Words", "--input", "7", "--tokens", "20").stdout
        assert [line.split()[0] for line in out.splitlines() if "suggested" in line] == ["blocks.0"]


def test_the_suggestion_trains():
    place = suggested(shareable_layers(ResNet(), images()))
    ensemble = Ensemble(ResNet, 2, share_after=place.name)
    cmcl.confident_oracle_loss(ensemble(images()), torch.tensor([0, 1, 2])).total.backward()
