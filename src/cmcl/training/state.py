"""Where a run stands: everything that a step changes, and how it goes into a checkpoint and comes back.

R repeats.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.batches import epoch_seed
from ..ensemble import Ensemble
from ..objectives import TaskLoss
from ..telling import without_addresses
from .checkpoint import Checkpoint
from .config import Recipe
from .optimizer import make_optimizer
from .tally import Tally
from .telemetry import DeadMembers

CUDA = "random.cuda"  # the device's random state; runs elsewhere have none
OTHERS = "buffer."  # begins the names of buffers outside the state_dict


class State:
    """R ensembles in training, with optimiser, sums, alarms and random streams."""

    def __init__(
        self,
        ensembles: Sequence[Ensemble],
        seeds: Sequence[int],
        recipe: Recipe,
        classes: int,
        device: torch.device,
        task: TaskLoss | None = None,
        data: str = "",  # what is learned from, in words
    ) -> None:
        self.ensembles, self.seeds, self.recipe, self.device = ensembles, list(seeds), recipe, device
        self.task, self.data = _name(task), data
        self.optimizer = make_optimizer(ensembles, recipe)
        self.tallies = [Tally(len(e.members), classes, device) for e in ensembles]
        self.alarms = [DeadMembers(len(e.members), recipe.objective["overlap"]) for e in ensembles]
        self.randomness = [torch.Generator().manual_seed(epoch_seed(seed, -1)).get_state() for seed in seeds]
        self.step = 0

    def check(self) -> None:
        """Whether all of it can be saved."""
        strange = [key for key in self.tensors() if key.endswith("_extra_state")]
        if strange:
            raise TypeError(
                f"the state of a network must be parameters and buffers to be saved. Got {strange[0]}, from "
                "get_extra_state; keep it in a buffer, or train without out=."
            )

    def tensors(self) -> dict[str, Tensor]:
        """All of it that is tensors, by name."""
        named: dict[str, Tensor] = {}
        for r, (ensemble, tally) in enumerate(zip(self.ensembles, self.tallies, strict=True)):
            weights = ensemble.state_dict()
            named |= {f"ensemble.{r}.{key}": tensor for key, tensor in weights.items()}
            # and what is not persistent
            others = {key: b for key, b in ensemble.named_buffers() if key not in weights}
            named |= {f"{OTHERS}{r}.{key}": buffer for key, buffer in others.items()}
            named |= {f"tally.{r}.{i}": tensor for i, tensor in enumerate(tally.state())}
            named[f"random.{r}"] = self.randomness[r]
        for i, moments in enumerate(self.optimizer.state.values()):
            named |= {f"optimizer.{i}.{key}": tensor for key, tensor in moments.items()}
        if self.device.type == "cuda":
            named[CUDA] = torch.cuda.get_rng_state()
        return named

    def facts(self) -> dict[str, Any]:
        """All of it that is JSON."""
        return {
            "recipe": self.recipe.to_json(),
            "seeds": self.seeds,
            "task": self.task,
            "data": self.data,
            "alarms": [alarm.state() for alarm in self.alarms],
        }

    def unlike(self, checkpoint: Checkpoint) -> list[str]:
        """What is another than in the checkpoint's run, so that it cannot be gone on with."""
        facts, kept = self.facts(), checkpoint.state
        return [
            name for name in ("recipe", "seeds", "task", "data") if kept.get(name, facts[name]) != facts[name]
        ]

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint of the same run."""
        for name in self.unlike(checkpoint):
            kept, now = checkpoint.state[name], self.facts()[name]
            kept, now = _differences(kept, now) if isinstance(kept, dict) else (kept, now)
            raise ValueError(f"{name} must be that of the run to be resumed, {kept}. Got {now}.")
        own, saved = self.tensors(), checkpoint.tensors
        if (CUDA in own) != (CUDA in saved):  # what is drawn there cannot be drawn elsewhere
            begun = "CUDA" if CUDA in saved else "another kind of device than CUDA"
            raise ValueError(
                f"device must be of the kind that the run was begun on, {begun}. Got {self.device}. "
                "Go on there, or begin anew in another folder."
            )
        shapes, kept_shapes = ({key: t.shape for key, t in d.items()} for d in (own, saved))
        unlike = {key for key in {**own, **saved} if shapes.get(key) != kept_shapes.get(key)}
        different = sorted(key for key in unlike if not key.startswith(OTHERS))  # caches come and go
        if different:
            more = f", and {n} more differences" if (n := len(different) - 1) else ""
            raise ValueError(
                f"networks must be those of the run to be resumed. Got another {different[0]}{more}."
            )
        with torch.no_grad():
            for name in own.keys() - unlike:
                own[name].copy_(saved[name])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(checkpoint.tensors[CUDA])
        for alarm, kept in zip(self.alarms, checkpoint.state["alarms"], strict=True):
            alarm.restore(kept)
        self.step = checkpoint.step


def _differences(kept: dict[str, Any], now: dict[str, Any]) -> tuple[str, str]:
    """What two recipes do not have in common."""
    keys = [key for key in {**kept, **now} if kept.get(key) != now.get(key)]
    first, second = (", ".join(f"{key}={one.get(key)!r}" for key in keys) for one in (kept, now))
    return first, second


def _name(task: TaskLoss | None) -> str | None:
    """Enough of a function to notice another one; a partial's tensors, as class weights, by their shape."""
    if isinstance(task, partial):
        given = [_shape(value) for value in task.args]
        options = {name: _shape(value) for name, value in task.keywords.items()}
        return without_addresses(" ".join([str(_name(task.func)), *map(repr, given), str(options)]))
    return None if task is None else getattr(task, "__qualname__", type(task).__qualname__)


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else value
