"""Splitting a network in two after a named layer, so that features can be shared in between.

stem(member, x) -> (h, rest) and trunk(member, h, rest) -> output: h is shared among the members; rest holds
the other values that the trunk needs (skip connections, sizes). Both read the live submodules of `member`, so
that `.to()`, `.train()` and `load_state_dict` just work. Members with equal traces get the same two function
objects, so that one compilation serves all of them.

A trace (torch.fx) runs forward once with symbols instead of tensors. What Python does besides (decisions,
random numbers, hooks, custom gradients) is invisible to it, so submodules that do such things stay whole.
"""

import copy
import difflib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import prod
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, fx, jit, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import activation, pooling
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
    with keep_modes(module):  # a trace freezes self.training (in F.dropout, say), so each mode has its own
        training = _pieces(module.train(not frozen), name, start)
        evaluation = training if frozen else _pieces(module.eval(), name, start)
    return _by_mode(training, evaluation)


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

_Functions = tuple[Callable[..., Any], Callable[..., Any]]  # of one mode
_made: WeakValueDictionary[Any, Callable[..., Any]] = WeakValueDictionary()


def _once(key: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """One function object for equal keys."""
    if (function := _made.get(key)) is None:
        _made[key] = function = make()
    return function


def _by_mode(training: _Functions, evaluation: _Functions) -> Split:
    """The pieces that compute as the module's mode says."""
    (train_stem, train_trunk), (eval_stem, eval_trunk) = training, evaluation

    def stem(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        h, *rest = (train_stem if module.training else eval_stem)(module, x.clone())
        return h, tuple(rest)

    def trunk(module: nn.Module, h: Tensor, rest: tuple[Any, ...]) -> Any:
        return (train_trunk if module.training else eval_trunk)(module, h, *rest)

    stems, trunks = ("stem", train_stem, eval_stem), ("trunk", train_trunk, eval_trunk)
    return Split(_once(stems, lambda: stem), _once(trunks, lambda: trunk), traced=True)


def _first(module: nn.Module, x: Tensor) -> tuple[Tensor]:
    return (x,)


def _pieces(module: nn.Module, name: str | None, start: str | None) -> _Functions:
    """stem(module, x) -> (h, *rest) and trunk(module, h, *rest), in the mode the module is in."""
    trace = _trace(module, [key for key in (start, name) if key is not None])
    x, nodes = trace.nodes[0], trace.nodes
    if start is not None:
        first = _cut(module, trace, start)
        if first.carried:
            reason = f"other values than its output are used after it ({', '.join(map(str, first.carried))})"
            raise CannotSplitError(module, start, reason)
        x, nodes = first.output, [*first.attributes, first.output, *first.after]
    if name is None:
        return _first, _function(nodes, [x], None)
    cut = _cut(module, trace._replace(nodes=nodes), name, start)
    return (
        _function(cut.before, [x], (cut.output, *cut.carried)),
        _function([*cut.attributes, *cut.after], [cut.output, *cut.carried], None),
    )


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

    def make() -> Callable[..., Any]:
        exec(code.src, code.globals)  # how fx itself makes a function of a graph
        function: Callable[..., Any] = code.globals["forward"]
        return function

    # equal code with equal globals is one function; it keeps its globals alive, and with them their ids
    return _once((code.src, *((key, id(value)) for key, value in sorted(code.globals.items()))), make)


class _Cut(NamedTuple):
    """The nodes of forward on both sides of a layer's end."""

    before: list[fx.Node]
    after: list[fx.Node]
    output: fx.Node  # of the layer
    carried: list[fx.Node]  # computed before and used after, besides the layer's own output
    attributes: list[fx.Node]  # weights and buffers read before: read again after rather than carried


def _cut(module: nn.Module, trace: "_Trace", name: str, start: str | None = None) -> _Cut:
    ends = [end for end in trace.ends.get(name, []) if end[0] in trace.nodes]
    if len(ends) != 1:
        where = "in forward" if start is None else f"after {start!r}"
        raise CannotSplitError(module, name, f"it must be called once {where}, not {len(ends)} times")
    ((output, last),) = ends
    before = [node for node in trace.nodes if trace.order[node] <= trace.order[last]]
    after = trace.nodes[len(before) :]
    later = set(after)
    crossing = [node for node in before if not later.isdisjoint(node.users)]
    if output not in crossing:
        raise CannotSplitError(module, name, "nothing after it uses its output")
    if not _depends_on_input(output):
        raise CannotSplitError(module, name, "its output does not depend on the input")
    if all(node.op == "output" or isinstance(node.target, type) for node in after):  # a type: an output class
        raise CannotSplitError(module, name, "it is the network's output")
    attributes = [node for node in before if node.op == "get_attr"]
    carried = [node for node in crossing if node is not output and node.op != "get_attr"]
    return _Cut(before, after, output, carried, attributes)


def _depends_on_input(node: fx.Node) -> bool:
    seen, todo = {node}, [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - seen
        seen |= new
        todo += new
    return any(node.op == "placeholder" for node in seen)


def parts_around(module: nn.Module, name: str, *, argument: str = "share_after") -> list[list[str]]:
    """Names of the modules, parameters and buffers that forward uses up to `name`, and after it."""
    cut = _cut(module, _trace(module, [name], argument=argument), name)
    used = [[n.target for n in nodes if n.op in ("call_module", "get_attr")] for nodes in cut[:2]]
    return [list(dict.fromkeys(map(str, targets))) for targets in used]


# ---------------------------------------------------------------- tracing

_CONSTANTS = ("_tensor_constant", "_opaque_obj")  # fx's names of what is neither computed nor a weight
_GENERATORS = (random.Random, torch.Generator, np.random.Generator)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ATTRIBUTES = ("", "_parameters", "_buffers", "_modules")  # dicts of a module's attributes; "": its own


class _Trace(NamedTuple):
    nodes: list[fx.Node]  # of forward(x); other arguments are fixed to their defaults
    order: dict[fx.Node, int]
    ends: dict[str, list[tuple[fx.Node, fx.Node]]]  # of each call of a submodule: output, last node then
    opaque: dict[type[nn.Module], Exception]  # classes that fx cannot trace, and why


def _trace(module: nn.Module, names: Sequence[str], *, argument: str = "share_after") -> _Trace:
    """Trace forward(x), keeping the named submodules whole."""
    for name in names:
        _check_known(module, name, argument)
    name = names[-1] if names else ""
    tracer, changed = _retrying(module, name, names)
    constants = [key for key in changed if key.startswith(_CONSTANTS)]
    if assigned := sorted(set(changed) - set(constants)):
        reason = (
            f"its forward assigns {assigned[0]!r}, which would happen once, now, and never again "
            "(write into a buffer instead, such as self.count.add_(1))"
        )
        raise CannotSplitError(module, name, reason)
    if constants:
        reason = "it makes a tensor in forward, which tracing would freeze (use a buffer)"
        raise CannotSplitError(module, name, reason)
    nodes = list(tracer.graph.nodes)
    fixed = {node for node in nodes[1:] if node.op == "placeholder"}
    fixed.update(node for node in nodes if not fixed.isdisjoint(node.all_input_nodes))  # fx's asserts on them
    order = {node: i for i, node in enumerate(nodes)}
    return _Trace([node for node in nodes if node not in fixed], order, tracer.ends, tracer.opaque)


def _retrying(module: nn.Module, name: str, names: Sequence[str]) -> tuple["_Tracer", list[str]]:
    """A tracer that succeeded, and what forward assigned. Each failure keeps one more class whole."""
    defaults = _defaults(module, name)
    opaque: dict[type[nn.Module], Exception] = {}
    while True:
        tracer = _Tracer(names, opaque)
        try:
            _check_plain(module)
            with _restored(module) as changed, torch.enable_grad(), _no_draws():
                tracer.graph = tracer.trace(module, concrete_args=defaults)
        except Exception as error:  # whatever the network's own code raises on symbols
            if tracer.failed is None or type(tracer.failed) in opaque:
                raise CannotSplitError(module, name, f"torch.fx cannot trace it ({error})") from error
            opaque[type(tracer.failed)] = error
            continue
        owners = {key: module.get_submodule(key.rpartition(".")[0]) for key in changed}
        again = {type(owner): key for key, owner in owners.items() if owner is not module}
        if again.keys() <= opaque.keys():
            return tracer, changed
        opaque |= {kind: TypeError(f"its forward assigns {key!r}") for kind, key in again.items()}


class _Tracer(fx.Tracer):
    """Keeps the named submodules whole, and those that cannot be traced; looks into the others."""

    proxy_buffer_attributes = True  # what is computed from a buffer is computed each time, not frozen

    def __init__(self, names: Sequence[str], opaque: dict[type[nn.Module], Exception]) -> None:
        super().__init__()
        self.names, self.opaque = names, opaque
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
        if kind == "call_module":  # a trace does not record torch.no_grad()
            proxy = super().create_proxy(kind, target, args, kwargs, *more, **options)
            return super().create_proxy("call_function", _detached, (proxy,), {})
        return super().create_proxy("call_function", _without_grad(target), args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.names:
            return True
        if any(name.startswith(f"{module_qualified_name}.") for name in self.names):
            _check_plain(m)
            return False
        opaque = type(m) in self.opaque or _problem(m) is not None
        return opaque or super().is_leaf_module(m, module_qualified_name)


def _detached(value: Any) -> Any:
    return fx.node.map_aggregate(value, lambda v: v.detach() if isinstance(v, Tensor) else v)


def _without_grad(target: Callable[..., Any] | str) -> Callable[..., Any]:
    """A function, or a method by its name, under torch.no_grad()."""

    def make() -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                if isinstance(target, str):
                    return getattr(args[0], target)(*args[1:], **kwargs)
                return target(*args, **kwargs)

        run.__name__ = target if isinstance(target, str) else target.__name__  # fx uses it in its code
        return run

    return _once((_without_grad, target), make)


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
        raise TypeError(f"{type(module).__name__}: {problem}, which a split inside it would leave out")


@contextmanager
def _no_draws() -> Iterator[None]:
    """Raise if code draws random numbers by itself: the trace would freeze what came of them."""
    before = _random_states()
    yield
    if before != _random_states():
        raise TypeError("it draws random numbers in Python, which a trace would freeze")


def _random_states() -> tuple[Any, ...]:
    state: Any = np.random.get_state()  # noqa: NPY002  networks draw from it
    kind, values, *others = state
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), kind, values.tobytes(), others


def _check_not_in_function() -> None:
    """Raise inside a torch.autograd.Function: the trace would hold its forward and lose its backward."""
    kinds = list(torch.autograd.Function.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
    # below what decorates forward (torch.amp.custom_fwd)
    codes = {getattr(inspect.unwrap(kind.forward), "__code__", None): kind for kind in kinds}
    frame = sys._getframe().f_back
    while frame is not None:
        if function := codes.get(frame.f_code):
            raise TypeError(f"{function.__name__} is a torch.autograd.Function, whose gradient would be lost")
        frame = frame.f_back


@contextmanager
def _restored(module: nn.Module) -> Iterator[list[str]]:
    """Restore all attributes afterwards, and the dicts, lists and sets among them.

    The list names those that were assigned or, if they are lists or sets, changed.
    """
    changed: list[str] = []
    parts = {n: vars(part) for n, part in module.named_modules() if not isinstance(part, jit.ScriptModule)}
    values = [(name, key, value) for name, own in parts.items() for key, value in [("", own), *own.items()]]
    dicts = [(name, key, value, dict(value)) for name, key, value in values if isinstance(value, dict)]
    several = [(name, key, value, list(value)) for name, key, value in values if type(value) in (list, set)]
    try:
        yield changed
    finally:
        for name, key, now, before in dicts:
            keys = [k for k in now.keys() | before.keys() if now.get(k) is not before.get(k)]
            if keys:
                now.clear()
                now.update(before)
            if key in _ATTRIBUTES:  # another dict is a cache: the trace computes what is put there
                changed += [f"{name}.{k}".removeprefix(".") for k in keys]
        for name, key, items, kept in several:
            if list(map(id, items)) != list(map(id, kept)):
                items.clear()
                (items.extend if isinstance(items, list) else items.update)(kept)
                changed.append(f"{name}.{key}".removeprefix("."))


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


def verify(
    member: nn.Module,
    pieces: Callable[[nn.Module, Tensor], Any],
    x: Tensor,
    *,
    name: str,
    logits: Callable[[Any], Tensor],
    frozen: bool = False,  # its stem was split in eval mode
) -> None:
    """Raise if a copy of the member computes other logits or gradients in two pieces.

    Warn if that cannot be compared: the network cannot be copied, does not repeat itself, or needs more
    memory than there is.
    """

    def run(function: Callable[[nn.Module, Tensor], Any], some: Tensor) -> tuple[Tensor, Tensor]:
        return _logits_and_gradients(member, function, some, logits, frozen)

    try:
        some, expected = _expected(run, x)
        if expected is None:
            return
        try:
            found = run(pieces, some)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CannotSplitError(member, name, f"in two pieces it fails ({error})") from error
    except (_CannotCompareError, torch.OutOfMemoryError) as error:
        reason = error if isinstance(error, _CannotCompareError) else "there is not enough memory"
        warn(
            f"{type(member).__name__} was split after {name!r}, but it was not verified that its pieces "
            f"compute what it computes as a whole: {reason}."
        )
        return
    for what, ours, theirs in zip(("outputs", "gradients"), found, expected, strict=True):
        if _differ(ours, theirs):
            reason = (
                f"in two pieces its {what} are others: forward decides something in Python that torch.fx "
                "cannot see, or the mode or an attribute of a block changed after the ensemble was built"
            )
            raise CannotSplitError(member, name, reason)


class _CannotCompareError(Exception):
    """Why the pieces could not be compared with the whole."""


def _expected(
    run: Callable[..., tuple[Tensor, Tensor]], x: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Examples and what the whole network computes of them; None: it fails, which forward will raise."""
    for some in (x[:2], x):  # two examples are enough, unless the network needs more
        try:
            expected, again = (run(nn.Module.__call__, some) for _ in range(2))
        except (_CannotCompareError, torch.OutOfMemoryError):
            raise
        except Exception:
            continue
        if any(map(_differ, expected, again)):
            raise _CannotCompareError("it does not repeat itself")
        return some, expected
    return x, None


def _differ(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape != theirs.shape or bool((ours - theirs).norm() > TOLERANCE * theirs.norm())


def _logits_and_gradients(
    member: nn.Module,
    run: Callable[[nn.Module, Tensor], Any],
    x: Tensor,
    logits: Callable[[Any], Tensor],
    frozen: bool,
) -> tuple[Tensor, Tensor]:
    """The logits of a copy, and the gradients of all its weights, each as one vector; seeds are fixed."""
    with _isolated(x):
        try:
            own = copy.deepcopy(member)
        except Exception as error:
            raise _CannotCompareError(f"it cannot be copied ({first_line(error)})") from error
        if frozen:
            own.eval()
        for zeros in [p for p in own.parameters() if not p.any()]:
            nn.init.normal_(zeros, std=0.1)  # a head that starts at zero would hide all before it
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

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_POOL = tuple(getattr(pooling, name) for name in pooling.__all__ if "Unpool" not in name)
_DROP = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity)
_ACTIVATIONS = tuple(getattr(activation, name) for name in activation.__all__)


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
    began: int
    ended: int
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
    calls = _run(network, _checks.inputs(x))
    with keep_modes(network):
        traces = {mode: _trace_of_all(network.train(mode)) for mode in (True, False)}
        layers = {call.name: _layer(network, call, calls, traces) for call in calls}
        if offers_split(network.eval(), "stem"):
            own = _own_layer(network, x)
            return [own, *(layer for layer in layers.values() if layer.name != own.name)]
    sound = [name for name, layer in layers.items() if layer.problem is None and not layer.bypassed]
    sound = [name for name in sound if not isinstance(network.get_submodule(name), _DROP)]
    chosen = _suggestion(calls, sound)
    return [layer._replace(suggested=layer.name == chosen) for layer in layers.values()]


def _run(network: nn.Module, x: Tensor) -> list[_Call]:
    """The calls of all submodules in one forward pass, ordered by their end."""
    calls: list[_Call] = []
    began: dict[nn.Module, int] = {}
    clock = count()

    def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        began[module] = next(clock)

    def end(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if module in names:
            x = inputs[0] if inputs else None
            calls.append(_Call(names[module], module, began[module], next(clock), x, output))

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


def _trace_of_all(network: nn.Module) -> _Trace | None:
    """One trace that tells of most layers; None: each is traced by itself."""
    try:
        return _trace(network, [])
    except CannotSplitError:
        return None


def _layer(network: nn.Module, call: _Call, calls: list[_Call], traces: dict[bool, _Trace | None]) -> Layer:
    shape = tuple(call.output.shape[1:]) if isinstance(call.output, Tensor) else None
    layer = Layer(call.name, type(call.module).__name__, shape)
    times = sum(other.name == call.name for other in calls)
    if times > 1:
        return layer._replace(problem=f"it is called {times} times")
    if shape is None:
        return layer._replace(problem=f"its output is a {type(call.output).__name__}, not one tensor")
    if not call.output.is_floating_point():
        return layer._replace(problem=f"its output is {call.output.dtype}, not floating-point")
    try:
        cuts = [_cut_of(network.train(mode), call.name, trace) for mode, trace in traces.items()]
    except CannotSplitError as error:
        return layer._replace(problem=error.reason)
    return layer._replace(bypassed=any(map(_is_bypassed, cuts)))


def _cut_of(network: nn.Module, name: str, trace: _Trace | None) -> _Cut:
    """The cut after a layer by the trace of all, or by a trace of its own if that one fails."""
    if trace is None:
        return _cut(network, _trace(network, [name]), name)
    for outer, part in network.named_modules():
        if name.startswith(f"{outer}.") and (error := trace.opaque.get(type(part))):
            reason = f"torch.fx cannot trace {outer!r}, which holds it ({error})"
            raise CannotSplitError(network, name, reason)
    try:
        return _cut(network, trace, name)
    except CannotSplitError:
        if len(trace.ends.get(name, [])) > 1:
            raise
        return _cut(network, _trace(network, [name]), name)


def _is_bypassed(cut: _Cut) -> bool:
    """Whether other features go around the layer. Sizes, and what is computed from the input alone, are none.

    An input that goes to another submodule later is: the layer lies on one of several branches.
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
    """Whether the node computes a size, a number of dimensions or the like, rather than a tensor."""
    if node.op == "call_method" and node.target in ("size", "dim", "numel"):
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    inputs = node.all_input_nodes
    return node.op == "call_function" and bool(inputs) and all(map(_is_size, inputs))


def _own_layer(network: nn.Module, x: Tensor) -> Layer:
    """The split of a network that offers `stem` and `trunk`."""
    with torch.no_grad():
        h, rest = _own_stem(network, x)
    kind = type(getattr(network, "stem")).__name__  # noqa: B009  a submodule or a method
    return Layer("stem", kind, tuple(h.shape[1:]), bypassed=bool(rest), suggested=True)


def _suggestion(calls: list[_Call], eligible: list[str]) -> str | None:
    sound = [call for call in calls if call.name in eligible]
    for call in sorted(calls, key=lambda call: call.began):
        before = [other for other in sound if other.ended < call.began]
        if before and _gets_smaller(before[-1].output, call):
            return before[-1].name
    active = [call for call in sound if any(isinstance(m, _ACTIVATIONS) for m in call.module.modules())]
    first = next(iter(active or sound), None)
    return first and first.name


def _gets_smaller(features: Tensor, call: _Call) -> bool:
    """Whether `call`, or what was computed since `features`, leaves fewer positions, but more than one."""
    if not isinstance(call.module, (*_CONV, *_POOL)) or not isinstance(call.output, Tensor):
        return False
    known, came, went = (prod(t.shape[2:]) for t in (features, call.x, call.output))
    if features.ndim == call.x.ndim and 1 < came < known:  # a function did it, such as F.max_pool2d
        return True
    strided = not isinstance(call.module, _CONV) or max(call.module.stride) > 1
    return strided and 1 < went < came
