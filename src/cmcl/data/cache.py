"""Fitted transforms and transformed sets on disk, so that whitening is paid for once.

A file is named by the checksums of what went in: nothing stale can be read. A damaged one is built again.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .._files import replacing
from . import preprocess
from .checksum import json_checksum, tensor_checksum
from .dataset import Dataset
from .files import cache_root
from .transform import Transform

T = TypeVar("T")


def fitted(transform: Transform, train: Dataset, folder: str | Path | None = None) -> Transform:
    """`transform.fit(train)`, or the same fit found in the cache."""
    if not transform.needs_fit:
        return transform.fit(train)
    expected = transform.checksum_for(train.checksum)

    def read(path: Path) -> Transform:
        found = preprocess.load(path)
        if found.checksum != expected:
            raise ValueError(f"{path} must hold the fit of checksum {expected}. Got {found.checksum}.")
        return transform.restore(train, found.state()[1])

    path = _place(folder, "transforms", expected)
    return _cached(path, read, lambda: transform.fit(train), lambda fit: fit.save(path))


def transformed(transform: Transform, dataset: Dataset, folder: str | Path | None = None) -> Dataset:
    """The dataset with transformed images, or the same found in the cache."""
    path = _place(folder, "images", json_checksum([transform.checksum, dataset.checksum]))
    images = _cached(
        path, _read_images, lambda: transform.transform(dataset.images), lambda x: _write_images(x, path)
    )
    return replace(dataset, images=images.to(dataset.images.device), recipe=None)


def _place(folder: str | Path | None, kind: str, key: str) -> Path:
    return cache_root(folder) / "preprocessed" / kind / f"{key[:32]}.safetensors"


def _cached(path: Path, read: Callable[[Path], T], build: Callable[[], T], write: Callable[[T], None]) -> T:
    try:
        if path.exists():
            return read(path)
    except (ValueError, OSError, SafetensorError):
        warnings.warn(f"the cached file {path} is damaged or unreadable: it is built again", stacklevel=3)
    value = build()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(value)
    except (OSError, SafetensorError) as error:  # a full or read-only disk must not stop the training
        warnings.warn(f"{path} could not be written ({error}): going on without a cache", stacklevel=3)
    return value


def _read_images(path: Path) -> Tensor:
    with safe_open(path, framework="pt") as file:
        images: Tensor = file.get_tensor("images")
        digest = (file.metadata() or {}).get("digest")
    if tensor_checksum({"images": images}) != digest:
        raise ValueError(f"{path} must agree with its checksum.")
    return images


def _write_images(images: Tensor, path: Path) -> None:
    with replacing(path) as temporary:
        save_file({"images": images.cpu()}, temporary, {"digest": tensor_checksum({"images": images})})
