"""A run of your own, measured: what `cmcl report` shows of named recipes, for any network and any images."""

from pathlib import Path

from torch import Tensor

from ..data import from_arrays
from ..data.dataset import Dataset
from ..engine import Options, Result
from ..ensemble import Ensemble
from ..recipe import Recipe
from . import environment
from .gallery import write_gallery
from .measure import measure
from .records import Record


def record(
    folder: str | Path,
    ensemble: Ensemble,
    test: Dataset | tuple[Tensor, Tensor],
    *,
    recipe: Recipe,
    result: Result,
    seed: int = 0,
    outside: Dataset | None = None,
    options: Options | None = None,
) -> Record:
    """Measure an ensemble that `fit` trained; leave record.json, gallery/ and ensemble/ in its run folder.

    Args:
        folder: the `out` of `fit`; its name becomes the record's.
        ensemble: as `fit` left it.
        test: images that it has not learned, with their targets: a `Dataset`, or (images, targets).
        recipe, result, seed, options: what `fit` was given and what it returned.
        outside: images of a kind that it has never seen.
    """
    folder = Path(folder)
    test = test if isinstance(test, Dataset) else from_arrays(*test, split="test")
    made = Record(
        name=folder.name,
        recipe=recipe.to_json(),
        recipe_hash=recipe.hash,
        seed=seed,
        full_length=True,
        full_test=True,
        test_examples=len(test),
        checksums={"test": test.checksum},
        outside=None if outside is None else outside.source,
        steps=result.steps,
        seconds=round(result.seconds, 3),
        together=[seed],
        **environment.facts(options or Options()),
        **measure(ensemble, test, outside=outside, seed=seed),
    )
    ensemble.save(folder / "ensemble")
    write_gallery(folder / "gallery", ensemble, test, test.images)
    made.save(folder / "record.json")
    return made
