"""A user's own images.

DIR/<class>/*.jpg                         classification
DIR/images/*.jpg, DIR/masks/*.png         segmentation; folders inside images/ and masks/ are groups
DIR/train/..., DIR/test/...               either of these, already split
"""

from collections.abc import Sequence
from pathlib import Path

from .dataset import Dataset
from .files import data_root
from .pictures import Picture, Size, image_files, masked_pictures, read_classes, read_segmentation

SPLITS = ("train", "validation", "test")
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
) -> Dataset:
    """Load all images of a folder; broken files are reported together, by name.

    Args:
        split: the folder of that name inside `root`; for "train" also `root` itself, if it is not split.
        root: the folder.
        size: (height, width), or one number for squares; without it all images must have one size already.
        mode: "RGB", or "L" for grey.
        classes: for masks that hold class numbers: the names of 0, 1, ...
    """
    if mode not in {"RGB", "L"}:
        raise ValueError(f"mode must be 'RGB' or 'L'. Got {mode!r}.")
    whole, shape = data_root(root), _height_and_width(size)
    folder = _split_folder(whole, split)
    if (folder / "images").is_dir() and (folder / "masks").is_dir():
        return read_segmentation(_masked(folder), shape, classes, mode=mode, split=split, source=str(folder))
    # the training folder names the classes, so that they have the same numbers in every split
    names = _class_folders(_split_folder(whole, "train"))
    pictures = [Picture(image, name) for name in names for image in _images_of(folder / name)]
    unknown = sorted(set(_class_folders(folder)) - set(names))
    if unknown or not pictures:
        got = f"classes that train/ lacks: {', '.join(unknown)}" if unknown else "no images"
        message = f"{folder} must hold images in the folders of the training classes. Got {got}."
        raise ValueError(f"{message} {LAYOUT}")
    return read_classes(pictures, shape, names, mode=mode, split=split, source=str(folder))


def _images_of(folder: Path) -> list[Path]:
    """The images of a class; a split need not have all classes."""
    return image_files(folder) if folder.is_dir() else []


def _split_folder(whole: Path, split: str) -> Path:
    if (whole / split).is_dir():
        return whole / split
    if split == "train" and whole.is_dir() and not (whole / "test").is_dir():
        return whole
    raise FileNotFoundError(f"{whole} must hold a folder {split}/. Got none. {LAYOUT}")


def _class_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _masked(folder: Path) -> list[Picture]:
    images, masks = folder / "images", folder / "masks"
    pictures = masked_pictures(images, masks, "all")
    for group in _class_folders(images):
        pictures += masked_pictures(images / group, masks / group, group)
    if not pictures:
        raise ValueError(f"{images} must hold images. Got none. {LAYOUT}")
    return pictures


def _height_and_width(size: int | Sequence[int] | None) -> Size | None:
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ValueError(f"size must be positive. Got {(height, width)}.")
    return height, width
