"""Members that train as one compute what they compute one after the other."""

import copy
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import cmcl
from cmcl import Options, Recipe
from cmcl.stacking import Stacked, StackedLinear, pays, stackable

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :4].argmax(1)


def sequential():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def nested():
    body = nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(approximate="tanh"))
    return nn.Sequential(nn.Flatten(), body, nn.Sequential(nn.Identity(), nn.Linear(8, 4)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.last(x + F.relu(self.first(x)))


class Scaled(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


def ensemble(network=sequential, members=3, **options):
    torch.manual_seed(0)
    return cmcl.Ensemble(network, members, **options)


def linear(layers):
    return nn.Sequential(*layers, nn.Linear(6, 4))


SLOPES = iter(range(1, 9))


def slopes():
    return linear([nn.Linear(6, 6), nn.LeakyReLU(next(SLOPES) / 10)])


def tied():
    network = linear([nn.Linear(6, 6), nn.Linear(6, 6)])
    network[1].weight = network[0].weight
    return network


def with_a_parameter_more():
    network = linear([])
    network[0].extra = nn.Parameter(torch.ones(1))
    return network


class TestStackable:
    @pytest.mark.parametrize(
        ("network", "share_after"),
        [
            (sequential, None),
            (sequential, "0"),
            (sequential, "3"),
            (nested, None),
            (nested, "1"),
            (nested, "1.0"),
        ],
    )
    def test_chains_of_linear_layers(self, network, share_after):
        assert stackable(ensemble(network, share_after=share_after), X[:2])

    def test_layers_before_the_first_linear_one(self):
        x = X[:2].reshape(2, 1, 2, 3)
        assert stackable(ensemble(lambda: linear([nn.ReLU(), nn.Flatten()])), x)
        for layer in (nn.ReLU(), nn.Flatten(2), nn.Flatten(0), nn.Flatten(1, 2), nn.Unflatten(1, (2, 3))):
            assert not stackable(ensemble(lambda layer=layer: linear([copy.deepcopy(layer)])), x)

    def test_dropout_only_where_each_member_draws_its_own(self):
        assert stackable(ensemble(lambda: linear([nn.Linear(6, 6), nn.Dropout(0.5)])), X[:2])
        assert not stackable(ensemble(lambda: linear([nn.Dropout(0.5)])), X[:2])
        assert not stackable(ensemble(lambda: linear([nn.Linear(6, 6), nn.Dropout1d(0.5)])), X[:2])

    @pytest.mark.parametrize("network", [Residual, slopes, tied, with_a_parameter_more])
    def test_not_what_could_compute_something_else(self, network):
        assert not stackable(ensemble(network), X[:2])
        assert not stackable(ensemble(lambda: Scaled(nn.Linear(6, 4))), X[:2])

    @pytest.mark.parametrize(
        "layer",
        [
            lambda: nn.BatchNorm1d(6),
            lambda: nn.LayerNorm(6),
            lambda: nn.Softmax(1),
            lambda: nn.PReLU(),
            lambda: nn.Flatten(),
            lambda: Scaled(nn.Linear(6, 6)),
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        ],
    )
    def test_not_other_layers(self, layer):
        assert not stackable(ensemble(lambda: linear([nn.Linear(6, 6), layer()])), X[:2])

    def test_not_what_is_shared_before_the_members_differ(self):
        own = ensemble(lambda: linear([nn.Identity()]), share_after="0", share_at_test="off")
        assert not stackable(own, X[:2])

    def test_not_members_of_several_kinds(self):
        assert not stackable(cmcl.Ensemble([linear([]), linear([nn.Linear(6, 6)])]), X[:2])
        frozen = ensemble()
        frozen.members[1][0].requires_grad_(False)
        assert not stackable(frozen, X[:2])

    def test_not_members_that_have_a_layer_in_common(self):
        head = nn.Linear(8, 4)
        assert not stackable(ensemble(lambda: nn.Sequential(nn.Linear(6, 8), head)), X[:2])

    def test_not_with_hooks(self):
        own = ensemble()
        handle = own.members[1][0].register_forward_hook(lambda *args: None)
        assert not stackable(own, X[:2])
        handle.remove()
        assert stackable(own, X[:2])
        own.members[2][0].weight.register_hook(lambda gradient: gradient * 0)
        assert not stackable(own, X[:2])

    def test_not_with_layers_on_top_of_the_members(self):
        assert not stackable(ensemble(output=nn.Linear(4, 4)), X[:2])
        assert not stackable(ensemble(output=lambda logits: logits / 2), X[:2])


class TestStacked:
    @pytest.mark.parametrize("network", [sequential, nested])
    def test_logits_and_gradients(self, network):
        whole, own = ensemble(network), ensemble(network)
        stacked = Stacked(own)
        ours, theirs = stacked.logits(X), whole(X)
        torch.testing.assert_close(ours, theirs)
        for logits in (ours, theirs):
            cmcl.confident_oracle_loss(logits, Y).backward()
        for parameter, expected in zip(own.parameters(), whole.parameters(), strict=True):
            row, m = stacked.rows[parameter]
            torch.testing.assert_close(row.grad[m], expected.grad)

    def test_members_see_what_is_trained(self):
        own = ensemble()
        stacked = Stacked(own)
        before = own(X)
        with torch.no_grad():
            for parameter in stacked.network.parameters():
                parameter.mul_(2)
        assert not torch.allclose(own(X), before)
        torch.testing.assert_close(own(X), stacked.logits(X))

    def test_released_members_are_apart(self):
        own = ensemble()
        stacked, before = Stacked(own), own(X)
        stacked.release()
        with torch.no_grad():
            for parameter in stacked.network.parameters():
                parameter.zero_()
        assert torch.equal(own(X), before)
        sizes = {p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in own.parameters()}
        assert sizes == {True}

    def test_frozen_weights_stay_frozen(self):
        own = ensemble()
        for member in own.members:
            member[0].requires_grad_(False)
        assert [p.requires_grad for p in Stacked(own).network.parameters()] == [False] * 2 + [True] * 4

    def test_it_is_in_train_mode_whatever_the_members_are(self):
        stacked = Stacked(ensemble(lambda: linear([nn.Linear(6, 6), nn.Dropout(0.5)])).eval())
        assert all(part.training for part in stacked.network.modules())
        rows = stacked.logits(X[:1].expand(2, -1))
        assert not torch.equal(rows[:, 0], rows[:, 1])

    def test_small_layers_and_batches_pay(self):
        def sizes(inputs, outputs):
            return ensemble(lambda: nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(outputs, 4)))

        assert pays(sizes(256, 128), 128)
        assert not pays(sizes(257, 128), 128)
        assert not pays(sizes(256, 128), 129)


RECIPES = {
    "ie": {"method": "ie"},
    "mcl": {"method": "mcl", "optimizer": "adam", "lr": 0.01},
    "cmcl": {"ema": 0.25, "clip_norm": 1.0, "weight_decay": 0.01},
    "sampled labels": {"labels": "sampled", "samples": 2, "accumulate": 2, "optimizer": "adamw", "lr": 0.01},
    "warm start": {"warm_start": 1, "rule": "relaxed", "nesterov": True},
}


def trained(how, members, *, sharing=False, max_seconds=None, **options):
    own = ensemble(share_after="0" if sharing else None)
    recipe = Recipe(**{"epochs": 4, "batch_size": 16, "members": 3} | how)
    settings = Options(quiet=True, device="cpu", members=members, max_seconds=max_seconds)
    return own, cmcl.fit(own, (X, Y), recipe=recipe, test=(X, Y), options=settings, **options)


class TestFit:
    @pytest.mark.parametrize("sharing", [False, True])
    @pytest.mark.parametrize("name", RECIPES)
    def test_the_same_training(self, name, sharing):
        (one, ours), (other, theirs) = (
            trained(RECIPES[name], members, sharing=sharing) for members in ("stacked", "sequential")
        )
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert ours.scores == pytest.approx(theirs.scores)
        assert [row["loss"] for row in ours.rows] == pytest.approx(
            [row["loss"] for row in theirs.rows], rel=1e-4
        )

    @pytest.mark.parametrize(
        ("members", "expected"), [("stacked", True), ("auto", True), ("sequential", False)]
    )
    def test_which_layers_run(self, members, expected):
        calls = Counter()
        with register_module_forward_pre_hook(lambda module, args: calls.update([type(module)])):
            trained({"steps": 100, "epochs": None}, members)
        assert (calls[StackedLinear] >= 3 * 100) == expected
        assert (calls[nn.Linear] >= 3 * 3 * 100) != expected

    @pytest.mark.parametrize(
        ("how", "options"),
        [
            ({"adversarial": 0.01}, {}),
            ({"optimizer": "muon"}, {}),
            ({}, {"task": partial(F.cross_entropy, reduction="none")}),
        ],
    )
    def test_not_where_members_must_be_apart(self, how, options):
        calls = Counter()
        with register_module_forward_pre_hook(lambda module, args: calls.update([type(module)])):
            trained(how, "stacked", **options)
        assert calls[StackedLinear] == 0

    def test_parts_of_a_batch_decide_whether_it_pays(self):
        for how, expected in (({"batch_size": 48}, 0), ({"batch_size": 48, "accumulate": 2}, 1)):
            torch.manual_seed(0)
            own = cmcl.Ensemble(lambda: nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 4)), 3)
            calls = Counter()
            recipe = Recipe(members=3, steps=2, **how)
            with register_module_forward_pre_hook(
                lambda module, args, seen=calls: seen.update([type(module)])
            ):
                cmcl.fit(own, (X, Y), recipe=recipe, options=Options(quiet=True, device="cpu"))
            assert (calls[StackedLinear] > 0) == bool(expected)

    def test_auto_is_stacked_here(self):
        one, other = (trained({}, members)[0] for members in ("auto", "stacked"))
        assert all(map(torch.equal, one.parameters(), other.parameters()))

    @pytest.mark.parametrize("members", ["stacked", "streams"])
    def test_what_cannot_be_stacked_trains_all_the_same(self, members):
        own = ensemble(lambda: linear([nn.BatchNorm1d(6)]))
        recipe = Recipe(steps=3, batch_size=16, members=3)
        cmcl.fit(own, (X, Y), recipe=recipe, options=Options(quiet=True, device="cpu", members=members))

    def test_the_trained_ensemble_is_ordinary(self, tmp_path):
        own, _ = trained({}, "stacked")
        pickle.dumps(own)
        own.save(tmp_path / "saved")
        assert {p.untyped_storage().nbytes() == 4 * p.numel() for p in own.parameters()} == {True}

    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    @pytest.mark.parametrize(
        "members", [("stacked",) * 2, ("stacked", "sequential"), ("sequential", "stacked")]
    )
    def test_resume(self, tmp_path, members, optimizer):
        how = {"optimizer": optimizer, "lr": 0.01, "ema": 0.25}
        whole, _ = trained(how, members[0])
        with pytest.raises(cmcl.Interrupted):
            trained(how, members[0], out=tmp_path / "run", max_seconds=1e-9)
        resumed, _ = trained(how, members[1], out=tmp_path / "run", resume=True)
        for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
            if members[0] == members[1]:
                assert torch.equal(a, b)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
