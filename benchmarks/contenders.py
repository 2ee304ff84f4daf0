"""What benchmarks/peers.py measures: a training step, or a prediction, of `cmcl`, plain PyTorch and others.

M members, B batch, C classes.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import cmcl
from cmcl import networks
from cmcl.ensemble import prediction, probabilities
from cmcl.training.progress import Progress

Step = Callable[[], object]
LR, MOMENTUM = 0.01, 0.9
PEERS = {  # what is measured if it can be imported
    "Ensemble-PyTorch": "torchensemble",
    "torch-uncertainty": "torch_uncertainty.methods",
    "probly": "probly.method.ensemble",
}


def mlp() -> nn.Module:
    """16-128-128-26, as for the letters of the UCI repository."""
    return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 26))


def tiny_cnn() -> nn.Module:
    """Two convolutions and two linear layers for images of 16 x 16."""
    first = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Network:
    """A network and its data."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    batch: int = 128
    steps: int = 200  # the most of a measurement; an epoch has half of them
    layer: str = "stem"  # after which features are shared

    @property
    def paper(self) -> bool:
        """Whether it is one of the paper's, for a GPU."""
        return self.layer == "stem"


NETWORKS = {
    "mlp": Network(mlp, (16,), 26, 64, 400, "1"),
    "cnn": Network(tiny_cnn, (3, 16, 16), 10, 64, 200, "1"),
    "smallcnn": Network(networks.NETWORKS["cnn"], batch=64),  # the paper's
    **{name: Network(networks.NETWORKS[name]) for name in ("resnet20", "vggnet17", "googlenet18")},
}


class Work:
    """The data of one measurement."""

    def __init__(self, network: str, members: int, device: str, steps: int | None = None) -> None:
        self.name, self.network, self.members = network, NETWORKS[network], members
        self.device = torch.device(device)
        self.steps = steps or self.network.steps
        n = max(1, self.steps // 2) * self.network.batch  # so that an epoch is not much shorter than in use
        self.images = torch.randn(n, *self.network.shape, device=self.device)
        self.targets = torch.randint(self.network.classes, (n,), device=self.device)

    def build(self, members: int | None = None, *, bf16: bool = False) -> list[nn.Module]:
        """New networks."""
        own = [self.network.build().to(self.device) for _ in range(members or self.members)]
        return [network.to(memory_format=torch.channels_last) for network in own] if bf16 else own

    def batches(self, *, bf16: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end."""
        size = self.network.batch
        while True:
            for start in range(0, len(self.images), size):
                x, y = self.images[start : start + size], self.targets[start : start + size]
                yield x.to(memory_format=torch.channels_last) if bf16 else x, y

    def precision(self, *, bf16: bool) -> AbstractContextManager[object]:
        """In which networks are run."""
        return torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext()


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.SGD(parameters, LR, MOMENTUM, fused=True)  # type: ignore[arg-type]


def plain_loop(work: Work, *, members: int | None = None, bf16: bool = False) -> Step:
    """One network after the other, each with its own optimizer: what people write."""
    networks, batches = work.build(members, bf16=bf16), work.batches(bf16=bf16)
    optimizers = [sgd(network.parameters()) for network in networks]

    def step() -> None:
        x, y = next(batches)
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            with work.precision(bf16=bf16):
                loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()

    return step


def together(
    work: Work, parameters: Iterable[Tensor], loss: Callable[[Tensor, Tensor], Tensor], *, bf16: bool = False
) -> Step:
    """One loss of all members, and one optimizer."""
    optimizer, batches = sgd(list(parameters)), work.batches(bf16=bf16)

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        with work.precision(bf16=bf16):
            value = loss(x, y)
        value.backward()
        optimizer.step()

    return step


def independent(logits: Tensor, y: Tensor) -> Tensor:
    """The sum of the members' losses, of logits (M, B, C)."""
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits))) * len(logits)


def plain_cmcl(work: Work) -> Step:
    """The authors' formulation in plain PyTorch: one loss of all members, the K smallest of CE - beta KL."""
    networks, k, beta = nn.ModuleList(work.build()), max(1, work.members - 1), 0.25

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logs = torch.stack([network(x).log_softmax(1) for network in networks])  # (M, B, C)
        ce = torch.stack([F.nll_loss(log, y, reduction="none") for log in logs])
        kl = -logs.mean(2) - torch.log(torch.tensor(float(logs.shape[2])))
        best = (ce - beta * kl).detach().topk(k, dim=0, largest=False).indices
        v = torch.zeros_like(ce).scatter_(0, best, 1.0)
        return (v * ce + beta * (1 - v) * kl).sum(0).mean()

    return together(work, networks.parameters(), loss)


def vmap(work: Work, *, written_out: bool = False) -> Step:
    """`torch.func`: stacked weights, one network's code for all, by torch.vmap.

    Batch normalisation can be written out, for where vmap fails with that of cuDNN.
    """
    from grouping import with_plain_norms

    members = work.build()
    call, weights = stacked([with_plain_norms(member) for member in members] if written_out else members)
    return together(work, weights.values(), lambda x, y: independent(call(x), y))


def stacked(members: list[nn.Module]) -> tuple[Callable[[Tensor], Tensor], dict[str, Tensor]]:
    """Logits (M, B, C) of inputs (B, ...) by torch.vmap, and the stacked weights."""
    weights, buffers = stack_module_state(members)
    base = copy.deepcopy(members[0]).to("meta")
    run = torch.vmap(
        lambda w, b, x: functional_call(base, (w, b), (x,)), in_dims=(0, 0, None), randomness="different"
    )
    return lambda x: run(weights, buffers, x), weights


def horizontal(work: Work, *, bf16: bool = False) -> Step:
    """Horizontal fusion: the convolutions of all members as one grouped convolution."""
    from grouping import Fused

    network = Fused(work.build())
    network = network.to(memory_format=torch.channels_last) if bf16 else network
    return together(work, network.parameters(), lambda x, y: independent(network(x), y), bf16=bf16)


def tabm_layers(work: Work) -> Step:
    """Batched matrices, as in `tabm.LinearEnsemble`: the limit for a network written for it."""
    from tabm import EnsembleView, LinearEnsemble

    m = work.members
    linear = partial(LinearEnsemble, k=m)
    layers = linear(16, 128), nn.ReLU(), linear(128, 128), nn.ReLU(), linear(128, 26)
    network = nn.Sequential(EnsembleView(k=m), *layers).to(work.device)  # (B, M, C)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network(x).flatten(0, 1), y.repeat_interleave(m)) * m

    return together(work, network.parameters(), loss)


def container(work: Work, peer: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A peer's ensemble, and its forward pass to logits (M, B, C): it leaves the loop to its user."""
    if peer == "torch-uncertainty":
        from torch_uncertainty.methods import deep_ensembles

        ensemble = deep_ensembles(work.network.build(), num_estimators=work.members).to(work.device)
        return ensemble, lambda x: ensemble(x).unflatten(0, (work.members, -1))  # (M * B, C)
    from probly.method.ensemble import ensemble as probly_ensemble
    from probly.predictor import predict_raw

    members = probly_ensemble(work.network.build(), num_members=work.members).to(work.device)
    return members, partial(predict_raw, members)


def by_peer(work: Work, peer: str) -> Step:
    """A step of independent training of a peer's container."""
    ensemble, forward = container(work, peer)
    return together(work, ensemble.parameters(), lambda x, y: independent(forward(x), y))


class Loader(DataLoader[Any]):
    """Notes when it is begun."""

    def __iter__(self) -> Any:
        self.__dict__.setdefault("begun", []).append(clock())
        return super().__iter__()


def ensemble_pytorch(work: Work, _: float) -> tuple[list[float], None]:
    """Seconds of a step of Ensemble-PyTorch's VotingClassifier, in the second epoch."""
    import logging

    from torchensemble import VotingClassifier

    logger, cuda = logging.getLogger("silent"), work.device.type == "cuda"
    logger.setLevel(logging.CRITICAL)
    few = 20 * work.network.batch if cuda else len(work.images)
    data = TensorDataset(work.images[:few], work.targets[:few])
    order = BatchSampler(RandomSampler(data), work.network.batch, drop_last=True)
    loader = Loader(data, sampler=order, batch_size=None)  # a slice for each batch, not example by example
    how = {"n_estimators": work.members, "cuda": cuda, "n_jobs": 1}
    model = VotingClassifier(estimator=work.network.build(), **how)
    model.logger, model.tb_logger = logger, None  # it would write files into the working folder
    model.set_optimizer("SGD", lr=LR, momentum=MOMENTUM)
    with redirect_stdout(None):  # it prints the first batch of every epoch
        model.fit(loader, epochs=2, log_interval=10**9, save_model=False)
    begun = loader.__dict__["begun"][-work.members]  # each member goes through the data
    return [(clock() - begun) / len(loader)], None


class Enough(Exception):
    """Ends a `fit` that was measured long enough."""


def cmcl_fit(
    work: Work, target: float = 0.0, *, share: bool = False, members: str = "auto", **how: Any
) -> tuple[list[float], float]:
    """Seconds of a step of `cmcl.fit` by epoch, the first left out, and seconds until the first step is done.

    It ends after two epochs and `target` seconds.
    """
    began, first = time.perf_counter(), list[float]()
    ends, log, advance = list[tuple[float, int]](), Progress.log, Progress.advance

    def advanced(progress: Progress, done: float, **numbers: Any) -> None:
        if not first:
            clock()  # waits for the device
            first.append(time.perf_counter() - began)
        advance(progress, done, **numbers)

    def noted(progress: Progress, row: dict[str, Any]) -> None:
        log(progress, row)
        ends.append((clock(), row["step"]))
        if len(ends) > 2 and ends[-1][0] - ends[0][0] >= target:
            raise Enough

    own = cmcl.Ensemble(work.build(), share_after=work.network.layer if share and work.members > 1 else None)
    length: dict[str, Any] = {"steps": 1000 * len(work.images), "batch_size": work.network.batch}
    recipe = cmcl.Recipe(members=work.members, lr=LR, momentum=MOMENTUM, **length, **how)
    options = cmcl.Options(device=str(work.device), quiet=True, members=members)  # type: ignore[arg-type]
    Progress.log, Progress.advance = noted, advanced  # type: ignore
    try:
        with suppress(Enough):
            cmcl.fit(own, (work.images, work.targets), recipe=recipe, options=options)
    finally:
        Progress.log, Progress.advance = log, advance  # type: ignore[method-assign]
    return [(t - s) / (n - m) for (s, m), (t, n) in pairwise(ends)], first[0]


@dataclass
class Contender:
    """What is measured, and its measurements."""

    start: Callable[[], Step] | None = None  # makes a step that is called again and again
    whole: Callable[[float], tuple[list[float], float | None]] | None = None  # or: cmcl_fit, ensemble_pytorch
    steps: int = 400  # the most of a measurement
    target: float = 0.0  # seconds of a measurement, if fewer steps do
    ms: list[float] = field(default_factory=list)
    first_step_s: float | None = None
    peak_gib: float | None = None
    step: Step | None = None
    failed: bool = False

    def __call__(self) -> list[float]:
        """Measure once: seconds of a step, one number or more."""
        if self.whole is not None:
            times, self.first_step_s = self.whole(self.target)
            return times
        if self.step is None:
            assert self.start is not None
            began = time.perf_counter()
            self.step = self.start()
            self.step()
            clock()  # waits for the device
            self.first_step_s = time.perf_counter() - began
            if self.target:
                once = per_step(self.step, 3)
                self.steps = min(self.steps, max(3, round(self.target / once)))
        return [per_step(self.step, self.steps)]


def contenders(work: Work) -> dict[str, Contender]:
    """Name -> what is measured, as the table lists it."""
    paper, several = work.network.paper, work.members > 1
    loops: dict[str, Callable[[Work], Step]] = {
        "one member": partial(plain_loop, members=1),
        "plain loop, IE": plain_loop,
    }
    if paper:
        loops["plain loop, IE, bf16"] = partial(plain_loop, bf16=True)
    loops["plain PyTorch, CMCL"] = plain_cmcl
    if several or not paper:
        loops["torch.vmap, IE"] = vmap
    if work.name in ("resnet20", "vggnet17", "googlenet18") and several:
        loops["torch.vmap, plain BatchNorm, IE"] = partial(vmap, written_out=True)
    if paper and several and work.name != "googlenet18":  # whose branches are concatenated by channel
        loops["horizontal fusion, IE"] = horizontal
        loops["horizontal fusion, IE, bf16"] = partial(horizontal, bf16=True)
    if work.name == "mlp":
        loops["tabm.LinearEnsemble, IE"] = tabm_layers
    loops |= {f"{name}, IE": partial(by_peer, peer=name) for name in containers(work)}
    found = {name: Contender(start=partial(make, work), steps=work.steps) for name, make in loops.items()}
    if _installed("torchensemble") and (several or not paper):
        found["Ensemble-PyTorch, IE"] = Contender(whole=partial(ensemble_pytorch, work))
    fits: dict[str, dict[str, Any]] = {
        "cmcl.fit, IE": {"method": "ie"},
        "cmcl.fit, CMCL": {},
        "cmcl.fit, CMCL, sharing, sampled": {"share": True, "labels": "sampled"},
        "cmcl.fit, CMCL, sequential": {"members": "sequential"},
    }
    for name, how in fits.items():
        if not paper or ("sequential" not in name and (several or "sharing" not in name)):
            found[name] = Contender(whole=partial(cmcl_fit, work, **how))
    return found


def predictors(work: Work, examples: int) -> dict[str, Contender]:
    """Name -> a prediction, of averaged probabilities (B, C)."""
    members = work.build()
    networks, m = nn.ModuleList(members).eval(), work.members
    x = torch.randn(examples, *work.network.shape, device=work.device)
    call, weights = stacked(members)
    ensemble = cmcl.Ensemble(members)

    def by_hand() -> Tensor:
        h = x.T.expand(m, -1, -1)
        for layer in (0, 2, 4):
            h = torch.baddbmm(weights[f"{layer}.bias"][..., None], weights[f"{layer}.weight"], h)
            h = h.relu() if layer < 4 else h
        return h.mT

    def averaged(logits: Callable[[], Tensor]) -> Step:
        return lambda: logits().softmax(2).mean(0)

    def loop() -> Tensor:
        return torch.stack([network(x) for network in networks])

    def ensemble_pytorch() -> Step:
        from torchensemble import VotingClassifier

        peer = VotingClassifier(estimator=networks[0], n_estimators=m, cuda=work.device.type == "cuda")
        peer.estimators_ = networks
        return lambda: peer(x)

    def by_container(peer: str) -> Step:
        made, forward = container(work, peer)
        made.eval()
        return averaged(lambda: forward(x))

    def in_bf16(step: Step) -> Step:
        def predict() -> None:
            with work.precision(bf16=True):
                step()

        return predict

    def ours() -> object:
        return ensemble.predict(x)

    makes: dict[str, Callable[[], Step]] = {
        "one member": lambda: averaged(lambda: networks[0](x)[None]),
        "plain loop": lambda: averaged(loop),
    }
    if work.network.paper:
        makes["plain loop, bf16"] = lambda: in_bf16(averaged(loop))
    makes["torch.vmap"] = lambda: averaged(lambda: call(x))
    if work.name == "mlp":
        makes["batched matrices by hand"] = lambda: averaged(by_hand)
    if _installed("torchensemble"):
        makes["Ensemble-PyTorch"] = ensemble_pytorch
    makes |= {peer: partial(by_container, peer) for peer in containers(work)}
    if work.name == "mlp":
        makes["by hand, entropies as well"] = lambda: lambda: prediction(probabilities(by_hand()))
    makes["Ensemble.predict"] = lambda: ours
    if work.network.paper:
        makes["Ensemble.predict, bf16"] = lambda: in_bf16(ours)
    steps = min(work.steps, max(10, 20_000 // examples))
    return {name: Contender(start=make, steps=steps) for name, make in makes.items()}


def containers(work: Work) -> list[str]:
    """The peers that are installed and give an ensemble as a module."""
    own = [name for name in PEERS if name != "Ensemble-PyTorch"]
    return [name for name in own if work.members > 1 and _installed(PEERS[name])]


@cache
def _installed(name: str) -> bool:
    try:
        import_module(name)
    except Exception as error:  # a library may fail in other ways with versions that it does not know
        if not isinstance(error, ModuleNotFoundError) or error.name != name.partition(".")[0]:
            print(f"{name} cannot be imported: {error!r}", file=sys.stderr)
        return False
    return True


def clock() -> float:
    """Seconds; of this process alone where one thread computes."""
    if torch.cuda.is_initialized():  # work runs there
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def per_step(step: Step, steps: int) -> float:
    """Seconds of one call."""
    for _ in range(max(1, steps // 10)):
        step()
    began = clock()
    for _ in range(steps):
        step()
    return (clock() - began) / steps
