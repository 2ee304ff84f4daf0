"""SVHN, cropped digits (Netzer et al. 2011): `svhn/train_32x32.mat` and `svhn/test_32x32.mat`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.io import loadmat

from .dataset import Dataset
from .files import data_root, open_binary

SPLITS = ("train", "test")
CURE = "Get it with: cmcl data fetch svhn (from http://ufldl.stanford.edu/housenumbers/)."


def load(split: str = "train", root: str | Path | None = None) -> Dataset:
    """Load one split; digit 0, stored as 10 in the file, becomes class 0."""
    path = data_root(root) / "svhn" / f"{split}_32x32.mat"
    pixels, labels = _read_mat(path)
    return Dataset(_images(pixels, path), _targets(labels, path), tuple("0123456789"), split, str(path))


def _read_mat(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    with open_binary(path, cure=CURE) as file:
        try:
            content = loadmat(file, variable_names=["X", "y"])
            return content["X"], content["y"]
        except Exception as error:  # a damaged .mat can raise nearly anything
            problem = f"{type(error).__name__}: {error}".split("\n")[0]
    message = (
        f"{path} must be a whole .mat file with X and y. Got a damaged one ({problem}). Delete it. {CURE}"
    )
    raise ValueError(message)


def _images(pixels: NDArray[Any], path: Path) -> torch.Tensor:
    right = pixels.ndim == 4 and pixels.shape[:3] == (32, 32, 3) and pixels.dtype == np.uint8
    if not right or not pixels.size:
        message = (
            f"X in {path} must be uint8 of shape (32, 32, 3, N), N at least 1. "
            f"Got {pixels.dtype} {pixels.shape}. Delete the file. {CURE}"
        )
        raise ValueError(message)
    images = np.ascontiguousarray(pixels.T)  # (N,3,32,32), but every image lies on its side
    for chunk in np.array_split(images, max(1, len(images) // 4096)):
        chunk[:] = chunk.transpose(0, 1, 3, 2).copy()  # turned in place: no second copy of the set
    return torch.from_numpy(images)


def _targets(labels: NDArray[Any], path: Path) -> torch.Tensor:
    values = labels.reshape(-1)
    wrong = values[~np.isin(values, np.arange(1, 11))]
    if wrong.size:
        message = (
            f"y in {path} must hold labels 1 to 10 (10 is digit 0). Got {wrong[0]}. Delete the file. {CURE}"
        )
        raise ValueError(message)
    return torch.from_numpy(values.astype(np.int64) % 10)
