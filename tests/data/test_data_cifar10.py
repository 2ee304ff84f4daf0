import gzip
import pickle
import subprocess
import sys
import tarfile
from contextlib import suppress

import numpy as np
import pytest

from cmcl.data import load
from cmcl.data.unpickle import read_dict


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_pickles_of_every_protocol(tmp_path, cifar, protocol):
    data = load("cifar10", root=cifar.write(tmp_path, cifar.files(protocol)))
    images, labels = cifar.train()
    assert (data.images.numpy() == images).all()
    assert data.targets.tolist() == labels
    assert data.classes[3] == "cat"
    assert str(tmp_path) in data.source
    test = load("cifar10", split="test", root=tmp_path)
    assert test.targets.tolist() == cifar.labels["test_batch"]


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


def test_all_forms_have_one_checksum_and_archives_are_not_unpacked(tmp_path, cifar):
    roots = [tmp_path / name for name in "abcd"]
    for root in roots:
        root.mkdir()
    cifar.write(roots[0])
    cifar.write(roots[1], cifar.binary_files(), "cifar-10-batches-bin")
    archive = cifar.write_archive(roots[2])
    cifar.write_archive(roots[3], cifar.binary_files(), "cifar-10-batches-bin", "cifar-10-binary.tar.gz")
    loaded = [load("cifar10", root=root) for root in roots]
    assert len({data.checksum for data in loaded}) == 1
    assert len({data.classes for data in loaded}) == 1
    assert list(roots[2].iterdir()) == [archive]


def test_root_comes_from_the_environment(tmp_path, cifar, monkeypatch):
    monkeypatch.setenv("CMCL_DATA", str(cifar.write(tmp_path)))
    assert len(load("cifar10", split="test")) == 20
    monkeypatch.delenv("CMCL_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"\.cache/cmcl must hold.* cmcl data fetch cifar10"):
        load("cifar10")


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


IMAGES = np.zeros((20, 3072), np.uint8)
NAMES = "Got other than 10 class names"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"data": np.zeros((20, 3000), np.uint8), "labels": [0] * 20}, r"\(n, 3072\): \(20, 3000\)"),
        ({"data": np.zeros((20, 3072), np.float32), "labels": [0] * 20}, "arrays must be uint8, not 'f4'"),
        ({"data": IMAGES[:0], "labels": []}, r"\(0, 3072\)"),
        ({"data": IMAGES, "labels": [0] * 19 + [10]}, "from 0 to 9: 10"),
        ({"data": IMAGES, "labels": [0] * 19 + [-1]}, "from 0 to 9: -1"),
        ({"data": IMAGES, "labels": [10**30] * 20}, "from 0 to 9: 1000"),
        ({"data": IMAGES, "labels": [0] * 19}, "20 labels"),
        ({"data": IMAGES, "labels": b"\0" * 20}, "20 labels"),
        ({"data": IMAGES, "labels": ["cat"] * 20}, "not an integer from 0 to 9: str"),
        ({"data": IMAGES, "labels": [True] * 20}, "not an integer from 0 to 9: bool"),
        ({"data": IMAGES[:7], "labels": [0] * 7}, "7 images, but 20"),
        ({3: IMAGES, "labels": [0] * 20}, "a string is expected, not int"),
        ({"pixels": 1}, "data that are not uint8"),
        ([1, 2], "a dict is expected, not list"),
        ({"data": {1, 2}}, "set is not allowed"),
        *(
            ({"label_names": names}, NAMES)
            for names in (3, None, "automobile", [1] * 10, [["cat"]] * 10, ["cat"] * 9)
        ),
    ],
)
def test_wrong_content(tmp_path, cifar, content, match):
    name = "batches.meta" if match == NAMES else "data_batch_2"
    files = cifar.files() | {name: pickle.dumps(content, protocol=3)}
    with pytest.raises(ValueError, match=rf"cifar-10-batches-py/{name} must be a file .*({match})"):
        load("cifar10", root=cifar.write(tmp_path, files))


def test_a_label_of_the_binary_version_out_of_range(tmp_path, cifar):
    files = cifar.binary_files()
    files["data_batch_2.bin"] = b"\x0b" + files["data_batch_2.bin"][1:]
    with pytest.raises(ValueError, match=r"data_batch_2.bin must be .*from 0 to 9: 11"):
        load("cifar10", root=cifar.write(tmp_path, files, "cifar-10-batches-bin"))


@pytest.mark.parametrize("size", [0, 100, -1, 3073 * 20 + 5])
def test_truncated_files(tmp_path, cifar, size):
    files = {name: content[:size] for name, content in cifar.files().items()}
    with pytest.raises(ValueError, match="must be a file of CIFAR-10"):
        load("cifar10", root=cifar.write(tmp_path / "py", files))
    binary = {name: content[:size] for name, content in cifar.binary_files().items()}
    if size != 3073 * 20 + 5:
        with pytest.raises(ValueError, match="records of 3073"):
            load("cifar10", root=cifar.write(tmp_path / "bin", binary, "cifar-10-batches-bin"))


def test_damaged_archives(tmp_path, cifar):
    """Cut in half, with a wrong checksum at the end, empty, of other content, with a broken header."""
    archive = cifar.write_archive(tmp_path)
    content = archive.read_bytes()
    others = [b"", b"no archive at all", b"\x1f\x8b\x08\x00" + bytes(40)]
    for damaged in (content[: len(content) // 2], content[:-8] + bytes(8), *others):
        archive.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"must be a whole .tar.gz. Got a .*cmcl data fetch cifar10"):
            load("cifar10", root=tmp_path)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
@pytest.mark.parametrize("version", ["python", "binary"])
def test_an_archive_with_an_absurd_size(tmp_path, version, kind):
    """The sizes in a tar archive's headers must not decide how much memory is allocated."""
    names = {"python": "cifar-10-batches-py/data_batch_1", "binary": "cifar-10-batches-bin/data_batch_1.bin"}
    for size in (1 << 33, 1 << 62, 1 << 70):
        member = tarfile.TarInfo(names[version])
        member.type, member.size = kind, size
        content = member.tobuf(format=tarfile.GNU_FORMAT) + bytes(10_000)
        (tmp_path / f"cifar-10-{version}.tar.gz").write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match=r"must be a whole .tar.gz|must be a file of"):
            load("cifar10", root=tmp_path)


def test_a_file_without_end(tmp_path, cifar):
    cifar.write(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="data_batch_1 .* more than 134,217,728 bytes"):
        load("cifar10", root=tmp_path)


class Evil:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("call", [subprocess.call, eval, getattr, __import__], ids=lambda f: f.__name__)
def test_an_evil_pickle_runs_nothing(tmp_path, cifar, call, protocol):
    mark = tmp_path / "was-here"
    argument = [sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    if call is eval:
        argument = f"open({str(mark)!r}, 'w')"
    evil = pickle.dumps({"data": Evil(call, argument), "labels": [0]}, protocol=protocol)
    cifar.write(tmp_path, cifar.files() | {"data_batch_1": evil})
    with pytest.raises(ValueError, match="is not allowed in a data file"):
        load("cifar10", root=tmp_path)
    assert not mark.exists()


FORGED = """
import pickle, resource, sys
import numpy as np
from cmcl.data.unpickle import read_dict
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
try:
    data = read_dict(eval(sys.argv[1]))["data"]
    print(f"{data.dtype} {data.tolist()}" if isinstance(data, np.ndarray) else type(data).__name__)
except ValueError as error:
    print("refused:", error)
assert np.frombuffer(b"ab", dtype=np.uint8).tolist() == [97, 98]
assert pickle.loads(pickle.dumps(np.arange(3), protocol=5)).tolist() == [0, 1, 2]
"""
ARRAY = "cnumpy.core.multiarray\\n_reconstruct\\n(cnumpy\\nndarray\\n(K\\x00tU\\x01btR(K\\x01(K\\x01t"
FIELD = "(K\\x03U\\x01|N(U\\x01ftp9\\n}U\\x01f(cnumpy\\ndtype\\n(U\\x02O8K\\x00K\\x01tRK\\x00tsK\\x08K\\x01K\\x3ftb"
STATE = "(K\\x03U\\x01|NNNJ\\x08\\x00\\x00\\x00K\\x01K\\x3ftb"


@pytest.mark.parametrize(
    ("array", "outcome"),
    [
        # a dtype of 8 plain bytes, whose state says afterwards that they are a pointer to an object
        (f"{ARRAY}cnumpy\\ndtype\\n(U\\x02V8K\\x00K\\x01tR{FIELD}\\x89U\\x08AAAAAAAAtb", "uint8, not 'V8'"),
        (f"{ARRAY}cnumpy\\ndtype\\n(U\\x02O8K\\x00K\\x01tR\\x89]K\\x01atb", "uint8, not 'O8'"),
        # the state of uint8 itself is set: nothing happens
        (f"{ARRAY}cnumpy\\ndtype\\n(U\\x02u1K\\x00K\\x01tR{STATE}\\x89U\\x01Atb", "uint8 [65]"),
        (f"{ARRAY}N\\x89U\\x08AAAAAAAAtb", "arrays must be uint8"),
        (f"{ARRAY}cnumpy\\ndtype\\n(U\\x02u1tR\\x89U\\x02AAtb", "cannot reshape"),
        (f"{ARRAY}cnumpy\\ndtype\\n(U\\x02u1tR\\x89]tb", "TypeError"),
        # attributes of the functions that numpy calls, for the rest of the process
        (
            "cnumpy.core.numeric\\n_frombuffer\\n(N}X\\x0c\\x00\\x00\\x00__defaults__(K\\x01tstb",
            "a state is not",
        ),
        ("c_codecs\\nencode\\n(N}X\\x08\\x00\\x00\\x00__call__K\\x01stb", "a state is not"),
        ("cnumpy\\nndarray\\n(K\\x00tR", "numpy ndarray is not allowed"),
        ("c_codecs\\nencode\\n(X\\x01\\x00\\x00\\x00xX\\x05\\x00\\x00\\x00rot13tR", "encode is not allowed"),
        ("Nr\\xff\\xff\\xff\\x1f", "NoneType"),  # a memo of 4 GB, in 9 bytes
        ("K\\x01' + b'\\x85' * 200_000 + b'", "tuple"),  # a tuple nested 200,000 deep
        ("K\\x01' + b'\\x85' * 200_000 + b'N}s", "TypeError"),
        ("}K\\x01' + b'\\x85' * 200_000 + b'Ns", "a string is expected, not tuple"),  # as a key, to be hashed
        ("' + b']' * 2_000_000 + b'", "more than 1,000,000 opcodes"),
        ("\\x8e\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00", "ValueError"),  # 2^56 bytes are announced
        ("((((tttt", "tuple"),
        ("h\\x07", "KeyError"),
    ],
)
def test_a_forged_pickle_neither_crashes_nor_changes_the_process(run_python, array, outcome):
    result = run_python(FORGED, f"b'\\x80\\x02}}U\\x04data' + b'{array}' + b's.'")
    assert result.returncode == 0, result.stderr
    assert outcome in result.stdout


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pickletools, of strings with odd escapes
@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_of_a_pickle_raise_value_errors_only(seed, cifar):
    rng = np.random.default_rng(seed)
    batch = {"data": cifar.data["test_batch"][:1, :8], "labels": [1, 2, 3]}
    for protocol in range(6):
        content = pickle.dumps(batch, protocol=protocol)
        for _ in range(200):
            damaged = bytearray(content)
            for place in rng.integers(0, len(content), rng.integers(1, 4)):
                damaged[place] ^= 1 << rng.integers(8)
            with suppress(ValueError):
                read_dict(bytes(damaged[: rng.integers(1, len(content) + 1)]))
