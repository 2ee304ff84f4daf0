"""`Transform`: what every preprocessing step can do, written once. The steps themselves: steps.py.

All arithmetic is float64, chunk by chunk, and results are float32: exact to rounding on every device,
untouched by autocast and TF32, and never more than a few chunks above the data in memory.

B images of a chunk, C channels, H x W pixels.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from .._files import replacing
from .checksum import json_checksum, tensor_checksum
from .dataset import Dataset

_CHUNK_BYTES = 1 << 26

Chunks = Callable[[], Iterator[Tensor]]  # a new pass over the data: (B,C,H,W) float64


class Transform(ABC):
    """A step that is fitted to images, applied to images, and saved. Subclasses are dataclasses."""

    kind: ClassVar[str]
    learns: ClassVar[bool] = True  # False for a step that has nothing to fit

    def __post_init__(self) -> None:
        self.source: dict[str, Any] | None = None  # what it was fitted on: checksum and recipe
        self._tensors: dict[str, Tensor] = {}
        self._work: dict[tuple[str, torch.device], Tensor] = {}  # float64 copies, made when first used

    @abstractmethod
    def _fit(self, chunks: Chunks) -> None: ...

    @abstractmethod
    def _apply(self, x: Tensor) -> Tensor: ...  # (B,C,H,W) float64 -> the same

    @abstractmethod
    def _invert(self, x: Tensor) -> Tensor: ...

    @property
    def needs_fit(self) -> bool:
        """Whether this transform learns anything from data."""
        return self.learns

    def fit(self, data: Dataset | Tensor) -> Self:
        """Learn from images (N,C,H,W) and return self. A `Dataset` is remembered by checksum and recipe."""
        images = data.images if isinstance(data, Dataset) else data
        _check(images)
        if not len(images):
            raise ValueError("fit needs at least one image. Got none.")
        if self.needs_fit:
            self.source = _describe(data)
            self._fit(lambda: _chunks(images))
        return self

    def restore(self, data: Dataset | Tensor, tensors: Mapping[str, Tensor]) -> Self:
        """Be as after `fit(data)`, from the tensors that an equal fit learned."""
        self.source = _describe(data)
        self._set_tensors(tensors)
        return self

    def transform(self, images: Tensor) -> Tensor:
        """uint8 or floating-point images to float32, on the device of the images."""
        return self._stream(images, self._apply)

    def inverse(self, values: Tensor) -> Tensor:
        """Back to the scale of the images, as float32."""
        return self._stream(values, self._invert)

    def _stream(self, images: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        _check(images)
        self._check_fitted()
        out = torch.empty_like(images, dtype=torch.float32, memory_format=torch.contiguous_format)
        start = 0
        with torch.no_grad():
            for chunk in _chunks(images):
                out[start : start + len(chunk)] = step(chunk)
                start += len(chunk)
        return out

    @property
    def is_fitted(self) -> bool:
        """Whether it knows all that it needs."""
        return not self.needs_fit or self.source is not None

    def _check_fitted(self) -> None:
        if not self.is_fitted:
            raise ValueError(f"{self.kind} must be fitted first. Call .fit(train) or load a saved transform.")

    def _learned(self, name: str, device: torch.device) -> Tensor:
        if (name, device) not in self._work:
            self._work[name, device] = self._tensors[name].to(device, torch.float64)
        return self._work[name, device]

    def parameters(self) -> dict[str, Any]:
        """Kind and parameters as JSON values: all that is needed to fit it again."""
        return {"kind": self.kind, **{f.name: getattr(self, f.name) for f in fields(self)}}  # type: ignore[arg-type]

    def checksum_for(self, source_checksum: str) -> str:
        """The `checksum` this transform has, or would have, when fitted on data of that checksum."""
        return json_checksum([self.parameters(), source_checksum if self.needs_fit else None])

    @property
    def checksum(self) -> str:
        """Names the fit: parameters and data. The same fit on another machine has the same checksum."""
        self._check_fitted()
        return self.checksum_for(self.source["checksum"] if self.source else "")

    @property
    def nbytes(self) -> int:
        """Bytes of what was learned."""
        return sum(tensor.nbytes for tensor in self._get_tensors().values())

    def _get_tensors(self) -> dict[str, Tensor]:
        return self._tensors

    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._work.clear()

    def to(self, device: str | torch.device) -> Self:
        """Move what was learned; where images are on another device, copies go there by themselves."""
        self._set_tensors({name: tensor.to(device) for name, tensor in self._get_tensors().items()})
        return self

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(config of JSON values, tensors), for any file; `preprocess.from_state` joins them again."""
        self._check_fitted()
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self._get_tensors().items()}
        config = self.parameters() | {
            "source": self.source,
            "checksum": self.checksum,
            "digest": tensor_checksum(tensors),  # of the very bits: tells a damaged file
            "norms": norms(tensors),  # agree between fits on different machines
        }
        return config, tensors

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        config, tensors = self.state()
        with replacing(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"cmcl_transform": json.dumps(config)})


def norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """One number per tensor, by which two fits can be compared without the tensors."""
    return {name: float(tensor.double().norm()) for name, tensor in tensors.items()}


def _describe(data: Dataset | Tensor) -> dict[str, Any]:
    if isinstance(data, Dataset):
        return {"checksum": data.checksum, "recipe": data.recipe and dict(data.recipe)}
    return {"checksum": tensor_checksum({"images": data}), "recipe": None}


def _check(images: Tensor) -> None:
    if images.ndim != 4:
        raw = " uint8 is taken for raw images: pass vectors, and all that is no image, as float32 (.float())."
        cure = "Add the missing dimension." + raw * (images.dtype == torch.uint8)
        raise ValueError(f"images must have shape (N,C,H,W). Got {tuple(images.shape)}. {cure}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"images must be uint8 or floating point. Got {images.dtype}.")


def _chunks(images: Tensor) -> Iterator[Tensor]:
    device = images.device
    if device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    rows = max(1, _CHUNK_BYTES // (8 * max(1, images.shape[1:].numel())))
    for chunk in torch.split(images, rows):
        yield chunk.to(device, torch.float64)
