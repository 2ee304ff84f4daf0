"""A folder <-> an Ensemble: config.json and safetensors, never a pickle.

The weights file is named after its content and config.json, written last, points to it: a save that is
interrupted leaves the ensemble that was there before.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from . import __version__
from ._files import replacing
from .data import preprocess
from .data.transform import Chunks, Transform
from .ensemble import Ensemble, Network, Output, build_members
from .networks import BUILDERS, Plain, SplitNetwork
from .pretrained import SharedStemEnsemble, held_once, join_stems
from .sharing import MODES

FORMAT = "cmcl-ensemble"
VERSION = 1  # raise it when an older program could misread what is written
SMALL = 1 << 20  # bytes of a transform that always travels with its ensemble
# Arguments of Ensemble, and attributes of the same name.
SETTINGS = ("share_after", "share_prob", "share_at_test")


def save(ensemble: Ensemble, path: str | Path, *, with_transform: bool = False) -> None:
    """Write `ensemble` to the folder `path`, replacing an ensemble that is there.

    The transform of its images is named in config.json. Its tensors are saved too if they are small, if they
    could not be fitted again from a data set, or if `with_transform` asks for them (whitening takes 36 MiB).
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path must be a folder to write the ensemble to. Got the file {folder}.")
    folder.mkdir(parents=True, exist_ok=True)
    old = _read_config(folder) if (folder / "config.json").exists() else None  # a foreign one is an error
    tensors = _tensors(ensemble)
    transform = None
    if with_transform and isinstance(ensemble.transform, Missing):
        raise ValueError("with_transform must find a transform to save. Got none: load it with root=.")
    if ensemble.transform is not None:
        transform, learned = ensemble.transform.state()
        for_good = not (transform["source"] or {}).get("recipe")  # fitted on what no data set gives again
        if with_transform or for_good or ensemble.transform.nbytes <= SMALL:
            tensors |= {f"transform.{key}": value for key, value in learned.items()}
    data = safetensors.torch.save(tensors)
    checksum = sha256(data).hexdigest()
    weights = {"file": f"weights-{checksum[:12]}.safetensors", "sha256": checksum}
    config = {
        "format": FORMAT,
        "version": VERSION,
        "cmcl": __version__,
        "members": [_describe(member) for member in ensemble.members],
        **{name: getattr(ensemble, name) for name in SETTINGS},
        "stem": {"stem": ensemble.stem, "freeze": ensemble.freeze}
        if isinstance(ensemble, SharedStemEnsemble)
        else None,
        "output": None if ensemble.output is None else _name(ensemble.output),
        "classes": _class_names(ensemble.classes),
        "transform": transform,
        "weights": weights,
    }
    text = json.dumps(config, indent=1) + "\n"  # before anything is written
    with replacing(folder / weights["file"]) as part:
        part.write_bytes(data)
    with replacing(folder / "config.json") as part:
        part.write_text(text, encoding="utf-8")
    if old and old["weights"]["file"] != weights["file"]:
        (folder / old["weights"]["file"]).unlink(missing_ok=True)


def saved_checksum(path: str | Path) -> str:
    """Of the weights in a folder that `save` wrote."""
    return str(_read_config(Path(path))["weights"]["sha256"])


def _tensors(ensemble: Ensemble) -> dict[str, Tensor]:
    """Clones, because safetensors refuses tensors that share memory, and tied weights do."""
    state = ensemble.state_dict()
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"state to be saved must be tensors. Got {type(value).__name__} as {key}.")
    return {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}


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
        root: folder of the data sets, to fit the images' transform again if it was too large to be saved.
    """
    folder = _saved_in(Path(path))
    config = _read_config(folder)
    if config["output"] and output is None:
        raise ValueError(
            f"{folder} was saved with output={config['output']}, a function, which is not saved. "
            "Pass output= (--output MODULE:FUNCTION), which picks the logits from what a member returns."
        )
    weights = _read_weights(folder, config["weights"])
    count = len({key.split(".")[1] for key in weights if key.startswith("members.")})
    if count not in (0, len(config["members"])):
        raise ValueError(f"{folder} is damaged: {len(config['members'])} members named, {count} saved.")
    modules = _modules(folder, config["members"], network)
    stem = config["stem"]
    common = held_once(modules[0], join_stems(modules, stem["stem"])) if stem else []
    for m, module in enumerate(modules):
        own = {**_below("members.0.", weights, only=common), **_below(f"members.{m}.", weights)}
        _take_types(module, own)
        try:
            module.load_state_dict(own)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{folder} does not fit member {m}. {reason}") from error
    settings = {name: config[name] for name in SETTINGS}
    build: Callable[..., Ensemble] = partial(SharedStemEnsemble, **stem) if stem else Ensemble
    ensemble = build(modules, **settings, output=output).to(device).eval()
    ensemble.transform = _transform(config["transform"], weights, root)
    ensemble.classes = None if config["classes"] is None else tuple(config["classes"])
    return ensemble


def _take_types(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Each tensor as it was saved, single or double; half precision, made to be small, is not computed in."""
    precise = {torch.float32, torch.float64}
    built = {key: parameter.dtype for key, parameter in module.named_parameters() if key in saved}
    kinds = {saved[key].dtype for key in built}
    if len(kinds) == 1 and kinds <= precise and kinds != set(built.values()):
        module.to(dtype=kinds.pop())  # with the buffers that are not saved
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        dtype = saved[key].dtype if key in saved else tensor.dtype
        if dtype in precise and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


class Missing(Transform):
    """Stands for a transform that was too large to be saved: it has a name, but cannot be used."""

    kind = "missing"

    def __init__(self, config: dict[str, Any]) -> None:
        super().__post_init__()
        self.config = config

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What was loaded, so that saving again keeps the name."""
        return self.config, {}

    def transform(self, images: Tensor) -> Tensor:
        """Say how to get it."""
        name = self.config["source"]["recipe"]["name"]
        raise ValueError(
            f"uint8 images must go through the {self.config['kind']} fitted on {name}, which was not saved "
            "with this ensemble. Load it with root=, the folder of that data set, or set ensemble.transform. "
            "ensemble.save(path, with_transform=True) then keeps it, for machines without the data."
        )

    def _fit(self, chunks: Chunks) -> None:
        raise NotImplementedError

    def _apply(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    _invert = _apply


def _transform(
    config: dict[str, Any] | None, weights: dict[str, Tensor], root: str | Path | None
) -> Transform | None:
    if config is None:
        return None
    learned = _below("transform.", weights)
    if learned or not preprocess.build(config).needs_fit:
        return preprocess.from_state(config, learned)
    return Missing(config) if root is None else preprocess.refit(config, root)


def _below(prefix: str, weights: dict[str, Tensor], only: Sequence[str] | None = None) -> dict[str, Tensor]:
    found = {key.removeprefix(prefix): t for key, t in weights.items() if key.startswith(prefix)}
    return found if only is None else {key: found[key] for key in only if key in found}


def _class_names(classes: Sequence[str] | None) -> list[str] | None:
    if isinstance(classes, str):
        raise TypeError(f"ensemble.classes must be a list of names, one for each class. Got {classes!r}.")
    return None if classes is None else [str(name) for name in classes]


def _name(function: Output) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _describe(member: nn.Module) -> dict[str, Any]:
    """Enough to build the member again if it is one of ours; otherwise its class, for the error message."""
    if isinstance(member, SplitNetwork | Plain) and member.name in BUILDERS:
        return {"network": member.name, "options": member.options}
    return {"network": None, "class": type(member).__qualname__}


def _modules(folder: Path, members: list[dict[str, Any]], network: Network | None) -> list[nn.Module]:
    if network is not None:
        # Equal weights are no mistake here: the saved ones are about to replace them.
        return build_members(network, len(members))
    return [_build(folder, member) for member in members]


def _build(folder: Path, member: dict[str, Any]) -> nn.Module:
    name = member.get("network")
    if name not in BUILDERS:
        raise ValueError(
            f"{folder} holds {member.get('class') or name!r}, which is not a network of cmcl's own. "
            "Pass network= (--network MODULE:FUNCTION), a function that builds one member."
        )
    try:
        return BUILDERS[name](**member["options"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is damaged: its {name} cannot be built ({error}).") from error


def _saved_in(folder: Path) -> Path:
    """The ensemble of a run folder, or the folder itself, as the commands take them."""
    inside = folder / "ensemble"
    is_run = not (folder / "config.json").exists() and (inside / "config.json").is_file()
    return inside if is_run else folder


def _cure(folder: Path) -> str:
    """What to do where a folder holds no ensemble itself."""
    seeds = sorted(path.parent for path in folder.glob("seed*/ensemble"))
    if seeds:
        return f"It is a run of several seeds: name one, {' or '.join(map(str, seeds))}."
    if (folder / "checkpoints").is_dir():
        return "It holds checkpoints only: fit with resume=True, then ensemble.save or cmcl.record."
    return ""


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        message = f"{folder} must be a folder written by Ensemble.save. It has no config.json."
        raise FileNotFoundError(f"{message} {_cure(folder)}".strip())
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON, or not even text
        raise ValueError(
            f"{path} must be JSON written by Ensemble.save. Got something else: {error}."
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path} must be written by Ensemble.save. It belongs to another program.")
    version = config.get("version")
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"{path} is damaged: format version {version!r}. Save the ensemble again.")
    if version > VERSION:
        raise ValueError(
            f"{path} has format version {version}, and this cmcl {__version__} reads up to {VERSION}. "
            "Upgrade with: pip install -U confident-mcl"
        )
    config = {"stem": None, "output": None, "classes": None} | config  # an older file does not say
    wrong = [name for name, fits in _FITS.items() if name not in config or not fits(config[name])]
    if wrong:
        raise ValueError(
            f"{path} is damaged: {', '.join(wrong)} missing or malformed. Save the ensemble again."
        )
    return config


_FITS: dict[str, Callable[[Any], bool]] = {  # what a config holds
    "members": lambda v: isinstance(v, list) and all(isinstance(member, dict) for member in v) and bool(v),
    "weights": lambda v: (
        isinstance(v, dict)
        and all(isinstance(v.get(key), str) for key in ("file", "sha256"))
        and Path(v["file"]).name == v["file"]
    ),
    "classes": lambda v: v is None or (isinstance(v, list) and all(isinstance(name, str) for name in v)),
    "transform": lambda v: v is None or isinstance(v, dict),
    "stem": lambda v: v is None or (isinstance(v, dict) and v.keys() == {"stem", "freeze"}),
    "output": lambda v: v is None or isinstance(v, str),
    "share_after": lambda v: v is None or isinstance(v, str),
    "share_prob": lambda v: isinstance(v, int | float),
    "share_at_test": lambda v: v in MODES,
}


def _read_weights(folder: Path, weights: dict[str, str]) -> dict[str, Tensor]:
    path = folder / weights["file"]
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. Copy the whole folder, config.json and weights together."
        )
    data = path.read_bytes()
    if sha256(data).hexdigest() != weights["sha256"]:
        raise ValueError(
            f"{path} is damaged: its checksum is not the one in config.json. Copy or save it again."
        )
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file. Got something else: {error}.") from error
