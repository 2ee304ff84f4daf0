"""Run folders, saved ensembles and test data, as evaluate, predict, calibrate and export load them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .._files import read_json
from ..data.registry import DATASETS
from ..telling import first_line
from .common import import_function, parse_pairs

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


def load_ensemble(
    folder: Path,
    *,
    root: Path | None,
    device: str = "cpu",
    network: str | None = None,
    logits: str | None = None,
) -> "Ensemble":
    """A saved ensemble; `network` and `logits` are the user's MODULE:FUNCTION, where it needs them."""
    from ..data.transforms import refit
    from ..serialization import Missing, load

    ensemble = load(
        folder,
        network=None if network is None else import_function(network, "--network must be"),
        output=None if logits is None else import_function(logits, "--logits must be", "picks the logits"),
        device=device,
    )
    if isinstance(ensemble.transform, Missing):
        config = ensemble.transform.config
        what = f"{_fitted_on(config)}, on which the ensemble's preprocessing is fitted again,"
        ensemble.transform = search_root(lambda place: refit(config, place), root, what)
    ensemble.classes = classes_of(folder)
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
        pass
    try:
        return read(default)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{what} must be in {root} or {default}. Got neither: {error}") from None


def load_test(folder: Path, data: str | None, root: Path | None, options: Sequence[str] | None) -> "Dataset":
    """The test split of --data, or of the dataset that the ensemble was trained on.

    A folder of the user's own images need not have train/ and test/.
    """
    from ..data import load

    name, values = data or data_of(folder), parse_pairs(options, "--option")
    if name is None:
        raise ValueError(
            f"--data must name the test data: {folder} does not record its training data. Got none."
        )
    check_loadable(name, "--data", "cmcl.evaluate or cmcl.calibration")
    whole = None if root is None else root.expanduser()
    if name != "folder" or whole is None or (whole / "train").is_dir():
        return load(name, split="test", root=root, **values)
    inside = whole / "test"
    return replace(load(name, root=inside if inside.is_dir() else whole, **values), split="test")


def load_ood(name: str, own_root: Path | None, root: Path | None, options: Sequence[str] | None) -> "Dataset":
    """The out-of-distribution images of --ood."""
    from ..data import load

    values = parse_pairs(options, "--ood-option")
    check_loadable(name, "--ood", "cmcl.evaluate")
    if own_root is None and name == "folder":
        raise ValueError("--ood-root must name the folder of --ood folder, apart from --root. Got none.")
    if own_root is None:
        return search_root(
            lambda place: load(name, split="test", root=place, **values), root, f"--ood {name}"
        )
    own_root = own_root.expanduser()
    if name != "folder":
        return load(name, split="test", root=own_root, **values)
    test = own_root / "test"  # labels do not matter, so a folder without train/ and test/ will do
    return load(name, split="train", root=test if test.is_dir() else own_root, **values)


def check_loadable(name: str | None, option: str, function: str) -> None:
    """Raise for arrays, which only Python can pass."""
    if name == "arrays":
        raise ValueError(
            f"{option} must be a dataset that can be loaded by name. Got arrays, which exist in Python only. "
            f"Use {function} there."
        )


def check_takes(ensemble: "Ensemble", data: "Dataset", option: str) -> None:
    """Raise if the ensemble does not take images of this shape."""
    import torch

    try:
        ensemble.predict(data.images[:1])
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, IndexError) as error:
        shape = " x ".join(map(str, data.images.shape[1:]))
        own = {"--data": "--option", "--ood": "--ood-option"}[option]
        raise ValueError(
            f"{option} must name images that the ensemble takes. Got {shape} from {data.source}: "
            f"{first_line(error)}. Name another dataset, or convert a folder of images with {own} mode=L or "
            f"mode=RGB and {own} size=[HEIGHT,WIDTH]."
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


def data_of(folder: Path) -> str | None:
    """The name of the dataset that a saved ensemble was trained on, if its run folder records it."""
    for place in (folder, folder.absolute().parent):
        if (place / "recipe.json").is_file():
            return _text(_fields(place / "recipe.json").get("data"))
        if (place / "record.json").is_file():
            recipe = _fields(place / "record.json").get("recipe")
            return _text(recipe.get("data")) if isinstance(recipe, dict) else None
    return _fitted_on(_fields(folder / "config.json").get("transform"))


def _fitted_on(transform: Any) -> str | None:
    """The dataset that a saved transform was fitted on."""
    for key in ("source", "recipe", "name"):
        transform = transform.get(key) if isinstance(transform, dict) else None
    return _text(transform)


def classes_of(folder: Path) -> list[str] | None:
    """The class names of a saved ensemble, if it or its run folder has them."""
    if isinstance(own := _fields(folder / "config.json").get("classes"), list) and own:
        return [str(name) for name in own]
    data = data_of(folder)
    if data in DATASETS and DATASETS[data].classes:
        return list(DATASETS[data].classes)
    gallery = folder.absolute().parent / "gallery" / "gallery.json"
    names = _fields(gallery).get("classes") if gallery.is_file() else None
    if not isinstance(names, list) or names == [str(i) for i in range(len(names))]:
        return None  # arrays without names are named by number
    return [str(name) for name in names]


def _fields(path: Path) -> dict[str, Any]:
    values = read_json(path)
    return values if isinstance(values, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
