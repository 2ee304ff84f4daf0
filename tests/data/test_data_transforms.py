import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cmcl.data import Dataset, load, split_validation, transforms
from cmcl.data.transforms import GCN, ZCA, Compose, MeanStd, Normalize

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}  # as torchvision tells them
ALL = [
    *(GCN(), GCN(scale=2, by="deviation"), ZCA(bias=0.5), MeanStd(), Compose([GCN(), ZCA()])),
    *(Normalize(**IMAGENET), Compose([Normalize(**IMAGENET), ZCA()])),
]
IDS = ["gcn", "gcn-deviation", "zca", "mean_std", "chain", "normalize", "chain of constants"]


def images(n=40, shape=(3, 4, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)


def fresh(transform):
    return transforms.build(transform.parameters())


def test_gcn_by_hand():
    x = torch.tensor([1.0, 3.0, 5.0, 7.0]).view(1, 1, 2, 2)  # minus the mean: -3 -1 1 3, norm sqrt(20)
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    norm = GCN(scale=10).transform(x)
    assert torch.allclose(norm.flatten(), expected * 10 / math.sqrt(20))
    deviation = GCN(scale=10, by="deviation").transform(x)
    assert torch.allclose(deviation.flatten(), expected * 10 / math.sqrt(5))


def test_gcn_leaves_a_constant_image_at_zero():
    assert GCN().transform(torch.full((2, 3, 4, 4), 200, dtype=torch.uint8)).abs().max() == 0
    assert GCN().transform(torch.full((2, 3, 4, 4), 0.1)).abs().max() < 1e-6


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000), scale=st.floats(0.1, 100), shift=st.floats(-50, 50), gain=st.floats(0.1, 10)
)
def test_gcn_forgets_brightness_and_contrast(seed, scale, shift, gain):
    x = images(3, seed=seed).double()
    y = GCN(scale=scale).transform(x)
    assert torch.allclose(y.flatten(1).norm(dim=1), torch.full((3,), scale), rtol=1e-5)
    assert y.flatten(1).mean(1).abs().max() < 1e-4 * scale
    assert torch.allclose(GCN(scale=scale).transform(gain * x + shift), y, atol=1e-4 * scale)


def test_mean_std_by_hand():
    x = (
        torch.tensor([[0.0, 4.0], [10.0, 10.0]]).view(2, 2, 1, 1).expand(2, 2, 1, 1)
    )  # channels: 0,10 and 4,10
    y = MeanStd().fit(x).transform(x)
    assert y.flatten().tolist() == [-1, -1, 1, 1]


def test_mean_std_of_a_constant_channel():
    x = torch.full((3, 1, 2, 2), 7, dtype=torch.uint8)
    assert MeanStd().fit(x).transform(x).abs().max() == 0


def test_known_constants_are_for_images_of_0_to_1():
    """As torchvision.transforms.Normalize after ToTensor; and 0 and 1 are the plain x / 255."""
    x = images()
    mean, std = (torch.tensor(IMAGENET[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(Normalize(**IMAGENET).transform(x), (x / 255 - mean) / std)
    assert Normalize([0, 0, 0], [1, 1, 1]).transform(x).equal(x / 255)


def test_known_constants_need_no_data_and_are_not_learned_over():
    x, known = images(), Normalize(**IMAGENET)
    assert known.is_fitted
    assert known.fit(x).transform(x).equal(Normalize(**IMAGENET).transform(x))
    chain = Compose([Normalize(**IMAGENET), ZCA()]).fit(x)
    assert chain.steps[0].transform(x).equal(known.transform(x))
    as_tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in IMAGENET.items()}
    assert known.checksum == Normalize(**as_tensors).checksum
    assert known.checksum != Normalize(IMAGENET["mean"], [0.5, 0.5, 0.5]).checksum
    assert transforms.refit(json.loads(json.dumps(known.state()[0]))).transform(x).equal(known.transform(x))


def test_zca_by_hand():
    """Two independent pixels of variance 4 and 1: with bias 1 they are divided by sqrt 5 and sqrt 2."""
    x = torch.tensor([[2.0, 1.0], [2.0, -1.0], [-2.0, 1.0], [-2.0, -1.0]]).view(4, 1, 1, 2) + 9
    y = ZCA(bias=1).fit(x).transform(x)
    assert torch.allclose(y[0].flatten(), torch.tensor([2 / math.sqrt(5), 1 / math.sqrt(2)]))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), bias=st.floats(0.01, 10))
def test_zca_gives_eigenvalues_e_over_e_plus_bias(seed, bias):
    x = images(60, (1, 3, 4), seed=seed).double() / 100
    covariance = torch.cov(x.flatten(1).T, correction=0)
    e = torch.linalg.eigvalsh(covariance)
    y = ZCA(bias=bias).fit(x).transform(x).double()
    whitened = torch.linalg.eigvalsh(torch.cov(y.flatten(1).T, correction=0))
    assert torch.allclose(whitened, e / (e + bias), atol=1e-5)


def test_zca_is_the_one_symmetric_root():
    transform = ZCA(bias=0.1).fit(images(50).float() / 64)
    matrix = transform.state()[1]["matrix"].double()
    assert torch.allclose(matrix, matrix.T, atol=1e-6)
    covariance = torch.cov((images(50).double() / 64).flatten(1).T, correction=0)
    inverse = torch.linalg.inv(covariance + 0.1 * torch.eye(48))
    assert torch.allclose(matrix @ matrix, inverse, atol=1e-4)


@pytest.mark.parametrize("transform", ALL, ids=IDS)
def test_chunks_make_no_difference(transform, monkeypatch):
    x = images()
    whole = fresh(transform).fit(x).transform(x)
    monkeypatch.setattr(transforms, "_CHUNK_BYTES", 8 * 48 * 7)  # seven images at a time
    assert torch.allclose(fresh(transform).fit(x).transform(x), whole, atol=1e-5)


@pytest.mark.parametrize("block", [1, 5, 47, 48])
def test_the_covariance_is_the_same_in_blocks_of_any_size(block, monkeypatch):
    x = images()
    whole = ZCA().fit(x).transform(x)
    monkeypatch.setattr(transforms, "_BLOCK", block)
    assert torch.allclose(ZCA().fit(x).transform(x), whole, atol=1e-5)


@pytest.mark.parametrize("transform", ALL, ids=IDS)
def test_uint8_and_float_images_give_the_same_float32(transform):
    x = images()
    fitted = fresh(transform).fit(x)
    assert fitted.transform(x).dtype == torch.float32
    assert torch.equal(fitted.transform(x), fitted.transform(x.double()))
    assert fitted.transform(x[:0]).shape == (0, 3, 4, 4)


@pytest.mark.parametrize(
    "transform", [ZCA(bias=0.1), MeanStd(), Normalize(**IMAGENET), Compose([MeanStd(), ZCA()])]
)
def test_inverse_brings_the_images_back(transform):
    x = images(100)
    fitted = fresh(transform).fit(x)
    assert torch.allclose(fitted.inverse(fitted.transform(x)), x.float(), atol=0.01)


def test_gcn_has_no_inverse_and_says_what_to_do():
    chain = Compose([GCN(), ZCA()]).fit(images())
    y = chain.transform(images())
    with pytest.raises(ValueError, match=r"compose.steps\[-1\].inverse"):
        chain.inverse(y)
    assert torch.allclose(chain.steps[-1].inverse(y), GCN().transform(images()), atol=1e-3)


def test_a_chain_fits_each_step_to_what_the_earlier_ones_give():
    x = images()
    chain = Compose([GCN(), ZCA()]).fit(x)
    gcn = GCN().transform(x)
    assert torch.allclose(chain.transform(x), ZCA().fit(gcn).transform(gcn), atol=1e-5)
    assert [step.source for step in chain.steps] == [None, chain.source]


@pytest.mark.parametrize("transform", ALL, ids=IDS)
def test_saving_and_loading(tmp_path, transform):
    x = images()
    fitted = fresh(transform).fit(x)
    fitted.save(tmp_path / "t.safetensors")
    loaded = transforms.load(tmp_path / "t.safetensors")
    assert type(loaded) is type(fitted)
    assert loaded.checksum == fitted.checksum
    assert loaded.nbytes == fitted.nbytes
    assert torch.equal(loaded.transform(x), fitted.transform(x))
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize("transform", ALL, ids=IDS)
def test_state_is_json_and_tensors(transform):
    x = images()
    config, tensors = fresh(transform).fit(x).state()
    again = transforms.from_state(json.loads(json.dumps(config)), tensors)
    assert again.checksum == config["checksum"]
    assert torch.equal(again.transform(x), fresh(transform).fit(x).transform(x))


def test_checksum_names_parameters_and_data():
    one, two = Dataset(images(), torch.zeros(40).long(), ("a",)), images(seed=1)
    assert ZCA().fit(one).checksum == ZCA().fit(one).checksum
    assert ZCA().fit(one).checksum == ZCA().checksum_for(one.checksum)
    assert len({ZCA().fit(one).checksum, ZCA(0.2).fit(one).checksum, ZCA().fit(two).checksum}) == 3
    assert GCN().fit(one).checksum == GCN().fit(two).checksum == GCN().checksum


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    MeanStd().fit(images()).save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must agree with its checksums"):
        transforms.load(path)
    path.write_bytes(content[:50])
    with pytest.raises(ValueError, match="must be a saved transform"):
        transforms.load(path)
    with pytest.raises(FileNotFoundError, match="must exist"):
        transforms.load(tmp_path / "none")


@pytest.mark.parametrize(
    "damage",
    [
        {"bias": 0.2},
        {"bias": "0.1"},
        {"source": {"checksum": "0" * 64, "recipe": None}},
        {"source": []},
        {"source": None},
        {"checksum": "0" * 64},
        {"digest": None},
        {"kind": "chain"},
        {"kind": []},
    ],
)
def test_a_damaged_config_is_refused(damage):
    config, tensors = ZCA().fit(images()).state()
    with pytest.raises(ValueError, match="saved transform must agree|kind must be|must be fitted"):
        transforms.from_state(config | damage, tensors)


@pytest.mark.parametrize("key", ["kind", "bias", "source", "checksum", "digest"])
def test_a_config_that_lacks_something_is_refused(key):
    config, tensors = ZCA().fit(images()).state()
    del config[key]
    with pytest.raises(ValueError, match="saved transform must agree|kind must be"):
        transforms.from_state(config, tensors)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.safetensors"
    MeanStd().fit(images()).save(path)
    before = path.read_bytes()

    def full(tensors, target, metadata):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transforms, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        ZCA().fit(images()).save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_refit_from_the_config_alone():
    train, _ = split_validation(load("digits"), 0.2, seed=5)
    fitted = Compose([GCN(), ZCA()]).fit(train)
    config = json.loads(json.dumps(fitted.state()[0]))
    again = transforms.refit(config)
    assert again.checksum == fitted.checksum
    assert torch.allclose(again.transform(train.images), fitted.transform(train.images), atol=1e-4)
    assert transforms.refit(GCN(scale=3).state()[0]).scale == 3


def test_refit_finds_the_fit_in_the_cache(monkeypatch):
    config = MeanStd().fit(load("digits")).state()[0]
    transforms.refit(config)
    monkeypatch.setattr(MeanStd, "_fit", lambda *_: pytest.fail("fitted although it is in the cache"))
    assert transforms.refit(config).checksum == config["checksum"]


def test_other_data_are_refused_before_the_fit(monkeypatch):
    config = MeanStd().fit(load("digits")).state()[0]
    monkeypatch.setattr(MeanStd, "_fit", lambda *_: pytest.fail("fitted to the wrong data"))
    with pytest.raises(ValueError, match="those of the first fit"):
        transforms.refit(config | {"checksum": "0" * 64})


def test_rounding_around_zero_is_no_disagreement():
    config = Compose([MeanStd(), MeanStd()]).fit(load("digits")).state()[0]
    assert config["norms"]["1.mean"] < 1e-6
    config["norms"]["1.mean"] += 1e-9
    transforms.refit(config)


def test_a_recipe_is_json_from_the_start():
    fitted = MeanStd().fit(load("shapes", groups=1, per_group=5, size=(16, 24)))
    assert fitted.source["recipe"]["options"]["size"] == [16, 24]
    assert transforms.refit(json.loads(json.dumps(fitted.state()[0]))).checksum == fitted.checksum
    with pytest.raises(TypeError, match="numbers, strings and lists of them. Got something else"):
        load("shapes", size=torch.tensor(16))


def test_refit_refuses_other_data_and_other_numbers(tmp_path, cifar):
    fitted = MeanStd().fit(load("cifar10", root=cifar.write(tmp_path)))
    config = fitted.state()[0]
    assert transforms.refit(config, tmp_path).checksum == fitted.checksum
    cifar.data["data_batch_1"][0, 0] ^= 1
    with pytest.raises(ValueError, match=r"those of the first fit \(cifar10"):
        transforms.refit(config, cifar.write(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"mean of the refitted transform must have norm 1000. Got"):
        transforms.refit(config | {"norms": {"mean": 1000.0}}, tmp_path)
    with pytest.raises(ValueError, match="Got one fitted on arrays"):
        transforms.refit(MeanStd().fit(images()).state()[0])


def test_presets_and_unknown_kinds():
    assert transforms.PRESETS["gcn_zca"]().parameters()["steps"][0] == {
        "kind": "gcn",
        "scale": 55.0,
        "by": "norm",
    }
    contrast = transforms.PRESETS["gcn"]().fit(images()).transform(images())
    torch.testing.assert_close(contrast.flatten(1).norm(dim=1), torch.full((len(contrast),), 55.0))
    with pytest.raises(ValueError, match="Got 'zcaa'. Did you mean 'zca'"):
        transforms.build({"kind": "zcaa"})


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ZCA().transform(images()), ValueError, "zca must be fitted first"),
        (lambda: ZCA().checksum, ValueError, "must be fitted first"),
        (lambda: ZCA().fit(images()[:0]), ValueError, "at least one image"),
        (lambda: ZCA(bias=0), ValueError, "bias must be positive. Got 0"),
        (lambda: GCN(scale=-1), ValueError, "scale must be positive"),
        (lambda: GCN(by="range"), ValueError, "'norm' or 'deviation'. Got 'range'"),
        (lambda: Normalize([123.7], [58.4]), ValueError, r"for images of 0 to 1. Got \[123.7\]. .* by 255"),
        (lambda: Normalize([0], [255]), ValueError, r"std must be numbers from 0 to 1.* Got \[255.0\]"),
        (lambda: Normalize([math.nan], [1]), ValueError, r"mean must be numbers .* Got \[nan\]"),
        (lambda: Normalize([], []), ValueError, r"mean must be numbers .* Got \[\]"),
        (lambda: Normalize(0.5, 0.5), TypeError, "mean must be a list of numbers, .* Got 0.5"),
        (lambda: Normalize([0.5], [0]), ValueError, r"std must be 1 positive numbers, .* Got \[0.0\]"),
        (lambda: Normalize([0, 0, 0], [1]), ValueError, r"std must be 3 positive numbers, .* Got \[1.0\]"),
        (lambda: Normalize([0], [1]).transform(images()), ValueError, "1 channels.* Got 3"),
        (lambda: Compose([]), ValueError, "at least one transform"),
        (lambda: Compose([zca := ZCA(), GCN(), zca]), ValueError, "different objects. Got one of them twice"),
        (lambda: MeanStd().fit(torch.full((2, 1, 2, 2), math.nan)), ValueError, "finite"),
        (lambda: MeanStd().fit(torch.full((2, 1, 2, 2), math.inf)), ValueError, "finite"),
        (lambda: GCN().transform(torch.zeros(3, 4)), ValueError, r"Got \(3, 4\)"),
        (lambda: GCN().transform(torch.zeros(1, 1, 2, 2).int()), TypeError, "Got torch.int32"),
        (lambda: ZCA().fit(torch.full((2, 1, 2, 2), math.nan)), ValueError, "finite"),
        (lambda: ZCA().fit(torch.zeros(1, 3, 75, 125)), ValueError, "at most 16384 values each. Got 28125"),
        (
            lambda: ZCA().fit(images()).transform(images(shape=(3, 5, 5))),
            ValueError,
            "48 values each.* Got 75",
        ),
        (
            lambda: MeanStd().fit(images()).transform(images(shape=(1, 4, 4))),
            ValueError,
            "3 channels.* Got 1",
        ),
    ],
)
def test_mistakes_are_explained(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("transform", ALL, ids=IDS)
def test_the_gpu_gives_the_same(transform):
    x = images(100)
    fitted = fresh(transform).fit(x.cuda())
    assert fitted.transform(x.cuda()).device.type == "cuda"
    assert fitted.transform(x).device.type == "cpu"
    with torch.autocast("cuda"):
        half = fitted.transform(x.cuda())
    assert half.dtype == torch.float32
    assert torch.allclose(half.cpu(), fitted.to("cpu").transform(x), atol=1e-5)
