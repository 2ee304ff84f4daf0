"""Members from one pretrained network: heads drawn anew, stems held once, frozen or not."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import cmcl
from cmcl import SharedStemEnsemble, from_pretrained
from lookalikes import KINDS, ResNet, UNet, ViT, images

STEM = ("conv1", "bn1", "layer1")  # of a ResNet up to layer1


@pytest.fixture
def pretrained():
    torch.manual_seed(0)
    return ResNet()


def size(module):
    return sum(p.numel() for p in module.parameters())


def stem_size(net):
    return sum(size(getattr(net, name)) for name in STEM)


class TestCopies:
    def test_only_the_head_differs(self, pretrained):
        ensemble = from_pretrained(pretrained, 3, head="fc")
        assert type(ensemble) is cmcl.Ensemble
        first, second, third = ensemble.members
        for name, weight in pretrained.named_parameters():
            others = [m.get_parameter(name) for m in (first, second, third)]
            if name.startswith("fc."):
                assert not others[0].equal(others[1])
                assert not others[1].equal(others[2])
            else:
                assert all(other.equal(weight) and other is not weight for other in others)

    def test_the_original_stays(self, pretrained):
        before = copy.deepcopy(pretrained.state_dict())
        from_pretrained(pretrained, 2, head="fc", noise=0.1, stem="layer1", freeze=True)
        assert all(value.equal(before[key]) for key, value in pretrained.state_dict().items())
        assert all(p.requires_grad for p in pretrained.parameters())

    def test_noise_has_the_size_it_says(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200), nn.Linear(200, 3))
        ensemble = from_pretrained(net, 2, head="2", noise=0.1)
        weight = net[0].weight
        moved = [member[0].weight - weight for member in ensemble.members]
        for step in moved:
            assert (step.std() / weight.std()).item() == pytest.approx(0.1, rel=0.02)
        assert not torch.allclose(moved[0], moved[1])
        assert all(member[1].weight.equal(net[1].weight) for member in ensemble.members), "a deviation of 0"

    def test_several_heads(self, pretrained):
        ensemble = from_pretrained(pretrained, 2, head=["fc", "layer2.1.conv2"])
        a, b = ensemble.members
        assert not a.layer2[1].conv2.weight.equal(b.layer2[1].conv2.weight)
        assert a.layer2[0].conv2.weight.equal(b.layer2[0].conv2.weight)

    def test_features_can_be_shared(self, pretrained):
        ensemble = from_pretrained(pretrained, 2, head="fc", share_after="layer1", share_prob=0.4)
        assert (ensemble.share_after, ensemble.share_prob) == ("layer1", 0.4)


OWN = "share_after must come after weights of the members' own. Got "
WRONG = {
    "no such head": (dict(head="head"), "head must name a submodule of ResNet. Got 'head'; last are.*'fc'"),
    "no head's name": (dict(head=""), "head must name a submodule of ResNet. Got ''"),
    "a head without weights": (dict(head="relu"), "head must have weights .* Got 'relu'"),
    "frozen, but what?": (dict(head="fc", freeze=True), "freeze must come with stem"),
    "less than no noise": (dict(head="fc", noise=-1.0), "noise must be 0 or more. Got -1.0"),
    "no such stem": (dict(head="fc", stem="layer9"), "stem must name a submodule of ResNet. Got 'layer9'"),
    "no members": (dict(head="fc", members=0), "members must be 1 or more. Got 0"),
    "a head in the stem": (
        dict(head=["fc", "layer1.0.conv1"], stem="layer1", freeze=True),
        "head must come after the stem.* Got 'layer1.0.conv1', of which 'layer1' needs a part",
    ),
    "a head around the stem": (dict(head="layer1", stem="layer1.0"), "after the stem.* Got 'layer1'"),
    "sharing the stem's features": (dict(head="fc", stem="layer1", share_after="layer1"), f"{OWN}'layer1'"),
    "sharing before the stem's end": (dict(head="fc", stem="layer1", share_after="bn1"), f"{OWN}'bn1'"),
    "no weights in between": (dict(head="fc", stem="bn1", share_after="maxpool"), f"{OWN}'maxpool'"),
    "nothing after the stem": (dict(head="fc", stem="fc"), "it is the network's output"),
    "inside a block": (dict(head="fc", stem="layer1.0.conv1"), "other values than its output are used"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(pretrained, case):
    arguments, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        from_pretrained(pretrained, **arguments)


def test_a_function_is_not_pretrained():
    with pytest.raises(TypeError, match="network must be one torch.nn.Module, pretrained. Got type"):
        from_pretrained(ResNet, head="fc")


def test_a_head_that_cannot_be_drawn():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight

    with pytest.raises(ValueError, match=r"by reset_parameters\(\). Got .1.weight. of a Scale"):
        from_pretrained(nn.Sequential(nn.Linear(4, 3), Scale()), head="1")


COMPUTED = {
    "spectral_norm": nn.utils.spectral_norm,
    "weight_norm": nn.utils.weight_norm,
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "newer spectral_norm": nn.utils.parametrizations.spectral_norm,
    "newer weight_norm": nn.utils.parametrizations.weight_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_head_whose_weight_is_computed(kind, ran):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), COMPUTED[kind](nn.Linear(4, 3)))
    if ran:  # then the weight can be copied
        with torch.no_grad():
            net(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"draw their weights anew, by reset_parameters\(\)|can be copied"):
        from_pretrained(net, 2, head="2")


def test_a_computed_weight_elsewhere_stays():
    net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 3))
    ensemble = from_pretrained(net, 2, head="2")
    assert all(member[0].weight_orig.equal(net[0].weight_orig) for member in ensemble.members)


class Language(nn.Module):
    """The head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.out.weight = self.emb.weight

    def forward(self, x):
        return self.out(self.emb(x).mean(1))


class TestTiedHeads:
    def test_would_draw_the_other_part_too(self):
        with pytest.raises(ValueError, match="must not be tied .* also 'emb.weight'"):
            from_pretrained(Language(), 2, head="out")

    def test_with_a_weight_of_its_own(self):
        net = Language()
        net.out = nn.Linear(4, 3)
        ensemble = from_pretrained(net, 2, head="out")
        assert all(member.emb.weight.equal(net.emb.weight) for member in ensemble.members)

    @pytest.mark.parametrize("head", [["emb", "out"], ["out", "emb"]])
    def test_both_parts_are_the_head(self, head):
        a, b = from_pretrained(Language(), 2, head=head).members
        assert a.emb.weight is a.out.weight
        assert not a.emb.weight.equal(b.emb.weight)

    def test_one_head_of_two_names(self):
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        net.classifier = net[2]
        a, b = from_pretrained(net, 2, head="2").members
        assert a[2] is a.classifier
        assert not a[2].weight.equal(b[2].weight)


@pytest.fixture(params=[False, True], ids=["learning", "frozen"])
def freeze(request):
    return request.param


@pytest.fixture(params=[None, "layer2.0"], ids=["apart", "shared later"])
def share_after(request):
    return request.param


@pytest.fixture
def ensemble(pretrained, freeze, share_after):
    return from_pretrained(pretrained, 3, head="fc", stem="layer1", freeze=freeze, share_after=share_after)


class TestOneStem:
    def test_the_stem_is_held_once(self, ensemble, pretrained):
        whole, stem = size(pretrained), stem_size(pretrained)
        assert size(ensemble) == 3 * whole - 2 * stem
        kept = ensemble.state_dict()
        in_state = sum(kept[name].numel() for name, _ in ensemble.named_parameters())
        assert in_state == size(ensemble), "parameters and state_dict name the same weights"
        assert len(kept) == 3 * len(pretrained.state_dict()) - 2 * sum(
            len(getattr(pretrained, name).state_dict()) for name in STEM
        )

    def test_members_are_whole_networks(self, ensemble, pretrained):
        x = images()
        ensemble.eval()
        ensemble.share_at_test = "off"
        torch.testing.assert_close(ensemble(x), torch.stack([member(x) for member in ensemble.members]))
        assert list(ensemble.members[1].state_dict()) == list(pretrained.state_dict())

    def test_gradients(self, ensemble, freeze):
        logits = ensemble(images())
        cmcl.independent_loss(logits, torch.tensor([0, 1, 2])).total.backward()
        for name, p in ensemble.named_parameters():
            in_stem = name.removeprefix("members.0.").split(".")[0] in STEM
            assert (p.grad is None) == (in_stem and freeze), name

    def test_the_stems_gradient_is_the_sum_over_members(self, pretrained):
        torch.manual_seed(1)
        ensemble = from_pretrained(pretrained, 2, head="fc", stem="layer1").eval()
        x, y = images(), torch.tensor([0, 1, 2])
        cmcl.independent_loss(ensemble(x), y).total.backward()
        together = ensemble.members[0].conv1.weight.grad.clone()
        ensemble.zero_grad()
        for member in ensemble.members:  # they are whole networks over the same stem
            nn.functional.cross_entropy(member(x), y).backward()
        torch.testing.assert_close(ensemble.members[0].conv1.weight.grad, together)

    def test_statistics(self, ensemble, freeze):
        """Once for a learning stem, however many members; never for a frozen one."""
        before = ensemble.members[0].bn1.running_mean.clone()
        ensemble.train()
        ensemble(images())
        bn = ensemble.members[2].bn1
        assert bn.num_batches_tracked == (0 if freeze else 1)
        assert bn.running_mean.equal(before) == freeze
        assert ensemble.members[2].layer2[0].bn1.num_batches_tracked == 1

    def test_a_frozen_stem_is_a_fixed_function_in_training_too(self, pretrained):
        ensemble = from_pretrained(pretrained, 2, head="fc", stem="layer1", freeze=True)
        x = images()
        h, _ = ensemble.shared_stem(ensemble.members[0], x)
        pretrained.eval()
        torch.testing.assert_close(
            h, pretrained.layer1(pretrained.maxpool(pretrained.relu(pretrained.bn1(pretrained.conv1(x)))))
        )

    def test_fit(self, ensemble, freeze, share_after):
        before = copy.deepcopy(ensemble.state_dict())
        x, y = images(8), torch.randint(4, (8,))
        recipe = cmcl.Recipe(members=3, overlap=2, steps=3, sharing=share_after is not None, lr=0.01)
        cmcl.fit(ensemble, (x, y), recipe=recipe, options=cmcl.Options(quiet=True, device="cpu"))
        for key, value in ensemble.state_dict().items():
            in_stem = key.removeprefix("members.0.").split(".")[0] in STEM
            assert value.equal(before[key]) == (in_stem and freeze), key

    def test_a_folder_keeps_it(self, ensemble, freeze, share_after, tmp_path):
        ensemble.save(tmp_path)
        loaded = cmcl.load(tmp_path, network=ResNet)
        assert isinstance(loaded, SharedStemEnsemble)
        assert (loaded.stem, loaded.freeze, loaded.share_after) == ("layer1", freeze, share_after)
        x = images()
        assert loaded.predict(x).probs.equal(ensemble.predict(x).probs)
        assert size(loaded) == size(ensemble)
        assert [p.requires_grad for p in loaded.parameters()] == [
            p.requires_grad for p in ensemble.parameters()
        ]

    def test_state_dicts_fit(self, ensemble, freeze, share_after):
        other = from_pretrained(ResNet(), 3, head="fc", stem="layer1", freeze=freeze, share_after=share_after)
        other.load_state_dict(ensemble.state_dict())
        x = images()
        assert other.predict(x).probs.equal(ensemble.predict(x).probs)
        assert other.members[2].conv1 is other.members[0].conv1
        broken = ensemble.state_dict()
        del broken["members.0.conv1.weight"]
        with pytest.raises(RuntimeError, match="Missing key.*members.0.conv1.weight"):
            other.load_state_dict(broken)
        outer = nn.ModuleDict({"model": ensemble})  # as in a LightningModule: the names carry a prefix
        state = outer.state_dict()
        assert "model.members.0.conv1.weight" in state
        assert "model.members.1.conv1.weight" not in state
        assert outer.load_state_dict(state).missing_keys == []

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])  # noqa: S301
    def test_copies(self, ensemble, clone, freeze):
        other = clone(ensemble)
        x = images()
        assert other.predict(x).probs.equal(ensemble.predict(x).probs)
        assert size(other) == size(ensemble)
        assert len(other.state_dict()) == len(ensemble.state_dict())
        assert other.train().members[0].bn1.training != freeze


def test_it_compiles_and_exports(pretrained):
    ensemble = from_pretrained(pretrained, 2, head="fc", stem="layer1", share_after="layer2.0").eval()
    x = images()
    torch.testing.assert_close(torch.export.export(ensemble, (x,)).module()(x), ensemble(x))
    compiled = torch.compile(ensemble, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), ensemble(x))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("freeze", [False, True])
def test_captured_and_plain_steps_agree_on_a_gpu(pretrained, freeze):
    """One stem's features go to a stream per member, and their gradients come back together.

    In float64: their sum in another order, normalised over 8 images, would move float32 by a thousandth.
    """
    x, y = images(8).double(), torch.randint(4, (8,))
    recipe = cmcl.Recipe(members=3, overlap=2, steps=3, batch_size=8, lr=0.01)
    after = []
    for capture in (False, True):
        torch.manual_seed(1)
        ensemble = from_pretrained(pretrained, 3, head="fc", stem="layer1", freeze=freeze).double()
        options = cmcl.Options(
            quiet=True, device="cuda", precision="float32", compile=False, capture=capture, deterministic=True
        )
        cmcl.fit(ensemble, (x, y), recipe=recipe, options=options)
        after.append(ensemble.state_dict())
    for key, value in after[0].items():
        torch.testing.assert_close(after[1][key], value, rtol=1e-8, atol=1e-10)


def test_a_killed_run_goes_on(pretrained, tmp_path):
    def build():
        torch.manual_seed(3)
        return from_pretrained(pretrained, 2, head="fc", stem="layer1")

    x, y = images(8), torch.randint(4, (8,))
    options = cmcl.Options(quiet=True, device="cpu")
    recipe = cmcl.Recipe(members=2, steps=4, batch_size=4, lr=0.01)
    whole, resumed = build(), build()
    cmcl.fit(whole, (x, y), recipe=recipe, options=options, out=tmp_path)
    cmcl.fit(resumed, (x, y), recipe=recipe, options=options, out=tmp_path, resume=True)
    assert all(value.equal(whole.state_dict()[key]) for key, value in resumed.state_dict().items())


def test_parameters_of_the_stem_itself_are_held_once():
    """A vision transformer's class token and position embedding belong to no layer."""
    ensemble = SharedStemEnsemble(ViT, 2, stem="blocks.0")
    assert ensemble.members[0].class_token is ensemble.members[1].class_token
    assert "members.1.pos_embedding" not in ensemble.state_dict()
    ensemble = SharedStemEnsemble(ViT, 2, stem="blocks.0", freeze=True)
    assert not ensemble.members[0].class_token.requires_grad


def test_networks_from_scratch():
    network, inputs, *_ = KINDS["mlp"]
    ensemble = SharedStemEnsemble(network, 4, stem="1", share_after="3")
    assert ensemble(inputs()).shape == (4, 3, 4)
    ensemble = SharedStemEnsemble(cmcl.networks.resnet20, 2, stem="stem")
    assert ensemble(images(2)).shape == (2, 2, 10)
    with pytest.raises(ValueError, match="FCN|SplitNetwork cannot be split"):
        SharedStemEnsemble(cmcl.networks.fcn, 2, stem="stem")


def test_share_after_a_block_that_holds_the_end_of_the_stem(pretrained):
    ensemble = from_pretrained(pretrained, 2, head="fc", stem="layer1.0", share_after="layer1").eval()
    ensemble.share_at_test = "off"
    x = images()
    torch.testing.assert_close(ensemble(x), torch.stack([member(x) for member in ensemble.members]))


class Knot(nn.Module):
    """Uses a block and, before or after it, one of its layers."""

    def __init__(self, first, second):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.first, self.second = first, second

    def forward(self, x):
        x = self.middle(self.get_submodule(self.first)(x))
        return self.head(self.get_submodule(self.second)(x))


@pytest.mark.parametrize(
    ("first", "second"), [("block", "block.0"), ("block.0", "block"), ("block", "block")]
)
@pytest.mark.parametrize("stem", ["block.0", "middle"])
def test_a_part_used_on_both_sides(first, second, stem):
    with pytest.raises(ValueError, match="used before and after it|called once in forward"):
        SharedStemEnsemble(lambda: Knot(first, second), 2, stem=stem)


def test_skips_that_pass_by_a_stem():
    with pytest.raises(ValueError, match=r"other values than its output are used after it \(down1"):
        SharedStemEnsemble(UNet, 2, stem="down2")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.b(self.act(self.a(x))).relu())


def test_a_weight_tied_across_the_stem():
    with pytest.raises(ValueError, match="'a.weight' before it and 'b.weight' are one tied weight"):
        SharedStemEnsemble(Tied, 2, stem="a")
    with pytest.raises(ValueError, match="tied weight"):
        from_pretrained(Tied(), 2, head="head", stem="act", freeze=True)
    ensemble = SharedStemEnsemble(Tied, 2, stem="b")  # tied within the stem
    assert all(member.a.weight is member.b.weight for member in ensemble.members)


class InPlace(nn.Module):
    """What follows the stem writes into its output."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.act, self.conv2, self.head = nn.SiLU(inplace=True), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.conv2(self.act(self.norm(self.conv(x)))).mean((2, 3)))


@pytest.mark.parametrize("share_after", [None, "conv2"])
def test_trunks_do_not_write_into_each_others_features(freeze, share_after):
    torch.manual_seed(0)
    ensemble = from_pretrained(
        InPlace(), 3, head=["conv2", "head"], stem="norm", freeze=freeze, share_after=share_after
    )
    x, y = images(), torch.tensor([0, 1, 2])
    ensemble.eval()
    ensemble.share_at_test = "off"
    alone = torch.stack([member(x) for member in ensemble.members])
    torch.testing.assert_close(ensemble(x), alone)
    torch.testing.assert_close(torch.compile(ensemble, backend="aot_eager")(x), alone)
    cmcl.independent_loss(ensemble(x), y).total.backward()
    found = {name: p.grad.clone() for name, p in ensemble.named_parameters() if p.grad is not None}
    ensemble.zero_grad()
    cmcl.independent_loss(alone, y).total.backward()
    for name, grad in found.items():
        torch.testing.assert_close(ensemble.get_parameter(name).grad, grad)


def test_a_stem_of_buffers_is_held_once():
    """A normalisation that is frozen for good computes with buffers, one by one."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(8))

        def forward(self, x):
            return x * self.scale.view(1, -1, 1, 1)

    class Net(InPlace):
        def __init__(self):
            super().__init__()
            self.norm, self.act = Frozen(), nn.ReLU()

    ensemble = SharedStemEnsemble(Net, 2, stem="act").eval()
    x = images()
    assert "members.1.norm.scale" not in ensemble.state_dict()
    ensemble.members[0].norm.scale.fill_(2.0)
    torch.testing.assert_close(ensemble(x), torch.stack([member(x) for member in ensemble.members]))


def test_members_that_are_not_alike():
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    deeper = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="members must be alike up to '1'. Member 1 is not like member 0"):
        SharedStemEnsemble([plain, deeper], stem="1")


def test_the_engine_takes_gradients_of_features_used_many_times():
    """On a GPU the members' trunks run on streams of their own, over one and the same tensor."""
    from cmcl.training.cuda import _Joined

    h = torch.randn(2, 3, requires_grad=True)
    a, b = _Joined.apply(h, h)
    (2 * a + 3 * b).sum().backward()
    assert h.grad.equal(torch.full((2, 3), 5.0))
