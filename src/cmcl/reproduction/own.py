"""A run of your own, measured: what `cmcl report` shows of named recipes, for any network and any inputs."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from .. import _checks
from .._files import replacing
from ..data import from_arrays
from ..data.dataset import IGNORE, Dataset, tensor_checksum
from ..ensemble import Ensemble
from ..serialization import saved_checksum
from ..telling import without_addresses
from ..training import Options, Result
from ..training.admission import fitting
from ..training.config import Recipe
from ..training.setup import Data
from ..training.telemetry import finite
from . import environment
from .gallery import write_gallery
from .measure import ask, measure
from .record import Network, Record

PIXELS = (torch.uint8, torch.float32)
CHANNELS = (1, 3, 4)  # that can be drawn


@dataclass(frozen=True)
class Inputs:
    """What is no picture (vectors, token ids, spectra): of a `Dataset` what can be measured."""

    images: Tensor
    targets: Tensor
    source: str = "arrays"


def record(
    folder: str | Path,
    ensemble: Ensemble,
    test: Data,
    *,
    recipe: Recipe,
    result: Result,
    seed: int | None = None,
    ood: Dataset | Tensor | None = None,
    options: Options | None = None,
    ignore_index: int | None = None,
) -> Record:
    """Measure a trained ensemble; leave record.json and ensemble/ in its run folder.

    And gallery/, if the inputs are pictures.

    Args:
        folder: the `out` of `fit`; its name becomes the record's.
        ensemble: as `fit`, or a loop of your own, left it.
        test: inputs that it has not learned, with their targets: a `Dataset`, (inputs, targets) or a
            `DataLoader` of such pairs.
        recipe, result, options: what `fit` was given and what it returned. After a loop of your own, the
            `Recipe` that tells what was done, and `Result(steps=..., seconds=...)`, with `rows` for curves.
        seed: which of those that `fit` was given, if there are several; they get folders of their own inside.
        ood: out-of-distribution inputs.
        ignore_index: a target of `test`, if a pair, that counts for nothing; 255 of pixels is one anyway.
    """
    _check_ensemble(ensemble)
    folder, recipe, seed = Path(folder), fitting(recipe, ensemble), _seed(result, seed)
    recipe, rows = _as_loaded(recipe, result), [_plain(row, seed) for row in result.rows]
    own = folder if len(result.seeds) == 1 else folder / f"seed{seed}"  # as `cmcl train` does
    if isinstance(test, Dataset) and ignore_index is not None:
        raise TypeError("test must be (inputs, targets) for ignore_index. Got a Dataset, whose value is 255.")
    data = test if isinstance(test, Dataset) else _data(ensemble, *_pair(test), ignore_index)
    unseen = ood if ood is None or isinstance(ood, Dataset) else _unseen(ood)
    answers = ask(ensemble, data.images, ood=None if unseen is None else unseen.images, seed=seed)
    ensemble.save(own / "ensemble")
    made = Record(
        name=folder.name,
        recipe=recipe.to_json(),
        recipe_hash=recipe.hash,
        seed=seed,
        full_length=recipe.steps is None or result.steps >= recipe.steps,
        full_test=True,
        test_examples=len(data.images),
        checksums={"test": tensor_checksum({"images": data.images, "targets": data.targets})},
        network=None if recipe.network else described(ensemble.members),
        task=result.task,
        trained_on=result.data,
        weights=saved_checksum(own / "ensemble"),
        ood=None if unseen is None else unseen.source,
        steps=result.steps,
        seconds=round(result.seconds, 3),
        **environment.facts(options or Options()),
        **measure(answers, data.targets),
    )
    if isinstance(data, Dataset):
        write_gallery(own / "gallery", answers.test, data, data.images)
    made.save(own / "record.json")
    if rows:
        _tell_again(folder / "telemetry.jsonl", rows, result.seeds)
    return made


def _as_loaded(recipe: Recipe, result: Result) -> Recipe:
    """With the batch size of the DataLoader, where that decided; parts of unlike size no recipe can tell."""
    size = result.batch_size
    return replace(recipe, batch_size=size) if size and size % recipe.accumulate == 0 else recipe


def _plain(row: Any, seed: int) -> dict[str, Any]:
    """A row of telemetry as JSON has it: tensors and numpy's numbers become plain ones."""
    try:
        plain = json.loads(json.dumps({"seed": seed} | row, default=lambda value: value.tolist()))
    except (TypeError, AttributeError) as error:
        raise TypeError(f"rows must be dicts of JSON values, tensors or arrays. Got {error}.") from None
    if not all(isinstance(plain.get(key), kind) for key, kind in (("epoch", int | float), ("seed", int))):
        raise ValueError(f"rows must have a number 'epoch', and whole numbers for 'seed'. Got {plain}.")
    return {key: finite(value) for key, value in plain.items()}


def _tell_again(path: Path, rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> None:
    """How a run learned, for the report's curves; what was told of its seeds before these epochs stays."""
    begun = {
        seed: min(row["epoch"] for row in rows if row["seed"] == seed) for seed in {r["seed"] for r in rows}
    }

    def stays(line: str) -> bool:
        try:
            row = json.loads(line)
            return row["seed"] in seeds and row["epoch"] < begun.get(row["seed"], math.inf)
        except (ValueError, TypeError, KeyError):  # what a kill cut short
            return False

    old = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    lines = [*filter(stays, old), *(json.dumps(row, allow_nan=False) for row in rows)]
    with replacing(path) as part:
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _check_ensemble(ensemble: Any) -> None:
    if not isinstance(ensemble, Ensemble):
        raise TypeError(
            f"ensemble must be one Ensemble. Got {_checks.kind(ensemble)}. Of several, record each with its "
            "seed: for one, seed in zip(ensembles, seeds): cmcl.record(..., seed=seed)."
        )
    if ensemble.share_after is not None and ensemble.share_at_test == "off":
        raise ValueError(
            "ensemble.share_at_test must be 'expected' or 'sampled' in a record, which holds the errors of "
            "these two. Got 'off'. cmcl.evaluate measures it."
        )


def _seed(result: Result, seed: int | None) -> int:
    """The one that the run was trained with."""
    trained, seed = result.seeds, None if seed is None else index(seed)
    if seed is None and len(trained) > 1:
        raise ValueError(f"seed must say which of {trained} the ensemble was trained with. Got none.")
    if seed not in {None, *trained}:
        raise ValueError(f"seed must be that of the training, {' or '.join(map(str, trained))}. Got {seed}.")
    return trained[0] if seed is None else seed


def _pair(test: Data) -> tuple[Tensor, Tensor]:
    """Inputs and targets; those of a DataLoader's batches together."""
    if isinstance(test, DataLoader):
        batches = [_checks.pair("test", batch) for batch in _in_order(test)]
        if not batches:
            raise ValueError("test must hold at least one batch. Got an empty DataLoader.")
        return torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])
    arrays = Tensor | np.ndarray
    if not isinstance(test, tuple | list) or len(test) != 2 or not all(isinstance(t, arrays) for t in test):
        must = "a Dataset, (inputs, targets) or a DataLoader of such pairs"
        raise TypeError(f"test must be {must}. Got {_checks.kind(test)}.")
    return torch.as_tensor(test[0]), torch.as_tensor(test[1])


def _unseen(ood: Any) -> Inputs:
    if not isinstance(ood, Tensor | np.ndarray):
        raise TypeError(f"ood must be a Dataset or a tensor of inputs. Got {_checks.kind(ood)}.")
    inputs = torch.as_tensor(ood)
    return Inputs(inputs, inputs)


def _in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Not shuffled: the same data have the same checksum."""
    if not isinstance(loader.sampler, RandomSampler):
        return loader
    kept = {name: getattr(loader, name) for name in ("batch_size", "num_workers", "collate_fn")}
    return DataLoader(loader.dataset, **kept)


def described(members: nn.ModuleList) -> Network:
    """What tells the networks of two ensembles apart; the same however many members there are."""
    kinds = sorted({json.dumps(_parts(member)) for member in members})
    return {
        "class": type(members[0]).__name__,
        "parameters": sum(p.numel() for p in members[0].parameters()),
        "digest": sha256(json.dumps(kinds).encode()).hexdigest()[:16],
    }


def _parts(member: nn.Module) -> list[Any]:
    """Its layers by name, class and what they print of themselves, and the shapes of its parameters."""
    layers = [
        [name, type(part).__name__, without_addresses(part.extra_repr())]
        for name, part in member.named_modules()
    ]
    return [layers, [[key, list(value.shape)] for key, value in member.named_parameters()]]


def _counted(ensemble: Ensemble, inputs: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The examples that count, with 255 in the place of pixels that do not: the value that records know."""
    _checks.ignorable(ignore_index, targets)
    counts = targets != ignore_index
    if targets.ndim == 1:
        return inputs[counts], targets[counts]
    if (classes := ensemble.predict(inputs[:1]).probs.shape[1]) > IGNORE:
        raise ValueError(f"classes must be at most {IGNORE} where some pixels are ignored. Got {classes}.")
    return inputs, targets.long().where(counts, IGNORE)


def _data(ensemble: Ensemble, inputs: Tensor, targets: Tensor, ignore_index: int | None) -> Dataset | Inputs:
    """Images as a set of images, and everything else as it is."""
    if len(inputs) != len(targets):
        raise ValueError(f"test must hold a target for each of {len(inputs)} inputs. Got {len(targets)}.")
    if ignore_index is not None:
        inputs, targets = _counted(ensemble, inputs, targets, ignore_index)
    is_picture = inputs.ndim == 4 and inputs.shape[1] in CHANNELS and inputs.dtype in PIXELS
    return from_arrays(inputs, targets, split="test") if is_picture else Inputs(inputs, targets)
