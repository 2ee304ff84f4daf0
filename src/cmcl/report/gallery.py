"""The gallery of a run: test images with the prediction of every member. The page embeds the images."""

import base64
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from .._files import read_json
from .._schema import Schema

PNG = b"\x89PNG\r\n\x1a\n"
LARGEST = 4 * 2**20  # bytes of an image
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

    format: Literal[1]
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
            highest = max([vote.prediction for vote in votes], default=-1)
            target = -1 if isinstance(item, Scene) else item.target
            if item.chosen >= len(item.members) or max(highest, target) >= len(self.classes):
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
