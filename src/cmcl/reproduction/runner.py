"""A recipe in, records out: data, training, evaluation. An interrupted run continues from its checkpoint."""

import inspect
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from torch import Tensor

from .. import data
from .._files import replacing
from .._messages import first_line
from ..data.dataset import Dataset, identities, split_validation, stratified_subset
from ..data.registry import nearest
from ..data.transforms import PRESETS, Transform, fit_cached, transform_cached
from ..ensemble import Ensemble, in_eval
from ..lazy import import_function
from ..networks import NETWORKS
from ..serialization import save_temperature, saved_checksum
from ..splitting import shareable_layers
from ..training import Options, Result, fit
from ..training.batches import hold_out
from ..training.checkpoint import last_step, locked
from ..training.config import Recipe
from ..training.mesh import rank
from ..training.preflight import preflight
from ..training.scoring import held_out_temperature
from . import environment
from .custom import described
from .evaluate import evaluate_run, recorded_errors, scored
from .gallery import GalleryBuilder
from .recipes import OOD, find
from .record import SCALED, Record, read

TRAINED = ("steps", "seconds", *environment.FIELDS, "resumed_with")  # fields of a record about training


@dataclass(frozen=True)
class RunData:
    """The data of a recipe as the networks see them."""

    train: Dataset
    test: Dataset
    test_images: Tensor  # the raw images of `test`, for people
    ood: Dataset | None  # through the transform that was fitted to `train`
    transform: Transform | None
    checksums: dict[str, str]  # of the raw data


def run(
    recipe: Recipe | str,
    seeds: Sequence[int] = (0,),
    *,
    out: str | Path,
    name: str | None = None,
    results: str | Path | None = None,
    root: str | Path | None = None,
    options: Options | None = None,
    steps: int | None = None,
    test_limit: int | None = None,
    held_out: Dataset | None = None,
    sets: RunData | None = None,
) -> list[Record]:
    """Train a recipe with each of these seeds and evaluate it: a run folder and a record per seed.

    Args:
        recipe: what to train, or its name.
        seeds: of weights, data order, masks and labels.
        out: folder of run folders. An interrupted run is resumed; a finished one is evaluated again.
        name: for records of a recipe that is given as such.
        results: folder whose records/ gets the records; they are in the run folders in any case.
        root: folder of the datasets.
        options: how the runs are carried out.
        steps: shorten the runs to this number of steps, to try them out. Such a record fills no cell.
        test_limit: evaluate on this number of test examples only. Such a record fills no cell.
        held_out: raw images to fit the temperature to, if the recipe holds out none.
        sets: the data, if they are loaded already.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one. Got {list(seeds)}.")
    name = name or (recipe if isinstance(recipe, str) else "custom")
    recipe = find(recipe) if isinstance(recipe, str) else recipe
    recipe = recipe if steps is None else replace(recipe, steps=steps, epochs=None)
    options = options or Options()
    end = None if options.max_seconds is None else time.monotonic() + options.max_seconds
    environment.current(options)  # raises before the data are loaded
    sets = sets or load_data(recipe, root=root)
    about = {"name": name, "full_length": steps is None, "full_test": True}
    if test_limit is not None:
        about["full_test"] = test_limit >= len(sets.test)
        test, ood = sets.test[:test_limit], sets.ood and sets.ood[:test_limit]
        sets = replace(sets, test=test, ood=ood, test_images=sets.test_images[:test_limit])
    records = []
    for seed in seeds:
        folder = run_folder(out, name, recipe, seed)
        ensemble, trained = _train(recipe, seed, sets, folder, ending_at(end, options))
        if rank():  # process 0 evaluates the ensemble of all
            continue
        if held_out is not None:
            ensemble.temperature = held_out_temperature(ensemble, held_out)
        record = _evaluate(ensemble, recipe, sets, folder, options, about | {"seed": seed} | trained)
        if results is not None:
            record.save(Path(results) / "records" / record.file_name)
        records.append(record)
    return records


def ending_at(end: float | None, options: Options) -> Options:
    """Options of a run that saves itself and stops at this time of `time.monotonic`; None: at its end."""
    return options if end is None else replace(options, max_seconds=max(end - time.monotonic(), 1e-3))


def run_folder(out: str | Path, name: str, recipe: Recipe, seed: int) -> Path:
    """The folder of a run: readable, and unique to recipe and seed."""
    return Path(out) / f"{name}--{recipe.hash}--seed{seed}"


def same_training(one: Record, other: Record) -> bool:
    """Whether two records have the same weights; their evaluations may differ."""
    return all(getattr(one, key) == getattr(other, key) for key in ("seed", *TRAINED))


def _train(
    recipe: Recipe, seed: int, sets: RunData, folder: Path, options: Options
) -> tuple[Ensemble, dict[str, Any]]:
    """The trained ensemble, and the fields of its record about training."""
    example = sets.train.images[:2]
    if example.dtype == torch.uint8 and sets.transform is not None:
        example = sets.transform.transform(example)
    ensemble = build(recipe, seed, sets.transform, example)
    if recipe.network not in NETWORKS:
        _check_outputs(ensemble, example, sets.train, str(recipe.network))
    plan = preflight(  # raises before anything is written
        ensemble, sets.train, None, recipe=recipe, seed=seed, task=None, ignore_index="auto", options=options
    )
    now, step = environment.current(options, plan.mesh.name), last_step(folder) or 0
    examples = len(hold_out(sets.train, recipe.validation)[0])
    finished = step >= recipe.total_steps(examples, min(recipe.batch_size, examples))
    if rank() == 0:
        with locked(folder):  # the run of another process stays untouched
            with replacing(folder / "recipe.json") as part:
                part.write_text(json.dumps(recipe.to_json(), indent=1) + "\n", encoding="utf-8")
            if not finished:
                environment.append(folder, step, now)
    result = fit(
        ensemble,
        sets.train,
        recipe=recipe,
        seed=seed,
        test=sets.test if options.evaluate_every else None,  # `_evaluate` does at the end
        out=folder,
        resume=step > 0,
        options=options,
    )
    if finished and result.rows and rank() == 0:  # its last checkpoint was damaged: it was trained after all
        environment.append(folder, step, now)
    return ensemble, _about_training(folder, result, now) | {"overlap": result.overlap}


def _about_training(folder: Path, result: Result, now: dict[str, Any]) -> dict[str, Any]:
    """Fields of a record. A run that is only evaluated again keeps those of its record."""
    before = read(folder / "record.json")
    if before is not None and not result.rows:
        return {key: getattr(before, key) for key in TRAINED}
    # Without a history, the step says that the environment of the training is unknown.
    found = environment.history(folder) or [{"step": result.steps} | now]
    return {"steps": result.steps, "seconds": round(result.seconds, 3)} | environment.summary(found)


def _evaluate(
    ensemble: Ensemble, recipe: Recipe, sets: RunData, folder: Path, options: Options, facts: dict[str, Any]
) -> Record:
    """The record of a trained ensemble; writes record.json, ensemble/ and gallery/."""
    ensemble.save(folder / "ensemble")
    weights = saved_checksum(folder / "ensemble")
    test, ood = sets.test, sets.ood
    title, batch = f"seed {facts['seed']}", options.evaluation_batch
    more = "" if ood is None else f", and on {len(ood):,} OOD images of {ood.source}"
    Console(stderr=True, quiet=options.quiet, highlight=False, soft_wrap=True).print(
        f"{title}: evaluating on {len(test):,} test images{more}"
    )
    gallery = GalleryBuilder(test, sets.test_images)
    evaluated = evaluate_run(
        ensemble,
        test.images,
        test.targets,
        ood=None if ood is None else ood.images,
        batch_size=batch,
        seed=facts["seed"],
        title="" if options.quiet else title,
        gallery=gallery,
    )
    if ensemble.temperature is None:
        evaluated["calibration"] |= _calibrated_before(folder, weights)
    validation: Any = None
    if (held_out := hold_out(sets.train, recipe.validation)[1]) is not None:
        images, targets = held_out.images, held_out.targets
        validation = recorded_errors(scored(ensemble, images, targets, batch_size=batch)[0])
    record = Record(
        recipe=recipe.to_json(),
        recipe_hash=recipe.hash,
        weights=weights,
        test_examples=len(test),
        checksums=sets.checksums,
        ood=None if ood is None else OOD[str(recipe.data)],
        network=None if recipe.network in NETWORKS else described(ensemble.members),
        validation=validation,
        **facts,
        **evaluated,
    )
    record.save(folder / "record.json")
    gallery.write(folder / "gallery")
    return record


def _calibrated_before(folder: Path, weights: str) -> dict[str, Any]:
    """The temperature that `cmcl calibrate` gave this run, for its record; the saved ensemble keeps it."""
    before = read(folder / "record.json")
    if before is None or before.weights != weights or "temperature" not in before.calibration:
        return {}
    save_temperature(folder / "ensemble", before.calibration["temperature"])
    return {key: value for key, value in before.calibration.items() if key in SCALED}


def load_data(recipe: Recipe, *, root: str | Path | None = None, cache: str | Path | None = None) -> RunData:
    """The data of a recipe, preprocessed once and cached."""
    if recipe.data is None:
        raise ValueError("recipe.data must name a dataset. Got None. Load the data and call cmcl.fit.")
    preset = None if recipe.preprocess is None else named("preprocess", recipe.preprocess, PRESETS)
    train, test = (data.load(recipe.data, split=split, root=root) for split in ("train", "test"))
    ood = load_ood(recipe.data, root)
    checksums = {"train": train.checksum, "test": test.checksum}
    train = train if recipe.subset is None else stratified_subset(train, recipe.subset)
    if preset is None:
        return RunData(train, test, test.images, ood, None, checksums)
    test_images, fitted_to = test.images, train
    if recipe.validation:  # the transform must not see the held-out images
        train = replace(train, units=tuple(identities(train.images)))  # whitened, others may be equal
        fitted_to = split_validation(train, recipe.validation)[0]
    transform = fit_cached(preset(), fitted_to, cache)
    train, test = (transform_cached(transform, one, cache) for one in (train, test))
    ood = ood and transform_cached(transform, ood, cache)
    return RunData(train, test, test_images, ood, transform, checksums)


def load_ood(name: str | None, root: str | Path | None) -> Dataset | None:
    """The out-of-distribution test set of figure 2; None, with a warning, if it is not there."""
    other = OOD.get(name or "")
    try:
        return None if other is None else data.load(other, split="test", root=root)
    except FileNotFoundError as error:
        warnings.warn(f"figure 2 lacks its out-of-distribution data: {error}", stacklevel=1)
        return None


def build(
    recipe: Recipe, seed: int, transform: Transform | None = None, example: Tensor | None = None
) -> Ensemble:
    """The untrained ensemble: its weights depend on network, members and seed alone.

    Features of a user's own network are shared after the layer that is suggested for `example`, two inputs.
    """
    if recipe.network is None:
        raise ValueError(
            "recipe.network must name a network. Got None. Build the ensemble and call cmcl.fit."
        )
    network, options = find_network(recipe.network), recipe.network_options
    _check_options(recipe.network, options, network)
    layer = "stem" if recipe.sharing else None
    if recipe.sharing and recipe.network not in NETWORKS and example is not None:
        found = [one.name for one in shareable_layers(network(**options), example) if one.suggested]
        layer = found[0] if found else layer  # "stem" raises, with the layers that there are
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ensemble = Ensemble(
            lambda: network(**options),
            recipe.members,
            share_after=layer,
            share_prob=recipe.share_prob,
        )
    ensemble.transform = transform
    return ensemble


def _check_options(network: str, options: Mapping[str, Any], build: Callable[..., Any]) -> None:
    """Raise for misspelt names and values of a wrong type: the text "False" would count as true."""
    known = inspect.signature(build).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for name, value in options.items():
        if name not in known:
            if takes_any:
                continue
            hint = nearest(name, list(known))
            raise ValueError(f"network_options must be options of {network}. Got {name!r}. {hint}")
        if network not in NETWORKS:  # a user's function checks for itself
            continue
        try:
            TypeAdapter(known[name].annotation).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise ValueError(f"network_options.{name} must be {reason}. Got {value!r}.") from None


def find_network(name: str) -> Callable[..., Any]:
    """What builds a member: a network of cmcl's own, or the user's MODULE:FUNCTION."""
    if ":" in name:
        return import_function(name, "recipe.network must be a known name, or")
    found: Callable[..., Any] = named("network", name, NETWORKS)
    return found


def options_for(network: str, shape: Sequence[int], classes: int) -> dict[str, Any]:
    """The arguments that fit a network to images (C, H, W) and their classes, as far as it takes them."""
    channels, height, width = shape
    size = height if height == width else [height, width]
    offered = {
        **dict.fromkeys(("classes", "num_classes", "n_classes"), classes),
        **dict.fromkeys(("channels", "in_channels", "in_chans"), channels),
        **dict.fromkeys(("size", "image_size", "img_size"), size),
    }
    known = inspect.signature(find_network(network)).parameters.values()
    named = [p for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if lacking := [p.name for p in named if p.default is p.empty and p.name not in offered]:
        raise ValueError(
            f"{network} must be a function whose arguments have defaults or are among {', '.join(offered)}, "
            f"which are taken from the data. Got {', '.join(lacking)}. Give it a default, or write a "
            "function without it."
        )
    return {p.name: offered[p.name] for p in named if p.name in offered}


def _check_outputs(ensemble: Ensemble, example: Tensor, train: Dataset, network: str) -> None:
    """Raise unless a network of the user's has one output per class: more would be noticed by nobody."""
    with torch.no_grad(), in_eval(ensemble):
        try:
            logits = ensemble(example)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"{network} must take images {tuple(example.shape[1:])} of {train.source}. torch says: "
                f"{first_line(error)}. Let the function take channels and size, which are those of the data, "
                "or convert the images: --option mode=RGB, --option size=[HEIGHT,WIDTH]."
            ) from error
    if (outputs := logits.shape[2]) != (count := len(train.classes)):
        raise ValueError(
            f"{network} must have an output per class of {train.source}, {count}. Got {outputs}. "
            "Let the function take an argument `classes`, or build its last layer with that number."
        )


def named(field: str, name: str, known: Mapping[str, Any]) -> Any:
    """What a field of a recipe names."""
    if name not in known:
        raise ValueError(f"recipe.{field} must be a known name. Got {name!r}. {nearest(name, list(known))}")
    return known[name]
