"""`cmcl list`: what there is by name. Loads no torch."""

from typing import Annotated, Any

import typer

from .options import AsJson
from .shared import number, print_json, print_table

KINDS = ("recipes", "networks", "data")
NETWORKS = {  # name -> what it is; plain text, so that listing the networks loads none of them
    "cnn": "two convolutions, the small network of Tables 1 and 2",
    "vggnet17": "VGGNet with 17 layers, Table 3",
    "googlenet18": "GoogLeNet with 18 layers, Table 3",
    "resnet20": "ResNet with 20 layers, Table 3",
    "fcn": "fully convolutional, an answer per pixel, figures 3 and 4",
}


def show(
    kind: Annotated[
        str | None, typer.Argument(metavar="recipes|networks|data", help="All three, if none is named.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List recipes with the paper's errors, networks and data sets."""
    from ..data.registry import nearest

    if kind is not None and kind not in KINDS:
        raise ValueError(f"list must be of {', '.join(KINDS)}. Got {kind!r}. {nearest(kind, list(KINDS))}")
    wanted = KINDS if kind is None else (kind,)
    found = {name: entries for name, entries in _everything().items() if name in wanted}
    if as_json:
        print_json(found)
        return
    for i, (name, entries) in enumerate(found.items()):
        if i:
            typer.echo()
        if name == "recipes":
            _print_recipes(entries)
        else:
            title = "Data sets" if name == "data" else "Networks"
            print_table(("name", "what"), [(entry["name"], entry["what"]) for entry in entries], title=title)


def _everything() -> dict[str, list[dict[str, Any]]]:
    from ..data import DATASETS
    from ..reproduction import RECIPES

    return {
        "recipes": [_recipe(name) for name in RECIPES],
        "networks": [{"name": name, "what": what} for name, what in NETWORKS.items()],
        "data": [{"name": name, "what": info.description} for name, info in DATASETS.items()],
    }


def _recipe(name: str) -> dict[str, Any]:
    """A recipe in short, with the places of the paper that it fills and what the paper has there."""
    from ..reproduction import CELLS, RECIPES

    recipe = RECIPES[name]
    cells = [cell for cell in CELLS if cell.name == name]
    paper = next((cell.paper for cell in cells if cell.paper and not cell.single), None)
    return {
        "name": name,
        "data": recipe.data,
        "network": recipe.network,
        "method": recipe.method,
        "members": recipe.members,
        "overlap": recipe.objective["overlap"],
        "sharing": recipe.sharing,
        "labels": recipe.objective["labels"],
        "paper": None if paper is None else dict(paper),
        "cells": [cell.id for cell in cells],
    }


def _print_recipes(recipes: list[dict[str, Any]]) -> None:
    rows = []
    for r in recipes:
        paper = r["paper"] or {}
        places = dict.fromkeys(cell.split("/")[0] for cell in r["cells"])
        rows.append(
            (
                r["name"],
                r["members"],
                r["overlap"],
                number(paper.get("top1")),
                number(paper.get("oracle")),
                ", ".join(places) or None,
            )
        )
    columns = ("recipe", ">M", ">K", ">paper top-1 %", ">oracle %", "where")
    print_table(columns, rows, title="Recipes (M members, K of them learn each example)")
