"""Where in a network features can be shared: its submodules in the order they run, and one suggestion."""

from collections.abc import Sequence
from itertools import count
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import activation, pooling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from . import _checks
from .cuts import Cut, cut_nodes, every_cut
from .split import keep_modes, offers_halves, split
from .tracing import CannotCutError, trace

Cuts = dict[str, Cut | CannotCutError]

_CONV = nn.modules.conv._ConvNd
_POOL = tuple(getattr(pooling, name) for name in pooling.__all__ if "Unpool" not in name)
_DROP = (nn.modules.dropout._DropoutNd, nn.Identity)
_ACTIVATIONS = tuple(getattr(activation, name) for name in activation.__all__)


class Place(NamedTuple):
    """A submodule after which features may be shared: `Ensemble(..., share_after=place.name)`."""

    name: str
    kind: str  # class of the submodule
    shape: tuple[int, ...] | None  # of its output, without the batch; None if that is not one tensor
    problem: str | None = None  # why features cannot be shared there; None: they can
    crossed: bool = False  # other features pass by it, such as a skip connection; they would stay unmixed
    suggested: bool = False


class Call(NamedTuple):
    """A submodule that ran."""

    name: str
    module: nn.Module
    began: int
    ended: int
    x: Any  # its first argument
    output: Any


def shareable_layers(network: nn.Module, x: Tensor) -> list[Place]:
    """The submodules of `network` in the order they finish: can features be shared there, and if not, why?

    One place is suggested. Where the network itself offers `stem` and `trunk`, that is "stem". Otherwise it
    is the last one before features first get smaller, by pooling or a stride (the paper shares just before
    the first pooling); averages over all positions do not count. Where they never get smaller, it is the
    first one that holds an activation, or else the first. Places that other features pass by are not
    suggested, and no dropout: what it drops would come back from the other members.

    Args:
        network: one member. It runs once, in eval mode.
        x: an input (B, ...).
    """
    if not isinstance(network, nn.Module):
        hint = " Call it first: shareable_layers(build(), x)." if callable(network) else ""
        raise TypeError(f"network must be a torch.nn.Module. Got {_checks.kind(network)}.{hint}")
    calls = _run(network, _checks.inputs(x))
    times = {call.name: sum(other.name == call.name for other in calls) for call in calls}
    with keep_modes(network):
        modes = [(mode, _cuts(network.train(mode))) for mode in (True, False)]  # as `split` cuts
        places = {call.name: _place(network, call, times[call.name], modes) for call in calls}
        network.eval()
        if offers_halves(network, "stem"):
            own = _own_place(network, x)
            return [own, *(place for place in places.values() if place.name != own.name)]
    chosen = _suggestion(calls, [place.name for place in places.values() if _is_eligible(place, network)])
    return [place._replace(suggested=place.name == chosen) for place in places.values()]


def _run(network: nn.Module, x: Tensor) -> list[Call]:
    """The calls of all submodules in one forward pass, ordered by their end."""
    calls: list[Call] = []
    began: dict[nn.Module, int] = {}
    clock = count()

    def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        began[module] = next(clock)

    def end(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if module in names:
            x = inputs[0] if inputs else None
            calls.append(Call(names[module], module, began[module], next(clock), x, output))

    names = {module: name for name, module in network.named_modules() if name}
    # hooks on all modules there are, because a TorchScript module takes none of its own
    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        with torch.no_grad(), keep_modes(network):
            network.eval()(x.clone())
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _cuts(network: nn.Module) -> Cuts:
    """Most cuts by one trace; those that it says nothing of are traced one by one."""
    try:
        return every_cut(network)
    except CannotCutError:
        return {}


def _place(network: nn.Module, call: Call, times: int, modes: Sequence[tuple[bool, Cuts]]) -> Place:
    shape = tuple(call.output.shape[1:]) if isinstance(call.output, Tensor) else None
    place = Place(call.name, type(call.module).__name__, shape)
    if times > 1:
        return place._replace(problem=f"it is called {times} times")
    if shape is None:
        return place._replace(problem=f"its output is a {type(call.output).__name__}, not one tensor")
    if not call.output.is_floating_point():
        return place._replace(problem=f"its output is {call.output.dtype}, not floating-point")
    try:
        found = [_cut(network.train(mode), call.name, cuts) for mode, cuts in modes]
    except CannotCutError as error:
        return place._replace(problem=error.reason)
    return place._replace(crossed=any(map(_is_crossed, found)))


def _cut(network: nn.Module, name: str, known: Cuts) -> Cut:
    found = known.get(name) or cut_nodes(network, trace(network, [name]), name)
    if isinstance(found, CannotCutError):
        raise found
    return found


def _is_crossed(cut: Cut) -> bool:
    """Do other features pass by? Sizes, and what is computed from the input alone (a mask), are none.

    An input that goes to another submodule later is: the place lies on one of several branches.
    """
    later = set(cut.after)
    inputs = [node for node in cut.carried if node.op == "placeholder"]
    if any(user.op == "call_module" for node in inputs for user in later.intersection(node.users)):
        return True
    features: set[fx.Node] = set()
    for node in cut.before:
        computed = node.op == "call_module" or not features.isdisjoint(node.all_input_nodes)
        if computed and not _is_size(node):
            features.add(node)
    read = [user for node in features.intersection(cut.carried) for user in node.users if user in later]
    return not all(map(_is_size, read))


def _is_size(node: fx.Node) -> bool:
    """Does the node compute a size, a number of dimensions or the like, rather than a tensor?"""
    if node.op == "call_method" and node.target in ("size", "dim", "numel"):
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    inputs = node.all_input_nodes
    return node.op == "call_function" and bool(inputs) and all(map(_is_size, inputs))


def _own_place(network: nn.Module, x: Tensor) -> Place:
    """Where a network that offers `stem` and `trunk` is cut."""
    with torch.no_grad():
        h, rest = split(network, "stem").stem(network, x)
    kind = type(getattr(network, "stem")).__name__  # noqa: B009  a submodule or a method
    return Place("stem", kind, tuple(h.shape[1:]), crossed=bool(rest), suggested=True)


def _is_eligible(place: Place, network: nn.Module) -> bool:
    return (
        place.problem is None
        and not place.crossed
        and not isinstance(network.get_submodule(place.name), _DROP)
    )


def _suggestion(calls: list[Call], eligible: list[str]) -> str | None:
    """The name of the place to share at; the rule is told in `shareable_layers`."""
    sound = [call for call in calls if call.name in eligible]
    for call in sorted(calls, key=lambda call: call.began):
        before = [other for other in sound if other.ended < call.began]
        if before and _gets_smaller(before[-1].output, call):
            return before[-1].name
    active = [call for call in sound if any(isinstance(m, _ACTIVATIONS) for m in call.module.modules())]
    first = next(iter(active or sound), None)
    return first and first.name


def _gets_smaller(features: Tensor, call: Call) -> bool:
    """Does `call`, or what was computed since `features`, take them to fewer positions, though not to one?"""
    if not isinstance(call.module, (_CONV, *_POOL)) or not isinstance(call.output, Tensor):
        return False
    known, came, went = (prod(t.shape[2:]) for t in (features, call.x, call.output))
    if features.ndim == call.x.ndim and 1 < came < known:  # a function did it, such as F.max_pool2d
        return True
    strided = not isinstance(call.module, _CONV) or max(call.module.stride) > 1
    return strided and 1 < went < came
