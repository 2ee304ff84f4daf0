"""`cmcl evaluate`, `predict`, `calibrate` and `export`: use a trained ensemble.

M members, N images, C classes.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from .._files import read_json, replacing
from ..data.registry import DATASETS
from . import common
from .loading import Saved, count_classes, find_saved, load_ood, load_test

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibration import Threshold
    from ..data.dataset import Dataset
    from ..data.images import ImageReader, Read
    from ..ensemble import Ensemble, Prediction
    from ..metrics import Accumulator

COLUMNS = {  # metric -> its column
    "top1": ">top-1",
    "picked": ">picked",
    "oracle": ">oracle",
    "member": ">member",
    "ece": ">ECE",
    "scaled_ece": ">scaled ECE",
    "entropy": ">entropy",
    "ood_entropy": ">OOD entropy",
    "auroc": ">AUROC",
}
SUFFIXES = {".onnx": "onnx", ".pt2": "torch"}  # of an exported file -> its format
BATCH = 250
PIXELS = 2**24  # values of the images in a batch of `cmcl predict`, about


def evaluate(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Run folders or saved ensembles.")],
    data: common.Data = None,
    root: common.Root = None,
    option: common.DataOption = None,
    ood: Annotated[
        str | None, Option(metavar="DATASET", help="Out-of-distribution dataset, such as svhn.")
    ] = None,
    ood_root: Annotated[Path | None, Option(help="Folder of --ood, if it is not --root.")] = None,
    ood_option: Annotated[
        common.Pairs, Option(metavar="NAME=VALUE", help="Option of the OOD dataset, such as size=[32,32].")
    ] = None,
    limit: common.Limit = None,
    batch_size: Annotated[int, Option(min=1, help="Images in a batch.")] = BATCH,
    flip: common.Flip = None,
    network: common.OwnNetwork = None,
    logits: common.OwnLogits = None,
    device: common.Device = "auto",
    as_json: common.AsJson = False,
) -> None:
    """Measure trained ensembles on test images.

    Errors and calibration in percent, entropy in nats. ECE is that of the averaged prediction, scaled ECE
    the same after temperature scaling. --ood adds the entropy on out-of-distribution images and the AUROC of
    detecting them by it.
    """
    from ..data.dataset import evenly_spaced

    if ood is None and (ood_root or ood_option):
        raise ValueError("--ood must name the dataset of --ood-root and --ood-option. Got none.")
    device = common.check_device(device)
    ood_data = None if ood is None else evenly_spaced(load_ood(ood, ood_root, root, ood_option), limit)
    results: list[dict[str, Any]] = []
    for run in runs:
        saved = find_saved(run)
        ensemble = saved.load(root=root, device=device, network=network, logits=logits, flip=flip)
        test = load_test(saved, ensemble, data, root, option, limit)
        if ood_data is not None:
            count_classes(ensemble, ood_data, "--ood", "--ood-option")
        about = {"run": str(run), "name": saved.name, "data": data or saved.data, "ood": ood}
        results.append(about | {"examples": len(test)} | _measure(ensemble, test, ood_data, batch_size))
    if as_json:
        common.print_json(results)
        return
    for name in dict.fromkeys(result["data"] for result in results):
        _print_scores([result for result in results if result["data"] == name])
    if unscaled := [result for result in results if result["temperature"] is None]:
        common.say_unscaled(unscaled[0]["run"], data, network)


def _print_scores(results: list[dict[str, Any]]) -> None:
    """The ensembles evaluated on one dataset; seeds of one recipe have a mean."""
    first = results[0]
    keys = [key for key in COLUMNS if any(result.get(key) is not None for result in results)]
    title = f"{first['data']}: {first['examples']:,} test images, errors and ECE in %"
    title += f", OOD: {first['ood']}" if first["ood"] else ""
    rows = [[result["name"], *(common.number(result[key]) for key in keys)] for result in results]
    if len(rows) > 1 and len({result["name"].rpartition("--seed")[0] for result in results}) == 1:
        columns = [[result[key] for result in results] for key in keys]
        means = (None if None in column else common.number(fmean(column)) for column in columns)
        rows.append(["mean", *means])
    common.print_table(("ensemble", *(COLUMNS[key] for key in keys)), rows, title=title, best=1)


def _measure(
    ensemble: "Ensemble", test: "Dataset", ood_data: "Dataset | None", batch: int
) -> dict[str, float | None]:
    from .. import metrics
    from ..reproduction.evaluate import scored
    from ..training.scoring import errors

    ood = None if ood_data is None else ood_data.images
    scores, scaled = scored(
        ensemble, test.images, test.targets, ood=ood, curves=ood is not None, batch_size=batch, title="test"
    )
    found = scores.compute()
    after = None if ensemble.temperature is None else metrics.percent(scaled.compute()["ece"])
    values: dict[str, float | None] = {**errors(scores), "ece": metrics.percent(found["ece"])}
    values |= {"scaled_ece": after, "temperature": ensemble.temperature}
    return values | {key: round(found[key], 6) for key in ("entropy", "ood_entropy", "auroc") if key in found}


def calibrate(
    run: common.Run,
    data: common.Data = None,
    root: common.Root = None,
    option: common.DataOption = None,
    risk: Annotated[float, Option(min=1e-9, help="Error rate to allow among the predictions made.")] = 0.01,
    confidence: Annotated[float, Option(help="Confidence level of the guarantee.")] = 0.95,
    score: Annotated[
        str, Option(help="Uncertainty to abstain by: confidence, mean_entropy, ...")
    ] = "confidence",
    limit: common.Limit = None,
    out: Annotated[Path | None, Option("--out", "-o", help="JSON file that gets the threshold.")] = None,
    network: common.OwnNetwork = None,
    logits: common.OwnLogits = None,
    device: common.Device = "auto",
    as_json: common.AsJson = False,
) -> None:
    """Fit and save the temperature; fit a threshold to abstain by.

    Fits both on every second test image and tests them on the others. The temperature is saved with the
    ensemble, for predict, evaluate and export. With the given confidence, at most the given fraction of the
    predictions made is wrong. This holds for new images from the same distribution, if risk, confidence and
    score are chosen beforehand. Exit code 1: no threshold reaches the risk.
    Segmentation has a temperature and no threshold.
    """
    from .. import calibration
    from ..reproduction.evaluate import reliability_bins
    from ..serialization import saved_checksum

    calibration.check_guarantee(risk, confidence, score)
    common.check_writable(out, "--out")
    saved = find_saved(run)
    common.check_writable(saved.folder, "RUN", folder=True)
    device = common.check_device(device)
    ensemble = saved.load(root=root, device=device, network=network, logits=logits)
    test = load_test(saved, ensemble, data, root, option, limit)
    threshold = None
    if test.targets.ndim > 1:
        if out is not None:
            raise ValueError("--out must be left out for segmentation, which has no threshold. Got a file.")
        temperature, tested, scaled = _calibrate_pixels(ensemble, test)
    else:
        goal = {"risk": risk, "confidence": confidence, "score": score}
        temperature, threshold, tested, scaled = _calibrate_images(ensemble, test, **goal)
        predictor = {"weights": saved_checksum(saved.folder), "flip": ensemble.flip_at_test}
        threshold = threshold.model_copy(update=predictor)
    same_data = limit is None and not option and data in (None, saved.data)
    bins = reliability_bins(scaled)
    found = {"temperature": temperature, "scaled_ece": tested["scaled_ece"], "scaled_reliability": bins}
    _save_temperature(saved.folder, found, in_record=same_data)
    if as_json:
        shown = threshold and threshold.to_json()
        common.print_json({"temperature": temperature, "threshold": shown, "tested": tested})
    else:
        common.say(f"temperature {temperature:.3g}, saved in {saved.folder}")
        text = f"On {tested['examples']:,} other images: "
        if threshold is not None:
            common.say(f"threshold: {threshold}.")
            text += f"coverage {tested['predicted'] / tested['examples']:.1%}, {tested['errors']} of "
            text += f"{tested['predicted']:,} predictions wrong; "
        common.say(
            f"{text}ECE {tested['ece']:.2f} %, after temperature scaling {tested['scaled_ece']:.2f} %."
        )
    if threshold is not None and out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as part:
            part.write_text(json.dumps(threshold.to_json(), indent=1) + "\n", encoding="utf-8")
    if threshold is not None and not threshold.reached:
        common.note(f"no threshold reaches a risk of {risk:g}: the ensemble would abstain on every image.")
        raise typer.Exit(common.FAILED)


def _calibrate_images(
    ensemble: "Ensemble", test: "Dataset", **goal: Any
) -> "tuple[float, Threshold, dict[str, Any], Accumulator]":
    """Temperature and threshold of every second image, and how they do on the others."""
    from .. import calibration, metrics

    probs = ensemble.predict(test.images, batch_size=BATCH).member_probs.cpu()
    fitted, other, truth = probs[:, ::2], probs[:, 1::2], test.targets[1::2]
    threshold = calibration.fit_threshold(fitted, test.targets[::2], **goal)
    temperature = calibration.fit_temperature(fitted, test.targets[::2])
    scaled = metrics.Accumulator()
    scaled.update(calibration.apply_temperature(other, temperature)[None], truth)
    predictions = calibration.decide(other, threshold)
    made = predictions != calibration.ABSTAIN
    tested = {
        "examples": len(truth),
        "predicted": int(made.sum()),
        "errors": int((predictions[made] != truth[made]).sum()),
        "ece": metrics.percent(metrics.ece(other, truth)),
        "scaled_ece": metrics.percent(scaled.compute()["ece"]),
    }
    return temperature, threshold, tested, scaled


def _calibrate_pixels(ensemble: "Ensemble", test: "Dataset") -> "tuple[float, dict[str, Any], Accumulator]":
    """The temperature of every second image's pixels, and how it does on the others."""
    from .. import metrics
    from ..reproduction.evaluate import scored
    from ..training.scoring import held_out_temperature

    ensemble.temperature = held_out_temperature(ensemble, test[::2], batch_size=BATCH)
    found, other = ensemble.temperature, test[1::2]
    scores, scaled = scored(ensemble, other.images, other.targets, batch_size=BATCH)
    ece, after = (metrics.percent(one.compute()["ece"]) for one in (scores, scaled))
    return found, {"examples": len(other), "ece": ece, "scaled_ece": after}, scaled


def _save_temperature(folder: Path, found: dict[str, Any], *, in_record: bool) -> None:
    """Save the temperature with the ensemble; in the record of its run, too, if it has the same test data."""
    from ..reproduction.record import SCALED, read
    from ..serialization import save_temperature, saved_checksum

    save_temperature(folder, found["temperature"])
    for path in (folder / "record.json", folder.absolute().parent / "record.json"):
        record = read(path)
        if record is not None and record.weights == saved_checksum(folder):
            kept = {key: value for key, value in record.calibration.items() if key not in SCALED}
            calibration = kept | (found if in_record else {})
            record.model_copy(update={"calibration": calibration}).save(path)


def export(
    run: common.Run,
    out: Annotated[Path, Option("--out", "-o", help="File to write: model.onnx or model.pt2.")],
    format: Annotated[
        str | None, Option(help="onnx, or torch for torch.export. Default: by the suffix of --out.")
    ] = None,
    root: common.Root = None,
    example: Annotated[
        Path | None, Option(metavar="FILE.npy", help="Inputs to compare on. Default: test images.")
    ] = None,
    limit: Annotated[int, Option(min=2, help="Number of test examples to compare on.")] = 200,
    network: common.OwnNetwork = None,
    logits: common.OwnLogits = None,
    as_json: common.AsJson = False,
) -> None:
    """Write an ensemble to one file: ONNX or torch.export.

    Preprocessing, members and averaging are one graph, compared with PyTorch on real images. Input: uint8
    images (batch, channels, height, width). Outputs: probs, member_probs, entropy, chosen.
    """
    from ..export import export as write
    from ..serialization import saved_checksum

    by_suffix = SUFFIXES.get(out.suffix)
    if (format or by_suffix) is None:
        raise ValueError(f"--out must end in .onnx or .pt2, or pass --format. Got {out.name!r}.")
    if None not in (format, by_suffix) and format != by_suffix:
        raise ValueError(f"--out must have the suffix of --format {format}. Got {out.name!r} ({by_suffix}).")
    common.check_writable(out, "--out")
    saved = find_saved(run)
    inputs = _example(example, saved, root, limit)
    ensemble = saved.load(root=root, network=network, logits=logits)
    done = write(
        ensemble, out, inputs, format=format or str(by_suffix), checksum=saved_checksum(saved.folder)
    )
    if as_json:
        common.print_json(done._asdict() | {"path": str(done.path)})
        return
    common.say(f"{done.path}: {done.path.stat().st_size / 2**20:.1f} MiB, input {done.input}")
    common.say(f"agrees with PyTorch on {done.examples:,} inputs; largest differences:")
    for name, value in done.differences.items():
        common.say(f"  {name:<12}  {value:.1e}")


def _example(path: Path | None, saved: Saved, root: Path | None, count: int) -> "Tensor":
    """The inputs of --example, or test images."""
    import numpy as np
    import torch

    from ..data import load

    if path is None and saved.data:
        return load(saved.data, split="test", root=root)[:count].images
    if path is None:
        raise ValueError(
            f"--example must name a .npy file: {saved.folder} does not record its data. Got none."
        )
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, EOFError, TypeError) as error:
        raise ValueError(f"--example must be a .npy file of numbers. Got {path} ({error}).") from None


def predict(
    run: common.Run,
    images: Annotated[
        list[Path] | None, Argument(metavar="IMAGE", help="Image files, or folders of them.")
    ] = None,
    listed: Annotated[
        Path | None, Option("--from", metavar="FILE", help="File with a path in each line; - for stdin.")
    ] = None,
    workers: Annotated[
        int | None, Option(min=0, help="Processes that read files. Default: up to 4, if there are many.")
    ] = None,
    root: common.Root = None,
    resize: Annotated[bool, Option("--resize", help="Resize images to the ensemble's size.")] = False,
    threshold: Annotated[
        Path | None, Option(metavar="FILE", help="Abstain by the threshold of `cmcl calibrate -o FILE`.")
    ] = None,
    flip: common.Flip = None,
    network: common.OwnNetwork = None,
    logits: common.OwnLogits = None,
    device: common.Device = "auto",
    as_json: Annotated[bool, Option("--json", help="Print a line of JSON for each image.")] = False,
) -> None:
    """Predict the classes of image files.

    Shows the predictions of the ensemble and of each member, with confidence and entropy, and the most
    confident member. Reads files and prints rows batch by batch, so memory does not limit their number.
    """
    from ..data.images import read_many

    given = _image_paths(images or [])
    if (listed is None) == (not given):
        raise ValueError("name IMAGES, or a list of them with --from. Got both, or neither.")
    saved = find_saved(run)
    abstain = None if threshold is None else _read_threshold(threshold, saved.folder)
    device = common.check_device(device)
    ensemble = saved.load(root=root, device=device, network=network, logits=logits, flip=flip)
    if abstain is not None and abstain.flip not in (None, ensemble.flip_at_test):
        own, got = ("--flip", "--no-flip") if abstain.flip else ("--no-flip", "--flip")
        raise ValueError(f"--threshold {threshold} must be used with {own}, as calibrated. Got {got}.")
    if workers is None:
        workers = min(4, os.cpu_count() or 1) if listed is not None or len(given) > BATCH else 0
    failed = False
    with nullcontext(given) if listed is None else _lines(listed) as paths:
        found = read_many(_reader(ensemble, saved.data, resize), paths, workers)
        for batch in _batches(found, any_size=_is_dense(ensemble)):
            rows = _predict(ensemble, batch, run, abstain)
            failed |= any("error" in row for row in rows)
            _print_lines(rows) if as_json else _print_predictions(rows)
    if failed:
        raise typer.Exit(common.FAILED)


@contextmanager
def _lines(file: Path) -> Iterator[Iterator[Path]]:
    """The paths in a file, one at a time."""
    with nullcontext(sys.stdin) if str(file) == "-" else file.open(encoding="utf-8") as lines:
        yield (Path(line.rstrip("\n")) for line in lines if line.strip())


def _image_paths(given: list[Path]) -> list[Path]:
    """The files, with a folder replaced by the images directly in it, by name."""
    from ..data.images import image_files

    found: list[Path] = []
    for path in given:
        inside = image_files(path) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path} must hold images. Got none; folders inside it are not searched.")
        if not path.exists():
            raise FileNotFoundError(f"{path} must be an image file or a folder of images. Got no such file.")
        found += inside
    return found


def _read_threshold(path: Path, folder: Path) -> "Threshold":
    """The threshold in a file; one of other predictions would guarantee nothing."""
    from ..calibration import Threshold
    from ..serialization import saved_checksum

    hint = f"Write it with: cmcl calibrate {folder} -o {path}."
    try:
        threshold = Threshold.from_json(read_json(path))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--threshold must be a file of `cmcl calibrate`. Got {path}: {error} {hint}"
        ) from None
    if threshold.weights not in (None, saved_checksum(folder)):  # None: written by the library
        raise ValueError(f"--threshold must be calibrated for {folder}. Got {path}, of other weights. {hint}")
    if not threshold.reached:
        common.note(f"{path}: {threshold}.")
    return threshold


def _reader(ensemble: "Ensemble", data: str | None, resize: bool) -> "ImageReader":
    """Reads images as the ensemble takes them."""
    from ..data.images import ImageReader

    channels, size = _image_shape(ensemble, data)
    if resize and size is None:
        raise ValueError(
            "--resize must know a size, and this ensemble records none. Resize the images yourself."
        )
    needed = None if resize or _is_dense(ensemble) else size
    return ImageReader("L" if channels == 1 else "RGB", size if resize else None, needed)


def _is_dense(ensemble: "Ensemble") -> bool:
    """Whether it is one of our networks that predict a class per pixel, of images of any size."""
    from ..networks import BUILDERS

    network = BUILDERS.get(getattr(ensemble.members[0], "name", ""))
    return network is not None and network.dense


def _batches(found: "Iterable[Read]", *, any_size: bool) -> "Iterator[list[Read]]":
    """Files in order. The images of a batch have one size; without `any_size`, those of all batches."""
    from ..data.images import wrong_size

    batch: list[Read] = []
    size: tuple[int, ...] = ()  # of the images so far; with `any_size` of those in the batch
    pixels = 0
    for path, image in found:
        if not isinstance(image, str) and size and image.shape != size and not any_size:
            image = str(wrong_size(path, image.shape[1:], size[1:]))
        shape = size if isinstance(image, str) else image.shape
        if batch and (len(batch) == BATCH or pixels > PIXELS or (size and shape != size)):
            yield batch
            batch, pixels = [], 0
        size = shape
        pixels += 0 if isinstance(image, str) else image.size
        batch.append((path, image))
    if batch:
        yield batch


def _image_shape(ensemble: "Ensemble", data: str | None) -> tuple[int, tuple[int, int] | None]:
    """Channels of an image, and its (height, width) where it is known."""
    known = DATASETS[data].shape if data in DATASETS else None
    if shape := ensemble.image_shape or known:
        channels, height, width = shape
        return channels, (height, width)
    options = getattr(ensemble.members[0], "options", {})
    size = options.get("size")
    mean = None if ensemble.transform is None else ensemble.transform.state()[1].get("mean")
    fitted = 3 if mean is None or mean.ndim < 3 else mean.shape[-3]
    return options.get("channels") or fitted, (size, size) if size else None


def _predict(
    ensemble: "Ensemble", batch: "Sequence[Read]", run: Path, threshold: "Threshold | None"
) -> list[dict[str, Any]]:
    """A row of JSON values for each file: its prediction, or what is wrong with it."""
    import numpy as np
    import torch

    rows = {i: {"image": str(path), "error": e} for i, (path, e) in enumerate(batch) if isinstance(e, str)}
    read = {i: image for i, (_, image) in enumerate(batch) if not isinstance(image, str)}
    if read:
        images = torch.from_numpy(np.stack(list(read.values())))  # (N, C, H, W)
        height, width = images.shape[2:]
        must = f"images must have the size that {run} was trained on. Got {height} x {width};"
        with common.input_errors(must):
            found = ensemble.predict(images, batch_size=BATCH)
        names, count = ensemble.classes or (), found.probs.shape[1]
        known = names if len(names) <= count else ()
        classes = [*known, *(str(i) for i in range(len(known), count))]
        extra = [{}] * len(read) if threshold is None else _abstentions(found.member_probs, threshold)
        rows |= {i: _row(batch[i][0], found, n, classes) | extra[n] for n, i in enumerate(read)}
    return [rows[i] for i in range(len(batch))]


def _abstentions(member_probs: "Tensor", threshold: "Threshold") -> list[dict[str, Any]]:
    """The uncertainty of each image by the threshold's score, and whether the ensemble abstains."""
    from ..calibration import ABSTAIN, decide, uncertainty

    if member_probs.ndim > 3:
        raise ValueError("--threshold must be used where an image has one class. Got a class per pixel.")
    scores = uncertainty(member_probs, threshold.score).tolist()  # not rounded: compared with the file's
    abstained = (decide(member_probs, threshold) == ABSTAIN).tolist()
    return [{"score": score, "abstained": away} for score, away in zip(scores, abstained, strict=True)]


def _row(path: Path, found: "Prediction", i: int, classes: list[str]) -> dict[str, Any]:
    members, chosen = found.member_probs[:, i], int(found.chosen[i])  # (M, C, ...)
    dense = members.ndim > 2
    each = [
        _top_class(probs, classes) | {"entropy": round(entropy, 6)}
        for probs, entropy in zip(members, found.entropy[:, i].tolist(), strict=True)
    ]
    # Dense: the prediction of the most confident member, as in the paper's figure 3.
    prediction = _top_class(members[chosen] if dense else found.probs[i], classes)
    averaged = {} if dense else {"probs": [round(p, 6) for p in found.probs[i].tolist()]}
    return {"image": str(path), "prediction": prediction, **averaged, "chosen": chosen, "members": each}


def _top_class(probs: "Tensor", classes: list[str]) -> dict[str, Any]:
    """The most probable class (C,); for pixels (C, H, W), fractions of classes and the mean confidence."""
    confidence, index = probs.max(0)
    if probs.ndim > 1:
        fractions = index.flatten().bincount(minlength=len(probs)) / index.numel()
        names = dict(zip(classes, (round(100 * x, 6) for x in fractions.tolist()), strict=True))
        return {"percent_of_pixels": names, "confidence": round(confidence.mean().item(), 6)}
    return {"class": classes[int(index)], "index": int(index), "confidence": round(confidence.item(), 6)}


def _print_lines(rows: list[dict[str, Any]]) -> None:
    typer.echo("\n".join(json.dumps(row, allow_nan=False) for row in rows))


def _print_predictions(predictions: list[dict[str, Any]]) -> None:
    rows: list[tuple[Any, ...]] = []
    for found in (one for one in predictions if "error" not in one):
        mark = "abstains" if found.get("abstained") else ""
        rows.append((found["image"], "ensemble", *_words(found["prediction"]), None, mark))
        for m, member in enumerate(found["members"]):
            mark = "most confident" if m == found["chosen"] else ""
            rows.append(("", f"member {m}", *_words(member), f"{member['entropy']:.3f}", mark))
    if rows:
        common.print_table(("image", "model", "prediction", ">confidence", ">entropy", ""), rows)
    for reason in (one["error"] for one in predictions if "error" in one):
        common.note(reason)


def _words(top: dict[str, Any]) -> tuple[str, str]:
    confidence = f"{top['confidence']:.3f}"
    if "class" in top:
        return top["class"], confidence
    return ", ".join(f"{name} {part:.0f} %" for name, part in top["percent_of_pixels"].items()), confidence
