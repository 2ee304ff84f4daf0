"""Cutting a network in two at a named submodule, so that features can be mixed in between.

stem(module, x) -> (h, rest) and trunk(module, h, rest) -> logits: h is mixed among the members; rest holds
the other values that cross the cut (skip connections, sizes) and travels unmixed. Both take the module as
an argument and read its live submodules, so that `.to()`, `.train()` and `load_state_dict` just work.
"""

import difflib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from . import checks
from .modes import keep_modes
from .networks.base import SplitNetwork


class Halves(NamedTuple):
    """The two halves of a network."""

    stem: Callable[[nn.Module, Tensor], tuple[Tensor, tuple[Any, ...]]]
    trunk: Callable[[nn.Module, Tensor, tuple[Any, ...]], Tensor]


def split(module: nn.Module, name: str | None) -> Halves:
    """Cut `module` after its submodule `name`; None: before everything, the trunk is the whole network.

    With name="stem", a module that offers methods `stem(x)` and `trunk(h)` is taken at its word; `stem` may
    return (h, *others), which then reach `trunk(h, *others)` unmixed. Anything else is traced by torch.fx,
    once for train and once for eval mode: what is decided in Python, not by tensors, stays as it was then.
    """
    if name is None:
        return Halves(_no_stem, _whole)
    if name == "stem" and (isinstance(module, SplitNetwork) or _has_methods(module, "stem", "trunk")):
        return Halves(_own_stem, _own_trunk)
    if name not in (known := dict(module.named_modules())):
        if not isinstance(name, str):
            raise TypeError(f"share_after must be a submodule's name. Got {checks.kind(name)}.")
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)[1:6]
        raise ValueError(
            f"share_after must name a submodule of {type(module).__name__}. Got {name!r}; "
            f"the nearest are {', '.join(map(repr, close)) or 'none, it has no submodules'}."
        )
    # Tracing freezes what the code does with self.training (F.dropout, say), so each mode has its own cut.
    with keep_modes(module):
        training, evaluation = _cut(module.train(), name), _cut(module.eval(), name)
    return Halves(
        lambda module, x: (training if module.training else evaluation).stem(module, x),
        lambda module, h, rest: (training if module.training else evaluation).trunk(module, h, rest),
    )


def _has_methods(module: nn.Module, *names: str) -> bool:
    """Methods, not submodules of that name: what else forward does with those, only tracing tells."""
    found = [getattr(module, name, None) for name in names]
    return all(callable(value) and not isinstance(value, nn.Module) for value in found)


def _no_stem(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    return x, ()


def _whole(module: nn.Module, x: Tensor, rest: tuple[Any, ...]) -> Tensor:
    logits: Tensor = module(x)
    return logits


def _own_stem(module: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    out = module.stem(x)
    return (out[0], tuple(out[1:])) if isinstance(out, tuple | list) else (out, ())


def _own_trunk(module: Any, h: Tensor, rest: tuple[Any, ...]) -> Tensor:
    logits: Tensor = module.trunk(h, *rest)
    return logits


class _Tracer(fx.Tracer):
    """Keeps the named submodule whole, and looks inside whatever contains it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name == self.name:
            return True
        inside = self.name.startswith(f"{module_qualified_name}.")
        return not inside and super().is_leaf_module(m, module_qualified_name)


def _cut(module: nn.Module, name: str) -> Halves:
    nodes = _trace(module, name)
    calls = [i for i, node in enumerate(nodes) if node.op == "call_module" and node.target == name]
    if len(calls) != 1:
        raise _cannot(module, name, f"it is called {len(calls)} times in forward, and must be called once")
    before, after = nodes[: calls[0] + 1], nodes[calls[0] + 1 :]
    cut, x = before[-1], before[0]
    if not any(user in after for user in cut.users):
        raise _cannot(module, name, "nothing after it uses its output")
    attributes = [node for node in before if node.op == "get_attr"]  # read again rather than carried
    carried = [
        node
        for node in before
        if node is not cut and node not in attributes and any(user in after for user in node.users)
    ]
    stem = _function(before, [x], (cut, *carried))
    trunk = _function([*attributes, *after], [cut, *carried], None)

    def run_stem(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        h, *rest = stem(module, x)
        return h, tuple(rest)

    return Halves(run_stem, lambda module, h, rest: trunk(module, h, *rest))


def _trace(module: nn.Module, name: str) -> list[fx.Node]:
    """The nodes of forward(x): one input, arguments with a default fixed to it."""
    defaults = _defaults(module, name)
    before = set(vars(module))
    try:
        graph = _Tracer(name).trace(module, concrete_args=defaults)
    except Exception as error:  # whatever the network's own code raises on symbolic values
        raise _cannot(module, name, f"torch.fx cannot trace it ({error})") from error
    finally:
        constants = set(vars(module)) - before
        for constant in constants:
            delattr(module, constant)
    if constants:
        raise _cannot(module, name, "it makes a tensor in forward, which tracing would freeze (use a buffer)")
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    fixed = set(inputs[1:])  # and what fx adds to assert their values
    for node in graph.nodes:
        if not fixed.isdisjoint(node.all_input_nodes):
            fixed.add(node)
    return [node for node in graph.nodes if node not in fixed]


def _defaults(module: nn.Module, name: str) -> dict[str, Any]:
    """The arguments of forward besides the input, which must do with their defaults."""
    first, *others = inspect.signature(module.forward).parameters.values()
    others = [p for p in others if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in others:
        if p.default is p.empty or isinstance(p.default, tuple | list | dict):
            raise _cannot(module, name, f"its forward needs {p.name!r} besides the input")
    if first.kind in (first.VAR_POSITIONAL, first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise _cannot(module, name, f"its forward must name its input, and has only {first}")
    return {p.name: p.default for p in others}


def _function(
    nodes: list[fx.Node], inputs: list[fx.Node], outputs: tuple[fx.Node, ...] | None
) -> Callable[..., Any]:
    """A Python function (module, *inputs) of these nodes; outputs=None: the traced network's own."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if outputs is not None:
        graph.output(tuple(copies[node] for node in outputs))
    code = graph.python_code("self")
    exec(code.src, code.globals)  # fx's own way from graph to function
    function: Callable[..., Any] = code.globals["forward"]
    return function


def _cannot(module: nn.Module, name: str, reason: str) -> ValueError:
    return ValueError(
        f"{type(module).__name__} cannot be cut after {name!r}: {reason}. Name another submodule, or give "
        "the network two methods, stem(x) and trunk(h), and pass share_after='stem'."
    )
