"""Networks of every kind are members: split, trained, saved, shared or not; odd outputs by output=."""

import copy
import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cmcl
from cmcl import Ensemble
from lookalikes import KINDS, mlp, vectors


def fit(ensemble, x, y, **settings):
    task, test = settings.pop("task", None), settings.pop("test", None)
    options = cmcl.Options(quiet=True, device="cpu", members=settings.pop("run", "auto"))
    recipe = cmcl.Recipe(**{"members": 2, "steps": 2, "lr": 0.01} | settings)
    return cmcl.fit(ensemble, (x, y), recipe=recipe, task=task, test=test, options=options)


@pytest.fixture(params=KINDS)
def kind(request):
    network, inputs, layer, _ = KINDS[request.param]
    torch.manual_seed(0)
    return network, inputs(), layer


def test_features_are_shared_and_training_reaches_all_stems_and_trunks(kind):
    network, x, layer = kind
    ensemble = Ensemble(network, 2, share_after=layer).eval()
    alone = torch.stack([member(x) for member in ensemble.members])
    ensemble.share_at_test = "off"
    torch.testing.assert_close(ensemble(x), alone)
    ensemble.share_at_test = "expected"
    logits = ensemble(x)
    assert not torch.allclose(logits, alone), "the members' features meet"
    targets = torch.randint(4, (len(x), *logits.shape[3:]))
    cmcl.confident_oracle_loss(ensemble.train()(x), targets).total.backward()
    learned = [p for name, p in ensemble.named_parameters() if not name.endswith("in_proj_bias")]
    assert all(p.grad is not None for p in learned)


@pytest.mark.parametrize("sharing", [False, True])
def test_the_engine_trains_and_a_folder_keeps_it(kind, sharing, tmp_path):
    network, x, layer = kind
    ensemble = Ensemble(network, 2, share_after=layer if sharing else None)
    dense = ensemble(x).shape[3:]
    before = copy.deepcopy(ensemble.state_dict())
    fit(ensemble, x, torch.randint(4, (3, *dense)), sharing=sharing, batch_size=3, optimizer="adam")
    assert any(not value.equal(before[key]) for key, value in ensemble.state_dict().items())
    ensemble.save(tmp_path)
    loaded = cmcl.load(tmp_path, network=network)
    torch.testing.assert_close(loaded.predict(x).probs, ensemble.predict(x).probs)


class Both(nn.Module):
    """An image and three numbers, packed into one tensor (B, 75 + 3)."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(7, 4)

    def forward(self, packed):
        return self.both(packed[:, :-3].unflatten(1, (3, 5, 5)), packed[:, -3:])

    def both(self, image, numbers):
        return self.head(torch.cat([self.act(self.conv(image)).mean((2, 3)), numbers], 1))


@pytest.mark.parametrize("share_after", [None, "act"])
def test_two_inputs_in_one_tensor(share_after):
    image, numbers = torch.randn(8, 3, 5, 5), torch.randn(8, 3)
    packed = torch.cat([image.flatten(1), numbers], 1)
    ensemble = Ensemble(Both, 2, share_after=share_after, share_at_test="off").eval()
    alone = torch.stack([member.both(image, numbers) for member in ensemble.members])
    torch.testing.assert_close(ensemble(packed), alone)
    fit(ensemble, packed, torch.randint(4, (8,)), sharing=share_after is not None)
    assert not ensemble.members[0].both(image, numbers).allclose(alone[0])


class Wraps(nn.Module):
    """Answers as a tuple, a dict or an object, as other people's networks do."""

    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = mlp(), wrap

    def forward(self, x):
        return self.wrap(self.net(x))


@dataclass
class Answer:
    logits: torch.Tensor


def as_dict(logits):
    return {"logits": logits, "loss": None}


def from_dict(out):
    return out["logits"]


OUTPUTS = {
    "dict": (as_dict, from_dict, r"Got dict with 'logits', 'loss' .*lambda out: out\['logits'\]"),
    "tuple": (lambda z: (z, z + 1), lambda out: out[0], r"Got tuple from member 0.*lambda out: out\[0\]"),
    "object": (Answer, lambda out: out.logits, r"Got Answer from member 0.*lambda out: out.logits"),
}


@pytest.mark.parametrize("share_after", [None, "net.1"])
@pytest.mark.parametrize("form", OUTPUTS)
class TestOutput:
    def test_logits_are_picked_everywhere(self, form, share_after):
        wrap, output, _ = OUTPUTS[form]
        ensemble = Ensemble(lambda: Wraps(wrap), 2, share_after=share_after, output=output)
        x, y = vectors(8), torch.randint(4, (8,))
        assert ensemble(x).shape == (2, 8, 4)
        assert ensemble.predict(x, batch_size=3).probs.shape == (8, 4)
        assert 0 <= fit(ensemble, x, y, test=(x, y)).scores["top1"] <= 100

    def test_without_it_the_error_shows_the_way(self, form, share_after):
        wrap, _, message = OUTPUTS[form]
        with pytest.raises(TypeError, match=message):
            Ensemble(lambda: Wraps(wrap), 2, share_after=share_after)(vectors())


def test_output_is_the_same_as_a_network_that_returns_logits():
    nets = [Wraps(as_dict), Wraps(as_dict)]
    plain = Ensemble([net.net for net in nets], share_after="1").eval()
    wrapped = Ensemble(nets, share_after="net.1", output=from_dict).eval()
    x = vectors()
    for same in (wrapped, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):  # noqa: S301
        assert same(x).equal(plain(x))


class Auxiliary(Wraps):
    """Answers twice in training only, as networks with auxiliary heads do."""

    def forward(self, x):
        z = self.net(x)
        return (z, 2 * z) if self.training else z


@pytest.mark.parametrize("share_after", [None, "net.1"])
def test_an_output_that_depends_on_the_mode(share_after):
    ensemble = Ensemble(
        lambda: Auxiliary(None),
        2,
        share_after=share_after,
        output=lambda out: out[0] if isinstance(out, tuple) else out,
    )
    x = vectors()
    assert ensemble.train()(x).shape == ensemble.eval()(x).shape == (2, 3, 4)


def test_a_function_is_not_saved_but_asked_for(tmp_path):
    ensemble = Ensemble(lambda: Wraps(as_dict), 2, output=from_dict)
    ensemble.save(tmp_path)

    def build():
        return Wraps(as_dict)

    with pytest.raises(
        ValueError, match=r"saved with output=from_dict, a function, which is not saved. Pass output="
    ):
        cmcl.load(tmp_path, network=build)
    x = vectors()
    loaded = cmcl.load(tmp_path, network=build, output=lambda out: out["logits"])
    assert loaded.predict(x).probs.equal(ensemble.predict(x).probs)


class TestYourOwnLoss:
    """`task=` of `cmcl.fit`."""

    def weights_after(self, task, lr, **changes):
        torch.manual_seed(0)
        ensemble, x, y = Ensemble(mlp, 2), vectors(8), torch.randint(4, (8,))
        settings = {"method": "ie", "steps": 1, "momentum": 0.0, "lr": lr, "run": "sequential"} | changes
        fit(ensemble, x, y, task=task, **settings)  # stacked members would draw other dropout
        return nn.utils.parameters_to_vector(ensemble.parameters()).detach()

    def test_cross_entropy_is_the_default(self):
        task = partial(F.cross_entropy, reduction="none")
        for method in ("ie", "cmcl"):
            changes = {"method": method, "steps": 3, "warm_start": 1}
            ours, theirs = (self.weights_after(one, 0.1, **changes) for one in (task, None))
            torch.testing.assert_close(
                ours, theirs
            )  # without a task, the gradient is computed in closed form

    def test_twice_the_loss_is_twice_the_step(self):
        def doubled(logits, targets):
            return 2 * F.cross_entropy(logits, targets, reduction="none")

        start, plain = self.weights_after(None, 1e-12), self.weights_after(None, 0.2)
        assert not plain.allclose(start)
        torch.testing.assert_close(self.weights_after(doubled, 0.1), plain)


REAL = [  # library, name, layer, side of the image
    ("torchvision", "resnet18", "layer1", 64),
    ("torchvision", "efficientnet_b0", "features.2", 64),
    ("torchvision", "convnext_tiny", "features.1", 64),
    ("torchvision", "vit_b_32", "encoder.layers.encoder_layer_0", 224),
    ("timm", "resnet18", "layer1", 64),
    ("timm", "efficientnet_b0", "blocks.0", 64),
    ("timm", "tf_efficientnetv2_b0", "blocks.0", 64),
    ("timm", "convnext_atto", "stages.0", 64),
    ("timm", "vit_tiny_patch16_224", "blocks.0", 224),
]


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name", "layer", "side"), REAL)
def test_networks_of_libraries(library, name, layer, side):
    """Split where named, the members alone are themselves, and a suggestion is found."""
    models = pytest.importorskip("torchvision.models" if library == "torchvision" else "timm")
    create = models.get_model if library == "torchvision" else models.create_model
    x = torch.randn(2, 3, side, side)
    ensemble = Ensemble(
        partial(create, name, num_classes=4), 2, share_after=layer, share_at_test="off"
    ).eval()
    with torch.no_grad():
        alone = torch.stack([member(x) for member in ensemble.members])
        torch.testing.assert_close(ensemble(x), alone)
    cmcl.confident_oracle_loss(ensemble.train()(x), torch.tensor([0, 1])).total.backward()
    assert any(found.suggested for found in cmcl.shareable_layers(ensemble.members[0], x))
