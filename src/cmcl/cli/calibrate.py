"""`cmcl reject`: how sure an ensemble must be, so that few of its answers are wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson, Data, DataOption, Device, OwnNetwork, OwnOutput, Root, Run
from .runs import check_takes, data_of, first_ensemble, load_test, number_as, open_ensemble
from .shared import check_device, check_writable, parse_pairs, print_json

if TYPE_CHECKING:
    from ..calibration import Threshold


def reject(
    run: Run,
    risk: Annotated[float, typer.Option(help="Share of wrong answers to allow among those given.")] = 0.01,
    confidence: Annotated[float, typer.Option(help="Of the promise.")] = 0.95,
    score: Annotated[
        str, typer.Option(help="What to reject by: confidence, mean_entropy, ...")
    ] = "confidence",
    root: Root = None,
    data: Data = None,
    option: DataOption = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Only so many test images, from all over.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Keep the threshold in a JSON file.")
    ] = None,
    network: OwnNetwork = None,
    output: OwnOutput = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find how sure to be, so that few answers are wrong.

    Calibrates a threshold on every second test image, and tries it on the others. The promise: with that
    confidence, at most that share of the answers given is wrong. It holds for images of the same kind, if
    risk, confidence and score are fixed beforehand.
    """
    from ..calibration import ABSTAIN, calibrate, check_promise, decide
    from ..data.dataset import evenly_spaced
    from ..serialization import saved_checksum

    check_promise(risk, confidence, score)
    check_writable(out, "--out")
    place = first_ensemble(run)
    name = data or data_of(place)
    if name is None:
        raise ValueError(
            f"--data must name the set to calibrate on: {run} does not say what it was trained on. "
            "For inputs of another kind use cmcl.calibration from Python."
        )
    device = check_device(device)
    test = evenly_spaced(load_test(name, root, parse_pairs(option or [], "--option")), limit)
    ensemble = open_ensemble(place, root=root, device=device, network=network, output=output)
    check_takes(ensemble, test, "--data", name)
    test = number_as(ensemble, test)
    probs = ensemble.predict(test.images, batch_size=250).member_probs
    threshold = calibrate(probs[:, ::2], test.targets[::2], risk=risk, confidence=confidence, score=score)
    threshold = replace(threshold, weights=saved_checksum(place))
    answers, truth = decide(probs[:, 1::2], threshold), test.targets[1::2]
    given = answers != ABSTAIN
    tried = {
        "examples": len(truth),
        "answered": int(given.sum()),
        "errors": int((answers[given] != truth[given]).sum()),
    }
    if as_json:
        print_json({"threshold": threshold.to_json(), "tried": tried})
    else:
        _print(threshold, *tried.values())
    if out is not None:  # last: what took minutes is on the screen, if this goes wrong
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(threshold.to_json(), indent=1) + "\n", encoding="utf-8")


def _print(threshold: "Threshold", examples: int, answered: int, errors: int) -> None:
    typer.echo(f"{threshold}.")
    typer.echo(
        f"Tried on {examples:,} others: answers {answered / examples:.1%}, {errors} of {answered:,} wrong."
    )
