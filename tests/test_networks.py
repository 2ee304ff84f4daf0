"""The networks. Run as a program, this file writes the tables of docs/reference/networks.md anew."""

import inspect
import json
import re
from itertools import product
from math import sqrt
from pathlib import Path

import pytest
import torch
from torch import nn

from cmcl import networks
from cmcl.networks import (
    BUILDERS,
    NETWORKS,
    SplitNetwork,
    cnn,
    describe,
    fastcnn,  # noqa: F401  (named on the page)
    fcn,
    googlenet18,
    plain,
    resnet20,
    vggnet17,
)
from cmcl.networks.convnet import DropoutPool, PlainDropout
from cmcl.networks.googlenet import Inception
from cmcl.networks.resnet import Block, Shortcut

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "networks.md"
SMALL_CNN = {"filters": [8, 16], "kernel": 3, "padding": 1, "channels": 1, "size": 8, "hidden": 32}

# Every option away from its default at least once.
ALL_OPTIONS = [
    ("cnn", {}),
    ("cnn", SMALL_CNN),
    ("cnn", dict(padding=2, hidden=None, rescale_dropout=True, drop_before_pool=False, dropout=0.3)),
    ("cnn", {"expected_pooling": True}),
    ("vggnet17", {"classes": 3, "channels": 1}),
    ("vggnet17", {"pool": 3}),
    ("googlenet18", {"classes": 7, "channels": 4}),
    ("googlenet18", {"pool": 3}),
    ("resnet20", {"classes": 100, "channels": 1}),
    ("resnet20", {"width": 4}),
    ("fastcnn", {"classes": 4, "channels": 1, "width": 8}),
    ("fcn", {}),
    ("fcn", {"classes": 5, "channels": 1, "filters": [4, 6], "normalise": False}),
]


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def bn(*channels):
    return sum(2 * c for c in channels)


def inception(inputs, f):
    return (
        inputs * 64 * f
        + (inputs * 32 * f + 9 * 32 * f * 64 * f)
        + (inputs * 16 * f + 25 * 16 * f * 32 * f)
        + inputs * 32 * f
        + bn(192 * f)
    )


# --- sizes


# By hand: weights of the convolutions, batch normalisation, fully connected layers.
PARAMETERS = {
    # 32 -> 28 -> 14 -> 10 -> 5
    "cnn": 3 * 128 * 25 + 128 * 256 * 25 + (5 * 5 * 256 * 1024 + 1024) + (1024 * 10 + 10),
    "vggnet17": 9 * (3 * 64 + 64 * 64 + 64 * 128 + 128 * 128 + 128 * 256 + 3 * 256 * 256)
    + 9 * (256 * 512 + 7 * 512 * 512)
    + bn(*[64] * 2, *[128] * 2, *[256] * 4, *[512] * 8)
    + (512 * 10 + 10),
    "googlenet18": (9 * 3 * 32 + bn(32))
    + (inception(32, 1) + inception(192, 2) + 3 * inception(384, 2) + inception(384, 4))
    + (2 * inception(768, 4) + (768 * 10 + 10)),
    "resnet20": 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    + bn(*[16] * 6, *[32] * 6, *[64] * 6, 64)
    + (64 * 10 + 10),
    "fastcnn": 4 * 3 * 24
    + 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    + bn(64, 64, 256, 256, 256, 256)
    + (256 * 10 + 10),
    "fcn": 16 * (3 * 128 + 128 * 256 + 256 * 128 + 128 * 2) + bn(128, 256, 128),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_by_hand(name):
    network, count = NETWORKS[name], PARAMETERS[name]
    assert parameters(network()) == count
    said = re.search(r"([\d.]+) million parameters", network.build.__doc__)[1]
    assert f"{count / 1e6:.{len(said.partition('.')[2])}f}" == said


def test_parameters_with_options_by_hand():
    # the paper's words: 32 -> 32 -> 16 -> 16 -> 8
    paper = 3 * 128 * 25 + 128 * 256 * 25 + (8 * 8 * 256 * 10 + 10)
    assert parameters(cnn(padding=2, hidden=None)) == paper
    narrow = 9 * (3 * 2 + 6 * 2 * 2 + 2 * 4 + 5 * 4 * 4 + 4 * 8 + 5 * 8 * 8) + bn(
        *[2] * 6, *[4] * 6, *[8] * 7
    )
    assert parameters(resnet20(width=2)) == narrow + (8 * 10 + 10)


def test_layers_are_counted_as_the_names_say():
    def weighted(network):
        return sum(
            isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1))
            for layer in network.modules()
        )

    assert (weighted(vggnet17()), weighted(googlenet18()), weighted(resnet20())) == (17, 18, 20)


@pytest.mark.parametrize("size", [(28, 28), (33, 47), (9, 32)])
def test_resnet_takes_any_size(size):
    assert resnet20().eval()(torch.randn(2, 3, *size)).shape == (2, 10)


@pytest.mark.parametrize("height", [4, 5, 6, 7, 75])
@pytest.mark.parametrize("width", [4, 9, 10, 11, 125])
def test_fcn_answers_every_pixel(height, width):
    network = fcn(filters=(4, 6)).eval()
    assert network(torch.randn(2, 3, height, width)).shape == (2, 2, height, width)


# --- the cut


@pytest.mark.parametrize(
    ("name", "nth", "shape"),
    [
        ("cnn", 1, (128, 28, 28)),
        ("vggnet17", 2, (64, 32, 32)),
        ("googlenet18", 1, (32, 32, 32)),
        ("resnet20", 6, (16, 32, 32)),
        ("fcn", 2, (256, 8, 8)),
    ],
)
def test_the_trunk_continues_from_the_nth_relu(name, nth, shape):
    network = NETWORKS[name]().eval()
    activations = []
    for layer in network.modules():
        if isinstance(layer, nn.ReLU):
            layer.register_forward_hook(lambda _layer, _inputs, output: activations.append(output))
    x = torch.randn(2, 3, 32, 32)
    network(x)
    in_one_go = activations[nth - 1].clone()
    activations.clear()
    shared = network.stem(x)
    feature = shared[0] if isinstance(shared, tuple) else shared
    assert len(activations) == nth
    assert feature is activations[-1]
    assert feature.shape[1:] == shape
    assert torch.equal(feature, in_one_go)
    others = shared[1:] if isinstance(shared, tuple) else ()
    assert torch.equal(network(x), network.trunk(feature, *others))
    assert torch.equal(feature, in_one_go)  # nothing in place: other members read it


@pytest.mark.parametrize(("name", "options"), ALL_OPTIONS)
def test_options_give_the_shape_and_rebuild_the_network(name, options):
    network = NETWORKS[name](**options)
    assert isinstance(network, SplitNetwork)
    assert network.name == name
    assert network.options == network.options | options
    size, classes = options.get("size", 32), options.get("classes", 2 if name == "fcn" else 10)
    logits = network.eval()(torch.randn(2, options.get("channels", 3), size, size))
    assert logits.shape == ((2, classes, size, size) if name == "fcn" else (2, classes))
    assert set(network.options) == set(inspect.signature(NETWORKS[name]).parameters)
    again = NETWORKS[network.name](**json.loads(json.dumps(network.options)))
    assert again.options == network.options
    assert repr(again) == repr(network)
    again.load_state_dict(network.state_dict())


def test_every_network_is_listed_under_its_name():
    assert all(getattr(networks, name) is info.build for name, info in NETWORKS.items())


# --- the layers


@pytest.mark.parametrize("name", NETWORKS)
def test_initial_weights(name):
    torch.manual_seed(0)
    for layer in NETWORKS[name]().modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            assert layer.bias is None
            kernel = layer.kernel_size[0] * layer.kernel_size[1]
            forward = isinstance(layer, nn.Conv2d)
            expected = sqrt(2 / (kernel * (layer.out_channels if forward else layer.in_channels)))
            count = layer.weight.numel()
            # Five deviations of the estimates from so many draws.
            assert layer.weight.std().item() == pytest.approx(expected, rel=5 / sqrt(2 * count))
            assert abs(layer.weight.mean().item()) < 5 * expected / sqrt(count)
            assert layer.weight.abs().max() > 2 * expected  # normal, not uniform
        elif isinstance(layer, nn.Linear):
            bound = sqrt(3 / layer.in_features)
            assert 0.95 * bound < layer.weight.abs().max() <= bound
            assert layer.weight.std().item() == pytest.approx(bound / sqrt(3), rel=0.1)
            assert not layer.bias.any()
        elif isinstance(layer, nn.BatchNorm2d):
            assert (layer.eps, layer.momentum) == (1e-3, 0.1)
            assert (layer.weight == 1).all()
            assert not layer.bias.any()


def test_plain_dropout_by_hand():
    torch.manual_seed(0)
    drop, x = PlainDropout(0.25), torch.full((100_000,), 3.0)
    kept = drop(x)
    assert set(kept.round(decimals=4).tolist()) == {0.0, 3.0}  # kept values are not rescaled
    assert kept.count_nonzero().item() / len(x) == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(drop.eval()(x), torch.full_like(x, 0.75 * 3))


def test_dropout_options():
    kinds = {type(layer) for layer in cnn(rescale_dropout=True).modules()}
    assert nn.Dropout in kinds
    assert PlainDropout not in kinds
    order = list(dict(cnn(drop_before_pool=False).trunk.named_children()))
    assert order[:2] == ["pool1", "drop1"]
    assert list(dict(cnn().trunk.named_children()))[:2] == ["drop1", "pool1"]
    assert [type(layer) for layer in cnn().modules()].count(PlainDropout) == 3


class TestDropoutPool:
    """At test it gives the mean of what it gives in training."""

    def test_by_hand(self):
        window = torch.tensor([[[[4.0, 8.0], [0.0, 2.0]]]])
        assert DropoutPool(0.5, rescale=False).eval()(window).item() == 8 / 2 + 4 / 4 + 2 / 8
        assert DropoutPool(0.5, rescale=True).eval()(window).item() == 8 + 4 / 2 + 2 / 4
        assert DropoutPool(0.0, rescale=False).eval()(window).item() == 8

    @pytest.mark.parametrize("rescale", [False, True])
    @pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
    def test_over_all_masks(self, rescale, p):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, 12, dtype=torch.float64).relu()
        masks = torch.tensor(list(product((0.0, 1.0), repeat=4)), dtype=torch.float64)  # (16, 4)
        chances = torch.where(masks > 0, 1 - p, p).prod(1)
        windows = x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)  # (2, 3, 4, 6, 4)
        largest = (windows.unsqueeze(-2) * masks).amax(-1)  # (2, 3, 4, 6, 16)
        mean = (largest * chances).sum(-1) / (1 - p if rescale else 1)
        torch.testing.assert_close(DropoutPool(p, rescale=rescale).eval()(x), mean)

    def test_odd_sides_are_cut_as_pooling_does(self):
        torch.manual_seed(0)
        pool, x = DropoutPool(0.5, rescale=False), torch.rand(2, 3, 5, 7)
        assert pool.train()(x).shape == pool.eval()(x).shape == (2, 3, 2, 3)
        torch.testing.assert_close(pool(x), pool(x[..., :4, :6]))

    @pytest.mark.parametrize("more", [{}, {"rescale_dropout": True, "dropout": 0.3}])
    def test_training_is_the_same_with_it_and_testing_is_not(self, more):
        trained, tested = [], []
        for expected in (False, True):
            torch.manual_seed(0)
            network, x = cnn(**SMALL_CNN, **more, expected_pooling=expected), torch.randn(4, 1, 8, 8)
            trained.append(network.train()(x))
            tested.append(network.eval()(x))
        assert torch.equal(*trained)
        assert not torch.allclose(*tested)


def test_shortcut_by_hand():
    image = torch.tensor([[1.0, 3, 5, 7], [1, 3, 5, 7], [2, 2, 0, 0], [2, 2, 0, 8]])
    x = torch.stack([image, 10 * image])[None]  # (1, 2, 4, 4)
    halved = torch.tensor([[2.0, 6], [2, 2]])
    nothing = torch.zeros(2, 2)
    expected = torch.stack([nothing, halved, 10 * halved, nothing])[None]
    torch.testing.assert_close(Shortcut(2, 4)(x), expected)


def test_block_without_residual_is_relu_of_its_shortcut():
    x = torch.randn(2, 16, 8, 8)
    same, halving = Block(16, 16).eval(), Block(16, 32).eval()
    for block in (same, halving):
        nn.init.zeros_(block.residual.norm2.weight)
    torch.testing.assert_close(same(x), x.relu())
    torch.testing.assert_close(halving(x), Shortcut(16, 32)(x).relu())


@pytest.mark.parametrize(
    ("window", "largest", "smallest"),
    [
        (2, [[5, 6, 6], [8, 9, 9], [8, 9, 9]], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),  # pads right and below
        (3, [[5, 6, 6], [8, 9, 9], [8, 9, 9]], [[1, 1, 2], [1, 1, 2], [4, 4, 5]]),  # the paper's
    ],
)
def test_inception_pools_by_hand(window, largest, smallest):
    pooled = Inception(1, width=1, pool=window).pooled
    x = torch.arange(1.0, 10).reshape(1, 1, 3, 3)
    assert pooled.pool(pooled.pad(x))[0, 0].tolist() == largest
    assert (-pooled.pool(pooled.pad(-x)))[0, 0].tolist() == smallest


def test_inception_concatenates_in_order():
    module = Inception(8, width=2).eval()
    x = torch.randn(1, 8, 5, 5)
    views = [module.point(x), module.three(x), module.five(x), module.pooled(x)]
    assert [view.shape[1] for view in views] == [128, 128, 64, 64]
    expected = (torch.cat(views, 1) / sqrt(1 + 1e-3)).relu()  # fresh statistics: mean 0, variance 1
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_gets_a_gradient(name):
    network = NETWORKS[name]()
    network(torch.randn(2, 3, 32, 32)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_compiles_in_one_graph(name, mode):
    torch.compiler.reset()  # the networks share one forward, and only so many versions of it are kept
    network = NETWORKS[name]().train(mode == "train")
    size = (75, 125) if name == "fcn" else (32, 32)
    x = torch.randn(2, 3, *size)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")  # needs no C++ compiler
    found = compiled(x)
    found.sum().backward()
    if mode == "eval":  # dropout draws differently in training
        torch.testing.assert_close(found, network(x))


# --- bad options

INTEGER = "must be a whole number of at least"


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("options", [{"classes": 1}, {"classes": 2.5}, {"channels": 0}])
def test_bad_counts(name, options):
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=f"{option} {INTEGER} ..* Got {value}"):
        NETWORKS[name](**options)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cnn", {"size": 15}, "size must be at least 16 .* kernel 5 and padding 0. Got 15"),
        ("cnn", {"size": 3, "padding": 2}, "size must be at least 4 .* kernel 5 and padding 2. Got 3"),
        ("cnn", {"padding": -1}, f"padding {INTEGER} 0. Got -1"),
        ("cnn", {"kernel": 0}, f"kernel {INTEGER} 1. Got 0"),
        ("cnn", {"dropout": 1}, "dropout must be at least 0 and below 1. Got 1"),
        ("cnn", {"dropout": -0.1}, "dropout must be at least 0"),
        ("cnn", {"expected_pooling": True, "drop_before_pool": False}, "must go with drop_before_pool=True"),
        ("cnn", {"hidden": 0}, f"hidden {INTEGER} 1. Got 0"),
        ("cnn", {"filters": (8,)}, r"filters must be two numbers.* Got \(8,\)"),
        ("fcn", {"filters": (8, 0)}, f"each of filters {INTEGER} 1. Got 0"),
        ("fcn", {"filters": 8}, "filters must be two numbers"),
        ("vggnet17", {"pool": 4}, "pool must be one of 2, 3. Got 4"),
        ("googlenet18", {"pool": 1}, "pool must be one of 2, 3. Got 1"),
        ("resnet20", {"width": 0}, f"width {INTEGER} 1. Got 0"),
        ("fastcnn", {"width": 0}, f"width {INTEGER} 1. Got 0"),
        ("plain", {"shape": (4, 4)}, r"shape must be \(features,\) or .* Got \(4, 4\)"),
        ("plain", {"shape": 4}, "shape must be .* Got 4"),
        ("plain", {"shape": (0,)}, f"each of shape {INTEGER} 1. Got 0"),
        ("plain", {"classes": 1}, f"classes {INTEGER} 2. Got 1"),
        ("plain", {"hidden": 0}, f"hidden {INTEGER} 1. Got 0"),
        ("plain", {"shape": (1, 8, 8), "hidden": 1}, f"hidden {INTEGER} 2. Got 1"),
    ],
)
def test_bad_options(name, options, words):
    needed = {"shape": (4,), "classes": 3} if name == "plain" else {}
    with pytest.raises(ValueError, match=words):
        BUILDERS[name](**needed | options)


def test_the_smallest_size_works():
    assert cnn(size=16).eval()(torch.randn(1, 3, 16, 16)).shape == (1, 10)
    assert cnn(size=4, padding=2).eval()(torch.randn(1, 3, 4, 4)).shape == (1, 10)
    assert cnn(size=1, kernel=1, padding=2).eval()(torch.randn(1, 3, 1, 1)).shape == (1, 10)


# --- plain, which is not the paper's


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((4,), lambda: [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)]),
        (
            (2, 6, 6),
            lambda: [
                *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
                *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
                *(nn.Flatten(), nn.Linear(32, 3)),
            ],
        ),
    ],
    ids=["vectors", "images"],
)
def test_plain_by_hand(shape, layers):
    torch.manual_seed(0)
    network = plain(shape=shape, classes=3, hidden=8)
    torch.manual_seed(0)
    expected = nn.Sequential(*layers())
    x = torch.randn(5, *shape)
    assert network(x).equal(expected(x))
    assert isinstance(network.relu, nn.ReLU)
    again = plain(**json.loads(json.dumps(network.options)))
    assert (again.name, again.options) == ("plain", network.options)
    again.load_state_dict(network.state_dict())


def test_a_slice_of_plain_has_no_name():
    assert not plain(shape=(4,), classes=3)[:2].name


# --- the table


def test_describe_by_hand():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 2 * 2, 3))
    assert describe(network, size=4, channels=1, share_after="1") == "\n".join(
        [
            "| layer | kind       | output    | parameters | features    |",
            "| ----- | ---------- | --------- | ---------: | ----------- |",
            "| 0     | Conv2d 3×3 | 2 × 2 × 2 |         20 |             |",
            "| 1     | ReLU       | 2 × 2 × 2 |            | shared here |",
            "| 2     | Flatten    | 8         |            |             |",
            "| 3     | Linear     | 3         |         27 |             |",
            "| total |            |           |         47 |             |",
        ]
    )


def test_describe_leaves_the_network_as_it_was():
    network = resnet20()
    network.trunk.norm.eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    modes = [layer.training for layer in network.modules()]
    describe(network)
    with pytest.raises(RuntimeError, match="channels"):
        describe(network, channels=5)
    assert modes == [layer.training for layer in network.modules()]
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(layer._forward_hooks for layer in network.modules())


@pytest.mark.parametrize("name", NETWORKS)
def test_describe_adds_up(name):
    network = NETWORKS[name]()
    for depth in (1, 2, None):
        lines = describe(network, depth=depth).splitlines()[2:]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        *counts, total = (int(row[3].replace(",", "") or 0) for row in rows)
        assert sum(counts) == total == parameters(network)
        assert [row[4] for row in rows].count("shared here") == 1


def fresh(page):
    """The page with every table after a `describe(...)` made anew."""
    return re.sub(
        r"(```python\n(describe\(.*\))\n```\n\n)(?:\|.*\n)+",
        lambda found: f"{found[1]}{eval(found[2])}\n",
        page,
    )


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert len(re.findall(r"```python\ndescribe", page)) == 8
    assert fresh(page) == page, "docs/reference/networks.md is stale: run python tests/test_networks.py"


if __name__ == "__main__":
    PAGE.write_text(fresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
