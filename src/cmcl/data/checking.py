"""Look at a set as it lies on disk: counts, histogram, channel means, and whether it is the published one."""

from pathlib import Path
from typing import Any

import torch

from .dataset import IGNORE, Dataset, split_validation
from .fetching import file_md5
from .files import data_root
from .preprocess import MeanStd
from .published import PUBLISHED, Published
from .sets import load

Report = dict[str, Any]


def check(
    name: str,
    *,
    root: str | Path | None = None,
    validation: float | None = None,
    seed: int = 0,
    **options: Any,
) -> Report:
    """Load all splits of a set and describe them, in JSON values.

    Returns:
        `counts` by split; `classes`: name -> training images (pixels, for segmentation); `mean` and `std`
        of the training split on a 0..1 scale; `checksums` of the splits' content; `published`: whether
        counts, classes, means and deviations are those of the published set (None where they are not
        known); `notes` for people: what differs, or that only the files' bytes do, which is fine.
    """
    splits = _load_splits(name, root, options)
    if validation is not None:
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
        differences = _differences(report, PUBLISHED[name])
        report["published"] = not differences
        report["notes"] = differences or _other_bytes(PUBLISHED[name], data_root(root))
    return report


def _load_splits(name: str, root: str | Path | None, options: dict[str, Any]) -> dict[str, Dataset]:
    splits = {"train": load(name, root=root, **options)}
    try:
        splits["test"] = load(name, split="test", root=root, **options)
    except FileNotFoundError:
        if name != "folder":  # only a user's own folder may be without a test split
            raise
    return splits


def _histogram(dataset: Dataset) -> dict[str, int]:
    labels = dataset.targets.flatten()
    counts = torch.bincount(labels[labels != IGNORE], minlength=len(dataset.classes))
    return dict(zip(dataset.classes, counts.tolist(), strict=True))


def _channel_statistics(dataset: Dataset) -> tuple[list[float], list[float]]:
    tensors = MeanStd().fit(dataset.images).state()[1]
    scale = 255 if dataset.images.dtype == torch.uint8 else 1
    return (tensors["mean"] / scale).flatten().tolist(), (tensors["std"] / scale).flatten().tolist()


def _differences(report: Report, facts: Published) -> list[str]:
    """What is not as published; nothing for the published set."""
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
    return found


def _other_bytes(facts: Published, root: Path) -> list[str]:
    present = {name: root / name for name in facts.files if (root / name).is_file()}
    others = [name for name, path in present.items() if file_md5(path) != facts.files[name]]
    if not others:
        return []
    return [f"other bytes than the published files: {', '.join(others)}"]


def _list(counts: Any) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in counts.items())
