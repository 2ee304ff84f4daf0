"""iCoseg (Batra et al. 2010): `iCoseg/images/<group>/*` with masks `iCoseg/ground_truth/<group>/*`."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from .._files import digest
from .dataset import Dataset, hold_out
from .files import data_root
from .pictures import Picture, Size, collect, image_size, masked_pictures, parse_size, read_segmentation
from .published import ICOSEG_SITE

SPLITS = ("train", "test")
CURE = f"The set's site is {ICOSEG_SITE}."
# The paper takes images "larger than 300x500", but no side is longer than 500: here that means at least.
SMALLEST = (300, 500)


def load(
    split: str = "train",
    root: str | Path | None = None,
    *,
    orientation: str = "landscape",
    size: int | Sequence[int] = (75, 125),
    seed: int = 0,
) -> Dataset:
    """Load one side of the 80/20 split of every group.

    Args:
        split: "train" or "test".
        root: folder that holds `iCoseg/`.
        orientation: "landscape" takes images at least 300 high and 500 wide; "both" also those lying the
            other way, which are then squeezed into the same shape.
        size: (height, width), or one number for squares: images bicubic, masks by nearest pixel.
        seed: decides the split. Byte-identical images always fall on the same side.
    """
    if orientation not in {"landscape", "both"}:
        raise ValueError(f"orientation must be 'landscape' or 'both'. Got {orientation!r}.")
    folder, shape = data_root(root) / "iCoseg", parse_size(size)
    pictures = _large_enough(_find(folder), orientation)
    if not pictures:
        raise ValueError(
            f"{folder} must hold images of at least {SMALLEST} (height, width). Got none. {CURE}"
        )
    digests = [digest(picture.image) for picture in pictures]
    train, test = hold_out([picture.label for picture in pictures], digests, fraction=0.2, seed=seed)
    chosen = [pictures[i] for i in (train if split == "train" else test)]
    return read_segmentation(chosen, shape, split=split, source=str(folder))


def _find(folder: Path) -> list[Picture]:
    if not (folder / "images").is_dir() or not (folder / "ground_truth").is_dir():
        message = (
            f"{folder} must hold images/ and ground_truth/ with one folder per group. Got no such folders."
        )
        raise FileNotFoundError(f"{message} {CURE}")
    groups = sorted(path for path in (folder / "images").iterdir() if path.is_dir())
    found = (masked_pictures(group, folder / "ground_truth" / group.name, group.name) for group in groups)
    return list(chain.from_iterable(found))


def _large_enough(pictures: list[Picture], orientation: str) -> list[Picture]:
    def passes(size: Size) -> bool:
        turned = sorted(size) if orientation == "both" else size
        return turned[0] >= SMALLEST[0] and turned[1] >= SMALLEST[1]

    sizes = collect(image_size, pictures)
    return [picture for picture, size in zip(pictures, sizes, strict=True) if passes(size)]
