"""Choosing beta and K on held-out data: successive halving over a grid of recipes.

Every candidate trains for a fraction of the full length; the better ones train longer, the best in full.
The learning-rate schedule scales with the length, so a longer run starts from scratch.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from .._files import replacing
from ..training import Options
from ..training.config import Recipe
from .recipes import BETAS, find, grid
from .record import read
from .runner import run, run_folder

Score = Callable[[str, Recipe], float]  # trains a candidate and returns its held-out error in percent


@dataclass(frozen=True)
class Rung:
    """One round: the same length for all remaining candidates."""

    fraction: float  # of the full length
    errors: dict[str, float]  # held-out error of each candidate, in percent
    kept: list[str]  # remaining, the best first


def successive_halving(candidates: Mapping[str, Recipe], score: Score, *, eta: int = 3) -> list[Rung]:
    """Rounds of `score`, each on the best 1/eta of the last, eta times as long: `[-1].kept[0]` is the choice.

    Ties go to the candidate that comes first.

    Args:
        candidates: recipes of full length, by name.
        score: called with name and (shortened) recipe: trains, and returns the error on held-out data. For a
            network of your own, build and fit it here.
        eta: one of eta candidates remains, and trains eta times longer.
    """
    if not candidates:
        raise ValueError("candidates must hold at least one recipe. Got none.")
    if eta < 2:
        raise ValueError(f"eta must be 2 or more. Got {eta}.")
    rungs: list[Rung] = []
    left = list(candidates)
    last = math.floor(math.log(len(left), eta) + 1e-9)  # so that one candidate trains at full length
    for i in range(last + 1):
        fraction = eta ** (i - last)
        errors = {name: score(name, candidates[name].shortened(fraction)) for name in left}
        keep = math.ceil(len(left) / eta) if i < last else 1
        left = sorted(errors, key=errors.__getitem__)[:keep]  # stable
        rungs.append(Rung(fraction, errors, left))
    return rungs


def tune(
    name: str,
    *,
    out: str | Path,
    recipe: Recipe | None = None,
    betas: Sequence[float] | None = None,
    overlaps: Sequence[int] | None = None,
    validation: float = 0.1,
    eta: int = 3,
    seeds: Sequence[int] = (0,),
    root: str | Path | None = None,
    options: Options | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The beta and K of a recipe with the lowest held-out top-1 error, found by successive halving.

    Candidates are compared on the held-out part of the training set only; the test set is evaluated once, for
    the choice. Called again, an interrupted search resumes. The result is also in `out`/tuning-NAME.json.

    Args:
        name: of a CMCL recipe.
        out: folder of run folders, and of the result.
        recipe: the recipe of that name, if it is not a known one.
        betas: to try; those of the paper if not given.
        overlaps: K to try; those of the paper if not given, up to the number of members.
        validation: fraction of the training set to hold out.
        eta: see `successive_halving`.
        seeds: a candidate's error is the mean over them.
        root: folder of the datasets.
        options: how runs are carried out.
        say: called with a line of text for each candidate.
    """
    base, out = find(name) if recipe is None else recipe, Path(out)
    if base.method != "cmcl":
        raise ValueError(
            f"recipe must be a CMCL one, which has a beta and a K. Got {name!r} ({base.method})."
        )
    if not 0 < validation < 1:
        raise ValueError(f"validation must be above 0 and below 1, to choose by. Got {validation}.")
    candidates = grid(name, base, betas=betas or BETAS, overlaps=overlaps, validation=validation)
    shared: dict[str, Any] = {"out": out, "root": root, "options": options}

    def score(candidate: str, recipe: Recipe) -> float:
        error = _held_out(candidate, recipe, seeds, shared)
        say(f"{candidate}, {_length(recipe)}: held-out top-1 {error:.2f} %")
        return error

    rungs = successive_halving(candidates, score, eta=eta)
    chosen = rungs[-1].kept[0]
    records = run(candidates[chosen], seeds, name=chosen, **shared)  # trained already
    result = {
        "recipe": name,
        "chosen": chosen,
        "beta": candidates[chosen].beta,
        "overlap": candidates[chosen].overlap,
        "held_out": round(rungs[-1].errors[chosen], 6),
        "runs": [str(run_folder(out, chosen, candidates[chosen], seed)) for seed in seeds],
        "test": round(fmean(record.errors["expected"]["top1"] for record in records), 6),
        "seeds": list(seeds),
        "validation": validation,
        "rungs": [_table(rung, candidates) for rung in rungs],
        "device": records[0].device,
        "versions": dict(records[0].versions),
    }
    with replacing(out / f"tuning-{name}.json") as part:
        part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _held_out(name: str, recipe: Recipe, seeds: Sequence[int], shared: Mapping[str, Any]) -> float:
    """The mean held-out top-1 error over the seeds, from records where there are some."""
    records = []
    for seed in seeds:
        record = read(run_folder(shared["out"], name, recipe, seed) / "record.json")
        # One test image, because `run` needs some: the others must not influence the choice.
        records += [record] if record else run(recipe, (seed,), name=name, test_limit=1, **shared)
    return fmean(record.validation["top1"] for record in records if record.validation)


def _length(recipe: Recipe) -> str:
    return f"{recipe.epochs:.3g} epochs" if recipe.epochs else f"{recipe.steps:,} steps"


def _table(rung: Rung, candidates: Mapping[str, Recipe]) -> dict[str, Any]:
    rows = [
        {
            "name": name,
            "beta": candidates[name].beta,
            "overlap": candidates[name].overlap,
            "held_out": round(error, 6),
            "kept": name in rung.kept,
        }
        for name, error in rung.errors.items()
    ]
    return {
        "fraction": rung.fraction,
        "length": _length(next(iter(candidates.values())).shortened(rung.fraction)),
    } | {"rows": rows}
