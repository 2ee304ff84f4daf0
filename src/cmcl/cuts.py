"""Where a traced network falls apart into before and after."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import fx, nn

from .tracing import CannotCutError, trace, trace_calls


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
        raise CannotCutError(module, name, _not_once(len(calls), start))
    return _divide(module, name, nodes, calls[0] + 1, nodes[calls[0]])


def _not_once(calls: int, start: str | None = None) -> str:
    if start is not None and not calls:
        return f"it is not called after {start!r}, and must be later than that"
    where = "in forward" if start is None else f"after {start!r}"
    return f"it is called {calls} times {where}, and must be called once"


def every_cut(module: nn.Module) -> dict[str, Cut | CannotCutError]:
    """The cuts after all submodules, or why there is none, as far as one trace of the whole network tells."""
    nodes, tracer = trace_calls(module, [])
    order = {node: i for i, node in enumerate(tracer.graph.nodes)}
    cuts: dict[str, Cut | CannotCutError] = {}
    for outer, part in module.named_modules():
        if error := tracer.whole.get(type(part)):
            reason = f"torch.fx cannot trace {outer!r}, which holds it ({error})"
            inner = [f"{outer}.{name}" for name, _ in part.named_modules() if name]
            cuts |= {name: CannotCutError(module, name, reason) for name in inner}
    for name, ends in tracer.ends.items():
        if len(ends) > 1:
            cuts[name] = CannotCutError(module, name, _not_once(len(ends)))
            continue
        ((output, last),) = ends
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
    place = cut_nodes(module, trace(module, [name], argument="stem"), name)
    before, after = _parts(place.before), _parts(place.after)
    if both := sorted(part for part in after if is_in(part, before)):
        raise CannotCutError(module, name, f"{both[0]!r} is used before and after it")
    return before


def parts_between(module: nn.Module, start: str, name: str) -> list[str]:
    """Names of what forward uses after the submodule `start` and up to a later one, `name`."""
    first = cut_nodes(module, trace(module, [start, name]), start)
    return _parts(cut_nodes(module, first.after, name, start=start).before)


def is_in(key: str, parts: Sequence[str]) -> bool:
    """Is what the key names one of the parts, or inside one?"""
    return any(f"{key}.".startswith(f"{part}.") for part in parts)


def _parts(nodes: list[fx.Node]) -> list[str]:
    used = [str(node.target) for node in nodes if node.op in ("call_module", "get_attr")]
    return list(dict.fromkeys(used))
