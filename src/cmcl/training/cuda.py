"""How a step runs fast: compiled, members on CUDA streams side by side, all of it in a CUDA graph.

The only module of `cmcl.training` that uses private torch API, through `private_torch`.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._messages import first_line, private_torch, warn
from .batches import DRAWS, epoch_seed
from .config import Options

if TYPE_CHECKING:
    from .step import Step

Function = Callable[..., Any]
PUBLIC_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# The class of every batch normalisation, also of other packages'.
BATCH_NORM: Any = private_torch("torch.nn.modules.batchnorm._BatchNorm", PUBLIC_BATCH_NORMS)
# How long the processes of a group wait for one another.
set_timeout: Any = private_torch("torch.distributed.distributed_c10d._set_pg_timeout", lambda *given: None)


def find_device(name: str) -> torch.device:
    """The device of that name; "auto": a GPU if there is one, and for each process of `torchrun` another."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise ValueError(
            f"device must be one that torch can use. Got {name!r}. Use 'cpu'. Here torch says: {reason}"
        ) from error
    if name == "cuda" and "TORCHELASTIC_RUN_ID" in os.environ and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    number = int(name.partition(":")[2] or 0)  # torch would take 256 for 0
    if device.type == "cuda" and max(number, device.index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} GPU" if torch.cuda.device_count() else "no GPU"
        raise ValueError(
            f"device must be one that torch can use. Got {name!r}, and torch finds {found}. Use 'cpu'."
        )
    return device


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch draws from on a device if none is named."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def execution(options: Options, seed: int) -> Iterator[None]:
    """Seeded generators, kernels fast or deterministic; torch's global settings are restored afterwards."""
    device = find_device(options.device)
    cuda = device.type == "cuda"
    before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    compiling = compiler_settings() if use_compiler(options) else nullcontext()
    # generators, streams and graphs are those of the current device
    current = torch.cuda.device(device) if cuda else nullcontext()
    if not cuda:
        reuse_memory()
    with compiling, current, torch.random.fork_rng([torch.cuda.current_device()] if cuda else []):
        if cuda:
            torch.cuda.manual_seed(epoch_seed(seed, DRAWS))
        if cuda and options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it
        torch.backends.cudnn.benchmark = not options.deterministic
        if options.deterministic and not before[1]:  # setting what holds already loads torch's compiler
            torch.use_deterministic_algorithms(True)
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"the GPU's memory must hold the data, all members and one batch. {error} Lower batch_size "
                "or members, raise accumulate, or pass a DataLoader; at the end of an epoch, lower "
                "Options.evaluation_batch."
            ) from error
        finally:
            torch.backends.cudnn.benchmark = before[0]
            if torch.are_deterministic_algorithms_enabled() != before[1]:
                torch.use_deterministic_algorithms(before[1])


def reuse_memory() -> None:
    """Let glibc keep freed memory for the next step, which otherwise gets new pages.

    Freeing a block of its own raises the limits, for the rest of the process: blocks of up to its size, at
    most 32 MiB, come from the heap, whose free end may be twice as long (mallopt(3), M_MMAP_THRESHOLD). The
    block is never touched, so it costs nothing.
    """
    torch.UntypedStorage(31 * 2**20, device="cpu")


def use_compiler(options: Options) -> bool:
    """Whether the step is compiled: if asked, and by default on CUDA."""
    return find_device(options.device).type == "cuda" if options.compile is None else options.compile


@contextmanager
def compiler_settings() -> Iterator[None]:
    """Settings of torch's compiler for this package.

    Every recipe is a graph of its own, and one process may train many: torch would stop compiling at 8. The
    backward pass is compiled with the forward pass, so that a failure there, too, falls back to uncompiled
    code; it may not reuse saved tensors, because adversarial training runs it twice.
    """
    with (
        _patched("torch._dynamo.config", recompile_limit=256),
        _patched("torch._functorch.config", force_non_lazy_backward_lowering=True, donated_buffer=False),
    ):
        yield


def _patched(path: str, **values: Any) -> AbstractContextManager[Any]:
    """A private config module of torch with other values; those that this torch lacks are left out."""
    config = private_torch(path, None)  # slow to import, and not there before the first compilation
    known = {key: value for key, value in values.items() if private_torch(f"{path}.{key}", None) is not None}
    return config.patch(**known) if config is not None and known else nullcontext()


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors with one kernel launch."""
    if targets:
        private_torch("torch._foreach_copy_", _copy_each)(targets, sources)


def _copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all values together; as `torch.nn.utils.get_total_norm`, in a third of its time."""
    norms = private_torch("torch._foreach_norm", _norms)(tensors) if tensors else [torch.zeros(())]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]


def by_dtype(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in groups of one dtype."""
    dtypes = dict.fromkeys(t.dtype for t in tensors.values())
    return [{name: t for name, t in tensors.items() if t.dtype == dtype} for dtype in dtypes]


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """All values of tensors of one dtype in one tensor."""
    return torch.cat([t.reshape(-1) for t in tensors.values()])


def views(flat: Tensor, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The inverse of `flat`."""
    parts = flat.split([t.numel() for t in tensors.values()])
    return [part.view(t.shape) for part, t in zip(parts, tensors.values(), strict=True)]


# Compilation and streams.


class Compiler:
    """Compiled versions of functions, made at the first call and shared by members of one architecture."""

    def __init__(self, *, dynamic: bool | None = False) -> None:
        self._compiled: dict[Function, Function] = {}
        self._dynamic = dynamic  # None: batches may differ in size
        self._warned = False

    def __call__(self, function: Function) -> Function:
        """The compiled version of a function; if it cannot be compiled, one warning and the plain one."""
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, dynamic=self._dynamic)

        def run(*args: Any, **options: Any) -> Any:
            try:
                return self._compiled[function](*args, **options)
            except private_torch("torch._dynamo.exc.TorchDynamoException", RuntimeError) as error:
                self._compiled[function] = function
                if not self._warned:  # if one cannot be compiled, the others often cannot either
                    self._warned, reason = True, first_line(getattr(error, "inner_exception", error))
                    warn(f"{function.__name__} runs uncompiled, and slower: {reason}")
                return function(*args, **options)

        return run


class _Kept(threading.local):
    """Streams of a thread, for all of its steps; another thread's may be in the middle of a recording."""

    def __init__(self) -> None:
        self.streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and number


_kept = _Kept()


def stream(number: int) -> torch.cuda.Stream:
    """The current device's stream of that number: 0 for the step itself, 1 to M for its members.

    The same one each time: cuBLAS keeps workspaces for every stream that it has seen (65 MiB on an H200),
    for as long as the process lives.
    """
    key = torch.cuda.current_device(), number
    if key not in _kept.streams:
        _kept.streams[key] = torch.cuda.Stream()
    return _kept.streams[key]


class Runner:
    """Runs independent calls, one for each member: in turn, or on CUDA streams side by side."""

    def __init__(self, streams: int = 0, compiler: Compiler | None = None) -> None:
        self.streams = [stream(number) for number in range(1, 1 + streams)]
        self.compiler = compiler

    def __call__(self, calls: list[partial[Any]]) -> list[Any]:
        """The results of the calls, in their order."""
        if self.compiler is not None:
            calls = [partial(self.compiler(call.func), *call.args, **call.keywords) for call in calls]
        if len(calls) != len(self.streams):
            return [call() for call in calls]
        main, results = torch.cuda.current_stream(), []
        for call, own in zip(joined(calls), self.streams, strict=True):
            own.wait_stream(main)
            with torch.cuda.stream(own):
                results.append(call())
        for own in self.streams:
            main.wait_stream(own)
        return results


class _Joined(torch.autograd.Function):
    """The identity, which in the backward pass waits for all streams.

    The features that streams read were allocated on the main one. Autograd drops them as soon as a stream's
    last kernel that reads them is launched; without waiting, the main stream would write over them. Copies,
    because a network may begin with an operation in place, which views of several tensors do not allow.
    """

    @staticmethod
    def forward(ctx: Any, *features: Tensor) -> tuple[Tensor, ...]:
        return tuple(feature.clone() for feature in features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def joined(calls: list[partial[Any]]) -> list[partial[Any]]:
    """The same calls, with all arguments that have a gradient passed through `_Joined`."""
    slots = [
        (c, i)
        for c, call in enumerate(calls)
        for i, value in enumerate(call.args)
        if isinstance(value, Tensor) and value.requires_grad
    ]
    if not slots:
        return calls
    arguments = [list(call.args) for call in calls]
    together = _Joined.apply(*(arguments[c][i] for c, i in slots))  # type: ignore[no-untyped-call]
    for (c, i), value in zip(slots, together, strict=True):
        arguments[c][i] = value
    return [partial(call.func, *args, **call.keywords) for call, args in zip(calls, arguments, strict=True)]


# CUDA graphs.


class Captured:
    """A step in a CUDA graph: recorded once and replayed, without Python and without kernel launches.

    The calls that warm it up (compilation, autotuning) leave no trace: weights, optimizer, sums and random
    states are restored, also if the step cannot be captured.
    """

    def __init__(self, step: "Step", *, warm_up: int = 3) -> None:
        self.graph = torch.cuda.CUDAGraph()
        before, random = Snapshot(step), torch.cuda.get_rng_state()
        try:
            self._warm_up(step, before, warm_up)
            self._record(step)
        except BaseException:
            _renew_generator()
            raise
        finally:
            torch.cuda.set_rng_state(random)
            before.restore()

    def _warm_up(self, step: "Step", before: "Snapshot", times: int) -> None:
        """Every call takes the same batch: there may be no other one left in this epoch."""
        aside, ensemble = stream(0), step.state.ensemble
        buffers = dict(ensemble.named_buffers())
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                for number in range(times):
                    drawn = random.getstate(), torch.get_rng_state().tolist()
                    step()
                    if number == times - 1 and drawn != (random.getstate(), torch.get_rng_state().tolist()):
                        raise RuntimeError(
                            "the step draws random numbers on the CPU, which a CUDA graph would repeat; draw "
                            "them on the device"
                        )
                    check_in_place(buffers, dict(ensemble.named_buffers()))
                    before.restore()
        finally:  # kernels still running must not come after what is restored
            torch.cuda.current_stream().wait_stream(aside)

    def _record(self, step: "Step") -> None:
        # thread_local: what other threads do (the compiler's, a data loader's) does not spoil the recording.
        # The outer context restores the current stream, which a failed capture does not.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self.graph, stream=stream(0), capture_error_mode="thread_local"),
        ):
            step()

    def __call__(self) -> None:
        """Replay."""
        self.graph.replay()


class Snapshot:
    """Everything that a step changes, to be restored."""

    def __init__(self, step: "Step") -> None:
        modules = step.state.ensemble.modules()
        self.buffers = [(m._buffers, name, buffer) for m in modules for name, buffer in m._buffers.items()]
        # detached: a clone with a gradient would tie the weights to the stream it was made on
        self.values = [(tensor, tensor.detach().clone()) for tensor in step.tensors()]

    @torch.no_grad()
    def restore(self) -> None:
        """The same tensors in their slots, with the same values."""
        for buffers, name, buffer in self.buffers:
            buffers[name] = buffer
        for tensor, value in self.values:
            tensor.copy_(value)


def check_in_place(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """A graph reads and writes the tensors it was recorded with, so buffers must not be replaced."""
    replaced = [name for name in {**before, **after} if before.get(name) is not after.get(name)]
    if replaced:
        raise RuntimeError(
            f"the network's forward replaces its buffer {replaced[0]!r} by another tensor; write into it, by "
            "copy_"
        )


def captured(step: "Step") -> "Step | Captured":
    """The step in a graph; the step itself, with a warning that says why, if it cannot be captured."""
    try:
        return Captured(step)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = first_line(error.__context__ or error)  # ending a failed capture is an error of its own
        warn(f"the step runs without a CUDA graph, and slower: {reason}")
        step.run.streams = []
        return step


def _renew_generator() -> None:
    """Give CUDA's generator a new state: a failed capture leaves the old one waiting for its graph."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
