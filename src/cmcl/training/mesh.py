"""One ensemble trained by several processes, started by `torchrun`: a mesh of members x data.

Along the axis "members" processes hold different members, along the axis "data" different examples of each
batch. Every process draws the random numbers of all members and the whole batch, and uses its part: results
depend on the mesh by rounding, and by what dropout draws. In a step travel the scores (M, B) by which the
specialists are chosen, the features that members share, and the gradients along the axis "data".

M members, B batch; m and b are those of one process.
"""

import atexit
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from itertools import count, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: its functions keep the one they find
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from .._messages import first_line
from ..ensemble import Ensemble
from ..objectives import OracleLoss
from .batches import epoch_seed
from .cuda import BATCH_NORM, copy_all, flat, set_timeout, views

AXES = ("members", "data")
TIMEOUT = timedelta(minutes=10)  # for a process that hangs; a process that died is noticed at once
EVALUATION = timedelta(days=1)  # that process 0 may take to evaluate one run before the next one begins
Value = TypeVar("Value")


class ProcessLost(RuntimeError):
    """Another process of the mesh died or does not answer."""


class Shape(NamedTuple):
    """The sizes of a mesh along its axes."""

    members: int = 1
    data: int = 1

    def __str__(self) -> str:
        return f"members={self.members},data={self.data}"

    @property
    def name(self) -> str | None:
        """For a record; None: of one process."""
        return None if self == Shape() else str(self)


def launched() -> int:
    """The number of processes that train together: those of `torchrun`, or of the user's process group."""
    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def rank() -> int:
    """The number of this process among them."""
    if launched() == 1:
        return 0
    return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])


def restarted() -> bool:
    """Whether `torchrun` started this process again, after one had died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def parse(text: str, processes: int) -> Shape:
    """The shape that a text such as "members=2,data=2" names; an axis that is left out gets the rest."""
    given = {axis: int(size) for axis, size in re.findall(r"(members|data)=(\d+)", text)}
    for axis, other in (AXES, AXES[::-1]):
        given.setdefault(axis, max(1, processes // max(given.get(other, 1), 1)))
    if (shape := Shape(**given)).members * shape.data != processes:
        raise ValueError(
            f"mesh must have as many places as there are processes, {processes}. Got {text}. Start "
            f"{shape.members * shape.data} processes by torchrun --nproc-per-node, or change the mesh."
        )
    return shape


def slices(count: int, parts: int) -> list[slice]:
    """The parts of a range, their lengths as equal as possible."""
    ends = [-(-count * i // parts) for i in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


class Traffic(NamedTuple):
    """Bytes of the tensors that a process exchanges with others in a step, by what they are."""

    scores: int  # of the assignment
    telemetry: int  # losses, KL, entropies and assignments, the norm of the gradient: those of all processes
    features: int  # of all members, and backward their gradients
    statistics: int  # of BatchNorm, forward and backward
    gradients: int  # of the weights

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    def __str__(self) -> str:
        parts = [f"{count:,} of {name}" for name, count in self._asdict().items() if count]
        return f"{self.total:,} bytes a step ({', '.join(parts)})"


class Sizes(NamedTuple):
    """What one member exchanges: numbers of values, if not said otherwise."""

    weights: int  # that are trained
    features: int = 0  # that it shares of one example, in bytes; 0 without sharing
    channels: tuple[int, ...] = ()  # of each BatchNorm that is trained


def traffic(shape: Shape, members: int, batch: int, sizes: Sizes) -> Traffic:
    """Bytes of a step, of the process with most members and examples; all but features is float32."""
    own, examples = (math.ceil(n / parts) for n, parts in zip((members, batch), shape, strict=True))
    apart, split = shape.members > 1, shape.data > 1
    return Traffic(
        scores=4 * members * examples * apart,
        telemetry=4 * (4 * members * batch + 1 + apart) * (apart or split),
        features=2 * members * examples * sizes.features * apart,
        statistics=4 * 2 * own * sum(2 * channels + 1 for channels in sizes.channels) * split,
        gradients=4 * own * sizes.weights * split,
    )


def choose(processes: int, members: int, batch: int, sizes: Sizes) -> Shape:
    """The mesh whose busiest process computes least; of several, the one that ships least."""

    def cost(shape: Shape) -> tuple[int, int]:
        work = math.ceil(members / shape.members) * math.ceil(batch / shape.data)
        return work, traffic(shape, members, batch, sizes).total

    fitting = [n for n in range(1, min(processes, members) + 1) if processes % n == 0]
    shapes = [Shape(n, processes // n) for n in fitting if processes // n <= batch]
    if not shapes:
        raise ValueError(
            f"the processes must be at most as many as the members times the batch, {members} x {batch}. Got "
            f"{processes}."
        )
    return min(shapes, key=cost)


class Mesh:
    """The place of this process in a mesh. In a mesh of one process, every method does nothing."""

    def __init__(self, shape: Shape, device: torch.device | None = None) -> None:
        self.shape, self.size, self.rank = shape, math.prod(shape), 0
        self.place = Shape(0, 0)  # of this process, along each axis
        self.shipped = 0  # bytes, by this process since the start
        # those that differ from this process along an axis only, and all: on the device, and on the CPU
        self.groups: dict[str, Any] = {}
        self.apart = False  # whether a member runs, on this process's part of a batch
        if self.size > 1:
            self.device = device or torch.device("cpu")
            if self.device.type == "cuda":  # or init_device_mesh takes that of LOCAL_RANK, if there is none
                torch.cuda.set_device(
                    torch.cuda.current_device() if self.device.index is None else self.device.index
                )
            _join(self.device)
            self.rank = dist.get_rank()
            self.call(dist.barrier, group=_patient(dist.group.WORLD))
            mesh = init_device_mesh(self.device.type, tuple(shape), mesh_dim_names=AXES)
            self.groups = {axis: mesh.get_group(axis) for axis in AXES}
            for group in self.groups.values():
                if group != dist.group.WORLD:  # a group of gloo would wait for half an hour
                    set_timeout(TIMEOUT, group)
            self.groups |= {"all": dist.group.WORLD, "cpu": group_on_cpu()}
            self.place = Shape(*(mesh.get_local_rank(axis) for axis in AXES))

    def members(self, count: int) -> slice:
        """The members of this process."""
        return slices(count, self.shape.members)[self.place.members]

    def part(self, members: int, batch: int, where: Sequence[int] = ()) -> "MeshPart | None":
        """What this process computes of a batch at this place in the run; None: all of it."""
        return MeshPart(self, members, batch, where) if self.size > 1 else None

    # A step.

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients along the axis "data"."""
        if self.shape.data == 1:
            return
        found = {str(i): p.grad for i, p in enumerate(parameters) if p.grad is not None}
        for dtype in dict.fromkeys(g.dtype for g in found.values()):
            alike = {name: g for name, g in found.items() if g.dtype == dtype}
            copy_all(list(alike.values()), views(self.total(flat(alike), "data"), alike))

    def norm(self, norm: Tensor) -> Tensor:
        """The norm over all members, of the norm over those of this process."""
        return norm if self.shape.members == 1 else self.total(norm.square(), "members").sqrt()

    @contextmanager
    def batch_norm(self, ensemble: Ensemble) -> Iterator[None]:
        """Normalise by the statistics of the whole batch, in train mode and inside `apart`."""
        kind: Any = BATCH_NORM
        forward: Callable[..., Tensor] = self._normalise
        if self.shape.data == 1:  # SyncBatchNorm would add up the statistics of other members
            kind, forward = nn.SyncBatchNorm, nn.BatchNorm1d.forward
        modules = ensemble.modules() if self.size > 1 else ()
        found = [m for m in modules if isinstance(m, kind) and normalises_as_usual(m)]
        for module in found:
            module.forward = partial(forward, module)
        try:
            yield
        finally:
            for module in found:
                del module.forward  # that of its class again

    def _normalise(self, module: nn.BatchNorm1d, x: Tensor) -> Tensor:
        if not (self.apart and module.training):
            usual: Tensor = nn.BatchNorm1d.forward(module, x)
            return usual
        total = partial(_Total.apply, self, "data")
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        axes = [axis for axis in range(x.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
        sums = torch.cat([h.sum(axes), h.new_full((1,), h.numel() / h.shape[1])])
        *_, count = sums = total(sums)
        mean = sums[:-1] / count
        centred = h - mean.reshape(shape)
        variance = total(centred.square().sum(axes)) / count
        scale = (variance + module.eps).rsqrt()
        if module.weight is not None:
            scale = scale * module.weight
        y = centred * scale.reshape(shape)
        if module.bias is not None:
            y = y + module.bias.reshape(shape)
        _track(module, mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        return y.to(x.dtype)  # type: ignore[no-any-return]

    # A run.

    def equal(self, what: str, own: str) -> None:
        """Raise if the processes do not have the same text."""
        found = self.collected(own)
        if differing := [rank for rank, text in enumerate(found) if text != found[0]]:
            raise ValueError(
                f"{what} must be the same in all processes. Got {found[0]} in process 0, and "
                f"{found[differing[0]]} in process {differing[0]}."
            )

    def collected(self, value: Value) -> list[Value]:
        """The values of all processes."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self.call(dist.all_gather_object, found, value, group=self.groups["cpu"])
        return found

    def largest(self, number: int) -> int:
        """The largest of the numbers of all processes, without waiting for a GPU."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number)
        self.call(dist.all_reduce, tensor, dist.ReduceOp.MAX, group=self.groups["cpu"])
        return int(tensor)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block in which processes may fail one by one, as process 0 with its files: then all raise."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        problems = self.collected(problem)
        if first := problem or next(filter(None, problems), None):
            raise first

    def copy(self, tensors: Sequence[Tensor], *, axis: str = "all", place: int = 0) -> None:
        """Copy tensors from one place to all others along an axis."""
        if self.size == 1 or (axis != "all" and getattr(self.shape, axis) == 1):
            return
        group = self.groups[axis]
        source = dist.get_global_rank(group, place)
        for tensor in (tensor.detach() for tensor in tensors if tensor.numel()):
            shipped = tensor.to(self.device, copy=True).contiguous()
            self.call(dist.broadcast, shipped.reshape(-1).view(torch.uint8), source, group=group)  # any dtype
            tensor.copy_(shipped)

    def copy_members(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Copy the tensors of each member from the process that trains it to those that do not."""
        for place, members in enumerate(slices(len(tensors), self.shape.members)):
            for own in tensors[members]:
                self.copy(own, axis="members", place=place)

    def total(self, tensor: Tensor, axis: str = "all") -> Tensor:
        """The sum of a tensor along an axis, written into it."""
        self.call(dist.all_reduce, tensor, group=self.groups[axis])
        self.shipped += tensor.nbytes
        return tensor

    def __deepcopy__(self, memo: object) -> "Mesh":
        return self  # a copied member stays in its mesh

    def call(self, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The result of a collective; `ProcessLost` if another process does not take part."""
        try:
            return collective(*args, **options)
        except RuntimeError as error:  # its connection was closed, or it did not answer in time
            raise ProcessLost(
                f"process {self.rank} of {self.size} lost the others: one of them has died, or does not "
                "answer. Its own message says why. Resume the run from its last checkpoint, with --resume or "
                "resume=True; torchrun --max-restarts does so by itself. Here torch says: "
                f"{first_line(error)}"
            ) from error


class MeshPart:
    """What one process computes of a batch: an `objectives.Part`."""

    def __init__(self, mesh: Mesh, members: int, batch: int, where: Sequence[int]) -> None:
        if batch < mesh.shape.data:
            raise ValueError(
                f"each process must get an example of every batch, or part of one. Got {batch} examples for "
                f"{mesh.shape}. Use fewer processes along data, lower accumulate, or set drop_last=True in a "
                "DataLoader."
            )
        self.mesh, self.shape, self.members = mesh, (members, batch), mesh.members(members)
        self.examples = slices(batch, mesh.shape.data)[mesh.place.data]
        self._seeds = (epoch_seed("/".join(map(str, (*where, *mesh.place))), n) for n in count())

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let members draw numbers of their own, such as dropout's; their BatchNorm sees the whole batch.

        What they draw depends on the place in the run, and on that in the mesh. The random state that all
        processes have in common stays as it is.
        """
        with torch.random.fork_rng([self.mesh.device] if self.mesh.device.type == "cuda" else []):
            torch.manual_seed(next(self._seeds))
            self.mesh.apart = True
            try:
                yield
            finally:
                self.mesh.apart = False

    def features(self, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """The features of all members, from those of this process's; gradients go back there."""
        if self.mesh.shape.members == 1:
            return own
        owners = slices(self.shape[0], self.mesh.shape.members)
        where = [place for place, members in enumerate(owners) for _ in range(self.shape[0])[members]]
        return _FromOwners.apply(self.mesh, where, *own)  # type: ignore[no-untyped-call,no-any-return]

    def of_all_members(self, scores: Tensor) -> Tensor:
        """The scores (M, b) of all members, from those (m, b) of this process's members."""
        if self.mesh.shape.members == 1:
            return scores
        everyone = scores.new_zeros(self.shape[0], *scores.shape[1:])
        everyone[self.members] = scores
        return self.mesh.total(everyone, "members")

    @torch.no_grad()
    def of_all(self, loss: OracleLoss, entropy: Tensor) -> tuple[OracleLoss, Tensor]:
        """The loss and the entropies (M, B) of all members and examples."""
        values = loss.task, loss.kl, loss.assignment, entropy
        own = torch.stack([value.to(loss.task.dtype) for value in values])
        every = own.new_zeros(4 * math.prod(self.shape) + 1)
        every[:-1].view(4, *self.shape)[:, self.members, self.examples] = own
        every[-1] = loss.total * self.weight
        total = self.mesh.total(every)[-1]
        task, kl, assignment, entropy = every[:-1].view(4, *self.shape)
        return OracleLoss(total, assignment > 0, task, kl, assignment), entropy

    def of_all_total(self, total: Tensor) -> Tensor:
        """The loss of the whole part of a batch, from that of this process."""
        return self.mesh.total(total.detach() * self.weight)

    @property
    def weight(self) -> float:
        """The fraction of the examples."""
        return len(range(self.shape[1])[self.examples]) / self.shape[1]


class _Total(torch.autograd.Function):
    """The sum along an axis; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, mesh: Mesh, axis: str, x: Tensor) -> Tensor:
        ctx.mesh, ctx.axis = mesh, axis
        return mesh.total(x.clone(), axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.mesh.total(gradient.clone(), ctx.axis)


class _FromOwners(torch.autograd.Function):
    """Every member's features, from the process that holds it; gradients are added up there."""

    @staticmethod
    def forward(ctx: Any, mesh: Mesh, where: list[int], *own: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.where = mesh, where
        mine = iter(own)
        every = [
            next(mine).contiguous() if place == mesh.place.members else torch.empty_like(own[0]).contiguous()
            for place in where
        ]
        _each(mesh, dist.broadcast, every, where)
        return tuple(h.clone() if p == mesh.place.members else h for h, p in zip(every, where, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        sums = [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]
        _each(ctx.mesh, dist.reduce, sums, ctx.where)
        mine = (g for g, place in zip(sums, ctx.where, strict=True) if place == ctx.mesh.place.members)
        return None, None, *mine


def _each(mesh: Mesh, collective: Callable[..., Any], tensors: list[Tensor], where: list[int]) -> None:
    """Copy each tensor from its place along the axis "members", or add it up there; all at the same time."""
    group = mesh.groups["members"]
    pending = [
        mesh.call(collective, tensor, dist.get_global_rank(group, place), group=group, async_op=True)
        for tensor, place in zip(tensors, where, strict=True)
    ]
    for work in pending:
        mesh.call(work.wait)
    mesh.shipped += sum(tensor.nbytes for tensor in tensors)


@torch.no_grad()
def _track(module: nn.BatchNorm1d, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as BatchNorm does."""
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return
    rate = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        rate = 1 / int(module.num_batches_tracked) if rate is None else rate
    for running, now in ((module.running_mean, mean), (module.running_var, variance)):
        running.lerp_(now.to(running.dtype), rate or 0.0)


def normalises_as_usual(module: nn.Module) -> bool:
    """Whether a BatchNorm is one of torch's, not one with a forward of its own."""
    return type(module).forward in (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)


def _join(device: torch.device) -> None:
    """Join the other processes, with a device for this one."""
    if not dist.is_initialized():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        # gloo carries what is on the CPU; NCCL allows one process a GPU
        nccl = device.type == "cuda" and local <= torch.cuda.device_count() and dist.is_nccl_available()
        # torchrun keeps one store for all restarts: without a prefix, processes find addresses of dead ones
        store, own, size = next(rendezvous("env://", timeout=TIMEOUT))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        store = PrefixStore(f"attempt {attempt}", store)
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=own, world_size=size, timeout=TIMEOUT)
        atexit.register(_leave)
    elif not _carries(device.type):
        raise ValueError(
            f"the process group must carry tensors on {device.type}. Got {dist.get_backend_config()}. Call "
            'init_process_group("cpu:gloo,cuda:nccl"), or leave that to cmcl.'
        )


def group_on_cpu() -> Any:
    """All processes, for tensors on the CPU, which a group of NCCL alone does not carry."""
    return dist.group.WORLD if _carries("cpu") else dist.new_group(backend="gloo", timeout=TIMEOUT)


@lru_cache(maxsize=1)
def _patient(everyone: Any) -> Any:
    """A group of the same processes, which wait for one another as long as process 0 may evaluate."""
    atexit.register(_patient.cache_clear)  # a thread of gloo that outlives Python aborts the process
    return dist.new_group(backend="gloo", timeout=EVALUATION)


def _carries(device: str) -> bool:
    return device in dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


ALONE = Mesh(Shape())
