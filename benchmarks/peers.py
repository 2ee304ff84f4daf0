"""Milliseconds of a training step: `cmcl` beside plain PyTorch and other libraries, on the same work.

    pip install --group benchmarks                       # tabm
    pip install --no-deps torchensemble                  # Ensemble-PyTorch, if it is to be measured
    python benchmarks/peers.py --network mlp --out results/bench/peers-mlp-cpu.jsonl
    python benchmarks/peers.py --network cnn --members 1,5 --rounds 5
    python benchmarks/peers.py table results/bench/peers-mlp-cpu.jsonl
    python benchmarks/peers.py --predict 1024            # a prediction of so many examples, not a step
    python benchmarks/peers.py sizes                     # where stacked members are faster on a CPU
    python benchmarks/peers.py start                     # seconds and memory until the first step

Every contender trains the same networks on the same batch size, in turn within each round; the table has
medians over rounds, and their ratio to a plain loop over the members. On a CPU, times are those of the
process, on one thread (--threads), so that other processes disturb them little. `fit` is measured by the
difference between two lengths: without its start, and with all that it does (order, telemetry, checks).

M members, B batch, C classes.
"""

import argparse
import contextlib
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import cmcl
from cmcl.ensemble import prediction, probabilities
from cmcl.stacking import pays

Step = Callable[[], object]
LR, MOMENTUM = 0.01, 0.9


class MLP(nn.Sequential):
    """16-128-128-26, as for the letters of the UCI repository."""

    shape, classes, batch, steps = (16,), 26, 64, 400

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 26))


class CNN(nn.Sequential):
    """Two convolutions and two linear layers for images of 16 x 16."""

    shape, classes, batch, steps = (3, 16, 16), 10, 64, 200

    def __init__(self) -> None:
        first = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        super().__init__(*first, *second, nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


NETWORKS = {"mlp": MLP, "cnn": CNN}
LAYER = {"mlp": "1", "cnn": "1"}  # after which features are shared


class Work:
    """The data of one measurement."""

    def __init__(self, network: str, members: int, device: str) -> None:
        self.name, self.network, self.members = network, NETWORKS[network], members
        self.device = torch.device(device)
        n = self.network.steps // 2 * self.network.batch  # so that an epoch is not much shorter than in use
        self.images = torch.randn(n, *self.network.shape, device=self.device)
        self.targets = torch.randint(self.network.classes, (n,), device=self.device)

    def build(self) -> list[nn.Module]:
        """New networks."""
        return [self.network().to(self.device) for _ in range(self.members)]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end."""
        size = self.network.batch
        while True:
            for start in range(0, len(self.images), size):
                yield self.images[start : start + size], self.targets[start : start + size]


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.SGD(parameters, LR, MOMENTUM, fused=True)  # type: ignore[arg-type]


def plain_loop(work: Work, *, members: int | None = None) -> Step:
    """One network after the other, each with its own optimizer: what people write."""
    networks, batches = work.build()[:members], work.batches()
    optimizers = [sgd(network.parameters()) for network in networks]

    def step() -> None:
        x, y = next(batches)
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()

    return step


def plain_cmcl(work: Work) -> Step:
    """The authors' formulation in plain PyTorch: one loss of all members, the K smallest of CE - beta KL."""
    networks, batches, k, beta = nn.ModuleList(work.build()), work.batches(), max(1, work.members - 1), 0.25
    optimizer = sgd(networks.parameters())

    def step() -> None:
        x, y = next(batches)
        logs = torch.stack([network(x).log_softmax(1) for network in networks])  # (M, B, C)
        ce = torch.stack([F.nll_loss(log, y, reduction="none") for log in logs])
        kl = -logs.mean(2) - torch.log(torch.tensor(float(logs.shape[2])))
        best = (ce - beta * kl).detach().topk(k, dim=0, largest=False).indices
        v = torch.zeros_like(ce).scatter_(0, best, 1.0)
        optimizer.zero_grad()
        (v * ce + beta * (1 - v) * kl).sum(0).mean().backward()
        optimizer.step()

    return step


def vmap(work: Work) -> Step:
    """`torch.func`: stacked weights, one network's code for all, by torch.vmap."""
    networks, batches = work.build(), work.batches()
    weights, buffers = stack_module_state(networks)
    base = copy.deepcopy(networks[0]).to("meta")
    optimizer = sgd(list(weights.values()))
    call = torch.vmap(lambda w, b, x: functional_call(base, (w, b), (x,)), in_dims=(0, 0, None))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        logits = call(weights, buffers, x)
        (F.cross_entropy(logits.flatten(0, 1), y.repeat(work.members)) * work.members).backward()
        optimizer.step()

    return step


def tabm_layers(work: Work) -> Step:
    """Batched matrices, as in `tabm.LinearEnsemble`: the limit for a network written for it."""
    from tabm import EnsembleView, LinearEnsemble

    m, batches = work.members, work.batches()
    linear = partial(LinearEnsemble, k=m)
    layers = linear(16, 128), nn.ReLU(), linear(128, 128), nn.ReLU(), linear(128, 26)
    network = nn.Sequential(EnsembleView(k=m), *layers).to(work.device)  # (B, M, C)
    optimizer = sgd(network.parameters())

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x).flatten(0, 1), y.repeat_interleave(m)) * m
        loss.backward()
        optimizer.step()

    return step


def fitted(run: Callable[[int], object], steps: int) -> float:
    """Seconds of one step of a function that trains for some steps."""
    times = []
    for length in (steps // 2, steps):
        began = clock()
        run(length)
        times.append(clock() - began)
    return (times[1] - times[0]) / (steps - steps // 2)


def ensemble_pytorch(work: Work, steps: int) -> float:
    """Ensemble-PyTorch's VotingClassifier."""
    import logging

    from torchensemble import VotingClassifier

    logger, cuda = logging.getLogger("silent"), work.device.type == "cuda"
    logger.setLevel(logging.CRITICAL)

    data = TensorDataset(work.images, work.targets)
    order = BatchSampler(RandomSampler(data), work.network.batch, drop_last=True)
    loader = DataLoader(
        data, sampler=order, batch_size=None
    )  # a slice for each batch, not example by example

    def run(length: int) -> None:
        model = VotingClassifier(estimator=work.network, n_estimators=work.members, cuda=cuda, n_jobs=1)
        model.logger, model.tb_logger = logger, None  # it would write files into the working folder
        model.set_optimizer("SGD", lr=LR, momentum=MOMENTUM)
        with contextlib.redirect_stdout(None):  # it prints the first batch of every epoch
            model.fit(loader, epochs=length // len(loader), log_interval=10**9, save_model=False)

    return fitted(run, steps)


def cmcl_fit(work: Work, steps: int, *, share: bool = False, members: str = "auto", **how: object) -> float:
    """`cmcl.fit`, the whole loop."""

    def run(length: int) -> None:
        layer = LAYER[work.name] if share and work.members > 1 else None
        own = cmcl.Ensemble(work.build(), share_after=layer)
        recipe = cmcl.Recipe(
            steps=length, batch_size=work.network.batch, members=work.members, lr=LR, momentum=MOMENTUM, **how
        )
        options = cmcl.Options(device=str(work.device), quiet=True, members=members)
        cmcl.fit(own, (work.images, work.targets), recipe=recipe, options=options)

    return fitted(run, steps)


def predictors(work: Work, examples: int) -> dict[str, Callable[[], float]]:
    """Name -> a function that measures seconds of one prediction, of averaged probabilities (B, C)."""
    networks, m = nn.ModuleList(work.build()).eval(), work.members
    x = torch.randn(examples, *work.network.shape, device=work.device)
    weights, buffers = stack_module_state(list(networks))
    base = copy.deepcopy(networks[0]).to("meta")
    call = torch.vmap(lambda w, b: functional_call(base, (w, b), (x,)))
    ensemble = cmcl.Ensemble(list(networks))

    def by_hand() -> Tensor:
        h = x.T.expand(m, -1, -1)
        for layer in (0, 2, 4):
            h = torch.baddbmm(weights[f"{layer}.bias"][..., None], weights[f"{layer}.weight"], h)
            h = h.relu() if layer < 4 else h
        return h.mT

    logits = {
        "one member": lambda: networks[0](x)[None],
        "plain loop": lambda: torch.stack([network(x) for network in networks]),
        "torch.vmap": lambda: call(weights, buffers),
    }
    if work.name == "mlp":
        logits["batched matrices by hand"] = by_hand
    probs: dict[str, Step] = {n: lambda make=make: make().softmax(2).mean(0) for n, make in logits.items()}
    if _installed("torchensemble"):
        from torchensemble import VotingClassifier

        peer = VotingClassifier(estimator=work.network, n_estimators=m, cuda=work.device.type == "cuda")
        peer.estimators_ = networks
        probs["Ensemble-PyTorch"] = lambda: peer(x)
    if work.name == "mlp":
        probs["by hand, entropies as well"] = lambda: prediction(probabilities(by_hand()))
    probs["Ensemble.predict"] = lambda: ensemble.predict(x)
    steps = max(10, 20_000 // examples)
    return {name: partial(torch.no_grad()(per_step), step, steps) for name, step in probs.items()}


def clock() -> float:
    """Seconds; of this process alone where one thread computes."""
    if torch.cuda.is_available():
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


def contenders(work: Work) -> dict[str, Callable[[], float]]:
    """Name -> a function that measures seconds of one step."""
    steps = work.network.steps
    loops = {
        "one member": partial(plain_loop, members=1),
        "plain loop, IE": plain_loop,
        "plain PyTorch, CMCL": plain_cmcl,
        "torch.vmap, IE": vmap,
    }
    if work.name == "mlp":
        loops["tabm.LinearEnsemble, IE"] = tabm_layers
    found = {name: partial(per_step, make(work), steps) for name, make in loops.items()}
    if _installed("torchensemble"):
        found["Ensemble-PyTorch, IE"] = partial(ensemble_pytorch, work, steps)
    found |= {
        "cmcl.fit, IE": partial(cmcl_fit, work, steps, method="ie"),
        "cmcl.fit, CMCL": partial(cmcl_fit, work, steps),
        "cmcl.fit, CMCL, sharing, sampled": partial(cmcl_fit, work, steps, share=True, labels="sampled"),
        "cmcl.fit, CMCL, sequential": partial(cmcl_fit, work, steps, members="sequential"),
    }
    return found


def _installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def measure(args: argparse.Namespace) -> None:
    """Print, and append to --out, the times of all contenders."""
    torch.set_num_threads(args.threads)
    rows = []
    for members in map(int, args.members.split(",")):
        work = Work(args.network, members, args.device)
        measured: dict[str, list[float]] = {}
        own = predictors(work, args.predict) if args.predict else contenders(work)
        for number in range(args.rounds + 1):
            for name, seconds in own.items():
                if number:  # the first round warms up
                    measured.setdefault(name, []).append(1e3 * seconds())
                elif "fit" not in name and "Ensemble" not in name:
                    seconds()
        where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {args.threads} thread"
        for name, times in measured.items():
            row = {"network": args.network, "members": members, "contender": name, "ms": times}
            row |= {"predict": args.predict} if args.predict else {}
            rows.append(row | {"torch": torch.__version__, "device": where})
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows[-len(measured) :])
    print(table(rows))


def table(rows: list[dict]) -> str:
    """Medians in ms, and as ratios to the plain loop of as many members."""
    counts = sorted({row["members"] for row in rows})
    first, base = rows[0], "plain loop" if "predict" in rows[0] else "plain loop, IE"
    work = f"prediction of {first['predict']}" if "predict" in first else "step"
    lines = [f"{first['network']}, {first['device']}, torch {first['torch']}: ms per {work} (ratio)", ""]
    lines.append(f"{'':34}" + "".join(f"{f'M = {count}':>16}" for count in counts))
    medians = {(r["contender"], r["members"]): statistics.median(r["ms"]) for r in rows}
    for name in dict.fromkeys(row["contender"] for row in rows):
        cells = []
        for count in counts:
            ms, plain = medians.get((name, count)), medians.get((base, count))
            cells.append(f"{ms:9.2f} ({ms / plain:.2f})" if ms and plain else "")
        lines.append(f"{name:34}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def sizes(args: argparse.Namespace) -> None:
    """Print the time of stacked members relative to members in turn, for some sizes."""
    torch.set_num_threads(args.threads)
    for inputs, hidden, layers, batch in product((16, 64), (32, 128, 256), (1, 2), (32, 128, 512)):

        class Network(nn.Sequential):
            shape, classes, steps = (inputs,), 10, 60

            def __init__(self, inputs: int = inputs, hidden: int = hidden, layers: int = layers) -> None:
                middle = [nn.Linear(hidden, hidden), nn.ReLU()] * (layers - 1)
                super().__init__(nn.Linear(inputs, hidden), nn.ReLU(), *middle, nn.Linear(hidden, 10))

        Network.batch = batch
        NETWORKS["sizes"] = Network
        work = Work("sizes", 5, "cpu")
        measured = [
            [cmcl_fit(work, Network.steps, members=members) for members in ("stacked", "sequential")]
            for _ in range(args.rounds)
        ]
        ratio = statistics.median(stacked / sequential for stacked, sequential in measured)
        auto = "stacked" if pays(cmcl.Ensemble(work.build()), batch) else "sequential"
        print(f"{inputs}{f'-{hidden}' * layers}-10, batch {batch}: {ratio:.2f}, auto: {auto}", flush=True)


STARTS = {
    "import torch": "import torch",
    "import cmcl": "import cmcl",
    "import cmcl; cmcl.fit": "import cmcl; cmcl.fit",
    "cmcl.fit of one step": """
import torch, cmcl
from torch import nn
ensemble = cmcl.Ensemble(lambda: nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 26)), 5)
data = torch.randn(64, 16), torch.randint(26, (64,))
cmcl.fit(ensemble, data, recipe=cmcl.Recipe(steps=1), options=cmcl.Options(quiet=True, device="cpu"))""",
    "import torchensemble": "import torchensemble",
}
REPORT = """
import re, time
print(time.process_time(), re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])"""


def start(args: argparse.Namespace) -> None:
    """Print CPU seconds and peak memory of new processes."""
    for name, code in STARTS.items():
        runs = []
        for _ in range(args.rounds):
            run = subprocess.run([sys.executable, "-c", code + REPORT], capture_output=True, text=True)
            if run.returncode == 0:
                runs.append([float(number) for number in run.stdout.split()[-2:]])
        if runs:
            seconds, kibibytes = map(statistics.median, zip(*runs, strict=True))
            print(f"{name:24} {seconds:6.2f} s  {kibibytes / 1024:6.0f} MiB", flush=True)


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="*", help="sizes; start; or table FILE, of an earlier run")
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--members", default="1,2,5,10,25")
    parser.add_argument("--predict", type=int, metavar="EXAMPLES", help="measure predictions, not steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON lines are added to this file")
    args = parser.parse_args()
    if args.records in (["sizes"], ["start"]):
        {"sizes": sizes, "start": start}[args.records[0]](args)
    elif args.records:
        print(table([json.loads(line) for line in Path(args.records[-1]).read_text().splitlines()]))
    else:
        measure(args)


if __name__ == "__main__":
    main()
