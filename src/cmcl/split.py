"""Cutting a network in two at a named submodule, so that features can be mixed in between.

stem(module, x) -> (h, rest) and trunk(module, h, rest) -> logits: h is mixed among the members; rest holds
the other values that cross the cut (skip connections, sizes) and travels unmixed. Both take the module as
an argument and read its live submodules, so that `.to()`, `.train()` and `load_state_dict` just work. Every
stem takes a copy of x, because members may write into theirs (a ReLU in place) and all get the same x.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from .cuts import cut_nodes
from .networks.base import SplitNetwork
from .tracing import CannotCutError, trace

Stem = Callable[[nn.Module, Tensor], tuple[Tensor, tuple[Any, ...]]]  # (member, x) -> (h, rest)
Trunk = Callable[[nn.Module, Tensor, tuple[Any, ...]], Any]  # (member, h, rest) -> what the member returns


class Halves(NamedTuple):
    """The two halves of a network."""

    stem: Stem
    trunk: Trunk
    traced: bool = False  # rather than the network's own


@contextmanager
def keep_modes(module: nn.Module) -> Iterator[None]:
    """Restore the mode of every submodule afterwards, train or eval (some may be frozen)."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def split(module: nn.Module, name: str | None, *, start: str | None = None) -> Halves:
    """Cut `module` after its submodule `name`; None: before everything, the trunk is the whole network.

    With name="stem", a module that offers methods `stem(x)` and `trunk(h)` is taken at its word; `stem` may
    return (h, *others), which then reach `trunk(h, *others)` unmixed. Anything else is traced by torch.fx,
    once for train and once for eval mode: what is decided in Python, not by tensors, stays as it was then.

    With `start`, another submodule, the network begins after that one, and x is its output.
    """
    if name is None and start is None:
        return Halves(_no_stem, _whole)
    if start is None and offers_halves(module, name):
        return Halves(_own_stem, _own_trunk)
    # Tracing freezes what the code does with self.training (F.dropout, say), so each mode has its own cut.
    with keep_modes(module):
        training, evaluation = cut(module.train(), name, start=start), cut(module.eval(), name, start=start)
    return Halves(
        lambda module, x: (training if module.training else evaluation).stem(module, x),
        lambda module, h, rest: (training if module.training else evaluation).trunk(module, h, rest),
        traced=True,
    )


def offers_halves(module: nn.Module, name: str | None) -> bool:
    """Does `module` say itself what comes before and after the place `name`?"""
    return name == "stem" and (isinstance(module, SplitNetwork) or _has_methods(module, "stem", "trunk"))


def _has_methods(module: nn.Module, *names: str) -> bool:
    """Methods, not submodules of that name: what else forward does with those, only tracing tells."""
    found = [getattr(module, name, None) for name in names]
    return all(callable(value) and not isinstance(value, nn.Module) for value in found)


def _no_stem(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    return x.clone(), ()


def _whole(module: nn.Module, x: Tensor, rest: tuple[Any, ...]) -> Tensor:
    logits: Tensor = module(x)
    return logits


def _own_stem(module: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    out = module.stem(x.clone())
    return (out[0], tuple(out[1:])) if isinstance(out, tuple | list) else (out, ())


def _own_trunk(module: Any, h: Tensor, rest: tuple[Any, ...]) -> Tensor:
    logits: Tensor = module.trunk(h, *rest)
    return logits


def cut(module: nn.Module, name: str | None, *, start: str | None = None) -> Halves:
    """The halves of a network in the mode it is in, train or eval; arguments as for `split`."""
    names = [name for name in (start, name) if name is not None]
    nodes = trace(module, names)
    x = nodes[0]
    if start is not None:
        first = cut_nodes(module, nodes, start)
        if first.carried:
            others = ", ".join(map(str, first.carried))
            raise CannotCutError(module, start, f"other values than its output are used after it ({others})")
        x, nodes = first.output, [*first.attributes, first.output, *first.after]
    if name is None:
        whole = _function(nodes, [x], None)
        return Halves(_no_stem, lambda module, h, rest: whole(module, h))
    place = cut_nodes(module, nodes, name, start=start)
    stem = _function(place.before, [x], (place.output, *place.carried))
    trunk = _function([*place.attributes, *place.after], [place.output, *place.carried], None)

    def run_stem(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        h, *rest = stem(module, x.clone())
        return h, tuple(rest)

    return Halves(run_stem, lambda module, h, rest: trunk(module, h, *rest))


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
