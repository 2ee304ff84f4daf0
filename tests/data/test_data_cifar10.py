import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cmcl.data import load


def test_python_version(tmp_path, cifar):
    data = load("cifar10", root=cifar.write(tmp_path))
    images, labels = cifar.train()
    assert (data.images.numpy() == images).all()
    assert data.targets.tolist() == labels
    assert data.classes[3] == "cat"
    assert str(tmp_path) in data.source
    test = load("cifar10", split="test", root=tmp_path)
    assert test.targets.tolist() == cifar.labels["test_batch"]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_pickles_of_every_protocol(tmp_path, cifar, protocol):
    data = load("cifar10", root=cifar.write(tmp_path, cifar.files(protocol)))
    assert (data.images.numpy() == cifar.train()[0]).all()


def python2_pickle(data, labels):
    """What Python 2 with numpy 1 wrote: byte strings, and the old names of numpy's modules."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(J" + len(data).to_bytes(4, "little") + b"M\x00\x0ct"
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + data.nbytes.to_bytes(4, "little") + data.tobytes() + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def test_pickles_of_python_2(tmp_path, cifar):
    files = cifar.files()
    for name in cifar.names:
        files[name] = python2_pickle(cifar.data[name], cifar.labels[name])
    assert pickle.loads(files["test_batch"], encoding="latin1")["labels"] == cifar.labels["test_batch"]  # noqa: S301
    data = load("cifar10", root=cifar.write(tmp_path, files))
    assert (data.images.numpy() == cifar.train()[0]).all()
    assert data.targets.tolist() == cifar.train()[1]


def test_all_forms_have_one_checksum(tmp_path, cifar):
    roots = [tmp_path / name for name in "abcd"]
    for root in roots:
        root.mkdir()
    cifar.write(roots[0])
    cifar.write(roots[1], cifar.binary_files(), "cifar-10-batches-bin")
    cifar.write_archive(roots[2])
    cifar.write_archive(roots[3], cifar.binary_files(), "cifar-10-batches-bin", "cifar-10-binary.tar.gz")
    loaded = [load("cifar10", root=root) for root in roots]
    assert len({data.checksum for data in loaded}) == 1
    assert len({data.classes for data in loaded}) == 1


def test_an_archive_is_not_unpacked_to_disk(tmp_path, cifar):
    archive = cifar.write_archive(tmp_path)
    load("cifar10", root=tmp_path)
    assert list(tmp_path.iterdir()) == [archive]


def test_root_comes_from_the_environment(tmp_path, cifar, monkeypatch):
    monkeypatch.setenv("CMCL_DATA", str(cifar.write(tmp_path)))
    assert len(load("cifar10", split="test")) == 20
    monkeypatch.delenv("CMCL_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"\.cache/cmcl must hold"):
        load("cifar10")


def test_a_missing_set_tells_the_command_that_gets_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Got neither. Get it with: cmcl data fetch cifar10"):
        load("cifar10", root=tmp_path)


def test_a_missing_batch_is_named(tmp_path, cifar):
    files = cifar.files()
    del files["data_batch_3"]
    (tmp_path / "archive").mkdir()
    cifar.write_archive(tmp_path / "archive", files)
    with pytest.raises(FileNotFoundError, match=r"data_batch_3 must exist.*cmcl data fetch cifar10"):
        load("cifar10", root=cifar.write(tmp_path, files))
    with pytest.raises(FileNotFoundError, match=r"Got none named data_batch_3"):
        load("cifar10", root=tmp_path / "archive")


def test_a_complete_archive_beside_an_incomplete_folder(tmp_path, cifar):
    archive = cifar.write_archive(tmp_path)
    cifar.write(tmp_path, {"data_batch_1": b"half of what was unpacked"})
    assert load("cifar10", root=tmp_path).source == str(archive)
    archive.unlink()
    cifar.write(tmp_path, cifar.binary_files(), "cifar-10-batches-bin")
    assert load("cifar10", root=tmp_path).source.endswith("cifar-10-batches-bin")


@pytest.mark.parametrize("names", [3, None, "automobile", [1] * 10, [["cat"]] * 10, ["cat"] * 9])
def test_wrong_names_of_classes_are_refused(tmp_path, cifar, names):
    files = cifar.files() | {"batches.meta": pickle.dumps({"label_names": names}, protocol=2)}
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/cifar-10-batches-py/batches.meta must hold 10 class names"
    ):
        load("cifar10", root=cifar.write(tmp_path, files))


def test_a_label_of_the_binary_version_out_of_range(tmp_path, cifar):
    files = cifar.binary_files()
    files["data_batch_2.bin"] = b"\x0b" + files["data_batch_2.bin"][1:]
    with pytest.raises(ValueError, match=r"data_batch_2.bin must hold labels 0 to 9. Got \[11\]"):
        load("cifar10", root=cifar.write(tmp_path, files, "cifar-10-batches-bin"))


def test_an_archive_cut_in_half(tmp_path, cifar):
    archive = cifar.write_archive(tmp_path)
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        ValueError, match=r"cifar-10-python.tar.gz.* Got .*ended before.* cmcl data fetch cifar10"
    ):
        load("cifar10", root=tmp_path)


def test_a_binary_archive_cut_in_half_or_changed(tmp_path, cifar):
    archive = cifar.write_archive(
        tmp_path, cifar.binary_files(), "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
    )
    content = archive.read_bytes()
    for damaged in (content[: len(content) // 2], content[:-8] + bytes(8)):
        archive.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"must be a whole .tar.gz. Got a damaged one"):
            load("cifar10", root=tmp_path)


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"\x1f\x8b\x08\x00" + bytes(40)])
def test_something_else_than_an_archive(tmp_path, content):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"must be a whole .tar.gz"):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (
            {"data": np.zeros((20, 3000), np.uint8), "labels": [0] * 20},
            r"\(n, 3072\). Got uint8 \(20, 3000\)",
        ),
        ({"data": np.zeros((20, 3072), np.float32), "labels": [0] * 20}, "arrays must be uint8, not 'f4'"),
        ({"data": np.zeros((20, 3072), np.uint8), "labels": [0] * 19 + [11]}, r"labels 0 to 9. Got \[11\]"),
        ({"data": np.zeros((20, 3072), np.uint8), "labels": [0] * 19}, "20 labels. Got 19"),
        (
            {"data": np.zeros((20, 3072), np.uint8), "labels": ["cat"] * 20},
            "whole numbers as labels. Got str",
        ),
        (
            {"data": np.zeros((20, 3072), np.uint8), "labels": [1.5] * 20},
            "whole numbers as labels. Got float",
        ),
        ({"data": np.zeros((20, 3072), np.uint8), "labels": [[1]] * 20}, "whole numbers as labels. Got list"),
        ({"data": np.zeros((20, 3072), np.uint8), "labels": [10**30] * 20}, r"labels 0 to 9. Got \[1000"),
        (
            {"data": np.zeros((7, 3072), np.uint8), "labels": [0] * 7},
            "20 images, as the other batches do. Got 7",
        ),
        ({3: np.zeros((20, 3072), np.uint8), "labels": [0] * 20}, "a text is expected, not int"),
        ({"pixels": 1}, r"data and labels. Got \['pixels'\]"),
        ([1, 2], "a dict is expected, not list"),
    ],
)
def test_wrong_batches_are_refused(tmp_path, cifar, batch, match):
    files = cifar.files() | {"data_batch_2": pickle.dumps(batch, protocol=2)}
    with pytest.raises(ValueError, match=rf"cifar-10-batches-py/data_batch_2 must hold .*{match}"):
        load("cifar10", root=cifar.write(tmp_path, files))


@pytest.mark.parametrize("size", [0, 100, -1, 3073 * 20 + 5])
def test_truncated_files_are_refused(tmp_path, cifar, size):
    files = {name: content[:size] for name, content in cifar.files().items()}
    with pytest.raises(ValueError, match="must hold the dict of a CIFAR-10 file"):
        load("cifar10", root=cifar.write(tmp_path / "py", files))
    binary = {name: content[:size] for name, content in cifar.binary_files().items()}
    if size != 3073 * 20 + 5:
        with pytest.raises(ValueError, match="records of 3073 bytes"):
            load("cifar10", root=cifar.write(tmp_path / "bin", binary, "cifar-10-batches-bin"))


class Evil:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("call", [subprocess.call, eval, exec, getattr, __import__], ids=lambda f: f.__name__)
def test_an_evil_pickle_runs_nothing(tmp_path, cifar, call, protocol):
    mark = tmp_path / "was-here"
    argument = [sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    if call in (eval, exec):
        argument = f"open({str(mark)!r}, 'w')"
    evil = pickle.dumps({"data": Evil(call, argument), "labels": [0]}, protocol=protocol)
    cifar.write(tmp_path, cifar.files() | {"data_batch_1": evil})
    with pytest.raises(ValueError, match="is not allowed in a data file"):
        load("cifar10", root=tmp_path)
    assert not mark.exists()


FORGED = """
import io, pickle, sys
import numpy as np
from cmcl.data import unpickle
try:
    content = unpickle.read_dict(io.BytesIO(eval(sys.argv[1])))
    print(content["data"].dtype, content["data"].tolist())
except ValueError as error:
    print("refused:", error)
assert np.frombuffer(b"ab", dtype=np.uint8).tolist() == [97, 98]
assert pickle.loads(pickle.dumps(np.arange(3), protocol=5)).tolist() == [0, 1, 2]
"""
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(K\x01t"
OBJECT_FIELD = b"(K\x03U\x01|N(U\x01ftp9\n}U\x01f(cnumpy\ndtype\n(U\x02O8K\x00K\x01tRK\x00tsK\x08K\x01K\x3ftb"


@pytest.mark.parametrize(
    ("array", "outcome"),
    [
        # a type of 8 plain bytes, told afterwards that they are a pointer to an object
        (
            ARRAY + b"cnumpy\ndtype\n(U\x02V8K\x00K\x01tR" + OBJECT_FIELD + b"\x89U\x08AAAAAAAAtb",
            "refused: UnpicklingError: arrays must be uint8, not b'V8'",
        ),
        (
            ARRAY + b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR\x89]K\x01atb",
            "refused: UnpicklingError: arrays must be uint8, not b'O8'",
        ),
        # the state of uint8 itself is set: nothing happens
        (
            ARRAY
            + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\x08\x00\x00\x00K\x01K\x3ftb\x89U\x01Atb",
            "uint8 [65]",
        ),
        (ARRAY + b"N\x89U\x08AAAAAAAAtb", "refused: TypeError: arrays must be uint8"),
        (ARRAY + b"cnumpy\ndtype\n\x89U\x02AAtb", "refused: ValueError: cannot reshape"),
        (ARRAY + b"cnumpy\ndtype\n\x89]tb", "refused: TypeError"),
        # defaults of the functions that are called, for the rest of the process
        (
            b"cnumpy.core.numeric\n_frombuffer\n(N}X\x0c\x00\x00\x00__defaults__(K\x01tstb",
            "refused: AttributeError",
        ),
        (b"c_codecs\nencode\n(N}X\x08\x00\x00\x00__call__K\x01stb", "refused: AttributeError"),
        (b"cnumpy\nndarray\n(K\x00tR", "refused: TypeError"),
    ],
)
def test_a_forged_pickle_can_neither_crash_nor_change_the_process(array, outcome):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    forged = b"\x80\x02}U\x04data" + array + b"s."
    result = subprocess.run(
        [sys.executable, "-c", FORGED, repr(forged)], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(outcome)


def test_the_stand_in_for_codecs_encodes_latin1_only(tmp_path, cifar):
    import _codecs

    evil = pickle.dumps({"data": Evil(_codecs.encode, "x", "rot13"), "labels": [0]}, protocol=2)
    with pytest.raises(ValueError, match="'rot13' is not allowed"):
        load("cifar10", root=cifar.write(tmp_path, cifar.files() | {"data_batch_1": evil}))


def test_no_read_permission(open_folder, cifar, run_unprivileged):
    cifar.write(open_folder)
    (open_folder / "cifar-10-batches-py" / "data_batch_2").chmod(0)
    result = run_unprivileged(f"import cmcl.data; cmcl.data.load('cifar10', root={str(open_folder)!r})")
    assert result.returncode
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("PermissionError:")
    assert "data_batch_2 must be readable. Got no read permission. Give it with: chmod u+r" in last


def test_a_folder_in_the_place_of_a_batch(tmp_path, cifar):
    cifar.write(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").unlink()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").mkdir()
    with pytest.raises(IsADirectoryError, match="must be a file. Got a folder"):
        load("cifar10", root=tmp_path)
