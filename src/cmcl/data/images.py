"""Image and mask files to arrays. One error names all files of a folder that cannot be read.

H x W pixels, C channels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.utils.data import DataLoader

from .._files import open_binary
from .dataset import IGNORE, Dataset
from .registry import FOREGROUND

Pixels = NDArray[np.uint8]
Size = tuple[int, int]  # (H, W)
Read = tuple[Path, Pixels | str]  # a file, and its image or what is wrong with it
AT_ONCE = 4  # files that a process of `read_many` reads before it hands them over
Item = TypeVar("Item")
Result = TypeVar("Result")

# Pillow runs another program for EPS, and reads only the header of the others
_NOT_READ = {"EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"}
GREY = {"1", "L", "LA", "La", "I", "F", "I;16", "I;16B", "I;16L"}  # modes of Pillow without colours
_ORIENTATION = 0x0112  # EXIF tag of how a photo is turned; from 5 on, width and height are swapped


class Pair(NamedTuple):
    """An image file with its mask, of a group of related images."""

    image: Path
    mask: Path
    group: str


def image_files(folder: Path) -> list[Path]:
    """The images directly in a folder, sorted by name, without hidden files and other types of files."""
    known, formats = Image.registered_extensions(), {*_formats(), "MPO"}  # MPO: a kind of JPEG
    # not is_file(): a broken link is kept, so that reading it raises
    files = (path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
    return sorted(path for path in files if known.get(path.suffix.lower()) in formats)


def _formats() -> list[str]:
    Image.init()
    return [name for name in Image.OPEN if name not in _NOT_READ]


def paired_files(images: Path, masks: Path, group: str) -> list[Pair]:
    """The images of a folder with the masks of the same names in another."""
    found = _by_stem(masks) if masks.is_dir() else {}
    # a missing mask becomes a .png that does not exist, so that reading it raises
    return [
        Pair(image, found.get(stem, masks / f"{stem}.png"), group) for stem, image in _by_stem(images).items()
    ]


def _by_stem(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in image_files(folder):
        if path.stem in found:
            names = f"{found[path.stem].name} and {path.name}"
            raise ValueError(f"{folder} must hold one file of each name. Got {names}. Rename or remove one.")
        found[path.stem] = path
    return found


def parse_size(size: Any) -> Size:
    """(height, width) of a pair, or of one number for squares."""
    pair = (size, size) if type(size) is int else size
    whole = isinstance(pair, Sequence) and all(type(side) is int and side > 0 for side in pair)
    if not whole or len(pair) != 2:
        message = f"size must be (height, width), or one number for squares, above 0. Got {size!r}."
        raise ValueError(f"{message} Write size=[75,125] or size=64.")
    return pair[0], pair[1]


def read_segmentation(
    pairs: Sequence[Pair],
    size: Size | None,
    classes: Sequence[str] | None = None,
    *,
    mode: str = "RGB",
    split: str,
    source: str,
) -> Dataset:
    """A dataset for segmentation, of foreground unless `classes` are named."""

    def read(pair: Pair) -> tuple[Pixels, Pixels]:
        image_size(pair)  # before resizing hides a mask that does not fit
        mask = read_mask(pair.mask, size, classes=len(classes) if classes else None)
        return read_image(pair.image, size, mode), mask

    images, masks = (stack(arrays) for arrays in zip(*collect(read, pairs), strict=True))
    if classes and len(classes) == 2 and not (masks == 1).any():
        masks[masks == IGNORE] = 1  # black and white masks: white is the second class
    return Dataset(
        images, masks, tuple(classes or FOREGROUND), split, source, tuple(pair.group for pair in pairs)
    )


def stack(arrays: Sequence[Pixels]) -> torch.Tensor:
    """(N,...) of arrays that must have one height and width."""
    sizes = sorted({array.shape[-2:] for array in arrays})
    if len(sizes) > 1:
        got = f"Got {sizes[0]} and {sizes[1]} (height, width), among others"
        raise ValueError(f"images must have one size. {got}. Pass size=(height, width).")
    return torch.from_numpy(np.stack(arrays))


def collect(read: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Read every item; one error names all that fail."""

    def attempt(item: Item) -> Result | Exception:
        try:
            return read(item)
        except (ValueError, OSError) as error:
            return error

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(attempt, items))
    problems = [str(outcome) for outcome in found if isinstance(outcome, Exception)]
    if problems:
        message = f"all images and masks must be readable. Got {len(problems)} that are not"
        raise ValueError(f"{message}: {'; '.join(problems)}")
    return found  # type: ignore[return-value]  # no exceptions are left in it


@dataclass(frozen=True)
class ImageReader:
    """Reads one file at a time, for `read_many`: [path] is the image (C, H, W), or what is wrong with it."""

    mode: str  # of Pillow
    size: Size | None = None  # to resize to
    needed: Size | None = None  # that an image must have

    def __getitem__(self, path: Path) -> Read:
        try:
            stored = stored_size(path)
            if self.needed and sorted(stored) != sorted(self.needed):  # sorted: a photo may lie on its side
                raise wrong_size(path, stored, self.needed)  # before its pixels, which may fill the memory
            image = read_image(path, self.size, self.mode)
            if self.needed and image.shape[1:] != self.needed:
                raise wrong_size(path, image.shape[1:], self.needed)
        except (ValueError, OSError) as error:
            return path, str(error)
        return path, image


def read_many(reader: ImageReader, paths: Iterable[Path], workers: int) -> Iterator[Read]:
    """The files one by one, in order, read ahead by that many processes; memory holds a few of them."""
    todo = iter(paths)
    parts: Any = iter(lambda: list(islice(todo, AT_ONCE)), [])
    loader = DataLoader(reader, batch_sampler=parts, num_workers=workers, collate_fn=list)  # type: ignore[arg-type, var-annotated]
    for part in loader:
        yield from part


def wrong_size(path: Path, got: tuple[int, ...], needed: tuple[int, ...]) -> ValueError:
    """The error of an image of another size."""
    came, must = (" x ".join(map(str, size)) for size in (got, needed))
    return ValueError(f"{path} must be {must} pixels (height x width). Got {came}. Pass --resize.")


def are_grey(files: Sequence[Path]) -> bool:
    """Whether no image has colours, by its mode. Reads no pixels."""

    def mode(path: Path) -> str:
        with _opened(path) as image:
            return image.mode

    return all(found in GREY for found in collect(mode, files))


def displayed_size(path: Path) -> Size:
    """(H, W) of an image as displayed. Reads no pixels."""
    with _opened(path) as image:
        return image.size[::-1] if image.getexif().get(_ORIENTATION, 1) < 5 else image.size


def image_size(pair: Pair) -> Size:
    """Size of the image as displayed; its mask must have the same. Reads no pixels."""
    size = displayed_size(pair.image)
    if (mask := stored_size(pair.mask)) != size:
        got = f"Got {mask} and {size}"
        raise ValueError(f"{pair.mask} must have the size of its image. {got}. Correct the mask.")
    return size


def stored_size(path: Path) -> Size:
    """(H, W) as stored in the file, before any rotation. Reads no pixels."""
    with _opened(path) as image:
        return image.size[1], image.size[0]


def read_image(path: Path, size: Size | None = None, mode: str = "RGB") -> Pixels:
    """(C,H,W) in Pillow's `mode`, on white where transparent; resized bicubically to (H, W) if given."""
    with _opened(path) as opened:
        # cameras store some photos rotated, with a tag
        image = _on_white(_eight_bits(ImageOps.exif_transpose(opened))).convert(mode)
        if size is not None:
            image = image.resize(size[::-1], Image.Resampling.BICUBIC)
        pixels: Pixels = np.array(image, dtype=np.uint8)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def read_mask(path: Path, size: Size | None = None, *, classes: int | None = None) -> Pixels:
    """(H,W) of class indices, resized by nearest pixel.

    Without `classes` the mask must hold 0 and one of 1 or 255, or black and one other colour: background and
    foreground. With it, the values are class indices, and 255 marks pixels to ignore.
    """
    with _opened(path) as opened:
        mask = opened.copy()
    if classes is None:
        values = _foreground_by_colour(mask, path)
        values = _numbers(mask) if values is None else values
        allowed, expected = {0, 1, 255}, "0 and 1, or 0 and 255"
    else:
        values, last = _numbers(mask), min(classes, IGNORE) - 1
        allowed, expected = {*range(last + 1), IGNORE}, f"class indices 0 to {last}"
    # of the whole mask, because resizing can lose the few pixels that are wrong
    if wrong := sorted(set(np.unique(values).tolist()) - allowed):
        hint = "Name all classes with classes=[...] if these are class indices"
        raise ValueError(f"{path} must hold {expected}. Got {wrong[0]}. {hint}.")
    pixels = (values != 0 if classes is None else values).astype(np.uint8)
    if size is not None:
        pixels = np.array(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.NEAREST))
    return pixels


def _numbers(mask: Image.Image) -> NDArray[Any]:
    """(H,W) of what a mask stores: grey values, or indices of a palette."""
    if mask.mode[0] in "IF":  # Pillow would clip large numbers
        values: NDArray[Any] = np.array(mask)
        return np.where(values == 65535, 255, values)  # white, in 16 bits
    return np.array(mask if mask.mode in {"L", "P"} else mask.convert("L"))


def _foreground_by_colour(mask: Image.Image, path: Path) -> NDArray[np.bool_] | None:
    """(H,W), true where a mask of black and one other colour is not black; None for a mask of numbers.

    The indices of a palette have no meaning here: programs number two colours in any order.
    """
    if Image.getmodebase(mask.mode) == "L":
        return None
    colours = mask.convert("RGBA")
    found = colours.getcolors(2) or []  # none if there are more
    others = [colour for _, colour in found if isinstance(colour, tuple) and any(colour[:3])]
    if len(others) > 1:
        message = f"{path} must hold black and one other colour. Got {others[0]} and {others[1]}."
        raise ValueError(f"{message} Draw the background black.")
    is_grey = all(len(set(colour[:3])) == 1 for colour in others)
    if not found or (is_grey and mask.mode != "P"):  # a grey value is a number, as in a grey image
        return None
    return np.asarray(np.array(colours)[..., :3].any(-1))


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    with open_binary(path, hint="Put it there, or remove what names it.") as file:
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty")
        try:
            with Image.open(file, formats=_formats()) as image:
                yield image
        except UnidentifiedImageError:
            raise ValueError(f"{path} is not an image that Pillow reads") from None
        except Image.DecompressionBombError as error:
            sizes = str(error).partition(",")[0]  # the rest is about attacks
            raise ValueError(f"{path} is too large ({sizes}). Resize it") from None
        except Exception as error:  # a damaged image can raise nearly anything
            raise ValueError(f"{path} is damaged ({error})") from None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scales grey images of more bits to 0..255, where Pillow would clip them; palettes become colours."""
    if image.mode == "P":
        return image.convert("RGBA")
    if image.mode[0] not in "IF":
        return image
    values: NDArray[Any] = np.asarray(image, dtype=np.float64)
    top = 65535 if image.mode.startswith("I;16") else values.max()  # a dark image of 16 bits stays dark
    scale = 255.0 if top <= 1 and image.mode == "F" else 1.0 if top <= 255 else 255 / 65535
    return Image.fromarray(np.clip(np.rint(values * scale), 0, 255).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    """As shown on a white page: without its transparency an image would show hidden colours."""
    if image.mode not in {"LA", "PA", "RGBA", "RGBa"} and "transparency" not in image.info:
        return image
    seen = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
