"""The real sets: run with CMCL_DATA naming the folder that holds them."""

import os
from pathlib import Path

import pytest
import torch

from cmcl.data import check, load, transforms

ROOT = os.environ.get("CMCL_DATA")


def real(place):
    found = ROOT is not None and (Path(ROOT) / place).exists()
    skip = pytest.mark.skipif(not found, reason=f"CMCL_DATA names no folder with {place}")
    return lambda function: pytest.mark.real(skip(function))


@real("cifar-10-batches-py")
def test_cifar10():
    report = check("cifar10")
    assert report["counts"] == {"train": 50_000, "test": 10_000}
    assert set(report["classes"].values()) == {5_000}
    assert report["mean"] == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    assert report["std"] == pytest.approx([0.2470, 0.2435, 0.2616], abs=5e-5)
    assert report["published"] is True
    test = load("cifar10", split="test")
    assert torch.bincount(test.targets).tolist() == [1000] * 10
    assert [test.classes[i] for i in test.targets[:4].tolist()] == ["cat", "ship", "ship", "airplane"]


@real("svhn")
def test_svhn():
    report = check("svhn")
    assert report["counts"] == {"train": 73_257, "test": 26_032}
    assert list(report["classes"].values()) == [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
    assert report["mean"] == pytest.approx([0.4377, 0.4438, 0.4728], abs=5e-5)
    assert report["published"] is True


@real("iCoseg")
@pytest.mark.parametrize(("orientation", "count"), [("landscape", 449), ("both", 619)])
def test_icoseg(orientation, count):
    train, test = (load("icoseg", split=split, orientation=orientation) for split in ("train", "test"))
    assert len(train) + len(test) == count
    assert abs(len(test) / count - 0.2) < 0.01
    assert train.images.shape[1:] == (3, 75, 125)
    assert set(train.targets.unique().tolist()) == {0, 1}
    seen = {image.numpy().tobytes() for image in train.images}
    assert not any(image.numpy().tobytes() in seen for image in test.images)


MEMORY = """
import resource, sys
from cmcl.data import cifar10, load, svhn
load("digits")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
images = load(sys.argv[1]).images
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / images.nbytes)
"""


@real("svhn")
@pytest.mark.parametrize(("name", "limit"), [("cifar10", 1.5), ("svhn", 2.2)])
def test_memory_while_loading(run_python, name, limit):
    assert float(run_python(MEMORY, name).stdout) <= limit


@pytest.fixture(scope="module")
def whitened():
    train = load("cifar10")
    transform = transforms.Compose([transforms.GCN(), transforms.ZCA()]).fit(train)
    return train, transform, transform.transform(train.images)


def eigenvalues(images):
    """Of the covariance, from all images, in float64."""
    x = images.flatten(1).double()
    x -= x.mean(0)
    return torch.linalg.eigvalsh(x.T @ x / len(x))


@pytest.mark.slow
@real("cifar-10-batches-py")
def test_whitened_cifar10_has_eigenvalues_e_over_e_plus_bias(whitened):
    train, _, values = whitened
    e = eigenvalues(transforms.GCN().transform(train.images)).clamp_min(0)
    assert (eigenvalues(values) - e / (e + 0.1)).abs().max() < 1e-4
    assert values.std().item() == pytest.approx(0.52, abs=0.005)


@pytest.mark.slow
@real("cifar-10-batches-py")
def test_whitened_cifar10_agrees_with_a_float64_reference(whitened):
    """pylearn2's formulas, plainly, in float64 from end to end."""
    train, _, values = whitened
    x = train.images.flatten(1).double()
    x -= x.mean(1, keepdim=True)
    x *= 55 / x.square().sum(1, keepdim=True).sqrt()
    mean = x.mean(0)
    x -= mean
    e, vectors = torch.linalg.eigh(x.T @ x / len(x) + 0.1 * torch.eye(3072, dtype=torch.float64))
    reference = x @ ((vectors * e.rsqrt()) @ vectors.T)
    assert (values.flatten(1) - reference).abs().max() < 1e-3


@pytest.mark.slow
@real("cifar-10-batches-py")
def test_cifar10_goes_back_through_the_whitening(whitened):
    train, transform, values = whitened
    back = transform.steps[-1].inverse(values[:1000])
    assert torch.allclose(back, transforms.GCN().transform(train.images[:1000]), atol=1e-3)
