"""CIFAR-10 (Krizhevsky 2009): the python and the binary version, unpacked or as the .tar.gz downloaded."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray

from .._files import open_binary
from .dataset import Dataset
from .registry import CIFAR10, data_root
from .unpickle import read_dict

HINT = CIFAR10.hint
PIXELS = 3 * 32 * 32
CLASSES = len(CIFAR10.classes)
LARGEST = 1 << 27  # bytes of a file; a batch of 10,000 images has 31 MB

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]  # (n,3072), (n,)


@dataclass(frozen=True)
class _Version:
    folder: str
    archive: str
    batches: dict[str, tuple[str, ...]]
    names: str  # the file with the names of the classes

    def missing(self, folder: Path) -> list[Path]:
        """The files that the folder lacks."""
        names = (*self.batches["train"], *self.batches["test"], self.names)
        return [folder / name for name in names if not (folder / name).exists()]


_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_VERSIONS = (
    _Version(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        {"train": _TRAIN, "test": ("test_batch",)},
        "batches.meta",
    ),
    _Version(
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        {"train": tuple(f"{name}.bin" for name in _TRAIN), "test": ("test_batch.bin",)},
        "batches.meta.txt",
    ),
)


def load(split: str = "train", root: str | Path | None = None) -> Dataset:
    """Load CIFAR-10 from the first of its four forms that is complete under `root`."""
    version, source = _find(data_root(root))
    wanted = version.batches[split]
    joined = _Joined(len(wanted))
    classes: tuple[str, ...] = ()
    with _intact(source):
        for name, file in _open(source, (*wanted, version.names)):
            where = str(source / name)
            if name == version.names:
                classes = _read_classes(file, where)
            else:
                joined.put(wanted.index(name), _read_batch(file, where), where)
    return Dataset(joined.images, joined.targets, classes, split, str(source))


class _Joined:
    """All batches in one tensor. Each is copied there at once, so that only one is in memory twice."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.images = torch.empty((0, 3, 32, 32), dtype=torch.uint8)
        self.targets = torch.empty(0, dtype=torch.int64)

    def put(self, position: int, batch: Batch, where: str) -> None:
        data, labels = batch
        n = len(data)
        if not len(self.images):  # the first batch gives the size
            self.images = torch.empty((self.batches * n, 3, 32, 32), dtype=torch.uint8)
            self.targets = torch.empty(self.batches * n, dtype=torch.int64)
        expected = len(self.images) // self.batches
        _require(n == expected, where, f"{expected} images, as the other batches do", n)
        self.images.view(self.batches, n, PIXELS)[position].numpy()[:] = data
        self.targets.view(self.batches, n)[position] = torch.from_numpy(labels)


def _find(root: Path) -> tuple[_Version, Path]:
    """The version that is there, and its folder or archive; an incomplete folder does not count."""
    missing: list[Path] = []
    for version in _VERSIONS:
        folder, archive = root / version.folder, root / version.archive
        lacks = version.missing(folder)
        if not lacks:
            return version, folder
        if archive.exists():
            return version, archive
        missing += lacks if folder.exists() else []
    if missing:
        raise FileNotFoundError(f"{missing[0]} must exist. Got no such file. {HINT}")
    python = _VERSIONS[0]
    raise FileNotFoundError(f"{root} must hold {python.folder}/ or {python.archive}. Got neither. {HINT}")


def _open(source: Path, names: tuple[str, ...]) -> Iterator[tuple[str, BinaryIO]]:
    """The named files of a folder or an archive, one after the other, in any order."""
    if not source.is_dir():
        yield from _open_archive(source, names)
        return
    for name in names:
        with open_binary(source / name, hint=HINT) as file:
            yield name, file


class _BoundedGzip(gzip.GzipFile):
    """Refuses to read more at once than any CIFAR-10 file has: a forged size would fill the memory."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > LARGEST + 1:
            raise tarfile.ReadError(f"a part of {size:,} bytes")
        return super().read(size)


def _open_archive(source: Path, names: tuple[str, ...]) -> Iterator[tuple[str, BinaryIO]]:
    missing = set(names)
    # Read once from front to back; nothing is written to disk.
    with (
        open_binary(source, hint=HINT) as file,
        _BoundedGzip(fileobj=file) as content,
        tarfile.open(fileobj=content, mode="r:") as archive,
    ):
        for member in archive:
            name = Path(member.name).name
            if name in missing and member.isfile():
                missing.remove(name)
                yield name, cast(BinaryIO, archive.extractfile(member))
        while content.read(1 << 16):
            pass  # on to the very end, where gzip compares its checksum
    if missing:
        message = (
            f"{source} must hold {', '.join(names)}. Got none named {', '.join(sorted(missing))}. {HINT}"
        )
        raise FileNotFoundError(message)


@contextmanager
def _intact(source: Path) -> Iterator[None]:
    """Damage to an archive shows in many ways, and anywhere while it is read."""
    try:
        yield
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        message = f"{source} must be a whole .tar.gz. Got a damaged one ({error}). Delete it. {HINT}"
        raise ValueError(message) from None


def _read(file: BinaryIO, where: str) -> bytes:
    content = file.read(LARGEST + 1)
    _require(len(content) <= LARGEST, where, f"at most {LARGEST:,} bytes", "more")
    return content


def _read_batch(file: BinaryIO, where: str) -> Batch:
    content = _read(file, where)
    data, labels = _read_binary(content, where) if where.endswith(".bin") else _read_pickle(content, where)
    _require(len(labels) == len(data), where, f"{len(data)} labels", len(labels))
    wrong = [label for label in labels if not 0 <= label < CLASSES]
    _require(not wrong, where, f"labels 0 to {CLASSES - 1}", wrong[:1])
    return data, np.array(labels, dtype=np.int64)


def _read_pickle(content: bytes, where: str) -> tuple[NDArray[np.uint8], list[int]]:
    found = _read_dict(content, where)
    data, labels = found.get("data"), found.get("labels")
    if not isinstance(data, np.ndarray) or not isinstance(labels, list):
        raise ValueError(_message(where, "data and labels", list(found)))
    right = data.ndim == 2 and data.shape[1] == PIXELS
    _require(right, where, f"uint8 data of shape (n, {PIXELS})", data.shape)
    others = [type(label).__name__ for label in labels if type(label) is not int]
    _require(not others, where, "integers as labels", ", ".join(others[:1]))
    return data, labels


def _read_binary(content: bytes, where: str) -> tuple[NDArray[np.uint8], list[int]]:
    record = 1 + PIXELS  # one byte for the label, then the pixels
    _require(content and len(content) % record == 0, where, f"records of {record} bytes", len(content))
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return records[:, 1:], records[:, 0].tolist()


def _read_classes(file: BinaryIO, where: str) -> tuple[str, ...]:
    content = _read(file, where)
    if where.endswith(".txt"):
        names: Any = content.decode("latin1").split()
    else:
        names = _read_dict(content, where).get("label_names")
    right = isinstance(names, list) and len(names) == CLASSES and all(isinstance(n, str) for n in names)
    _require(right, where, f"{CLASSES} class names", "others")
    return tuple(names)


def _read_dict(content: bytes, where: str) -> dict[str, Any]:
    try:
        return read_dict(content)
    except ValueError as error:
        raise ValueError(_message(where, "the dict of a CIFAR-10 file", error)) from None


def _require(condition: Any, where: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(_message(where, expected, got))


def _message(where: str, expected: str, got: object) -> str:
    return f"{where} must hold {expected}. Got {got}. Delete the files of CIFAR-10. {HINT}"
