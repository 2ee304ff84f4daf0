"""Run folders and saved ensembles: what is in a folder that the user names."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..data.registry import DATASETS
from ..telling import first_line
from .shared import import_function, note

if TYPE_CHECKING:
    from ..data.dataset import Dataset
    from ..ensemble import Ensemble

Found = TypeVar("Found")


def find_ensembles(run: Path) -> list[Path]:
    """The saved ensembles of a run folder, one a seed; or the folder itself, if it is one."""
    if found := _ensembles_of(run):
        return found
    if (run / "checkpoints").is_dir():
        raise ValueError(
            f"{run} must hold a finished run. Got one that was interrupted. Go on with the command that "
            "began it: `cmcl train RECIPE --resume` and its other options."
        )
    message = f"{run} must be a run folder of `cmcl train` or a saved ensemble. Got neither. {_meant(run)}"
    raise FileNotFoundError(message.strip())


def _ensembles_of(run: Path) -> list[Path]:
    for place in (run, run / "ensemble"):
        if (place / "config.json").is_file():
            return [place]
    seeds = {path.parent.name.removeprefix("seed"): path for path in run.glob("seed*/ensemble")}
    return [seeds[seed] for seed in sorted(filter(str.isdecimal, seeds), key=int)]


def _meant(run: Path) -> str:
    """Of a folder of runs one of them, of a name that is not there the nearest that is."""
    from ..data.registry import nearest

    if run.is_dir():
        inside = [path for path in sorted(run.iterdir()) if path.is_dir() and _ensembles_of(path)]
        others = f", one of {len(inside)} runs in it" if len(inside) > 1 else ""
        return f"Name {inside[0]}{others}." if inside else ""
    beside = [path.name for path in run.parent.iterdir() if path.is_dir()] if run.parent.is_dir() else []
    return nearest(run.name, sorted(beside)) if beside and not run.exists() else ""


def first_ensemble(run: Path) -> Path:
    """The one ensemble of a run folder; of several the first, and the user is told."""
    place, *others = find_ensembles(run)
    if others:
        note(f"{run} holds {len(others) + 1} ensembles. This is the first, {label_of(place)}.")
    return place


def open_ensemble(
    place: Path,
    *,
    root: Path | None,
    device: str = "cpu",
    network: str | None = None,
    output: str | None = None,
) -> "Ensemble":
    """A saved ensemble; `network` and `output` are the user's MODULE:FUNCTION, where it needs them."""
    from ..data.transforms import refit
    from ..serialization import Missing, load

    ensemble = load(
        place,
        network=None if network is None else import_function(network, "--network must be"),
        output=None if output is None else import_function(output, "--output must be", "picks the logits"),
        device=device,
    )
    if isinstance(ensemble.transform, Missing):
        config = ensemble.transform.config
        what = f"{_fitted_on(config)}, on which the ensemble's preprocessing is fitted again,"
        ensemble.transform = seek(lambda folder: refit(config, folder), root, what)
    ensemble.classes = classes_of(place)
    return ensemble


def seek(read: Callable[[Path], Found], root: Path | None, what: str) -> Found:
    """What `read` finds under --root or, since that may hold the user's own images, in the default place."""
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


def load_test(name: str, root: Path | None, options: dict[str, Any]) -> "Dataset":
    """A set to test on; of one's own images also a folder that is not split, or has no train/."""
    from ..data import load

    refuse_arrays(name, "--data", "cmcl.evaluate or cmcl.calibration")
    whole = None if root is None else root.expanduser()
    if name != "folder" or whole is None or (whole / "train").is_dir():
        return load(name, split="test", root=root, **options)
    inside = whole / "test"
    return replace(load(name, root=inside if inside.is_dir() else whole, **options), split="test")


def refuse_arrays(name: str | None, option: str, function: str) -> None:
    """A set that only Python can pass."""
    if name == "arrays":
        raise ValueError(
            f"{option} must be a set that is on disk or needs no file. Got arrays, which live in Python. "
            f"Use {function} there."
        )


def data_of(ensemble: Path) -> str | None:
    """The name of the set that an ensemble was trained on, as far as its folders tell."""
    for folder in (ensemble, *ensemble.absolute().parents[:2]):  # seed0/ensemble lies two below recipe.json
        if (folder / "recipe.json").is_file():
            return _text(_read(folder / "recipe.json").get("data"))
        if (folder / "record.json").is_file():
            return _text(_read(folder / "record.json").get("recipe", {}).get("data"))
    return _fitted_on(_read(ensemble / "config.json").get("transform") or {})


def _fitted_on(transform: dict[str, Any]) -> str | None:
    recipe = (transform.get("source") or {}).get("recipe") or {}
    return _text(recipe.get("name"))


def classes_of(ensemble: Path) -> list[str] | None:
    """The names of the classes that it answers, as far as it knows them or its folders tell."""
    if own := _read(ensemble / "config.json").get("classes"):
        return [str(name) for name in own]
    data = data_of(ensemble)
    if data in DATASETS and DATASETS[data].classes:
        return list(DATASETS[data].classes)
    gallery = ensemble.absolute().parent / "gallery" / "gallery.json"
    names = _read(gallery).get("classes") if gallery.is_file() else None
    if not isinstance(names, list) or names == [str(i) for i in range(len(names))]:
        return None  # arrays without names have the numbers themselves for names
    return [str(name) for name in names]


def check_takes(ensemble: "Ensemble", data: "Dataset", option: str, name: str) -> None:
    """Whether the ensemble takes such images; if not, who named them and what can be done about it."""
    import torch

    try:
        ensemble.predict(data.images[:1])
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, IndexError) as error:
        shape = " x ".join(map(str, data.images.shape[1:]))
        raise ValueError(
            f"{option} must name images of the kind that the ensemble takes. Got {name} ({data.source}), "
            f"{shape}: {first_line(error)}. {_other_images(option, name)}"
        ) from error


def _other_images(option: str, name: str) -> str:
    if name != "folder":
        return "Name another set."
    own = {"--data": "--option", "--ood": "--ood-option"}[option]
    return f"Change them by {own} mode=L (grey) or mode=RGB, and by {own} size=[HEIGHT,WIDTH]."


def number_as(ensemble: "Ensemble", data: "Dataset") -> "Dataset":
    """The same images; classes are numbered as the ensemble numbers those of the same names, if known."""
    import torch

    from ..data.registry import nearest

    names = None if ensemble.classes is None else list(ensemble.classes)
    count = ensemble.predict(data.images[:1]).probs.shape[1]  # a network of one's own does not say it
    if names is None or len(names) > count:  # others than its own
        if count != len(data.classes):
            raise ValueError(
                f"{data.source} must have {count} classes, as many as the ensemble answers, which does not "
                f"know their names. Got {len(data.classes)}."
            )
        return data
    if names == list(data.classes):
        return data
    if unknown := [name for name in data.classes if name not in names]:
        got = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        message = f"{data.source} must have classes that the ensemble knows by name. Got {got}."
        raise ValueError(f"{message} {nearest(unknown[0], names)}")
    numbers = torch.arange(max(256, len(data.classes)))  # what is no class, a pixel to ignore, stays
    numbers[: len(data.classes)] = torch.tensor([names.index(name) for name in data.classes])
    targets = numbers[data.targets.long()].to(data.targets.dtype)
    return replace(data, targets=targets, classes=tuple(names))


def label_of(ensemble: Path) -> str:
    """What to call it: the run's name, and its seed where there are several."""
    if ensemble.name != "ensemble":
        return ensemble.name
    run = ensemble.absolute().parent
    return f"{run.parent.name}/{run.name}" if run.name.startswith("seed") else run.name


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON. Got something else ({error}).") from None
    return values if isinstance(values, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
