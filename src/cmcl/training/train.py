"""`fit`: train an ensemble by a recipe."""

from collections.abc import Sequence
from pathlib import Path

from ..ensemble import Ensemble
from ..objectives import TaskLoss
from .admission import fitting, repeats
from .config import Options, Recipe
from .run import Result, Run
from .scoring import AUTO
from .setup import Data, settings


def fit(
    ensemble: Ensemble | Sequence[Ensemble],
    train: Data,
    *,
    recipe: Recipe,
    seed: int | Sequence[int] = 0,
    test: Data | None = None,
    task: TaskLoss | None = None,
    ignore_index: int | str | None = AUTO,
    out: str | Path | None = None,
    resume: bool = False,
    options: Options | None = None,
) -> Result:
    """Train an ensemble, or R repeats of one side by side, by Algorithm 1 of the paper.

    Args:
        ensemble: what to train, in place; or a list of R ensembles, one for each seed.
        train: a `Dataset`, (images (N, ...), targets (N, ...)) or a DataLoader. uint8 images go through
            `ensemble.transform`, which is fitted to them if it is not set.
        recipe: method, length, optimiser. Its `validation` share of a `Dataset` is held out and looked at on
            the way; `test` only if nothing is held out.
        seed: of data order, masks and labels; one for each repeat.
        test: data for the scores at the end.
        task: what a specialist learns, as for `confident_oracle_loss`: class weights, label smoothing.
        ignore_index: a target that counts for nothing. "auto": 255 of pixels, where it can be no class.
        out: run folder, for telemetry and checkpoints. None: nothing is written.
        resume: go on from the folder's last checkpoint, if there is one.
        options: how the run is carried out.
    """
    ensembles, seeds = repeats(ensemble, seed)
    if resume and out is None:
        raise ValueError("out must name the folder of the run to be resumed. Got None.")
    recipe, *others = [fitting(recipe, own) for own in ensembles]
    if any(other != recipe for other in others):
        raise ValueError(
            f"ensembles must share features alike. Got {', '.join(map(_sharing, (recipe, *others)))}."
        )
    options = options or Options()
    with settings(options, seeds):
        run = Run(ensembles, train, test, recipe, seeds, options, task, ignore_index)
        return run.go(None if out is None else Path(out), resume)


def _sharing(recipe: Recipe) -> str:
    return f"probability {recipe.share_prob:g}" if recipe.sharing else "no sharing"
