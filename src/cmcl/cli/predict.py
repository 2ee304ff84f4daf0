"""`cmcl predict`: what an ensemble, and each of its members, says about image files.

M members, N images, C classes.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.registry import DATASETS
from .options import AsJson, Device, OwnNetwork, OwnOutput, Root, Run
from .runs import data_of, first_ensemble, open_ensemble
from .shared import FAILED, check_device, note, print_json, print_table, users_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibration import Threshold
    from ..data.images import Pixels
    from ..ensemble import Ensemble, Prediction


def predict(
    run: Run,
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGES", help="Image files, or folders that hold some.")
    ],
    root: Root = None,
    resize: Annotated[
        bool, typer.Option("--resize", help="Bring images to the size that is needed.")
    ] = False,
    threshold: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Abstain by what `cmcl reject -o FILE` found for this ensemble."),
    ] = None,
    network: OwnNetwork = None,
    output: OwnOutput = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Ask a trained ensemble about image files.

    Shows each member's class, confidence and entropy, the most confident member, and the ensemble's answer.
    """
    paths = _files(images)
    place = first_ensemble(run)
    limit = None if threshold is None else _read_threshold(threshold, place)
    ensemble = open_ensemble(place, root=root, device=check_device(device), network=network, output=output)
    pixels, failed = _read(paths, _shape(ensemble, data_of(place)), resize, dense=_is_dense(ensemble))
    answers = _ask(ensemble, pixels, run, limit) if pixels else {}
    told = [answers.get(path) or {"image": str(path), "error": failed[path]} for path in paths]
    if as_json:
        print_json(told)
    else:
        _print(list(answers.values()), list(failed.values()))
    if failed:
        raise typer.Exit(FAILED)


def _files(given: list[Path]) -> list[Path]:
    """The files, and in the place of a folder the images directly in it, by name."""
    from ..data.images import image_files

    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = image_files(path)
            if not inside:
                raise ValueError(f"{path} must hold images. Got none; folders inside it are not looked into.")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise FileNotFoundError(f"{path} must be an image file or a folder of images. Got no such file.")
    return found


def _read_threshold(path: Path, place: Path) -> "Threshold":
    """The threshold in a file, unless it is another ensemble's: of this one it would promise nothing."""
    from .._files import open_binary
    from ..calibration import Threshold
    from ..serialization import saved_checksum

    cure = f"Write it with: cmcl reject {place} -o {path}"
    with open_binary(path, hint=f"{cure}.") as file:
        data = file.read()
    try:
        threshold = Threshold.from_json(json.loads(data))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--threshold must be a file of `cmcl reject`. Got {path}: {error}") from None
    if threshold.weights not in (None, saved_checksum(place)):  # None: made by the library, which cannot know
        got = f"Got {path}, of an ensemble with other weights"
        raise ValueError(f"--threshold must be calibrated for {place}. {got}. {cure}.")
    if not threshold.reached:
        note(f"{path}: {threshold}.")
    return threshold


def _ask(
    ensemble: "Ensemble",
    pixels: dict[Path, "Pixels"],
    run: Path,
    threshold: "Threshold | None",
) -> dict[Path, dict[str, Any]]:
    """What the ensemble says about each image."""
    import numpy as np
    import torch

    images = torch.from_numpy(np.stack(list(pixels.values())))  # (N, C, H, W)
    height, width = images.shape[2:]
    with users_shapes(f"images must have the size that {run} was trained on. Got {height} x {width};"):
        found = ensemble.predict(images, batch_size=250)
    names, count = ensemble.classes or (), found.probs.shape[1]
    known = names if len(names) <= count else ()  # more are not its own
    classes = [*known, *(str(i) for i in range(len(known), count))]
    answers = {one[0]: _answer(*one) for one in _each(list(pixels), found, classes)}
    if threshold is None:
        return answers
    judged = _judge(found.member_probs, threshold)
    return {path: answer | more for (path, answer), more in zip(answers.items(), judged, strict=True)}


def _judge(member_probs: "Tensor", threshold: "Threshold") -> list[dict[str, Any]]:
    """How unsure the ensemble is of each image, by the threshold's score, and whether that is too much."""
    from ..calibration import ABSTAIN, decide, uncertainty

    if member_probs.ndim > 3:
        raise ValueError("--threshold must be used where an image has one answer. Got an answer per pixel.")
    scores = uncertainty(member_probs, threshold.score).tolist()  # not rounded: compared with the file's
    abstained = (decide(member_probs, threshold) == ABSTAIN).tolist()
    return [{"score": score, "abstained": away} for score, away in zip(scores, abstained, strict=True)]


def _shape(ensemble: "Ensemble", data: str | None) -> tuple[int, int | None, int | None]:
    """Channels and size of an image, as far as they are known."""
    if data in DATASETS and (shape := DATASETS[data].shape):
        return shape
    options: dict[str, Any] = getattr(ensemble.members[0], "options", {})
    return options.get("channels") or _channels(ensemble), options.get("size"), options.get("size")


def _channels(ensemble: "Ensemble") -> int:
    """As the images had that were standardised for a network of the user's own."""
    learned = {} if ensemble.transform is None else ensemble.transform.state()[1]
    mean = learned.get("mean")
    return 3 if mean is None or mean.ndim < 3 else mean.shape[-3]


def _is_dense(ensemble: "Ensemble") -> bool:
    return getattr(ensemble.members[0], "name", "") == "fcn"  # takes images of any size


def _read(
    paths: list[Path], shape: tuple[int, int | None, int | None], resize: bool, *, dense: bool
) -> tuple[dict[Path, "Pixels"], dict[Path, str]]:
    """The images (C, H, W), all of one size, and why the others cannot be asked about."""
    from ..data.images import outcomes, read_image, stored_size

    channels, height, width = shape
    size = (height, width) if height and width else None
    if resize and size is None:
        raise ValueError("--resize must know a size, and this ensemble does not tell one. Resize the images.")
    needed = None if dense or resize else size

    def read(path: Path) -> "Pixels":
        stored = stored_size(path)
        if needed and sorted(stored) != sorted(needed):  # sorted: a photo may be stored on its side
            raise _wrong_size(path, stored, needed)  # before its pixels, which may fill the memory, are read
        array = read_image(path, size if resize else None, "L" if channels == 1 else "RGB")
        if needed and array.shape[1:] != needed:
            raise _wrong_size(path, array.shape[1:], needed)
        return array

    found = dict(zip(paths, outcomes(read, paths), strict=True))
    failed = {path: str(one) for path, one in found.items() if isinstance(one, Exception)}
    pixels = {path: one for path, one in found.items() if not isinstance(one, Exception)}
    sizes = [array.shape[1:] for array in pixels.values()]
    first = sizes[0] if sizes else ()  # where any size will do, all must have the same
    for path in [path for path, array in pixels.items() if array.shape[1:] != first]:
        failed[path] = str(_wrong_size(path, pixels.pop(path).shape[1:], first))
    return pixels, failed


def _wrong_size(path: Path, got: tuple[int, ...], needed: tuple[int, ...]) -> ValueError:
    came, must = (" x ".join(map(str, size)) for size in (got, needed))
    return ValueError(f"{path} must be {must} pixels (height x width). Got {came}. Pass --resize.")


def _each(paths: list[Path], found: "Prediction", classes: list[str]) -> Any:
    """Image by image: path, averaged answer (C, ...), members' answers (M, C, ...), entropies, chosen."""
    for i, path in enumerate(paths):
        yield (
            path,
            found.probs[i],
            found.member_probs[:, i],
            found.entropy[:, i],
            int(found.chosen[i]),
            classes,
        )


def _answer(
    path: Path, probs: "Tensor", members: "Tensor", entropy: "Tensor", chosen: int, classes: list[str]
) -> dict[str, Any]:
    dense = members.ndim > 2
    each = [
        _said(own, classes) | {"entropy": round(doubt, 6)}
        for own, doubt in zip(members, entropy.tolist(), strict=True)
    ]
    # Dense: the most confident member answers, as in the paper's figure 3.
    answer = _said(members[chosen] if dense else probs, classes)
    averaged = {} if dense else {"probs": [round(p, 6) for p in probs.tolist()]}
    return {"image": str(path), "answer": answer, **averaged, "chosen": chosen, "members": each}


def _said(probs: "Tensor", classes: list[str]) -> dict[str, Any]:
    """The likeliest class (C,); of pixels (C, H, W), the share of each class and the mean confidence."""
    confidence, index = probs.max(0)
    if probs.ndim > 1:
        share = index.flatten().bincount(minlength=len(probs)) / index.numel()
        names = dict(zip(classes, (round(100 * x, 6) for x in share.tolist()), strict=True))
        return {"percent_of_pixels": names, "confidence": round(confidence.mean().item(), 6)}
    return {"class": classes[int(index)], "index": int(index), "confidence": round(confidence.item(), 6)}


def _print(answers: list[dict[str, Any]], reasons: list[str]) -> None:
    rows: list[tuple[Any, ...]] = []
    for answer in answers:
        mark = "abstains" if answer.get("abstained") else ""
        rows.append((answer["image"], "ensemble", *_words(answer["answer"]), None, mark))
        for m, member in enumerate(answer["members"]):
            mark = "most confident" if m == answer["chosen"] else ""
            rows.append(("", f"member {m}", *_words(member), f"{member['entropy']:.3f}", mark))
    if rows:
        print_table(("image", "who", "answer", ">confidence", ">entropy", ""), rows)
    for reason in reasons:
        note(reason)


def _words(said: dict[str, Any]) -> tuple[str, str]:
    confidence = f"{said['confidence']:.3f}"
    if "class" in said:
        return said["class"], confidence
    return ", ".join(f"{name} {share:.0f} %" for name, share in said["percent_of_pixels"].items()), confidence
