"""What a network's forward does, as torch.fx traces it, and where it falls apart into before and after."""

import difflib
import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import fx, nn

from . import checks


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
    """Keeps the named submodules whole, and looks inside whatever contains them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.ends: dict[str, tuple[fx.Node, fx.Node]] = {}  # of each call: its output, and the last node then

    def call_module(self, m: nn.Module, *call: Any) -> Any:
        output = super().call_module(m, *call)
        if isinstance(output, fx.Proxy):
            self.ends[self.path_of_module(m)] = output.node, next(reversed(self.graph.nodes))
        return output

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.names:
            return True
        inside = any(name.startswith(f"{module_qualified_name}.") for name in self.names)
        return not inside and super().is_leaf_module(m, module_qualified_name)


class Cut(NamedTuple):
    """The nodes of forward on both sides of a place."""

    before: list[fx.Node]
    after: list[fx.Node]
    output: fx.Node  # of the place
    carried: list[fx.Node]  # computed before, read after, besides the place's own output
    attributes: list[fx.Node]  # weights and buffers read before: read again after rather than carried


def cut_nodes(module: nn.Module, nodes: list[fx.Node], name: str) -> Cut:
    """What `trace` found, in two at the call of the submodule `name`."""
    calls = [i for i, node in enumerate(nodes) if node.op == "call_module" and node.target == name]
    if len(calls) != 1:
        raise CannotCutError(
            module, name, f"it is called {len(calls)} times in forward, and must be called once"
        )
    return _divide(module, name, nodes, calls[0] + 1, nodes[calls[0]])


def every_cut(module: nn.Module) -> dict[str, Cut]:
    """The cuts after all submodules, as far as one trace of the whole network finds them."""
    nodes, tracer = _trace(module, [])
    order = {node: i for i, node in enumerate(tracer.graph.nodes)}
    cuts = {}
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
    attributes = [node for node in before if node.op == "get_attr"]
    carried = [node for node in crossing if node is not output and node.op != "get_attr"]
    return Cut(before, after, output, carried, attributes)


def parts_before(module: nn.Module, name: str) -> list[str]:
    """Names of the modules, parameters and buffers that forward uses up to the submodule `name`."""
    place = cut_nodes(module, trace(module, [name]), name)
    before, after = (
        list(dict.fromkeys(str(node.target) for node in nodes if node.op in ("call_module", "get_attr")))
        for nodes in (place.before, place.after)
    )
    if both := sorted(set(before) & set(after)):
        raise CannotCutError(module, name, f"{both[0]!r} is used before and after it")
    return before


def trace(module: nn.Module, names: Sequence[str]) -> list[fx.Node]:
    """The nodes of forward(x), the named submodules whole; arguments with a default are fixed to it."""
    for name in names:
        _check_known(module, name)
    return _trace(module, names)[0]


def _trace(module: nn.Module, names: Sequence[str]) -> tuple[list[fx.Node], _Tracer]:
    name = names[-1] if names else ""
    defaults = _defaults(module, name)
    before = set(vars(module))
    tracer = _Tracer(names)
    try:
        graph = tracer.trace(module, concrete_args=defaults)
    except Exception as error:  # whatever the network's own code raises on symbolic values
        raise CannotCutError(module, name, f"torch.fx cannot trace it ({error})") from error
    finally:
        constants = set(vars(module)) - before
        for constant in constants:
            delattr(module, constant)
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
