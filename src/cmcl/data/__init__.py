"""Data: files in, one `Dataset` out; preprocessing, caching and batches. Loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .sets import DATASETS, load, load_recipe

_HOME = {  # public name -> module that defines it
    "Batches": "batches",
    "Dataset": "dataset",
    "as_batches": "batches",
    "check": "check",
    "fetch": "fetch",
    "from_arrays": "arrays",
    "split_validation": "dataset",
}
_MODULES = ("cache", "preprocess")

__all__ = ["DATASETS", "load", "load_recipe", *_HOME, *_MODULES]

if TYPE_CHECKING:
    from . import cache as cache
    from . import preprocess as preprocess
    from .arrays import from_arrays as from_arrays
    from .batches import Batches as Batches
    from .batches import as_batches as as_batches
    from .check import check as check
    from .dataset import Dataset as Dataset
    from .dataset import split_validation as split_validation
    from .fetch import fetch as fetch


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    elif name in _MODULES:
        value = import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module 'cmcl.data' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
