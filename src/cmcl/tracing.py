"""What a network's forward does, as torch.fx traces it, and where it falls apart into before and after."""

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import fx, jit, nn
from torch.utils._pytree import tree_map_only

from . import checks

_ATTRIBUTES = ("", "_parameters", "_buffers", "_modules")  # dicts of a module's attributes; "": its own


class CannotCutError(ValueError):
    """A network cannot be cut at a place, for a `reason`."""

    def __init__(self, module: nn.Module, name: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{type(module).__name__} cannot be cut after {name!r}: {reason}. Name another submodule "
            "(cmcl.find_places lists them), or give the network two methods, stem(x) and trunk(h), and pass "
            "share_after='stem'."
        )


class _Tracer(fx.Tracer):
    """Keeps the named submodules whole, and those of a kind that cannot be traced; looks into the others."""

    proxy_buffer_attributes = True  # what is computed from a buffer is computed each time, not frozen

    def __init__(self, names: Sequence[str], whole: Mapping[type[nn.Module], Exception]) -> None:
        super().__init__()
        self.names, self.whole = names, whole
        self.ends: dict[str, tuple[fx.Node, fx.Node]] = {}  # of each call: its output, and the last node then
        self.failed: nn.Module | None = None  # the innermost submodule in whose code tracing failed

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(m, jit.ScriptModule):
            inspect.signature(m.forward).bind(*args, **kwargs)  # a wrong call is a failure of the caller
        try:
            output = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = m if self.failed is None else self.failed
            raise
        if isinstance(output, fx.Proxy):
            self.ends[self.path_of_module(m)] = output.node, next(reversed(self.graph.nodes))
        return output

    def create_proxy(self, kind: str, *call: Any, **options: Any) -> fx.Proxy:
        proxy = super().create_proxy(kind, *call, **options)
        if kind.startswith("call") and not torch.is_grad_enabled():  # a trace knows of no torch.no_grad()
            proxy = super().create_proxy("call_function", _detached, (proxy,), {})
        return proxy

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.names:
            return True
        inside = any(name.startswith(f"{module_qualified_name}.") for name in self.names)
        return not inside and (type(m) in self.whole or super().is_leaf_module(m, module_qualified_name))


def _detached(value: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


class Cut(NamedTuple):
    """The nodes of forward on both sides of a place."""

    before: list[fx.Node]
    after: list[fx.Node]
    output: fx.Node  # of the place
    carried: list[fx.Node]  # computed before, read after, besides the place's own output
    attributes: list[fx.Node]  # weights and buffers read before: read again after rather than carried


def cut_nodes(module: nn.Module, nodes: list[fx.Node], name: str, *, start: str | None = None) -> Cut:
    """What `trace` found, or the part of it after `start`, in two at the call of the submodule `name`."""
    calls = [i for i, node in enumerate(nodes) if node.op == "call_module" and node.target == name]
    if len(calls) != 1:
        where = "in forward" if start is None else f"after {start!r}"
        raise CannotCutError(
            module, name, f"it is called {len(calls)} times {where}, and must be called once"
        )
    return _divide(module, name, nodes, calls[0] + 1, nodes[calls[0]])


def every_cut(module: nn.Module) -> dict[str, Cut | CannotCutError]:
    """The cuts after all submodules, or why there is none, as far as one trace of the whole network tells."""
    nodes, tracer = _trace(module, [])
    order = {node: i for i, node in enumerate(tracer.graph.nodes)}
    cuts: dict[str, Cut | CannotCutError] = {}
    for outer, part in module.named_modules():
        if error := tracer.whole.get(type(part)):
            reason = f"torch.fx cannot trace {outer!r}, which holds it ({error})"
            inner = [f"{outer}.{name}" for name, _ in part.named_modules() if name]
            cuts |= {name: CannotCutError(module, name, reason) for name in inner}
    for name, (output, last) in tracer.ends.items():
        with suppress(CannotCutError):
            count = sum(order[node] <= order[last] for node in nodes)
            cuts[name] = _divide(module, name, nodes, count, output)
    return cuts


def _divide(module: nn.Module, name: str, nodes: list[fx.Node], count: int, output: fx.Node) -> Cut:
    """So many nodes before, the others after, and what goes from here to there."""
    before, after = nodes[:count], nodes[count:]
    later = set(after)
    crossing = [node for node in before if not later.isdisjoint(node.users)]
    if output not in crossing:
        raise CannotCutError(module, name, "nothing after it uses its output")
    if not _depends_on_input(output):
        raise CannotCutError(module, name, "its output does not depend on the input")
    if all(node.op == "output" or isinstance(node.target, type) for node in after):  # a type: of the answer
        raise CannotCutError(module, name, "it is the network's output")
    attributes = [node for node in before if node.op == "get_attr"]
    carried = [node for node in crossing if node is not output and node.op != "get_attr"]
    return Cut(before, after, output, carried, attributes)


def _depends_on_input(node: fx.Node) -> bool:
    seen, todo = {node}, [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - seen
        seen |= new
        todo += new
    return any(node.op == "placeholder" for node in seen)


def parts_before(module: nn.Module, name: str) -> list[str]:
    """Names of the modules, parameters and buffers that forward uses up to the submodule `name`."""
    place = cut_nodes(module, trace(module, [name]), name)
    before, after = _parts(place.before), _parts(place.after)
    if both := sorted(set(before) & set(after)):
        raise CannotCutError(module, name, f"{both[0]!r} is used before and after it")
    return before


def parts_between(module: nn.Module, start: str, name: str) -> list[str]:
    """Names of what forward uses after the submodule `start` and up to a later one, `name`."""
    first = cut_nodes(module, trace(module, [start, name]), start)
    return _parts(cut_nodes(module, first.after, name, start=start).before)


def _parts(nodes: list[fx.Node]) -> list[str]:
    used = [str(node.target) for node in nodes if node.op in ("call_module", "get_attr")]
    return list(dict.fromkeys(used))


def trace(module: nn.Module, names: Sequence[str]) -> list[fx.Node]:
    """The nodes of forward(x), the named submodules whole; arguments with a default are fixed to it."""
    for name in names:
        _check_known(module, name)
    return _trace(module, names)[0]


def _trace(module: nn.Module, names: Sequence[str]) -> tuple[list[fx.Node], _Tracer]:
    name = names[-1] if names else ""
    graph, tracer, changed = _graph(module, name, names)
    constants = {key for key in changed if key.startswith("_tensor_constant")}  # as fx calls them
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
            with _put_back(module) as changed, torch.enable_grad():
                graph = tracer.trace(module, concrete_args=defaults)
            return graph, tracer, changed
        except Exception as error:  # whatever the network's own code raises on symbolic values
            if tracer.failed is None or type(tracer.failed) in whole:
                raise CannotCutError(module, name, f"torch.fx cannot trace it ({error})") from error
            whole[type(tracer.failed)] = error


@contextmanager
def _put_back(module: nn.Module) -> Iterator[list[str]]:
    """Afterwards all attributes, and dicts among them, hold what they held; the list names those assigned."""
    changed: list[str] = []
    parts = {n: vars(part) for n, part in module.named_modules() if not isinstance(part, jit.ScriptModule)}
    held = [
        (name, kind, values, dict(values))
        for name, own in parts.items()
        for kind, values in [("", own), *own.items()]
        if isinstance(values, dict)
    ]
    try:
        yield changed
    finally:
        for name, kind, now, before in held:
            keys = [key for key in now.keys() | before.keys() if now.get(key) is not before.get(key)]
            if keys:
                now.clear()
                now.update(before)
            if kind in _ATTRIBUTES:  # another dict is a cache: what is put there is traced as well
                changed += [f"{name}.{key}".removeprefix(".") for key in keys]


def _check_known(module: nn.Module, name: str) -> None:
    known = dict(module.named_modules())
    if not isinstance(name, str):
        raise TypeError(f"share_after must be a submodule's name. Got {checks.kind(name)}.")
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)[1:6]
        raise ValueError(
            f"share_after must name a submodule of {type(module).__name__}. Got {name!r}; "
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
