"""What several test files need."""

import warnings
from contextlib import contextmanager

import torch


def draw_masks(features, *, prob=0.7, generator=None):
    """Masks (M, M, B, ...) for `share_features`, to compute in two ways on the same draws."""
    shape = (len(features), len(features), *features[0].shape)
    return torch.rand(shape, device=features[0].device, generator=generator) < prob


@contextmanager
def only_our_warnings():
    """torch's own do not pass through its compiler if they are errors; a fallback of ours still fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*and slower")
        yield
