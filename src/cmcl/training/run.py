"""The training loop: epochs of steps, telemetry, evaluation, checkpoints. It can stop and go on anywhere.

R repeats (seeds) of one ensemble train together; N examples.
"""

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from .. import _checks
from ..ensemble import Ensemble
from ..objectives import TaskLoss
from ..telling import tell
from .admission import check_kind, check_scored, first_answers
from .capture import Captured, captured
from .config import Options, Recipe
from .keeper import Keeper
from .optimizer import set_lr
from .progress import Progress
from .scoring import AUTO, evaluate, resolved
from .setup import Data, find_device, hold_out, limited, place
from .source import Resident, source_of
from .state import State
from .step import Step
from .telemetry import Telemetry

SOON = 0.5  # seconds in which a signal to a whole group of processes has reached all of them


@dataclass
class Result:
    """What a run leaves in memory; its folder holds more. A loop of one's own says steps and seconds."""

    steps: int
    seconds: float  # over all the times the run was resumed
    seeds: list[int] = field(default_factory=lambda: [0])  # of the repeats
    # telemetry of this call, by epoch and repeat; too much to print
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)
    scores: list[dict[str, float]] = field(default_factory=list)  # on the test data, by repeat, in percent
    task: str | None = None  # the name of a task loss of the user's own
    data: str | None = None  # what was learned from, as far as it can be told in words
    batch_size: int | None = None  # of a DataLoader that tells it

    def __post_init__(self) -> None:
        self.steps, self.seconds = index(self.steps), float(self.seconds)
        self.seeds = [index(seed) for seed in self.seeds]
        if not self.seeds or self.steps < 0 or not 0 <= self.seconds < math.inf:
            raise ValueError(
                "steps and seconds must be finite, 0 or more, and seeds those of the run, at least one. "
                f"Got {self.steps}, {self.seconds} and {self.seeds}."
            )


class Diverged(RuntimeError):
    """A loss became NaN or infinite; the weights are those before it."""


class Run:
    """A run in progress."""

    def __init__(
        self,
        ensembles: list[Ensemble],
        train: Data,
        test: Data | None,
        recipe: Recipe,
        seeds: list[int],
        options: Options,
        task: TaskLoss | None = None,
        ignore_index: int | str | None = AUTO,
    ) -> None:
        self.recipe, self.options, self.test, self.task = recipe, options, test, task
        self.device = find_device(options.device)
        self.loaded_size = train.batch_size if isinstance(train, DataLoader) else None
        check_kind("train", train)
        train, held_out = hold_out(limited(train, recipe.subset), recipe.validation)
        self.held_out = held_out or test  # what is looked at on the way
        place(ensembles, train, self.device)
        self.source, (images, targets) = source_of(train, ensembles[0], recipe, seeds, self.device)
        self.not_finite = _checks.not_finite(images) if isinstance(self.source, Resident) else ""
        if self.not_finite:
            tell(
                f"train images hold {self.not_finite}. Networks that do not see to it will answer NaN: clean "
                "them, or leave them out."
            )
        answers = first_answers(ensembles[0], images[:2].to(self.device))  # (M, 2, C, ...)
        classes = answers.shape[2]
        self.ignore_given = ignore_index
        of_pixels = answers.ndim > 3 and (task is None or targets.shape[1:] == answers.shape[3:])
        self.ignore_index = resolved(ignore_index, targets, classes, dense=of_pixels)
        if task is None and isinstance(self.source, Resident):
            _checks.finite("train targets", targets)
        if task is None and not targets.is_floating_point():  # on a GPU a wrong label would end it all
            _checks.label_range(targets, classes, self.ignore_index)
            self.source.expect(classes, self.ignore_index)
        for name, scored in (("the held-out part of train", held_out), ("test", test)):
            if scored is not None:
                check_scored(name, ensembles[0], scored, ignore_index)
        transform = ensembles[0].transform
        data = self.source.name
        if transform is not None and transform.is_fitted:  # images that are ready need none
            data += f", transformed by {transform.checksum[:12]}"
        if ignore_index != AUTO:
            data += f", without {ignore_index}"
        winnable = classes if self._tells_classes(targets, classes) else 1
        self.state = State(ensembles, seeds, recipe, winnable, self.device, task, data)
        self.steps = recipe.total_steps(self.source.examples, self.source.batch_size)
        self.rows: list[dict[str, Any]] = []
        if recipe.method != "ie" and recipe.warm_start >= self._epochs():
            tell(
                f"the run ends in its warm start ({recipe.warm_start} epochs of {self._epochs()}), so it is "
                "that of an independent ensemble. Lower warm_start, or raise epochs."
            )

    def go(self, out: Path | None, resume: bool) -> Result:
        """Train to the end, or until asked to stop."""
        with ExitStack() as stack:
            self._open(stack, out, resume)
            step = None
            for epoch in range(self._done(), self._epochs()):
                if step is None or epoch == self.recipe.warm_start:
                    step = None  # one graph at a time in the GPU's memory
                    step = self._make_step(epoch)
                self._epoch(epoch, step)
            self.keeper.save_or_stop()
        seconds = self.keeper.seconds()
        for ensemble in self.state.ensembles:
            ensemble.eval()  # it is there to be asked now; and several threads may ask at once
        scores = [] if self.test is None else [self._scores(e, self.test) for e in self.state.ensembles]
        return Result(
            self.state.step,
            seconds,
            self.state.seeds,
            self.rows,
            scores,
            task=self.state.task,
            data=self.source.told,
            batch_size=self.loaded_size,
        )

    def _epoch(self, epoch: int, step: Step | Captured) -> None:
        state, steps = self.state, self.source.steps(epoch)
        begun, images = time.perf_counter(), 0
        for ensemble in state.ensembles:
            ensemble.train()
        self.source.begin(epoch, state.step)
        while state.step < min(steps.stop, self.steps):
            set_lr(state.optimizer, self._lr(state.step))
            self._feed()
            images += self.source.size
            step()
            state.step += 1
            self.progress.advance(
                epoch + (state.step - steps.start) / len(steps), lr=self._lr(state.step - 1)
            )
            if self.device.type == "cpu":  # on a GPU, looking would wait for the device
                self._check_finite()
            if state.step < min(steps.stop, self.steps):  # the last one is saved after its report
                self._save_or_stop()
        self._check_finite()
        self._report(epoch + 1, images / (time.perf_counter() - begun))
        self._save_or_stop()

    def _feed(self) -> None:
        try:
            self.source.feed()
        except (RuntimeError, OSError, EOFError):
            time.sleep(SOON)  # a signal to the whole group may have ended a DataLoader's workers before us
            self._save_or_stop()
            raise

    def _report(self, epochs: int, images_per_second: float) -> None:
        """Telemetry of the epoch that just ended, a row for each repeat."""
        state, every = self.state, self.options.evaluate_every
        rows = []
        for seed, tally, alarm in zip(state.seeds, state.tallies, state.alarms, strict=True):
            row: dict[str, Any] = {"epoch": epochs, "step": state.step, "seed": seed}
            row |= tally.read() | {"lr": self._lr(state.step - 1), "images_per_second": images_per_second}
            tally.reset()
            if epochs > self.recipe.warm_start and (dead := alarm.update(row["win_rates"])):
                row["dead_members"] = dead
                tell(f"{self._whose(seed)}{alarm.warning(dead)}")
            rows.append(row)
        try:
            try:
                if state.step == self.steps or (every and epochs % every == 0):
                    self._look(rows)
            finally:
                self._write(rows)
        except Exception:  # what was learned is kept all the same
            self.keeper.save()
            raise

    def _look(self, rows: list[dict[str, Any]]) -> None:
        """Put scores into the rows of the repeats."""
        if self.held_out is not None:
            for row, ensemble in zip(rows, self.state.ensembles, strict=True):
                row |= self._scores(ensemble, self.held_out)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.rows.append(row)
            self.progress.epoch(row if self._whose(row["seed"]) else row | {"seed": None})
            self.telemetry.write(row)

    def _make_step(self, epoch: int) -> Step | Captured:
        cuda, options = self.device.type == "cuda", self.options
        capture = cuda and options.capture is not False and isinstance(self.source, Resident)
        if cuda and options.capture and not capture:
            raise TypeError("train must be tensors for a captured step. Got a DataLoader; leave out capture.")
        objective = self.recipe.objective | {"task": self.task}
        if epoch < self.recipe.warm_start:  # as an independent ensemble
            objective |= {"overlap": self.recipe.members, "labels": "exact"}
        step = Step(
            self.state.ensembles,
            self.source,
            self.state.optimizer,
            self.recipe,
            self.state.tallies,
            objective=objective,
            ignore_index=self.ignore_index,
            precision=options.precision if options.precision != "auto" else "bf16" if cuda else "float32",
            compile=cuda if options.compile is None else options.compile,
            streams=capture,
            randomness=None if cuda else self.state.randomness,
            epsilon=self._epsilon(),
        )
        if not capture:
            return step
        set_lr(self.state.optimizer, self._lr(self.state.step))
        self.source.begin(epoch, self.state.step)
        return captured(step)

    def _check_finite(self) -> None:
        for seed, tally in zip(self.state.seeds, self.state.tallies, strict=True):
            bad = tally.bad.tolist()  # of each member, the first step of this epoch, or inf
            if min(bad) < torch.inf:
                first = self.source.steps(self.source.epoch_of(self.state.step - 1)).start
                step, members = first + int(min(bad)), [m for m, s in enumerate(bad) if s == min(bad)]
                raise Diverged(
                    f"{self._whose(seed)}the loss of member {members}, or its gradient, is NaN or infinite "
                    f"at step {step}, with lr {self._lr(step):.3g}. The weights are those before it; so is a "
                    "checkpoint, if there is one. Try a smaller lr, clip_norm=1, or precision='float32'"
                    f"{self._suspect()}."
                )

    def _suspect(self) -> str:
        """What else a loss that is no number may come from."""
        if not isinstance(self.source, Resident):
            return "; or look for NaN in what is loaded"
        return f"; or it is {self.not_finite} of train" if self.not_finite else ""

    def _open(self, stack: ExitStack, out: Path | None, resume: bool) -> None:
        options = self.options
        self.keeper = stack.enter_context(Keeper(out, self.state, self.steps, options.checkpoint_seconds))
        board = out / "tensorboard" if out and options.tensorboard else None
        self.keeper.restore(resume)
        self.telemetry = Telemetry(out and out / "telemetry.jsonl", tensorboard=board)
        self.telemetry.rewind(self._done())
        self.progress = stack.enter_context(Progress(self._epochs(), quiet=options.quiet))

    def _save_or_stop(self) -> None:
        if self.keeper.due():
            self._check_finite()  # a checkpoint of a broken run must not take a good one's place
            self.keeper.save_or_stop()

    def _whose(self, seed: int) -> str:
        """How a message to a person begins; a run that is the only one, and leaves nothing, needs no name."""
        return f"seed {seed}: " if self.keeper.checkpoints or len(self.state.seeds) > 1 else ""

    def _scores(self, ensemble: Ensemble, data: Data) -> dict[str, float]:
        batch_size = self.options.evaluation_batch
        return evaluate(ensemble, data, batch_size=batch_size, ignore_index=self.ignore_given)

    def _lr(self, step: int) -> float:
        return self.recipe.lr_at(step, self.steps)

    def _done(self) -> int:
        """Epochs that have ended; the last may be a part."""
        return self._epochs() if self.state.step >= self.steps else self.source.epoch_of(self.state.step)

    def _epochs(self) -> int:
        return self.source.epoch_of(self.steps - 1) + 1

    def _tells_classes(self, targets: torch.Tensor, classes: int) -> bool:
        """Whether wins can be counted by class: not of pixels, soft labels or what a task reads its way."""
        if targets.ndim > 1 or targets.is_floating_point() or self.ignore_index is not None:
            return False
        if self.task is None:
            return True
        own = isinstance(self.source, Resident)  # a DataLoader's batches to come may hold other labels
        return own and 0 <= int(targets.min()) <= int(targets.max()) < classes

    def _epsilon(self) -> torch.Tensor | None:
        """The adversarial step: a share of the range that each input value has in training."""
        if not self.recipe.adversarial:
            return None
        if not isinstance(self.source, Resident):
            raise TypeError("train must be tensors for adversarial training. Got a DataLoader.")
        if self.not_finite:
            raise ValueError(f"train images must be finite for adversarial training. Got {self.not_finite}.")
        images = self.source.images
        return self.recipe.adversarial * (images.amax(0) - images.amin(0))
