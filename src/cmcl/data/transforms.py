"""Transforms of images: fitted to a training set, applied, saved, and cached on disk.

whiten = Compose([GCN(), ZCA()]).fit(train)     # the paper's CIFAR-10
x = whiten.transform(test.images)
whiten.save("whiten.safetensors"); whiten = load("whiten.safetensors")

All arithmetic is float64, chunk by chunk, and results are float32: accurate to rounding on every device,
independent of autocast and TF32, and never more than a few chunks in memory beside the data.

B images of a chunk, C channels, H x W pixels, D = C*H*W values of an image.
"""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .. import _checks
from .._files import open_binary, parse_json, replacing
from .._messages import warn
from .dataset import Dataset, check_images, load_recipe, tensor_checksum
from .registry import cache_root, nearest

Tensors = Mapping[str, Tensor]
Chunks = Callable[[], Iterator[Tensor]]  # a new pass over the data: (B,C,H,W) float64

HINT = "Add the missing dimension; inputs that are not images need an ensemble without a transform."
CACHE = "preprocessed-2"  # a folder for each format of its files
_CHUNK_BYTES = 1 << 26
_BLOCK = 512  # columns of the covariance computed together
_MAX_DIMENSIONS = 1 << 14  # a ZCA matrix of that side already takes 2 GiB in float64


class Transform:
    """A step that is fitted to images, applied to images, and saved.

    A subclass is a dataclass of its parameters, with an entry in `KINDS`. It defines `_apply`, `_fit` if it
    learns, and `_invert` if nothing is lost.
    """

    kind: ClassVar[str]  # its name in saved files
    needs_fit = True  # False for a step that learns nothing from data

    def __post_init__(self) -> None:
        self.source: dict[str, Any] | None = None  # what it was fitted on: checksum and recipe
        self._tensors: dict[str, Tensor] = {}  # what was learned, on the CPU
        self._copies: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def _fit(self, chunks: Chunks) -> None:
        """Set the learned tensors."""

    def _apply(self, x: Tensor) -> Tensor:
        """A chunk (B,C,H,W) of float64, transformed."""
        raise NotImplementedError

    def _invert(self, x: Tensor) -> Tensor:
        raise ValueError(
            f"inverse must be called on a transform that has one. Got {self.kind}, which loses each image's "
            "mean and contrast. Invert the later steps alone: compose.steps[-1].inverse(values)."
        )

    def _check_shape(self, shape: Sequence[int]) -> None:
        """Raise unless images (C,H,W) fit to what was learned."""

    def fit(self, data: Dataset | Tensor) -> Self:
        """Learn from images (N,C,H,W) and return self. A `Dataset` is recorded by checksum and recipe."""
        images = data.images if isinstance(data, Dataset) else data
        check_images("images", images, HINT)
        if not len(images):
            raise ValueError("fit needs at least one image. Got none.")
        if self.needs_fit:
            self.source = _describe(data)
            self._fit(partial(_chunks, images))
        return self

    def transform(self, images: Tensor) -> Tensor:
        """uint8 or floating-point images to float32, on the device of the images."""
        return self._stream(images, self._apply)

    def inverse(self, values: Tensor) -> Tensor:
        """Back to the scale of the images, as float32."""
        return self._stream(values, self._invert)

    @torch.no_grad()
    def _stream(self, images: Tensor, formula: Callable[[Tensor], Tensor]) -> Tensor:
        check_images("images", images, HINT)
        self._check_fitted()
        self._check_shape(images.shape[1:])
        out = torch.empty_like(images, dtype=torch.float32, memory_format=torch.contiguous_format)
        start = 0
        for chunk in _chunks(images):
            out[start : start + len(chunk)] = formula(chunk)
            start += len(chunk)
        return out

    def float32_function(self) -> Callable[[Tensor], Tensor]:
        """The same formulas on float32 CPU tensors, for exported graphs, where float64 is slow or absent."""
        self._check_fitted()
        single = copy.deepcopy(self)
        single._set_tensors({name: tensor.float() for name, tensor in self._get_tensors().items()})
        return single._apply

    @property
    def is_fitted(self) -> bool:
        """Whether it has learned all that it needs."""
        return not self.needs_fit or self.source is not None

    def _check_fitted(self) -> None:
        if not self.is_fitted:
            raise ValueError(f"{self.kind} must be fitted first. Call .fit(train) or load a saved transform.")

    def _learned(self, name: str, like: Tensor) -> Tensor:
        """A learned tensor in the type and on the device of the images; kept there for the next ones."""
        tensor, key = self._tensors[name], (name, like.device, like.dtype)
        if (tensor.device, tensor.dtype) == (like.device, like.dtype):
            return tensor
        if key not in self._copies:
            self._copies[key] = tensor.to(like)
        return self._copies[key]

    def _get_tensors(self) -> dict[str, Tensor]:
        return self._tensors

    def _set_tensors(self, tensors: Tensors) -> None:
        self._tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        self._copies.clear()

    def parameters(self) -> dict[str, Any]:
        """Kind and parameters as JSON values: all that is needed to fit it again."""
        return {"kind": self.kind, **{f.name: getattr(self, f.name) for f in fields(self)}}  # type: ignore[arg-type]

    def checksum_for(self, source_checksum: str) -> str:
        """The `checksum` this transform has, or would have, when fitted on data of that checksum."""
        return _json_checksum([self.parameters(), source_checksum if self.needs_fit else None])

    @property
    def checksum(self) -> str:
        """Identifies the fit: parameters and data. The same fit on another machine has the same checksum."""
        self._check_fitted()
        return self.checksum_for(self.source["checksum"] if self.source else "")

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(config of JSON values, tensors), for any file; the inverse is `from_state`."""
        tensors = self._get_tensors()
        config = self.parameters() | {
            "source": self.source,
            "checksum": self.checksum,
            "digest": tensor_checksum(tensors),  # bit by bit: detects a damaged file
            "norms": _norms(tensors),  # agree between fits on different machines
        }
        return config, tensors

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, completely or not at all."""
        config, tensors = self.state()
        _write(Path(path), tensors, {"cmcl_transform": json.dumps(config)})


@dataclass(eq=False)
class GCN(Transform):
    """Global contrast normalisation: subtract each image's mean, then scale its contrast.

    Args:
        scale: the contrast that every image gets.
        by: "norm" scales the L2 norm to `scale`, as pylearn2 did for the paper's CIFAR-10 (no bias added);
            "deviation" scales the standard deviation.

    A constant image becomes zero. There is no inverse: mean and contrast of each image are lost.
    """

    kind = "gcn"
    needs_fit = False
    scale: float = 55.0
    by: str = "norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.choice("by", self.by, ("norm", "deviation"))
        _check_positive("scale", self.scale)

    def _apply(self, x: Tensor) -> Tensor:
        x = x - x.mean((1, 2, 3), keepdim=True)
        contrast = x.square().sum((1, 2, 3), keepdim=True).sqrt()  # (B,1,1,1)
        if self.by == "deviation":
            contrast = contrast / math.sqrt(x.shape[1:].numel())
        # below pylearn2's limit of 1e-8 there is no contrast to scale, only rounding
        return x * torch.where(contrast < 1e-8 * self.scale, 1.0, self.scale / contrast)


@dataclass(eq=False)
class ZCA(Transform):
    """ZCA whitening: directions of covariance eigenvalue e get the variance e / (e + bias).

    Args:
        bias: added to the eigenvalues, so that directions of noise are not amplified.

    The inverse is exact up to rounding.
    """

    kind = "zca"
    bias: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive("bias", self.bias)

    def _fit(self, chunks: Chunks) -> None:
        mean, covariance = _moments(chunks)
        eigenvalues, vectors = torch.linalg.eigh(covariance, UPLO="L")
        # rounding can leave eigenvalues of -1e-16
        matrix = (vectors * (eigenvalues.clamp_min(0) + self.bias).rsqrt()) @ vectors.T  # (D,D)
        self._set_tensors({"mean": mean.float(), "matrix": matrix.float()})

    def _apply(self, x: Tensor) -> Tensor:
        return ((x.flatten(1) - self._learned("mean", x)) @ self._learned("matrix", x)).view_as(x)

    def _invert(self, x: Tensor) -> Tensor:
        centred: Tensor = torch.linalg.solve(self._learned("matrix", x), x.flatten(1), left=False)
        return (centred + self._learned("mean", x)).view_as(x)

    def _check_shape(self, shape: Sequence[int]) -> None:
        _check_fit("values", self._tensors["mean"].numel(), math.prod(shape))


def _moments(chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Mean (D,) and the lower triangle of the covariance (D,D), in one pass.

    float64 makes the textbook formula safe.
    """
    first = next(chunks())
    d = first[0].numel()
    if d > _MAX_DIMENSIONS:
        raise ValueError(
            f"images for zca must have at most {_MAX_DIMENSIONS} values each. Got {d}. "
            "Use smaller images, or mean_std."
        )
    n, total, squares = 0, first.new_zeros(d), first.new_zeros(d, d)
    for chunk in chunks():
        x = chunk.flatten(1)
        n += len(x)
        total += x.sum(0)
        for start in range(0, d, _BLOCK):  # from the diagonal down: little more than half the work
            block = slice(start, start + _BLOCK)
            squares[start:, block].addmm_(x[:, start:].T, x[:, block])
    _check_finite(squares)
    mean = total / n
    return mean, squares.div_(n).addr_(mean, mean, alpha=-1)


@dataclass(eq=False)
class MeanStd(Transform):
    """Per channel: subtract the mean, divide by the standard deviation. The inverse is exact to rounding."""

    kind = "mean_std"

    def _fit(self, chunks: Chunks) -> None:
        n, total, squares = 0, torch.zeros(()), torch.zeros(())
        for x in chunks():
            n += x.numel() // x.shape[1]
            total = total.to(x) + x.sum((0, 2, 3))
            squares = squares.to(x) + x.square().sum((0, 2, 3))
        _check_finite(squares)
        mean = total / n  # (C,)
        variance = (squares / n - mean.square()).clamp_min(0)
        std = torch.where(variance > 0, variance.sqrt(), 1.0)  # a constant channel only loses its mean
        self._set_tensors({"mean": mean.view(-1, 1, 1), "std": std.view(-1, 1, 1)})

    def _apply(self, x: Tensor) -> Tensor:
        return (x - self._learned("mean", x)) / self._learned("std", x)

    def _invert(self, x: Tensor) -> Tensor:
        return x * self._learned("std", x) + self._learned("mean", x)

    def _check_shape(self, shape: Sequence[int]) -> None:
        _check_fit("channels", len(self._tensors["mean"]), shape[0])


@dataclass(eq=False)
class Normalize(MeanStd):
    """Per channel, a known mean and standard deviation: those of a pretrained network.

    Args:
        mean: one number for each channel, for images of 0 to 1, as torchvision and timm give them.
        std: the same for the standard deviation.

    The images themselves are of 0 to 255, as everywhere here: x becomes (x / 255 - mean) / std. Mean 0 and
    standard deviation 1 give x / 255. The inverse is exact up to rounding.
    """

    kind = "normalize"
    needs_fit = False
    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        # numbers for images of 0 to 255 would silently make all images alike
        message = (
            "mean and std must be lists of numbers from 0 to 1, one for each channel: those for images of "
            f"0 to 1. Got {self.mean} and {self.std}. Divide those for images of 0 to 255 by 255."
        )
        try:
            self.mean, self.std = [float(m) for m in self.mean], [float(s) for s in self.std]
        except TypeError:
            raise TypeError(message) from None
        in_range = all(0 <= m <= 1 for m in self.mean) and all(0 < s <= 1 for s in self.std)
        if not self.mean or len(self.std) != len(self.mean) or not in_range:
            raise ValueError(message)
        mean, std = (torch.tensor(own, dtype=torch.float64).view(-1, 1, 1) for own in (self.mean, self.std))
        self._set_tensors({"mean": 255 * mean, "std": 255 * std})


@dataclass(eq=False)
class Compose(Transform):
    """Several transforms in sequence; each is fitted to the output of the earlier ones."""

    kind = "chain"  # the name in saved files, older than the name of the class
    steps: Sequence[Transform]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs_fit = any(step.needs_fit for step in self.steps)
        if not self.steps:
            raise ValueError("steps must hold at least one transform. Got none.")
        if len({id(step) for step in self.steps}) < len(self.steps):  # the second fit would replace the first
            message = "steps must be different objects. Got one of them twice."
            raise ValueError(f"{message} Make a second one, such as Compose([MeanStd(), MeanStd()]).")

    def parameters(self) -> dict[str, Any]:
        """Kind and parameters of every step as JSON values."""
        return {"kind": self.kind, "steps": [step.parameters() for step in self.steps]}

    def _fit(self, chunks: Chunks) -> None:
        for step in self.steps:
            if step.needs_fit:
                step.source = self.source
                step._fit(chunks)
            chunks = partial(_mapped, step._apply, chunks)

    def _apply(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step._apply(x)
        return x

    def _invert(self, x: Tensor) -> Tensor:
        for step in reversed(self.steps):
            x = step._invert(x)
        return x

    def _check_shape(self, shape: Sequence[int]) -> None:
        for step in self.steps:
            step._check_shape(shape)

    def _get_tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{k}": v for i, step in enumerate(self.steps) for k, v in step._get_tensors().items()}

    def _set_tensors(self, tensors: Tensors) -> None:
        for i, step in enumerate(self.steps):
            step.source = self.source if step.needs_fit else None
            own = {k.removeprefix(f"{i}."): v for k, v in tensors.items() if k.startswith(f"{i}.")}
            step._set_tensors(own)


def _mapped(function: Callable[[Tensor], Tensor], chunks: Chunks) -> Iterator[Tensor]:
    return map(function, chunks())


KINDS: dict[str, type[Transform]] = {kind.kind: kind for kind in (GCN, ZCA, MeanStd, Normalize, Compose)}
PRESETS: dict[str, Callable[[], Transform]] = {
    "mean_std": MeanStd,
    "gcn": GCN,
    "gcn_zca": lambda: Compose([GCN(), ZCA()]),  # the paper's CIFAR-10
}


def build(config: Mapping[str, Any]) -> Transform:
    """The unfitted transform that a config (or `parameters()`) describes."""
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be a known transform. Got {kind!r}. {nearest(str(kind), list(KINDS))}")
    if kind == Compose.kind:
        return Compose([build(step) for step in config["steps"]])
    return KINDS[kind](**{f.name: config[f.name] for f in fields(KINDS[kind])})  # type: ignore[arg-type]


def from_state(config: Mapping[str, Any], tensors: Tensors) -> Transform:
    """The fitted transform that `state()` took apart. Damage to either part raises `ValueError`."""
    problem = ""
    try:
        transform = build(config)
        transform.source = config["source"]
        transform._set_tensors(tensors)
        if tensor_checksum(tensors) == config["digest"] and transform.checksum == config["checksum"]:
            return transform
    except (KeyError, TypeError, AttributeError, RecursionError) as error:  # a config that is not one
        problem = f" ({type(error).__name__}: {error})"
    raise ValueError(
        "parameters and tensors of a saved transform must agree with its checksums. Got others: the file is "
        f"damaged{problem}. Save it again, or fit again."
    )


def load(path: str | Path) -> Transform:
    """Read what `Transform.save` wrote."""
    path = Path(path)
    open_binary(path, hint="Write it with transform.save(path).").close()
    try:
        tensors, metadata = _read(path)
        config = parse_json(metadata["cmcl_transform"], path)
    except (SafetensorError, KeyError, ValueError) as error:
        message = f"{path} must be a saved transform. Got a damaged or other file ({error})."
        raise ValueError(f"{message} Save it again.") from None
    return from_state(config, tensors)


def refit(config: Mapping[str, Any], root: str | Path | None = None) -> Transform:
    """Fit again from a saved config alone, on the same data found under `root`.

    The data must have the same checksum, and the learned tensors must agree to rounding. The fit is cached.
    """
    transform, source = build(config), config.get("source")
    if source is None:
        return transform  # nothing was learned
    if source["recipe"] is None:
        raise ValueError(
            "a transform can be refitted when it was fitted on a loaded dataset. Got one fitted on arrays. "
            "Keep its saved file and use transforms.load(path)."
        )
    data = load_recipe(source["recipe"], root)
    if transform.checksum_for(data.checksum) != config["checksum"]:
        raise ValueError(
            f"the data under root must be those of the first fit ({source['recipe']['name']}, sha256 "
            f"{source['checksum'][:12]}...). Got others. Point root at the same data."
        )
    found = _norms(fit_cached(transform, data)._get_tensors())
    for name, expected in config["norms"].items():
        if not math.isclose(found.get(name, math.nan), expected, rel_tol=1e-4, abs_tol=1e-6):
            raise ValueError(
                f"{name} of the refitted transform must have norm {expected:.6g}. Got {found.get(name)}. "
                "The numerical libraries disagree: use the saved transform instead."
            )
    return transform


def fit_cached(transform: Transform, train: Dataset, folder: str | Path | None = None) -> Transform:
    """`transform.fit(train)`, with the tensors from the cache if the same fit is there."""
    if not transform.needs_fit:
        return transform.fit(train)
    key = transform.checksum_for(train.checksum)
    tensors = _cached("transforms", key, lambda: transform.fit(train)._get_tensors(), folder)
    transform.source = _describe(train)
    transform._set_tensors(tensors)
    return transform


def transform_cached(transform: Transform, dataset: Dataset, folder: str | Path | None = None) -> Dataset:
    """The dataset with transformed images, read from the cache if the same images are there."""
    key = _json_checksum([transform.checksum, dataset.checksum])
    tensors = _cached("images", key, lambda: {"images": transform.transform(dataset.images).cpu()}, folder)
    return replace(dataset, images=tensors["images"].to(dataset.images.device), recipe=None)


def _cached(kind: str, key: str, compute: Callable[[], Tensors], folder: str | Path | None) -> Tensors:
    """The tensors of `compute`, from the file named by `key`, the checksum of all that they depend on.

    So a file is never out of date. One that is damaged is written again, and a full or read-only disk must
    not stop the training.
    """
    path = cache_root(folder) / CACHE / kind / f"{key[:32]}.safetensors"
    try:
        if path.exists():
            tensors, metadata = _read(path)
            if metadata == _seal(key, tensors):
                return tensors
            warn(f"the cached file {path} is damaged: computing it again")
    except (OSError, SafetensorError) as error:
        warn(f"the cached file {path} is unreadable ({error}): computing it again")
    tensors = dict(compute())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, tensors, _seal(key, tensors))
    except (OSError, SafetensorError) as error:
        warn(f"{path} could not be written ({error}): continuing without a cache")
    return tensors


def _seal(key: str, tensors: Tensors) -> dict[str, str]:
    """What a cached file holds beside the tensors, to notice damage and the file of another key."""
    return {"checksum": _json_checksum([key, tensor_checksum(tensors)])}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata)


def _json_checksum(value: Any) -> str:
    """sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _norms(tensors: Tensors) -> dict[str, float]:
    """One number per tensor, to compare two fits without the tensors."""
    return {name: float(tensor.double().norm()) for name, tensor in tensors.items()}


def _describe(data: Dataset | Tensor) -> dict[str, Any]:
    if isinstance(data, Dataset):
        return {"checksum": data.checksum, "recipe": data.recipe and dict(data.recipe)}
    return {"checksum": tensor_checksum({"images": data}), "recipe": None}


def _chunks(images: Tensor) -> Iterator[Tensor]:
    device = images.device
    if device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    rows = max(1, _CHUNK_BYTES // (8 * max(1, images.shape[1:].numel())))
    for chunk in torch.split(images, rows):
        yield chunk.to(device, torch.float64)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive. Got {value}.")


def _check_fit(unit: str, fitted: int, got: int) -> None:
    if fitted != got:
        raise ValueError(f"images must have {fitted} {unit}, as at the fit. Got {got}.")


def _check_finite(sums: Tensor) -> None:
    """A value that is not finite, in any image, shows in the sums over all of them."""
    if not sums.isfinite().all():
        raise ValueError("images must be finite. Got NaN or infinity. Clean them before the fit.")
