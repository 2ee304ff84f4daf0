"""A user's own numpy arrays or tensors as a `Dataset`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _checks
from .dataset import IGNORE, Dataset

Array = NDArray[Any] | Tensor
MOST_CLASSES = 100_000  # that are named after their numbers; ImageNet-21k has 21,841


def from_arrays(
    images: Array,
    targets: Array,
    *,
    classes: Sequence[str] | None = None,
    split: str = "train",
    layout: str = "NCHW",
) -> Dataset:
    """Make a `Dataset` of arrays; memory is shared where no conversion is needed.

    Args:
        images: (N,C,H,W), or (N,H,W) for one channel; uint8 or floating point without NaN.
        targets: (N,) class indices, or (N,H,W) masks; any integer type.
        classes: names of the classes; default: their indices.
        split: name of this split.
        layout: "NCHW", or "NHWC" when the channels come last.
    """
    labels = as_tensor("targets", targets)
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"targets must be integers. Got {labels.dtype}. Convert with .astype(int).")
    if labels.ndim != 3 or labels.dtype != torch.uint8:
        labels = labels.long()
    names = _default_names(labels) if classes is None else tuple(classes)
    return Dataset(_images(images, layout), labels, names, split, "arrays")


def _default_names(labels: Tensor) -> tuple[str, ...]:
    known = labels if labels.ndim == 1 else labels[labels != IGNORE]
    count = int(known.max()) + 1 if known.numel() else 0
    if count > MOST_CLASSES:
        raise ValueError(
            f"targets must be class indices below {MOST_CLASSES:,} when classes are not named. "
            f"Got {count - 1}. Map the labels to 0, 1, 2, ..., or pass classes=."
        )
    return tuple(map(str, range(count)))


def _images(images: Array, layout: str) -> Tensor:
    tensor = as_tensor("images", images)
    tensor = tensor.float() if tensor.is_floating_point() else tensor
    if found := _checks.not_finite(tensor):
        raise ValueError(f"images must be finite. Got {found}. Clean them, or leave them out.")
    if tensor.ndim == 3:
        return tensor.unsqueeze(1)
    _checks.choice("layout", layout, ("NCHW", "NHWC"))
    if layout == "NHWC" and tensor.ndim == 4:
        return tensor.permute(0, 3, 1, 2).contiguous()
    if looks_channels_last(tensor):
        raise ValueError(
            f"images must have shape (N,C,H,W). Got {tuple(tensor.shape)}, which looks like channels last: "
            "pass layout='NHWC'."
        )
    return tensor


def looks_channels_last(images: Tensor) -> bool:
    """Whether the second axis seems to be rows, and the last one channels."""
    return images.ndim == 4 and images.shape[1] > 4 and images.shape[3] in {1, 3, 4}


def as_tensor(name: str, values: Any) -> Tensor:
    """An array, or nested lists, as a tensor; memory is shared if possible."""
    if isinstance(values, Tensor):
        return values
    array = np.asarray(values)
    if array.dtype.kind not in "buif":
        raise TypeError(
            f"{name} must be an array of numbers. Got {array.dtype} such as {array.ravel()[:1]}. Encode "
            "classes as 0 to C-1, with sklearn.preprocessing.LabelEncoder, or use cmcl.CMCLClassifier."
        )
    # torch shares numpy's memory only if it is writable, has no negative strides and native byte order
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    shared = native.flags.writeable and min(native.strides, default=0) >= 0
    return torch.from_numpy(native if shared else native.copy())
