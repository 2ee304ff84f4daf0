"""Choosing beta and K on held-out data: an Optuna study of a grid of recipes.

A candidate trains for a fraction of the full length, then eta times longer as long as Optuna's pruner keeps
it. The learning-rate schedule scales with the length, so a longer run starts from scratch. Workers on any
number of machines share a study through its storage.
"""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import filelock
import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from .._files import replacing
from ..training import Diverged, Options
from ..training.checkpoint import FolderInUseError
from ..training.config import Recipe
from .recipes import BETAS, find, grid
from .record import read
from .runner import run, run_folder

CANDIDATE = "candidate"  # attribute of a trial: the name of its recipe
HEARTBEAT, GRACE = 10, 60  # seconds; a worker silent for longer was killed, and another takes its candidate
POLL = 2.0  # seconds between looks at the candidates of other workers


def fractions(count: int, eta: int) -> list[float]:
    """Of the full length, at which `count` candidates are compared; one alone trains in full."""
    last = math.floor(math.log(count, eta) + 1e-9)
    return [eta ** (i - last) for i in range(last + 1)]


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
    storage: str | None = None,
    root: str | Path | None = None,
    options: Options | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The beta and K of a recipe with the lowest held-out top-1 error.

    Candidates are compared on the held-out part of the training set only; the test set is evaluated once, for
    the choice. Called again, an interrupted search resumes. Called several times at once, with one `storage`
    and one `out`, the calls share the candidates. The result is also in `out`/tuning-NAME.json.

    Args:
        name: of a CMCL recipe.
        out: folder of run folders, and of the result.
        recipe: the recipe of that name, if it is not a known one.
        betas: to try; those of the paper if not given.
        overlaps: K to try; those of the paper if not given, up to the number of members.
        validation: fraction of the training set to hold out.
        eta: the best 1/eta of the candidates so far train eta times longer.
        seeds: a candidate's error is the mean over them.
        storage: URL of the study's database; None: the SQLite file `out`/tuning-NAME.db.
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
    if eta < 2:
        raise ValueError(f"eta must be 2 or more. Got {eta}.")
    candidates = grid(name, base, betas=betas or BETAS, overlaps=overlaps, validation=validation)
    rungs = fractions(len(candidates), eta)
    shared: dict[str, Any] = {"out": out, "root": root, "options": options}

    def objective(trial: Trial) -> float:
        if CANDIDATE not in trial.user_attrs:  # another worker took the last one between a look and a grasp
            raise optuna.TrialPruned
        candidate, error = trial.user_attrs[CANDIDATE], math.inf
        for key in ("beta", "overlap"):
            trial.suggest_categorical(key, sorted({getattr(one, key) for one in candidates.values()}))
        for i, fraction in enumerate(rungs):
            part = candidates[candidate].shortened(fraction)
            try:
                error = _held_out(candidate, part, seeds, shared)
            except Diverged:
                raise
            except BaseException:  # stopped, in use by another worker, without disk: it is trained again
                _enqueue(trial.study, candidate, candidates[candidate])
                raise
            say(f"{candidate}, {_length(part)}: held-out top-1 {error:.2f} %")
            trial.report(error, eta**i)
            if fraction < 1 and trial.should_prune():
                raise optuna.TrialPruned
        return error

    out.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(out / f".tuning-{name}.lock")  # of several workers
    digest = sha256(json.dumps([[one.hash for one in candidates.values()], list(seeds), eta]).encode())
    url = storage or f"sqlite:///{out / f'tuning-{name}.db'}"
    with _study(f"{name}-{digest.hexdigest()[:12]}", url, eta, lock) as study:
        with lock:
            for candidate, one in candidates.items():
                _enqueue(study, candidate, one, skip_if_exists=True)
        _work(study, objective, say)
        trials = _furthest(study)
    errors = {c: t.value for c, t in trials.items() if t.state == TrialState.COMPLETE and t.value is not None}
    if not errors:
        raise ValueError("a candidate must train to its end to be chosen. Got none: all diverged. Lower lr.")
    chosen = min(sorted(errors, key=list(candidates).index), key=errors.__getitem__)  # ties: the first
    with lock:
        records = run(candidates[chosen], seeds, name=chosen, **shared)  # trained already
        result = {
            "recipe": name,
            "chosen": chosen,
            "beta": candidates[chosen].beta,
            "overlap": candidates[chosen].overlap,
            "held_out": round(errors[chosen], 6),
            "runs": [str(run_folder(out, chosen, candidates[chosen], seed)) for seed in seeds],
            "test": round(fmean(record.errors["expected"]["top1"] for record in records), 6),
            "seeds": list(seeds),
            "validation": validation,
            "study": study.study_name,
            "rungs": _rungs(rungs, eta, candidates, trials, chosen),
            "device": records[0].device,
            "versions": dict(records[0].versions),
        }
        with replacing(out / f"tuning-{name}.json") as part:
            part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


@contextmanager
def _study(name: str, url: str, eta: int, lock: filelock.BaseFileLock) -> Iterator[optuna.Study]:
    """The study of that name, made where there is none."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # `say` says what matters
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=eta)
    sampler = optuna.samplers.RandomSampler()  # draws nothing: all candidates are in the queue
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats
        with lock:  # only one worker may make the tables
            storage = optuna.storages.RDBStorage(
                url,
                heartbeat_interval=HEARTBEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(),
            )
            study = optuna.create_study(
                storage=storage, sampler=sampler, pruner=pruner, study_name=name, load_if_exists=True
            )
        try:
            yield study
        finally:
            storage.remove_session()
            storage.engine.dispose()


def _enqueue(study: optuna.Study, name: str, recipe: Recipe, *, skip_if_exists: bool = False) -> None:
    parameters = {"beta": recipe.beta, "overlap": recipe.overlap}
    study.enqueue_trial(parameters, user_attrs={CANDIDATE: name}, skip_if_exists=skip_if_exists)


def _work(study: optuna.Study, objective: Callable[[Trial], float], say: Callable[[str], None]) -> None:
    """Train candidates until no worker has one left; those of killed workers come back to the queue."""
    waiting = False
    while True:
        optuna.storages.fail_stale_trials(study)
        if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            try:
                study.optimize(objective, n_trials=1, catch=Diverged)
            except FolderInUseError:  # by a worker that was silent, but lives
                time.sleep(GRACE)
        elif running := study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not waiting:
                names = ", ".join(str(trial.user_attrs.get(CANDIDATE)) for trial in running)
                say(f"waiting for other workers, or for {GRACE} s if they were killed: {names}")
            waiting = True
            time.sleep(POLL)
        else:
            return


def _furthest(study: optuna.Study) -> dict[str, FrozenTrial]:
    """The trial of each candidate that trained longest: one that was interrupted has several."""
    trials = [trial for trial in study.get_trials() if CANDIDATE in trial.user_attrs]
    ordered = sorted(trials, key=lambda trial: (trial.state == TrialState.COMPLETE, trial.last_step or 0))
    return {trial.user_attrs[CANDIDATE]: trial for trial in ordered}


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


def _rungs(
    rungs: Sequence[float],
    eta: int,
    candidates: Mapping[str, Recipe],
    trials: Mapping[str, FrozenTrial],
    chosen: str,
) -> list[dict[str, Any]]:
    """The candidates at each length, their errors, and whether they were kept."""

    def rows(i: int) -> list[dict[str, Any]]:
        found = {name: trials[name].intermediate_values for name in candidates if name in trials}
        return [
            {
                "name": name,
                "beta": candidates[name].beta,
                "overlap": candidates[name].overlap,
                "held_out": round(errors[eta**i], 6),
                "kept": name == chosen if i == len(rungs) - 1 else eta ** (i + 1) in errors,
            }
            for name, errors in found.items()
            if eta**i in errors
        ]

    whole = next(iter(candidates.values()))
    return [
        {"fraction": fraction, "length": _length(whole.shortened(fraction)), "rows": rows(i)}
        for i, fraction in enumerate(rungs)
    ]
