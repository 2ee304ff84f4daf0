"""What must hold of a run's ensembles and data: found out before the first step, not after hours."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .. import _checks, metrics
from ..data.dataset import IGNORE, Dataset, not_ignored
from ..ensemble import Ensemble, in_eval
from ..telling import first_line
from .config import Recipe
from .scoring import AUTO, resolved
from .setup import Data, tensors
from .source import first_batch


def repeats(
    ensemble: Ensemble | Sequence[Ensemble], seed: int | Sequence[int]
) -> tuple[list[Ensemble], list[int]]:
    """The ensembles of a run, each with weights of its own, and as many seeds."""
    ensembles = [ensemble] if isinstance(ensemble, Ensemble) else list(ensemble)
    several = isinstance(seed, Iterable) and getattr(seed, "ndim", None) != 0  # as an array of one number has
    numbers: Any = seed if several else [seed]
    seeds = [index(number) for number in numbers]
    if not ensembles or len(seeds) != len(ensembles):
        raise ValueError(
            f"seed must give {max(len(ensembles), 1)} numbers, one an ensemble. Got {len(seeds)} for "
            f"{len(ensembles)} ensembles."
        )
    weights = [id(p) for own in ensembles for p in own.parameters() if p.requires_grad]
    if len(set(weights)) < len(weights):
        raise ValueError(
            "ensembles must have weights of their own. Got the same ones twice; build each repeat anew: "
            "[Ensemble(network, M) for seed in seeds]."
        )
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seed must give different numbers, one an ensemble. Got {seeds}.")
    return ensembles, seeds


def fitting(recipe: Recipe, ensemble: Ensemble) -> Recipe:
    """The recipe, if it tells the truth about the ensemble; what it leaves open of sharing, it says then."""
    if recipe.members != (m := len(ensemble.members)):
        raise ValueError(f"recipe.members must be {m}, as in the ensemble. Got {recipe.members}.")
    cut = ensemble.share_after
    if recipe.sharing is None:
        left_open = cut is not None and recipe.share_prob == Recipe.share_prob
        prob = ensemble.share_prob if left_open else recipe.share_prob
        recipe = replace(recipe, sharing=cut is not None, share_prob=prob)
    if recipe.sharing and cut is None:
        raise ValueError(
            "recipe.sharing must be False: the ensemble has no share_after. Got True. To share features, "
            "build it with share_after."
        )
    if not recipe.sharing and cut is not None:
        raise ValueError(
            f"recipe.sharing must be True: the ensemble shares features after {cut!r}. Got False. To train "
            "without sharing, build it without share_after."
        )
    if recipe.sharing and recipe.share_prob != ensemble.share_prob:
        raise ValueError(
            f"recipe.share_prob must be {ensemble.share_prob}, as in the ensemble. Got {recipe.share_prob}."
        )
    return recipe


def check_kind(name: str, data: Data) -> None:
    """Data must be something to learn from."""
    if not _checks.is_pair(data) and not isinstance(data, Dataset | DataLoader):
        raise TypeError(
            f"{name} must be a Dataset, a pair of tensors (images, targets) or a DataLoader. Got "
            f"{_checks.kind(data)}. Make tensors of arrays (torch.as_tensor), or wrap a dataset of torch's "
            "in a DataLoader."
        )


def first_answers(ensemble: Ensemble, images: Tensor) -> Tensor:
    """Logits (M, 2, C, ...) of two examples: how many classes the networks tell apart, and of what."""
    try:
        with torch.no_grad(), in_eval(ensemble):
            logits: Tensor = ensemble(images[:2])
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        one = f"{images.dtype} of shape {tuple(images.shape[1:])}"
        raise ValueError(
            f"the networks must take an example of train. Got {one} and this answer: {first_line(error)}."
            f"{_cure(ensemble, images)}"
        ) from error
    _checks.no_numbers(logits)
    return logits


def check_scored(name: str, ensemble: Ensemble, data: Data, ignore_index: int | str | None = AUTO) -> None:
    """Two examples, those with the lowest and the highest class, as they will be scored."""
    check_kind(name, data)
    images, targets = first_batch(name, data) if isinstance(data, DataLoader) else tensors(data)
    if not len(images) or len(images) != len(targets):
        raise ValueError(
            f"{name} must hold as many images as targets, and not none. Got {len(images)} and {len(targets)}."
        )
    cuda = [p.device for p in ensemble.parameters() if p.is_cuda][:1]
    try:
        with torch.random.fork_rng(cuda):  # masks may be drawn at test time
            two = _extremes(targets, ignore_index)
            probs, looked = ensemble.predict(images[two]).member_probs.cpu(), targets[two].cpu()
            ignore = resolved(ignore_index, looked, probs.shape[2], dense=looked.ndim > 1)
            if (
                not isinstance(data, DataLoader) or not_ignored(looked, ignore).any()
            ):  # later batches may count
                metrics.top1_error(probs, looked, ignore_index=ignore)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must fit the ensemble. Got data that do not: {first_line(error)}."
            f"{_cure(ensemble, images)}"
        ) from error


def _cure(ensemble: Ensemble, images: Tensor) -> str:
    """What to do with numbers of another precision than the networks'; numpy's are float64."""
    precisions = {p.dtype for p in ensemble.parameters() if p.is_floating_point()}
    if not images.is_floating_point() or len(precisions) != 1 or images.dtype in precisions:
        return ""
    (own,) = precisions
    convert = {torch.float32: "float()", torch.float64: "double()"}.get(own, f"to({own})")
    return f" The networks compute in {str(own).removeprefix('torch.')}: convert by images.{convert}."


def _extremes(targets: Tensor, ignore_index: int | str | None) -> list[int]:
    """Positions of the lowest and the highest class; of pixels, of images where some count."""
    by_itself = IGNORE if targets.ndim > 1 else None  # a wrong label of an image must be seen, 255 too
    ignore = by_itself if isinstance(ignore_index, str) else ignore_index
    if targets.ndim == 1:
        counted = not_ignored(targets, ignore).nonzero().flatten()
        own = targets[counted].long()
        return [int(counted[own.argmin()]), int(counted[own.argmax()])] if len(own) else [0]
    return not_ignored(targets, ignore).flatten(1).any(1).nonzero().flatten()[:2].tolist() or [0]
