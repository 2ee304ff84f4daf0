"""Every check of ensemble and data, before training starts and before anything is changed.

N examples, M members, B batch, C classes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .. import _checks, metrics
from .._messages import first_line, warn, without_addresses
from ..data.arrays import looks_channels_last
from ..data.dataset import IGNORE, Dataset, default_ignore_index, not_ignored
from ..data.transforms import MeanStd, Transform
from ..ensemble import Ensemble, in_eval
from ..objectives import TaskLoss
from .batches import Batches, Data, Loaded, Resident, first_batch, hold_out, subset, tensors
from .config import Options, Recipe, check_seed
from .cuda import find_device

AUTO = "auto"  # of ignore_index
PARTS = ("images", "targets")  # of a pair


@dataclass
class Plan:
    """What `preflight` found: all that training needs besides the ensemble."""

    recipe: Recipe
    seed: int
    device: torch.device
    train: Data
    validation: Data | None  # scored during training: the held-out part of train, or test
    test: Data | None
    transform: Transform | None  # of the ensemble, from now on
    classes: tuple[str, ...] | None  # names, for the ensemble; None: they have none
    monitored_classes: int  # specialists are counted by class; 1: not
    ignore_index: int | None
    check_targets: Callable[[Tensor], None]  # of a DataLoader's later batches
    not_finite: str  # where train images hold NaN or infinity
    frozen: list[nn.Module]  # modules that the user set to eval mode

    def place(self, ensemble: Ensemble) -> None:
        """Move the ensemble to the device, in the layout its convolutions prefer."""
        ensemble.to(self.device)
        if self.device.type == "cuda":
            ensemble.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batches(self, ensemble: Ensemble) -> Batches:
        """The batches of the run, on the device."""
        if isinstance(self.train, DataLoader):
            apply = partial(inputs_of, self.transform)
            return Loaded(self.train, self.seed, self.device, apply, self.check_targets)
        images, targets = tensors(self.train)
        inputs = inputs_of(self.transform, images)
        return Resident(inputs, targets, self.recipe.batch_size, self.seed, self.device)

    def train_mode(self, ensemble: Ensemble) -> None:
        """Train mode, except for modules that the user froze by `.eval()`."""
        ensemble.train()
        for module in self.frozen:
            module.training = False


def preflight(
    ensemble: Ensemble,
    train: Any,
    test: Any,
    *,
    recipe: Recipe,
    seed: int,
    task: TaskLoss | None,
    ignore_index: int | str | None,
    options: Options,
) -> Plan:
    """Check everything that can be checked before training; raises, and changes nothing."""
    if not isinstance(ensemble, Ensemble):
        raise TypeError(f"ensemble must be a cmcl.Ensemble. Got {_checks.kind(ensemble)}.")
    seed, device = check_seed(seed), find_device(options.device)
    recipe = fitting(recipe, ensemble)
    if not any(p.requires_grad for p in ensemble.parameters()):
        raise ValueError("an ensemble must have weights to train. Got none with requires_grad=True.")
    train = as_data("train", train, ensemble)
    test = None if test is None else as_data("test", test, ensemble)
    train, held_out = hold_out(subset(train, recipe.subset), recipe.validation)
    loaded = isinstance(train, DataLoader)
    images, targets = first_batch("train", train) if isinstance(train, DataLoader) else tensors(train)
    _check_length(train, images, targets)
    if loaded and device.type == "cuda" and options.capture:
        raise TypeError("train must be tensors for a captured step. Got a DataLoader; leave out capture.")
    if loaded and recipe.adversarial:
        raise TypeError("train must be tensors for adversarial training. Got a DataLoader.")
    transform = _transform(ensemble, train, images)
    not_finite = "" if loaded else _checks.not_finite(images)
    if not_finite:
        warn(f"train images hold {not_finite}. Most networks return NaN for them: clean them, or leave out.")

    logits, per_example = probe(ensemble, inputs_of(transform, images[:2]), "train")  # (M, 2, C, ...)
    if not_finite and recipe.adversarial:
        raise ValueError(f"train images must be finite for adversarial training. Got {not_finite}.")
    classes, dense = logits.shape[2], logits.ndim > 3
    of_pixels = dense and (task is None or targets.shape[1:] == logits.shape[3:])
    not_counted = resolved(ignore_index, targets, classes, dense=of_pixels)
    if task is None:
        _check_labels("train", targets, logits, not_counted)
    _check_batch_norm(ensemble, recipe, train, len(images), per_example)
    for name, scored in (("the held-out part of train", held_out), ("test", test)):
        if scored is not None:
            check_scored(name, ensemble, scored, ignore_index, transform)
    return Plan(
        recipe=recipe,
        seed=seed,
        device=device,
        train=train,
        validation=held_out or test,
        test=test,
        transform=transform,
        classes=_class_names(train) if isinstance(train, Dataset) else _as_tuple(ensemble.classes),
        monitored_classes=classes if _by_class(targets, classes, task, not_counted, loaded) else 1,
        ignore_index=not_counted,
        check_targets=partial(_check_range, classes, not_counted) if task is None else lambda targets: None,
        not_finite=not_finite,
        frozen=[
            part
            for member in ensemble.members
            if member.training
            for part in member.modules()
            if not part.training
        ],
    )


def fitting(recipe: Recipe, ensemble: Ensemble) -> Recipe:
    """The recipe, completed by how the ensemble shares features; raises if the two disagree."""
    if recipe.members != (m := len(ensemble.members)):
        raise ValueError(f"recipe.members must be {m}, as in the ensemble. Got {recipe.members}.")
    layer = ensemble.share_after
    if recipe.sharing is None:
        unset = layer is not None and recipe.share_prob == Recipe.share_prob
        prob = ensemble.share_prob if unset else recipe.share_prob
        recipe = replace(recipe, sharing=layer is not None, share_prob=prob)
    if recipe.sharing and layer is None:
        raise ValueError(
            "recipe.sharing must be False: the ensemble has no share_after. Got True. To share features, "
            "build it with share_after."
        )
    if not recipe.sharing and layer is not None:
        raise ValueError(
            f"recipe.sharing must be True: the ensemble shares features after {layer!r}. Got False. To train "
            "without sharing, build it without share_after."
        )
    if recipe.sharing and recipe.share_prob != ensemble.share_prob:
        raise ValueError(
            f"recipe.share_prob must be {ensemble.share_prob}, as in the ensemble. Got {recipe.share_prob}."
        )
    return recipe


# The data.


def as_data(name: str, data: Any, ensemble: Ensemble) -> Data:
    """Data as `fit` takes it; arrays of numpy become tensors, of the precision of the networks."""
    if isinstance(data, Dataset | DataLoader) or _checks.is_pair(data):
        return data  # type: ignore[no-any-return]
    if isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_array, data)):
        images, targets = (_as_tensor(name, part, value) for part, value in zip(PARTS, data, strict=True))
        dtypes = {p.dtype for p in ensemble.parameters() if p.is_floating_point()}
        if images.is_floating_point() and len(dtypes) == 1 and not isinstance(data[0], Tensor):
            images = images.to(dtypes.pop())
        return images, targets
    raise TypeError(
        f"{name} must be a Dataset, a pair (images, targets) of tensors or arrays, or a DataLoader. Got "
        f"{_checks.kind(data)}. Wrap a dataset of torch's in a DataLoader."
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) or (isinstance(value, list) and len(value) > 0)


def _as_tensor(name: str, part: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.ascontiguousarray(value)
    if array.dtype.kind in "OUS":
        raise TypeError(
            f"{name} {part} must be numbers. Got {array.dtype} such as {array.flat[0]!r}. Encode classes "
            "as 0 to C-1, with sklearn.preprocessing.LabelEncoder, or use cmcl.CMCLClassifier, which does it."
        )
    return torch.from_numpy(array)


def _check_length(train: Data, images: Tensor, targets: Tensor) -> None:
    if len(images) != len(targets) or not len(images):
        raise ValueError(
            f"images and targets must be as many, and at least one. Got {len(images)} and {len(targets)}."
        )
    if isinstance(train, DataLoader):
        try:
            batches = len(train)
        except TypeError as error:
            raise TypeError(
                f"train must have a length. Got a DataLoader without: {first_line(error)}."
            ) from None
        if not batches:
            raise ValueError("train must hold at least one batch. Got an empty DataLoader.")


def _transform(ensemble: Ensemble, train: Data, images: Tensor) -> Transform | None:
    """The ensemble's transform; for uint8 images without one, `MeanStd` fitted to them."""
    if ensemble.transform is not None or isinstance(train, DataLoader) or not _are_raw_images(images):
        own: Transform | None = ensemble.transform
        return own
    if not isinstance(train, Dataset) and looks_channels_last(images):
        warn(
            f"images of shape {tuple(images.shape)} look like channels last, and are taken for (N,C,H,W). "
            "If the channels are the last axis, pass images.permute(0, 3, 1, 2)."
        )
    transform: Transform = MeanStd().fit(train if isinstance(train, Dataset) else images)
    return transform


def _are_raw_images(images: Tensor) -> bool:
    return images.dtype == torch.uint8 and images.ndim == 4


def inputs_of(transform: Transform | None, images: Tensor) -> Tensor:
    """Images as the networks take them: uint8 images go through the transform, everything else stays."""
    return transform.transform(images) if transform is not None and _are_raw_images(images) else images


def resolved(ignore_index: int | str | None, targets: Tensor, classes: int, *, dense: bool) -> int | None:
    """The target that is not counted; "auto": 255 of pixels, where it cannot be a class."""
    if ignore_index == AUTO:
        return default_ignore_index(targets, classes) if dense else None
    if isinstance(ignore_index, str):
        raise ValueError(f"ignore_index must be a number, {AUTO!r} or None. Got {ignore_index!r}.")
    _checks.ignorable(ignore_index, targets)
    return ignore_index


def _class_names(train: Dataset) -> tuple[str, ...] | None:
    names = tuple(map(str, train.classes))
    return None if names == tuple(map(str, range(len(names)))) else names  # numbers are no names


def _as_tuple(names: Any) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


# The networks.


def probe(ensemble: Ensemble, inputs: Tensor, name: str = "train") -> tuple[Tensor, bool]:
    """Logits (M, 2, C, ...) of two examples, and whether some BatchNorm sees one value per example.

    The one check that networks accept the data, in eval mode; nothing is changed.
    """
    seen: list[bool] = []
    inputs = inputs[:2].to(next(ensemble.parameters(), inputs).device)
    try:
        with torch.no_grad(), in_eval(ensemble), ExitStack() as hooks:
            for module in ensemble.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    handle = module.register_forward_pre_hook(
                        lambda module, args: seen.append(
                            args[0].numel() == args[0].shape[0] * args[0].shape[1]
                        )
                    )
                    hooks.callback(handle.remove)
            logits: Tensor = ensemble(inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        one = f"{inputs.dtype} of shape {tuple(inputs.shape[1:])}"
        raise ValueError(
            f"the networks must accept an example of {name}. Got {one} and this error: {first_line(error)}."
            f"{_hint(ensemble, inputs)}"
        ) from error
    _checks.no_numbers(logits)
    if hint := _checks.normalised(logits):
        warn(hint)
    return logits, any(seen)


def _hint(ensemble: Ensemble, images: Tensor) -> str:
    """How to convert inputs of another precision than the networks', as numpy's float64."""
    dtypes = {p.dtype for p in ensemble.parameters() if p.is_floating_point()}
    if images.dtype == torch.uint8:
        return " uint8 images must have the shape (N, C, H, W); convert other inputs by images.float()."
    if not images.is_floating_point() or len(dtypes) != 1 or images.dtype in dtypes:
        return ""
    (own,) = dtypes
    convert = {torch.float32: "float()", torch.float64: "double()"}.get(own, f"to({own})")
    return f" The networks compute in {str(own).removeprefix('torch.')}: convert by images.{convert}."


def _check_labels(name: str, targets: Tensor, logits: Tensor, ignore_index: int | None) -> None:
    """Targets must be classes of the networks: integers from 0 to C-1, one per example or pixel."""
    classes = logits.shape[2]
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(
            f"{name} targets must be class indices, integers, because fit is for classification. Got "
            f"{_checks.kind(targets)}. For soft labels pass task=."
        )
    if targets.shape[1:] != logits.shape[3:]:
        wanted, got = (tuple(shape) for shape in (targets.shape[1:], logits.shape[3:]))
        raise ValueError(
            f"the networks must predict a class per {'pixel' if wanted else 'example'}, of shape {wanted} "
            f"like the targets of {name}. Got a class per {'pixel' if got else 'example'}, of shape {got}."
        )
    _check_range(classes, ignore_index, targets)


def _check_range(classes: int, ignore_index: int | None, targets: Tensor) -> None:
    """Labels must be between 0 and C-1; on a GPU, looking would wait for the device."""
    if not targets.is_cuda:
        _checks.label_range(targets, classes, ignore_index)


def _check_batch_norm(
    ensemble: Ensemble, recipe: Recipe, train: Data, examples: int, per_example: bool
) -> None:
    """BatchNorm cannot normalise a single value: raise where a part of a batch would be one example."""
    active = [m for m in ensemble.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    if not per_example or not (active or not ensemble.training):
        return
    for size in _batch_sizes(recipe, train, examples):
        if size // min(recipe.accumulate, size) == 1:
            hint = (
                "set drop_last=True in the DataLoader"
                if isinstance(train, DataLoader)
                else "raise batch_size"
            )
            raise ValueError(
                f"BatchNorm must see more than one example at a time. Got a batch of {size}, in "
                f"{min(recipe.accumulate, size)} parts: {hint}, or lower accumulate."
            )


def _batch_sizes(recipe: Recipe, train: Data, examples: int) -> list[int]:
    """The sizes of batches, as far as they are known."""
    if not isinstance(train, DataLoader):
        return [min(recipe.batch_size, examples)]
    size = train.batch_size
    if size is None:
        return []
    try:
        rest = 0 if train.drop_last else len(train.sampler) % size  # type: ignore[arg-type]
    except TypeError:
        rest = 0
    return [size, rest] if rest else [size]


def _by_class(targets: Tensor, classes: int, task: Any, ignore_index: int | None, loaded: bool) -> bool:
    """Whether specialists can be counted by class: not of pixels, soft labels or a task's own targets."""
    if targets.ndim > 1 or targets.is_floating_point() or ignore_index is not None:
        return False
    if task is None:
        return True
    return not loaded and 0 <= int(targets.min()) <= int(targets.max()) < classes


def check_scored(
    name: str,
    ensemble: Ensemble,
    data: Data,
    ignore_index: int | str | None = AUTO,
    transform: Transform | None = None,
) -> None:
    """Two examples, those with the lowest and the highest class, as they will be scored."""
    images, targets = first_batch(name, data) if isinstance(data, DataLoader) else tensors(data)
    if not len(images) or len(images) != len(targets):
        raise ValueError(
            f"{name} must hold as many images as targets, at least one. Got {len(images)} and {len(targets)}."
        )
    try:
        with torch.random.fork_rng([p.device for p in ensemble.parameters() if p.is_cuda][:1]):  # masks
            two = _extremes(targets, ignore_index)
            inputs = inputs_of(transform or ensemble.transform, images[two])
            logits, looked = next(ensemble.stream(inputs, 2)), targets[two].cpu()
            skipped = resolved(ignore_index, looked, logits.shape[2], dense=looked.ndim > 1)
            if (
                not isinstance(data, DataLoader) or not_ignored(looked, skipped).any()
            ):  # later batches may count
                metrics.top1_error(logits.float().softmax(2).cpu(), looked, ignore_index=skipped)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must fit the ensemble. Got data that do not: {first_line(error)}."
            f"{_hint(ensemble, images)}"
        ) from error


def _extremes(targets: Tensor, ignore_index: int | str | None) -> list[int]:
    """Positions of the lowest and the highest class; of pixels, of images where some count."""
    default = IGNORE if targets.ndim > 1 else None  # a wrong label of an image must be seen, 255 too
    ignore = default if isinstance(ignore_index, str) else ignore_index
    if targets.ndim == 1:
        counted = not_ignored(targets, ignore).nonzero().flatten()
        own = targets[counted].long()
        return [int(counted[own.argmin()]), int(counted[own.argmax()])] if len(own) else [0]
    return not_ignored(targets, ignore).flatten(1).any(1).nonzero().flatten()[:2].tolist() or [0]


def task_name(task: TaskLoss | None) -> str | None:
    """Enough of a function to notice another one; a partial's tensors, such as class weights, by shape."""
    if isinstance(task, partial):
        given = [_shape(value) for value in task.args]
        options = {name: _shape(value) for name, value in task.keywords.items()}
        return without_addresses(" ".join([str(task_name(task.func)), *map(repr, given), str(options)]))
    return None if task is None else getattr(task, "__qualname__", type(task).__qualname__)


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else value
