"""SVHN, cropped digits (Netzer et al. 2011): `svhn/train_32x32.mat` and `svhn/test_32x32.mat`.

The two arrays of a MATLAB 5 file are parsed here because a damaged file can crash scipy's reader. Every size
in the file is checked before memory is allocated.
"""

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

MOST_BYTES = 600_000 * 3072  # the largest file of SVHN, that of the extra images, has 531,131 images
MATRIX, COMPRESSED = 14, 15  # types of the file's elements
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}


def load(split: str = "train", root: str | Path | None = None) -> Dataset:
    """Load one split; the digit 0, stored as 10 in the file, becomes class 0."""
    path = data_root(root) / SVHN.name / f"{split}_32x32.mat"
    with open_binary(path, hint=SVHN.hint) as file:
        try:
            found = dict(_arrays(file))
            images, targets = _images(found["X"]), _targets(found["y"])
        except KeyError as error:
            raise _damaged(path, f"no array {error}") from None
        except (ValueError, EOFError, zlib.error) as error:
            raise _damaged(path, error) from None
    return Dataset(images, targets, SVHN.classes, split, str(path))


def _damaged(path: Path, problem: object) -> ValueError:
    message = f"{path} must be a whole .mat file with X and y. Got a damaged one ({problem})."
    return ValueError(f"{message} Delete it. {SVHN.hint}")


def _images(pixels: NDArray[Any]) -> torch.Tensor:
    if pixels.shape[:-1] != (32, 32, 3) or pixels.dtype != np.uint8 or not pixels.size:
        raise ValueError(f"X must be uint8 of shape (32, 32, 3, N), not {pixels.dtype} {pixels.shape}")
    # (N,3,32,32) as stored, but every image is transposed; a copy only of what is read-only
    images = np.require(pixels.T, requirements=["C", "W"])
    for chunk in np.array_split(images, max(1, len(images) // 4096)):
        chunk[:] = chunk.transpose(0, 1, 3, 2).copy()  # in place: no second copy of all images
    return torch.from_numpy(images)


def _targets(labels: NDArray[Any]) -> torch.Tensor:
    values = labels.reshape(-1)
    wrong = values[~np.isin(values, np.arange(1, 11))]
    if wrong.size:
        raise ValueError(f"y must hold labels 1 to 10, where 10 is the digit 0, not {wrong[0]}")
    return torch.from_numpy(values.astype(np.int64) % 10)


def _arrays(file: BinaryIO) -> Iterator[tuple[str, NDArray[Any]]]:
    """Names and values of the arrays X and y."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    order = {b"IM": "<", b"MI": ">"}.get(bytes(_exactly(file, 128)[126:]))  # the end of the header
    if order is None:
        raise ValueError("no header of MATLAB 5")
    while (start := file.tell() + 8) <= end:
        kind, size = struct.unpack(f"{order}II", _exactly(file, 8))
        if size > end - start:
            raise ValueError(f"an element of {size:,} bytes")
        if kind == MATRIX:
            yield from _matrix(file, order, most=size)
        elif kind == COMPRESSED:
            stream = _Inflated(file)
            _exactly(stream, 8)  # the tag of the matrix
            yield from _matrix(stream, order, most=MOST_BYTES)
            while stream.read(1 << 16):
                pass  # on to the end, where zlib compares its checksum
        file.seek(start + size)


def _matrix(stream: "BinaryIO | _Inflated", order: str, most: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and values of a matrix of at most `most` bytes, if it is X or y."""
    _part(stream, order, 8)  # flags
    dims = np.frombuffer(_part(stream, order, 16)[1], f"{order}i4").tolist()
    name = _part(stream, order, 64)[1].decode("latin1")
    if name in {"X", "y"}:
        kind, data = _part(stream, order, min(most, MOST_BYTES))
        if kind not in NUMBERS or min(dims, default=0) < 0:
            raise ValueError(f"{name} of type {kind} and shape {dims}")
        yield name, np.frombuffer(data, order + NUMBERS[kind]).reshape(dims, order="F")


def _part(stream: "BinaryIO | _Inflated", order: str, most: int) -> tuple[int, bytes | bytearray]:
    """Type and data of the next part of a matrix."""
    tag = _exactly(stream, 8)
    kind, size = struct.unpack(f"{order}II", tag)
    small = kind >> 16  # then its data are the second half of the tag
    if (small or size) > (4 if small else most):
        raise ValueError(f"a part of {small or size:,} bytes")
    if small:
        return kind & 0xFFFF, tag[4 : 4 + small]
    data = _exactly(stream, size)
    stream.read(-size % 8)  # parts begin at multiples of 8 bytes
    return kind, data


def _exactly(stream: "BinaryIO | _Inflated", size: int) -> bytes | bytearray:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("it ends early")
    return data


class _Inflated:
    """What zlib makes of a file, from its present position on."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.zlib = file, zlib.decompressobj()

    def read(self, size: int) -> bytearray:
        """The next bytes: fewer than `size` at the end. Memory grows with what is really there."""
        data = bytearray()
        while len(data) < size and not self.zlib.eof:
            compressed = self.zlib.unconsumed_tail or self.file.read(1 << 20)
            piece = self.zlib.decompress(compressed, min(size - len(data), 1 << 22))
            if not compressed and not piece:
                raise EOFError("the compressed data end early")
            data += piece
        return data
