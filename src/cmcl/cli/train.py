"""`cmcl train`: a recipe, changed where the command says so."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.registry import DATASETS
from .options import AsJson, Budget, Device, Precision, Quiet, Root, Runs, Seed
from .runs import refuse_arrays
from .shared import (
    check_writable_folder,
    ending,
    engine_options,
    note,
    number,
    parse_pairs,
    print_json,
    print_table,
)
from .stopping import on_ctrl_c

if TYPE_CHECKING:
    from ..reproduction.record import Record
    from ..training.config import Recipe


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name from `cmcl list`.")],
    root: Root = None,
    out: Runs = Path("runs"),
    seed: Seed = 0,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Train so many side by side: 5 is 0 to 4, from --seed on.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="ie, mcl or cmcl.")] = None,
    members: Annotated[int | None, typer.Option(help="M, networks in the ensemble.")] = None,
    overlap: Annotated[int | None, typer.Option(help="K, members that learn each example.")] = None,
    beta: Annotated[float | None, typer.Option(help="Weight of silence.")] = None,
    labels: Annotated[str | None, typer.Option(help="exact, or sampled: stochastic labels.")] = None,
    sharing: Annotated[bool | None, typer.Option(help="Feature sharing.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Length, in place of the recipe's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length, in place of the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    subset: Annotated[int | None, typer.Option(help="Train on a subset of so many examples.")] = None,
    validation: Annotated[float | None, typer.Option(help="Share of the training set to hold out.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Any other field of the recipe.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    budget: Budget = None,
    results: Annotated[Path | None, typer.Option(help="Folder whose records/ gets the record too.")] = None,
    evaluate_every: Annotated[int, typer.Option(metavar="EPOCHS", help="Look at errors on the way.")] = 0,
    save_every: Annotated[float, typer.Option(metavar="SECONDS", help="Between checkpoints.")] = 60.0,
    device: Device = "auto",
    precision: Precision = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe, measure it, and leave a run folder.

    It holds recipe.json, environment.jsonl, telemetry.jsonl, checkpoints/, record.json and ensemble/, which
    cmcl.load takes.
    """
    from ..reproduction.recipes import find

    given = {
        "method": method,
        "members": members,
        "overlap": overlap,
        "beta": beta,
        "labels": labels,
        "sharing": sharing,
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "subset": subset,
        "validation": validation,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    base = find(recipe)
    changed = change(base, changes | parse_pairs(setting or [], "--set"))
    refuse_arrays(changed.data, "data", "cmcl.fit")
    name = changed_name(recipe, base, changed)

    cure = "go on with the same command and --resume"
    with on_ctrl_c(cure):
        from ..reproduction.deadline import parse_budget, stopping_after
        from ..reproduction.run import run, run_folder

        which = [seed] if seeds is None else list(range(seed, seed + seeds))
        folder = run_folder(out, name, changed, which)
        if not resume:
            _refuse_old(folder, changed)
        check_writable_folder(folder if folder.exists() or folder.is_symlink() else out, "--out")
        check_writable_folder(results, "--results")
        if results is not None:
            _refuse_recorded(results, folder, name, changed, which)
        options = engine_options(
            device, precision, quiet=quiet, evaluate_every=evaluate_every, checkpoint_seconds=save_every
        )
        _tell_absent_classes(changed)
        with ending(cure), stopping_after(None if budget is None else parse_budget(budget)):
            records = run(changed, which, out=out, name=name, results=results, root=root, options=options)
        _show(records, folder, as_json)


def change(recipe: "Recipe", changes: Mapping[str, Any]) -> "Recipe":
    """The recipe with these fields; a misspelt name or a value of another type is an error."""
    values = _with_options(recipe, changes)
    other = {"epochs": "steps", "steps": "epochs"}  # the one length takes the other's place
    values |= {other[name]: None for name in other if name in values and other[name] not in values}
    return replace(recipe, **values)


def _with_options(recipe: "Recipe", changes: Mapping[str, Any]) -> dict[str, Any]:
    """network_options.hidden=16 changes that option, and leaves the recipe's others as they are."""
    prefix = "network_options."
    own = {name.removeprefix(prefix): value for name, value in changes.items() if name.startswith(prefix)}
    rest = {name: value for name, value in changes.items() if not name.startswith(prefix)}
    whole = rest.get("network_options", recipe.network_options)
    if not own or not isinstance(whole, Mapping):  # what it is instead is told with the other fields
        return rest
    return rest | {"network_options": {**whole, **own}}


def changed_name(name: str, base: "Recipe", changed: "Recipe") -> str:
    """The recipe's name and what differs: readable, and a name for a folder. The hash tells the rest."""
    before, after = base.to_json(), changed.to_json()
    different = [key for key, value in after.items() if value != before.get(key) and value is not None]
    words = [word for key in different for word in _words(key, after[key], before.get(key))]
    return "-".join([name, *words])[:100]


def _words(key: str, value: Any, before: Any) -> list[str]:
    """Of options, those that differ."""
    if not isinstance(value, dict):
        return [_word(key, value)]
    changed = {name: one for name, one in value.items() if one != (before or {}).get(name, ...)}
    return [_word(name, one) for name, one in changed.items()] or [_word(key, None)]


def _word(key: str, value: Any) -> str:
    """ "batchsize64"; of lists and the like the field's name alone."""
    text = f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int | str) else ""
    return re.sub(r"[^a-z0-9.]+", "", (key + text).lower())


def _refuse_old(folder: Path, recipe: "Recipe") -> None:
    """What to do about a folder that holds this very run."""
    if next(folder.glob("**/record.json"), None):
        raise ValueError(
            f"{folder} must be new. It holds this run, finished. Look at it with `cmcl evaluate {folder}`, "
            "or name another --out or --seed."
        )
    kept = [path.name for path in (folder / "checkpoints").glob("step-*.safetensors")]
    if kept:
        step = max(int(name.split("-")[1]) for name in kept)
        of = f" of {recipe.steps}" if recipe.steps else ""
        raise ValueError(
            f"{folder} must be new. It holds this run, interrupted at step {step}{of}. Go on with --resume, "
            "or name another --out or --seed."
        )


def _refuse_recorded(results: Path, folder: Path, name: str, recipe: "Recipe", seeds: Sequence[int]) -> None:
    """No run may take the place of another that is recorded: which of the two counts is no choice."""
    from ..reproduction.record import file_name, read
    from ..reproduction.run import same_training

    own = [found for path in folder.glob("**/record.json") if (found := read(path))]
    for path in (results / "records" / file_name(name, recipe.hash, seed) for seed in seeds):
        record = read(path)
        if record is None or not record.complete:
            continue
        if not any(same_training(record, other) for other in own):  # the run itself may be measured again
            raise ValueError(
                f"{path} must not be there yet. It is the record of this very run, trained before. Name "
                "another --results or --seed, leave out --results, or move it away."
            )


def _tell_absent_classes(recipe: "Recipe") -> None:
    """Few examples are drawn from the classes in turn: fewer than classes leave some out."""
    info = DATASETS.get(recipe.data or "")
    if info is None or recipe.subset is None or info.dense:  # of pixels, one image has both
        return
    if (absent := len(info.classes) - recipe.subset) > 0:
        few = f"{recipe.subset} example{'s leave' if recipe.subset > 1 else ' leaves'}"
        note(f"{recipe.data} has {len(info.classes)} classes: {few} out {absent} of them.")


def _show(records: "list[Record]", folder: Path, as_json: bool) -> None:
    rows = [
        {
            "seed": record.seed,
            "top1": record.errors["expected"]["top1"],
            "oracle": record.errors["expected"]["oracle"],
            "member": round(fmean(record.members), 6),
            "ece": record.calibration["ece"],
            "seconds": record.seconds,
        }
        for record in records
    ]
    if as_json:
        print_json({"run": str(folder), "name": records[0].name, "results": rows})
        return
    columns = ("seed", ">top-1 %", ">oracle %", ">members alone %", ">ECE %", ">seconds")
    title = f"{records[0].name}: errors on {records[0].test_examples:,} test images"
    lines = [[row["seed"], *map(number, list(row.values())[1:])] for row in rows]
    if len(rows) > 1:
        from ..reproduction.record import spread

        spreads = (spread([row[key] for row in rows]) for key in list(rows[0])[1:-1])
        lines.append(["mean", *(f"{s['mean']:.2f} ± {s['std']:.2f}" for s in spreads), ""])
    print_table(columns, lines, title=title)
    typer.echo(f"\n{folder}")
