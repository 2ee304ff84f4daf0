"""`cmcl predict`: what an ensemble, and each of its members, says about image files.

M members, N images, C classes.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Device, OwnNetwork, OwnOutput, Root, Run
from .runs import SETS, classes_of, data_of, first_ensemble, open_ensemble
from .shared import check_device, print_json, print_table, users_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from ..ensemble import Ensemble
    from ..prediction import Prediction


def predict(
    run: Run,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES", help="Image files.")],
    root: Root = None,
    resize: Annotated[
        bool, typer.Option("--resize", help="Bring images to the size that is needed.")
    ] = False,
    network: OwnNetwork = None,
    output: OwnOutput = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Ask a trained ensemble about image files.

    Shows each member's class, confidence and entropy, the most confident member, and the ensemble's answer.
    """
    for path in images:
        if not path.is_file():
            raise FileNotFoundError(f"{path} must be an image file. Got no such file.")
    place = first_ensemble(run)
    ensemble = open_ensemble(place, root=root, device=check_device(device), network=network, output=output)
    pixels = _read(images, _shape(ensemble, data_of(place)), resize, dense=_is_dense(ensemble))
    height, width = pixels.shape[2:]
    with users_shapes(f"images must have the size that {run} was trained on. Got {height} x {width};"):
        found = ensemble.predict(pixels, batch_size=250)
    names, count = classes_of(place) or [], found.probs.shape[1]
    classes = names if len(names) == count else [str(i) for i in range(count)]
    answers = [_answer(*one) for one in _each(images, found, classes)]
    if as_json:
        print_json(answers)
        return
    _print(answers)


def _shape(ensemble: "Ensemble", data: str | None) -> tuple[int, int | None, int | None]:
    """Channels and size of an image, as far as they are known."""
    if data in SETS:
        return SETS[data][0]
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
) -> "Tensor":
    """All images as one tensor (N, C, H, W), uint8."""
    import numpy as np
    import torch

    from ..data.pictures import collect, read_image

    channels, height, width = shape
    size = (height, width) if height and width else None
    if resize and size is None:
        raise ValueError("--resize must know a size, and this ensemble does not tell one. Resize the images.")
    mode = "L" if channels == 1 else "RGB"
    arrays = collect(lambda path: read_image(path, size if resize else None, mode), paths)
    for path, array in zip(paths, arrays, strict=True):
        wanted = arrays[0].shape[1:] if dense or size is None else size
        if array.shape[1:] != wanted:
            got, needed = (f"{h} x {w}" for h, w in (array.shape[1:], wanted))
            raise ValueError(f"{path} must be {needed} pixels (height x width). Got {got}. Pass --resize.")
    return torch.from_numpy(np.stack(arrays))


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
    return {"image": str(path), "answer": answer, "chosen": chosen, "members": each}


def _said(probs: "Tensor", classes: list[str]) -> dict[str, Any]:
    """The likeliest class (C,); of pixels (C, H, W), the share of each class and the mean confidence."""
    confidence, index = probs.max(0)
    if probs.ndim > 1:
        share = index.flatten().bincount(minlength=len(probs)) / index.numel()
        names = dict(zip(classes, (round(100 * x, 6) for x in share.tolist()), strict=True))
        return {"percent_of_pixels": names, "confidence": round(confidence.mean().item(), 6)}
    return {"class": classes[int(index)], "index": int(index), "confidence": round(confidence.item(), 6)}


def _print(answers: list[dict[str, Any]]) -> None:
    rows: list[tuple[Any, ...]] = []
    for answer in answers:
        rows.append((answer["image"], "ensemble", *_words(answer["answer"]), None, ""))
        for m, member in enumerate(answer["members"]):
            mark = "most confident" if m == answer["chosen"] else ""
            rows.append(("", f"member {m}", *_words(member), f"{member['entropy']:.3f}", mark))
    print_table(("image", "who", "answer", ">confidence", ">entropy", ""), rows)


def _words(said: dict[str, Any]) -> tuple[str, str]:
    confidence = f"{said['confidence']:.3f}"
    if "class" in said:
        return said["class"], confidence
    return ", ".join(f"{name} {share:.0f} %" for name, share in said["percent_of_pixels"].items()), confidence
