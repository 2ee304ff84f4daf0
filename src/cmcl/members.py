"""An ensemble's members: where they come from, and how their logits are found in what they return."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from . import _checks

Network = Callable[[], nn.Module] | Sequence[nn.Module]
Output = Callable[[Any], Tensor]  # what a member returns -> its logits (B, C, ...)


def build_members(network: Network, members: int | None) -> list[nn.Module]:
    """The modules of an ensemble: one call of `network` for each, or the list that was given."""
    if isinstance(network, nn.Module) and not isinstance(network, nn.ModuleList):
        raise TypeError(
            "network must be a function that builds a member, or a list of modules. Got one module, whose "
            f"copies would all start from the same weights; pass lambda: {type(network).__name__}(...)."
        )
    if callable(network) and not isinstance(network, nn.ModuleList):
        _checks.positive("members", members := 5 if members is None else members)
        return _modules([network() for _ in range(members)])
    if not isinstance(network, Sequence | nn.ModuleList) or isinstance(network, str):
        raise TypeError(
            "network must be a function that builds a member, or a list of modules. "
            f"Got {_checks.kind(network)}."
        )
    if members not in (None, len(network)):
        raise ValueError(
            f"members must be {len(network)}, the length of the list, or left out. Got {members}."
        )
    return _modules(list(network))


def distinct(given: list[nn.Module]) -> list[nn.Module]:
    """Members must start from different weights: M equal ones would learn M times the same."""
    for m, n in combinations(range(len(given)), 2):
        if given[m] is given[n] or _equal_weights(given[m], given[n]):
            raise ValueError(
                f"members must start from different weights. Members {m} and {n} are the same; "
                "build a freshly initialised module for each (a function, not copies of one instance)."
            )
    return given


def in_turn(calls: list[partial[Any]]) -> list[Any]:
    """The results of independent calls, one after the other."""
    return [call() for call in calls]


def logits_of(returned: list[Any], output: Output | None) -> list[Tensor]:
    """The members' logits (B, C, ...): what they return, or what `output` picks from it."""
    if output is not None:
        return _checks.outputs([output(answer) for answer in returned])
    for m, answer in enumerate(returned):
        if not isinstance(answer, Tensor):
            raise TypeError(
                f"members must return a tensor of logits (batch, classes, ...). Got {_contents(answer)} from "
                f"member {m}; pass output=, a function that picks the logits, such as {_example(answer)}."
            )
    return _checks.outputs(returned)


def _contents(answer: Any) -> str:
    keys = f" with {', '.join(map(repr, answer))}" if isinstance(answer, Mapping) else ""
    return _checks.kind(answer) + keys


def _example(answer: Any) -> str:
    if isinstance(answer, Mapping):
        return f"lambda out: out[{next(iter(answer), 'logits')!r}]"
    return "lambda out: out[0]" if isinstance(answer, Sequence) else "lambda out: out.logits"


def _equal_weights(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = list(a.parameters()), list(b.parameters())
    if not ours or any(p.is_meta or isinstance(p, UninitializedParameter) for p in ours + theirs):
        return False  # nothing to compare yet
    if [p.shape for p in ours] != [q.shape for q in theirs]:
        return False
    return all(torch.equal(p, q.to(p.device)) for p, q in zip(ours, theirs, strict=True))


def _modules(given: list[nn.Module]) -> list[nn.Module]:
    """Members must be modules."""
    if not given:
        raise ValueError("network must give at least 1 member. Got an empty list.")
    for m, module in enumerate(given):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"members must be torch.nn.Module instances. Got {_checks.kind(module)} as member {m}."
            )
    return given
