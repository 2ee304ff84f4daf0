"""Data: files in, one `Dataset` out; preprocessing, caching and batches. Loaded when first used."""

from typing import TYPE_CHECKING

from ..lazy import attach
from .sets import DATASETS, load, load_recipe

_HOME = {  # public name -> module that defines it; "": it is a module
    "Batches": "batches",
    "Dataset": "dataset",
    "as_batches": "batches",
    "check": "checking",
    "fetch": "fetching",
    "from_arrays": "arrays",
    "split_validation": "dataset",
    "cache": "",
    "preprocess": "",
}

__getattr__, __dir__ = attach(__name__, _HOME)
__all__ = ["DATASETS", "load", "load_recipe", *_HOME]

if TYPE_CHECKING:
    from . import cache as cache
    from . import preprocess as preprocess
    from .arrays import from_arrays as from_arrays
    from .batches import Batches as Batches
    from .batches import as_batches as as_batches
    from .checking import check as check
    from .dataset import Dataset as Dataset
    from .dataset import split_validation as split_validation
    from .fetching import fetch as fetch
