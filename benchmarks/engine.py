"""The training engine against a plain loop over members: python benchmarks/engine.py --network resnet20

Every row is one step of a whole ensemble, CMCL with K=3, all in one process on random images of the real
shape. The plain loop is a fair one: cuDNN autotuning, TF32, fused optimiser, data on the device, masks and
labels as in the paper, nothing else. The engine's rows are its whole loop: data order and gather, loss,
telemetry.

M members, B batch.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cmcl.training.step
from cmcl import Ensemble, Options, Recipe, fit, networks
from cmcl.training.batches import Resident
from cmcl.training.config import Augment
from cmcl.training.preflight import preflight
from cmcl.training.progress import Progress
from cmcl.training.step import Step, TrainState

BATCH = {"resnet20": 128, "vggnet17": 128, "cnn": 64, "digits": 64}  # digits: a small CNN on 8 x 8 images
SMALL = {"channels": 1, "size": 8, "kernel": 3, "padding": 1, "filters": (16, 32), "hidden": 64}
BARS = {
    "resnet20": 7.0,
    "vggnet17": 4.0,
    "cnn": 2.5,
    "digits": 1.0,
}  # the plain fp32 loop over the engine, on an H200
CMCL = Recipe(steps=1, overlap=3, labels="sampled", sharing=True, lr=0.05, weight_decay=1e-4, nesterov=True)


@dataclass
class Row:
    """One measurement."""

    name: str
    members: int
    ms: float  # a step
    gib: float  # peak memory

    @property
    def per_member(self) -> float:
        """Milliseconds for each member's share of a step."""
        return self.ms / self.members


class Bench:
    """What all rows of one network have in common."""

    def __init__(self, network: str, arguments: argparse.Namespace, deadline: float) -> None:
        self.network, self.arguments, self.deadline = network, arguments, deadline
        self.device = torch.device(arguments.device)
        self.cuda = self.device.type == "cuda"
        self.clock = time.perf_counter if self.cuda else time.process_time  # others may use the CPU as well
        self.batch = arguments.batch or BATCH[network]
        n = arguments.epoch * self.batch
        shape = (1, 8, 8) if network == "digits" else (3, 32, 32)
        self.images = torch.randn(n, *shape, device=self.device)
        self.targets = torch.randint(10, (n,), device=self.device)
        self.rows: dict[str, Row] = {}
        self.overhead = math.nan  # share of the engine's last row

    def epochs(self) -> int:
        """How many are measured; one more warms up."""
        return max(1, round(self.arguments.steps / self.arguments.epoch))

    def seconds(self, ends: list[tuple[float, int]]) -> float:
        """Seconds a step from the (time, steps) at the ends of epochs.

        The mean on a GPU that is ours alone; of a CPU's epochs the fastest, in seconds of the process.
        """
        if self.cuda:
            ends = [ends[0], ends[-1]]
        return min((t - s) / (n - m) for (s, m), (t, n) in pairwise(ends))

    def build(self, members: int) -> list[nn.Module]:
        """Fresh members on the device."""
        small = self.network == "digits"
        build = partial(networks.cnn, **SMALL) if small else networks.NETWORKS[self.network]  # type: ignore[arg-type]
        return [build().to(self.device) for _ in range(members)]

    def measure(self, name: str, members: int, function: Callable[[], float]) -> None:
        """Run a row, unless it was not asked for or time is up; `function` returns seconds a step."""
        if self.arguments.rows not in name:
            return
        if time.perf_counter() > self.deadline:
            print(f"  {name}: left out, no time left", file=sys.stderr)
            return
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        seconds = function()
        gib = torch.cuda.max_memory_reserved() / 2**30 if self.cuda else math.nan
        self.rows[name] = Row(name, members, 1000 * seconds, gib)
        print(
            f"  {name}: {1000 * seconds:.3f} ms a step, {time.perf_counter() - begun:.0f} s in all",
            file=sys.stderr,
        )


# The plain loop: nothing of the engine in it.


def plain(bench: Bench, members: int, *, bf16: bool, ie: bool = False) -> float:
    """Seconds a step of a loop that anyone would write."""
    with fast_kernels():
        return timed(plain_step(bench, members, bf16=bf16, ie=ie), bench)


def plain_step(bench: Bench, members: int, *, bf16: bool, ie: bool = False) -> Callable[[int], None]:
    """A step of that loop; `ie`: of an independent ensemble."""
    models = bench.build(members)
    if bf16:
        models = [model.to(memory_format=torch.channels_last) for model in models]
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
    )
    order = torch.randperm(len(bench.images), device=bench.device)

    def step(number: int) -> None:
        start = number * bench.batch % (len(order) - bench.batch + 1)
        index = order[start : start + bench.batch]
        x, y = bench.images[index], bench.targets[index]
        if bf16:
            x = x.to(memory_format=torch.channels_last)
        with torch.autocast(bench.device.type, torch.bfloat16) if bf16 else nullcontext():
            logits = torch.stack([model(x) for model in models]) if ie else plain_forward(models, x)
        if ie:
            loss = sum(F.cross_entropy(z.float(), y) for z in logits)
        else:
            loss = plain_loss(logits.float(), y, beta=CMCL.beta, overlap=min(CMCL.overlap, members))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def plain_forward(models: list[Any], x: Tensor) -> Tensor:
    """Logits (M, B, C) with feature sharing, section 4.1 of the paper."""
    features = [model.stem(x) for model in models]
    logits = []
    for m, model in enumerate(models):
        mixed = features[m]
        for n, h in enumerate(features):
            if n != m:
                mixed = mixed + h * (torch.rand_like(h, dtype=torch.float32) < CMCL.share_prob)
        logits.append(model.trunk(mixed))
    return torch.stack(logits)


def plain_loss(logits: Tensor, y: Tensor, *, beta: float, overlap: int) -> Tensor:
    """Algorithm 1, version 1: one random label for each member that is silent."""
    members, batch, classes = logits.shape
    log_p = logits.log_softmax(2)
    task = -log_p.gather(2, y.expand(members, batch).unsqueeze(2)).squeeze(2)
    kl = -log_p.mean(2) - math.log(classes)
    chosen = (task - beta * kl).detach().topk(overlap, dim=0, largest=False).indices
    v = torch.zeros_like(task, dtype=torch.bool).scatter_(0, chosen, True)
    drawn = torch.randint(classes, (members, batch), device=logits.device)
    silence = F.nll_loss(log_p.flatten(0, 1), drawn.flatten(), reduction="none").view_as(task)
    return torch.where(v, task, beta * (silence - math.log(classes))).sum(0).mean()


@contextmanager
def fast_kernels() -> Iterator[None]:
    """cuDNN autotuning and TF32."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32, torch.get_float32_matmul_precision()
    cudnn.benchmark, cudnn.allow_tf32 = True, True
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before[:2]
        torch.set_float32_matmul_precision(before[2])


def timed(step: Callable[[int], None], bench: Bench) -> float:
    """Seconds a call, after a warm-up."""
    ends, number = [], 0
    for _ in range(1 + bench.epochs()):
        for _ in range(bench.arguments.epoch):
            step(number)
            number += 1
        synchronize(bench)
        ends.append((bench.clock(), number))
    return bench.seconds(ends)


def synchronize(bench: Bench) -> None:
    """Wait for the device."""
    if bench.cuda:
        torch.cuda.synchronize()


# The engine, from the end of its first epoch on.


class Work:
    """Seconds in what any training loop must do: forward, loss, backward, optimiser. The rest is overhead."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Only where calls return when they are done, as on a CPU."""
        places = [
            (Step, "logits"),
            (cmcl.training.step, "confident_oracle_loss"),
            (Tensor, "backward"),
            (torch.optim.SGD, "step"),
        ]
        before = [getattr(owner, name) for owner, name in places]
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, self._watch(function))
        try:
            yield
        finally:
            for (owner, name), function in zip(places, before, strict=True):
                setattr(owner, name, function)

    def _watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*arguments: Any, **options: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.process_time() - begun

        return watched


def engine(bench: Bench, recipe: Recipe, **options: Any) -> float:
    """Seconds a step of `fit`, its telemetry included; one epoch warms up."""
    steps = (1 + bench.epochs()) * bench.arguments.epoch
    recipe = replace(recipe, steps=steps, batch_size=bench.batch)
    ensemble = Ensemble(bench.build(recipe.members), share_after="stem" if recipe.sharing else None)
    how, clock = Options(device=bench.arguments.device, quiet=True, **options), Work()
    ends, log, begun = list[tuple[float, int]](), Progress.log, bench.clock()

    def noted(progress: Progress, row: dict[str, Any]) -> None:
        log(progress, row)
        ends.append((bench.clock(), row["step"]))

    Progress.log = noted  # type: ignore[method-assign]
    try:
        with fast_kernels(), nullcontext() if bench.cuda else clock.watched():
            fit(ensemble, (bench.images, bench.targets), recipe=recipe, options=how)
    finally:
        Progress.log = log  # type: ignore[method-assign]
    bench.overhead = 1 - clock.seconds / (ends[-1][0] - begun)
    return bench.seconds(ends)


def make_step(
    ensemble: Ensemble, data: tuple[Tensor, Tensor], recipe: Recipe, options: Options, **how: Any
) -> tuple[Step, Resident]:
    """A step as `fit` makes it first, uncaptured, and its batches."""
    checks: dict[str, Any] = {"seed": 0, "task": None, "ignore_index": None, "options": options}
    plan = preflight(ensemble, data, None, recipe=recipe, **checks)
    ensemble.to(plan.device)
    if plan.device.type == "cuda":
        ensemble.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plan.train_mode(ensemble)
    batches = plan.batches()
    assert isinstance(batches, Resident)
    batches.seek(0, 0)
    state = TrainState(ensemble, plan.recipe, 0, plan.monitored_classes, recipe.steps or 1)
    return Step(state, batches, objective=plan.recipe.objective, **how), batches


def in_turn(bench: Bench, recipe: Recipe) -> list[float]:
    """The plain step's time over the engine's, in pairs: other work on a CPU hits both."""
    recipe = replace(recipe, steps=bench.arguments.steps + 1, batch_size=bench.batch)
    ensemble = Ensemble(bench.build(recipe.members), share_after="stem")
    other, ratios, call = plain_step(bench, recipe.members, bf16=False), list[float](), Step.__call__

    def both(step: Step) -> None:
        moments = [time.perf_counter()]
        for function in (lambda: call(step), lambda: other(step.state.step)):
            function()
            moments.append(time.perf_counter())
        ratios.append((moments[2] - moments[1]) / (moments[1] - moments[0]))

    Step.__call__ = both  # type: ignore[method-assign]
    try:
        with fast_kernels():
            how = Options(device=bench.arguments.device, quiet=True)
            fit(ensemble, (bench.images, bench.targets), recipe=recipe, options=how)
    finally:
        Step.__call__ = call  # type: ignore[method-assign]
    return ratios[1:]  # the first warms up


def measure_network(network: str, arguments: argparse.Namespace, deadline: float) -> None:
    """All rows of a network, as a table and ratios."""
    torch.compiler.reset()
    bench, m = Bench(network, arguments, deadline), arguments.members
    recipe = replace(CMCL, members=m, overlap=min(CMCL.overlap, m))
    silent = replace(recipe, sharing=False, labels="exact")
    bench.measure("plain loop, fp32 (TF32)", m, lambda: plain(bench, m, bf16=False))
    bench.measure("plain loop, IE", m, lambda: plain(bench, m, bf16=False, ie=True))
    if bench.cuda:
        bench.measure("plain loop, bf16, channels last", m, lambda: plain(bench, m, bf16=True))
    bench.measure("engine, CMCL, sharing, stochastic labels", m, lambda: engine(bench, recipe))
    overhead = bench.overhead
    bench.measure("engine, IE", m, lambda: engine(bench, replace(silent, method="ie")))
    bench.measure("engine, CMCL, no sharing", m, lambda: engine(bench, silent))
    if bench.cuda:
        bench.measure("engine, float32 (TF32)", m, lambda: engine(bench, recipe, precision="float32"))
    augmentations = augmentations_of(bench) if arguments.augment else {}
    for name, how in augmentations.items():
        augmented = replace(silent, method="ie", augment=how)
        bench.measure(f"engine, IE, {name}", m, lambda recipe=augmented: engine(bench, recipe))  # type: ignore[misc]
    print_table(bench)
    print_ratios(bench, overhead)
    for name in augmentations:
        if bench.rows.keys() >= {"engine, IE", f"engine, IE, {name}"}:
            ratio = bench.rows[f"engine, IE, {name}"].ms / bench.rows["engine, IE"].ms
            print(f"- IE with {name} / IE: {ratio:.2f} (at most 1.1 wanted on an H200)")
    if not bench.cuda and not arguments.rows:
        ratios = in_turn(bench, recipe)
        print(f"- plain fp32 step / engine step, in turn: median {median(ratios):.3f} of {len(ratios)}")


def augmentations_of(bench: Bench) -> dict[str, Augment]:
    """What today's recipes use, and everything, for images of this size."""
    size = bench.images.shape[-1]
    usual = Augment(flip="alternating", crop=size // 8)
    everything = Augment(flip=True, crop=size // 8, cutout=size // 4, jitter=0.2, mixup=0.2, cutmix=1.0)
    return {"flip and crop": usual, "every augmentation": everything}


def print_table(bench: Bench) -> None:
    """Raw numbers, as Markdown."""
    print(f"\n## {bench.network}, B={bench.batch}, CMCL K={CMCL.overlap}\n")
    print("| row | members | ms/step | ms/step/member | peak memory GiB |\n|---|--:|--:|--:|--:|")
    for row in bench.rows.values():
        gib = "-" if math.isnan(row.gib) else f"{row.gib:.2f}"
        print(f"| {row.name} | {row.members} | {row.ms:.3f} | {row.per_member:.3f} | {gib} |")


def print_ratios(bench: Bench, overhead: float) -> None:
    """What the bars are about, as far as it was measured."""
    rows = bench.rows
    ours = rows.get("engine, CMCL, sharing, stochastic labels")
    bar = BARS[bench.network]

    def ratio(text: str, above: Row | None, below: Row | None, bar: str = "") -> None:
        if above and below:
            print(f"- {text}: {above.ms / below.ms:.2f}{bar}")

    print()
    fp32, bf16 = rows.get("plain loop, fp32 (TF32)"), rows.get("plain loop, bf16, channels last")
    wanted = f" (at least {bar:g} wanted on an H200)" if bench.cuda else " (at least 1 wanted)"
    ratio("plain fp32 loop / engine", fp32, ours, wanted)
    ratio("plain IE loop / engine, IE", rows.get("plain loop, IE"), rows.get("engine, IE"))
    ratio("plain bf16 loop / engine, equal precision", bf16, ours)
    ratio("plain fp32 loop / engine in float32, equal precision", fp32, rows.get("engine, float32 (TF32)"))
    ratio(
        "CMCL without sharing / IE",
        rows.get("engine, CMCL, no sharing"),
        rows.get("engine, IE"),
        " (at most 1.08 wanted)",
    )
    if ours and not bench.cuda:
        print(
            f"- of a step, not forward, loss, backward or optimiser: {100 * overhead:.2f} % (under 5 wanted)"
        )


def header(arguments: argparse.Namespace, program: str = "engine") -> str:
    """What was run, on what."""
    cuda = torch.device(arguments.device).type == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    folder = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=folder
    ).stdout.strip()
    return (
        f"$ python benchmarks/{program}.py {' '.join(sys.argv[1:])}\n"
        f"{name}, {os.cpu_count()} CPU cores, torch {torch.__version__}, Python {sys.version.split()[0]}, "
        f"commit {os.environ.get('CMCL_COMMIT') or commit or 'unknown'}"
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--network", choices=[*BATCH, "all"], default="all")
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200 if device == "cuda" else 10, help="measured, a row")
    parser.add_argument("--epoch", type=int, default=100 if device == "cuda" else 2, help="steps an epoch")
    parser.add_argument("--batch", type=int, help="images; by default the paper's")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--augment", action="store_true", help="also measure steps with augmentation")
    parser.add_argument("--device", default=device)
    parser.add_argument("--seconds", type=float, default=230, help="no row is begun after so long")
    return parser.parse_args()


def main() -> None:
    """Measure, and print."""
    begun, arguments = time.perf_counter(), parse()
    print(header(arguments), flush=True)
    chosen = list(BATCH) if arguments.network == "all" else [arguments.network]
    for i, network in enumerate(chosen, start=1):
        # each network has its share of the time, and what those before it left over
        deadline = begun + arguments.seconds * i / len(chosen)
        measure_network(network, arguments, deadline)
        sys.stdout.flush()
    print(f"\n{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
