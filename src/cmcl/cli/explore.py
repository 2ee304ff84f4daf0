"""`cmcl demo`, `cmcl list` and `cmcl layers`: see what cmcl does and what it has."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ..lazy import import_function
from ..networks import NETWORKS
from . import common

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..reproduction.record import Record
    from ..training import Options

METHODS = {"single": "one network", "ie": "independent ensemble", "mcl": "MCL", "cmcl": "CMCL"}
SHOWN = {  # of a record, by the demo; "picked" of segmentation alone
    "top1": "top-1 error %",
    "picked": "picked error %",
    "oracle": "oracle error %",
    "ece": "ECE %",
    "scaled_ece": "scaled ECE %",
}
MORE_SEEDS = {  # --segmentation or not -> where results of several seeds are
    False: "results/demo-seeds.txt has twenty seeds",
    True: "results/demo-seeds-segmentation.txt has five seeds",
}
ECE = (
    "CMCL is underconfident, so its ECE is high: near-uniform predictions of non-specialists are part of the "
    "average.\nScaled ECE: after temperature scaling (docs/tutorials/calibration.md), fitted on training "
    "images outside the subset."
)
KINDS = ("recipes", "networks", "data")
GROUPS = {  # first table or figure of a recipe -> title
    "": "Small recipes, for any computer and without a download",
    "table1": "Table 1: a small CNN on CIFAR-10",
    "table3": "Table 3: large networks on CIFAR-10 and SVHN",
    "default": "The default beside Table 1: is it better than IE for a small CNN?",
    "modern": "Training of today: augmentation, one-cycle learning rate",
    "table2": "Table 2: the grid over M and K",
    "fig": "Figures 2 to 4: adversarial training, ten members, segmentation of iCoseg",
}
GRID = ("modern", "table2", "fig")  # groups of `cmcl list --all`


def demo(
    out: Annotated[Path, Option("--out", "-o", help="Folder for the runs and the report page.")] = Path(
        "cmcl-demo"
    ),
    segmentation: Annotated[
        bool, Option("--segmentation", help="Segment drawn scenes instead of classifying digits.")
    ] = False,
    seed: common.Seed = 4,  # of the seeds 0 to 4, the one with the median gain on the digits
    quiet: common.Quiet = False,
    as_json: common.AsJson = False,
) -> None:
    """Compare one network, IE, MCL and CMCL in about a minute.

    Needs no download. Writes a report page into the folder. Runs that it holds are not trained again.
    """
    from ..training import Options

    common.check_writable(out, "--out", folder=True)
    seed = common.seed_range(seed)[0]
    options = Options(device="cpu", quiet=quiet or not sys.stderr.isatty(), evaluate_every=3)

    def progress(line: str) -> None:
        if not quiet:
            common.say(line, err=True)

    found: dict[str, Any] = {}
    with common.stoppable():
        with one_thread():
            for i, (method, title) in enumerate(METHODS.items(), 1):
                name = f"{'shapes-160' if segmentation else 'digits-300'}-{method}"
                progress(f"{i}/{len(METHODS)} {title} ({name})")
                started = time.perf_counter()
                found[method] = scores(train_and_calibrate(name, seed, out, options))
                seconds = time.perf_counter() - started
                progress(f"    top-1 error {found[method]['top1']:.1f} %, {seconds:.0f} s")
        found["report"] = _write_report(out)
    if as_json:
        common.print_json(found)
        return
    rows = [(title, *map(common.number, found[method].values())) for method, title in METHODS.items()]
    heads = ("method", *(f">{SHOWN[key]}" for key in found["cmcl"]))
    common.print_table(heads, rows, best=1 + segmentation)
    picked = " Picked: the most confident member is wrong." if segmentation else ""
    common.say(f"\nTop-1: the averaged prediction is wrong.{picked} Oracle: every member is wrong.")
    common.say(f"One seed on few test images is noisy: {MORE_SEEDS[segmentation]}.\n{ECE}")
    if found["report"] is not None:
        typer.echo(f"\nReport: {found['report']}")


def train_and_calibrate(name: str, seed: int, out: Path, options: "Options") -> "Record":
    """The record of a recipe; the temperature is that of the training images outside its subset."""
    from ..data import load
    from ..data.dataset import outside_subset
    from ..reproduction.recipes import find
    from ..reproduction.runner import run

    recipe = find(name)
    outside = outside_subset(load(str(recipe.data)), recipe.subset or 0)
    (record,) = run(name, [seed], out=out, options=options, held_out=outside)
    return record


def scores(record: "Record") -> dict[str, float]:
    """What the demo shows of a record, in percent."""
    return {key: record.scores[key] for key in SHOWN if key != "picked" or record.dense}


def _write_report(out: Path) -> str | None:
    """The path of the report page; None without the libraries that draw it."""
    from ..report import write

    try:
        return str(write([out], out / "report.html"))
    except ImportError as error:  # its message says how to install them
        common.note(f"no report page: {error}")
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Layers this small lose more to a second thread than they gain."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def show(
    kind: Annotated[
        str | None, Argument(metavar="recipes|networks|data", help="What to list. Default: everything.")
    ] = None,
    everything: Annotated[bool, Option("--all", help="Also list the paper's grid over M and K.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """List recipes with the paper's errors, networks and datasets."""
    common.check_choice("list", kind, KINDS)
    found = {name: entries for name, entries in _everything().items() if kind in (None, name)}
    if as_json:
        common.print_json(found)
        return
    for i, (name, entries) in enumerate(found.items()):
        if i:
            typer.echo()
        if name == "recipes":
            _print_recipes(entries, everything)
        else:
            title = "Datasets" if name == "data" else "Networks"
            common.print_table(
                ("name", "description"), [(e["name"], e["description"]) for e in entries], title=title
            )


def _everything() -> dict[str, list[dict[str, Any]]]:
    from ..data import DATASETS
    from ..reproduction import RECIPES

    return {
        "recipes": [_recipe(name) for name in RECIPES],
        "networks": [
            {"name": name, "description": f"{info.description}, {info.paper}"}
            for name, info in NETWORKS.items()
        ],
        "data": [{"name": name, "description": info.description} for name, info in DATASETS.items()],
    }


def _recipe(name: str) -> dict[str, Any]:
    """A recipe with a description, the cells of the paper that it fills, and the paper's errors there."""
    from ..reproduction import CELLS, RECIPES
    from ..reproduction.cells import BESIDE_PAPER, techniques

    recipe, values = RECIPES[name], RECIPES[name].to_json()
    cells = [cell for cell in (*CELLS, *BESIDE_PAPER) if cell.name == name]
    paper = next((cell.paper for cell in cells if cell.paper and not cell.single), None)
    first = cells[0].where[0] if cells else ""
    several = recipe.members > 1
    words = [
        f"{METHODS[recipe.method]}, M={recipe.members}" if several else METHODS["single"],
        f"K={recipe.objective['overlap']}" if several and recipe.method != "ie" else "",
        *techniques(values),
        f"subset of {recipe.subset}" if recipe.subset else "",
    ]
    return {
        "name": name,
        "description": ", ".join(filter(None, words)),
        "group": "fig" if first.startswith("fig") else first,
        "recipe": values,
        "paper": None if paper is None else dict(paper),
        "cells": [cell.id for cell in cells],
    }


def _print_recipes(recipes: list[dict[str, Any]], everything: bool) -> None:
    common.say("Recipes: M members, K specialists of each example, the paper's top-1 and oracle error in %")
    for group, title in GROUPS.items():
        if group in GRID and not everything:
            continue
        typer.echo()
        own = [recipe for recipe in recipes if recipe["group"] == group]
        columns, errors = ["recipe", "description"], ("top1", "oracle")
        rows = [[r["name"], r["description"]] for r in own]
        if any(r["paper"] for r in own):
            columns += [">top-1", ">oracle"]
            rows = [
                [*row, *(common.number((r["paper"] or {}).get(e)) for e in errors)]
                for row, r in zip(rows, own, strict=True)
            ]
        common.print_table(columns, rows, title=title)
    if not everything:
        hidden = sum(recipe["group"] in GRID for recipe in recipes)
        more = "today's training, Table 2 and figures 2 to 4"
        typer.echo(f"\n{hidden} more recipes ({more}): cmcl list recipes --all")


def layers(
    network: Annotated[str, Argument(help="A name from `cmcl list networks`, or your own MODULE:FUNCTION.")],
    shape: Annotated[str, Option("--input", metavar="C,H,W", help="Shape of one input.")] = "3,32,32",
    tokens: Annotated[
        int | None, Option(min=1, max=2**31, metavar="COUNT", help="Inputs are token ids below COUNT.")
    ] = None,
    option: Annotated[
        common.Pairs, Option(metavar="NAME=VALUE", help="Argument of the network, such as classes=100.")
    ] = None,
    usable: Annotated[
        bool, Option("--usable", help="Only layers after which features can be shared.")
    ] = False,
    as_json: common.AsJson = False,
) -> None:
    """List the layers after which features can be shared.

    Shows the shape of their outputs and the suggested one.
    """
    from ..splitting import shareable_layers

    module = _build(network, common.parse_pairs(option, "--option"))
    with common.input_errors(
        f"--input (and --tokens) must describe an input that {network} takes. Got {shape};"
    ):
        found = shareable_layers(module, _input(shape, tokens))
    if usable:
        found = [layer for layer in found if layer.problem is None]
    if as_json:
        common.print_json([layer._asdict() for layer in found])
        return
    rows = [
        (
            layer.name,
            layer.kind,
            None if layer.shape is None else " × ".join(map(str, layer.shape)),
            "suggested" if layer.suggested else layer.problem or ("skips pass by" if layer.bypassed else ""),
        )
        for layer in found
    ]
    common.print_table(["share_after", "kind", "output", "note"], rows)


def _build(name: str, options: dict[str, Any]) -> "nn.Module":
    """The network of that name, ours or the user's."""
    from torch import nn

    if name in NETWORKS:
        function: Callable[..., Any] = NETWORKS[name]
    else:
        function = import_function(name, f"the network must be one of {', '.join(NETWORKS)}, or")
    try:
        module = function(**options)
    except TypeError as error:
        raise TypeError(f"{name} must be a function that takes the options given. {error}.") from error
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} must return a torch.nn.Module. Got {type(module).__name__}.")
    return module


def _input(shape: str, tokens: int | None) -> "Tensor":
    """Two inputs of that shape: zeros, or token ids."""
    import torch

    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        sizes = [0]
    if not 0 < min(sizes) <= max(sizes) < 2**31:
        raise ValueError(f"--input must be sizes of one input, such as 3,32,32. Got {shape!r}.")
    if tokens is not None:
        return torch.randint(tokens, (2, *sizes), generator=torch.Generator().manual_seed(0))
    return torch.zeros(2, *sizes)
