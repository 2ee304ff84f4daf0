import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cmcl.data import Dataset, load, split_validation, transforms
from cmcl.data.transforms import (
    GCN,
    PRESETS,
    ZCA,
    Compose,
    MeanStd,
    Normalize,
    build,
    fit_cached,
    from_state,
    refit,
    transform_cached,
)

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}  # as torchvision gives them
ALL = {
    "gcn": GCN(),
    "gcn-deviation": GCN(scale=2, by="deviation"),
    "zca": ZCA(bias=0.5),
    "mean_std": MeanStd(),
    "normalize": Normalize(**IMAGENET),
    "compose": Compose([GCN(), ZCA()]),
    "compose-constants": Compose([Normalize(**IMAGENET), ZCA()]),
}
EVERY = pytest.mark.parametrize("transform", ALL.values(), ids=ALL)


def images(n=40, shape=(3, 4, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)


def fresh(transform):
    return build(transform.parameters())


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected).view_as(found), rtol=1e-6, atol=1e-6)


# Two images of two channels and 1 x 2 pixels. Means 4 and 10; without them -3 -1 1 3 and -10 -10 10 10.
TWO = torch.tensor([[[[1.0, 3.0]], [[5.0, 7.0]]], [[[0.0, 0.0]], [[20.0, 20.0]]]])


def test_gcn_by_hand():
    """Mean and contrast are those of all values of an image: norms sqrt(20) and 20, here."""
    a = 10 / math.sqrt(20)
    close(GCN(scale=10).transform(TWO), [-3 * a, -a, a, 3 * a, -5, -5, 5, 5])
    b = 10 / math.sqrt(5)  # standard deviations sqrt(20 / 4) and 20 / sqrt(4)
    close(GCN(scale=10, by="deviation").transform(TWO), [-3 * b, -b, b, 3 * b, -10, -10, 10, 10])
    close(GCN().transform(TWO)[0], [x * 55 / math.sqrt(20) for x in (-3, -1, 1, 3)])


def test_gcn_of_constant_images_is_zero_and_of_faint_ones_is_not():
    assert GCN().transform(torch.full((2, 3, 4, 4), 200, dtype=torch.uint8)).abs().max() == 0
    assert GCN().transform(torch.full((2, 3, 4, 4), 0.1)).abs().max() < 1e-6
    faint = torch.tensor([0.0, 1e-5], dtype=torch.float64).view(1, 1, 1, 2)  # above 1e-8 of the scale
    close(GCN(scale=math.sqrt(2)).transform(faint), [-1.0, 1.0])
    close(GCN(scale=1e4).transform(faint) * 1e5, [-0.5, 0.5])  # below it: left alone


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000), scale=st.floats(0.1, 100), shift=st.floats(-50, 50), gain=st.floats(0.1, 10)
)
def test_gcn_removes_brightness_and_contrast(seed, scale, shift, gain):
    x = images(3, seed=seed).double()
    y = GCN(scale=scale).transform(x)
    assert torch.allclose(y.flatten(1).norm(dim=1), torch.full((3,), scale), rtol=1e-5)
    assert torch.allclose(GCN(scale=scale).transform(gain * x + shift), y, atol=1e-4 * scale)


def test_mean_std_by_hand():
    """Over images and pixels, by channel: 1 3 0 0 and 5 7 20 20, means 1 and 13."""
    transform = MeanStd().fit(TWO)
    tensors = transform.state()[1]
    s, t = math.sqrt(6 / 4), math.sqrt((64 + 36 + 49 + 49) / 4)
    close(tensors["mean"].float(), [1.0, 13.0])
    close(tensors["std"].float(), [s, t])
    expected = [0, 2 / s, -8 / t, -6 / t, -1 / s, -1 / s, 7 / t, 7 / t]
    close(transform.transform(TWO), expected)
    close(transform.inverse(torch.ones(1, 2, 1, 2)), [1 + s, 1 + s, 13 + t, 13 + t])
    assert tensors["mean"].shape == (2, 1, 1)


def test_mean_std_of_channels_with_little_or_no_variance():
    x = torch.full((3, 1, 2, 2), 7, dtype=torch.uint8)
    transform = MeanStd().fit(x)
    assert transform.transform(x).abs().max() == 0
    close(transform.transform(x[:1, :, :1, :1] + 1), [1.0])  # a constant channel only loses its mean
    faint = torch.tensor([0.0, 0.2]).view(2, 1, 1, 1)
    close(MeanStd().fit(faint).transform(faint), [-1.0, 1.0])


def test_constants_are_for_images_of_0_to_1():
    """As torchvision.transforms.Normalize after ToTensor; 0 and 1 give x / 255."""
    x = images()
    mean, std = (torch.tensor(IMAGENET[key]).view(3, 1, 1) for key in ("mean", "std"))
    known = Normalize(**IMAGENET)
    torch.testing.assert_close(known.transform(x), (x / 255 - mean) / std)
    assert Normalize([0, 0, 0], [1, 1, 1]).transform(x).equal(x / 255)
    assert known.fit(x).transform(x).equal(Normalize(**IMAGENET).transform(x))  # nothing is learned
    compose = Compose([Normalize(**IMAGENET), ZCA()]).fit(x)
    assert compose.steps[0].transform(x).equal(known.transform(x))
    as_tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in IMAGENET.items()}
    assert known.checksum == Normalize(**as_tensors).checksum
    assert known.checksum != Normalize(IMAGENET["mean"], [0.5, 0.5, 0.5]).checksum


def test_zca_by_hand():
    """Variances 4 and 1 along the diagonals of the plane: whitening with bias 1 divides by sqrt 5 and sqrt 2."""
    a, b = 2 * math.sqrt(0.5), math.sqrt(0.5)
    points = [[a + b, a - b], [a - b, a + b], [-a + b, -a - b], [-a - b, -a + b]]
    x = torch.tensor(points).view(4, 1, 1, 2) + torch.tensor([9.0, 5.0])
    transform = ZCA(bias=1).fit(x)
    close(transform.state()[1]["mean"], [9.0, 5.0])
    c, d = 1 / math.sqrt(5), 1 / math.sqrt(2)
    close(transform.state()[1]["matrix"], [(c + d) / 2, (c - d) / 2, (c - d) / 2, (c + d) / 2])
    a, b = a * c, b * d
    close(transform.transform(x), [[a + b, a - b], [a - b, a + b], [-a + b, -a - b], [-a - b, -a + b]])
    close(transform.inverse(transform.transform(x)), x.tolist())


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), bias=st.floats(0.01, 10))
def test_zca_gives_eigenvalues_e_over_e_plus_bias(seed, bias):
    x = images(60, (1, 3, 4), seed=seed).double() / 100
    e = torch.linalg.eigvalsh(torch.cov(x.flatten(1).T, correction=0))
    y = ZCA(bias=bias).fit(x).transform(x).double()
    whitened = torch.linalg.eigvalsh(torch.cov(y.flatten(1).T, correction=0))
    assert torch.allclose(whitened, e / (e + bias), atol=1e-5)


@pytest.mark.parametrize("block", [1, 5, 47, 48])
def test_the_covariance_is_the_same_in_blocks_of_any_size(block, monkeypatch):
    x = images()
    whole = ZCA().fit(x).transform(x)
    monkeypatch.setattr(transforms, "_BLOCK", block)
    monkeypatch.setattr(transforms, "_MAX_DIMENSIONS", 48)  # as many as the images have
    assert torch.allclose(ZCA().fit(x).transform(x), whole, atol=1e-5)


@EVERY
def test_chunks_and_types_make_no_difference(transform, monkeypatch):
    x = images()
    fitted = fresh(transform).fit(x)
    whole = fitted.transform(x)
    assert whole.dtype == torch.float32
    assert torch.equal(whole, fitted.transform(x.double()))
    assert torch.equal(whole, fitted.transform(x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)))
    assert fitted.transform(x[:0]).shape == (0, 3, 4, 4)
    torch.testing.assert_close(fitted.float32_function()(x.float()), whole, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(transforms, "_CHUNK_BYTES", 8 * 48 * 7)  # seven images at a time
    assert [len(chunk) for chunk in transforms._chunks(x)] == [7] * 5 + [5]
    assert torch.allclose(fresh(transform).fit(x).transform(x), whole, atol=1e-5)


@pytest.mark.parametrize("transform", [ZCA(), MeanStd(), Normalize(**IMAGENET), Compose([MeanStd(), ZCA()])])
def test_inverse(transform):
    x = images(100)
    fitted = fresh(transform).fit(x)
    assert torch.allclose(fitted.inverse(fitted.transform(x)), x.float(), atol=0.01)


def test_compose_fits_each_step_to_the_output_of_the_earlier_ones():
    x = images()
    compose = Compose([GCN(), ZCA()]).fit(x)
    gcn, y = GCN().transform(x), compose.transform(x)
    assert torch.allclose(y, ZCA().fit(gcn).transform(gcn), atol=1e-5)
    assert [step.source for step in compose.steps] == [None, compose.source]
    with pytest.raises(ValueError, match=r"compose.steps\[-1\].inverse"):
        compose.inverse(y)
    assert torch.allclose(compose.steps[-1].inverse(y), gcn, atol=1e-3)
    assert [Compose(steps).is_fitted for steps in ([GCN()], [GCN(), MeanStd()])] == [True, False]


@EVERY
def test_saving_and_loading(tmp_path, transform):
    x, path = images(), tmp_path / "t.safetensors"
    fitted = fresh(transform).fit(x)
    fitted.save(path)
    config, tensors = fitted.state()
    assert fitted != fresh(transform).fit(x)  # compared as objects: the parameters are not all
    for loaded in (transforms.load(path), from_state(json.loads(json.dumps(config)), tensors)):
        assert type(loaded) is type(fitted)
        assert loaded.checksum == fitted.checksum == config["checksum"]
        assert torch.equal(loaded.transform(x), fitted.transform(x))
        for step, same in zip(getattr(loaded, "steps", []), getattr(fitted, "steps", []), strict=True):
            assert step.source == same.source
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_the_format_of_saved_files_stays_the_same():
    """Saved ensembles name their transforms by these; the fit itself may differ in the last bits."""
    assert PRESETS["gcn_zca"]().parameters() == {
        "kind": "chain",
        "steps": [{"kind": "gcn", "scale": 55.0, "by": "norm"}, {"kind": "zca", "bias": 0.1}],
    }
    assert PRESETS["mean_std"]().parameters() == {"kind": "mean_std"}
    assert PRESETS["gcn"]().checksum_for("x")[:16] == "2d3198ed907af0d5"
    assert PRESETS["gcn_zca"]().checksum_for("x")[:16] == "fb4e732b9e1d3d7d"
    config = MeanStd().fit(TWO).state()[0]
    assert config["norms"] == {"mean": pytest.approx(math.sqrt(170)), "std": pytest.approx(math.sqrt(51))}
    assert config.keys() == {"kind", "source", "checksum", "digest", "norms"}


def test_checksum_identifies_parameters_and_data():
    one, two = Dataset(images(), torch.zeros(40).long(), ("a",)), images(seed=1)
    assert ZCA().fit(one).checksum == ZCA().fit(one).checksum == ZCA().checksum_for(one.checksum)
    assert len({ZCA().fit(one).checksum, ZCA(0.2).fit(one).checksum, ZCA().fit(two).checksum}) == 3
    assert GCN().fit(one).checksum == GCN().fit(two).checksum == GCN().checksum


def test_damaged_files(tmp_path):
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


def nested(depth):
    config = {"kind": "gcn", "scale": 1.0, "by": "norm"}
    for _ in range(depth):
        config = {"kind": "chain", "steps": [config]}
    return config


@pytest.mark.parametrize(
    "damage",
    [
        *({"bias": 0.2}, {"bias": "0.1"}, {"source": {"checksum": "0" * 64, "recipe": None}}, {"source": []}),
        *({"source": None}, {"checksum": "0" * 64}, {"digest": None}, {"kind": "chain"}, {"kind": []}),
        *([key] for key in ("kind", "bias", "source", "checksum", "digest")),
        pytest.param(nested(900), id="nested"),
    ],
)
def test_a_damaged_config(damage):
    """Values that are not what was saved, fields that are missing, and nesting beyond Python's own limit."""
    config, tensors = ZCA().fit(images()).state()
    config = {k: v for k, v in config.items() if k not in damage} | (
        damage if isinstance(damage, dict) else {}
    )
    with pytest.raises(ValueError, match="saved transform must agree|kind must be|must be fitted"):
        from_state(config, tensors)


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


def never(*_):
    raise AssertionError("computed although it is in the cache")


def test_refit_from_the_config_alone(monkeypatch):
    scenes = MeanStd().fit(load("shapes", groups=1, per_group=5, size=(16, 24)))
    assert scenes.source["recipe"]["options"]["size"] == [16, 24]  # as JSON gives it back
    assert refit(json.loads(json.dumps(scenes.state()[0]))).checksum == scenes.checksum
    train, _ = split_validation(load("digits"), 0.2, seed=5)
    fitted = Compose([GCN(), ZCA()]).fit(train)
    config = json.loads(json.dumps(fitted.state()[0]))
    again = refit(config)
    assert again.checksum == fitted.checksum
    assert torch.allclose(again.transform(train.images), fitted.transform(train.images), atol=1e-4)
    monkeypatch.setattr(ZCA, "_fit", never)
    assert refit(config).checksum == config["checksum"]
    with pytest.raises(ValueError, match="those of the first fit .digits"):
        refit(config | {"checksum": "0" * 64})  # before a fit
    assert refit(GCN(scale=3).state()[0]).scale == 3
    assert refit(Normalize(**IMAGENET).state()[0]).mean == IMAGENET["mean"]


def test_refit_compares_the_numbers():
    fitted = Compose([MeanStd(), MeanStd()]).fit(load("digits"))
    config = fitted.state()[0]
    assert config["norms"]["1.mean"] < 1e-6
    refit(config | {"norms": config["norms"] | {"1.mean": config["norms"]["1.mean"] + 1e-9}})  # rounding
    for factor in (1 + 1e-5, 1 - 1e-5):
        refit(config | {"norms": {"0.mean": config["norms"]["0.mean"] * factor}})
    with pytest.raises(ValueError, match=r"0.mean of the refitted transform must have norm"):
        refit(config | {"norms": {"0.mean": config["norms"]["0.mean"] * 1.001}})
    with pytest.raises(ValueError, match="missing of the refitted"):
        refit(config | {"norms": {"missing": 1.0}})
    with pytest.raises(ValueError, match="Got one fitted on arrays"):
        refit(MeanStd().fit(images()).state()[0])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ZCA().transform(images()), ValueError, "zca must be fitted first"),
        (lambda: ZCA().state(), ValueError, "must be fitted first"),
        (lambda: ZCA().float32_function(), ValueError, "must be fitted first"),
        (lambda: ZCA().fit(images()[:0]), ValueError, "at least one image"),
        (lambda: ZCA(bias=0), ValueError, "bias must be positive. Got 0"),
        (lambda: GCN(scale=0), ValueError, "scale must be positive"),
        (lambda: GCN(by="range"), ValueError, "'norm', 'deviation'. Got 'range'"),
        (lambda: Normalize([123.7], [58.4]), ValueError, r"of 0 to 1. Got \[123.7\] and .* by 255"),
        (lambda: Normalize([0], [255]), ValueError, r"mean and std must be lists of numbers from 0 to 1"),
        (lambda: Normalize([-0.1], [1]), ValueError, r"Got \[-0.1\]"),
        (lambda: Normalize([1.1], [1]), ValueError, r"Got \[1.1\]"),
        (lambda: Normalize([0], [1.1]), ValueError, r"and \[1.1\]"),
        (lambda: Normalize([math.nan], [1]), ValueError, r"Got \[nan\]"),
        (lambda: Normalize([], []), ValueError, r"Got \[\] and \[\]"),
        (lambda: Normalize(0.5, 0.5), TypeError, "Got 0.5 and 0.5"),
        (lambda: Normalize([0.5], [0]), ValueError, r"and \[0\]"),
        (lambda: Normalize([0, 0, 0], [1]), ValueError, r"and \[1\]"),
        (lambda: Normalize([0], [1]).transform(images()), ValueError, "1 channels.* Got 3"),
        (lambda: Compose([]), ValueError, "at least one transform"),
        (lambda: Compose([zca := ZCA(), GCN(), zca]), ValueError, "different objects. Got one of them twice"),
        (lambda: MeanStd().fit(torch.full((2, 1, 2, 2), math.nan)), ValueError, "finite"),
        (lambda: MeanStd().fit(torch.full((2, 1, 2, 2), math.inf)), ValueError, "finite"),
        (lambda: ZCA().fit(torch.full((2, 1, 2, 2), math.nan)), ValueError, "finite"),
        (lambda: ZCA().fit(torch.zeros(1, 3, 75, 125)), ValueError, "at most 16384 values each. Got 28125"),
        (lambda: GCN().transform(torch.zeros(3, 4)), ValueError, r"Got \(3, 4\)"),
        (lambda: GCN().transform(torch.zeros(1, 1, 2, 2).int()), TypeError, "Got torch.int32"),
        (lambda: ZCA().fit(images()).transform(images(shape=(3, 5, 5))), ValueError, "48 values.* Got 75"),
        (lambda: ZCA().fit(images()).inverse(images(shape=(3, 5, 5))), ValueError, "48 values.* Got 75"),
        (lambda: MeanStd().fit(images()).inverse(images(shape=(1, 4, 4))), ValueError, "3 channels.* Got 1"),
        (lambda: build({"kind": "zcaa"}), ValueError, "Got 'zcaa'. Did you mean 'zca'"),
    ],
)
def test_mistakes_are_explained(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@EVERY
def test_the_gpu_gives_the_same(transform):
    x = images(100)
    fitted = fresh(transform).fit(x.cuda())
    assert fitted.transform(x.cuda()).device.type == "cuda"
    assert fitted.transform(x).device.type == "cpu"
    with torch.autocast("cuda"):
        half = fitted.transform(x.cuda())
    assert half.dtype == torch.float32
    assert torch.allclose(half.cpu(), fitted.transform(x), atol=1e-5)


@pytest.fixture
def digits():
    return load("digits")[:100]


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_second_call_reads_what_the_first_wrote(tmp_path, digits, monkeypatch):
    fit = fit_cached(Compose([GCN(), ZCA()]), digits, tmp_path)
    first = transform_cached(fit, digits, tmp_path)
    assert torch.equal(first.images, fit.transform(digits.images))
    assert first.targets is digits.targets
    assert len(files(tmp_path)) == 2
    monkeypatch.setattr(ZCA, "_fit", never)
    monkeypatch.setattr(Compose, "_apply", never)
    again = fit_cached(Compose([GCN(), ZCA()]), digits, tmp_path)
    assert (again.checksum, again.source) == (fit.checksum, fit.source)
    assert torch.equal(transform_cached(again, digits, tmp_path).images, first.images)
    monkeypatch.setenv("CMCL_CACHE", str(tmp_path))
    assert fit_cached(Compose([GCN(), ZCA()]), digits).checksum == fit.checksum


def test_other_data_and_other_parameters_have_other_files(tmp_path, digits):
    for transform, data in (
        (MeanStd(), digits),
        (MeanStd(), digits[:50]),
        (ZCA(), digits),
        (ZCA(0.2), digits),
    ):
        transform_cached(fit_cached(transform, data, tmp_path), data, tmp_path)
    assert fit_cached(GCN(), digits, tmp_path).is_fitted  # learns nothing, so it is not stored
    assert len(files(tmp_path)) == 8


@pytest.mark.parametrize("damage", [lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b[:100], lambda b: b""])
def test_a_damaged_file_is_computed_again(tmp_path, digits, damage):
    fit = fit_cached(MeanStd(), digits, tmp_path)
    expected = transform_cached(fit, digits, tmp_path).images
    whole = [path.read_bytes() for path in files(tmp_path)]
    for path in files(tmp_path):
        path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="transforms/.* computing it again"):
        fit = fit_cached(MeanStd(), digits, tmp_path)
    with pytest.warns(UserWarning, match="images/.* computing it again"):
        rebuilt = transform_cached(fit, digits, tmp_path).images
    assert torch.equal(rebuilt, expected)
    assert [path.read_bytes() for path in files(tmp_path)] == whole


def test_a_flipped_bit_in_the_header_never_changes_the_fit(tmp_path, digits):
    fit = fit_cached(Compose([GCN(), MeanStd()]), digits, tmp_path)
    expected, (path,) = fit.transform(digits.images[:3]), files(tmp_path)
    whole = path.read_bytes()
    for i in range(8 + int.from_bytes(whole[:8], "little")):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ (1, 32)[i % 2]]) + whole[i + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = fit_cached(Compose([GCN(), MeanStd()]), digits, tmp_path)
        assert found.state()[0] == fit.state()[0], i
        assert torch.equal(found.transform(digits.images[:3]), expected), i


def test_a_whole_file_of_another_fit_is_not_read(tmp_path, digits):
    fit_cached(MeanStd(), digits[:50], tmp_path)
    (other,) = files(tmp_path)
    fit = fit_cached(MeanStd(), digits, tmp_path)
    (path,) = {*files(tmp_path)} - {other}
    path.write_bytes(other.read_bytes())
    with pytest.warns(UserWarning, match="computing it again"):
        found = fit_cached(MeanStd(), digits, tmp_path)
    assert torch.equal(found.transform(digits.images), fit.transform(digits.images))


def test_a_cache_that_cannot_be_read_or_written_only_warns(tmp_path, digits, monkeypatch):
    (tmp_path / transforms.CACHE).write_text("a file in place of the folder")
    with pytest.warns(UserWarning, match="continuing without a cache"):
        fit = fit_cached(MeanStd(), digits, tmp_path)
    with pytest.warns(UserWarning, match="continuing without a cache"):
        transform_cached(fit, digits, tmp_path)

    def no_permission(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", no_permission)
    with pytest.warns(UserWarning, match="computing it again"):
        fit_cached(MeanStd(), digits, tmp_path / "other")


LIMITED = """
import resource, sys, warnings
from cmcl.data import load
from cmcl.data.transforms import MeanStd, transform_cached
digits = load("digits")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # a larger write fails, as on a full disk
fit = MeanStd().fit(digits)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert transform_cached(fit, digits, sys.argv[1]).images.shape == digits.images.shape
assert "continuing without a cache" in str(caught[0].message)
"""


def test_a_full_disk_leaves_no_partial_file(tmp_path, run_python):
    result = run_python(LIMITED, tmp_path)
    assert result.returncode == 0, result.stderr
    assert files(tmp_path) == []
