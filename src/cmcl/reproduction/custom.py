"""`cmcl.record`: the record of a custom run, for any network and any inputs, as `cmcl report` shows it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from .. import _checks
from .._files import parse_json, replacing
from .._messages import without_addresses
from ..data import from_arrays
from ..data.dataset import IGNORE, Dataset, tensor_checksum
from ..ensemble import Ensemble
from ..serialization import saved_checksum
from ..training import Options, Result
from ..training.batches import Data, tensors
from ..training.config import Recipe
from ..training.monitor import finite
from ..training.preflight import as_data, fitting
from . import environment
from .evaluate import evaluate_run, predictions
from .gallery import GalleryBuilder
from .record import Network, Record

PIXELS = (torch.uint8, torch.float32)
CHANNELS = (1, 3, 4)  # of images that can be shown


def record(
    folder: str | Path,
    ensemble: Ensemble,
    test: Data,
    *,
    recipe: Recipe,
    result: Result,
    ood: Dataset | Tensor | None = None,
    options: Options | None = None,
    ignore_index: int | None = None,
) -> Record:
    """Evaluate a trained ensemble; write record.json, ensemble/ and, for images, gallery/ to its run folder.

    Args:
        folder: the `out` of `fit`; its name becomes the record's.
        ensemble: as `fit`, or a custom training loop, left it.
        test: inputs that it was not trained on, with their targets: a `Dataset`, (inputs, targets) or a
            `DataLoader` of such pairs.
        recipe, result, options: the arguments and the result of `fit`. After a custom training loop, a
            `Recipe` that describes it, and `Result(steps=..., seconds=...)`, with `rows` for curves.
        ood: out-of-distribution inputs.
        ignore_index: a target of `test`, if a pair, that counts for nothing; 255 of pixels is ignored anyway.
    """
    _check_ensemble(ensemble)
    folder, recipe, seed = Path(folder), fitting(recipe, ensemble), result.seed
    size = result.batch_size  # of a DataLoader, if one determined it; no recipe describes unequal parts
    recipe = replace(recipe, batch_size=size) if size and size % recipe.accumulate == 0 else recipe
    rows = [_plain(row, seed) for row in result.rows]
    data, ood_images = _test_data(ensemble, test, ignore_index), _ood_images(ood)
    images, targets = tensors(data)
    gallery = GalleryBuilder(data, data.images) if isinstance(data, Dataset) else None
    found = evaluate_run(ensemble, images, targets, ood=ood_images, seed=seed, gallery=gallery)
    ensemble.save(folder / "ensemble")
    made = Record(
        name=folder.name,
        recipe=recipe.to_json(),
        recipe_hash=recipe.hash,
        seed=seed,
        full_length=recipe.steps is None or result.steps >= recipe.steps,
        full_test=True,
        test_examples=len(images),
        checksums={"test": tensor_checksum({"images": images, "targets": targets})},
        network=None if recipe.network else described(ensemble.members),
        task=result.task,
        trained_on=result.data,
        weights=saved_checksum(folder / "ensemble"),
        ood=ood.source if isinstance(ood, Dataset) else None if ood is None else "arrays",
        overlap=result.overlap,
        steps=result.steps,
        seconds=round(result.seconds, 3),
        **environment.current(options or Options(), result.mesh),
        **found,
    )
    if gallery is not None:
        gallery.write(folder / "gallery")
    made.save(folder / "record.json")
    if rows:
        _write_rows(folder / "telemetry.jsonl", rows)
    return made


def _plain(row: Any, seed: int) -> dict[str, Any]:
    """A row of telemetry as JSON values: tensors and numpy numbers become plain ones."""
    try:
        plain = json.loads(json.dumps({"seed": seed} | row, default=lambda value: value.tolist()))
    except (TypeError, AttributeError) as error:
        raise TypeError(f"rows must be dicts of JSON values, tensors or arrays. Got {error}.") from None
    if not all(isinstance(plain.get(key), kind) for key, kind in (("epoch", int | float), ("seed", int))):
        raise ValueError(f"rows must have a number 'epoch', and whole numbers for 'seed'. Got {plain}.")
    return {key: finite(value) for key, value in plain.items()}


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Telemetry for the report's curves; earlier epochs of the same seed stay."""
    first, seeds = min(row["epoch"] for row in rows), {row["seed"] for row in rows}

    def stays(line: bytes) -> bool:
        try:
            row = parse_json(line, path)
            return row["seed"] in seeds and row["epoch"] < first
        except (ValueError, TypeError, KeyError):  # cut short by a kill
            return False

    old = filter(stays, path.read_bytes().splitlines() if path.is_file() else [])
    lines = [*(line.decode() for line in old), *(json.dumps(row, allow_nan=False) for row in rows)]
    with replacing(path) as part:
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _check_ensemble(ensemble: Any) -> None:
    if not isinstance(ensemble, Ensemble):
        raise TypeError(
            f"ensemble must be one Ensemble. Got {_checks.kind(ensemble)}. Record each with its result."
        )
    if ensemble.share_after is not None and ensemble.share_at_test == "off":
        raise ValueError(
            "ensemble.share_at_test must be 'expected' or 'sampled' in a record, which holds the errors of "
            "these two. Got 'off'. cmcl.evaluate measures it."
        )


def _test_data(ensemble: Ensemble, test: Any, ignore_index: int | None) -> Dataset | tuple[Tensor, Tensor]:
    """Images as a `Dataset`; other inputs (vectors, token ids, spectra) as a pair with their targets."""
    if isinstance(test, Dataset):
        if ignore_index is not None:
            raise TypeError(
                "test must be (inputs, targets) for ignore_index. Got a Dataset, whose value is 255."
            )
        return test
    inputs, targets = _pair(as_data("test", test, ensemble))
    if len(inputs) != len(targets):
        raise ValueError(f"test must hold a target for each of {len(inputs)} inputs. Got {len(targets)}.")
    if ignore_index is not None:
        inputs, targets = _counted(ensemble, inputs, targets, ignore_index)
    is_image = inputs.ndim == 4 and inputs.shape[1] in CHANNELS and inputs.dtype in PIXELS
    return from_arrays(inputs, targets, split="test") if is_image else (inputs, targets)


def _ood_images(ood: Any) -> Tensor | None:
    if ood is None or isinstance(ood, Dataset):
        return None if ood is None else ood.images
    if not isinstance(ood, Tensor | np.ndarray):
        raise TypeError(f"ood must be a Dataset or a tensor of inputs. Got {_checks.kind(ood)}.")
    return torch.as_tensor(ood)


def _pair(test: Data) -> tuple[Tensor, Tensor]:
    """Inputs and targets; those of all batches of a DataLoader."""
    if not isinstance(test, DataLoader):
        return tensors(test)
    batches = [_checks.pair("test", batch) for batch in _in_order(test)]
    if not batches:
        raise ValueError("test must hold at least one batch. Got an empty DataLoader.")
    return torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])


def _in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Not shuffled, so that the same data have the same checksum."""
    if not isinstance(loader.sampler, RandomSampler):
        return loader
    kept = {name: getattr(loader, name) for name in ("batch_size", "num_workers", "collate_fn")}
    return DataLoader(loader.dataset, **kept)


def _counted(ensemble: Ensemble, inputs: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The examples that count; ignored pixels become 255, the value that records use."""
    _checks.ignorable(ignore_index, targets)
    counts = targets != ignore_index
    if targets.ndim == 1:
        return inputs[counts], targets[counts]
    if (classes := next(predictions(ensemble, inputs[:1])).shape[2]) > IGNORE:
        raise ValueError(f"classes must be at most {IGNORE} where some pixels are ignored. Got {classes}.")
    return inputs, targets.long().where(counts, IGNORE)


def described(members: nn.ModuleList) -> Network:
    """A description that distinguishes networks; the same for any number of members."""

    def layers(member: nn.Module) -> list[Any]:
        parts = [
            [name, type(part).__name__, without_addresses(part.extra_repr())]
            for name, part in member.named_modules()
        ]
        return [parts, [[key, list(value.shape)] for key, value in member.named_parameters()]]

    kinds = sorted({json.dumps(layers(member)) for member in members})
    return {
        "class": type(members[0]).__name__,
        "parameters": sum(p.numel() for p in members[0].parameters()),
        "digest": sha256(json.dumps(kinds).encode()).hexdigest()[:16],
    }
