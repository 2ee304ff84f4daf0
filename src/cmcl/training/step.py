"""One training step: a batch through all members, the loss, the backward pass, the update.

`Step` is the only copy of the training logic. On a CPU it is called; on CUDA `cuda.Captured` records one call
of it in a graph, with a stream per member, and replays that. M members, B batch, C classes.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from ..ensemble import Ensemble
from ..objectives import OracleLoss, confident_oracle_loss, independent_loss, loss_and_gradient
from ..stacking import Stacked
from .augment import Augmentation
from .batches import DRAWS, Batches, Resident, epoch_seed
from .config import Recipe
from .cuda import Compiler, Runner, by_dtype, copy_all, default_generator, flat, total_norm, views
from .mesh import ALONE, Mesh, MeshPart
from .monitor import Monitor
from .optim import WeightAverage, make_optimizer, parameter_groups, set_lr

# arguments of `confident_oracle_loss` whose gradient `loss_and_gradient` knows
PLAIN = {"task": None, "ignore_index": None, "rule": "hard", "labels": "exact", "others": "uniform"}


class Diverged(RuntimeError):
    """A loss became NaN or infinite; the weights are those before it."""


class TrainState:
    """Everything that training changes: weights, optimizer, telemetry, random states, the step.

    Args:
        ensemble: on the device where it is trained.
        recipe: the recipe of the run.
        seed: the seed of masks, labels and dropout.
        classes: the number of classes by which specialists are counted; 1: not by class.
        steps: the length of the whole run.
        mesh: the processes that train together. Each trains its own members; `gather` copies the others'.
        stacked: the members as one network, if they train as one.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        recipe: Recipe,
        seed: int,
        classes: int,
        steps: int,
        mesh: Mesh = ALONE,
        stacked: Stacked | None = None,
    ) -> None:
        self.ensemble, self.recipe, self.seed, self.steps = ensemble, recipe, seed, steps
        self.stacked = stacked
        self.mesh, self.members = mesh, mesh.members(len(ensemble.members))
        self.device = next(ensemble.parameters()).device
        self.optimizer = make_optimizer(ensemble if stacked is None else stacked.network, recipe)
        self.monitor = Monitor(len(ensemble.members), classes, recipe.objective["overlap"], self.device)
        # of masks, labels and dropout on the CPU; on CUDA they come from the device's generator
        self.random = torch.Generator().manual_seed(epoch_seed(seed, DRAWS)).get_state()
        self.step = 0
        self.average = WeightAverage(ensemble, recipe.ema * steps, self.members) if recipe.ema else None
        # what changes during the run, in tensors: a captured step reads them
        self.overlap = torch.tensor(recipe.members, device=self.device) if recipe.evolve else None
        self.temperature = torch.ones((), device=self.device) if recipe.rule == "annealed" else None

    def follow_schedules(self) -> float:
        """Set learning rate, overlap and temperature to their values at this step; returns the first."""
        lr = self.recipe.lr_at(self.step, self.steps)
        set_lr(self.optimizer, lr)
        if self.overlap is not None:
            self.overlap.fill_(self.recipe.overlap_at(self.step, self.steps))
        if self.temperature is not None:
            self.temperature.fill_(self.recipe.temperature_at(self.step, self.steps))
        return lr

    def gather(self) -> None:
        """Copy what other processes of the mesh have trained, so that all have the whole ensemble."""
        self.mesh.copy_members([self._tensors_of(member) for member in self.ensemble.members])

    def _tensors_of(self, member: nn.Module) -> list[Tensor]:
        own = [*member.parameters(), *member.buffers()]
        moments = [t for p in own for t in self.optimizer.state.get(p, {}).values()]
        averages = [] if self.average is None else self.average.of(own)
        return [*own, *moments, *averages]

    def moments(self) -> list[dict[str, Tensor]]:
        """The optimizer's tensors for each parameter of the members, in the order of its groups."""
        if self.stacked is None:
            return list(self.optimizer.state.values())
        rows = [self.stacked.rows[p] for group in parameter_groups(self.ensemble) for p in group]
        moments = [(self.optimizer.state[whole], m) for whole, m in rows]
        return [{k: t if t.ndim == 0 else t[m] for k, t in own.items()} for own, m in moments]

    def averaged(self) -> AbstractContextManager[None]:
        """The ensemble with averaged weights for the time of a block, if the recipe averages them."""
        return nullcontext() if self.average is None else self.average.used()

    def check_finite(self) -> None:
        """Raise `Diverged` if a loss or gradient of this epoch is not finite; waits for the device."""
        if math.isfinite(self.monitor.losses.sum()):
            return
        diverged = self.monitor.diverged.tolist()
        first = min(diverged)
        step = self.step - self.monitor.steps() + int(first)
        members = [m for m, number in enumerate(diverged) if number == first]
        raise Diverged(
            f"seed {self.seed}: the loss of member {members}, or its gradient, is NaN or infinite at step "
            f"{step}, with lr {self.recipe.lr_at(step, self.steps):.3g}. The weights are those before it; so "
            "is a checkpoint, if there is one. Try a smaller lr, clip_norm=1, or precision='float32', and "
            "look for NaN in the training data."
        )


class Step:
    """A callable that trains on the current batch of `batches`."""

    def __init__(
        self,
        state: TrainState,
        batches: Batches,
        *,
        objective: dict[str, Any],  # arguments of confident_oracle_loss; a warm start has its own
        precision: str = "float32",
        compile: bool = False,
        streams: bool = False,
        augment: Augmentation | None = None,
    ) -> None:
        self.state, self.batches, self.precision, self.augment = state, batches, precision, augment
        self.objective = {"task": None, "ignore_index": None} | objective
        self.epsilon: Tensor | None = None  # adversarial step: a fraction of each input value's range
        if state.recipe.adversarial and isinstance(batches, Resident):
            self.epsilon = state.recipe.adversarial * (batches.images.amax(0) - batches.images.amin(0))
        compiler = Compiler(dynamic=False if isinstance(batches, Resident) else None) if compile else None
        self.run = Runner(len(state.ensemble.members) if streams else 0, compiler)
        self.loss = compiler(_loss) if compiler else _loss
        self.closed_form = (  # `loss_and_gradient` can be used
            compiler is None
            and state.device.type == "cpu"
            and state.mesh.size == state.recipe.accumulate == 1
            and self.epsilon is None
            and isinstance(batches, Resident)  # targets that were checked before the run
            and batches.targets.ndim == 1
            and augment is None
            and all(self.objective.get(key, value) == value for key, value in PLAIN.items())
        )
        # without what torch adds for hooks and profilers, half of the time with small networks
        self.update = partial(inspect.unwrap(type(state.optimizer).step), state.optimizer)
        ensemble, own = state.ensemble, state.members
        self.stems, self.trunks, self.members = (
            ensemble.stems[own],
            ensemble.trunks[own],
            ensemble.members[own],
        )
        trained = self.members if state.stacked is None else state.stacked.network
        self.parameters = [p for p in trained.parameters() if p.requires_grad]
        modules = self.members.named_modules()
        self._slots = [(m._buffers, name, f"{path}.{name}") for path, m in modules for name in m._buffers]

    def __call__(self) -> None:
        """Train on one batch."""
        state, buffers = self.state, self.buffers()
        for group in state.optimizer.param_groups:  # as zero_grad, without its entry for profilers
            for parameter in group["params"]:
                parameter.grad = None
        before = _copies(buffers)
        images, targets = self.batches.current()
        parts = min(state.recipe.accumulate, len(images))  # a DataLoader's last batch may be small
        with self._random_state(), _checks.blindly():  # the monitor finds NaN
            labels = targets
            if self.augment is not None:
                with torch.no_grad():
                    images, targets = self.augment(images, targets, default_generator(state.device))
            pieces = [tensor.tensor_split(parts) for tensor in (images, targets, labels)]
            for number, (x, y, classes) in enumerate(zip(*pieces, strict=True)):
                part = state.mesh.part(len(state.ensemble.members), len(x), (state.seed, state.step, number))
                if part is not None:
                    x, y = x[part.examples], y[part.examples]
                if self.closed_form:
                    self.backward(x, y, classes)
                else:
                    total = self.forward(x, y, classes, part)
                    (total if parts == 1 and part is None else total * (len(x) / len(images))).backward()
        state.mesh.add_gradients(self.parameters)
        broken = state.monitor.count_step(_clip(self.parameters, state.recipe.clip_norm, state.mesh))
        # Once a loss is NaN or infinite, fused optimizers skip their update: the last good weights stay, and
        # with them the running statistics of batch normalisation.
        state.optimizer.found_inf = broken  # type: ignore[attr-defined]
        with torch.no_grad():
            self.update()
        _restore(broken, self.buffers(), before)
        if state.average is not None:
            state.average.update()
        self.batches.advance()

    def forward(self, x: Tensor, targets: Tensor, labels: Tensor, part: MeshPart | None = None) -> Tensor:
        """The loss of one part of a batch, counted by the monitor.

        `labels` are the targets before augmentation, by which specialists are counted: mixed ones are
        probabilities. With `part`, x and targets are of the examples of this process, and labels of all.
        """
        monitor, bf16 = self.state.monitor, self.precision == "bf16"
        with torch.autocast(x.device.type, torch.bfloat16) if bf16 else nullcontext():
            if self.epsilon is None:
                logits, attacked = self.logits(x, part), None
            else:
                logits, attacked = self.adversarial_logits(x, targets, self.epsilon, part)
        total: Tensor = self.loss(logits, targets, labels, monitor, self.objective, part).total
        if attacked is not None:
            more: Tensor = self.loss(attacked, targets, labels, None, self.objective, part).total
            monitor.count_more(more if part is None else part.of_all_total(more), len(labels))
            total = total + more
        return total

    def backward(self, x: Tensor, targets: Tensor, labels: Tensor) -> None:
        """`forward` and the backward pass, with the gradient of the loss in closed form."""
        with torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16" else nullcontext():
            logits = self.logits(x)
        if logits.shape[1:-1] != targets.shape:  # (B,): raises
            _checks.objective(logits, targets, self.objective["beta"], 1, own_task=False)
        with torch.no_grad():
            given = {key: self.objective[key] for key in ("beta", "overlap")}
            loss, gradient = loss_and_gradient(logits, targets, **given)
            self.state.monitor.keep(loss, logits, labels, beta=self.objective["beta"])
        logits.backward(gradient)

    def logits(self, x: Tensor, part: MeshPart | None = None) -> Tensor:
        """`Ensemble.forward`, with the members of this process side by side: (M, B, C, ...)."""
        ensemble, stacked = self.state.ensemble, self.state.stacked
        if stacked is not None:
            return self.run([partial(stacked.logits, x)])[0]  # type: ignore[no-any-return]
        ensemble.check(x)
        if ensemble.shared_stem is not None:
            ((x, _),) = self._run([partial(ensemble.shared_stem, self.members[0], x)], part)
        stems = zip(self.stems, self.members, strict=True)
        features, rests = zip(*self._run([partial(s, member, x) for s, member in stems], part), strict=True)
        if part is not None and ensemble.share_after is not None:
            features = tuple(part.features(features))
        (mixed,) = self.run([partial(ensemble.share, features, part=part)])
        trunks = zip(self.trunks, self.members, mixed, rests, strict=True)
        return ensemble.logits(self._run([partial(t, member, h, r) for t, member, h, r in trunks], part))

    def adversarial_logits(
        self, x: Tensor, targets: Tensor, epsilon: Tensor, part: MeshPart | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits (M, B, C, ...) of the inputs, and of each member's own adversarial inputs.

        The fast gradient sign after Lakshminarayanan et al. (2017), without feature sharing: the baseline of
        figure 2c.
        """
        clean = [x.detach().requires_grad_() for _ in self.members]
        logits = self._each(clean, part)
        # A member's loss depends on its own copy of x alone, so one backward pass serves all members.
        given = {key: self.objective[key] for key in ("task", "ignore_index")}
        total = independent_loss(logits, targets, **given).total
        gradients = torch.autograd.grad(total, clean, retain_graph=True)
        return logits, self._each([(x + epsilon * gradient.sign()).detach() for gradient in gradients], part)

    def _each(self, inputs: list[Tensor], part: MeshPart | None) -> Tensor:
        pairs = zip(self.members, inputs, strict=True)
        calls = [partial(_call, member, x) for member, x in pairs]
        return self.state.ensemble.logits(self._run(calls, part))

    def _run(self, calls: list[partial[Any]], part: MeshPart | None) -> list[Any]:
        with nullcontext() if part is None else part.apart():
            return self.run(calls)

    def buffers(self) -> dict[str, Tensor]:
        """The ensemble's buffers as they are now: a network may replace a buffer by another tensor."""
        named = ((name, owner.get(key)) for owner, key, name in self._slots)
        return {name: buffer for name, buffer in named if buffer is not None}

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        ensemble, optimizer = self.state.ensemble, self.state.optimizer
        moments = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        weights = [*ensemble.parameters(), *ensemble.buffers()]
        average = self.state.average.values if self.state.average is not None else []
        return [*weights, *moments, *average, *self.state.monitor.tensors(), *self.batches.tensors()]

    @contextmanager
    def _random_state(self) -> Iterator[None]:
        """On a CPU, draw from the run's own random state; a DataLoader's augmentations draw from torch's."""
        if self.state.device.type == "cuda":
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state.random)
        yield
        self.state.random = torch.get_rng_state()
        torch.set_rng_state(outside)


def _loss(
    logits: Tensor,
    targets: Tensor,
    labels: Tensor,
    monitor: Monitor | None,
    objective: dict[str, Any],
    part: MeshPart | None = None,
) -> OracleLoss:
    loss = confident_oracle_loss(logits, targets, **objective, part=part)
    if monitor is not None:
        given = {key: objective[key] for key in ("beta", "ignore_index")}
        monitor.count(loss, logits, labels, **given, part=part)
    return loss


def _call(member: nn.Module, x: Tensor) -> Any:
    return member(x)


def _clip(parameters: list[nn.Parameter], limit: float | None, mesh: Mesh) -> Tensor:
    """The norm of the ensemble's gradient, which is shortened if the recipe sets a limit."""
    with torch.no_grad():
        norm = mesh.norm(total_norm([p.grad for p in parameters if p.grad is not None]))
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


# Buffers go through one copy for each dtype: many small tensors would cost a kernel launch each.


def _copies(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    copies: dict[str, Tensor] = {}
    for group in by_dtype(buffers):
        copies |= zip(group, views(flat(group), group), strict=True)
    return copies


def _restore(broken: Tensor, buffers: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Write `before` into the buffers if `broken`, except into those that are new or of another shape."""
    if broken.device.type == "cpu" and not broken:
        return
    alike = {n: b for n, b in buffers.items() if n in before and _alike(b, before[n])}
    for group in by_dtype(alike):
        values = torch.where(broken > 0, flat({name: before[name] for name in group}), flat(group))
        copy_all(list(group.values()), views(values, group))


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
