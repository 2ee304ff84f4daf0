"""Describe a dataset on disk: counts, histogram, channel means, and whether it is the published one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._files import digest
from .dataset import Dataset, default_ignore_index, not_ignored, split_validation
from .registry import DATASETS, DatasetInfo, data_root, dataset_info, load
from .transforms import MeanStd

Report = dict[str, Any]


def check(
    name: str,
    *,
    root: str | Path | None = None,
    validation: float | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Load all splits of a dataset and describe them, in JSON values.

    Args:
        name: a key of `DATASETS`.
        root: folder that holds the datasets.
        validation: hold out this fraction of the training split.
        seed: of the held-out split.
        options: arguments of the dataset's own `load`; a `seed` in here is the dataset's.

    Returns:
        `counts` by split; `classes`: name -> training images (pixels, for segmentation); `mean` and `std`
        of the training split on a 0..1 scale; `checksums` of the splits' content; `published`: whether
        they are those of the published dataset, as far as these are known (for SVHN counts, classes, mean
        and std; None for other datasets); `notes`: what differs, or that only the files' bytes do, which
        is fine.
    """
    splits = _load_splits(name, root, options or {})
    if validation is not None:
        if "validation" in splits:
            message = f"{name} must have no validation split on disk for one to be held out. Got both."
            raise ValueError(f"{message} Leave out validation, or move that split away.")
        splits["train"], splits["validation"] = split_validation(splits["train"], validation, seed)
    train = splits["train"]
    statistics = MeanStd().fit(train.images).state()[1]
    report: Report = {
        "dataset": name,
        "counts": {split: len(dataset) for split, dataset in splits.items()},
        "classes": _histogram(train),
        "mean": (statistics["mean"] / 255).flatten().tolist(),
        "std": (statistics["std"] / 255).flatten().tolist(),
        "checksums": {split: dataset.checksum for split, dataset in splits.items()},
        "published": None,
        "notes": [],
    }
    if train.groups is not None:
        report["groups"] = {group: train.groups.count(group) for group in sorted(set(train.groups))}
    info = DATASETS[name]
    if info.files and validation is None:
        differences = _differences(report, info)
        report["published"] = not differences
        report["notes"] = differences or _other_bytes(info.files, data_root(root))
    return report


def _load_splits(name: str, root: str | Path | None, options: Mapping[str, Any]) -> dict[str, Dataset]:
    info, splits = dataset_info(name), {}
    for split in info.splits:
        try:
            splits[split] = load(name, split=split, root=root, **options)
        except FileNotFoundError:
            if info.sizes or split == "train":  # only a user's own folder may lack the others
                raise
    return splits


def _histogram(dataset: Dataset) -> dict[str, int]:
    labels = dataset.targets
    labels = labels[not_ignored(labels, default_ignore_index(labels, len(dataset.classes)))]
    counts = torch.bincount(labels, minlength=len(dataset.classes))
    return dict(zip(dataset.classes, counts.tolist(), strict=True))


def _differences(report: Report, info: DatasetInfo) -> list[str]:
    """What is not as published; the checksums, where they are known, have the last word."""
    found = []
    if report["counts"] != info.sizes:
        published, here = (
            ", ".join(f"{n:,} {split}" for split, n in counts.items())
            for counts in (info.sizes, report["counts"])
        )
        found.append(f"the published dataset has {published} images; here are {here}")
    elif tuple(report["classes"].values()) != info.class_counts:
        found.append(f"the published classes have {info.class_counts} training images")
    for statistic, expected in (("mean", info.mean), ("std", info.std)):
        if not np.allclose(report[statistic], expected, rtol=0, atol=2e-4):
            found.append(f"the published dataset has {statistic} {expected}")
    others = [split for split, known in info.checksums.items() if report["checksums"][split] != known]
    if others and not found:
        found.append(f"some images or labels of {' and '.join(others)} are not the published ones")
    return found


def _other_bytes(files: Mapping[str, str], root: Path) -> list[str]:
    present = {name: root / name for name in files if (root / name).is_file()}
    others = [name for name, path in present.items() if digest(path, "md5") != files[name]]
    return [f"other bytes than the published files: {', '.join(others)}"] if others else []
