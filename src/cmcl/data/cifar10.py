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

from .dataset import Dataset
from .files import data_root, open_binary
from .unpickle import as_text, read_dict

SPLITS = ("train", "test")
CURE = "Get it with: cmcl data fetch cifar10 (from https://www.cs.toronto.edu/~kriz/cifar.html)."
PIXELS = 3 * 32 * 32
CLASSES = 10
_LABELS = f"labels 0 to {CLASSES - 1}"

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
PYTHON = _Version(
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    {"train": _TRAIN, "test": ("test_batch",)},
    "batches.meta",
)
BINARY = _Version(
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    {"train": tuple(f"{name}.bin" for name in _TRAIN), "test": ("test_batch.bin",)},
    "batches.meta.txt",
)


def load(split: str = "train", root: str | Path | None = None) -> Dataset:
    """Load CIFAR-10 from the first of its four forms that lies complete under `root`."""
    version, place = find(data_root(root))
    wanted = version.batches[split]
    joined = _Joined(len(wanted))
    classes: tuple[str, ...] = ()
    with _intact(place):
        for name, file in _members(place, (*wanted, version.names)):
            where = str(place / name)
            if name == version.names:
                classes = _read_classes(file, where)
            else:
                joined.put(wanted.index(name), _read_batch(file, where), where)
    return Dataset(joined.images, joined.targets, classes, split, str(place))


class _Joined:
    """Batches side by side: each goes straight to its place, so that only one is held twice."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.images = torch.empty((0, 3, 32, 32), dtype=torch.uint8)
        self.targets = torch.empty(0, dtype=torch.int64)

    def put(self, position: int, batch: Batch, where: str) -> None:
        data, labels = batch
        n = len(data)
        if not len(self.images):  # the first batch tells the size
            self.images = torch.empty((self.batches * n, 3, 32, 32), dtype=torch.uint8)
            self.targets = torch.empty(self.batches * n, dtype=torch.int64)
        expected = len(self.images) // self.batches
        _require(n == expected, where, f"{expected} images, as the other batches do", n)
        self.images.view(self.batches, n, PIXELS)[position].numpy()[:] = data
        self.targets.view(self.batches, n)[position] = torch.from_numpy(labels)


def find(root: Path) -> tuple[_Version, Path]:
    """The version at hand and its folder or archive; a folder counts only if it is complete."""
    missing: list[Path] = []
    for version in (PYTHON, BINARY):
        folder, archive = root / version.folder, root / version.archive
        lacks = version.missing(folder)
        if not lacks:
            return version, folder
        if archive.exists():
            return version, archive
        missing += lacks if folder.exists() else []
    if missing:
        raise FileNotFoundError(f"{missing[0]} must exist. Got no such file. {CURE}")
    message = f"{root} must hold {PYTHON.folder}/ or {PYTHON.archive}. Got neither. {CURE}"
    raise FileNotFoundError(message)


def _members(place: Path, names: tuple[str, ...]) -> Iterator[tuple[str, BinaryIO]]:
    """The named files in a folder or an archive, opened one after the other."""
    if not place.is_dir():
        yield from _archive_members(place, names)
        return
    for name in names:
        with open_binary(place / name, cure=CURE) as file:
            yield name, file


def _archive_members(place: Path, names: tuple[str, ...]) -> Iterator[tuple[str, BinaryIO]]:
    missing = set(names)
    # Read once from front to back; nothing is written to disk.
    with open_binary(place, cure=CURE) as file, tarfile.open(fileobj=file, mode="r:gz") as archive:
        for member in archive:
            name = Path(member.name).name
            if name in missing and member.isfile():
                missing.remove(name)
                yield name, cast(BinaryIO, archive.extractfile(member))
        while cast(BinaryIO, archive.fileobj).read(1 << 16):
            pass  # on to the very end, where gzip compares its checksum
    if missing:
        message = f"{place} must hold {', '.join(names)}. Got none named {', '.join(sorted(missing))}. {CURE}"
        raise FileNotFoundError(message)


@contextmanager
def _intact(place: Path) -> Iterator[None]:
    """Damage to an archive shows in many ways, and anywhere while it is read."""
    try:
        yield
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        message = f"{place} must be a whole .tar.gz. Got a damaged one ({error}). Delete it. {CURE}"
        raise ValueError(message) from None


def _read_batch(file: BinaryIO, where: str) -> Batch:
    data, labels = _read_binary(file, where) if where.endswith(".bin") else _read_pickle(file, where)
    _require(len(labels) == len(data), where, f"{len(data)} labels", len(labels))
    return data, labels


def _read_pickle(file: BinaryIO, where: str) -> Batch:
    content = _read_dict(file, where)
    data, labels = content.get("data"), content.get("labels")
    if not isinstance(data, np.ndarray) or not isinstance(labels, list):
        raise ValueError(_message(where, "data and labels", list(content)))
    right = data.ndim == 2 and data.shape[1] == PIXELS and data.dtype == np.uint8
    _require(right, where, f"uint8 data of shape (n, {PIXELS})", f"{data.dtype} {data.shape}")
    others = [type(label).__name__ for label in labels if type(label) is not int]
    _require(not others, where, "whole numbers as labels", ", ".join(others[:1]))
    wrong = [label for label in labels if not 0 <= label < CLASSES]
    _require(not wrong, where, _LABELS, wrong[:1])  # before numpy, which has no room for all numbers
    return data, np.array(labels, dtype=np.int64)


def _read_binary(file: BinaryIO, where: str) -> Batch:
    content = np.frombuffer(file.read(), dtype=np.uint8)
    record = 1 + PIXELS  # one byte for the label, then the pixels
    _require(content.size and content.size % record == 0, where, f"records of {record} bytes", content.size)
    records = content.reshape(-1, record)
    labels = records[:, 0].astype(np.int64)
    _require((labels < CLASSES).all(), where, _LABELS, labels[labels >= CLASSES][:1])
    return records[:, 1:], labels


def _read_classes(file: BinaryIO, where: str) -> tuple[str, ...]:
    if where.endswith(".txt"):
        names = tuple(file.read().decode("latin1").split())
    else:
        names = _label_names(_read_dict(file, where).get("label_names"), where)
    _require(len(names) == CLASSES, where, f"{CLASSES} class names", len(names))
    return names


def _label_names(names: Any, where: str) -> tuple[str, ...]:
    expected = f"{CLASSES} class names as label_names"
    _require(isinstance(names, list), where, expected, type(names).__name__)
    try:
        return tuple(as_text(name) for name in names)
    except TypeError as error:
        raise ValueError(_message(where, expected, error)) from None


def _read_dict(file: BinaryIO, where: str) -> dict[str, Any]:
    try:
        return read_dict(file)
    except ValueError as error:
        raise ValueError(_message(where, "the dict of a CIFAR-10 file", error)) from None


def _require(condition: Any, where: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(_message(where, expected, got))


def _message(where: str, expected: str, got: object) -> str:
    return f"{where} must hold {expected}. Got {got}. Delete the set's files. {CURE}"
