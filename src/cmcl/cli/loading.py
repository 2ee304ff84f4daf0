"""Saved ensembles and test data, as evaluate, predict, calibrate and export load them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .._files import read_json
from .._messages import first_line
from ..data.registry import DATASETS, data_root, nearest, parse_address
from ..lazy import import_function
from . import common

if TYPE_CHECKING:
    from ..data.dataset import Dataset
    from ..ensemble import Ensemble

Found = TypeVar("Found")


@dataclass(frozen=True)
class Saved:
    """A saved ensemble on disk."""

    folder: Path  # holds config.json
    name: str  # of the run, or of the folder
    data: str | None = None  # the dataset that it was trained on, if that is recorded
    network: str | None = None  # its name, or the user's MODULE:FUNCTION, if that is recorded
    network_options: Mapping[str, Any] = field(default_factory=dict)  # its arguments

    def load(
        self,
        *,
        root: Path | None = None,
        device: str = "cpu",
        network: str | None = None,
        logits: str | None = None,
        flip: bool | None = None,
    ) -> "Ensemble":
        """The ensemble; `network` and `logits` are the user's MODULE:FUNCTION, where it needs them."""
        from ..serialization import load

        if network is None and ":" in (self.network or ""):  # a file must not decide which code runs
            raise ValueError(
                f"--network must name the function that builds the members of {self.folder}, your own code. "
                f"Got none. It was trained with: --network {self.network}"
            )
        build = None if network is None else import_function(network, "--network must be")
        if build is not None and network == self.network:
            build = partial(build, **self.network_options)
        pick = None if logits is None else import_function(logits, "--logits must be")
        ensemble = search_root(
            lambda place: load(self.folder, network=build, output=pick, device=device, root=place),
            root,
            "the dataset on which the ensemble's preprocessing is fitted again",
        )
        if ensemble.classes is None and (info := DATASETS.get(self.data or "")):
            ensemble.classes = info.classes or None
        if flip is not None:
            ensemble.flip_at_test = flip
        return ensemble


def find_saved(run: Path) -> Saved:
    """The saved ensemble of a run folder, or the folder itself if it is one."""
    if folder := _ensemble_folder(run):
        name = folder.absolute().parent.name if folder.name == "ensemble" else folder.name
        return Saved(folder, name, **_recorded(folder))
    if (run / "checkpoints").is_dir():
        raise ValueError(
            f"{run} must hold a finished run. Got one that was interrupted. Resume it with the command that "
            "started it: `cmcl train RECIPE --resume` and its other options."
        )
    hint = ""
    if not run.exists():
        hint = common.nearest_folder(run)
    elif run.is_dir() and (inside := [path for path in sorted(run.iterdir()) if _ensemble_folder(path)]):
        hint = f"Name {inside[0]}{f', one of {len(inside)} runs in it' if len(inside) > 1 else ''}."
    message = f"{run} must be a run folder of `cmcl train` or a saved ensemble. Got neither. {hint}"
    raise FileNotFoundError(message.strip())


def _ensemble_folder(run: Path) -> Path | None:
    return next((path for path in (run, run / "ensemble") if (path / "config.json").is_file()), None)


def _recorded(folder: Path) -> dict[str, Any]:
    """Training data and network by the files of a run or, if it is alone, of an ensemble."""
    kinds: dict[str, list[str]] = {"recipe.json": [], "record.json": ["recipe"]}
    places = (folder, folder.absolute().parent)
    files = [(place / name, keys) for place in places for name, keys in kinds.items()]
    files.append((folder / "config.json", ["transform", "source", "recipe"]))
    path, keys = next((path, keys) for path, keys in files if path.is_file())
    values = read_json(path)
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    values = values if isinstance(values, dict) else {}
    found = {"data": values.get("data", values.get("name")), "network": values.get("network")}
    options = values.get("network_options")
    recorded: dict[str, Any] = {key: value for key, value in found.items() if isinstance(value, str)}
    return recorded | ({"network_options": options} if isinstance(options, dict) else {})


def search_root(read: Callable[[Path], Found], root: Path | None, what: str) -> Found:
    """What `read` finds under --root or, since that may hold the user's own images, in the default folder."""
    default = data_root()
    if root is None or root == default:
        return read(default)
    try:
        return read(root)
    except FileNotFoundError:
        try:
            return read(default)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{what} must be in {root} or {default}. Got neither: {error}") from None


def load_test(
    saved: Saved,
    ensemble: "Ensemble",
    data: str | None,
    root: Path | None,
    options: Sequence[str] | None,
    limit: int | None,
) -> "Dataset":
    """The test split of --data or of the training data, with labels as the ensemble numbers them."""
    from ..data.dataset import evenly_spaced

    name = data or saved.data
    if name is None:
        raise ValueError(f"--data must name the test data: {saved.folder} does not record it. Got none.")
    test = evenly_spaced(_load(name, root, common.parse_pairs(options, "--option")), limit)
    return align_classes(test, ensemble.classes, count_classes(ensemble, test, "--data", "--option"))


def load_ood(name: str, own_root: Path | None, root: Path | None, options: Sequence[str] | None) -> "Dataset":
    """The out-of-distribution images of --ood."""
    values = common.parse_pairs(options, "--ood-option")
    if own_root is not None:
        return _load(name, own_root, values)
    if name == "folder":
        raise ValueError("--ood-root must name the folder of --ood folder, apart from --root. Got none.")
    return search_root(lambda place: _load(name, place, values), root, f"--ood {name}")


def _load(name: str, root: Path | None, options: dict[str, Any]) -> "Dataset":
    """A test split; a folder of the user's own images need not have train/ beside test/, nor test/."""
    from ..data import load

    kind, path, own = parse_address(name)
    root, options = Path(path) if path else root, own | options
    whole = None if root is None else root.expanduser()
    if kind != "folder" or whole is None or (whole / "train").is_dir() or "test" in options:
        return load(kind, split="test", root=whole, **options)
    inside = whole / "test"
    return replace(load(kind, root=inside if inside.is_dir() else whole, **options), split="test")


def count_classes(ensemble: "Ensemble", data: "Dataset", option: str, convert: str) -> int:
    """The number of classes that the ensemble predicts for these images; raises if it does not take them."""
    try:
        with common.input_errors(""):
            return ensemble.predict(data.images[:1]).probs.shape[1]
    except ValueError as error:
        shape = " x ".join(map(str, data.images.shape[1:]))
        raise ValueError(
            f"{option} must name images that the ensemble takes. Got {shape} from {data.source}: "
            f"{first_line(error)}. Name another dataset, or convert a folder of images with "
            f"{convert} mode=L or mode=RGB and {convert} size=[HEIGHT,WIDTH]."
        ) from error


def align_classes(data: "Dataset", names: Sequence[str] | None, count: int) -> "Dataset":
    """The same images with labels numbered as the ensemble numbers its `count` classes, by their names."""
    import torch

    if names is None or len(names) > count:  # more names than outputs belong to something else
        if count != len(data.classes):
            raise ValueError(
                f"{data.source} must have {count} classes, as the ensemble, which has no class names. "
                f"Got {len(data.classes)}."
            )
        return data
    if (known := list(names)) == list(data.classes):
        return data
    if unknown := [name for name in data.classes if name not in known]:
        raise ValueError(
            f"{data.source} must have classes that the ensemble knows by name. Got {', '.join(unknown[:5])}"
            f"{', ...' if len(unknown) > 5 else ''}. {nearest(unknown[0], known)}"
        )
    numbers = torch.arange(max(256, len(data.classes)))  # pixels to ignore keep their value
    numbers[: len(data.classes)] = torch.tensor([known.index(name) for name in data.classes])
    return replace(data, targets=numbers[data.targets.long()].to(data.targets.dtype), classes=tuple(known))
