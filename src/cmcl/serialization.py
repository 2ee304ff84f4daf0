"""Saving and loading of an Ensemble: a folder with config.json and safetensors, never a pickle.

config.json names the weights file by its checksum and holds a checksum of itself, so every change is seen.
It is written last: an interrupted save leaves the ensemble that was there before.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor, nn

from . import __version__
from ._files import read_json, replacing
from ._schema import Schema
from .data import transforms
from .data.transforms import Transform
from .ensemble import Ensemble, Network, Output, build_members
from .networks import BUILDERS, Plain, SplitNetwork
from .pretrained import SharedStemEnsemble, held_once, join_stems

FORMAT = "cmcl-ensemble"
VERSION = 2  # raise it when an older cmcl could misread what is written
SETTINGS = ("share_after", "share_prob", "share_at_test")  # arguments of Ensemble, attributes of that name
SMALL = 1 << 20  # bytes of a transform that is always saved with its ensemble


class Member(Schema):
    """What builds a member: a network of cmcl's own with its options, or a class of the user's without."""

    network: str
    options: dict[str, Any] | None


class Weights(Schema):
    """The weights file, in the same folder."""

    file: str = Field(pattern=r"^[\w-]+\.safetensors$")
    sha256: str


class Stem(Schema):
    """Arguments of SharedStemEnsemble."""

    stem: str
    freeze: bool


class Config(Schema):
    """The content of config.json. `Ensemble` describes the settings."""

    format: str = FORMAT
    version: int = VERSION
    cmcl: str = __version__
    members: list[Member] = Field(min_length=1)
    share_after: str | None
    share_prob: float
    share_at_test: Literal["sampled", "expected", "off"]
    temperature: float | None = Field(default=None, gt=0)
    flip_at_test: bool = False
    stem: Stem | None
    output: str | None  # the name of the function that picks the logits
    classes: list[str] | None
    image_shape: tuple[int, int, int] | None = None
    transform: dict[str, Any] | None
    weights: Weights
    sha256: str = ""  # of all the rest


class Missing:
    """A transform that was too large to be saved: it has a config, but cannot be used."""

    is_fitted = False

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The config that was loaded, so that saving again keeps it."""
        return self.config, {}

    def transform(self, images: Tensor) -> Tensor:
        """Raise, with how to get the transform."""
        name = self.config["source"]["recipe"]["name"]
        raise ValueError(
            f"uint8 images must go through the {self.config['kind']} fitted on {name}, which was not saved "
            "with this ensemble. Load it with root=, the folder of that dataset, or set ensemble.transform. "
            "ensemble.save(path, with_transform=True) then keeps it, for machines without the data."
        )


def save(ensemble: Ensemble, path: str | Path, *, with_transform: bool = False) -> None:
    """Write `ensemble` to the folder `path`, replacing an ensemble that is there.

    config.json describes the transform of its images. The transform's tensors are saved too if they are
    small, if no dataset gives them again, or with `with_transform` (whitening takes 36 MiB).
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path must be a folder to write the ensemble to. Got the file {folder}.")
    old = _read_config(folder) if (folder / "config.json").exists() else None  # a foreign one is an error
    transform, tensors = _saved_transform(ensemble.transform, with_transform=with_transform)
    data = safetensors.torch.save(_tensors(ensemble) | tensors)
    checksum = sha256(data).hexdigest()
    weights = Weights(file=f"weights-{checksum[:12]}.safetensors", sha256=checksum)
    config = _config(ensemble, transform, weights)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / weights.file) as part:
        part.write_bytes(data)
    _write_config(folder, config)
    if old and old.weights.file != weights.file:
        (folder / old.weights.file).unlink(missing_ok=True)


def save_temperature(path: str | Path, temperature: float) -> None:
    """Set the temperature of the ensemble in a folder that `save` wrote; the weights stay as they are."""
    config = _read_config(Path(path)).model_dump() | {"temperature": temperature}
    _write_config(Path(path), Config.parse(config, source="the ensemble"))


def saved_checksum(path: str | Path) -> str:
    """The checksum of the weights in a folder that `save` wrote."""
    return _read_config(Path(path)).weights.sha256


def load(
    path: str | Path,
    *,
    network: Network | None = None,
    output: Output | None = None,
    device: str | torch.device = "cpu",
    root: str | Path | None = None,
) -> Ensemble:
    """Read an ensemble back from the folder that `Ensemble.save` wrote, in eval mode.

    Args:
        path: the folder, or that of a run with one saved ensemble.
        network: what builds a member, as for `Ensemble`; needed for networks that are not cmcl's own.
        output: what picks the logits, as for `Ensemble`; needed where it was saved with one.
        device: where the ensemble goes.
        root: folder of the datasets, to fit the images' transform again if it was too large to be saved.
    """
    folder = Path(path)
    if not (folder / "config.json").exists() and (folder / "ensemble" / "config.json").is_file():
        folder /= "ensemble"  # a run folder
    config = _read_config(folder)
    if config.output and output is None:
        raise ValueError(
            f"{folder} was saved with output={config.output}, a function, which is not saved. "
            "Pass output= (--logits MODULE:FUNCTION), which picks the logits from what a member returns."
        )
    weights = _read_weights(folder, config.weights)
    saved = len({key.split(".")[1] for key in weights if key.startswith("members.")})
    if saved not in (0, len(config.members)):
        raise ValueError(f"{folder} is damaged: {len(config.members)} members named, {saved} saved.")
    if network is None:
        with torch.device("meta"):  # wrong sizes must not take gigabytes before they are found
            shapes = {key: tensor.to("meta") for key, tensor in weights.items()}
            _fill([_build(folder, member) for member in config.members], shapes, config, folder)
        modules = [_build(folder, member) for member in config.members]
    else:
        modules = build_members(network, len(config.members))
    _fill(modules, weights, config, folder)
    settings = {name: getattr(config, name) for name in SETTINGS} | {"output": output}
    if config.stem is None:
        ensemble = Ensemble(modules, **settings)
    else:
        ensemble = SharedStemEnsemble(modules, **config.stem.model_dump(), **settings)
    ensemble.transform = _loaded_transform(config.transform, weights, root)
    ensemble.classes = None if config.classes is None else tuple(config.classes)
    ensemble.image_shape = config.image_shape
    ensemble.temperature, ensemble.flip_at_test = config.temperature, config.flip_at_test
    return ensemble.to(device).eval()


def _config(ensemble: Ensemble, transform: dict[str, Any] | None, weights: Weights) -> Config:
    output, classes = ensemble.output, ensemble.classes
    if isinstance(classes, str):
        raise TypeError(f"ensemble.classes must be a list of names, one for each class. Got {classes!r}.")
    shared = isinstance(ensemble, SharedStemEnsemble)
    values = {name: getattr(ensemble, name) for name in SETTINGS} | {
        "members": [_describe(member) for member in ensemble.members],
        "stem": {"stem": ensemble.stem, "freeze": ensemble.freeze} if shared else None,
        "output": None if output is None else getattr(output, "__qualname__", type(output).__name__),
        "classes": None if classes is None else [str(name) for name in classes],
        "image_shape": ensemble.image_shape,
        "transform": transform,
        "temperature": ensemble.temperature,
        "flip_at_test": ensemble.flip_at_test,
        "weights": weights,
    }
    config: Config = Config.parse(values, source="the ensemble")
    return config


def _describe(member: nn.Module) -> Member:
    if isinstance(member, SplitNetwork | Plain) and member.name in BUILDERS:
        return Member(network=member.name, options=dict(member.options))
    return Member(network=type(member).__qualname__, options=None)


def _tensors(ensemble: Ensemble) -> dict[str, Tensor]:
    """Clones, because safetensors takes no tensors that share memory, and tied weights do."""
    state = ensemble.state_dict()
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"state to be saved must be tensors. Got {type(value).__name__} as {key}.")
    return {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}


def _saved_transform(
    transform: Transform | Missing | None, *, with_transform: bool
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    if transform is None:
        return None, {}
    if with_transform and isinstance(transform, Missing):
        raise ValueError("with_transform must find a transform to save. Got none: load it with root=.")
    config, learned = transform.state()
    large = sum(tensor.nbytes for tensor in learned.values()) > SMALL
    if large and not with_transform and (config["source"] or {}).get("recipe"):  # it can be fitted again
        return config, {}
    return config, {f"transform.{key}": value for key, value in learned.items()}


def _loaded_transform(
    config: dict[str, Any] | None, weights: dict[str, Tensor], root: str | Path | None
) -> Transform | Missing | None:
    if config is None:
        return None
    learned = _below("transform.", weights)
    if learned or not transforms.build(config).needs_fit:
        return transforms.from_state(config, learned)
    return Missing(config) if root is None else transforms.refit(config, root)


def _build(folder: Path, member: Member) -> nn.Module:
    if member.options is None or member.network not in BUILDERS:
        raise ValueError(
            f"{folder} holds {member.network!r}, which is not a network of cmcl's own. "
            "Pass network= (--network MODULE:FUNCTION), a function that builds one member."
        )
    try:
        return BUILDERS[member.network](**member.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder} is damaged: its {member.network} cannot be built ({error}).") from error


def _fill(modules: list[nn.Module], weights: dict[str, Tensor], config: Config, folder: Path) -> None:
    """Give the members their weights; a shared stem is saved once, with member 0."""
    common = held_once(modules[0], join_stems(modules, config.stem.stem)) if config.stem else []
    first = _below("members.0.", weights)
    for m, module in enumerate(modules):
        own = {key: first[key] for key in common if key in first} | _below(f"members.{m}.", weights)
        _take_types(module, own)
        try:
            module.load_state_dict(own)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{folder} does not fit member {m}. {reason}") from error


def _take_types(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Give the module the saved tensors' types; half precision, which makes files small, becomes single."""
    precise = {torch.float32, torch.float64}
    built = {key: parameter.dtype for key, parameter in module.named_parameters() if key in saved}
    kinds = {saved[key].dtype for key in built}
    if len(kinds) == 1 and kinds <= precise and kinds != set(built.values()):
        module.to(dtype=kinds.pop())  # with the buffers that are not saved
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        dtype = saved[key].dtype if key in saved else tensor.dtype
        if dtype in precise and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


def _below(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}


def _checksum(values: dict[str, Any]) -> str:
    rest = {key: value for key, value in values.items() if key != "sha256"}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _write_config(folder: Path, config: Config) -> None:
    values = config.model_dump(mode="json")
    values["sha256"] = _checksum(values)
    with replacing(folder / "config.json") as part:
        part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _read_config(folder: Path) -> Config:
    path = folder / "config.json"
    if not path.is_file():
        unfinished = (folder / "checkpoints").is_dir()
        hint = " It holds checkpoints only: fit with resume=True, then save." if unfinished else ""
        raise FileNotFoundError(
            f"{folder} must be a folder written by Ensemble.save. It has no config.json.{hint}"
        )
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} must be written by Ensemble.save. It belongs to another program.")
    if (version := values.get("version")) != VERSION:
        raise ValueError(
            f"{path} must have format version {VERSION}, which cmcl {__version__} reads. Got {version!r}. "
            "If it is newer, upgrade: pip install -U confident-mcl. If it is older, save the ensemble again."
        )
    if values.get("sha256") != _checksum(values):
        raise ValueError(
            f"{path} is damaged or was edited: its checksum is not the one saved with it. Copy it again; to "
            "change a setting, load the ensemble, set the attribute, and save."
        )
    config: Config = Config.parse(values, source=path)
    return config


def _read_weights(folder: Path, weights: Weights) -> dict[str, Tensor]:
    path = folder / weights.file
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. Copy the whole folder, config.json and weights together."
        )
    data = path.read_bytes()
    if sha256(data).hexdigest() != weights.sha256:
        raise ValueError(
            f"{path} is damaged: its checksum is not the one in config.json. Copy or save it again."
        )
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file. Got something else: {error}.") from error
