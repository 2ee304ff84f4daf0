"""scikit-learn's handwritten digits: 1,797 grey images of 8x8, no file needed."""

from pathlib import Path

import numpy as np
import torch

from .dataset import Dataset, hold_out
from .registry import DIGITS


def load(split: str = "train", root: str | Path | None = None) -> Dataset:
    """One fifth of every digit is the test split; the split never changes."""
    from sklearn.datasets import load_digits

    content = load_digits()
    grey = np.rint(content.images * (255 / 16)).astype(np.uint8)  # stored as 0..16
    targets = content.target.astype(np.int64)
    train, test = hold_out(targets.tolist(), range(len(targets)), fraction=0.2, seed=0)
    chosen = train if split == "train" else test
    images = torch.from_numpy(grey[chosen]).unsqueeze(1)
    return Dataset(images, torch.from_numpy(targets[chosen]), DIGITS.classes, split, "scikit-learn")
