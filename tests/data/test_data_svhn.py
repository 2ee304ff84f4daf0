import numpy as np
import pytest
from scipy.io import savemat

from cmcl.data import load


def test_images_stand_upright_and_ten_is_zero(tmp_path, write_svhn):
    images, labels = write_svhn("train", n=30)
    write_svhn("test", n=10)
    data = load("svhn", root=tmp_path)
    assert (data.images.numpy() == images).all()
    assert data.targets.tolist() == [int(label) % 10 for label in labels]
    assert 10 in labels
    assert data.classes == tuple("0123456789")
    assert len(load("svhn", split="test", root=tmp_path)) == 10


def test_many_images_are_turned_chunk_by_chunk(tmp_path, write_svhn):
    images, _ = write_svhn(n=9000)
    assert (load("svhn", root=tmp_path).images.numpy() == images).all()


def test_an_uncompressed_file_gives_the_same(tmp_path, write_svhn):
    images, labels = write_svhn()
    checksum = load("svhn", root=tmp_path).checksum
    content = {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None].astype(np.float64)}
    savemat(tmp_path / "svhn" / "train_32x32.mat", content)
    assert load("svhn", root=tmp_path).checksum == checksum


def test_a_missing_file_tells_the_command_that_gets_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train_32x32.mat must exist.*cmcl data fetch svhn"):
        load("svhn", root=tmp_path)


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_a_truncated_mat(tmp_path, write_svhn, share):
    write_svhn()
    path = tmp_path / "svhn" / "train_32x32.mat"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(
        ValueError, match=r"must be a whole .mat file with X and y. Got a damaged one"
    ) as caught:
        load("svhn", root=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"X": np.zeros((32, 31, 3, 30), np.uint8)}, r"\(32, 32, 3, N\).* Got uint8 \(32, 31, 3, 30\)"),
        ({"X": np.zeros((32, 32, 3, 30))}, "Got float64"),
        ({"y": np.full((30, 1), 11, np.uint8)}, "labels 1 to 10 .* Got 11"),
        ({"y": np.zeros((30, 1), np.uint8)}, "labels 1 to 10 .* Got 0"),
        ({"y": np.full((30, 1), 1.5)}, "labels 1 to 10 .* Got 1.5"),
        ({"y": np.full((30, 1), np.nan)}, "labels 1 to 10 .* Got nan"),
        ({"y": "seven"}, "labels 1 to 10 .* Got seven"),
        ({"X": np.zeros((32, 32, 3, 0), np.uint8)}, r"N at least 1. Got uint8 \(32, 32, 3, 0\)"),
        ({"y": np.ones((29, 1), np.uint8)}, r"targets of .* Got \(29,\)"),
    ],
)
def test_wrong_content_is_refused(tmp_path, write_svhn, changes, match):
    write_svhn(**changes)
    with pytest.raises(ValueError, match=match):
        load("svhn", root=tmp_path)


def test_a_mat_with_other_variables(tmp_path, write_svhn):
    write_svhn()
    savemat(tmp_path / "svhn" / "train_32x32.mat", {"Z": np.zeros(3)})
    with pytest.raises(ValueError, match="with X and y"):
        load("svhn", root=tmp_path)


def test_no_read_permission(open_folder, run_unprivileged):
    (open_folder / "svhn").mkdir()
    path = open_folder / "svhn" / "train_32x32.mat"
    path.write_bytes(b"x")
    path.chmod(0)
    result = run_unprivileged(f"import cmcl.data; cmcl.data.load('svhn', root={str(open_folder)!r})")
    assert "must be readable. Got no read permission" in result.stderr.strip().splitlines()[-1]
