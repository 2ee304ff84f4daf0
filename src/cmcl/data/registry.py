"""The datasets by name: what is known of each, and `load`. A new dataset is one entry here and one module.

Importing this module loads neither torch nor any dataset.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import parse_json

if TYPE_CHECKING:
    from .dataset import Dataset

CACHE = Path("~/.cache/cmcl")
TEN_DIGITS = tuple("0123456789")
FOREGROUND = ("background", "foreground")


@dataclass(frozen=True)
class DatasetInfo:
    """One dataset. The module of that name in this package has the function `load` that reads it."""

    name: str
    title: str
    description: str
    splits: tuple[str, ...] = ("train", "test")
    shape: tuple[int, int, int] | None = None  # (C, H, W) of an image; None: the user's
    classes: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # split -> number of images
    dense: bool = False  # the targets are masks

    # what its authors published, to download it and to check a copy of it
    site: str = ""  # address of the folder that holds the files
    downloads: Mapping[str, str] = field(default_factory=dict)  # path under the root -> md5
    files: Mapping[str, str] = field(default_factory=dict)  # the same of all files that it is read from
    class_counts: tuple[int, ...] = ()  # training images of each class
    mean: tuple[float, ...] = ()  # of each channel of the training split, for values of 0 to 1
    std: tuple[float, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)  # split -> `Dataset.checksum`

    @property
    def hint(self) -> str:
        """The end of an error message about the files of a published dataset: how to get them."""
        if self.downloads:
            return f"Get it with: cmcl data fetch {self.name} (from {self.site})."
        return f"Download it by hand from {self.site}." if self.site else ""


# md5 of the archives: https://www.cs.toronto.edu/~kriz/cifar.html; of the files: torchvision's cifar.py
_CIFAR10_ARCHIVE = {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}
_CIFAR10_FILES = {
    "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
    "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
    "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
    "cifar-10-batches-py/batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
}
# md5: torchvision's svhn.py (the site itself lists none)
_SVHN_FILES = {
    "svhn/train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "svhn/test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}

CIFAR10 = DatasetInfo(
    name="cifar10",
    title="CIFAR-10",
    description="60,000 colour photos of 10 classes, 32x32 (cmcl data fetch cifar10)",
    shape=(3, 32, 32),
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    sizes={"train": 50_000, "test": 10_000},
    site="https://www.cs.toronto.edu/~kriz",
    downloads=_CIFAR10_ARCHIVE,
    files=_CIFAR10_FILES | _CIFAR10_ARCHIVE,
    class_counts=(5_000,) * 10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    # of a copy with the same images, labels and order, but other bytes than the files above
    checksums={
        "train": "1b124094fa71757e2a5794ab052453e80b30eb27728f9bb8898b70e728ae8c32",
        "test": "335e460fac2f8961874196617fb75418986862673dd66fb6d78ab4e0b8660a14",
    },
)
SVHN = DatasetInfo(
    name="svhn",
    title="SVHN",
    description="99,289 colour photos of house-number digits, 32x32 (cmcl data fetch svhn)",
    shape=(3, 32, 32),
    classes=TEN_DIGITS,
    sizes={"train": 73_257, "test": 26_032},
    site="http://ufldl.stanford.edu/housenumbers",
    downloads=_SVHN_FILES,
    files=_SVHN_FILES,
    class_counts=(4_948, 13_861, 10_585, 8_497, 7_458, 6_882, 5_727, 5_595, 5_045, 4_659),
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    # no checksums: the copy at hand was rebuilt, and a few of its values differ by 1
)
ICOSEG = DatasetInfo(
    name="icoseg",
    title="iCoseg",
    description="643 photos in 38 groups with foreground masks",
    shape=(3, 75, 125),
    classes=FOREGROUND,
    sizes={"train": 362, "test": 87},
    dense=True,
    # the site has no files with fixed addresses, so there is nothing to download
    site="http://chenlab.ece.cornell.edu/projects/touch-coseg/",
)
DIGITS = DatasetInfo(
    name="digits",
    title="digits",
    description="1,797 handwritten digits, 8x8: needs no file",
    shape=(1, 8, 8),
    classes=TEN_DIGITS,
    sizes={"train": 1438, "test": 359},
)
SHAPES = DatasetInfo(
    name="shapes",
    title="shapes",
    description="drawn scenes with foreground masks, in groups: needs no file",
    shape=(3, 64, 64),
    classes=FOREGROUND,
    sizes={"train": 320, "test": 80},
    dense=True,
)
FOLDER = DatasetInfo(
    name="folder",
    title="folder",
    description="your own images: a folder per class, or images/ and masks/",
    splits=("train", "validation", "test"),
)

DATASETS = {info.name: info for info in (CIFAR10, SVHN, ICOSEG, DIGITS, SHAPES, FOLDER)}
CHECKSUMS = {name: info.checksums for name, info in DATASETS.items() if info.checksums}  # as far as known


def load(name: str, *, split: str = "train", root: str | Path | None = None, **options: Any) -> "Dataset":
    """Load one split of a dataset.

    Args:
        name: a key of `DATASETS`, or "folder:PATH", where options may follow: "folder:photos?size=32&mode=L".
        split: "train" or "test"; also "validation" for a folder that has one.
        root: folder that holds the datasets; default: `CMCL_DATA`, then `~/.cache/cmcl`.
        options: arguments of the dataset's own `load`, such as `size` for "folder"; JSON values, because a
            saved transform records them.
    """
    kind, path, own = parse_address(name)
    info, root, options = dataset_info(kind), path or root, own | options
    if split not in info.splits:
        raise ValueError(f"split of {name} must be one of {', '.join(info.splits)}. Got {split!r}.")
    read = import_module(f".{kind}", __package__).load
    known = signature(read).parameters.keys() - {"split", "root"}
    for option in sorted(options.keys() - known):
        raise TypeError(f"{option} must be an option of {name}. {nearest(option, sorted(known))}")
    options = _as_json(options)
    dataset: Dataset = read(split=split, root=root, **options)
    return replace(dataset, recipe={"name": name, "split": split, "options": options})


def parse_address(name: str) -> tuple[str, str | None, dict[str, Any]]:
    """Dataset, folder and options of "folder:photos?size=32"; of a plain name, the name alone."""
    kind, colon, rest = name.partition(":")
    if not colon:
        return name, None, {}
    path, _, query = rest.partition("?")
    if kind != FOLDER.name or not path:
        raise ValueError(f"name must be a dataset, or folder:PATH for your own images. Got {name!r}.")
    options = {}
    for pair in filter(None, query.split("&")):
        option, _, value = pair.partition("=")
        try:
            options[option] = parse_json(value, option)
        except ValueError:
            options[option] = value
    return kind, path, options


def address(path: str, options: Mapping[str, Any]) -> str:
    """The name by which `load` finds a folder of a user's own images; `parse_address` is the inverse."""
    if "?" in path:
        raise ValueError(f"folder must have a path without a question mark. Got {path!r}. Rename it.")
    texts = {k: v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for k, v in options.items()}
    return f"{FOLDER.name}:{path}" + ("?" if texts else "") + "&".join(f"{k}={v}" for k, v in texts.items())


def dataset_info(name: str) -> DatasetInfo:
    """The entry of a dataset; an unknown name raises `ValueError` with the nearest one."""
    if name not in DATASETS:
        raise ValueError(f"name must be a known dataset. Got {name!r}. {nearest(name, list(DATASETS))}")
    return DATASETS[name]


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    """The options as a file gives them back: tuples become lists."""
    try:
        return dict(json.loads(json.dumps(options, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"options must be numbers, strings and lists of them. Got something else ({error})."
        raise TypeError(f"{message} Convert it first.") from None


def data_root(root: str | Path | None = None) -> Path:
    """The folder that holds the datasets: the argument, else `CMCL_DATA`, else `~/.cache/cmcl`."""
    return Path(root or os.environ.get("CMCL_DATA") or CACHE).expanduser()


def cache_root(folder: str | Path | None = None) -> Path:
    """The folder for what can be computed again: the argument, else `CMCL_CACHE`, else `~/.cache/cmcl`."""
    return Path(folder or os.environ.get("CMCL_CACHE") or CACHE).expanduser()


def nearest(name: str, valid: list[str]) -> str:
    """A hint for a misspelt name: the closest valid one, or all of them."""
    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Valid names: {', '.join(valid) or 'none'}."
