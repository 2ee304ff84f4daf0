"""iCoseg (Batra et al. 2010): `iCoseg/images/<group>/*` with masks `iCoseg/ground_truth/<group>/*`."""

from collections.abc import Sequence
from pathlib import Path

from .. import _checks
from .._files import digest
from .dataset import Dataset, hold_out
from .images import Pair, collect, image_size, paired_files, parse_size, read_segmentation
from .registry import ICOSEG, data_root

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
        orientation: "landscape" takes images at least 300 high and 500 wide; "both" also portrait images
            of that size, which are resized to the same shape.
        size: (height, width), or one number for squares: images bicubic, masks by nearest pixel.
        seed: of the split. Byte-identical images are always on the same side.
    """
    _checks.choice("orientation", orientation, ("landscape", "both"))
    folder, shape = data_root(root) / "iCoseg", parse_size(size)
    found = _find(folder)
    sizes = [sorted(size) if orientation == "both" else size for size in collect(image_size, found)]
    large = [pair for pair, (h, w) in zip(found, sizes, strict=True) if h >= SMALLEST[0] and w >= SMALLEST[1]]
    if not large:
        raise ValueError(
            f"{folder} must hold images of at least {SMALLEST} (height, width). Got none. {ICOSEG.hint}"
        )
    digests = [digest(pair.image) for pair in large]
    train, test = hold_out([pair.group for pair in large], digests, fraction=0.2, seed=seed)
    chosen = [large[i] for i in (train if split == "train" else test)]
    return read_segmentation(chosen, shape, split=split, source=str(folder))


def _find(folder: Path) -> list[Pair]:
    if not (folder / "images").is_dir() or not (folder / "ground_truth").is_dir():
        message = f"{folder} must hold images/ and ground_truth/ with one folder per group. Got neither."
        raise FileNotFoundError(f"{message} {ICOSEG.hint}")
    groups = sorted(path for path in (folder / "images").iterdir() if path.is_dir())
    masks = folder / "ground_truth"
    return [pair for group in groups for pair in paired_files(group, masks / group.name, group.name)]
