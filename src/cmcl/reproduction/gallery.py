"""The gallery of a run: the test images on which its members differ most, with all their predictions.

gallery.json and small PNG files; the report embeds them. M members, N examples, C classes.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from PIL import Image
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from .. import metrics
from .._files import read_json, replacing
from .._schema import Schema
from ..data.dataset import Dataset, default_ignore_index, not_ignored

PNG = b"\x89PNG\r\n\x1a\n"
LARGEST = 4 * 2**20  # bytes of an image
CARDS, SCENES = 12, 6  # images shown of a classifier, and of a segmentation
Index = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Vote(Schema):
    """A predicted class; the ensemble's has no entropy."""

    prediction: Index
    confidence: Fraction
    entropy: float | None = None


class Mask(Schema):
    """A predicted mask, its error in percent and its mean entropy."""

    mask: str
    error: Annotated[float, Field(ge=0, le=100)]
    entropy: float


class Card(Schema):
    """An image with a class, and all predictions of it."""

    index: int
    image: str
    target: Index
    members: Annotated[list[Vote], Field(min_length=1)]
    ensemble: Vote
    chosen: Index
    group: str | None = None


class Scene(Schema):
    """An image with a mask, and all predictions of it."""

    index: int
    image: str
    truth: str
    members: Annotated[list[Mask], Field(min_length=1)]
    chosen: Index
    group: str | None = None


class Gallery(Schema):
    """The content of gallery.json."""

    format: Literal[1] = 1
    task: Literal["classification", "segmentation"]
    classes: list[str]
    items: list[Card] | list[Scene]
    _folder: Path = PrivateAttr(default=Path())

    @classmethod
    def load(cls, path: Path) -> "Gallery":
        """Read gallery.json and check that every image is a PNG beside it; raises `ValueError`."""
        gallery: Gallery = cls.parse(read_json(path), source=path)
        gallery._folder = path.parent
        for item in gallery.items:
            masks = [item.truth, *(member.mask for member in item.members)] if isinstance(item, Scene) else []
            for name in (item.image, *masks):
                gallery.embed(name)
        return gallery

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for item in self.items:
            votes = [] if isinstance(item, Scene) else [*item.members, item.ensemble]
            named = [] if isinstance(item, Scene) else [item.target, *(vote.prediction for vote in votes)]
            if item.chosen >= len(item.members) or max(named, default=-1) >= len(self.classes):
                raise ValueError(f"item {item.index} must name members and classes that exist.")
        return self

    @property
    def dense(self) -> bool:
        """Whether it shows masks."""
        return any(isinstance(item, Scene) for item in self.items)

    @property
    def several(self) -> bool:
        """Whether there are predictions of two members or more to compare."""
        return any(len(item.members) > 1 for item in self.items)

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
    """Collects the images to show from batches of predictions, and writes the gallery.

    Args:
        test: the test set.
        images: its raw images (N, channels, height, width).
    """

    def __init__(self, test: Dataset, images: Tensor) -> None:
        self.test, self.images, self.dense = test, images, test.targets.ndim > 1
        self.size = SCENES if self.dense else CARDS
        # score, index and probabilities (M, C, ...), by image, or by group of images of a segmentation
        self.best: dict[Any, tuple[float, int, Tensor]] = {}

    def update(self, probs: Tensor, start: int) -> None:
        """Add predictions (M, n, C, ...) for the images from `start` on."""
        targets = self.test.targets[start : start + probs.shape[1]]
        if self.dense:
            errors = _pixel_errors(probs, targets)
            scores = errors.amax(0) - errors.amin(0)
        else:
            scores = disputed(probs)
        for i in self._first_of_groups(scores, start):
            key = self._key(start + i)
            if key not in self.best or self.best[key][0] < scores[i]:
                self.best[key] = (float(scores[i]), start + i, probs[:, i].clone())
        best = sorted(self.best.values(), key=lambda one: (-one[0], one[1]))[: self.size]
        self.best = {self._key(one[1]): one for one in best}

    def _first_of_groups(self, scores: Tensor, start: int) -> Iterator[int]:
        """The highest score of each group, for as many groups as are shown."""
        seen: set[Any] = set()
        for i in scores.argsort(descending=True, stable=True).tolist():
            if len(seen) < self.size and (key := self._key(start + i)) not in seen:
                seen.add(key)
                yield i

    def _key(self, index: int) -> Any:
        return self.test.groups[index] if self.dense and self.test.groups else index

    def write(self, folder: Path) -> None:
        """Write gallery.json and the images."""
        folder.mkdir(parents=True, exist_ok=True)
        make: Any = self._scene if self.dense else self._card
        items = [make(folder, index, probs) for _, index, probs in self.best.values()]
        task: Any = "segmentation" if self.dense else "classification"
        gallery = Gallery(task=task, classes=list(self.test.classes), items=items)
        with replacing(folder / "gallery.json") as part:
            part.write_text(json.dumps(gallery.model_dump(exclude_none=True)) + "\n", encoding="utf-8")

    def _common(self, folder: Path, index: int, entropy: Tensor) -> dict[str, Any]:
        return {
            "index": index,
            "image": _save(folder / f"{index}.png", self.images[index]),
            "chosen": int(entropy.argmin()),
            "group": self.test.groups[index] if self.test.groups else None,
        }

    def _card(self, folder: Path, index: int, probs: Tensor) -> Card:
        entropy = metrics.entropy(probs[:, None])[:, 0]
        members = [_vote(one, float(h)) for one, h in zip(probs, entropy, strict=True)]
        target = int(self.test.targets[index])
        common = self._common(folder, index, entropy)
        return Card(**common, target=target, members=members, ensemble=_vote(probs.mean(0)))

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
        return Scene(**self._common(folder, index, entropy), truth=truth, members=members)


def disputed(probs: Tensor) -> Tensor:
    """How confidently the members contradict each other, (N,): products of confidences over such pairs."""
    confidence, predicted = probs.double().max(2)  # (M, N)
    votes = confidence.new_zeros(probs.shape[1], probs.shape[2]).scatter_add_(1, predicted.T, confidence.T)
    return (votes.sum(1).square() - votes.square().sum(1)) / 2


def _vote(probs: Tensor, entropy: float | None = None) -> Vote:
    """From probabilities (C,)."""
    rounded = None if entropy is None else round(entropy, 4)
    return Vote(prediction=int(probs.argmax()), confidence=round(float(probs.max()), 4), entropy=rounded)


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
