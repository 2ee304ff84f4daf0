"""Every check of ensemble and data, before training starts and before anything is changed.

N examples, M members, B batch, C classes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, DistributedSampler

from .. import _checks, metrics
from .._messages import first_line, warn, without_addresses
from ..data.arrays import as_tensor, looks_channels_last
from ..data.dataset import Dataset, default_ignore_index, not_ignored
from ..data.transforms import MeanStd, Transform
from ..ensemble import Ensemble, in_eval
from ..objectives import TaskLoss, independent_loss
from ..stacking import pays, stackable
from .augment import Augmentation, augmented
from .batches import Batch, Batches, Data, Loaded, Resident, first_batch, hold_out, subset, tensors
from .config import Options, Recipe, check_seed
from .cuda import BATCH_NORM, default_generator, find_device
from .mesh import Shape, Sizes, Traffic, choose, launched, normalises_as_usual, parse, traffic

AUTO = "auto"  # of ignore_index


@dataclass
class Plan:
    """All that training needs besides the ensemble, checked by `preflight`."""

    recipe: Recipe
    seed: int
    options: Options
    device: torch.device
    train: Data
    held_out: Dataset | None  # the part of train that nothing is learned from
    test: Data | None
    transform: Transform | None  # of the ensemble, from now on
    classes: Sequence[str] | None  # their names, for the ensemble
    image_shape: tuple[int, ...] | None  # likewise
    monitored_classes: int  # specialists are counted by class; 1: not
    task: TaskLoss | None
    ignore_index: int | None
    check_targets: Callable[[Tensor], None]  # of a DataLoader's later batches
    frozen: list[nn.Module]  # modules that the user set to eval mode
    augment: Augmentation | None
    stack: bool  # whether members train stacked, by batched matrix products
    mesh: Shape  # of the processes that train together
    traffic: Traffic  # between them

    @property
    def validation(self) -> Data | None:
        """The data that are scored during training: the held-out part of train, or test."""
        return self.test if self.held_out is None else self.held_out

    def batches(self) -> Batches:
        """The batches of the run, on the device."""
        apply = partial(inputs_of, self.transform)
        if isinstance(self.train, DataLoader):
            return Loaded(self.train, self.seed, self.device, apply, self.check_targets)
        images, targets = tensors(self.train)
        size, alternating = self.recipe.batch_size, self.recipe.augment.flip == "alternating"
        return Resident(apply(images), targets, size, self.seed, self.device, alternating=alternating)

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
    augment: Augmentation | None = None,
    options: Options,
) -> Plan:
    """Check everything that can be checked before training; raises, and changes nothing."""
    if not isinstance(ensemble, Ensemble):
        raise TypeError(f"ensemble must be a cmcl.Ensemble. Got {_checks.kind(ensemble)}.")
    seed, device, recipe = check_seed(seed), find_device(options.device), fitting(recipe, ensemble)
    if not any(p.requires_grad for p in ensemble.parameters()):
        raise ValueError("an ensemble must have weights to train. Got none with requires_grad=True.")
    train = subset(as_data("train", train, ensemble), recipe.subset)
    train, held_out = hold_out(train, recipe.validation)
    test = None if test is None else as_data("test", test, ensemble)
    images, targets = _examples("train", train)
    if isinstance(train, DataLoader):
        _check_loader(train, recipe, captured=device.type == "cuda" and options.capture is True)
    elif found := _checks.not_finite(images):
        if recipe.adversarial:  # or their range would not be finite
            raise ValueError(f"train images must be finite for adversarial training. Got {found}.")
        warn(f"train images hold {found}. Most networks return NaN for them: clean them, or leave them out.")

    transform = _transform(ensemble, train, images)
    inputs = inputs_of(transform, images[:2])  # enough to try everything on
    logits = probe("train", ensemble, inputs)  # (M, 2, C, ...)
    if hint := _checks.normalised(logits):
        warn(hint)
    classes, of_pixels = logits.shape[2], task is None or targets.shape[1:] == logits.shape[3:]
    not_counted = resolved(ignore_index, targets, classes, of_pixels=of_pixels)
    check_targets = partial(_check_targets, None if task else classes, not_counted)
    with _checks.blindly():  # types and shapes; `check_targets` checks the values
        two = targets[:2] if task else torch.zeros_like(targets[:2])
        independent_loss(logits, two.to(logits.device), task=task, ignore_index=not_counted)
    check_targets(targets)
    _check_augment(recipe, train, images, targets, not_counted)
    if recipe.flip_at_test and images.ndim != 4:
        raise ValueError(f"images must be (N, C, H, W) for flip_at_test. Got {tuple(images.shape)}.")
    augment = augmented(recipe.augment, classes, augment) if recipe.augment or augment else None
    if augment is not None:
        _try_augment(augment, inputs.to(device), targets[:2].to(device))
    frozen = [part for m in ensemble.members if m.training for part in m.modules() if not part.training]
    frozen += [part for part in ensemble.frozen if not part.training and part not in frozen]
    bf16 = options.precision_on(device.type) == "bf16"
    sizes = _sizes(ensemble, inputs[:1], frozen, bf16=bf16) if launched() > 1 else Sizes(0)
    mesh = _mesh(ensemble, recipe, options, train, sizes)
    _check_batch_norm(ensemble, frozen, train, recipe, inputs[:1])
    for name, scored in (("the held-out part of train", held_out), ("test", test)):
        if scored is not None:
            check_scored(name, ensemble, scored, ignore_index, transform)
    return Plan(
        recipe=recipe,
        seed=seed,
        options=options,
        device=device,
        train=train,
        held_out=held_out,
        test=test,
        transform=transform,
        classes=_class_names(train) if isinstance(train, Dataset) else ensemble.classes,
        image_shape=tuple(images.shape[1:]) if isinstance(train, Dataset) else ensemble.image_shape,
        monitored_classes=classes if _by_class(train, targets, classes, task, not_counted) else 1,
        task=_recipe_task(recipe, task),
        ignore_index=not_counted,
        check_targets=check_targets,
        frozen=frozen,
        augment=augment,
        stack=task is None
        and not frozen
        and mesh == Shape()
        and _stack(ensemble, recipe, options, device, train, inputs[:1]),
        mesh=mesh,
        traffic=traffic(mesh, recipe.members, max(_batch_sizes(train, recipe.batch_size), default=0), sizes),
    )


def fitting(recipe: Recipe, ensemble: Ensemble) -> Recipe:
    """The recipe, completed by how the ensemble shares features; raises if the two disagree."""
    layer, prob = ensemble.share_after, ensemble.share_prob
    if recipe.sharing is None:
        unset = layer is not None and recipe.share_prob == Recipe.share_prob
        recipe = replace(recipe, sharing=layer is not None, share_prob=prob if unset else recipe.share_prob)
    wanted: dict[str, Any] = {"members": len(ensemble.members), "sharing": layer is not None}
    if layer is not None:
        wanted["share_prob"] = prob
    for name, value in wanted.items():
        if (got := getattr(recipe, name)) != value:
            raise ValueError(
                f"recipe.{name} must be {value}, as in the ensemble (share_after={layer!r}). Got {got}. "
                "Change the recipe, or build another ensemble."
            )
    return recipe


# The data.


def as_data(name: str, data: Any, ensemble: Ensemble) -> Data:
    """Data as `fit` takes it; arrays of numpy become tensors, of the precision of the networks."""
    if isinstance(data, Dataset | DataLoader) or _checks.is_pair(data):
        return data  # type: ignore[no-any-return]
    pair = isinstance(data, tuple | list) and len(data) == 2
    if pair and all(isinstance(part, Tensor | np.ndarray | list) for part in data):
        images, targets = as_tensor(f"{name} images", data[0]), as_tensor(f"{name} targets", data[1])
        if images.is_floating_point() and not isinstance(data[0], Tensor):
            images = images.to(_dtype(ensemble) or images.dtype)
        return images, targets
    raise TypeError(
        f"{name} must be a Dataset, a pair (images, targets) of tensors or arrays, or a DataLoader. Got "
        f"{_checks.kind(data)}. Wrap a dataset of torch's in a DataLoader."
    )


def _dtype(ensemble: Ensemble) -> torch.dtype | None:
    """The precision of the networks, None if they have several."""
    dtypes = {p.dtype for p in ensemble.parameters() if p.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _examples(name: str, data: Data) -> Batch:
    """All images and targets; the first batch of a DataLoader."""
    images, targets = first_batch(name, data) if isinstance(data, DataLoader) else tensors(data)
    if len(images) != len(targets) or not len(images):
        raise ValueError(
            f"{name} must hold as many images as targets, at least one. Got {len(images)} and {len(targets)}."
        )
    return images, targets


def _check_loader(train: DataLoader[Any], recipe: Recipe, *, captured: bool) -> None:
    if captured:
        raise TypeError("train must be tensors for a captured step. Got a DataLoader; leave out capture.")
    if recipe.adversarial:
        raise TypeError("train must be tensors for adversarial training. Got a DataLoader.")
    try:
        len(train)
    except TypeError as error:
        raise TypeError(f"train must have a length. Got a DataLoader without: {first_line(error)}.") from None


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
    return MeanStd().fit(train if isinstance(train, Dataset) else images)


def _are_raw_images(images: Tensor) -> bool:
    return images.dtype == torch.uint8 and images.ndim == 4


def inputs_of(transform: Transform | None, images: Tensor) -> Tensor:
    """Images as the networks take them: uint8 images go through the transform, everything else stays."""
    return transform.transform(images) if transform is not None and _are_raw_images(images) else images


def resolved(
    ignore_index: int | str | None, targets: Tensor, classes: int, *, of_pixels: bool = True
) -> int | None:
    """The target that is not counted; "auto": 255 of pixels, where it cannot be a class.

    `of_pixels=False`: a task reads targets of more dimensions in its own way.
    """
    if ignore_index == AUTO:
        return default_ignore_index(targets, classes) if of_pixels else None
    if isinstance(ignore_index, str):
        raise ValueError(f"ignore_index must be a number, {AUTO!r} or None. Got {ignore_index!r}.")
    _checks.ignorable(ignore_index, targets)
    return ignore_index


def _check_targets(classes: int | None, ignore_index: int | None, targets: Tensor) -> None:
    """Labels must be between 0 and C-1, unless a task reads them; on a GPU, looking would wait for it."""
    if classes is not None and not targets.is_cuda:
        _checks.label_range(targets, classes, ignore_index)


def _recipe_task(recipe: Recipe, task: TaskLoss | None) -> TaskLoss | None:
    """The task loss; for label smoothing and mixed labels, a cross-entropy that takes probabilities."""
    if not (recipe.label_smoothing or recipe.augment.mixup or recipe.augment.cutmix):
        return task
    if task is not None:
        raise ValueError("task must be None with label_smoothing, mixup or cutmix. Got a function.")
    return partial(_smoothed_cross_entropy, smoothing=recipe.label_smoothing)


def _smoothed_cross_entropy(logits: Tensor, targets: Tensor, *, smoothing: float) -> Tensor:
    targets = targets if targets.is_floating_point() else targets.long()
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def _check_augment(
    recipe: Recipe, train: Data, images: Tensor, targets: Tensor, ignore_index: int | None
) -> None:
    """Raise if the recipe's augmentation does not fit the data."""
    how = recipe.augment
    if not how:
        return
    if images.ndim != 4:
        raise ValueError(
            f"images must be (N, C, H, W) for recipe.augment. Got {tuple(images.shape)}; pass augment=, a "
            "function, for other inputs."
        )
    size = min(images.shape[-2:])
    if 2 * how.crop >= size or how.cutout >= size:
        raise ValueError(
            f"crop must be below half the size of an image, and cutout below its size, {size}. Got {how}."
        )
    if how.flip == "alternating" and isinstance(train, DataLoader):
        raise TypeError("flip='alternating' needs tensors or a Dataset. Got a DataLoader; use flip=True.")
    if (how.mixup or how.cutmix) and (
        targets.ndim > 1 or targets.is_floating_point() or ignore_index is not None
    ):
        raise ValueError("mixup and cutmix need one class per image, and no ignore_index. Got other targets.")


def _try_augment(augment: Augmentation, images: Tensor, targets: Tensor) -> None:
    """Raise if augmentation changes the number, dtype or device of the examples."""
    with torch.random.fork_rng([images.device] if images.is_cuda else []):
        x, y = augment(images, targets, default_generator(images.device))
    if (len(x), len(y), x.dtype) != (len(images), len(images), images.dtype):
        raise ValueError(
            f"augment must return as many images and targets as it gets, of the same dtype. Got "
            f"{_checks.kind(x)} and {_checks.kind(y)} for {_checks.kind(images)}."
        )


def _class_names(train: Dataset) -> tuple[str, ...] | None:
    names = tuple(map(str, train.classes))
    return None if names == tuple(map(str, range(len(names)))) else names  # numbers are no names


def _by_class(
    train: Data, targets: Tensor, classes: int, task: TaskLoss | None, ignore_index: int | None
) -> bool:
    """Whether specialists can be counted by class: not of pixels, soft labels or a task's own targets."""
    if targets.ndim > 1 or targets.is_floating_point() or ignore_index is not None:
        return False
    known = not isinstance(train, DataLoader) and 0 <= int(targets.min()) <= int(targets.max()) < classes
    return task is None or known


def task_name(task: Callable[..., Any] | None) -> str | None:
    """Enough of a function to notice another one; a partial's tensors, such as class weights, by shape."""
    if isinstance(task, partial):
        given = [*map(_shape, task.args), {name: _shape(value) for name, value in task.keywords.items()}]
        return without_addresses(" ".join([str(task_name(task.func)), *map(repr, given)]))
    return None if task is None else getattr(task, "__qualname__", type(task).__qualname__)


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else value


# The networks.


def probe(name: str, ensemble: Ensemble, inputs: Tensor) -> Tensor:
    """Logits (M, B, C, ...) of a few inputs: the one check that networks accept the data.

    In eval mode; nothing is changed, and no random number is drawn.
    """
    device = next(ensemble.parameters(), inputs).device
    try:
        cuda = [device] if device.type == "cuda" else []
        with torch.no_grad(), in_eval(ensemble), torch.random.fork_rng(cuda):
            logits: Tensor = ensemble(inputs.to(device))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"{name} must hold inputs that the networks accept. Got {inputs.dtype} of shape "
            f"{tuple(inputs.shape[1:])} and this error: {first_line(error)}.{_hint(ensemble, inputs)}"
        ) from error
    _checks.no_numbers(logits)
    return logits


def _hint(ensemble: Ensemble, inputs: Tensor) -> str:
    """How to convert inputs of another precision than the networks', as numpy's float64."""
    own = _dtype(ensemble)
    if not inputs.is_floating_point():
        images = " uint8 images must have the shape (N, C, H, W)." if inputs.dtype == torch.uint8 else ""
        return f"{images} Convert token ids by inputs.long(), other numbers by inputs.float()."
    if own is None or own == inputs.dtype:
        return ""
    return f" The networks compute in {own}: convert by images.to({own})."


def _check_batch_norm(
    ensemble: Ensemble, frozen: list[nn.Module], train: Data, recipe: Recipe, one: Tensor
) -> None:
    """Raise if a part of a batch is one example, and BatchNorm would have to normalise a single value."""
    parts = {size: min(recipe.accumulate, size) for size in _batch_sizes(train, recipe.batch_size)}
    size = next((size for size in parts if size // parts[size] == 1), None)
    if size is None:
        return
    single: list[bool] = []

    def look(module: nn.Module, args: Any) -> None:
        if isinstance(module, BATCH_NORM) and module not in frozen:
            single.append(args[0].numel() == args[0].shape[1])  # (1, C), or (1, C, 1, 1)

    with register_module_forward_pre_hook(look):
        probe("train", ensemble, one)
    if any(single):
        raise ValueError(
            f"BatchNorm must see more than one example at a time. Got a batch of {size}, in {parts[size]} "
            "parts: raise batch_size, lower accumulate, or set drop_last=True in a DataLoader."
        )


def _mesh(ensemble: Ensemble, recipe: Recipe, options: Options, train: Data, sizes: Sizes) -> Shape:
    """The mesh of the processes that train together; raises if the run does not fit it."""
    if (processes := launched()) == 1 and options.mesh is None:
        return Shape()
    batches, members = _batch_sizes(train, recipe.batch_size), list(ensemble.members)
    smallest = min((size // min(recipe.accumulate, size) for size in batches), default=processes)
    if options.mesh is not None:
        shape = parse(options.mesh, processes)
    else:
        shape = choose(processes, len(members), smallest, sizes)
    if shape == Shape():
        return shape
    if shape.members > len(members):
        raise ValueError(f"mesh must have at most {len(members)} places for members. Got {shape}.")
    if shape.data > smallest:
        raise ValueError(
            f"mesh must have at most {smallest} places along data, the examples in the smallest batch (or "
            f"part of it). Got {shape}. Raise batch_size, lower accumulate, or set drop_last=True in a "
            "DataLoader."
        )
    if options.capture or options.compile:
        raise ValueError(
            f"capture and compile must be left out with several processes. Got {shape}, "
            f"capture={options.capture} and compile={options.compile}."
        )
    count = Counter(p for m in members for p in set(m.parameters()) if p.requires_grad)
    if shape.members > 1 and max(count.values()) > 1:
        raise ValueError(
            f"members must not share trained weights with processes along members. Got {shape}; use "
            f"data={processes}, or freeze=True."
        )
    own = [m for m in _batch_norms(ensemble) if not normalises_as_usual(m)]
    if sync := [m for m in own if isinstance(m, nn.SyncBatchNorm)]:
        raise ValueError(
            "SyncBatchNorm must compute as torch's does with several processes, or it would add up the "
            f"statistics of other members. Got {type(sync[0]).__name__}, which has a forward of its own; use "
            "BatchNorm."
        )
    if shape.data > 1 and own:
        raise ValueError(
            "BatchNorm must compute as torch's does with processes along data, whose statistics are taken "
            f"together. Got {type(own[0]).__name__}, which has a forward of its own; use members={processes}."
        )
    if isinstance(train, DataLoader) and isinstance(train.sampler, DistributedSampler):
        raise TypeError(
            "train must yield whole batches in every process, which takes its part of them. Got a DataLoader "
            "with a DistributedSampler; use shuffle=True."
        )
    return shape


def _stack(
    ensemble: Ensemble, recipe: Recipe, options: Options, device: torch.device, train: Data, inputs: Tensor
) -> bool:
    """Whether members train stacked. Adversarial training and Muon need each member's inputs or matrices."""
    part = max(_batch_sizes(train, recipe.batch_size), default=1) // recipe.accumulate
    auto = options.members == "auto" and device.type == "cpu" and pays(ensemble, part)
    if recipe.adversarial or recipe.optimizer == "muon":
        return False
    return (auto or options.members == "stacked") and stackable(ensemble, inputs)


def _sizes(ensemble: Ensemble, inputs: Tensor, frozen: list[nn.Module], *, bf16: bool) -> Sizes:
    """What the largest member exchanges with other processes."""
    member = max(ensemble.members, key=lambda m: sum(p.numel() for p in m.parameters() if p.requires_grad))
    return Sizes(
        weights=sum(p.numel() for p in member.parameters() if p.requires_grad),
        features=_shared_bytes(ensemble, inputs, bf16=bf16) if ensemble.share_after is not None else 0,
        channels=tuple(m.num_features for m in _batch_norms(member) if m not in frozen),
    )


def _batch_norms(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, BATCH_NORM)]


def _shared_bytes(ensemble: Ensemble, inputs: Tensor, *, bf16: bool) -> int:
    """How many bytes a member shares of one example."""
    parameter, member = next(ensemble.parameters()), ensemble.members[0]
    autocast = torch.autocast(parameter.device.type, torch.bfloat16, enabled=bf16)
    random = torch.random.fork_rng([parameter.device] * parameter.is_cuda)
    with torch.no_grad(), in_eval(ensemble), random, autocast:
        x = inputs.to(parameter.device)
        if ensemble.shared_stem is not None:
            x, _ = ensemble.shared_stem(member, x)
        h, _ = ensemble.stems[0](member, x)
    return h[0].nbytes


def _batch_sizes(train: Data, batch_size: int) -> list[int]:
    """The sizes of batches, as far as they are known."""
    if not isinstance(train, DataLoader):
        return [min(batch_size, len(tensors(train)[0]))]
    if train.batch_size is None:
        return []
    try:
        rest = 0 if train.drop_last else len(train.sampler) % train.batch_size  # type: ignore[arg-type]
    except TypeError:
        rest = 0
    return [train.batch_size, rest] if rest else [train.batch_size]


def check_scored(
    name: str,
    ensemble: Ensemble,
    data: Data,
    ignore_index: int | str | None = AUTO,
    transform: Transform | None = None,
) -> None:
    """Check that data can be scored, before training rather than after it."""
    images, targets = _examples(name, data)
    targets = targets.cpu()
    logits = probe(name, ensemble, inputs_of(transform or ensemble.transform, images[:2])).cpu()
    try:
        ignore = resolved(ignore_index, targets, logits.shape[2])
        counted = not_ignored(targets, ignore).reshape(len(targets), -1).any(1).nonzero().flatten()[:2]
        if len(counted) or not isinstance(data, DataLoader):  # its later batches may count
            two = targets[counted] if len(counted) else targets[:1]
            probs = logits[:, : len(two)].float().softmax(2)  # types and shapes: any examples do
            metrics.top1_error(probs, two, ignore_index=ignore)
            _checks.label_range(targets, logits.shape[2], ignore)
    except (TypeError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(f"{name} must fit the ensemble. Got data that do not: {reason}.") from error
