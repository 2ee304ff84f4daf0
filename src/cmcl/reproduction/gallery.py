"""The gallery of a run: what it predicts for every test image, and the images that are worth a look.

gallery.json, predictions.npz (of a classification) and small PNG files: images with a wrong prediction, and
those on which the members differ most. M members, N examples, C classes.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from .. import metrics
from .._files import read_json, replacing
from .._schema import Schema
from ..data.dataset import Dataset, default_ignore_index, not_ignored

PNG = b"\x89PNG\r\n\x1a\n"
LARGEST = 4 * 2**20  # bytes of an image
CARDS, WRONG = 12, 48  # images of a classification: the most disputed, and with a wrong prediction
SCENES, COMMON = 6, 4  # images of a segmentation: the most disputed, and the same ones for every run
Index = Annotated[int, Field(ge=0)]


class Predictions(NamedTuple):
    """What a classifier predicts for N test images; row 0 is the averaged prediction, row m + 1 member m."""

    targets: NDArray[Any]  # (N,)
    classes: NDArray[Any]  # (1 + M, N)
    confidence: NDArray[Any]  # (1 + M, N), of the predicted class
    entropy: NDArray[Any]  # (1 + M, N), in nats

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """Where the averaged prediction is wrong, (N,)."""
        return np.asarray(self.classes[0] != self.targets)

    @classmethod
    def load(cls, path: Path, classes: int) -> "Predictions":
        """Read and check what `GalleryBuilder` wrote; raises `ValueError`."""
        if not path.is_file():  # a pipe would never end
            raise ValueError(f"{path}: predictions must be a file. Got something else, or nothing.")
        try:
            with np.load(path, allow_pickle=False) as file:
                found = cls(*(file[name] for name in cls._fields))
        except Exception as error:  # zipfile, zlib and numpy raise errors of many kinds for damaged files
            raise ValueError(
                f"{path}: predictions must be arrays {', '.join(cls._fields)}. {error}"
            ) from None
        rows, kinds = found.classes.shape[:1], "".join(array.dtype.kind for array in found)
        wanted = [found.targets.shape] + [rows + found.targets.shape] * 3
        if found.targets.ndim != 1 or [a.shape for a in found] != wanted or rows < (2,) or kinds != "uuff":
            raise ValueError(f"{path}: predictions must have rows for the average and each member.")
        if max(array.max(initial=0) for array in found[:2]) >= classes:
            raise ValueError(f"{path}: predictions must name classes that exist.")
        return found


class Mask(Schema):
    """A predicted mask, its error in percent and its mean entropy."""

    mask: str
    error: Annotated[float, Field(ge=0, le=100)]
    entropy: float


class Card(Schema):
    """An image with a class; its predictions are in predictions.npz."""

    index: Index
    image: str
    target: Index
    group: str | None = None


class Scene(Schema):
    """An image with a mask, and all predictions of it."""

    index: Index
    image: str
    truth: str
    members: Annotated[list[Mask], Field(min_length=1)]
    chosen: Index
    group: str | None = None


class Gallery(Schema):
    """The content of gallery.json."""

    format: Literal[2] = 2
    task: Literal["classification", "segmentation"]
    classes: list[str]
    items: list[Card] | list[Scene]
    _folder: Path = PrivateAttr(default=Path())
    _predictions: Predictions | None = PrivateAttr(default=None)

    @classmethod
    def load(cls, path: Path) -> "Gallery":
        """Read gallery.json and check that every image is a PNG beside it; raises `ValueError`."""
        gallery: Gallery = cls.parse(read_json(path), source=path)
        gallery._folder = path.parent
        for item in gallery.items:
            masks = [item.truth, *(member.mask for member in item.members)] if isinstance(item, Scene) else []
            for name in (item.image, *masks):
                gallery.embed(name)
        if not gallery.dense:
            found = Predictions.load(path.parent / "predictions.npz", len(gallery.classes))
            if any(item.index >= len(found.targets) for item in gallery.items):
                raise ValueError(f"{path}: items must be images that have predictions.")
            gallery._predictions = found
        return gallery

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for item in self.items:
            if isinstance(item, Scene) != self.dense:
                raise ValueError(f"item {item.index} must be of the task {self.task}.")
            if isinstance(item, Scene) and item.chosen >= len(item.members):
                raise ValueError(f"item {item.index} must name a member that exists.")
        return self

    @property
    def predictions(self) -> Predictions:
        """What a classifier predicts for all test images."""
        assert self._predictions is not None
        return self._predictions

    @property
    def dense(self) -> bool:
        """Whether it shows masks."""
        return self.task == "segmentation"

    def embed(self, name: str) -> str:
        """An image as a data: address."""
        path = self._folder / name
        if Path(name).name != name or not path.is_file() or path.stat().st_size > LARGEST:
            raise ValueError(f"images must be files in the gallery's folder. Got {name[:60]!r}.")
        content = path.read_bytes()
        if not content.startswith(PNG):
            raise ValueError(f"images must be PNG files. Got {name[:60]!r}.")
        return "data:image/png;base64," + base64.b64encode(content).decode()


class GalleryBuilder:
    """Collects predictions and the images to show from batches, and writes the gallery.

    Args:
        test: the test set.
        images: its raw images (N, channels, height, width).
    """

    def __init__(self, test: Dataset, images: Tensor) -> None:
        self.test, self.images, self.dense = test, images, test.targets.ndim > 1
        # of a segmentation: score, index and probabilities (M, C, ...), by group of images
        self.best: dict[Any, tuple[float, int, Tensor]] = {}
        self.common = {round(i * (len(images) - 1) / (COMMON - 1)) for i in range(COMMON)}
        self.compared: list[tuple[int, Tensor]] = []  # index and probabilities of evenly spaced images
        # of a classifier: the fields of `Predictions`, and the scores
        self.seen: list[tuple[Tensor, ...]] = []

    def update(self, probs: Tensor, start: int) -> None:
        """Add predictions (M, n, C, ...) for the images from `start` on."""
        targets = self.test.targets[start : start + probs.shape[1]]
        if not self.dense:
            rows = torch.cat([probs.mean(0)[None], probs])
            confidence, classes = rows.max(2)
            self.seen.append((targets, classes, confidence, metrics.entropy(rows), disputed(probs)))
            return
        errors = _pixel_errors(probs, targets)
        scores = errors.amax(0) - errors.amin(0)
        for i in self._first_of_groups(scores, start):
            key = self._key(start + i)
            if key not in self.best or self.best[key][0] < scores[i]:
                self.best[key] = (float(scores[i]), start + i, probs[:, i].clone())
        self.compared += [
            (i, probs[:, i - start].clone()) for i in sorted(self.common) if 0 <= i - start < len(targets)
        ]
        best = sorted(self.best.values(), key=lambda one: (-one[0], one[1]))[:SCENES]
        self.best = {self._key(one[1]): one for one in best}

    def _first_of_groups(self, scores: Tensor, start: int) -> Iterator[int]:
        """The image with the highest score in each group, for as many groups as are shown."""
        seen: set[Any] = set()
        for i in scores.argsort(descending=True, stable=True).tolist():
            if len(seen) < SCENES and (key := self._key(start + i)) not in seen:
                seen.add(key)
                yield i

    def _key(self, index: int) -> Any:
        return self.test.groups[index] if self.test.groups else index

    def write(self, folder: Path) -> None:
        """Write gallery.json and what it names."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.dense:
            shown = dict([*self.compared, *((index, probs) for _, index, probs in self.best.values())])
            items: Any = [self._scene(folder, index, probs) for index, probs in shown.items()]
        else:
            items = self._cards(folder)
        task: Any = "segmentation" if self.dense else "classification"
        gallery = Gallery(task=task, classes=list(self.test.classes), items=items)
        with replacing(folder / "gallery.json") as part:
            part.write_text(json.dumps(gallery.model_dump(exclude_none=True)) + "\n", encoding="utf-8")

    def _cards(self, folder: Path) -> list[Card]:
        *columns, scores = (torch.cat(parts, -1) for parts in zip(*self.seen, strict=True))
        kinds = (np.uint32, np.uint32, np.float16, np.float32)  # by the entropy a member is chosen
        found = Predictions(*(x.cpu().numpy().astype(kind) for x, kind in zip(columns, kinds, strict=True)))
        with replacing(folder / "predictions.npz") as part, part.open("wb") as file:
            np.savez_compressed(file, **found._asdict())
        order = scores.argsort(descending=True, stable=True).tolist()
        shown = [*order[:CARDS], *[i for i in order if found.wrong[i]][:WRONG]]
        return [Card(**self._common(folder, i), target=int(found.targets[i])) for i in dict.fromkeys(shown)]

    def _common(self, folder: Path, index: int) -> dict[str, Any]:
        image = _save(folder / f"{index}.png", self.images[index])
        return {
            "index": index,
            "image": image,
            "group": self.test.groups[index] if self.test.groups else None,
        }

    def _scene(self, folder: Path, index: int, probs: Tensor) -> Scene:
        classes, target = probs.shape[1], self.test.targets[index]
        entropy = metrics.entropy(probs[:, None])[:, 0]
        errors = _pixel_errors(probs[:, None], target[None])[:, 0]
        members = [
            Mask(
                mask=_save(folder / f"{index}-member{m}.png", _grey(one.argmax(0), classes)),
                error=round(100 * float(errors[m]), 4),
                entropy=round(float(entropy[m]), 4),
            )
            for m, one in enumerate(probs)
        ]
        truth = _save(folder / f"{index}-truth.png", _grey(target, classes))
        chosen = int(entropy.argmin())
        return Scene(**self._common(folder, index), truth=truth, members=members, chosen=chosen)


def disputed(probs: Tensor) -> Tensor:
    """How confidently the members contradict each other, (N,): products of confidences over such pairs."""
    confidence, predicted = probs.double().max(2)  # (M, N)
    votes = confidence.new_zeros(probs.shape[1], probs.shape[2]).scatter_add_(1, predicted.T, confidence.T)
    return (votes.sum(1).square() - votes.square().sum(1)) / 2


def _pixel_errors(probs: Tensor, targets: Tensor) -> Tensor:
    """Fraction of wrong pixels, (M, N)."""
    counts = not_ignored(targets, default_ignore_index(targets, probs.shape[2]))
    wrong = (probs.max(2).indices != targets) & counts
    return wrong.flatten(2).sum(2) / counts.flatten(1).sum(1).clamp(min=1)


def _grey(labels: Tensor, classes: int) -> Tensor:
    """Classes as shades from black to white; ignored pixels in between."""
    shades = (labels.double() * 255 / (classes - 1)).clamp(0, 255)
    counts = not_ignored(labels, default_ignore_index(labels, classes))
    return shades.where(counts, 128.0).to(torch.uint8)[None]


def _save(path: Path, image: Tensor) -> str:
    if image.is_floating_point():  # whatever its scale, from its darkest to its brightest value
        low, high = image.aminmax()
        image = ((image - low) * 255 / (high - low).clamp(min=1e-12)).to(torch.uint8)
    pixels = image.permute(1, 2, 0).cpu().numpy()  # (H, W, channels)
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels[..., :3]).save(path, optimize=True)
    return path.name
