"""`cmcl export`: a trained ensemble as one file for other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson, OwnNetwork, OwnOutput, Root, Run
from .runs import data_of, first_ensemble, open_ensemble
from .shared import check_writable, print_json

if TYPE_CHECKING:
    from torch import Tensor


def export(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write: model.onnx, model.pt2.")],
    format: Annotated[str, typer.Option(help="onnx, or torch for torch.export.")] = "onnx",
    root: Root = None,
    example: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Inputs to compare on, instead of test images.")
    ] = None,
    images: Annotated[int, typer.Option(min=2, help="How many test images to compare on.")] = 200,
    network: OwnNetwork = None,
    output: OwnOutput = None,
    as_json: AsJson = False,
) -> None:
    """Write an ensemble as one file: ONNX or torch.export.

    Preprocessing, members, mean and choice are one graph, checked against PyTorch on real images. In: raw
    images, uint8 (batch, channels, height, width). Out: probs, member_probs, entropy, chosen.
    """
    from ..export import export as write
    from ..serialization import saved_checksum

    check_writable(out, "--out", replaced=True)
    place = first_ensemble(run)
    inputs = _read(example) if example else _test_images(place, root, images)
    ensemble = open_ensemble(place, root=root, network=network, output=output)
    done = write(ensemble, out, inputs, format=format, checksum=saved_checksum(place))
    if as_json:
        print_json(done._asdict() | {"path": str(done.path)})
        return
    typer.echo(f"{done.path}: {done.path.stat().st_size / 2**20:.1f} MiB, takes {done.input}")
    typer.echo(f"agrees with PyTorch on {done.examples:,} inputs; largest differences:")
    for name, value in done.differences.items():
        typer.echo(f"  {name:<12}  {value:.1e}")


def _test_images(place: Path, root: Path | None, count: int) -> "Tensor":
    from ..data import load

    name = data_of(place)
    if name is None:
        raise ValueError(
            f"--example must name a .npy file of inputs: {place} does not say what it was trained on."
        )
    return load(name, split="test", root=root)[:count].images


def _read(path: Path) -> "Tensor":
    import numpy as np
    import torch

    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, EOFError, TypeError) as error:
        raise ValueError(f"--example must be a .npy file of numbers. Got {path} ({error}).") from None
