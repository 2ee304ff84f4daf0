"""`cmcl evaluate`: the errors of a trained ensemble, and how it takes what it has never seen.

M members, N images, C classes.
"""

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Data, DataOption, Device, OwnNetwork, OwnOutput, Root, Run
from .runs import (
    check_takes,
    data_of,
    find_ensembles,
    label_of,
    load_test,
    number_as,
    open_ensemble,
    refuse_arrays,
    seek,
)
from .shared import check_device, number, parse_pairs, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ..data.dataset import Dataset
    from ..ensemble import Ensemble

COLUMNS = {  # what is measured -> its column
    "top1": ">top-1 %",
    "picked": ">picked %",
    "oracle": ">oracle %",
    "member": ">members alone %",
    "ece": ">ECE %",
    "entropy": ">entropy",
    "ood_entropy": ">entropy, unseen",
    "auroc": ">AUROC",
}


def evaluate(
    run: Run,
    root: Root = None,
    ood: Annotated[
        str | None, typer.Option(metavar="SET", help="A set of another kind, such as svhn.")
    ] = None,
    ood_root: Annotated[
        Path | None, typer.Option(help="Folder that holds --ood, if it is not --root.")
    ] = None,
    ood_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of --ood, such as size=[32,32].")
    ] = None,
    data: Data = None,
    option: DataOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many images of each set, from all over it.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 250,
    network: OwnNetwork = None,
    output: OwnOutput = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure a trained ensemble on test images.

    Errors and calibration in percent, entropy in nats. With --ood also the entropy on images of another kind,
    and how well it tells the two apart (AUROC).
    """
    from ..data.dataset import evenly_spaced

    if ood is None and (ood_root or ood_option):
        raise ValueError("--ood must name the set of --ood-root and --ood-option. Got none.")
    places = find_ensembles(run)
    name = data or data_of(places[0])
    if name is None:
        raise ValueError(f"--data must name the set to test on: {run} does not say what it was trained on.")
    device = check_device(device)
    test = load_test(name, root, parse_pairs(option or [], "--option"))
    outside = (
        None if ood is None else evenly_spaced(_load_outside(ood, ood_root, root, ood_option or []), limit)
    )
    part = evenly_spaced(test, limit)
    results = []
    for place in places:
        ensemble = open_ensemble(place, root=root, device=device, network=network, output=output)
        check_takes(ensemble, part, "--data", name)
        if outside is not None:
            check_takes(ensemble, outside, "--ood", ood or "")
        named = number_as(ensemble, part)
        results.append(_measure(ensemble, label_of(place), named, outside, batch_size))
    keys = [key for key in COLUMNS if key in results[0]]
    whole: dict[str, Any] = {
        "run": str(run),
        "data": name,
        "examples": len(part),
        "ood": ood,
        **{key: round(fmean(result[key] for result in results), 6) for key in keys},
        "ensembles": [
            {"ensemble": str(place)} | result for place, result in zip(places, results, strict=True)
        ],
    }
    if as_json:
        print_json(whole)
        return
    rows = [[label_of(p), *(number(r[key]) for key in keys)] for p, r in zip(places, results, strict=True)]
    rows += [["mean", *(number(whole[key]) for key in keys)]] if len(rows) > 1 else []
    of_all = f" (of {len(test):,})" if len(part) < len(test) else ""
    title = f"{name}: {len(part):,}{of_all} test images" + (f", unseen: {ood}" if ood else "")
    print_table(("ensemble", *(COLUMNS[key] for key in keys)), rows, title=title)


def _load_outside(name: str, own_root: Path | None, root: Path | None, options: list[str]) -> "Dataset":
    from ..data import load

    values = parse_pairs(options, "--ood-option")
    refuse_arrays(name, "--ood", "cmcl.evaluate")
    if own_root is None and name == "folder":
        raise ValueError("--ood-root must name the folder of --ood folder, apart from --root. Got none.")
    if own_root is None:
        return seek(lambda folder: load(name, split="test", root=folder, **values), root, f"--ood {name}")
    own_root = own_root.expanduser()
    if name != "folder":
        return load(name, split="test", root=own_root, **values)
    test = own_root / "test"  # its classes do not matter, so a folder that is not split will do
    return load(name, split="train", root=test if test.is_dir() else own_root, **values)


def _measure(
    ensemble: "Ensemble", label: str, test: "Dataset", outside: "Dataset | None", batch: int
) -> dict[str, float]:
    from .. import metrics
    from ..data.dataset import default_ignore_index

    scores = metrics.Accumulator(curves=outside is not None)
    for probs, targets in zip(_probs(ensemble, test, batch, label), test.targets.split(batch), strict=True):
        scores.update(probs, targets, ignore_index=default_ignore_index(targets, probs.shape[2]))
    for probs in () if outside is None else _probs(ensemble, outside, batch, f"{label}, unseen"):
        scores.update_ood(probs)
    found = scores.compute()
    values = {
        name: metrics.percent(found[f"{name}_error"]) for name in ("top1", "picked", "oracle", "member")
    }
    values["ece"] = metrics.percent(found["ece"])
    return values | {key: round(found[key], 6) for key in ("entropy", "ood_entropy", "auroc") if key in found}


def _probs(ensemble: "Ensemble", data: "Dataset", batch_size: int, title: str) -> "Iterator[Tensor]":
    """The members' probabilities (M, B, C, ...) of each batch, with a bar on a terminal."""
    from ..telling import watched

    for part in watched(data.images.split(batch_size), title):
        yield ensemble.predict(part).member_probs.cpu()
