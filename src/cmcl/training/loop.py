"""`fit`: train an ensemble by Algorithm 1 of the paper. The whole training loop is in this file.

N examples, M members.
"""

import copy
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from .._messages import warn
from ..ensemble import Ensemble
from ..objectives import TaskLoss
from ..stacking import Stacked
from .augment import Augmentation
from .batches import Batches, Data, Resident
from .checkpoint import RunFolder
from .choosing import overlap_errors
from .config import Options, Recipe, check_seed
from .cuda import Captured, captured, execution, use_compiler
from .mesh import Mesh, rank
from .preflight import AUTO, Plan, preflight, task_name
from .progress import Progress
from .scoring import evaluate_together, held_out_temperature
from .step import Step, TrainState


@dataclass
class Result:
    """What a run returns; its folder holds more. After a custom training loop, give steps and seconds."""

    steps: int  # of the whole run
    seconds: float  # over all the times the run was resumed
    seed: int = 0  # of the run
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)  # telemetry of this call, by epoch
    scores: dict[str, float] | None = None  # errors on the test data, in percent
    task: str | None = None  # the name of a task loss of the user's own
    data: str | None = None  # a description of the training data
    batch_size: int | None = None  # of a DataLoader, if it has one
    mesh: str | None = None  # of several processes: "members=2,data=2"
    temperature: float | None = None  # of the ensemble, fitted to held-out data; None: there are none
    overlap: int | None = None  # K, given or chosen
    overlap_errors: dict[int, float] = field(default_factory=dict)  # held-out errors that K was chosen by

    def __post_init__(self) -> None:
        self.steps, self.seconds = int(self.steps), float(self.seconds)
        self.seed = check_seed(self.seed)
        if self.steps < 0 or not 0 <= self.seconds < math.inf:
            raise ValueError(
                f"steps and seconds must be finite, 0 or more. Got {self.steps} and {self.seconds}."
            )


def fit(
    ensemble: Ensemble,
    train: Data,
    *,
    recipe: Recipe,
    seed: int = 0,
    test: Data | None = None,
    task: TaskLoss | None = None,
    ignore_index: int | str | None = AUTO,
    augment: Augmentation | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    options: Options | None = None,
) -> Result:
    """Train an ensemble of classifiers in place, by Algorithm 1 of the paper.

    Modules that are in eval mode while their member is in train mode (a frozen BatchNorm) stay so, also in
    later calls, until `ensemble.train()`.

    Args:
        ensemble: what to train.
        train: a `Dataset`, a pair (images (N, ...), targets (N, ...)) of tensors or arrays, or a DataLoader.
            Targets are classes from 0 on. uint8 images (N, C, H, W) go through `ensemble.transform`, which
            is fitted to them if it is not set.
        recipe: method, length, optimizer. overlap="auto" begins with short runs of a few K on 80 % of the
            training examples, and takes the K with the lowest error on the others. The `validation` fraction
            of a `Dataset` is held out, scored during training (`test` only if nothing is held out), and fits
            `ensemble.temperature` at the end; without it the averaged prediction is not scaled.
        seed: of data order, masks and labels.
        test: data for the scores at the end.
        task: the loss of a specialist, as for `confident_oracle_loss`: class weights, label smoothing.
        ignore_index: a target that is not counted. "auto": 255 of pixels, where it cannot be a class.
        augment: a function (images, targets, generator) -> (images, targets), applied to each batch on the
            training device, with the rest of `recipe.augment` after it. All random numbers must come from the
            generator: a CUDA graph would repeat others, and a resumed run would draw others.
        out: run folder, for telemetry and checkpoints. None: nothing is written.
        resume: resume from the folder's last checkpoint.
        options: how the run is carried out.
    """
    options = options or Options()
    if resume and out is None:
        raise ValueError("out must name the folder of the run to resume. Got None.")
    if resume and out is not None and rank() == 0 and not Path(out).exists():
        raise ValueError(f"{out} must hold a checkpoint to resume from. It does not exist.")
    how: dict[str, Any] = {"task": task, "ignore_index": ignore_index, "augment": augment}
    # raises, and changes nothing
    plan = preflight(ensemble, train, test, recipe=recipe, seed=seed, options=options, **how)
    mesh = Mesh(plan.mesh, plan.device)
    folder, errors = RunFolder(out, options, mesh), dict[int, float]()
    if plan.recipe.chooses_overlap:
        with folder:
            if (saved := folder.saved_recipe(resume)) is None:
                errors = _overlap_errors(ensemble, plan, folder.started, how)
        best = min(errors, key=errors.__getitem__, default=None)  # the first of equal ones
        plan.recipe = replace(plan.recipe, overlap=best if saved is None else saved.overlap)
    recipe, rows, stacked = plan.recipe, [], None
    with (
        ExitStack() as end,
        execution(options, plan.seed),
        folder,
        mesh.batch_norm(ensemble),
        warnings.catch_warnings(action="ignore") if mesh.rank > 0 else nullcontext(),  # process 0 warns
    ):
        with _on_device(ensemble, plan.device):
            batches = plan.batches()
            steps = recipe.total_steps(batches.examples, batches.batch_size)
            epochs = batches.epoch_of(steps - 1) + 1
            if plan.stack:
                stacked = Stacked(ensemble)
                end.callback(stacked.release)
            state = TrainState(ensemble, recipe, plan.seed, plan.monitored_classes, steps, mesh, stacked)
            described = _describe(plan, batches, ignore_index, augment)
            mesh.equal("recipe, seed and data", f"{recipe.hash}, {plan.seed}, {described}")
            folder.restore(state, resume, task=task_name(task), data=described)
            end.enter_context(_described(ensemble, plan, state))
        if recipe.method != "ie" and recipe.warm_start >= epochs:
            warn(
                f"the run ends in its warm start ({recipe.warm_start} epochs of {epochs}), so it trains an "
                "independent ensemble. Lower warm_start, or raise epochs."
            )
        first = batches.epoch_of(state.step) if state.step < steps else epochs
        step: Step | Captured | None = None
        with Progress(epochs, quiet=options.quiet or mesh.rank > 0) as progress:
            if mesh.size > 1:
                progress.say(f"{mesh.size} processes, {mesh.shape}: {plan.traffic}")
            if errors:
                listed = ", ".join(f"{overlap}: {error:.2f} %" for overlap, error in errors.items())
                progress.say(f"chose overlap {recipe.overlap} by the held-out error of short runs ({listed})")
            for epoch in range(first, epochs):
                plan.train_mode(ensemble)
                if step is None or epoch == recipe.warm_start:
                    step = None  # release its CUDA graph first
                    step = _make_step(state, batches, plan, epoch)
                began, images, own = time.perf_counter(), 0, batches.steps(epoch)
                todo = range(state.step, min(own.stop, steps))
                for size in folder.until_stopped(batches.epoch(epoch, todo), state):
                    lr = state.follow_schedules()
                    step()
                    state.step += 1
                    images += size
                    progress.advance(epoch + (state.step - own.start) / len(own), lr=lr)
                    if state.device.type == "cpu":  # on a GPU, this would wait for the device
                        state.check_finite()
                    if state.step < todo.stop:  # the epoch's end is saved after its row is written
                        folder.save_if_due(state)  # raises `Interrupted` after a signal or `max_seconds`
                state.check_finite()
                row = {"epoch": epoch + 1, "step": state.step, "seed": plan.seed, **state.monitor.row()}
                row |= {"lr": lr, "images_per_second": images / (time.perf_counter() - began)}
                if state.temperature is not None:
                    row["temperature"] = state.temperature.item()
                state.monitor.reset()
                if epoch >= recipe.warm_start:
                    state.monitor.find_dead_members(row)
                with folder.logged(row, state):
                    every = options.evaluate_every
                    due = state.step == steps or (every and (epoch + 1) % every == 0)
                    if due and plan.validation is not None:
                        state.gather()
                        with state.averaged():
                            row |= _scores(ensemble, plan.validation, options, ignore_index, mesh)
                rows.append(row)
                progress.log(row if folder.path else row | {"seed": None})  # a seed tells folders apart
                folder.save_if_due(state)
        seconds = folder.seconds()
        step = None  # release its CUDA graph, and the memory that gradients keep of it
        state.optimizer.zero_grad(set_to_none=True)
        state.gather()
        if state.average is not None:
            state.average.swap()
        ensemble.eval()
        ensemble.frozen = plan.frozen
        if plan.held_out is not None:
            with torch.random.fork_rng(devices=[]):  # for masks drawn at test time
                ensemble.temperature = held_out_temperature(
                    ensemble, plan.held_out, batch_size=options.evaluation_batch, ignore_index=ignore_index
                )
        scores = None if plan.test is None else _scores(ensemble, plan.test, options, ignore_index, mesh)
    return Result(
        state.step,
        seconds,
        plan.seed,
        rows,
        scores,
        task=task_name(task),
        data=_learned_from(train, batches),
        batch_size=train.batch_size if isinstance(train, DataLoader) else None,
        mesh=mesh.shape.name,
        temperature=ensemble.temperature,
        overlap=recipe.objective["overlap"],
        overlap_errors=errors,
    )


def _overlap_errors(ensemble: Ensemble, plan: Plan, started: float, how: dict[str, Any]) -> dict[int, float]:
    """Held-out errors of short runs by K; `max_seconds` is counted from `started`, for all runs together."""
    limit = plan.options.max_seconds

    def score(recipe: Recipe, kept: Data, held_out: Data) -> float:
        left = None if limit is None else max(started + limit - time.monotonic(), 1e-3)
        quick = replace(plan.options, quiet=True, tensorboard=False, evaluate_every=0, max_seconds=left)
        trial = copy.deepcopy(ensemble)
        result = fit(trial, kept, recipe=recipe, seed=plan.seed, test=held_out, options=quick, **how)
        assert result.scores is not None  # because there are test data
        return result.scores["top1"]

    return overlap_errors(plan.recipe, plan.train, plan.held_out, score)


@contextmanager
def _on_device(ensemble: Ensemble, device: torch.device) -> Iterator[None]:
    """Move the ensemble to the device, and back if the run cannot start."""
    before = next(ensemble.parameters()).device
    try:
        ensemble.to(device)
        if device.type == "cuda":  # the layout that convolutions prefer
            ensemble.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        yield
    except BaseException:
        ensemble.to(before)
        raise


@contextmanager
def _described(ensemble: Ensemble, plan: Plan, state: TrainState) -> Iterator[None]:
    """Set what the ensemble keeps of its data and recipe, and take it back if not one step succeeds."""
    new = {
        "transform": plan.transform,
        "classes": plan.classes,
        "image_shape": plan.image_shape,
        "temperature": None,  # of other weights, if any
        "flip_at_test": ensemble.flip_at_test or plan.recipe.flip_at_test,
    }
    before = {name: getattr(ensemble, name) for name in new}
    try:
        for name, value in new.items():
            setattr(ensemble, name, value)
        yield
    except BaseException:
        for name, value in before.items() if state.step == 0 else ():
            setattr(ensemble, name, value)
        raise


def _make_step(state: TrainState, batches: Batches, plan: Plan, epoch: int) -> Step | Captured:
    """The step from this epoch on, captured in a CUDA graph if possible."""
    recipe, options, cuda = plan.recipe, plan.options, plan.device.type == "cuda"
    state.optimizer.zero_grad(set_to_none=True)  # gradients of an earlier graph keep its memory
    objective = recipe.objective | {"task": plan.task, "ignore_index": plan.ignore_index}
    if state.overlap is not None:
        objective["overlap"] = state.overlap
    if state.temperature is not None:
        objective["temperature"] = state.temperature
    if epoch < recipe.warm_start:  # as an independent ensemble
        objective |= {"overlap": recipe.members, "labels": "exact", "rule": "hard"}
    alone = state.mesh.size == 1  # the collectives of several processes are neither compiled nor captured
    how: dict[str, Any] = {
        "objective": objective,
        "precision": options.precision_on(plan.device.type),
        "augment": plan.augment,
        "compile": alone and use_compiler(options),
    }
    if not cuda or not alone or options.capture is False or not isinstance(batches, Resident):
        return Step(state, batches, **how)
    streams = options.members in ("auto", "streams") and _are_apart(state.ensemble, recipe)
    step = Step(state, batches, **how, streams=streams and state.stacked is None)
    state.follow_schedules()
    batches.seek(epoch, state.step)
    return captured(step)


def _are_apart(ensemble: Ensemble, recipe: Recipe) -> bool:
    """Whether members can run on parallel streams: not if they share weights that each of them would run."""
    own = [id(t) for member in ensemble.members for t in (*member.parameters(), *member.buffers())]
    return len(own) == len(set(own)) or (ensemble.shared_stem is not None and not recipe.adversarial)


def _scores(
    ensemble: Ensemble, data: Data, options: Options, ignore_index: int | str | None, mesh: Mesh
) -> dict[str, float]:
    devices = {p.device.index for p in ensemble.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices):  # masks drawn at test time must not change the training
        return evaluate_together(ensemble, data, options.evaluation_batch, ignore_index, mesh)


def _describe(
    plan: Plan, batches: Batches, ignore_index: int | str | None, augment: Augmentation | None
) -> str:
    """The training data in words, to notice if a run is resumed with others."""
    text = batches.description + (f", augmented by {task_name(augment)}" if augment else "")
    if plan.transform is not None and plan.transform.is_fitted:
        text += f", transformed by {plan.transform.checksum[:12]}"
    return text if ignore_index == AUTO else f"{text}, without {ignore_index}"


def _learned_from(train: Data, batches: Batches) -> str:
    if not isinstance(train, DataLoader):
        return batches.description
    examples = len(train.dataset) if hasattr(train.dataset, "__len__") else "some"
    return f"a DataLoader of {examples} examples"
