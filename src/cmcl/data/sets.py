"""The sets by name. Each name is a module of this folder with `SPLITS` and `load(split, root, ...)`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .files import nearest

if TYPE_CHECKING:
    from .dataset import Dataset

DATASETS = {  # name -> what it is; plain text, so that listing the sets loads none of them
    "cifar10": "60,000 colour photos of 10 kinds of things, 32x32 (cmcl data fetch cifar10)",
    "svhn": "99,289 colour photos of house-number digits, 32x32 (cmcl data fetch svhn)",
    "icoseg": "643 photos in 38 groups with foreground masks",
    "digits": "1,797 handwritten digits, 8x8: needs no file",
    "shapes": "drawn scenes with foreground masks, in groups: needs no file",
    "folder": "your own images: a folder per class, or images/ and masks/",
    "arrays": "your own arrays or tensors",
}


def load(name: str, *, split: str = "train", root: str | Path | None = None, **options: Any) -> "Dataset":
    """Load one split of a set.

    Args:
        name: a key of `DATASETS`.
        split: "train" or "test"; "validation" too, of a folder that has one.
        root: folder that holds the sets; without it `CMCL_DATA`, then `~/.cache/cmcl`.
        options: what this set's own `load` takes, such as `size` for "folder"; JSON values, so that a saved
            transform can name them (arrays are for "arrays" alone).
    """
    module = _module(name)
    if split not in module.SPLITS:
        raise ValueError(f"split of {name} must be one of {', '.join(module.SPLITS)}. Got {split!r}.")
    known = signature(module.load).parameters.keys() - {"split", "root"}
    for option in sorted(options.keys() - known):
        raise TypeError(f"{option} must be an option of {name}. {nearest(option, sorted(known))}")
    in_memory = name == "arrays"  # and so cannot be loaded again by name
    if not in_memory:
        options = _as_json(options)
    dataset: Dataset = module.load(split=split, root=root, **options)
    if in_memory:
        return dataset
    return replace(dataset, recipe={"name": name, "split": split, "options": options})


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    """The options as they will be when read back from a file."""
    try:
        safe: dict[str, Any] = json.loads(json.dumps(options, allow_nan=False))
    except (TypeError, ValueError) as error:
        message = f"options must be numbers, texts and lists of them. Got something else ({error})."
        raise TypeError(f"{message} Convert it first.") from None
    return safe


def splits_of(name: str) -> tuple[str, ...]:
    """The splits that a set may have."""
    splits: tuple[str, ...] = _module(name).SPLITS
    return splits


def _module(name: str) -> ModuleType:
    if name not in DATASETS:
        raise ValueError(f"name must be a known data set. Got {name!r}. {nearest(name, list(DATASETS))}")
    return import_module(f".{name}", __package__)


def load_recipe(recipe: Mapping[str, Any], root: str | Path | None = None) -> "Dataset":
    """Load again what a `Dataset.recipe` describes, from the files under `root`."""
    from .dataset import split_validation

    dataset = load(recipe["name"], split=recipe["split"], root=root, **recipe["options"])
    if "hold_out" not in recipe:
        return dataset
    part = recipe["hold_out"]
    train, validation = split_validation(dataset, part["fraction"], part["seed"])
    return validation if part["part"] == "validation" else train
