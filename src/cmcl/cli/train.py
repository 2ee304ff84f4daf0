"""`cmcl train` and `cmcl tune`: train recipes, and choose beta and K on held-out data."""

import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from .._messages import needing_extra
from ..data.registry import DATASETS, address, dataset_info, parse_address
from ..networks import NETWORKS
from . import common

if TYPE_CHECKING:
    from ..reproduction.record import Record
    from ..training.config import Recipe

RESUME = "resume with the same command and --resume"
NESTED = ("network_options.", "augment.")
SEARCHED = {"beta": "--betas", "overlap": "--overlaps", "validation": "--validation"}  # fields of a recipe
USUAL = {"--root": None, "--out": Path("runs"), "--seeds": 1, "--device": "auto", "--precision": "auto"}


class Job(NamedTuple):
    """One run of `cmcl train`."""

    name: str
    recipe: "Recipe"
    seed: int
    folder: Path


def _overlap(text: str) -> Any:
    return "auto" if text == "auto" else int(text)


def train(
    context: typer.Context,
    recipes: Annotated[
        list[str],
        Argument(metavar="RECIPE", help="Names from `cmcl list`; or your own network, MODULE:FUNCTION."),
    ],
    data: Annotated[
        str | None,
        Option("--data", metavar="DATASET", help="Data to train on: folder:PATH for your own images."),
    ] = None,
    option: common.DataOption = None,
    root: common.Root = None,
    out: common.RunsFolder = Path("runs"),
    seed: common.Seed = 0,
    seeds: common.Seeds = 1,
    method: Annotated[str | None, Option(help="ie, mcl or cmcl.")] = None,
    members: Annotated[int | None, Option(help="M, the number of networks.")] = None,
    overlap: Annotated[
        int | None, Option(parser=_overlap, metavar="K", help='Specialists of an example, or "auto".')
    ] = None,
    beta: Annotated[float | None, Option(help="Weight of the KL-to-uniform term.")] = None,
    labels: Annotated[str | None, Option(help="exact, or sampled: stochastic labeling.")] = None,
    sharing: Annotated[bool | None, Option(help="Feature sharing.")] = None,
    epochs: Annotated[float | None, Option(help="Length of training in epochs.")] = None,
    steps: Annotated[int | None, Option(help="Length of training in steps.")] = None,
    batch_size: Annotated[int | None, Option(help="Examples in a batch.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate.")] = None,
    subset: Annotated[int | None, Option(help="Train on a subset of n examples.")] = None,
    validation: Annotated[float | None, Option(help="Fraction of the training data to hold out.")] = None,
    setting: common.Settings = None,
    resume: Annotated[
        bool, Option("--resume", help="Resume runs that were interrupted, or extend shorter ones.")
    ] = False,
    budget: common.Budget = None,
    results: Annotated[Path | None, Option(help="Folder whose records/ also gets the records.")] = None,
    limit: common.Limit = None,
    evaluate_every: common.EvaluateEvery = 0,
    save_every: common.SaveEvery = 60.0,
    device: common.Device = "auto",
    precision: common.Precision = "auto",
    mesh: Annotated[
        str | None,
        Option(metavar="members=M,data=D", help="Places of torchrun's processes. Default: chosen."),
    ] = None,
    quiet: common.Quiet = False,
    as_json: common.AsJson = False,
) -> None:
    """Train recipes and evaluate them; write a run folder for each.

    It holds recipe.json, environment.jsonl, telemetry.jsonl, checkpoints/, record.json and ensemble/, which
    cmcl.load reads. Your own network is a function that builds one member; its arguments classes, channels
    and size are those of the data. Of a folder without train/ and test/, a fifth of every class is test data.
    """
    from ..training.config import Recipe

    names = {field.name for field in fields(Recipe)} - {"data"}
    changes = {key: value for key, value in context.params.items() if key in names and value is not None}
    changes |= common.parse_pairs(setting, "--set")
    given = common.parse_pairs(option, "--option")
    changed = [changed_recipe(recipe, changes, data, given) for recipe in dict.fromkeys(recipes)]
    with common.stoppable(RESUME):
        from ..reproduction.campaign import parse_budget
        from ..reproduction.runner import ending_at, run, run_folder
        from ..training import Diverged
        from ..training.mesh import restarted

        end = None if budget is None else time.monotonic() + parse_budget(budget)
        jobs = [
            Job(name, recipe, s, run_folder(out, name, recipe, s))
            for name, recipe in changed
            for s in common.seed_range(seed, seeds)
        ]
        longer = _extended(jobs, out) if resume else {}
        if not restarted():  # by torchrun: then a run resumes if it can
            _check_folders(jobs, out, resume, longer)
        for place in {job.folder if job.folder.exists() or job.folder.is_symlink() else out for job in jobs}:
            common.check_writable(place, "--out", folder=True)
        common.check_writable(results, "--results", folder=True)
        if results is not None:
            _check_unrecorded(jobs, results)
        options = common.run_options(
            device,
            precision,
            mesh=mesh,
            quiet=quiet,
            evaluate_every=evaluate_every,
            checkpoint_seconds=save_every,
        )
        for _, recipe in changed:
            _warn_of_absent_classes(recipe)
        for folder, shorter in () if common.other_process() else longer.items():
            _extend(shorter, folder)
        done: list[tuple[Job, Record]] = []  # of several processes, process 0 has the records
        trained = 0
        for job in jobs:
            try:
                records = run(
                    job.recipe,
                    [job.seed],
                    name=job.name,
                    out=out,
                    results=results,
                    root=root,
                    options=ending_at(end, options),
                    test_limit=limit,
                )
                done.extend((job, record) for record in records)
                trained += 1
            except Diverged as error:  # the others may still succeed
                common.note(f"{job.folder.name}: {error}")
    if done:
        _show(done, as_json)
    if trained < len(jobs):
        raise typer.Exit(common.FAILED)


def changed_recipe(
    name: str, changes: Mapping[str, Any], data: str | None = None, option: Mapping[str, Any] | None = None
) -> "tuple[str, Recipe]":
    """The recipe with these fields, on these data, and a name that says so."""
    from ..reproduction.recipes import OWN, find

    own = ":" in name or name in NETWORKS
    base = replace(OWN, network=name) if own else find(name)
    if data is None and (own or option):
        raise ValueError(
            f"--data must name the data {f'to train {name} on' if own else 'of --option'}. Got none. "
            "Pass folder:PATH for your own images, or a name from `cmcl list data`."
        )
    if data is not None:
        base, where = on_data(base, data, option or {})
        name = f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name)}-{where}"
    recipe = change(base, changes)
    return changed_name(name, base, recipe), recipe


def on_data(recipe: "Recipe", data: str, option: Mapping[str, Any]) -> "tuple[Recipe, str]":
    """The recipe on other data, the network with their classes and size, and a short name of the data."""
    from ..data import folder
    from ..reproduction.runner import options_for

    kind, path, given = parse_address(data)
    if kind not in DATASETS and Path(data).is_dir():
        raise ValueError(f"--data must be folder:PATH for your own images. Got {data!r}. Use folder:{data}.")
    info = dataset_info(kind)
    if info.shape is not None:
        if option:
            raise ValueError(f"--option must be left out with --data {kind}. Got {', '.join(option)}.")
        name, classes, shape = kind, info.classes, info.shape
    elif path is None:
        raise ValueError(f"--data must name the folder of your images: folder:PATH. Got {data!r}.")
    elif not Path(path).expanduser().is_dir():
        hint = common.nearest_folder(Path(path))
        raise FileNotFoundError(f"--data must name a folder. Got folder:{path}, which is none. {hint}")
    else:
        options, classes, shape = folder.look(path, given | dict(option))
        data, name = address(path, options), re.sub(r"[^A-Za-z0-9_.]+", "-", Path(path).resolve().name)
    fitting = options_for(str(recipe.network), shape, len(classes))
    return replace(recipe, data=data, network_options=recipe.network_options | fitting), name


def change(recipe: "Recipe", changes: Mapping[str, Any]) -> "Recipe":
    """The recipe with these fields; network_options.hidden=16 and augment.crop=4 change one entry."""
    values = {name: value for name, value in changes.items() if not name.startswith(NESTED)}
    for name in changes.keys() - values.keys():
        field, _, entry = name.partition(".")
        base = values.get(field, recipe.to_json()[field])
        if isinstance(base, Mapping):
            values[field] = {**base, entry: changes[name]}
    for length, other in (("epochs", "steps"), ("steps", "epochs")):  # one replaces the other
        if length in values:
            values.setdefault(other, None)
    return replace(recipe, **values)


def changed_name(name: str, base: "Recipe", changed: "Recipe") -> str:
    """The recipe's name and its changed fields, as a name for a folder; the hash covers the rest."""
    before, after = base.to_json(), changed.to_json()
    different = [key for key, value in after.items() if value != before.get(key) and value is not None]
    words = [word for key in different for word in _words(key, after[key], before.get(key))]
    return "-".join([name, *words])[:100]


def _words(key: str, value: Any, before: Any) -> list[str]:
    """ "batchsize64"; for a dict its changed entries, for a list the name of the field alone."""
    if isinstance(value, dict):
        changed = {name: one for name, one in value.items() if one != (before or {}).get(name, ...)}
        return [word for name, one in changed.items() for word in _words(name, one, None)] or _words(
            key, [], None
        )
    text = f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int | str) else ""
    return [re.sub(r"[^a-z0-9.]+", "", (key + text).lower())]


def _extended(jobs: Sequence[Job], out: Path) -> dict[Path, Path]:
    """By its folder, for each run that is not there yet: the longest run of a shorter length, if any."""
    from .._files import read_json
    from ..training.checkpoint import last_step
    from ..training.config import Recipe

    found: dict[Path, Path] = {}
    for job in jobs:
        runs = [] if job.folder.exists() or not out.is_dir() else sorted(out.glob(f"*--seed{job.seed}"))
        for run in sorted(runs, key=lambda run: last_step(run) or 0):
            try:
                shorter = Recipe.from_json(read_json(run / "recipe.json"))
            except (OSError, ValueError, TypeError):  # not a run, or a damaged one
                continue
            length: dict[str, Any] = {"epochs": job.recipe.epochs, "steps": job.recipe.steps}
            if any(own and own < (getattr(shorter, key) or 0) for key, own in length.items()):
                continue  # it is longer
            if last_step(run) and replace(shorter, **length) == job.recipe:
                found[job.folder] = run
        if job.folder in found and (fields := job.recipe.tied_to_length):
            raise ValueError(
                f"a run to extend must do the same in each step whatever its length. Got {fields[0]}="
                f"{getattr(job.recipe, fields[0])!r} in {found[job.folder]}. Train {job.name} anew, without "
                "--resume. A run with --set schedule=constant, and milestones at steps, can be extended."
            )
    return found


def _extend(shorter: Path, folder: Path) -> None:
    """Begin a longer run with the checkpoints and the telemetry of a shorter one, which stays."""
    common.note(f"extending {shorter.name}, which stays as it is")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".extend-") as place:
        copy = Path(place) / folder.name
        shutil.copytree(shorter / "checkpoints", copy / "checkpoints")
        for name in ("telemetry.jsonl", "environment.jsonl"):
            if (shorter / name).is_file():
                shutil.copyfile(shorter / name, copy / name)
        copy.rename(folder)


def _check_folders(jobs: Sequence[Job], out: Path, resume: bool, longer: Mapping[Path, Path]) -> None:
    """Raise if a new run would overwrite a run, or if there is none to resume or to extend."""
    from ..training.checkpoint import last_step

    if resume and not longer and not any(job.folder.is_dir() for job in jobs):
        there = sorted(path.name for path in out.iterdir() if path.is_dir()) if out.is_dir() else []
        held = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "") or "no run"
        raise ValueError(
            f"--resume must find a run to resume. Got none at {jobs[0].folder}; {out} holds {held}. Repeat "
            "the options of the interrupted command, or start a new run without --resume."
        )
    for job in jobs if resume else ():
        if (job.folder / "record.json").exists() and not last_step(job.folder):
            raise ValueError(
                f"{job.folder} must hold a checkpoint for --resume. It holds a finished run without one. "
                f"Evaluate it with `cmcl evaluate {job.folder}`, train it again with another --out, or leave "
                "out its seed."
            )
    for job in () if resume else jobs:
        if (job.folder / "record.json").exists():
            state, hint = "finished", f"Evaluate it with `cmcl evaluate {job.folder}`"
        elif step := last_step(job.folder):
            of = f" of {job.recipe.steps}" if job.recipe.steps else ""
            state, hint = f"interrupted at step {step}{of}", "Resume it with --resume"
        else:
            continue
        message = f"{job.folder} must be new. It holds this run, {state}. {hint}"
        raise ValueError(f"{message}, or name another --out or --seed.")


def _check_unrecorded(jobs: Sequence[Job], results: Path) -> None:
    """Raise if another run is recorded under the same name: nobody may choose between the two."""
    from ..reproduction.record import file_name, read
    from ..reproduction.runner import same_training

    for job in jobs:
        path = results / "records" / file_name(job.name, job.recipe.hash, job.seed)
        record, own = read(path), read(job.folder / "record.json")
        if record is None or not record.complete:
            continue
        if own is None or not same_training(record, own):  # the run itself may be evaluated again
            raise ValueError(
                f"{path} must not exist yet. It is the record of another run of this recipe and seed. Name "
                "another --results or --seed, leave out --results, or move it away."
            )


def _warn_of_absent_classes(recipe: "Recipe") -> None:
    """A subset takes examples from each class in turn: fewer examples than classes leave some out."""
    info = DATASETS.get(recipe.data or "")
    if info is None or recipe.subset is None or info.dense:  # one image has pixels of all classes
        return
    if (absent := len(info.classes) - recipe.subset) > 0:
        few = f"a subset of {recipe.subset}"
        common.note(f"{recipe.data} has {len(info.classes)} classes: {few} leaves out {absent} of them.")


def _show(done: "Sequence[tuple[Job, Record]]", as_json: bool) -> None:
    rows = [
        {
            "run": str(job.folder),
            "name": record.name,
            "seed": record.seed,
            "examples": record.test_examples,
            **{key: record.scores.get(key) for key in ("top1", "oracle", "member", "ece", "scaled_ece")},
            "temperature": record.calibration.get("temperature"),
            "seconds": record.seconds,
        }
        for job, record in done
    ]
    if as_json:
        common.print_json(rows)
        return
    for name in dict.fromkeys(row["name"] for row in rows):
        _print_runs([row for row in rows if row["name"] == name])
    if unscaled := [(job, record) for job, record in done if "temperature" not in record.calibration]:
        job, record = max(unscaled, key=lambda pair: pair[1].calibration["ece"])
        ece = record.calibration["ece"] if job.recipe.method == "cmcl" else 0.0
        common.say_unscaled(job.folder, network=job.recipe.network, ece=ece)
    for row in rows:
        typer.echo(row["run"])  # not wrapped, to be copied


def _print_runs(rows: Sequence[dict[str, Any]]) -> None:
    """The seeds of one recipe."""
    from ..reproduction.record import spread, spread_text

    columns = {"top1": "top-1", "oracle": "oracle", "member": "member", "ece": "ECE"}
    if all(row["scaled_ece"] is not None for row in rows):
        columns["scaled_ece"] = "scaled ECE"
    lines = [[row["seed"], *(common.number(row[key]) for key in (*columns, "seconds"))] for row in rows]
    if len(rows) > 1:
        lines.append(["mean", *(spread_text(spread([row[key] for row in rows])) for key in columns), ""])
    heads = ("seed", *(f">{title} %" for title in columns.values()), ">seconds")
    title = f"{rows[0]['name']}: errors on {rows[0]['examples']:,} test images"
    common.print_table(heads, lines, title=title, best=1)
    typer.echo()


def tune(
    recipe: Annotated[str, Argument(metavar="RECIPE", help="A CMCL recipe from `cmcl list`.")],
    root: common.Root = None,
    out: common.RunsFolder = Path("runs"),
    betas: Annotated[
        str | None, Option(metavar="B,B,...", help="Values of beta. Default: the paper's.")
    ] = None,
    overlaps: Annotated[
        str | None, Option(metavar="K,K,...", help="Values of K. Default: the paper's.")
    ] = None,
    setting: common.Settings = None,
    validation: Annotated[float, Option(help="Fraction of the training data to hold out.")] = 0.1,
    eta: Annotated[int, Option(min=2, help="Keep one of eta candidates, and train it eta times longer.")] = 3,
    seeds: Annotated[int, Option(min=1, help="Seeds over which a candidate's error is averaged.")] = 1,
    storage: Annotated[
        str | None, Option(metavar="URL", help="Optuna's database. Default: an SQLite file in --out.")
    ] = None,
    plot: Annotated[
        Path | None, Option(metavar="FILE", help="Draw the search to an .svg, .png or .pdf.")
    ] = None,
    device: common.Device = "auto",
    precision: common.Precision = "auto",
    quiet: common.Quiet = False,
    as_json: common.AsJson = False,
) -> None:
    """Choose beta and K on held-out data.

    An Optuna study: better candidates train longer. Only the chosen one is evaluated on test data. The same
    command resumes an interrupted search; with one --storage and --out, several of them share it.
    """
    from .. import report
    from ..reproduction.recipes import find

    with needing_extra("tune", "optuna"):
        from ..reproduction.tuning import tune as search

    changes = common.parse_pairs(setting, "--set")
    if searched := [name for name in SEARCHED if name in changes]:
        raise ValueError(
            f"--set must name a field that is not searched. Got {searched[0]}. Use {SEARCHED[searched[0]]}."
        )
    base = replace(find(recipe), overlap=1)  # the recipe's own K may be more than the members of --set
    changed = change(base, changes)
    name = changed_name(recipe, base, changed)
    if plot is not None:
        figures = report.extra("figures")
        figures.check_file(plot)
    common.check_writable(plot, "--plot")
    common.check_writable(out, "--out", folder=True)
    with common.stoppable():
        result = search(
            name,
            out=out,
            recipe=changed,
            betas=_numbers(betas, float, "--betas"),
            overlaps=_numbers(overlaps, int, "--overlaps"),
            validation=validation,
            eta=eta,
            seeds=list(range(seeds)),
            storage=storage,
            root=root,
            options=common.run_options(device, precision, quiet=True),
            say=(lambda line: None) if quiet else common.note,
        )
    if plot is not None:
        figures.save(figures.tuning(result), plot)
    if as_json:
        common.print_json(result)
        return
    lengths = [rung["length"] for rung in result["rungs"]]
    title = f"{name}: held-out top-1 error in %, {validation:.0%} of the training set"
    heads = (">beta", ">K", *(f">{length}" for length in lengths))
    common.print_table(heads, _candidates(result), title=title, best=len(heads) - 1)
    common.say(f"\nchosen: beta {result['beta']:g}, K {result['overlap']}; test error {result['test']:.2f} %")
    common.say(f"trained without the {validation:.0%} held out: {', '.join(result['runs'])}")
    given = {"--root": root, "--out": out, "--seeds": seeds, "--device": device, "--precision": precision}
    options = [word for key, value in given.items() if value != USUAL[key] for word in (key, str(value))]
    chosen = ["--beta", f"{result['beta']:.15g}", "--overlap", str(result["overlap"])]
    changed_fields = [word for pair in setting or () for word in ("--set", pair)]
    command = shlex.join(["cmcl", "train", recipe, *chosen, *changed_fields, *options])
    typer.echo(f"to train it on all data: {command}")


def _numbers(text: str | None, kind: type, option: str) -> list[Any] | None:
    try:
        return None if text is None else [kind(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas, such as 0.5,0.75. Got {text!r}.") from None


def _candidates(result: dict[str, Any]) -> list[list[Any]]:
    """A row for each candidate, those of the most rounds and the lowest error first."""
    rows: dict[str, list[Any]] = {}
    for rung in result["rungs"]:
        for row in rung["rows"]:
            start = [f"{row['beta']:g}", row["overlap"]]
            rows.setdefault(row["name"], start).append(row["held_out"])
    ordered = sorted(rows.values(), key=lambda row: (-len(row), row[-1]))
    missing = [None] * len(result["rungs"])
    return [[*row[:2], *map(common.number, row[2:]), *missing[len(row) - 2 :]] for row in ordered]
