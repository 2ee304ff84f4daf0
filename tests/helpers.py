"""What several test files need."""

import torch


def draw_masks(features, *, prob=0.7, generator=None):
    """Masks (M, M, B, ...) for `share_features`, to compute in two ways on the same draws."""
    shape = (len(features), len(features), *features[0].shape)
    return torch.rand(shape, device=features[0].device, generator=generator) < prob
