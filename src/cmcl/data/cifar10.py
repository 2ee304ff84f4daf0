"""CIFAR-10 (Krizhevsky 2009): the python and the binary version, unpacked or as the .tar.gz downloaded."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from .._files import open_binary
from .dataset import Dataset
from .registry import CIFAR10, data_root
from .unpickle import read_dict

PIXELS = 3 * 32 * 32
CLASSES = len(CIFAR10.classes)
LARGEST = 1 << 27  # bytes of a file; a batch of 10,000 images has 31 MB
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


class _Version(NamedTuple):
    folder: str
    archive: str
    suffix: str  # of the batches
    meta: str  # the file with the names of the classes


PYTHON = _Version("cifar-10-batches-py", "cifar-10-python.tar.gz", "", "batches.meta")
BINARY = _Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", "batches.meta.txt")


def load(split: str = "train", root: str | Path | None = None) -> Dataset:
    """Load CIFAR-10 from the first of its four forms that is complete under `root`."""
    version, source = _find(data_root(root))
    batches = [name + version.suffix for name in BATCHES[split]]
    images = np.empty((len(batches), 0, PIXELS), np.uint8)
    classes: tuple[str, ...] = ()
    for name, content in _read(source, [*batches, version.meta]):
        try:
            if name == version.meta:
                classes = _class_names(content, version)
                continue
            data, labels = _batch(content, version)
            if not images.size:  # the first batch gives the size of all; only one is in memory twice
                images = np.empty((len(batches), *data.shape), np.uint8)
                targets = np.empty(images.shape[:2], np.int64)
            if len(data) != images.shape[1]:
                raise ValueError(f"{len(data)} images, but {images.shape[1]} in another batch")
        except ValueError as error:
            message = f"{source / name} must be a file of CIFAR-10. Got {error}."
            raise ValueError(f"{message} Delete the files of CIFAR-10. {CIFAR10.hint}") from None
        position = batches.index(name)
        images[position], targets[position] = data, labels
    pixels, numbers = torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(targets).view(-1)
    return Dataset(pixels, numbers, classes, split, str(source))


def _find(root: Path) -> tuple[_Version, Path]:
    """The version that is there, and its folder or archive; an incomplete folder does not count."""
    missing: list[Path] = []
    for version in (PYTHON, BINARY):
        folder, archive = root / version.folder, root / version.archive
        batches = [name + version.suffix for names in BATCHES.values() for name in names]
        absent = [folder / name for name in (*batches, version.meta) if not (folder / name).exists()]
        if not absent:
            return version, folder
        if archive.exists():
            return version, archive
        missing += absent if folder.exists() else []
    if missing:
        raise FileNotFoundError(f"{missing[0]} must exist. Got no such file. {CIFAR10.hint}")
    message = f"{root} must hold {PYTHON.folder}/ or {PYTHON.archive}. Got neither."
    raise FileNotFoundError(f"{message} {CIFAR10.hint}")


def _read(source: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of a folder or an archive, in any order."""
    if source.is_dir():
        for name in names:
            with open_binary(source / name, hint=CIFAR10.hint) as file:
                yield name, file.read(LARGEST + 1)  # a link may lead to a file without end
        return
    try:
        yield from _read_archive(source, set(names))
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        message = f"{source} must be a whole .tar.gz. Got a damaged one ({error})."
        raise ValueError(f"{message} Delete it. {CIFAR10.hint}") from None


def _read_archive(source: Path, missing: set[str]) -> Iterator[tuple[str, bytes]]:
    """Reads once from front to back; nothing is written to disk."""
    with (
        open_binary(source, hint=CIFAR10.hint) as file,
        _BoundedGzip(fileobj=file) as content,
        tarfile.open(fileobj=content, mode="r:") as archive,
    ):
        for member in archive:
            name = Path(member.name).name
            if name in missing and member.isfile():
                missing.remove(name)
                yield name, cast("Any", archive.extractfile(member)).read(LARGEST + 1)
        while content.read(1 << 16):
            pass  # on to the very end, where gzip compares its checksum
    if missing:
        message = f"{source} must hold all files of CIFAR-10. Got none named {', '.join(sorted(missing))}."
        raise FileNotFoundError(f"{message} {CIFAR10.hint}")


class _BoundedGzip(gzip.GzipFile):
    """Raises when more is read at once than any CIFAR-10 file has: a forged size would fill the memory."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > LARGEST + 1:
            raise tarfile.ReadError(f"a part of {size:,} bytes")
        return super().read(size)


def _batch(content: bytes, version: _Version) -> tuple[NDArray[np.uint8], list[int]]:
    """Images (n, 3072) and labels (n,) of a batch."""
    data: Any
    if len(content) > LARGEST:
        raise ValueError(f"more than {LARGEST:,} bytes")
    if version is BINARY:
        record = 1 + PIXELS  # one byte for the label, then the pixels
        if not content or len(content) % record:
            raise ValueError(f"{len(content)} bytes, not records of {record}")
        records = np.frombuffer(content, np.uint8).reshape(-1, record)
        data, labels = records[:, 1:], records[:, 0].tolist()
    else:
        found = read_dict(content)
        data, labels = found.get("data"), found.get("labels")
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS or not data.size:
            raise ValueError(
                f"data that are not uint8 of shape (n, {PIXELS}): {getattr(data, 'shape', None)}"
            )
        if not isinstance(labels, list) or len(labels) != len(data):
            raise ValueError(f"no list of {len(data)} labels")
    for label in labels:
        if type(label) is not int or not 0 <= label < CLASSES:
            got = label if type(label) is int else type(label).__name__
            raise ValueError(f"a label that is not an integer from 0 to {CLASSES - 1}: {got}")
    return data, labels


def _class_names(content: bytes, version: _Version) -> tuple[str, ...]:
    names = content.decode("latin1").split() if version is BINARY else read_dict(content).get("label_names")
    if not isinstance(names, list) or len(names) != CLASSES or not all(isinstance(n, str) for n in names):
        raise ValueError(f"other than {CLASSES} class names")
    return tuple(names)
