"""`fit`: train an ensemble by Algorithm 1 of the paper. The whole training loop is in this file.

N examples, M members.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .._messages import warn
from ..ensemble import Ensemble
from ..objectives import TaskLoss
from .batches import Batches, Data, Resident
from .checkpoint import RunFolder
from .config import Options, Recipe, check_seed
from .cuda import Captured, captured, execution, use_compiler
from .optim import set_lr
from .preflight import AUTO, Plan, preflight, task_name
from .progress import Progress
from .scoring import evaluate
from .step import Step, TrainState


@dataclass
class Result:
    """What a run returns; its folder holds more. After a custom training loop, give steps and seconds."""

    steps: int
    seconds: float  # over all the times the run was resumed
    seed: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)  # telemetry of this call, by epoch
    scores: dict[str, float] | None = None  # errors on the test data, in percent
    task: str | None = None  # the name of a task loss of the user's own
    data: str | None = None  # a description of the training data
    batch_size: int | None = None  # of a DataLoader, if it has one

    def __post_init__(self) -> None:
        self.steps, self.seconds = int(self.steps), float(self.seconds)
        self.seed = check_seed(self.seed)
        if self.steps < 0 or not 0 <= self.seconds < math.inf:
            raise ValueError(
                f"steps and seconds must be finite, 0 or more. Got {self.steps} and {self.seconds}."
            )


class Diverged(RuntimeError):
    """A loss became NaN or infinite; the weights are those before it."""


def fit(
    ensemble: Ensemble,
    train: Data,
    *,
    recipe: Recipe,
    seed: int = 0,
    test: Data | None = None,
    task: TaskLoss | None = None,
    ignore_index: int | str | None = AUTO,
    out: str | Path | None = None,
    resume: bool = False,
    options: Options | None = None,
) -> Result:
    """Train an ensemble of classifiers in place, by Algorithm 1 of the paper.

    Modules that are in eval mode while their member is in train mode (a frozen BatchNorm) stay so.

    Args:
        ensemble: what to train.
        train: a `Dataset`, a pair (images (N, ...), targets (N, ...)) of tensors or arrays, or a DataLoader.
            Targets are classes from 0 on. uint8 images (N, C, H, W) go through `ensemble.transform`, which
            is fitted to them if it is not set.
        recipe: method, length, optimizer. Its `validation` fraction of a `Dataset` is held out and scored
            during training; `test` only if nothing is held out.
        seed: of data order, masks and labels.
        test: data for the scores at the end.
        task: the loss of a specialist, as for `confident_oracle_loss`: class weights, label smoothing.
        ignore_index: a target that is not counted. "auto": 255 of pixels, where it cannot be a class.
        out: run folder, for telemetry and checkpoints. None: nothing is written.
        resume: resume from the folder's last checkpoint.
        options: how the run is carried out.
    """
    options = options or Options()
    if resume and out is None:
        raise ValueError("out must name the folder of the run to resume. Got None.")
    plan = preflight(  # raises, and changes nothing
        *(ensemble, train, test),
        recipe=recipe,
        seed=seed,
        task=task,
        ignore_index=ignore_index,
        options=options,
    )
    recipe, rows = plan.recipe, []
    with execution(options, plan.seed), RunFolder(None if out is None else Path(out), options) as folder:
        with _unchanged_on_error(ensemble):
            plan.place(ensemble)
            batches = plan.batches(ensemble)
            steps = recipe.total_steps(batches.examples, batches.batch_size)
            epochs = batches.epoch_of(steps - 1) + 1
            state = TrainState(ensemble, recipe, plan.seed, plan.monitored_classes, plan.device)
            folder.describe(steps=steps, task=task_name(task), data=_describe(plan, batches, ignore_index))
            folder.restore(state, resume)
            first = epochs if state.step >= steps else batches.epoch_of(state.step)
            folder.open_telemetry(first)
            ensemble.transform, ensemble.classes = plan.transform, plan.classes
        if recipe.method != "ie" and recipe.warm_start >= epochs:
            warn(
                f"the run ends in its warm start ({recipe.warm_start} epochs of {epochs}), so it trains an "
                "independent ensemble. Lower warm_start, or raise epochs."
            )
        step: Step | Captured | None = None
        with Progress(epochs, quiet=options.quiet) as progress:
            for epoch in range(first, epochs):
                plan.train_mode(ensemble)
                if step is None or epoch == recipe.warm_start:
                    step = None  # release its CUDA graph first
                    step = _make_step(state, batches, plan, options, task, epoch, steps)
                began, images = time.perf_counter(), 0
                for size in folder.until_stopped(batches.epoch(epoch, state.step), state):
                    lr = recipe.lr_at(state.step, steps)
                    set_lr(state.optimizer, lr)
                    step()
                    state.step += 1
                    images += size
                    progress.advance(_epochs_done(batches, epoch, state.step), lr=lr)
                    if plan.device.type == "cpu":  # on a GPU, this would wait for the device
                        _check_finite(state, plan, batches, steps)
                    if state.step == min(batches.steps(epoch).stop, steps):
                        break  # saved after its row is written
                    if folder.due():
                        _check_finite(state, plan, batches, steps)  # never save a diverged run
                        folder.save_or_stop(state)
                _check_finite(state, plan, batches, steps)
                row = {"epoch": epoch + 1, "step": state.step, "seed": plan.seed, **state.monitor.row()}
                row |= {"lr": lr, "images_per_second": images / (time.perf_counter() - began)}
                state.monitor.reset()
                if epoch >= recipe.warm_start:
                    row |= _warn_of_dead_members(state, row, named=folder.path is not None)
                rows.append(row)
                with folder.saved_on_error(state):
                    due = options.evaluate_every and (epoch + 1) % options.evaluate_every == 0
                    try:
                        if plan.validation is not None and (due or state.step == steps):
                            row |= _scores(ensemble, plan.validation, options, ignore_index)
                    finally:
                        folder.log(row)
                progress.log(row if folder.path else row | {"seed": None})
                if folder.due():
                    folder.save_or_stop(state)
            folder.save_or_stop(state)
        seconds = folder.seconds()
        ensemble.eval()
        scores = None if plan.test is None else _scores(ensemble, plan.test, options, ignore_index)
    return Result(
        state.step,
        seconds,
        plan.seed,
        rows,
        scores,
        task=task_name(task),
        data=_learned_from(train, batches),
        batch_size=train.batch_size if isinstance(train, DataLoader) else None,
    )


def _epochs_done(batches: Batches, epoch: int, step: int) -> float:
    steps = batches.steps(epoch)
    return epoch + (step - steps.start) / len(steps)


@contextmanager
def _unchanged_on_error(ensemble: Ensemble) -> Iterator[None]:
    """Put the ensemble back on its device if the run cannot start."""
    device = next(ensemble.parameters()).device
    try:
        yield
    except BaseException:
        ensemble.to(device)
        raise


def _make_step(
    state: TrainState,
    batches: Batches,
    plan: Plan,
    options: Options,
    task: TaskLoss | None,
    epoch: int,
    steps: int,
) -> Step | Captured:
    """The step from this epoch on, captured in a CUDA graph if possible."""
    cuda, recipe = plan.device.type == "cuda", plan.recipe
    state.optimizer.zero_grad(set_to_none=True)  # gradients of an earlier graph keep its memory
    objective = recipe.objective | {"task": task}
    if epoch < recipe.warm_start:  # as an independent ensemble
        objective |= {"overlap": recipe.members, "labels": "exact"}
    capture = cuda and options.capture is not False and isinstance(batches, Resident)
    step = Step(
        state,
        batches,
        objective=objective,
        ignore_index=plan.ignore_index,
        precision=options.precision if options.precision != "auto" else "bf16" if cuda else "float32",
        compile=use_compiler(options),
        streams=capture,
        epsilon=_epsilon(recipe, batches),
    )
    if not capture or not isinstance(batches, Resident):
        return step
    set_lr(state.optimizer, recipe.lr_at(state.step, steps))
    batches.seek(epoch, state.step)
    return captured(step)


def _epsilon(recipe: Recipe, batches: Batches) -> Tensor | None:
    """The adversarial step: a fraction of the range that each input value has in training."""
    if not recipe.adversarial or not isinstance(batches, Resident):
        return None
    return recipe.adversarial * (batches.images.amax(0) - batches.images.amin(0))


def _check_finite(state: TrainState, plan: Plan, batches: Batches, steps: int) -> None:
    """Raise `Diverged` once the loss of a member, or its gradient, is NaN or infinite."""
    diverged = state.monitor.diverged.tolist()  # of each member, the first step of this epoch, or inf
    if (relative := min(diverged)) == torch.inf:
        return
    step = batches.steps(batches.epoch_of(state.step - 1)).start + int(relative)
    members = [m for m, s in enumerate(diverged) if s == relative]
    cause = "; or look for NaN in the DataLoader's batches" if isinstance(plan.train, DataLoader) else ""
    cause = f"; or the cause is {plan.not_finite} of train" if plan.not_finite else cause
    raise Diverged(
        f"seed {plan.seed}: the loss of member {members}, or its gradient, is NaN or infinite at step "
        f"{step}, with lr {plan.recipe.lr_at(step, steps):.3g}. The weights are those before it; so is a "
        f"checkpoint, if there is one. Try a smaller lr, clip_norm=1, or precision='float32'{cause}."
    )


def _warn_of_dead_members(state: TrainState, row: dict[str, Any], *, named: bool) -> dict[str, Any]:
    """The entry of a row for members that hardly learn, after a warning; empty if there are none."""
    dead = state.monitor.dead_members(row["specialist_fraction"])
    if dead:
        warn(f"{f'seed {state.seed}: ' if named else ''}{state.monitor.dead_warning(dead)}")
    return {"dead_members": dead} if dead else {}


def _scores(
    ensemble: Ensemble, data: Data, options: Options, ignore_index: int | str | None
) -> dict[str, float]:
    with torch.random.fork_rng(devices=[]):  # masks drawn at test time must not change the training
        return evaluate(ensemble, data, batch_size=options.evaluation_batch, ignore_index=ignore_index)


def _describe(plan: Plan, batches: Batches, ignore_index: int | str | None) -> str:
    """What tells the training data from others, to resume with the same."""
    text = batches.description
    if plan.transform is not None and plan.transform.is_fitted:
        text += f", transformed by {plan.transform.checksum[:12]}"
    return text if ignore_index == AUTO else f"{text}, without {ignore_index}"


def _learned_from(train: Data, batches: Batches) -> str:
    if not isinstance(train, DataLoader):
        return batches.description
    examples = len(train.dataset) if hasattr(train.dataset, "__len__") else "some"
    return f"a DataLoader of {examples} examples"
