"""`cmcl layers`: where in a network the members of an ensemble can share features."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson
from .shared import import_function, parse_pairs, print_json, print_table, users_shapes

if TYPE_CHECKING:
    from torch import Tensor, nn


def places(
    network: Annotated[
        str, typer.Argument(help="resnet20 or another network of ours, or MODULE:FUNCTION of your own.")
    ],
    shape: Annotated[
        str, typer.Option("--input", metavar="C,H,W", help="Shape of one input, without the batch.")
    ] = "3,32,32",
    tokens: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Inputs are whole numbers below COUNT, such as words.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of the function, such as classes=100.")
    ] = None,
    usable: Annotated[bool, typer.Option("--usable", help="Only where features can be shared.")] = False,
    as_json: AsJson = False,
) -> None:
    """List where a network's features can be shared.

    With their shapes, and the place to start with.
    """
    from ..splitting import shareable_layers

    module = _build(network, parse_pairs(option or [], "--option"))
    with users_shapes(f"--input (and --tokens) must describe an input that {network} takes. Got {shape};"):
        found = shareable_layers(module, _input(shape, tokens))
    if usable:
        found = [place for place in found if place.problem is None]
    if as_json:
        print_json([place._asdict() for place in found])
        return
    rows = [
        (
            place.name,
            place.kind,
            None if place.shape is None else " × ".join(map(str, place.shape)),
            "suggested" if place.suggested else place.problem or ("skips pass by" if place.bypassed else ""),
        )
        for place in found
    ]
    print_table(["share_after", "kind", "output", "note"], rows)


def _build(name: str, options: dict[str, Any]) -> "nn.Module":
    """The network of that name, ours or the user's."""
    from torch import nn

    from ..networks import NETWORKS

    if name in NETWORKS:
        function: Callable[..., Any] = NETWORKS[name]
    else:
        function = import_function(name, f"the network must be one of {', '.join(NETWORKS)}, or")
    try:
        module = function(**options)
    except TypeError as error:
        raise TypeError(
            f"{name} must be a function that takes the options given. {error}; set them by --option."
        ) from error
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} must return a torch.nn.Module. Got {type(module).__name__}.")
    return module


def _input(shape: str, tokens: int | None) -> "Tensor":
    """Two inputs of that shape: zeros, or words."""
    import torch

    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ValueError(f"--input must be sizes of one input, such as 3,32,32. Got {shape!r}.")
    if tokens is not None:
        return torch.randint(tokens, (2, *sizes), generator=torch.Generator().manual_seed(0))
    return torch.zeros(2, *sizes)
