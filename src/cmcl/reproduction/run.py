"""A recipe in, records out: data, training, measurement. A run that was stopped goes on where it was.

R seeds of one recipe train side by side.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from .. import data
from .._files import replacing
from ..data.dataset import Dataset, identities, split_validation, stratified_subset
from ..data.transforms import PRESETS, Transform, fit_cached, transform_cached
from ..ensemble import Ensemble
from ..serialization import saved_checksum
from ..training import Options, Result, fit
from ..training.config import Recipe
from ..training.locking import locked
from ..training.setup import hold_out
from . import environment
from .building import build, check_fits, named
from .gallery import write_gallery
from .measure import Answers, ask, errors, measure, predict
from .recipes import OOD, find
from .record import Record, read

LONGEST = 100  # letters of a list of seeds in a folder's name
TRAINED = ("steps", "seconds", *environment.FACTS, "resumed_with")  # fields of a record that tell of training


@dataclass(frozen=True)
class Sets:
    """The data of a recipe as the networks see them."""

    train: Dataset
    test: Dataset
    pictures: Tensor  # the raw images of `test`, for people
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
    cache: str | Path | None = None,
    options: Options | None = None,
    steps: int | None = None,
    test_limit: int | None = None,
) -> list[Record]:
    """Train a recipe with these seeds, all together, and measure each.

    Args:
        recipe: what to train, or its name.
        seeds: of weights, data order, masks and labels.
        out: folder of run folders. One that was interrupted is resumed; a finished one is measured again.
        name: for records of a recipe that is given as such.
        results: folder whose records/ gets the records; they are in the run folder in any case.
        root: folder of the data sets.
        cache: folder for preprocessed data.
        options: how the run is carried out.
        steps: shorten the run to so many steps, to try it out. Such a record fills no cell.
        test_limit: measure on so many test examples only. Such a record fills no cell.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one. Got {list(seeds)}.")
    name = name or (recipe if isinstance(recipe, str) else "custom")
    recipe = find(recipe) if isinstance(recipe, str) else recipe
    recipe = recipe if steps is None else replace(recipe, steps=steps, epochs=None)
    options = options or Options()
    now = environment.facts(options)
    sets = load_sets(recipe, root=root, cache=cache)
    ensembles = [build(recipe, seed, sets.transform) for seed in seeds]
    check_fits(ensembles[0], sets.train, recipe)
    folder = run_folder(out, name, recipe, seeds)
    with locked(folder):  # a run that another process has in hand is none of ours to note anything about
        _write_json(folder / "recipe.json", recipe.to_json())
        step = reached(folder)
        if not (finished := step >= _steps(recipe, sets.train)):
            environment.keep(folder, step, now)
    result = fit(
        ensembles,
        sets.train,
        recipe=recipe,
        seed=seeds,
        test=sets.test[:test_limit] if options.evaluate_every else None,  # `_measure` looks at it in the end
        out=folder,
        resume=True,
        options=options,
    )
    if finished and result.rows:  # its last checkpoint was damaged: it was trained after all
        environment.keep(folder, step, now)
    facts: dict[str, Any] = {
        "name": name,
        "recipe": recipe.to_json(),
        "recipe_hash": recipe.hash,
        "full_length": steps is None,
    }
    records, people = [], Console(stderr=True, quiet=options.quiet)
    for seed, ensemble in zip(seeds, ensembles, strict=True):
        own = folder if len(seeds) == 1 else folder / f"seed{seed}"
        trained = _trained(folder, own / "record.json", result, now)
        ensemble.save(own / "ensemble")
        people.print(f"seed {seed}: {_to_measure(sets, recipe, test_limit)}", highlight=False, soft_wrap=True)
        answers, measured = _measure(ensemble, sets, recipe, seed, test_limit, options)
        weights = saved_checksum(own / "ensemble")
        records.append(record := Record(seed=seed, weights=weights, **facts, **trained, **measured))
        record.save(own / "record.json")
        write_gallery(own / "gallery", answers.test, sets.test[:test_limit], sets.pictures)
        if results is not None:
            record.save(Path(results) / "records" / record.file_name)
    return records


def _to_measure(sets: Sets, recipe: Recipe, limit: int | None) -> str:
    """What a person waits for: on a CPU it may take longer than a short training."""
    text = f"measuring on {len(sets.test[:limit]):,} test images"
    if sets.ood is None:
        return text
    return f"{text}, and on {len(sets.ood[:limit]):,} OOD images of {OOD[recipe.data or '']}"


def run_folder(out: str | Path, name: str, recipe: Recipe, seeds: Sequence[int]) -> Path:
    """Where a run lives: readable, and its own."""
    word = "seed" if len(seeds) == 1 else "seeds"
    return Path(out) / f"{name}--{recipe.hash}--{word}{_in_short(seeds)}"


def _in_short(seeds: Sequence[int]) -> str:
    """ "0-1-2"; "0to79" where that would be too long for a folder's name."""
    whole = "-".join(map(str, seeds))
    if len(whole) <= LONGEST:
        return whole
    if list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}to{seeds[-1]}"
    return f"{seeds[0]}to{seeds[-1]}-{len(seeds)}of{sha256(whole.encode()).hexdigest()[:12]}"


def reached(folder: Path) -> int:
    """The step of a run's last checkpoint, by its name."""
    kept = (folder / "checkpoints").glob("step-*.safetensors")
    return max((int(path.name.split("-")[1]) for path in kept), default=0)


def _steps(recipe: Recipe, train: Dataset) -> int:
    examples = len(hold_out(train, recipe.validation)[0])
    return recipe.total_steps(examples, min(recipe.batch_size, examples))


def _trained(folder: Path, record: Path, result: Result, now: dict[str, Any]) -> dict[str, Any]:
    """What a run's training took and ran on. One that is only measured again keeps what its record says."""
    before = read(record)
    if before is not None and not result.rows:
        return {key: getattr(before, key) for key in TRAINED}
    # Finished by an earlier version, which kept no notes: the step tells that its training is not known.
    found = environment.stretches(folder) or [{"step": result.steps} | now]
    spent = {"steps": result.steps, "seconds": round(result.seconds, 3)}
    return spent | environment.summary(found)


def same_training(one: Record, other: Record) -> bool:
    """Whether two records tell of the same weights; what was measured of them may differ."""
    return all(getattr(one, key) == getattr(other, key) for key in ("seed", *TRAINED))


def load_sets(recipe: Recipe, *, root: str | Path | None = None, cache: str | Path | None = None) -> Sets:
    """The data of a recipe, preprocessed once and kept."""
    if recipe.data is None:
        raise ValueError("recipe.data must name a data set. Got None. Load the data and call cmcl.fit.")
    preset = None if recipe.preprocess is None else named("preprocess", recipe.preprocess, PRESETS)
    train, test = (data.load(recipe.data, split=split, root=root) for split in ("train", "test"))
    ood = load_ood(recipe.data, root)
    checksums = {"train": train.checksum, "test": test.checksum}
    train = train if recipe.subset is None else stratified_subset(train, recipe.subset)
    if preset is None:
        return Sets(train, test, test.images, ood, None, checksums)
    pictures = test.images
    learned = train
    if recipe.validation:  # what the choice is made by must not be looked at
        train = replace(train, units=tuple(identities(train.images)))  # whitened, others may be equal
        learned = split_validation(train, recipe.validation)[0]
    transform = fit_cached(preset(), learned, cache)
    train, test = (transform_cached(transform, one, cache) for one in (train, test))
    ood = ood and transform_cached(transform, ood, cache)
    return Sets(train, test, pictures, ood, transform, checksums)


def load_ood(name: str | None, root: str | Path | None) -> Dataset | None:
    """What those who learned from `name` have never seen, for figure 2; without it None, said once."""
    other = OOD.get(name or "")
    try:
        return None if other is None else data.load(other, split="test", root=root)
    except FileNotFoundError as error:
        warnings.warn(f"figure 2 lacks its out-of-distribution data: {error}", stacklevel=1)
        return None


def _measure(
    ensemble: Ensemble, sets: Sets, recipe: Recipe, seed: int, limit: int | None, options: Options
) -> tuple[Answers, dict[str, Any]]:
    test, ood = sets.test[:limit], sets.ood and sets.ood[:limit]
    unseen, batch = None if ood is None else ood.images, options.evaluation_batch
    title = "" if options.quiet else f"seed {seed}"
    answers = ask(ensemble, test.images, ood=unseen, batch_size=batch, seed=seed, title=title)
    found = measure(answers, test.targets) | {
        "test_examples": len(test),
        "full_test": len(test) == len(sets.test),
        "checksums": sets.checksums,
        "ood": None if ood is None else OOD[str(recipe.data)],
    }
    held_out = hold_out(sets.train, recipe.validation)[1]
    if isinstance(held_out, Dataset):
        probs = predict(ensemble, held_out.images, batch_size=batch)
        found["validation"] = errors(probs, held_out.targets)
    return answers, found


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
