"""Pictures for the report: the test images that tell most about the members, with all their answers.

M members, N images, C classes.
"""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .. import metrics
from .._files import replacing
from ..data.dataset import Dataset, default_ignore_index, not_ignored

FORMAT = 1
DISPUTED, SCENES = 12, 6  # pictures of a classifier, and of a segmentation


def write_gallery(folder: Path, probs: Tensor, test: Dataset, pictures: Tensor) -> None:
    """Write gallery.json and small PNG files.

    Args:
        folder: where to.
        probs: what the members answered (M, N, C, ...).
        test: what they were asked, with its targets.
        pictures: the same images as people see them (N, channels, height, width).
    """
    folder.mkdir(parents=True, exist_ok=True)
    dense = test.targets.ndim > 1
    chosen = (
        _scenes(probs, test) if dense else disputed(probs).argsort(descending=True, stable=True)[:DISPUTED]
    )
    describe = _scene if dense else _disputed
    items = [describe(folder, i, probs[:, i], test.targets[i], pictures[i]) for i in chosen.tolist()]
    for item in items if test.groups else ():
        item["group"] = test.groups[item["index"]]  # type: ignore[index]
    kind = "segmentation" if dense else "classification"
    content = {"format": FORMAT, "task": kind, "classes": list(test.classes), "items": items}
    with replacing(folder / "gallery.json") as part:
        part.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def disputed(probs: Tensor) -> Tensor:
    """How surely the members contradict each other, (N,): confidences multiplied, summed over such pairs."""
    confidence, answer = probs.double().max(2)  # (M, N)
    votes = confidence.new_zeros(probs.shape[1], probs.shape[2]).scatter_add_(1, answer.T, confidence.T)
    return (votes.sum(1).square() - votes.square().sum(1)) / 2


def _scenes(probs: Tensor, test: Dataset) -> Tensor:
    """The images on which the members' errors differ most, one of a group."""
    errors = _pixel_errors(probs, test.targets)  # (M, N)
    order = (errors.amax(0) - errors.amin(0)).argsort(descending=True, stable=True).tolist()
    groups: dict[Any, int] = {}
    for i in order:
        groups.setdefault(test.groups[i] if test.groups else i, i)
    return torch.tensor(list(groups.values())[:SCENES])


def _pixel_errors(probs: Tensor, targets: Tensor) -> Tensor:
    """Share of wrong pixels, (M, N)."""
    counts = not_ignored(targets, default_ignore_index(targets, probs.shape[2]))
    wrong = (probs.max(2).indices != targets) & counts
    return wrong.flatten(2).sum(2) / counts.flatten(1).sum(1).clamp(min=1)


def _disputed(folder: Path, i: int, probs: Tensor, target: Tensor, picture: Tensor) -> dict[str, Any]:
    entropy = metrics.entropy(probs[:, None])[:, 0]
    mean, member_answers = probs.mean(0), probs.max(1)
    return {
        "index": i,
        "image": _save(folder / f"{i}.png", picture),
        "target": int(target),
        "members": [
            {"answer": int(a), "confidence": _round(c), "entropy": _round(h)}
            for a, c, h in zip(member_answers.indices, member_answers.values, entropy, strict=True)
        ],
        "ensemble": {"answer": int(mean.argmax()), "confidence": _round(mean.max())},
        "chosen": int(entropy.argmin()),
    }


def _scene(folder: Path, i: int, probs: Tensor, target: Tensor, picture: Tensor) -> dict[str, Any]:
    entropy = metrics.entropy(probs[:, None])[:, 0]
    errors = _pixel_errors(probs[:, None], target[None])[:, 0]
    answers = probs.max(1).indices  # (M, H, W)
    return {
        "index": i,
        "image": _save(folder / f"{i}.png", picture),
        "truth": _save(folder / f"{i}-truth.png", _grey(target, probs.shape[1])),
        "members": [
            {
                "mask": _save(folder / f"{i}-member{m}.png", _grey(answers[m], probs.shape[1])),
                "error": _round(100 * errors[m]),
                "entropy": _round(entropy[m]),
            }
            for m in range(len(probs))
        ],
        "chosen": int(entropy.argmin()),
    }


def _grey(labels: Tensor, classes: int) -> Tensor:
    """Classes as shades from black to white; pixels without a class in between."""
    shades = (labels.double() * 255 / (classes - 1)).clamp(0, 255)
    return shades.where(not_ignored(labels, default_ignore_index(labels, classes)), 128.0).to(torch.uint8)[
        None
    ]


def _save(path: Path, picture: Tensor) -> str:
    if picture.is_floating_point():  # whatever its scale, from its darkest to its brightest
        low, high = picture.aminmax()
        picture = ((picture - low) * 255 / (high - low).clamp(min=1e-12)).to(torch.uint8)
    pixels = picture.permute(1, 2, 0).cpu().numpy()  # (H, W, channels)
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels[..., :3]).save(path, optimize=True)
    return path.name


def _round(value: Tensor) -> float:
    return round(float(value), 4)
