"""`overlap="auto"`: K is chosen by short runs of a few candidates, on examples that they do not learn.

The full run then learns all training examples with the best K. M members, K overlap.
"""

from collections.abc import Callable
from dataclasses import replace

from ..data.dataset import Dataset, hold_out, identities, split_validation
from .batches import Data, tensors
from .config import Recipe

FRACTION = 0.2  # of the run's length, for each candidate
HELD_OUT = 0.2  # of the training examples

Score = Callable[[Recipe, Data, Data], float]  # trains on the first data; error in percent on the second


def candidates(members: int) -> list[int]:
    """The values of K to compare: M - 1 (the default), 1 (the paper's), and M (an independent ensemble)."""
    return list(dict.fromkeys((max(1, members - 1), 1, members)))


def overlap_errors(recipe: Recipe, train: Data, held_out: Data | None, score: Score) -> dict[int, float]:
    """The held-out error of each candidate after a short run; equal ones are in the order of preference."""
    kept, held_out = (train, held_out) if held_out is not None else _split(train)
    short = replace(recipe.shortened(FRACTION), subset=None, validation=0.0)
    return {k: score(replace(short, overlap=k), kept, held_out) for k in candidates(recipe.members)}


def _split(train: Data) -> tuple[Data, Data]:
    if isinstance(train, Dataset):
        return split_validation(train, HELD_OUT)
    if not isinstance(train, tuple | list):
        raise TypeError(
            f"train must be a Dataset or a pair of tensors for overlap='auto'. Got {type(train).__name__}. "
            "Give a number."
        )
    images, targets = tensors(train)
    strata = targets.tolist() if targets.ndim == 1 and not targets.is_floating_point() else [0] * len(targets)
    parts = hold_out(strata, identities(images), HELD_OUT, seed=0)
    if not all(parts):
        raise ValueError(
            f"train must hold more examples for overlap='auto'. Got {len(images)}. Give a number."
        )
    kept, held_out = ((images[part], targets[part]) for part in parts)
    return kept, held_out
