"""Splitting a network in two after a named layer, so that features can be shared in between.

stem(member, x) -> (h, rest) and trunk(member, h, rest) -> output: h is shared among the members; rest holds
the other values that the trunk needs (skip connections, sizes). Both read the live submodules of `member`, so
that `.to()`, `.train()` and `load_state_dict` just work. Members with equal traces get the same two function
objects, so that one compilation serves all of them.

torch.fx traces only the modules that contain the layer; all other submodules stay whole and run as they are.
A trace runs forward once with symbols instead of tensors, and freezes what Python does besides. `_trace`
raises where that would go wrong later; `verify` compares the pieces with the network at the first call.
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
from operator import getitem
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
    with keep_modes(module):
        stems, trunks = zip(*(_graphs(module.train(mode), name, start) for mode in modes), strict=True)
    return Split(_piece(stems), _piece(trunks), traced=True)


def offers_split(module: nn.Module, name: str | None) -> bool:
    """Whether `module` defines stem and trunk itself: as methods, or as a `cmcl.networks.SplitNetwork`.

    Submodules of these names do not count: only a trace knows what else forward does.
    """
    found = [getattr(module, key, None) for key in ("stem", "trunk")]
    methods = all(callable(value) and not isinstance(value, nn.Module) for value in found)
    return name == "stem" and (methods or getattr(module, "forward_is_stem_then_trunk", False) is True)


@contextmanager
def keep_modes(module: nn.Module) -> Iterator[None]:
    """Restore the mode of every submodule afterwards, train or eval (some may be frozen)."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


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


def _graphs(module: nn.Module, name: str | None, start: str | None) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of stem(x) -> (h, rest) and trunk(h, rest), in the mode the module is in."""
    names = [key for key in (start, name) if key is not None]
    trace = _trace(module, names)
    sides = _sides(module, trace, names[-1])
    x, before = trace.nodes[0], sides.before
    if start is not None:
        first = _sides(module, trace, start)
        if first.carried:
            reason = f"other values than its output are used after it ({', '.join(map(str, first.carried))})"
            raise CannotSplitError(module, start, reason)
        x, before = first.output, [*first.attributes, *(n for n in before if n not in first.before)]
    stem, trunk = fx.Graph(), fx.Graph()
    copies = _add(stem, before, {x: stem.call_method("clone", (stem.placeholder("x"),))})
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
    crossing = [node for node in before if not node.users.keys().isdisjoint(after)]
    if output not in crossing:
        raise CannotSplitError(module, name, "nothing after it uses its output")
    if not _depends_on_input(output):
        raise CannotSplitError(module, name, "its output does not depend on the input")
    if all(node.op == "output" or isinstance(node.target, type) for node in after):  # a type: an output class
        raise CannotSplitError(module, name, "it is the network's output")
    attributes = [node for node in crossing if node.op == "get_attr"]
    carried = [node for node in crossing if node is not output and node not in attributes]
    return _Sides(before, after, output, carried, attributes)


def _depends_on_input(node: fx.Node) -> bool:
    inputs = [node]
    for node in inputs:
        inputs += [other for other in node.all_input_nodes if other not in inputs]
    return any(node.op == "placeholder" for node in inputs)


def parts_around(module: nn.Module, name: str, *, argument: str = "share_after") -> list[list[str]]:
    """Names of the modules, parameters and buffers that forward uses up to `name`, and after it."""
    sides = _sides(module, _trace(module, [name], argument=argument), name)
    used = [[n.target for n in nodes if n.op in ("call_module", "get_attr")] for nodes in sides[:2]]
    return [list(dict.fromkeys(map(str, targets))) for targets in used]


# ---------------------------------------------------------------- tracing

_CONSTANTS = ("_tensor_constant", "_opaque_obj")  # fx's names of what is neither computed nor a weight
_GENERATORS = (random.Random, torch.Generator, np.random.Generator)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ATTRIBUTES = ("", "_parameters", "_buffers", "_modules")  # dicts of a module's attributes; "": its own


class _Trace(NamedTuple):
    nodes: list[fx.Node]  # of forward(x); other arguments are fixed to their defaults
    ends: dict[str, list[tuple[fx.Node, fx.Node]]]  # of each call of a submodule: output, last node then


def _trace(module: nn.Module, names: Sequence[str], *, argument: str = "share_after") -> _Trace:
    """Trace forward(x) in the modules that contain the named ones.

    All others stay whole, unless that fails: code may unpack the list that a submodule returns, say.
    """
    for name in names:
        _check_known(module, name, argument)
    defaults = _defaults(module, names[-1])
    for whole in (True, False):
        tracer = _Tracer(names, whole)
        try:
            _check_plain(module)
            with torch.enable_grad(), _nothing_assigned(module), _no_draws():
                nodes = list(tracer.trace(module, concrete_args=defaults).nodes)
        except Exception as error:  # whatever the network's own code raises on symbols
            failure = error
            continue
        fixed = {node for node in nodes[1:] if node.op == "placeholder"}
        for node in nodes:  # and fx's assertions on them
            if not fixed.isdisjoint(node.all_input_nodes):
                fixed.add(node)
        return _Trace([node for node in nodes if node not in fixed], tracer.ends)
    reason = f"torch.fx cannot trace the code that calls it ({first_line(failure)})"
    raise CannotSplitError(module, names[-1], reason) from failure


class _Tracer(fx.Tracer):
    """Looks into the modules that contain the named ones; into others only if not `whole`."""

    proxy_buffer_attributes = True  # what is computed from a buffer is computed each time, not frozen

    def __init__(self, names: Sequence[str], whole: bool) -> None:
        super().__init__()
        self.names, self.whole = names, whole
        self.ends: dict[str, list[tuple[fx.Node, fx.Node]]] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if any(name.startswith(f"{module_qualified_name}.") for name in self.names):
            _check_plain(m)
            return False
        opaque = self.whole or module_qualified_name in self.names or _problem(m) is not None
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
        if torch.is_grad_enabled() or not kind.startswith("call"):
            return super().create_proxy(kind, target, args, kwargs, *more, **options)
        if kind == "call_module":  # a trace does not record torch.no_grad()
            proxy = super().create_proxy(kind, target, args, kwargs, *more, **options)
            return super().create_proxy("call_function", _detached, (proxy,), {})
        return super().create_proxy("call_function", _without_grad(target), args, kwargs)


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


def _problem(module: nn.Module) -> str | None:
    """What calling the module does besides its class's forward; a trace would leave it out."""
    if isinstance(module, jit.ScriptModule):
        return "it is compiled by TorchScript"
    if "forward" in vars(module):
        return "its forward was replaced by another function"
    if any(isinstance(value, _GENERATORS) for value in vars(module).values()):
        return "it has a random generator of its own"
    return "it has hooks" if any(getattr(module, hooks) for hooks in _HOOKS) else None


def _check_plain(module: nn.Module) -> None:
    if problem := _problem(module):
        raise TypeError(f"{type(module).__name__}: {problem}, which a split inside it would leave out")


@contextmanager
def _no_draws() -> Iterator[None]:
    """Raise if code draws random numbers: the trace would freeze them, and decisions that depend on them."""

    def states() -> bytes:
        numpy = np.random.get_state()  # noqa: NPY002  networks draw from it
        return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), numpy))

    before = states()
    yield
    if before != states():
        raise TypeError("it draws random numbers in Python, which a trace would freeze")


@contextmanager
def _nothing_assigned(module: nn.Module) -> Iterator[None]:
    """Restore all attributes, and the dicts, lists and sets among them; raise if forward changed any.

    Entries of a dict may change: it is a cache, and the trace computes what is put there.
    """
    parts = {n: vars(part) for n, part in module.named_modules() if not isinstance(part, jit.ScriptModule)}
    values = [(name, key, value) for name, own in parts.items() for key, value in [("", own), *own.items()]]
    kept = [(*found, _entries(found[2])) for found in values if isinstance(found[2], dict | list | set)]
    assigned: list[str] = []
    try:
        yield
    finally:
        for name, key, value, before in kept:
            now = _entries(value)
            changed = [k for k in now.keys() | before.keys() if now.get(k) is not before.get(k)]
            if changed:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(
                    before if isinstance(value, dict) else before.values()
                )
            if key in _ATTRIBUTES:
                assigned += [f"{name}.{k}".removeprefix(".") for k in changed]
            elif changed and not isinstance(value, dict):
                assigned.append(f"{name}.{key}".removeprefix("."))
    for key in sorted(assigned):
        if key.startswith(_CONSTANTS):
            raise TypeError("it makes a tensor in forward, which a trace would freeze; use a buffer")
        raise TypeError(
            f"its forward assigns {key!r}, which would happen once, now, and never again; write into a "
            "buffer instead, such as self.count.add_(1)"
        )


def _entries(value: Any) -> dict[Any, Any]:
    return dict(value) if isinstance(value, dict) else dict(enumerate(value))


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
    """The arguments of forward besides the input, each with its default."""
    first, *others = inspect.signature(module.forward).parameters.values()
    others = [p for p in others if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in others:
        if p.default is p.empty or isinstance(p.default, tuple | list | dict):
            raise CannotSplitError(module, name, f"its forward needs {p.name!r} besides the input")
    if first.kind in (first.VAR_POSITIONAL, first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise CannotSplitError(module, name, f"its forward must name its input, and has only {first}")
    return {p.name: p.default for p in others}


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


Run = Callable[[nn.Module, Tensor], Any]  # (member, x) -> what the member returns


def verify(
    member: nn.Module, pieces: Run, x: Tensor, *, name: str, logits: Callable[[Any], Tensor], frozen: bool
) -> None:
    """Raise if a copy of the member computes other logits or gradients in two pieces.

    Warn if that cannot be compared: the network cannot be copied, does not repeat itself, or needs more
    memory than there is. With `frozen`, the copy is in eval mode, as a frozen stem is.
    """

    def compute(run: Run, examples: Tensor) -> tuple[Tensor, Tensor]:
        with _isolated(x):
            own = _copied(member)
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
        if any(map(_differ, whole, again)):
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
            if _differ(ours, theirs):
                reason = (
                    f"in two pieces its {what} are others: forward does something in Python that torch.fx "
                    "cannot see, or the mode or an attribute of a block changed after the ensemble was built"
                )
                raise CannotSplitError(member, name, reason)


class _CannotCompareError(Exception):
    """Why the pieces could not be compared with the whole."""


def _copied(member: nn.Module) -> nn.Module:
    try:
        own = copy.deepcopy(member)
    except Exception as error:
        raise _CannotCompareError(f"it cannot be copied ({first_line(error)})") from error
    for zeros in [p for p in own.parameters() if not p.any()]:
        nn.init.normal_(zeros, std=0.1)  # a head that starts at zero would hide all before it
    return own


def _differ(ours: Tensor, theirs: Tensor) -> bool:
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
def _isolated(x: Tensor) -> Iterator[None]:
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

    name: str
    kind: str  # class of the submodule
    shape: tuple[int, ...] | None  # of its output, without the batch; None if that is not one tensor
    problem: str | None = None  # why features cannot be shared there; None: they can
    bypassed: bool = False  # other features go around it (a skip connection); they would not be shared
    suggested: bool = False


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
    with keep_modes(network), torch.no_grad():
        calls = _run(network.eval(), _checks.inputs(x))
        traces: dict[tuple[str, bool], _Trace] = {}
        layers = list({call.name: _layer(network, call, traces) for call in calls}.values())
        if offers_split(network.eval(), "stem"):
            h, rest = _own_stem(network, x)
            kind = type(getattr(network, "stem")).__name__  # noqa: B009  a submodule or a method
            own = Layer("stem", kind, tuple(h.shape[1:]), bypassed=bool(rest), suggested=True)
            return [own, *(layer for layer in layers if layer.name != "stem")]
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
                traces[key] = _trace(network.train(mode), [call.name])
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
        if node.op == "call_module" or (not features.isdisjoint(node.all_input_nodes) and not _is_size(node)):
            features.add(node)
    for node in sides.carried:
        users = [user for user in node.users if user in sides.after]
        if node.op == "placeholder" and any(user.op == "call_module" for user in users):
            return True
        if node in features and not all(map(_is_size, users)):
            return True
    return False


def _is_size(node: fx.Node) -> bool:
    """Whether the node computes a size, a number of dimensions or the like, rather than a tensor."""
    if node.op == "call_method" and node.target in ("size", "dim", "numel"):
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    inputs = node.all_input_nodes
    return node.op == "call_function" and bool(inputs) and all(map(_is_size, inputs))


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
