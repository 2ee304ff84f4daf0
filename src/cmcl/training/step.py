"""One training step: gather a batch, run all members, loss, backward, update.

`Step` is the only copy of the training logic. On a CPU it is called; on CUDA `Captured` records one call of
it in a graph, with a stream per member, and replays that. R repeats train in one step, each an ensemble with
its own data order, masks, labels and assignment.

R repeats, M members, B batch, C classes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..ensemble import Ensemble, in_turn
from ..objectives import OracleLoss, confident_oracle_loss
from ..telling import private_torch
from .adversarial import adversarial_logits
from .config import Recipe
from .lanes import Compiler, Lanes
from .source import Source
from .tally import Tally, count


class Step:
    """A callable that trains R ensembles by one batch each."""

    def __init__(
        self,
        ensembles: Sequence[Ensemble],
        source: Source,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        tallies: Sequence[Tally],
        *,
        objective: dict[str, Any],  # arguments of confident_oracle_loss; a warm start has its own
        ignore_index: int | None = None,
        precision: str = "float32",
        compile: bool = False,
        streams: bool = False,
        randomness: list[Tensor] | None = None,  # R states of the CPU generator, kept up to date here
        epsilon: Tensor | None = None,  # adversarial step, shape of one input
    ) -> None:
        self.ensembles, self.source, self.optimizer, self.recipe = ensembles, source, optimizer, recipe
        self.tallies, self.precision, self.epsilon, self.randomness = tallies, precision, epsilon, randomness
        self.objective, self.ignore_index = objective, ignore_index
        compiler = Compiler() if compile else None
        self.repeats = Lanes(len(ensembles) if streams and len(ensembles) > 1 else 0)
        self.members = [Lanes(len(e.members) if streams else 0, compiler) for e in ensembles]
        measure = partial(_measure, objective=objective, ignore_index=ignore_index)
        self.measure = partial(compiler(_measure), **measure.keywords) if compiler else measure

    def __call__(self) -> None:
        """Train by one batch."""
        self.optimizer.zero_grad(set_to_none=True)
        before = _copies(self.buffers())
        for piece in range(self._pieces()):
            calls = [partial(self._loss, repeat, piece) for repeat in range(len(self.ensembles))]
            totals = self.repeats(calls)  # R scalars; repeats share no weights, so their sum is R trainings
            torch.stack(totals).sum().backward()
        norms = [_clip(ensemble, self.recipe.clip_norm) for ensemble in self.ensembles]
        for norm, tally in zip(norms, self.tallies, strict=True):
            tally.count_step(norm)
        # Once a loss is NaN or infinite, fused optimisers skip their update: the last good weights stay, and
        # with them the running statistics of batch normalisation.
        broken = torch.stack([tally.broken() for tally in self.tallies]).amax(0)
        self.optimizer.found_inf = broken  # type: ignore[attr-defined]
        self.optimizer.step()
        _undo(broken, self.buffers(), before)
        self.source.advance()

    def buffers(self) -> dict[str, Tensor]:
        """Those of all ensembles as they are now: a network may put another tensor in a buffer's place."""
        return {f"{r}.{name}": b for r, e in enumerate(self.ensembles) for name, b in e.named_buffers()}

    def state(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        weights = [t for e in self.ensembles for t in (*e.parameters(), *e.buffers())]
        moments = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return [
            *weights,
            *moments,
            *(t for tally in self.tallies for t in tally.state()),
            *self.source.state(),
        ]

    def one_stream(self) -> None:
        """Give up the streams, for a step that is not captured after all."""
        for lanes in (self.repeats, *self.members):
            lanes.streams = []

    def _pieces(self) -> int:
        """A DataLoader's last batch may be too small for all of them."""
        return min(self.recipe.accumulate, self.source.size)

    def _loss(self, repeat: int, piece: int) -> Tensor:
        images, targets = self.source.batch(repeat)
        x, own = (whole.tensor_split(self._pieces())[piece] for whole in (images, targets))
        with self._own_randomness(repeat), _checks.blindly():  # NaN is for the tally to find
            return self._forward(repeat, x, own) * (len(x) / len(images))

    def _forward(self, repeat: int, x: Tensor, targets: Tensor) -> Tensor:
        ensemble, tally = self.ensembles[repeat], self.tallies[repeat]
        ensemble.run = self.members[repeat]
        try:
            with _autocast(x.device, self.precision):
                if self.epsilon is None:
                    logits, attacked = ensemble(x), None
                else:
                    logits, attacked = adversarial_logits(
                        ensemble,
                        x,
                        targets,
                        self.epsilon,
                        task=self.objective.get("task"),
                        ignore_index=self.ignore_index,
                    )
        finally:
            ensemble.run = in_turn
        total: Tensor = self.measure(logits, targets, tally).total
        if attacked is not None:
            more = self.measure(attacked, targets, None).total
            tally.count_more(more, len(x))
            total = total + more
        return total

    @contextmanager
    def _own_randomness(self, repeat: int) -> Iterator[None]:
        """Draw from this repeat's stream, so that it draws the same numbers as when it trains alone."""
        if self.randomness is None:
            yield
            return
        outside = torch.get_rng_state()  # a DataLoader's augmentations draw from it
        torch.set_rng_state(self.randomness[repeat])
        yield
        self.randomness[repeat] = torch.get_rng_state()
        torch.set_rng_state(outside)


def _measure(
    logits: Tensor,
    targets: Tensor,
    tally: Tally | None,
    *,
    objective: dict[str, Any],
    ignore_index: int | None,
) -> OracleLoss:
    loss = confident_oracle_loss(logits, targets, **objective, ignore_index=ignore_index)
    if tally is not None:
        count(tally, loss, logits, targets, beta=objective["beta"], ignore_index=ignore_index)
    return loss


def _clip(ensemble: Ensemble, limit: float | None) -> Tensor:
    """The norm of an ensemble's gradient, which is shortened if the recipe sets a limit."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in ensemble.parameters() if p.grad is not None])
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(ensemble.parameters(), limit, norm)
    return norm


def _copies(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of one copy for each dtype: many small tensors would cost a launch each."""
    copies: dict[str, Tensor] = {}
    for group in _by_dtype(buffers):
        copies |= zip(group, _views(_flat(group), group), strict=True)
    return copies


def _undo(broken: Tensor, buffers: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Write what was before into buffers, if `broken`; not into those that are new or of another shape."""
    fitting = {name: b for name, b in buffers.items() if name in before and _alike(b, before[name])}
    for group in _by_dtype(fitting):
        values = torch.where(broken > 0, _flat({name: before[name] for name in group}), _flat(group))
        _copy_all(list(group.values()), _views(values, group))


def _copy_each(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        one.copy_(other)


_copy_all = private_torch("torch._foreach_copy_", _copy_each)  # one launch for all


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _by_dtype(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    dtypes = dict.fromkeys(t.dtype for t in tensors.values())
    return [{name: t for name, t in tensors.items() if t.dtype == dtype} for dtype in dtypes]


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors.values()])


def _views(flat: Tensor, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The way back: a part for each, of its shape."""
    parts = flat.split([t.numel() for t in tensors.values()])
    return [part.view(t.shape) for part, t in zip(parts, tensors.values(), strict=True)]


def _autocast(device: torch.device, precision: str) -> Any:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
