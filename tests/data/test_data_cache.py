import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from cmcl.data import load
from cmcl.data.transforms import GCN, ZCA, Compose, MeanStd, fit_cached, transform_cached


@pytest.fixture
def digits():
    return load("digits")[:100]


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def never(*_):
    raise AssertionError("computed although it is in the cache")


def test_a_second_call_reads_what_the_first_wrote(tmp_path, digits, monkeypatch):
    fit = fit_cached(Compose([GCN(), ZCA()]), digits, tmp_path)
    first = transform_cached(fit, digits, tmp_path)
    assert torch.equal(first.images, fit.transform(digits.images))
    assert first.targets is digits.targets
    assert len(files(tmp_path)) == 2
    monkeypatch.setattr(ZCA, "_fit", never)
    monkeypatch.setattr(Compose, "_apply", never)
    again = fit_cached(Compose([GCN(), ZCA()]), digits, tmp_path)
    assert again.checksum == fit.checksum
    assert torch.equal(transform_cached(again, digits, tmp_path).images, first.images)


def test_other_data_and_other_parameters_have_other_files(tmp_path, digits):
    for transform, data in [
        (MeanStd(), digits),
        (MeanStd(), digits[:50]),
        (ZCA(), digits),
        (ZCA(0.2), digits),
    ]:
        transform_cached(fit_cached(transform, data, tmp_path), data, tmp_path)
    assert len(files(tmp_path)) == 8


def test_what_learns_nothing_is_not_stored(tmp_path, digits):
    fit_cached(GCN(), digits, tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", [lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b[:100], lambda b: b""])
def test_a_damaged_file_is_built_again(tmp_path, digits, damage):
    fit = fit_cached(MeanStd(), digits, tmp_path)
    expected = transform_cached(fit, digits, tmp_path).images
    whole = [path.read_bytes() for path in files(tmp_path)]
    for path in files(tmp_path):
        path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=r"transforms/.* is damaged or unreadable: computing it again"):
        fit = fit_cached(MeanStd(), digits, tmp_path)
    with pytest.warns(UserWarning, match=r"images/.* is damaged or unreadable: computing it again"):
        rebuilt = transform_cached(fit, digits, tmp_path).images
    assert torch.equal(rebuilt, expected)
    assert [path.read_bytes() for path in files(tmp_path)] == whole


@pytest.mark.parametrize("bit", [1, 32])
def test_damage_to_the_header_is_never_taken_for_truth(tmp_path, digits, bit):
    """One flipped bit, anywhere before the tensors: the same fit comes back, read or computing it again."""
    make = lambda: Compose([GCN(), MeanStd()])  # noqa: E731
    fit = fit_cached(make(), digits, tmp_path)
    expected, (path,) = fit.transform(digits.images[:3]), files(tmp_path)
    whole = path.read_bytes()
    for i in range(8 + int.from_bytes(whole[:8], "little")):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = fit_cached(make(), digits, tmp_path)
        assert found.state()[0] == fit.state()[0], i
        assert torch.equal(found.transform(digits.images[:3]), expected), i


def test_a_whole_file_of_another_fit_is_not_read(tmp_path, digits):
    fit = fit_cached(MeanStd(), digits, tmp_path)
    (path,) = files(tmp_path)
    MeanStd().fit(digits[:50]).save(path)
    with pytest.warns(UserWarning, match="computing it again"):
        found = fit_cached(MeanStd(), digits, tmp_path)
    assert torch.equal(found.transform(digits.images), fit.transform(digits.images))


def test_a_cache_that_may_not_be_entered_does_not_stop_the_work(tmp_path, digits, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.warns(UserWarning, match="computing it again"):
        fit_cached(MeanStd(), digits, tmp_path)


def test_a_disk_that_takes_nothing_does_not_stop_the_work(tmp_path, digits):
    (tmp_path / "preprocessed").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="continuing without a cache"):
        fit = fit_cached(MeanStd(), digits, tmp_path)
    with pytest.warns(UserWarning, match="continuing without a cache"):
        transform_cached(fit, digits, tmp_path)


LIMITED = """
import resource, sys, warnings
from cmcl.data import load
from cmcl.data.transforms import MeanStd, fit_cached, transform_cached
digits = load("digits")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # a write beyond fails, as on a full disk
fit = MeanStd().fit(digits)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert transform_cached(fit, digits, sys.argv[1]).images.shape == digits.images.shape
assert "continuing without a cache" in str(told[0].message)
"""


def test_a_disk_that_runs_full_leaves_nothing_half_written(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert files(tmp_path) == []


def test_the_place_comes_from_the_environment(tmp_path, digits, monkeypatch):
    monkeypatch.setenv("CMCL_CACHE", str(tmp_path))
    fit_cached(MeanStd(), digits)
    assert len(files(tmp_path / "preprocessed" / "transforms")) == 1
