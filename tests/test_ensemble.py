"""The ensemble as its users meet it: building, forward, predict, state."""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from cmcl import Ensemble, SharedStemEnsemble, share_features
from cmcl.data.transforms import MeanStd
from cmcl.ensemble import in_eval, scale_temperature
from helpers import draw_masks


class Net(nn.Module):
    def __init__(self, inputs=4, width=6, classes=3):
        super().__init__()
        self.fc1, self.bn, self.act = nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()
        self.drop, self.fc2 = nn.Dropout(0.5), nn.Linear(width, classes)

    def forward(self, x):
        return self.fc2(self.drop(self.act(self.bn(self.fc1(x)))))


def by_hand(ensemble, x, masks):
    """The forward pass of a Net ensemble, written out."""
    h = [net.act(net.bn(net.fc1(x))) for net in ensemble.members]
    mode = "off" if masks is None else "sampled"
    mixed = share_features(h, mode=mode, masks=masks)
    return torch.stack([net.fc2(net.drop(z)) for net, z in zip(ensemble.members, mixed, strict=True)])


class TestBuilding:
    def test_five_members_by_default_each_its_own(self):
        ensemble = Ensemble(Net)
        assert len(ensemble.members) == 5
        assert len({member.fc1.weight.sum().item() for member in ensemble.members}) == 5

    def test_a_list_of_modules(self):
        nets = [Net(), Net()]
        assert list(Ensemble(nets).members) == nets
        assert list(Ensemble(nn.ModuleList(nets), 2).members) == nets

    def test_different_networks_that_agree_where_they_share(self):
        ensemble = Ensemble([Net(), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))])
        assert ensemble(torch.zeros(2, 4)).shape == (2, 2, 3)

        class Deep(Net):
            def forward(self, x):
                return self.fc2(self.act(self.fc1(x)).tanh())

        mixed = Ensemble([Net(), Deep()], share_after="act")
        assert mixed(torch.zeros(2, 4)).shape == (2, 2, 3)

    def test_different_shapes_where_they_share(self):
        ensemble = Ensemble([Net(width=6), Net(width=7)], share_after="act")
        with pytest.raises(ValueError, match=r"one shape .* Got \(2, 6\) from member 0 and \(2, 7\)"):
            ensemble(torch.zeros(2, 4))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((Net(), 5), r"function that builds a member.*pass lambda: Net\(\.\.\.\)"),
            ((5,), "network must be a function that builds a member, or a list of modules. Got int 5"),
            (("net",), "network must be a function .* Got str 'net'"),
            ((Net, 0), "members must be 1 or more. Got 0"),
            ((Net, 2.5), "members must be an integer. Got float 2.5"),
            (([],), "at least 1 member"),
            (([Net(), Net()], 3), "members must be 2, the length of the list"),
            ((lambda: "net",), "members must be torch.nn.Module instances. Got str 'net' as member 0"),
        ],
    )
    def test_bad_members(self, arguments, message):
        with pytest.raises((TypeError, ValueError), match=message):
            Ensemble(*arguments)

    def test_copies_of_one_instance(self):
        net = Net()
        for network in (lambda: net, lambda: copy.deepcopy(net), [net, net]):
            with pytest.raises(ValueError, match="from different weights. Members 0 and 1 are the same"):
                Ensemble(network, 2)

    def test_bad_options(self):
        with pytest.raises(ValueError, match="share_prob must be between 0 and 1. Got 2"):
            Ensemble(Net, share_prob=2)
        with pytest.raises(ValueError, match="share_at_test must be one of 'sampled', .* Got 'mean'"):
            Ensemble(Net, share_at_test="mean")


class TestForward:
    def test_without_sharing_members_never_meet(self):
        ensemble, x = Ensemble(Net, 3).eval(), torch.randn(7, 4)
        assert ensemble(x).equal(torch.stack([member(x) for member in ensemble.members]))

    def test_with_given_masks(self):
        ensemble, x = Ensemble(Net, 3, share_after="act").eval(), torch.randn(7, 4)
        masks = draw_masks([torch.empty(7, 6)] * 3)
        torch.testing.assert_close(ensemble(x, masks=masks), by_hand(ensemble, x, masks))

    def test_modes_at_test_time(self):
        ensemble, x = Ensemble(Net, 3, share_after="act").eval(), torch.randn(7, 4)
        assert ensemble(x).equal(ensemble(x)), "expected: deterministic"
        everything = torch.ones(3, 3, 7, 6, dtype=torch.bool)
        ensemble.share_prob = 1.0
        torch.testing.assert_close(ensemble(x), by_hand(ensemble, x, everything))
        ensemble.share_at_test, ensemble.share_prob = "off", 0.7
        torch.testing.assert_close(ensemble(x), by_hand(ensemble, x, None))
        ensemble.share_at_test = "sampled"
        assert not ensemble(x).equal(ensemble(x))

    def test_training_samples_masks_by_the_generator(self):
        ensemble, x = Ensemble(Net, 3, share_after="act", share_at_test="off"), torch.randn(7, 4)
        for member in ensemble.members:
            member.drop.p = 0.0
        first, again, other = (ensemble(x, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1))
        assert first.equal(again)
        assert not first.equal(other)

    def test_gradients_reach_the_other_members_stems(self):
        ensemble = Ensemble(Net, 2, share_after="act")
        ensemble(torch.randn(7, 4))[0].sum().backward()
        assert ensemble.members[1].fc1.weight.grad.abs().sum() > 0
        assert ensemble.members[1].fc2.weight.grad.abs().sum() == 0

    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("share_after", [None, "act"])
    def test_compiles_in_one_graph(self, backend, share_after):
        torch.compiler.reset()
        ensemble = Ensemble(Net, 2, share_after=share_after, share_at_test="expected").eval()
        x = torch.randn(7, 4)
        fast = torch.compile(ensemble, fullgraph=True, backend=backend)
        torch.testing.assert_close(fast(x), ensemble(x))

    def test_masks_where_nothing_is_shared(self):
        with pytest.raises(ValueError, match="masks must be left out where no features are shared"):
            Ensemble(Net, 2)(torch.zeros(3, 4), masks=torch.ones(2, 2, 3, 4, dtype=torch.bool))

    def test_the_place_of_sharing_is_fixed(self):
        with pytest.raises(AttributeError):
            Ensemble(Net, 2).share_after = "act"

    @pytest.mark.parametrize("build", [Ensemble, partial(SharedStemEnsemble, stem="0")])
    def test_forward_never_transforms_and_predict_does(self, build):
        ensemble = build(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 3)), 2)
        images = torch.randint(256, (6, 1, 5, 5), dtype=torch.uint8)
        ensemble.transform = MeanStd().fit(images)
        with pytest.raises(RuntimeError):
            ensemble(images)
        ensemble.eval()
        inputs = ensemble.transform.transform(images)
        torch.compiler.reset()  # only so many versions of a function are kept, of whichever tests
        logits = torch.compile(ensemble, fullgraph=True, backend="aot_eager")(inputs)
        torch.testing.assert_close(logits.softmax(2), ensemble.predict(images).member_probs)
        with pytest.raises(TypeError, match="raw uint8 images .* Got a torch.float32"):
            ensemble.predict(inputs)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
    def test_token_ids_are_ordinary_inputs(self, dtype):
        """Whatever their type: uint8 has no meaning of its own."""

        class Words(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(200, 4), nn.Linear(4, 3)

            def forward(self, tokens):
                return self.head(self.embed(tokens.long()).mean(1))

        ensemble, tokens = (
            Ensemble(Words, 2, share_after="embed").eval(),
            torch.randint(200, (5, 7)).to(dtype),
        )
        torch.testing.assert_close(ensemble(tokens).softmax(2), ensemble.predict(tokens).member_probs)

    def test_another_device(self):
        with pytest.raises(ValueError, match="x must be on cpu like the rest. Got meta"):
            Ensemble(Net, 2)(torch.zeros(2, 4, device="meta"))


class TestPieces:
    @pytest.mark.parametrize(
        "build",
        [
            partial(Ensemble, share_after="act"),
            Ensemble,
            partial(SharedStemEnsemble, stem="fc1", share_after="act"),
            partial(SharedStemEnsemble, stem="fc1"),
        ],
    )
    def test_forward_is_stems_share_trunks_logits(self, build):
        ensemble, x = build(Net, 3).eval(), torch.randn(7, 4)
        h = x if ensemble.shared_stem is None else ensemble.shared_stem(ensemble.members[0], x)[0]
        parts = [stem(member, h) for stem, member in zip(ensemble.stems, ensemble.members, strict=True)]
        mixed = ensemble.share([features for features, _ in parts])
        calls = zip(ensemble.trunks, ensemble.members, mixed, parts, strict=True)
        outputs = [trunk(member, features, rest) for trunk, member, features, (_, rest) in calls]
        assert ensemble.logits(outputs).equal(ensemble(x))

    def test_member_probs_are_those_of_forward_in_eval_mode(self):
        ensemble, x = Ensemble(Net, 3, share_after="act"), torch.randn(7, 4)
        ensemble.transform = MeanStd()  # not fitted: it would raise
        probs = ensemble.member_probs(x)
        assert ensemble.training
        assert not probs.requires_grad
        assert probs.equal(ensemble.eval()(x).softmax(2))


class TestPredict:
    def test_values(self):
        ensemble, x = Ensemble(Net, 3, share_after="act"), torch.randn(7, 4)
        p = ensemble.predict(x)
        probs = ensemble.eval()(x).softmax(2)
        torch.testing.assert_close(p.member_probs, probs)
        torch.testing.assert_close(p.probs, probs.mean(0))
        entropy = -(probs * probs.log()).sum(2)
        torch.testing.assert_close(p.entropy, entropy)
        assert p.chosen.equal(entropy.argmin(0))
        assert not p.probs.requires_grad

    def test_temperature_by_hand(self):
        """p ** (1 / T), normalised: with T = 1/2 the squares of 3/4 and 1/4 are 9 and 1 tenths."""
        probs = torch.tensor([[0.75, 0.25], [1.0, 0.0]])
        scaled = scale_temperature(probs, 0.5)
        torch.testing.assert_close(scaled, torch.tensor([[0.9, 0.1], [1.0, 0.0]]))
        torch.testing.assert_close(scale_temperature(probs, 1.0), probs)
        for wrong in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="temperature must be above 0. Got"):
                scale_temperature(probs, wrong)

    def test_dense(self):
        ensemble = Ensemble(lambda: nn.Conv2d(1, 2, 1), 3)
        p = ensemble.predict(torch.randn(4, 1, 5, 6))
        assert p.probs.shape == (4, 2, 5, 6)
        assert p.member_probs.shape == (3, 4, 2, 5, 6)
        assert p.entropy.shape == (3, 4)
        assert p.chosen.shape == (4,)

    def test_mode_and_batch_norm_are_left_alone(self):
        ensemble = Ensemble(Net, 2)
        ensemble.members[0].bn.eval()  # a frozen layer in a training ensemble
        state = {key: value.clone() for key, value in ensemble.state_dict().items()}
        modes = [module.training for module in ensemble.modules()]
        x = torch.randn(7, 4)
        first, again = ensemble.predict(x), ensemble.predict(x)
        assert [module.training for module in ensemble.modules()] == modes
        assert all(value.equal(state[key]) for key, value in ensemble.state_dict().items())
        assert first.probs.equal(again.probs), "no dropout, no batch statistics"

    def test_threads_may_ask_one_that_is_in_train_mode(self):
        """The first that ends must not put it back in train mode under the others."""
        ensemble, images = Ensemble(Net, 3), torch.randn(64, 4)
        ensemble.members[0].bn.eval()
        expected = torch.stack([ensemble.predict(image[None]).probs[0] for image in images])
        modes = [module.training for module in ensemble.modules()]
        before = {key: value.clone() for key, value in ensemble.state_dict().items()}
        for _ in range(10):
            with ThreadPoolExecutor(8) as threads:
                answers = list(threads.map(lambda image: ensemble.predict(image[None]).probs[0], images))
            torch.testing.assert_close(torch.stack(answers), expected)
        assert all(value.equal(before[key]) for key, value in ensemble.state_dict().items())
        assert [module.training for module in ensemble.modules()] == modes

    def test_one_that_overlaps_another_leaves_its_mode_alone(self):
        ensemble = Ensemble(Net, 2)
        first, second = in_eval(ensemble), in_eval(ensemble)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not any(module.training for module in ensemble.modules()), "the second still computes"
        second.__exit__(None, None, None)
        assert all(module.training for module in ensemble.modules())

    def test_mode_is_restored_after_an_error(self):
        ensemble = Ensemble(Net, 2)
        with pytest.raises(RuntimeError):
            ensemble.predict(torch.zeros(2, 99))
        assert ensemble.training

    @pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
    def test_streaming_gives_the_same(self, batch_size):
        sizes = []

        class Spy(Net):
            def forward(self, x):
                sizes.append(len(x))
                return super().forward(x)

        ensemble, x = Ensemble(Spy, 3), torch.randn(7, 4)
        for whole, parts in zip(ensemble.predict(x), ensemble.predict(x, batch_size=batch_size), strict=True):
            torch.testing.assert_close(parts, whole)
        assert max(sizes[3:]) == min(batch_size, 7), "one batch at a time"

    @pytest.mark.parametrize("batch_size", [0, -1, 2.0])
    def test_bad_batch_size(self, batch_size):
        with pytest.raises((ValueError, TypeError), match="batch_size must be"):
            Ensemble(Net, 1).predict(torch.zeros(7, 4), batch_size=batch_size)

    def test_an_empty_batch(self):
        p = Ensemble(Net, 2).predict(torch.zeros(0, 4))
        assert p.probs.shape == (0, 3)
        assert p.chosen.shape == (0,)

    def test_double_precision_stays(self):
        assert Ensemble(Net, 2).double().predict(torch.zeros(3, 4).double()).probs.dtype == torch.float64

    @pytest.mark.parametrize("x", [[1.0], np.zeros((2, 4), dtype=np.float32), torch.tensor(1.0)])
    def test_inputs_must_be_tensors(self, x):
        ensemble = Ensemble(Net, 2)
        for call in (ensemble, ensemble.predict):
            with pytest.raises(TypeError, match="x must be a tensor with the batch on its first axis"):
                call(x)

    def test_a_member_that_answers_nan_is_named(self):
        ensemble = Ensemble(Net, 3)
        nn.init.constant_(ensemble.members[1].fc2.bias, torch.nan)
        with pytest.raises(ValueError, match=r"NaN or \+inf. Got that from member \[1\]"):
            ensemble.predict(torch.zeros(3, 4))

    def test_half_precision_networks_answer_in_float32(self):
        ensemble = Ensemble(lambda: nn.Linear(4, 3), 2).bfloat16()
        assert ensemble.predict(torch.zeros(7, 4, dtype=torch.bfloat16)).probs.dtype == torch.float32

    @pytest.mark.parametrize(
        ("returns", "message"),
        [
            (lambda z: {"logits": z}, "Got dict with 'logits' from member 0; pass output="),
            (lambda z: z[:, 0], r"Got a torch.float32 tensor of shape \(7,\) from member 0; wrap"),
        ],
    )
    def test_members_that_return_no_logits(self, returns, message):
        class Wrong(Net):
            def forward(self, x):
                return returns(super().forward(x))

        with pytest.raises(TypeError, match=f"members must return a tensor of logits.*{message}"):
            Ensemble(Wrong, 2).predict(torch.zeros(7, 4))

    def test_logits_of_two_shapes(self):
        with pytest.raises(ValueError, match=r"one shape. Got \(7, 3\) from member 0 and \(7, 2\)"):
            Ensemble([Net(), Net(classes=2)])(torch.zeros(7, 4))


class TestState:
    def test_members_keep_their_keys(self):
        ensemble = Ensemble(Net, 2, share_after="act")
        assert list(ensemble.members[0].state_dict()) == list(Net().state_dict())
        assert set(ensemble.state_dict()) == {
            f"members.{m}.{key}" for m in range(2) for key in Net().state_dict()
        }

    def test_state_dict_round_trip(self):
        ensemble, other = Ensemble(Net, 2, share_after="act"), Ensemble(Net, 2, share_after="act")
        other.load_state_dict(ensemble.state_dict())
        x = torch.randn(7, 4)
        assert other.predict(x).probs.equal(ensemble.predict(x).probs)

    @pytest.mark.parametrize("share_after", [None, "act"])
    def test_pickles_keep_everything_but_the_pieces_which_are_split_again(self, share_after):
        ensemble, x = Ensemble(Net, 2, share_after=share_after, share_prob=0.4), torch.randn(7, 4)
        ensemble.temperature = 2.0
        other = pickle.loads(pickle.dumps(ensemble))  # noqa: S301
        assert other.predict(x).probs.equal(ensemble.predict(x).probs)
        assert (other.share_after, other.share_prob, other.temperature) == (share_after, 0.4, 2.0)

    def test_repr(self):
        text = repr(Ensemble(Net, 2, share_after="act"))
        count = 2 * (4 * 6 + 6 + 2 * 6 + 6 * 3 + 3)
        assert f"2 members, {count} parameters, features shared after 'act' with probability 0.7" in text
        assert "features not shared" in repr(Ensemble(Net, 2))
