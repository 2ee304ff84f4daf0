"""What a network's forward does, as torch.fx traces it: once, with symbols in place of tensors.

A trace sees what happens to tensors. It cannot see what Python does besides (decisions, random numbers,
hooks, gradients of one's own), so submodules that do such things are kept whole, and run as they are.
"""

import difflib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import fx, jit, nn

from . import _checks

_CONSTANTS = ("_tensor_constant", "_opaque_obj")  # as fx calls what is neither computed nor a weight
_GENERATORS = (random.Random, torch.Generator, np.random.Generator)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ATTRIBUTES = ("", "_parameters", "_buffers", "_modules")  # dicts of a module's attributes; "": its own


class CannotCutError(ValueError):
    """A network cannot be cut at a place, for a `reason`."""

    def __init__(self, module: nn.Module, name: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{type(module).__name__} cannot be cut after {name!r}: {reason}. Name another submodule "
            "(cmcl.shareable_layers lists them), or give the network two methods, stem(x) and trunk(h), and "
            "pass share_after='stem'."
        )


class _Tracer(fx.Tracer):
    """Keeps the named submodules whole, and those that cannot be traced; looks into the others."""

    proxy_buffer_attributes = True  # what is computed from a buffer is computed each time, not frozen

    def __init__(self, names: Sequence[str], whole: Mapping[type[nn.Module], Exception]) -> None:
        super().__init__()
        self.names, self.whole = names, whole
        # of each call of a submodule: its output, and the last node then
        self.ends: dict[str, list[tuple[fx.Node, fx.Node]]] = {}
        self.failed: nn.Module | None = None  # the innermost submodule in whose code tracing failed

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(m, jit.ScriptModule):
            inspect.signature(m.forward).bind(*args, **kwargs)  # a wrong call is a failure of the caller
        try:
            with _no_draws():
                output = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = m if self.failed is None else self.failed
            raise
        if isinstance(output, fx.Proxy):
            end = output.node, next(iter(reversed(self.graph.nodes)))  # torch 2.11 needs iter
            self.ends.setdefault(self.path_of_module(m), []).append(end)
        return output

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() or not kind.startswith("call"):
            return super().create_proxy(kind, target, args, kwargs, *more, **options)
        _check_not_in_function()
        # a trace knows of no torch.no_grad()
        if kind == "call_module":
            proxy = super().create_proxy(kind, target, args, kwargs, *more, **options)
            return super().create_proxy("call_function", _detached, (proxy,), {})
        return super().create_proxy("call_function", _without_grad(target), args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.names:
            return True
        if any(name.startswith(f"{module_qualified_name}.") for name in self.names):
            _check_plain(m)
            return False
        whole = type(m) in self.whole or _problem(m) is not None
        return whole or super().is_leaf_module(m, module_qualified_name)


def _detached(value: Any) -> Any:
    return fx.node.map_aggregate(value, lambda v: v.detach() if isinstance(v, torch.Tensor) else v)


def _without_grad(target: Callable[..., Any] | str) -> Callable[..., Any]:
    """A function, or a method by its name, under torch.no_grad()."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if isinstance(target, str):
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    run.__name__ = target if isinstance(target, str) else target.__name__  # what fx calls it in its code
    return run


def _problem(module: nn.Module) -> str | None:
    """What calling the module does besides its class's forward; a trace would leave it out."""
    if isinstance(module, jit.ScriptModule):
        return None
    if "forward" in vars(module):
        return "its forward was replaced by another function"
    if any(isinstance(value, _GENERATORS) for value in vars(module).values()):
        return "it has a random generator of its own"
    return "it has hooks" if any(getattr(module, hooks) for hooks in _HOOKS) else None


def _check_plain(module: nn.Module) -> None:
    if problem := _problem(module):
        raise TypeError(f"{type(module).__name__}: {problem}, which a cut through it would leave out")


@contextmanager
def _no_draws() -> Iterator[None]:
    """Refuses code that draws random numbers by itself: the trace would hold what came of them this once."""
    before = _random_states()
    yield
    if before != _random_states():
        raise TypeError("it draws random numbers in Python, which a trace would freeze")


def _random_states() -> tuple[Any, ...]:
    """Of torch on the CPU, of Python and of numpy."""
    state: Any = np.random.get_state()  # noqa: NPY002  such code draws from it
    kind, values, *others = state
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), kind, values.tobytes(), others


def _check_not_in_function() -> None:
    """Refuses a torch.autograd.Function: the trace would hold its forward, and lose its backward."""
    frame: FrameType | None = sys._getframe()
    functions = {code: kind for kind in _subclasses(torch.autograd.Function) if (code := _forward_code(kind))}
    while frame := frame and frame.f_back:
        if kind := functions.get(frame.f_code):
            raise TypeError(f"{kind.__name__} is a torch.autograd.Function, whose gradient would be lost")


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def _forward_code(function: Any) -> CodeType | None:
    """The code of a Function's own forward, below what decorates it (torch.amp.custom_fwd)."""
    return getattr(inspect.unwrap(function.forward), "__code__", None)


def trace(module: nn.Module, names: Sequence[str], *, argument: str = "share_after") -> list[fx.Node]:
    """The nodes of forward(x), the named submodules whole; arguments with a default are fixed to it."""
    for name in names:
        _check_known(module, name, argument)
    return trace_calls(module, names)[0]


def trace_calls(module: nn.Module, names: Sequence[str]) -> tuple[list[fx.Node], _Tracer]:
    """The same, with what the tracer noted on its way."""
    name = names[-1] if names else ""
    graph, tracer, changed = _graph(module, name, names)
    constants = {key for key in changed if key.startswith(_CONSTANTS)}
    if assigned := sorted(set(changed) - constants):
        raise CannotCutError(
            module,
            name,
            f"its forward assigns {assigned[0]!r}, which would happen once, now, and never again "
            "(write into a buffer instead, such as self.count.add_(1))",
        )
    if constants:
        raise CannotCutError(
            module, name, "it makes a tensor in forward, which tracing would freeze (use a buffer)"
        )
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    fixed = set(inputs[1:])  # and what fx adds to assert their values
    for node in graph.nodes:
        if not fixed.isdisjoint(node.all_input_nodes):
            fixed.add(node)
    return [node for node in graph.nodes if node not in fixed], tracer


def _graph(module: nn.Module, name: str, names: Sequence[str]) -> tuple[fx.Graph, _Tracer, list[str]]:
    """The graph, and what forward assigned. Submodules that fx cannot look into stay whole, if it may be."""
    defaults = _defaults(module, name)
    whole: dict[type[nn.Module], Exception] = {}
    while True:
        tracer = _Tracer(names, whole)
        try:
            _check_plain(module)
            with _put_back(module) as changed, torch.enable_grad(), _no_draws():
                graph = tracer.trace(module, concrete_args=defaults)
        except Exception as error:  # whatever the network's own code raises on symbolic values
            if tracer.failed is None or type(tracer.failed) in whole:
                raise CannotCutError(module, name, f"torch.fx cannot trace it ({error})") from error
            whole[type(tracer.failed)] = error
        else:
            owners = {key: module.get_submodule(key.rpartition(".")[0]) for key in changed}
            again = {type(owner): key for key, owner in owners.items() if owner is not module}
            if again.keys() <= whole.keys():
                return graph, tracer, changed
            whole |= {kind: TypeError(f"its forward assigns {key!r}") for kind, key in again.items()}


@contextmanager
def _put_back(module: nn.Module) -> Iterator[list[str]]:
    """Afterwards all attributes, and dicts, lists and sets among them, hold what they held.

    The list names those that were assigned or, where they are lists or sets, changed.
    """
    changed: list[str] = []
    parts = {n: vars(part) for n, part in module.named_modules() if not isinstance(part, jit.ScriptModule)}
    values = [(name, kind, value) for name, own in parts.items() for kind, value in [("", own), *own.items()]]
    dicts = [(name, kind, value, dict(value)) for name, kind, value in values if isinstance(value, dict)]
    several = [(n, kind, value, list(value)) for n, kind, value in values if isinstance(value, list | set)]
    try:
        yield changed
    finally:
        for name, kind, now, before in dicts:
            keys = [key for key in now.keys() | before.keys() if now.get(key) is not before.get(key)]
            if keys:
                now.clear()
                now.update(before)
            if kind in _ATTRIBUTES:  # another dict is a cache: what is put there is traced as well
                changed += [f"{name}.{key}".removeprefix(".") for key in keys]
        for name, kind, items, kept in several:
            if list(map(id, items)) != list(map(id, kept)):
                items.clear()
                (items.extend if isinstance(items, list) else items.update)(kept)
                changed.append(f"{name}.{kind}".removeprefix("."))


def _check_known(module: nn.Module, name: str, argument: str) -> None:
    known = [key for key, _ in module.named_modules() if key]
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be a submodule's name. Got {_checks.kind(name)}.")
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:5]
        raise ValueError(
            f"{argument} must name a submodule of {type(module).__name__}. Got {name!r}; "
            f"the nearest are {', '.join(map(repr, close)) or 'none, it has no submodules'}."
        )


def _defaults(module: nn.Module, name: str) -> dict[str, Any]:
    """The arguments of forward besides the input, which must do with their defaults."""
    first, *others = inspect.signature(module.forward).parameters.values()
    others = [p for p in others if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in others:
        if p.default is p.empty or isinstance(p.default, tuple | list | dict):
            raise CannotCutError(module, name, f"its forward needs {p.name!r} besides the input")
    if first.kind in (first.VAR_POSITIONAL, first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise CannotCutError(module, name, f"its forward must name its input, and has only {first}")
    return {p.name: p.default for p in others}
