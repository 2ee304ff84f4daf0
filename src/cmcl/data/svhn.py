"""SVHN, cropped digits (Netzer et al. 2011): `svhn/train_32x32.mat` and `svhn/test_32x32.mat`.

The two arrays of a MATLAB 5 file are parsed here because a damaged file can crash scipy's reader. Every size
in the file is checked before memory is allocated.
"""

import io
import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from .._files import open_binary
from .dataset import Dataset
from .registry import SVHN, data_root

MOST_IMAGES = 600_000  # the largest file of SVHN, that of the extra images, has 531,131
MATRIX, COMPRESSED = 14, 15  # types of the file's elements
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
DEFLATE = 1032  # the most bytes that zlib makes of one


def load(split: str = "train", root: str | Path | None = None) -> Dataset:
    """Load one split; the digit 0, stored as 10 in the file, becomes class 0."""
    path = data_root(root) / SVHN.name / f"{split}_32x32.mat"
    arrays = _read_mat(path)
    return Dataset(_images(arrays["X"], path), _targets(arrays["y"], path), SVHN.classes, split, str(path))


def _read_mat(path: Path) -> dict[str, NDArray[Any]]:
    with open_binary(path, hint=SVHN.hint) as file:
        try:
            found = dict(_arrays(file))
            return {name: found[name] for name in ("X", "y")}
        except KeyError as error:
            problem = f"no array {error}"
        except (ValueError, EOFError, zlib.error) as error:
            problem = str(error)
    raise ValueError(
        f"{path} must be a whole .mat file with X and y. Got a damaged one ({problem}). Delete it. "
        f"{SVHN.hint}"
    )


def _arrays(file: BinaryIO) -> Iterator[tuple[str, NDArray[Any]]]:
    """Names and values of the arrays X and y."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    order = {b"IM": "<", b"MI": ">"}.get(_exactly(file, 128)[126:])  # the end of the header
    if order is None:
        raise ValueError("no header of MATLAB 5")
    while (start := file.tell() + 8) <= end:
        kind, size = struct.unpack(f"{order}II", _exactly(file, 8))
        if size > end - start:
            raise ValueError(f"an element of {size:,} bytes")
        if kind == MATRIX:
            yield from _matrix(file, order, most=size)
        elif kind == COMPRESSED:
            stream = io.BufferedReader(_Inflated(file, size))
            _exactly(stream, 8)  # the tag of the matrix
            yield from _matrix(stream, order, most=DEFLATE * size)
            while stream.read(1 << 16):
                pass  # on to the end, where zlib compares its checksum
        file.seek(start + size)


def _matrix(stream: BinaryIO, order: str, most: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and values of a matrix of at most `most` bytes, if it is X or y."""
    _data(stream, order, 8)  # flags
    dims = np.frombuffer(_data(stream, order, 16), f"{order}i4").tolist()
    name = _data(stream, order, 64).decode("latin1")
    if name not in {"X", "y"}:
        return
    kind, size, _ = _tag(stream, order, min(most, MOST_IMAGES * 3072))
    if kind not in NUMBERS or min(dims, default=0) < 0:
        raise ValueError(f"{name} of type {kind} and shape {dims}")
    values = np.empty(size // int(NUMBERS[kind][1]), order + NUMBERS[kind])
    if math.prod(dims) * values.itemsize != size:
        raise ValueError(f"{name} of shape {dims} in {size:,} bytes")
    if size and stream.readinto(values) < size:  # type: ignore[attr-defined]
        raise EOFError(f"{name} is not complete")
    yield name, values.reshape(dims, order="F")


def _data(stream: BinaryIO, order: str, most: int) -> bytes:
    """The data of the next part of a matrix, and past the bytes that fill up its last 8."""
    _, size, small = _tag(stream, order, most)
    return _exactly(stream, size + -size % (4 if small else 8))[:size]


def _tag(stream: BinaryIO, order: str, most: int) -> tuple[int, int, bool]:
    """Type and size of what follows, and whether it is small: then half of the tag's 8 bytes are data."""
    (word,) = struct.unpack(f"{order}I", _exactly(stream, 4))
    small = word >> 16
    kind, size = (word & 0xFFFF, small) if small else (word, *struct.unpack(f"{order}I", _exactly(stream, 4)))
    if size > (4 if small else most):
        raise ValueError(f"a part of {size:,} bytes")
    return kind, size, bool(small)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("it ends early")
    return data


class _Inflated(io.RawIOBase):
    """What zlib makes of the next `size` bytes of a file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left, self.zlib = file, size, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.zlib.eof:
            data = self.zlib.unconsumed_tail
            if not data:
                data = self.file.read(min(1 << 20, self.left))
                self.left -= len(data)
            out = self.zlib.decompress(data, len(buffer))
            if out:
                buffer[: len(out)] = out
                return len(out)
            if not data and not self.zlib.eof:
                raise EOFError("compressed data end early")
        return 0


def _images(pixels: NDArray[Any], path: Path) -> torch.Tensor:
    right = pixels.ndim == 4 and pixels.shape[:3] == (32, 32, 3) and pixels.dtype == np.uint8
    if not right or not pixels.size:
        raise ValueError(
            f"X in {path} must be uint8 of shape (32, 32, 3, N), N at least 1. "
            f"Got {pixels.dtype} {pixels.shape}. Delete the file. {SVHN.hint}"
        )
    images = np.ascontiguousarray(pixels.T)  # (N,3,32,32), but every image is transposed
    for chunk in np.array_split(images, max(1, len(images) // 4096)):
        chunk[:] = chunk.transpose(0, 1, 3, 2).copy()  # in place: no second copy of all images
    return torch.from_numpy(images)


def _targets(labels: NDArray[Any], path: Path) -> torch.Tensor:
    values = labels.reshape(-1)
    wrong = values[~np.isin(values, np.arange(1, 11))]
    if wrong.size:
        raise ValueError(
            f"y in {path} must hold labels 1 to 10 (10 is the digit 0). Got {wrong[0]}. Delete the file. "
            f"{SVHN.hint}"
        )
    return torch.from_numpy(values.astype(np.int64) % 10)
