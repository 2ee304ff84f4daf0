"""Data: files in, one `Dataset` out; transforms of its images. Modules are imported when first used."""

from typing import TYPE_CHECKING

from ..lazy import attach
from .registry import DATASETS, DatasetInfo, load

_HOME = {  # public name -> module that defines it; "": it is a module
    "Dataset": "dataset",
    "check": "inspect",
    "fetch": "download",
    "from_arrays": "arrays",
    "load_recipe": "dataset",
    "split_validation": "dataset",
    "transforms": "",
}

__getattr__, __dir__ = attach(__name__, _HOME)
__all__ = ["DATASETS", "DatasetInfo", "load", *_HOME]

if TYPE_CHECKING:
    from . import transforms as transforms
    from .arrays import from_arrays as from_arrays
    from .dataset import Dataset as Dataset
    from .dataset import load_recipe as load_recipe
    from .dataset import split_validation as split_validation
    from .download import fetch as fetch
    from .inspect import check as check
