import zlib

import numpy as np
import pytest
from scipy.io import savemat

from cmcl.data import load


def test_images_stand_upright_and_ten_is_zero(tmp_path, write_svhn):
    images, labels = write_svhn("train", n=30)
    many, _ = write_svhn("test", n=9000)  # transposed chunk by chunk
    data = load("svhn", root=tmp_path)
    assert (data.images.numpy() == images).all()
    assert data.targets.tolist() == [int(label) % 10 for label in labels]
    assert 10 in labels
    assert data.classes == tuple("0123456789")
    assert (load("svhn", split="test", root=tmp_path).images.numpy() == many).all()


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int32, np.uint16, np.int64, np.int8])
@pytest.mark.parametrize("compressed", [True, False])
def test_every_kind_of_number_and_other_arrays_beside(tmp_path, write_svhn, kind, compressed):
    images, labels = write_svhn()
    checksum = load("svhn", root=tmp_path).checksum
    others = {"a": "text", "Z": np.zeros((3, 4)), "cells": np.array([{"x": 1}], object)}
    content = others | {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None].astype(kind)}
    savemat(tmp_path / "svhn" / "train_32x32.mat", content, do_compression=compressed)
    assert load("svhn", root=tmp_path).checksum == checksum


def test_small_elements(tmp_path, write_svhn):
    """Up to four bytes of data are stored inside the tag: three labels, here."""
    _, labels = write_svhn(n=3)
    assert load("svhn", root=tmp_path).targets.tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"X": np.zeros((32, 31, 3, 30), np.uint8)}, r"\(32, 32, 3, N\), not uint8 \(32, 31, 3, 30\)"),
        ({"X": np.zeros((32, 32, 3, 30))}, "not float64"),
        ({"X": np.zeros((32, 32, 3, 0), np.uint8)}, r"not uint8 \(32, 32, 3, 0\)"),
        ({"X": np.zeros((32, 32, 3, 30), complex)}, "not float64"),
        ({"y": np.full((30, 1), 11, np.uint8)}, "labels 1 to 10.* not 11"),
        ({"y": np.zeros((30, 1), np.uint8)}, "labels 1 to 10.* not 0"),
        ({"y": np.full((30, 1), 1.5)}, "labels 1 to 10.* not 1.5"),
        ({"y": np.full((30, 1), np.nan)}, "labels 1 to 10.* not nan"),
        ({"y": "seven"}, "y of type"),
        ({"y": np.ones((29, 1), np.uint8)}, r"targets of .* Got \(29,\)"),
    ],
)
def test_wrong_content(tmp_path, write_svhn, changes, match):
    write_svhn(**changes)
    with pytest.raises(ValueError, match=match):
        load("svhn", root=tmp_path)


def element(kind, data, size=None):
    padding = bytes(-len(data) % 8)
    return kind.to_bytes(4, "little") + (size or len(data)).to_bytes(4, "little") + data + padding


def matrix(dims, values, size=None, name=b"X"):
    shape = b"".join(d.to_bytes(4, "little", signed=True) for d in dims)
    head = element(6, bytes([9, *[0] * 7])) + element(5, shape) + element(1, name)
    return head + element(2, values, size)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "no array"),
        (element(14, b"", 1 << 31), "an element of 2,147,483,648 bytes"),
        (element(1, b"", 8), "an element of 8 bytes"),  # the file ends where it should begin
        (element(14, matrix((32, 32, 3, 1), bytes(8), size=4_000_000_000)), "a part of 4,000,000,000 bytes"),
        (element(14, matrix((32, 32, 3, 1), bytes(8))), "cannot reshape"),
        (element(14, matrix((-2, -4, 1), bytes(8))), r"shape \[-2, -4, 1\]"),
        (element(14, matrix((2,), bytes(8))[:40]), "a part of|ends early"),
        (
            element(15, zlib.compress(element(14, matrix((8,), bytes(8), size=10**9)))),
            "ends early",
        ),
        (element(15, zlib.compress(element(14, matrix((8,), bytes(8))))[:-2]), "incorrect data check"),
        (
            element(15, zlib.compress(element(14, matrix((8,), bytes(8))))[:-4] + bytes(4)),
            "incorrect data check",
        ),
        (element(15, b"no zlib"), "incorrect header check"),
        (element(14, matrix((8,), bytes(8), name=b"Z" * 65)), "a part of 65 bytes"),
        (element(14, b"\1\0\7\0" + bytes(40)), "a part of 7 bytes"),  # a small element holds at most 4
    ],
)
def test_damaged_files(tmp_path, content, match):
    (tmp_path / "svhn").mkdir()
    path = tmp_path / "svhn" / "train_32x32.mat"
    path.write_bytes(bytes(124) + b"\0\1IM" + content)
    with pytest.raises(ValueError, match=rf"must be a whole .mat file .*({match})") as caught:
        load("svhn", root=tmp_path)
    assert "\n" not in str(caught.value)
    path.write_bytes(bytes(128) + content)
    with pytest.raises(ValueError, match="no header of MATLAB 5"):
        load("svhn", root=tmp_path)


FUZZ = """
import resource, sys
from pathlib import Path
import numpy as np
from cmcl.data import load
root = Path(sys.argv[1])
path = root / "svhn" / "train_32x32.mat"
whole, rng = path.read_bytes(), np.random.default_rng(0)
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
def attempt(content):
    path.write_bytes(content)
    try:
        load("svhn", root=root)
    except ValueError as error:
        assert "svhn" in str(error), error
for size in [*range(0, 400, 3), *rng.integers(0, len(whole), 100)]:
    attempt(whole[:size])
for _ in range(1500):
    damaged = bytearray(whole)
    for place in rng.integers(100, min(len(whole), 600), rng.integers(1, 4)):
        damaged[place] ^= 1 << rng.integers(8)
    attempt(bytes(damaged))
print("survived")
"""


@pytest.mark.parametrize("compressed", [True, False])
def test_no_damage_crashes_python(tmp_path, write_svhn, run_python, compressed):
    """Truncations and flipped bits, mostly where the sizes and types are stored."""
    images, labels = write_svhn(n=2)
    content = {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None]}
    savemat(tmp_path / "svhn" / "train_32x32.mat", content, do_compression=compressed)
    result = run_python(FUZZ, tmp_path)
    assert (result.returncode, result.stdout) == (0, "survived\n"), result.stderr
