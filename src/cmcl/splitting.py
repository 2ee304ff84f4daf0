"""Splitting a network in two after a named layer, so that features can be shared in between.

stem(member, x) -> (h, rest) and trunk(member, h, rest) -> output: h is shared among the members; rest holds
the other values that the trunk needs (skip connections, sizes). Both read the live submodules of `member`, so
that `.to()`, `.train()` and `load_state_dict` just work. Members with equal traces get the same two function
objects, so that one compilation serves all of them.

1. `_trace`: torch.fx runs forward once with symbols instead of tensors, inside the modules that contain the
   layer only; all other submodules stay whole and run as they are. What Python does besides would be frozen
   in the trace: where that is seen, it raises.
2. `_sides` and `_piece`: the nodes up to the end of the layer become the stem, the others the trunk.
3. `verify`: at the first call in each mode, the pieces must give the network's logits and gradients.

`shareable_layers` lists the layers for which this works.
"""

import copy
import difflib
import inspect
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from operator import getitem, is_
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, fx, jit, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import activation, conv, pooling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from . import _checks
from ._messages import first_line, private_torch, warn

Stem = Callable[[nn.Module, Tensor], tuple[Tensor, tuple[Any, ...]]]  # (member, x) -> (h, rest)
Trunk = Callable[[nn.Module, Tensor, tuple[Any, ...]], Any]  # (member, h, rest) -> what the member returns
Run = Callable[[nn.Module, Tensor], Any]  # (member, x) -> what the member returns

TOLERANCE = 0.01  # relative difference of norms; another order of operations differs by far less


class Split(NamedTuple):
    """The two pieces of a network."""

    stem: Stem
    trunk: Trunk
    traced: bool = False  # False: the network's own methods, or the whole network as trunk


class CannotSplitError(ValueError):
    """A network cannot be split after a layer, for a `reason`."""

    def __init__(self, module: nn.Module, name: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{type(module).__name__} cannot be split after {name!r}: {reason}. Name another submodule "
            "(cmcl.shareable_layers lists them), or give the network two methods, stem(x) and trunk(h), and "
            "pass share_after='stem'."
        )


def split(module: nn.Module, name: str | None, *, start: str | None = None, frozen: bool = False) -> Split:
    """Split `module` after its submodule `name`; None: the trunk is the whole network.

    With name="stem", the methods `stem(x)` and `trunk(h)` of a module are used as they are; `stem` may return
    (h, *others), which reach `trunk(h, *others)`. Any other name is traced by torch.fx, once in train and
    once in eval mode. With `start`, the network begins after that submodule, and x is its output. With
    `frozen`, the pieces compute as in eval mode always.
    """
    if name is None and start is None:
        return Split(_no_stem, _whole)
    if start is None and offers_split(module, name):
        return Split(_own_stem, _own_trunk)
    modes = (False,) if frozen else (True, False)  # a trace freezes self.training, so each mode has its own
    stems, trunks = zip(*(_graphs(module, mode, name, start) for mode in modes), strict=True)
    return Split(_piece(stems), _piece(trunks), traced=True)


def offers_split(module: nn.Module, name: str | None) -> bool:
    """Whether `module` defines stem and trunk itself: as methods, or as a `cmcl.networks.SplitNetwork`.

    Submodules of these names do not count: only a trace knows what else forward does.
    """
    found = [getattr(module, key, None) for key in ("stem", "trunk")]
    methods = all(callable(value) and not isinstance(value, nn.Module) for value in found)
    return name == "stem" and (methods or getattr(module, "forward_is_stem_then_trunk", False) is True)


# Every stem copies x: members may write into theirs (a ReLU in place), and all get the same x.


def _no_stem(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    return x.clone(), ()


def _whole(module: nn.Module, x: Tensor, rest: tuple[Any, ...]) -> Any:
    return module(x)


def _own_stem(module: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    out = module.stem(x.clone())
    return (out[0], tuple(out[1:])) if isinstance(out, tuple | list) else (out, ())


def _own_trunk(module: Any, h: Tensor, rest: tuple[Any, ...]) -> Any:
    return module.trunk(h, *rest)


# ---------------------------------------------------------------- from a trace to two functions

_made: WeakValueDictionary[Any, Callable[..., Any]] = WeakValueDictionary()


def _piece(graphs: Sequence[fx.Graph]) -> Callable[..., Any]:
    """A function (module, *inputs) that runs the graph of the module's mode; one object for equal graphs."""
    codes = [graph.python_code("self") for graph in graphs]
    # the function keeps the globals of its code alive, and with them their ids
    key = tuple((code.src, *((k, id(v)) for k, v in sorted(code.globals.items()))) for code in codes)
    if (piece := _made.get(key)) is None:
        for code in codes:
            exec(code.src, code.globals)  # how fx itself makes a function of a graph
        training, evaluation = (code.globals["forward"] for code in (codes[0], codes[-1]))

        def piece(module: nn.Module, *inputs: Any) -> Any:
            return (training if module.training else evaluation)(module, *inputs)

        _made[key] = piece
    return piece


def _graphs(
    module: nn.Module, training: bool, name: str | None, start: str | None
) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of stem(x) -> (h, rest) and trunk(h, rest), in train or eval mode."""
    names = [key for key in (start, name) if key is not None]
    trace = _trace(module, names, training=training)
    sides = _sides(module, trace, names[0])
    if start is not None:  # the rest of the network, as if the output of `start` were its input
        if sides.carried:
            reason = f"other values than its output are used after it ({', '.join(map(str, sides.carried))})"
            raise CannotSplitError(module, start, reason)
        trace = trace._replace(nodes=[sides.output, *sides.attributes, *sides.after])
        sides = sides._replace(before=[sides.output]) if name is None else _sides(module, trace, name)
    stem, trunk = fx.Graph(), fx.Graph()
    copies = _add(stem, sides.before, {trace.nodes[0]: stem.call_method("clone", (stem.placeholder("x"),))})
    stem.output((copies[sides.output], tuple(copies[node] for node in sides.carried)))
    h, rest = trunk.placeholder("h"), trunk.placeholder("rest")
    carried = {node: trunk.call_function(getitem, (rest, i)) for i, node in enumerate(sides.carried)}
    _add(trunk, [*sides.attributes, *sides.after], {sides.output: h, **carried})
    return stem, trunk


def _add(graph: fx.Graph, nodes: Iterable[fx.Node], copies: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Copy the nodes to the end of `graph`; `copies` maps those that are there already."""
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies


class _Sides(NamedTuple):
    """The nodes of forward before and after the end of a layer."""

    before: list[fx.Node]
    after: list[fx.Node]
    output: fx.Node  # of the layer
    carried: list[fx.Node]  # computed before and used after, besides the layer's own output
    attributes: list[fx.Node]  # weights and buffers used after: read again there rather than carried


def _sides(module: nn.Module, trace: "_Trace", name: str) -> _Sides:
    ends = trace.ends.get(name, [])
    if len(ends) != 1:
        raise CannotSplitError(module, name, f"it must be called once in forward, not {len(ends)} times")
    ((output, last),) = ends
    middle = trace.nodes.index(last) + 1
    before, after = trace.nodes[:middle], trace.nodes[middle:]
    from_input = {before[0]}
    for node in before:
        if not from_input.isdisjoint(node.all_input_nodes):
            from_input.add(node)
    crossing = [node for node in before if not node.users.keys().isdisjoint(after)]
    if output not in crossing:
        raise CannotSplitError(module, name, "nothing after it uses its output")
    if output not in from_input:
        raise CannotSplitError(module, name, "its output does not depend on the input")
    if all(node.op == "output" or isinstance(node.target, type) for node in after):  # a type: an output class
        raise CannotSplitError(module, name, "it is the network's output")
    attributes = [node for node in crossing if node.op == "get_attr"]
    carried = [node for node in crossing if node is not output and node not in attributes]
    return _Sides(before, after, output, carried, attributes)


def parts_around(module: nn.Module, name: str, *, argument: str = "share_after") -> list[list[str]]:
    """Names of the modules, parameters and buffers that forward uses up to `name`, and after it."""
    sides = _sides(module, _trace(module, [name], training=module.training, argument=argument), name)
    used = [[n.target for n in nodes if n.op in ("call_module", "get_attr")] for nodes in sides[:2]]
    return [list(dict.fromkeys(map(str, targets))) for targets in used]


# ---------------------------------------------------------------- tracing


class _Trace(NamedTuple):
    nodes: list[fx.Node]  # of forward(x); the first is x
    ends: dict[str, list[tuple[fx.Node, fx.Node]]]  # of each call of a submodule: output, last node then


def _trace(
    module: nn.Module, names: Sequence[str], *, training: bool, argument: str = "share_after"
) -> _Trace:
    """Trace forward(x) in the modules that contain the named ones, in a copy that may be changed by that.

    All others stay whole, unless that fails: code may unpack the list that a submodule returns, say.
    """
    for name in names:
        _check_known(module, name, argument)
    for whole in (True, False):
        tracer = _Tracer(names, whole)
        try:
            own = _copy(module).train(training)
            before, draws = attributes(own), random_states()
            with torch.enable_grad():
                nodes = list(tracer.trace(own).nodes)
            check_side_effects(before, attributes(own), drawn=draws != random_states())
            return _Trace(nodes, tracer.ends)
        except Exception as error:  # whatever the network's own code raises on symbols
            failure = error
    reason = f"torch.fx cannot trace the code that calls it ({first_line(failure)})"
    raise CannotSplitError(module, names[-1], reason) from failure


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


class _Tracer(fx.Tracer):
    """Looks into the modules that contain the named ones; into others only if not `whole`."""

    proxy_buffer_attributes = True  # what is computed from a buffer is computed each time, not frozen

    def __init__(self, names: Sequence[str], whole: bool) -> None:
        super().__init__()
        self.names, self.whole = names, whole
        self.ends: dict[str, list[tuple[fx.Node, fx.Node]]] = {}

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """The arguments of forward: x. Others have their defaults, as in any call with one tensor."""
        _check_plain(self.root)
        return root_fn, [self.root, self.create_proxy("placeholder", "x", (), {})]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if any(name.startswith(f"{module_qualified_name}.") for name in self.names):
            _check_plain(m)
            return False
        opaque = self.whole or module_qualified_name in self.names or problem(m) is not None
        return opaque or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(m, jit.ScriptModule):
            inspect.signature(m.forward).bind(*args, **kwargs)  # raises now, not at the first call
        output = super().call_module(m, forward, args, kwargs)
        if isinstance(output, fx.Proxy):
            end = output.node, next(iter(reversed(self.graph.nodes)))  # torch 2.11 needs iter
            self.ends.setdefault(self.path_of_module(m), []).append(end)
        return output

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> Any:
        """Besides what fx does, records torch.no_grad(), which a trace leaves out."""
        no_grad = kind.startswith("call") and not torch.is_grad_enabled()
        if no_grad and kind != "call_module":
            kind, target = "call_function", _without_grad(target)
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **options)
        if no_grad and kind == "call_module":
            return super().create_proxy("call_function", _detached, (proxy,), {})
        return proxy


def _detached(value: Any) -> Any:
    return fx.node.map_aggregate(value, lambda v: v.detach() if isinstance(v, Tensor) else v)


@cache
def _without_grad(target: Callable[..., Any] | str) -> Callable[..., Any]:
    """A function, or a method by its name, under torch.no_grad()."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if isinstance(target, str):
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    run.__name__ = target if isinstance(target, str) else target.__name__  # fx uses it in its code
    return run


_GENERATORS = (random.Random, torch.Generator, np.random.Generator)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def problem(module: nn.Module) -> str | None:
    """What calling the module does besides its class's forward; a trace would leave it out."""
    if isinstance(module, jit.ScriptModule):
        return "it is compiled by TorchScript"
    if "forward" in vars(module):
        return "its forward was replaced by another function"
    if any(isinstance(value, _GENERATORS) for value in vars(module).values()):
        return "it has a random generator of its own"
    return "it has hooks" if any(getattr(module, hooks) for hooks in _HOOKS) else None


def has_hooks(parameter: Tensor) -> bool:
    """Whether something happens to the gradient of a parameter."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, name, None) for name in names)


def _check_plain(module: nn.Module) -> None:
    if reason := problem(module):
        raise TypeError(f"{type(module).__name__}: {reason}, which a split inside it would leave out")


def _copy(module: nn.Module) -> nn.Module:
    """A copy with the same tensors, and the same locks, files and the like, which cannot be copied."""
    parts = list(module.modules())
    values = [v for p in parts for v in (*p.parameters(False), *p.buffers(False), *_plain(p))]
    shared = [value for value in values if isinstance(value, Tensor) or not _can_copy(value)]
    return copy.deepcopy(module, {id(value): value for value in shared})


def _plain(module: nn.Module) -> list[Any]:
    return [v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")]


def _can_copy(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:  # whatever a class of the user's raises
        return False
    return True


def attributes(module: nn.Module) -> dict[str, list[Any]]:
    """The value of every attribute in the module, as a list; of a list or a set, its entries."""
    found = {}
    for path, part in module.named_modules():
        for key, value in {} if isinstance(part, jit.ScriptModule) else vars(part).items():
            named = value if key in ("_parameters", "_buffers", "_modules") else {key: value}
            for name, v in named.items():
                found[f"{path}.{name}".removeprefix(".")] = list(v) if isinstance(v, list | set) else [v]
    return found


def check_side_effects(before: dict[str, list[Any]], after: dict[str, list[Any]], *, drawn: bool) -> None:
    """Raise if traced code draws random numbers or assigns attributes: the pieces would not do it again.

    Entries of a dict may change: it is a cache, and the trace computes what is put there.
    """
    if drawn:
        raise TypeError("it draws random numbers in Python, which a trace would freeze")
    for name in before | after:
        old, new = before.get(name, []), after.get(name, [])
        if len(old) == len(new) and all(map(is_, old, new)):
            continue
        if name.startswith(("_tensor_constant", "_opaque_obj")):  # fx's names of what forward creates
            raise TypeError("it makes a tensor in forward, which a trace would freeze; use a buffer")
        raise TypeError(
            f"its forward assigns {name!r}, which would happen once, now, and never again; write into a "
            "buffer instead, such as self.count.add_(1)"
        )


def random_states() -> tuple[bytes, ...]:
    """The states of the generators that networks draw from: torch's, Python's and NumPy's."""
    numpy = np.random.get_state()  # noqa: NPY002
    return tuple(map(pickle.dumps, (torch.get_rng_state().numpy(), random.getstate(), numpy)))


# ---------------------------------------------------------------- verification

# Without it, an ensemble under torch.func cannot be told from a plain one.
_is_wrapped = private_torch("torch._C._functorch.is_functorch_wrapped_tensor", lambda _: False)


def can_verify(x: Tensor, weights: Iterable[Tensor], *, training: bool) -> bool:
    """Whether there are numbers to compare: not while the ensemble is traced, transformed or captured."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and len(x) > training  # batch normalisation needs two examples in training
        and not any(map(_is_wrapped, (x, *weights)))
        and not torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def verify(
    member: nn.Module, pieces: Run, x: Tensor, *, name: str, logits: Callable[[Any], Tensor], frozen: bool
) -> None:
    """Raise if a copy of the member computes other logits or gradients in two pieces.

    Warn if that cannot be compared: the network cannot be copied, does not repeat itself, or needs more
    memory than there is. With `frozen`, the copy is in eval mode, as a frozen stem is.
    """

    def compute(run: Run, examples: Tensor) -> tuple[Tensor, Tensor]:
        with isolated(x):
            own = copied(member)
            return _logits_and_gradients(own.eval() if frozen else own, run, examples, logits)

    try:
        for examples in (x[:2], x):  # two examples are enough, unless the network needs more
            try:
                whole, again = (compute(nn.Module.__call__, examples) for _ in range(2))
                break
            except (_CannotCompareError, torch.OutOfMemoryError):
                raise
            except Exception:  # if it fails on all examples, forward will raise that
                continue
        else:
            return
        if any(map(differ, whole, again)):
            raise _CannotCompareError("it does not repeat itself")
        found = compute(pieces, examples)
    except (_CannotCompareError, torch.OutOfMemoryError) as error:
        reason = error if isinstance(error, _CannotCompareError) else "there is not enough memory"
        warn(
            f"{type(member).__name__} was split after {name!r}, but it was not verified that its pieces "
            f"compute what it computes as a whole: {reason}."
        )
    except Exception as error:
        raise CannotSplitError(member, name, f"in two pieces it fails ({error})") from error
    else:
        for what, ours, theirs in zip(("outputs", "gradients"), found, whole, strict=True):
            if differ(ours, theirs):
                reason = (
                    f"in two pieces its {what} are others: forward does something in Python that torch.fx "
                    "cannot see, or the mode or an attribute of a block changed after the ensemble was built"
                )
                raise CannotSplitError(member, name, reason)


class _CannotCompareError(Exception):
    """Why the pieces could not be compared with the whole."""


def copied(member: nn.Module) -> nn.Module:
    """A copy whose weights are not zero."""
    try:
        own = copy.deepcopy(member)
    except Exception as error:
        raise _CannotCompareError(f"it cannot be copied ({first_line(error)})") from error
    for zeros in [p for p in own.parameters() if not p.any()]:
        nn.init.normal_(zeros, std=0.1)  # a head that starts at zero would hide all before it
    return own


def differ(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results are further apart than another order of operations explains."""
    return ours.shape != theirs.shape or bool((ours - theirs).norm() > TOLERANCE * theirs.norm())


def _logits_and_gradients(
    own: nn.Module, run: Run, x: Tensor, logits: Callable[[Any], Tensor]
) -> tuple[Tensor, Tensor]:
    """The logits and the gradients of all weights, each as one vector."""
    values = logits(run(own, x.detach().clone())).float().flatten()
    weights = [p for p in own.parameters() if p.requires_grad and p.is_leaf]  # a copied script's are not
    if not values.requires_grad or not weights:
        return values.detach(), values.new_zeros(0)
    mixed = values @ torch.arange(len(values)).cos().to(values)  # no two logits may cancel
    mixed.backward()  # not autograd.grad, which a reentrant checkpoint does not support
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
    return values.detach(), torch.cat([g.to_dense().float().flatten() for g in gradients])


@contextmanager
def isolated(x: Tensor) -> Iterator[None]:
    """Gradients on, the caller's hooks off, fixed seeds; afterwards all random states are as before."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  networks draw from it
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        saved_tensors_hooks(lambda t: t, lambda t: t),  # not the caller's, who may be checkpointing
        torch.random.fork_rng([x.device] if x.is_cuda else []),
    ):
        torch.default_generator.manual_seed(0)
        if x.is_cuda:
            torch.cuda.default_generators[x.device.index].manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


# ---------------------------------------------------------------- which layers can be shared

_CONV, _POOL, _ACTIVATIONS = (
    tuple(getattr(module, name) for name in module.__all__ if "Unpool" not in name)
    for module in (conv, pooling, activation)
)
_DROP = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity)


class Layer(NamedTuple):
    """A submodule after which features may be shared: `Ensemble(..., share_after=layer.name)`."""

    name: str  # as in `named_modules()`
    kind: str  # class of the submodule
    shape: tuple[int, ...] | None  # of its output, without the batch; None if that is not one tensor
    problem: str | None = None  # why features cannot be shared there; None: they can
    bypassed: bool = False  # other features go around it (a skip connection); they would not be shared
    suggested: bool = False  # where the paper would share; at most one layer


class _Call(NamedTuple):
    """A call of a submodule."""

    name: str
    module: nn.Module
    before: int  # calls that had ended when this one began
    x: Any  # its first argument
    output: Any


def shareable_layers(network: nn.Module, x: Tensor) -> list[Layer]:
    """The submodules of `network` in the order they finish, each with the reason if it cannot be shared.

    One layer is suggested: "stem" if the network offers `stem` and `trunk`; otherwise the last one before
    features first get smaller, by pooling or a stride (the paper shares just before the first pooling), where
    global averages do not count; otherwise the first that holds an activation, or else the first. Layers that
    other features bypass are not suggested, and no dropout: the other members would restore what it drops.

    Args:
        network: one member. It runs once, in eval mode.
        x: an input (B, ...).
    """
    if not isinstance(network, nn.Module):
        hint = " Call it first: shareable_layers(build(), x)." if callable(network) else ""
        raise TypeError(f"network must be a torch.nn.Module. Got {_checks.kind(network)}.{hint}")
    own = _copy(network).eval()
    with torch.no_grad():
        calls = _run(own, _checks.inputs(x))
        traces: dict[tuple[str, bool], _Trace] = {}
        layers = list({call.name: _layer(network, call, traces) for call in calls}.values())
        if offers_split(own, "stem"):
            h, rest = _own_stem(own, x)
            kind = type(getattr(own, "stem")).__name__  # noqa: B009  a submodule or a method
            stem = Layer("stem", kind, tuple(h.shape[1:]), bypassed=bool(rest), suggested=True)
            return [stem, *(layer for layer in layers if layer.name != "stem")]
    sound = {layer.name for layer in layers if layer.problem is None and not layer.bypassed}
    chosen = _suggestion(calls, [c for c in calls if c.name in sound and not isinstance(c.module, _DROP)])
    return [layer._replace(suggested=layer.name == chosen) for layer in layers]


def _run(network: nn.Module, x: Tensor) -> list[_Call]:
    """The calls of all submodules in one forward pass, ordered by their end."""
    calls: list[_Call] = []
    before: dict[nn.Module, int] = {}
    names = {module: name for name, module in network.named_modules() if name}

    def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        before[module] = len(calls)

    def end(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if module in names:
            first = inputs[0] if inputs else None
            calls.append(_Call(names[module], module, before[module], first, output))

    # hooks on all modules there are, because a TorchScript module takes none of its own
    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        network(x.clone())
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _layer(network: nn.Module, call: _Call, traces: dict[tuple[str, bool], _Trace]) -> Layer:
    """The layer of a call; `traces` holds one for all layers of the same parent, in each mode."""
    is_tensor = isinstance(call.output, Tensor)
    layer = Layer(call.name, type(call.module).__name__, tuple(call.output.shape[1:]) if is_tensor else None)
    if not is_tensor or not call.output.is_floating_point():
        return layer._replace(
            problem=f"its output is {_checks.kind(call.output)}, not a floating-point tensor"
        )
    try:
        for mode in (True, False):
            key = call.name.rpartition(".")[0], mode
            if key not in traces:
                traces[key] = _trace(network, [call.name], training=mode)
            if _is_bypassed(_sides(network, traces[key], call.name)):
                layer = layer._replace(bypassed=True)
    except CannotSplitError as error:
        return layer._replace(problem=error.reason)
    return layer


def _is_bypassed(sides: _Sides) -> bool:
    """Whether other features go around the layer. Sizes, and what is computed from the input alone, are none.

    An input that goes to another submodule later is: the layer lies on one of several branches.
    """
    features: set[fx.Node] = set()
    for node in sides.before:
        computed = not features.isdisjoint(node.all_input_nodes) and not _is_size(node)
        if node.op == "call_module" or computed:
            features.add(node)
    for node in sides.carried:
        users = [user for user in node.users if user in sides.after]
        if node.op == "placeholder" and any(user.op == "call_module" for user in users):
            return True
        if node in features and not all(map(_is_size, users)):
            return True
    return False


def _is_size(node: fx.Node) -> bool:
    """Whether the node asks for a size, a number of dimensions or the like, which is no tensor."""
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    return node.op == "call_method" and node.target in ("size", "dim", "numel")


def _suggestion(calls: list[_Call], sound: list[_Call]) -> str | None:
    for call in sorted(calls, key=lambda call: call.before):
        earlier = [other for other in calls[: call.before] if other in sound]
        if earlier and _gets_smaller(earlier[-1].output, call):
            return earlier[-1].name
    active = [call for call in sound if any(isinstance(m, _ACTIVATIONS) for m in call.module.modules())]
    return next((call.name for call in [*active, *sound]), None)


def _gets_smaller(features: Tensor, call: _Call) -> bool:
    """Whether `call`, or what was computed since `features`, leaves fewer positions, but more than one."""
    if not isinstance(call.module, (*_CONV, *_POOL)) or not isinstance(call.output, Tensor):
        return False
    known, came, went = (prod(t.shape[2:]) for t in (features, call.x, call.output))
    if features.ndim == call.x.ndim and 1 < came < known:  # a function did it, such as F.max_pool2d
        return True
    strided = not isinstance(call.module, _CONV) or max(call.module.stride) > 1
    return strided and 1 < went < came
