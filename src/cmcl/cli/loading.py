"""Run folders, saved ensembles and test data, as evaluate, predict, calibrate and export load them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .._files import read_json
from .._messages import first_line
from ..data.registry import DATASETS
from . import common

if TYPE_CHECKING:
    from ..data.dataset import Dataset
    from ..ensemble import Ensemble

Found = TypeVar("Found")


def ensemble_folder(run: Path) -> Path:
    """The saved ensemble of a run folder, or the folder itself if it is one."""
    if found := _saved(run):
        return found
    if (run / "checkpoints").is_dir():
        raise ValueError(
            f"{run} must hold a finished run. Got one that was interrupted. Resume it with the command that "
            "started it: `cmcl train RECIPE --resume` and its other options."
        )
    message = f"{run} must be a run folder of `cmcl train` or a saved ensemble. Got neither. {_meant(run)}"
    raise FileNotFoundError(message.strip())


def _saved(run: Path) -> Path | None:
    return next((place for place in (run, run / "ensemble") if (place / "config.json").is_file()), None)


def _meant(run: Path) -> str:
    """A hint: the runs inside a folder, or the name closest to a missing one."""
    from ..data.registry import nearest

    if run.is_dir():
        inside = [path for path in sorted(run.iterdir()) if _saved(path)]
        others = f", one of {len(inside)} runs in it" if len(inside) > 1 else ""
        return f"Name {inside[0]}{others}." if inside else ""
    beside = [path.name for path in run.parent.iterdir() if path.is_dir()] if run.parent.is_dir() else []
    return nearest(run.name, sorted(beside)) if beside and not run.exists() else ""


def label_of(folder: Path) -> str:
    """The name of the run that a saved ensemble belongs to, or its own."""
    return folder.absolute().parent.name if folder.name == "ensemble" else folder.name


def data_of(folder: Path) -> str | None:
    """The name of the dataset that a saved ensemble was trained on, if its run folder records it."""
    for place in (folder, folder.absolute().parent):
        for file, keys in (("recipe.json", ("data",)), ("record.json", ("recipe", "data"))):
            if (place / file).is_file():
                return _text(read_json(place / file), *keys)
    return _text(read_json(folder / "config.json"), "transform", "source", "recipe", "name")


def _text(values: Any, *keys: str) -> str | None:
    """The text under these keys of nested JSON objects."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, str) else None


def load_ensemble(
    folder: Path,
    *,
    root: Path | None,
    device: str = "cpu",
    network: str | None = None,
    logits: str | None = None,
) -> "Ensemble":
    """A saved ensemble; `network` and `logits` are the user's MODULE:FUNCTION, where it needs them."""
    from ..serialization import load

    build = None if network is None else common.import_function(network, "--network must be")
    pick = None if logits is None else common.import_function(logits, "--logits must be", "picks the logits")
    ensemble = search_root(
        lambda place: load(folder, network=build, output=pick, device=device, root=place),
        root,
        "the dataset on which the ensemble's preprocessing is fitted again",
    )
    if ensemble.classes is None and (info := DATASETS.get(data_of(folder) or "")):
        ensemble.classes = info.classes or None
    return ensemble


def search_root(read: Callable[[Path], Found], root: Path | None, what: str) -> Found:
    """What `read` finds under --root or, since that may hold the user's own images, in the default folder."""
    from ..data.registry import data_root

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
    folder: Path,
    ensemble: "Ensemble",
    data: str | None,
    root: Path | None,
    options: Sequence[str] | None,
    limit: int | None,
) -> "Dataset":
    """The test split of --data or of the training data, with labels as the ensemble numbers them."""
    from ..data.dataset import evenly_spaced

    name, values = data or data_of(folder), common.parse_pairs(options, "--option")
    if name is None:
        raise ValueError(f"--data must name the test data: {folder} has no record of its data. Got none.")
    check_loadable(name, "--data", "cmcl.evaluate or cmcl.calibration")
    test = evenly_spaced(_load(name, root, values), limit)
    check_takes(ensemble, test, "--data")
    return align_classes(ensemble, test)


def load_ood(name: str, own_root: Path | None, root: Path | None, options: Sequence[str] | None) -> "Dataset":
    """The out-of-distribution images of --ood."""
    values = common.parse_pairs(options, "--ood-option")
    check_loadable(name, "--ood", "cmcl.evaluate")
    if own_root is None and name == "folder":
        raise ValueError("--ood-root must name the folder of --ood folder, apart from --root. Got none.")
    if own_root is not None:
        return _load(name, own_root, values)
    return search_root(lambda place: _load(name, place, values), root, f"--ood {name}")


def _load(name: str, root: Path | None, options: dict[str, Any]) -> "Dataset":
    """A test split; a folder of the user's own images need not have train/ beside test/, nor test/."""
    from ..data import load

    whole = None if root is None else root.expanduser()
    if name != "folder" or whole is None or (whole / "train").is_dir():
        return load(name, split="test", root=whole, **options)
    inside = whole / "test"
    return replace(load(name, root=inside if inside.is_dir() else whole, **options), split="test")


def check_loadable(name: str | None, option: str, function: str) -> None:
    """Raise for arrays, which only Python can pass."""
    if name in DATASETS and not DATASETS[name].on_disk:
        raise ValueError(
            f"{option} must be a dataset that can be loaded by name. Got {name}, which exist in Python only. "
            f"Use {function} there."
        )


def check_takes(ensemble: "Ensemble", data: "Dataset", option: str) -> None:
    """Raise if the ensemble does not take images of this shape."""
    shape = " x ".join(map(str, data.images.shape[1:]))
    own = {"--data": "--option", "--ood": "--ood-option"}[option]
    hint = f"{own} mode=L or mode=RGB and {own} size=[HEIGHT,WIDTH]"
    try:
        with common.input_errors(""):
            ensemble.predict(data.images[:1])
    except ValueError as error:
        raise ValueError(
            f"{option} must name images that the ensemble takes. Got {shape} from {data.source}: "
            f"{first_line(error)}. Name another dataset, or convert a folder of images with {hint}."
        ) from error


def align_classes(ensemble: "Ensemble", data: "Dataset") -> "Dataset":
    """The same images with labels numbered as the ensemble numbers classes of the same names."""
    import torch

    from ..data.registry import nearest

    names = None if ensemble.classes is None else list(ensemble.classes)
    count = ensemble.predict(data.images[:1]).probs.shape[1]  # a user's own network does not record it
    if names is None or len(names) > count:  # more names than outputs belong to something else
        if count != len(data.classes):
            raise ValueError(
                f"{data.source} must have {count} classes, as the ensemble, which has no class names. "
                f"Got {len(data.classes)}."
            )
        return data
    if names == list(data.classes):
        return data
    if unknown := [name for name in data.classes if name not in names]:
        got = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        message = f"{data.source} must have classes that the ensemble knows by name. Got {got}."
        raise ValueError(f"{message} {nearest(unknown[0], names)}")
    numbers = torch.arange(max(256, len(data.classes)))  # pixels to ignore keep their value
    numbers[: len(data.classes)] = torch.tensor([names.index(name) for name in data.classes])
    targets = numbers[data.targets.long()].to(data.targets.dtype)
    return replace(data, targets=targets, classes=tuple(names))
