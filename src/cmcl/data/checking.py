"""Look at a set as it lies on disk: counts, histogram, channel means, and whether it is the published one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .._files import digest
from .dataset import Dataset, counting, ignored, split_validation
from .files import data_root
from .preprocess import MeanStd
from .published import CHECKSUMS, PUBLISHED, Published
from .sets import load, splits_of

Report = dict[str, Any]


def check(
    name: str,
    *,
    root: str | Path | None = None,
    validation: float | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Load all splits of a set and describe them, in JSON values.

    Args:
        name: a set on disk or one that needs no file.
        root: folder that holds the sets.
        validation: hold out this share of the training split.
        seed: decides what is held out.
        options: what the set's own `load` takes; a `seed` in here is the set's.

    Returns:
        `counts` by split; `classes`: name -> training images (pixels, for segmentation); `mean` and `std`
        of the training split on a 0..1 scale; `checksums` of the splits' content; `published`: whether
        they are those of the published set, as far as these are known (for SVHN counts, classes, mean and
        std; None for other sets); `notes` for people: what differs, or that only the files' bytes do, which
        is fine.
    """
    splits = _load_splits(name, root, options or {})
    if validation is not None:
        if "validation" in splits:
            message = f"{name} must have no validation split on disk for one to be held out. Got both."
            raise ValueError(f"{message} Leave out validation, or move that split away.")
        splits["train"], splits["validation"] = split_validation(splits["train"], validation, seed)
    train = splits["train"]
    mean, std = _channel_statistics(train)
    report: Report = {
        "set": name,
        "counts": {split: len(dataset) for split, dataset in splits.items()},
        "classes": _histogram(train),
        "mean": mean,
        "std": std,
        "checksums": {split: dataset.checksum for split, dataset in splits.items()},
        "published": None,
        "notes": [],
    }
    if train.groups is not None:
        report["groups"] = {group: train.groups.count(group) for group in sorted(set(train.groups))}
    if name in PUBLISHED and validation is None:
        report["notes"] = _differences(report, PUBLISHED[name])
        report["published"] = not report["notes"]
        if report["published"]:
            report["notes"] = _other_bytes(PUBLISHED[name], data_root(root))
    return report


def _load_splits(name: str, root: str | Path | None, options: Mapping[str, Any]) -> dict[str, Dataset]:
    if name == "arrays":
        message = "a set to check must be on disk or need no file. Got arrays, which live in Python."
        raise ValueError(f"{message} Look at them there, with cmcl.data.from_arrays(images, targets).")
    splits = {}
    for split in splits_of(name):
        try:
            splits[split] = load(name, split=split, root=root, **options)
        except FileNotFoundError:
            if name != "folder" or split == "train":  # only a user's own folder may be without the others
                raise
    return splits


def _histogram(dataset: Dataset) -> dict[str, int]:
    labels = dataset.targets
    labels = labels[counting(labels, ignored(labels, len(dataset.classes)))]
    counts = torch.bincount(labels, minlength=len(dataset.classes))
    return dict(zip(dataset.classes, counts.tolist(), strict=True))


def _channel_statistics(dataset: Dataset) -> tuple[list[float], list[float]]:
    tensors = MeanStd().fit(dataset.images).state()[1]
    scale = 255 if dataset.images.dtype == torch.uint8 else 1
    return (tensors["mean"] / scale).flatten().tolist(), (tensors["std"] / scale).flatten().tolist()


def _differences(report: Report, facts: Published) -> list[str]:
    """What is not as published, in the figures that people know."""
    found = []
    if report["counts"] != facts.counts:
        found.append(
            f"the published set has {_list(facts.counts)} images; here are {_list(report['counts'])}"
        )
    elif tuple(report["classes"].values()) != facts.classes:
        found.append(f"the published classes have {facts.classes} training images")
    for statistic, published in (("mean", facts.mean), ("std", facts.std)):
        if any(abs(a - b) > 2e-4 for a, b in zip(report[statistic], published, strict=True)):
            found.append(f"the published set has {statistic} {published}")
    known = CHECKSUMS.get(report["set"], {})  # without them, counts, classes, means and deviations decide
    others = " and ".join(split for split in known if report["checksums"][split] != known[split])
    if others and not found:
        found.append(
            f"some images or labels of {others} are not the published ones, though the figures agree"
        )
    return found


def _other_bytes(facts: Published, root: Path) -> list[str]:
    present = {name: root / name for name in facts.files if (root / name).is_file()}
    others = [name for name, path in present.items() if digest(path, "md5") != facts.files[name]]
    if not others:
        return []
    return [f"other bytes than the published files: {', '.join(others)}"]


def _list(counts: Any) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in counts.items())
