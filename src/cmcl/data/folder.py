"""A user's own images.

DIR/<class>/*.jpg                         classification
DIR/images/*.jpg, DIR/masks/*.png         segmentation; folders inside images/ and masks/ are groups
DIR/train/..., DIR/test/...               either of these, already split

With the option `test`, a folder without train/ and test/ is split by a seeded stratified draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import _checks
from .dataset import Dataset, split_validation
from .images import (
    Pair,
    are_grey,
    collect,
    displayed_size,
    image_files,
    paired_files,
    parse_size,
    read_image,
    read_segmentation,
    stack,
)
from .registry import FOREGROUND

Shape = tuple[int, int, int]  # (C, H, W)
TEST = 0.2  # fraction of a folder that is not split
LAYOUT = (
    "Lay it out as <class>/*.jpg, or as images/*.jpg with masks/*.png, each also inside train/ and test/."
)


def load(
    split: str = "train",
    root: str | Path | None = None,
    *,
    size: int | Sequence[int] | None = None,
    mode: str = "RGB",
    classes: Sequence[str] | None = None,
    test: float | None = None,
) -> Dataset:
    """Load all images of a folder; one error names all files that cannot be read.

    Args:
        split: the folder of that name inside `root`; for "train" also `root` itself, if it is not split.
        root: the folder.
        size: (height, width), or one number for squares; without it all images must have one size already.
        mode: "RGB", or "L" for grey.
        classes: for masks that hold class indices: the names of 0, 1, ...
        test: fraction of every class that is the test split, if the folder is not split; the same each time.
    """
    _checks.choice("mode", mode, ("RGB", "L"))
    if root is None:
        raise ValueError(f"root must name the folder of your images. Got none. {LAYOUT}")
    whole, shape = Path(root).expanduser(), None if size is None else parse_size(size)
    if test is not None and split in ("train", "test") and whole.is_dir() and not _is_split(whole):
        everything = load("train", whole, size=size, mode=mode, classes=classes)
        train, held = split_validation(everything, test)
        return train if split == "train" else replace(held, split="test")
    folder = _split_folder(whole, split)
    if (folder / "images").is_dir():
        return read_segmentation(_masked(folder), shape, classes, mode=mode, split=split, source=str(folder))
    found = _images_by_class(whole, split)
    files = [file for files in found.values() for file in files]
    images = stack(collect(lambda file: read_image(file, shape, mode), files))
    targets = [i for i, files in enumerate(found.values()) for _ in files]
    return Dataset(images, torch.tensor(targets), tuple(found), split, str(folder))


def _images_by_class(whole: Path, split: str) -> dict[str, list[Path]]:
    """The images of each class in a split; only the training split must have some of every class."""
    folder = _split_folder(whole, split)
    message = f"{folder} must hold images in the folders of the training classes."
    # the training folder names the classes, so that they have the same numbers in every split
    present, names = _class_folders(folder), _class_folders(_split_folder(whole, "train"))
    if unknown := sorted(set(present) - set(names)):
        raise ValueError(f"{message} Got classes that train/ lacks: {', '.join(unknown)}. {LAYOUT}")
    found = {name: image_files(folder / name) if name in present else [] for name in names}
    empty = [name for name, files in found.items() if not files]
    if len(empty) == len(names) or (empty and split == "train"):
        raise ValueError(f"{message} Got no images in {', '.join(empty) or 'any folder'}. {LAYOUT}")
    return found


def look(root: str | Path, given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], Shape]:
    """Options with which `load` reads a folder as it is, its classes, and the shape of an image.

    Grey if all images are, and split if it is not, unless the options given say otherwise. Reads no pixels.
    """
    whole = Path(root).expanduser()
    folder, options = _split_folder(whole, "train"), dict(given)
    if (folder / "images").is_dir():
        files, names = [pair.image for pair in _masked(folder)], tuple(options.get("classes") or FOREGROUND)
    else:
        found = _images_by_class(whole, "train")
        files, names = [file for several in found.values() for file in several], tuple(found)
    if "mode" not in options and are_grey(files):
        options["mode"] = "L"
    if not _is_split(whole):
        options.setdefault("test", TEST)
    size = parse_size(options["size"]) if "size" in options else displayed_size(files[0])
    return options, names, (1 if options.get("mode") == "L" else 3, *size)


def _is_split(whole: Path) -> bool:
    return (whole / "train").is_dir() or (whole / "test").is_dir()


def _split_folder(whole: Path, split: str) -> Path:
    if (whole / split).is_dir():
        return whole / split
    if split == "train" and whole.is_dir() and not (whole / "test").is_dir():
        return whole
    raise FileNotFoundError(f"{whole} must hold a folder {split}/. Got none. {LAYOUT}")


def _class_folders(folder: Path) -> list[str]:
    entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if dangling := sorted(str(path) for path in entries if not path.exists()):
        raise ValueError(f"links must lead somewhere. Got {', '.join(dangling)}. Fix or remove them.")
    return sorted(path.name for path in entries if path.is_dir())


def _masked(folder: Path) -> list[Pair]:
    images, masks = folder / "images", folder / "masks"
    if not masks.is_dir():
        message = f"{folder} must hold masks/ beside images/. Got images/ alone."
        raise ValueError(f"{message} Put the masks there; if images is a class, give it another name.")
    found = paired_files(images, masks, "all")
    for group in _class_folders(images):
        found += paired_files(images / group, masks / group, group)
    if not found:
        raise ValueError(f"{images} must hold images. Got none. {LAYOUT}")
    return found
