"""`cmcl reject`: how sure an ensemble must be, so that few of its answers are wrong."""

from pathlib import Path
from typing import Annotated

import typer

from .runs import data_of, find_ensembles
from .shared import AsJson, Device, Root, check_device, print_json


def reject(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a saved ensemble.")],
    risk: Annotated[float, typer.Option(help="Share of wrong answers to allow among those given.")] = 0.01,
    confidence: Annotated[float, typer.Option(help="Of the promise.")] = 0.95,
    score: Annotated[
        str, typer.Option(help="What to reject by: confidence, mean_entropy, ...")
    ] = "confidence",
    root: Root = None,
    limit: Annotated[int | None, typer.Option(min=2, help="The first so many test images only.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Keep the threshold in a JSON file.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find how sure to be, so that few answers are wrong.

    Calibrates a threshold on every second test image, and tries it on the others. The promise: with that
    confidence, at most that share of the answers given is wrong. It holds for images of the same kind, if
    risk, confidence and score are fixed beforehand.
    """
    import json

    from ..data import load as load_data
    from ..data.files import data_root
    from ..rejecting import ABSTAIN, calibrate, decide
    from ..saving import load

    place = find_ensembles(run)[0]
    name = data_of(place)
    if name is None:
        raise ValueError(
            f"{run} must say what it was trained on. It does not; use cmcl.rejecting from Python."
        )
    test = load_data(name, split="test", root=root)[:limit]
    ensemble = load(place, device=check_device(device), root=data_root(root))
    probs = ensemble.predict(test.images, batch_size=250).member_probs
    threshold = calibrate(probs[:, ::2], test.targets[::2], risk=risk, confidence=confidence, score=score)
    answers, truth = decide(probs[:, 1::2], threshold), test.targets[1::2]
    given = answers != ABSTAIN
    tried = {
        "examples": len(truth),
        "answered": int(given.sum()),
        "errors": int((answers[given] != truth[given]).sum()),
    }
    if out is not None:
        out.write_text(json.dumps(threshold.to_json(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json({"threshold": threshold.to_json(), "tried": tried})
        return
    typer.echo(f"{threshold}.")
    n, answered, errors = tried.values()
    typer.echo(f"Tried on {n:,} others: answers {answered / n:.1%}, {errors} of {answered:,} wrong.")
