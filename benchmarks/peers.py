"""Milliseconds of a training step: `cmcl` beside plain PyTorch and other libraries, on the same work.

    pip install --group benchmarks                       # tabm
    pip install --no-deps torchensemble                  # and other peers that are to be measured
    python benchmarks/peers.py --network mlp --out results/bench/peers-mlp-cpu.jsonl
    python benchmarks/peers.py --network cnn --members 1,5 --rounds 5
    python benchmarks/peers.py --device cuda --network resnet20:5,resnet20:25,smallcnn:5 --rounds 3 \\
        --target 0.3 --seconds 300 --also-predict 1024 --out peers-gpu.jsonl
    python benchmarks/peers.py table results/bench/peers-mlp-cpu.jsonl
    python benchmarks/peers.py --predict 1024            # a prediction of so many examples, not a step
    python benchmarks/peers.py sizes                     # where stacked members are faster on a CPU
    python benchmarks/peers.py start                     # seconds and memory until the first step

Every contender trains the same networks on the same batch size, in turn within each round; the table has
medians over rounds, and their ratio to a plain loop over the members. On a CPU, times are those of the
process, on one thread (--threads), so that other processes disturb them little. `fit` is measured from the
end of its first epoch on: without its start, and with all that it does (order, telemetry, checks). On a GPU
each `fit` runs once, before the rounds, because it is compiled; of each network the first one is compiled
anew, later ones find parts of it in the compiler's files. Peak memory is beside the data's. A contender that
fails, or for which there is no time, is left out. contenders.py has them all.

M members, B batch, C classes.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import torch
from contenders import NETWORKS, Contender, Network, Work, cmcl_fit, contenders, predictors
from engine import fast_kernels
from torch import nn

import cmcl
from cmcl.reproduction.environment import commit
from cmcl.stacking import pays
from cmcl.training.cuda import reuse_memory


def run_rounds(found: dict[str, Contender], rounds: int, deadline: float, *, cuda: bool) -> None:
    """Measure all, in turn within each round; the first round warms up, and on a GPU has the whole runs."""
    order = sorted(found, key=importance) if cuda else list(found)
    for number in range(rounds + 1):
        for name in order:
            contender = found[name]
            late = time.perf_counter() > deadline
            if late or contender.failed or (contender.whole and (number == 0) != cuda):
                continue
            try:
                times = watched(contender) if contender.peak_gib is None and cuda else contender()
            except Exception as error:  # one of them must not end the measurement of the others
                print(f"  {name}: {type(error).__name__}: {error}"[:2000], file=sys.stderr, flush=True)
                contender.failed, contender.step, contender.ms = True, None, []
                continue
            if number or contender.whole:
                contender.ms += [1e3 * seconds for seconds in times]


def importance(name: str) -> int:
    """The place of a contender in a round, if time is short."""
    first = (
        "cmcl.fit, CMCL",
        "cmcl.fit, IE",
        "cmcl.fit, CMCL, sharing, sampled",
        "plain loop, IE",
        "one member",
    )
    return first.index(name) if name in first else 6 if name.startswith("Ensemble-PyTorch") else 5


def watched(contender: Contender) -> list[float]:
    """Its first measurement, with the peak of its memory."""
    if contender.whole:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    times = contender()
    contender.peak_gib = (torch.cuda.max_memory_reserved() - before) / 2**30
    return times


def measure_one(
    args: argparse.Namespace, name: str, members: int, examples: int, deadline: float
) -> list[dict]:
    """The rows of a network with so many members: of a step, or of a prediction of `examples`."""
    title, began = f"{name}, M = {members}" + (f", predict {examples}" * bool(examples)), time.perf_counter()
    if began > deadline:
        print(f"{title}: left out, no time left", file=sys.stderr, flush=True)
        return []
    gc.collect()
    cuda = torch.device(args.device).type == "cuda"
    try:
        work = Work(name, members, args.device, args.steps)
        found = predictors(work, examples) if examples else contenders(work)
    except Exception as error:
        print(f"{title}: {type(error).__name__}: {error}"[:2000], file=sys.stderr, flush=True)
        return []
    for contender in found.values():
        contender.target = args.target
    with fast_kernels() if cuda else nullcontext(), torch.inference_mode() if examples else nullcontext():
        run_rounds(found, args.rounds, deadline, cuda=cuda)
    where = torch.cuda.get_device_name() if cuda else f"CPU, {args.threads} thread"
    facts = {"torch": torch.__version__, "device": where, "commit": commit()}
    rows = []
    for label, one in found.items():
        if not one.ms:
            print(f"  {label}: left out" + ("" if one.failed else ", no time left"), file=sys.stderr)
            continue
        row = {"network": name, "members": members, "contender": label, "ms": one.ms}
        if examples:
            row["predict"] = examples
        elif cuda:
            row["first_step_s"] = one.first_step_s
        row |= {"peak_gib": one.peak_gib} if cuda else {}
        rows.append(row | facts)
    print(f"{title}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return rows


def measure(args: argparse.Namespace) -> None:
    """Print, and append to --out, the times of all contenders."""
    torch.set_num_threads(args.threads)
    reuse_memory()  # as `fit` does, so that no contender profits by its place
    rows, deadline, predicted = list[dict](), time.perf_counter() + args.seconds, set()
    for name, members in jobs(args):
        examples = [args.predict]
        if args.also_predict and name not in predicted:
            examples.append(args.also_predict)
        predicted.add(name)
        for number in examples:
            own = measure_one(args, name, members, number, deadline)
            rows += own
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in own)
    print(tables(rows))


def jobs(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Networks and numbers of members, in their order."""
    items = [item.partition(":") for item in args.network.split(",")]
    return [(name, int(m)) for name, _, one in items for m in (one or args.members).split(",")]


def tables(rows: list[dict]) -> str:
    """A table for each network and kind of work, and on a GPU what was wanted there."""
    kinds: dict[tuple, list[dict]] = {}
    for row in rows:
        kinds.setdefault((row["network"], row.get("predict"), row["device"]), []).append(row)
    parts = [table(own) for own in kinds.values()]
    steps = [row for row in rows if "predict" not in row and not row["device"].startswith("CPU")]
    return "\n\n".join(parts + ([goals(steps)] if steps else []))


def table(rows: list[dict]) -> str:
    """Medians in ms, and as ratios to the plain loop of as many members."""
    counts = sorted({row["members"] for row in rows})
    first, base = rows[0], "plain loop" if "predict" in rows[0] else "plain loop, IE"
    work = f"prediction of {first['predict']}" if "predict" in first else "step"
    lines = [f"{first['network']}, {first['device']}, torch {first['torch']}: ms per {work} (ratio)", ""]
    lines.append(f"{'':34}" + "".join(f"{f'M = {count}':>16}" for count in counts))
    medians = medians_of(rows)
    names = dict.fromkeys(row["contender"] for row in rows)
    for name in names:
        cells = []
        for count in counts:
            ms, plain = medians.get((name, count)), medians.get((base, count))
            cells.append(f"{ms:9.2f} ({ms / plain:.2f})" if ms and plain else f"{ms:9.2f}" if ms else "")
        lines.append(f"{name:34}" + "".join(f"{cell:>16}" for cell in cells))
    for key, title in {
        "first_step_s": "seconds until the first step",
        "peak_gib": "peak memory, GiB",
    }.items():
        # of others they depend on what ran before: autotuning, and memory that is kept
        fits = [row for row in rows if row["contender"].startswith("cmcl.fit")]
        found = {(r["contender"], r["members"]): r[key] for r in fits if r.get(key) is not None}
        lines += ["", title] if found else []
        for name in (name for name in names if any((name, count) in found for count in counts)):
            cells = [f"{found[name, count]:.2f}" if (name, count) in found else "" for count in counts]
            lines.append(f"{name:34}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def medians_of(rows: list[dict]) -> dict[tuple[str, int], float]:
    """(contender, M) -> ms."""
    return {(r["contender"], r["members"]): statistics.median(r["ms"]) for r in rows}


def goals(rows: list[dict]) -> str:
    """What was wanted on an H200, as far as it was measured."""
    ours, lines = "cmcl.fit, CMCL", ["wanted on an H200"]
    for network, bar in {"resnet20": 1.15, "smallcnn": 1.3}.items():
        ms = medians_of([row for row in rows if row["network"] == network])
        ratios = {
            "plain loop, IE / CMCL (at least 10)": ("plain loop, IE", ours),
            "plain PyTorch, CMCL / CMCL (at least 10)": ("plain PyTorch, CMCL", ours),
            f"CMCL with everything / IE (at most {bar})": (f"{ours}, sharing, sampled", "cmcl.fit, IE"),
        }
        if network == "resnet20" and (ours, 5) in ms:
            lines.append(f"- resnet20, M = 5, CMCL (at most 3.0 ms): {ms[ours, 5]:.2f} ms")
        for text, (above, below) in ratios.items():
            wanted = network == "resnet20" or "everything" in text
            if wanted and (above, 5) in ms and (below, 5) in ms:
                lines.append(f"- {network}, M = 5, {text}: {ms[above, 5] / ms[below, 5]:.2f}")
        each = ", ".join(f"{m}: {ms[name, m] / m:.3f}" for name, m in sorted(ms) if name == ours)
        limit = ", at M = 25 at most 0.6" if network == "resnet20" else ""
        lines += [f"- {network}, CMCL, ms per member by M (must not rise{limit}): {each}"] if each else []
    starts = [row for row in rows if row["contender"].startswith("cmcl.fit") and row["first_step_s"]]
    for row in sorted(starts, key=lambda row: -row["first_step_s"])[:3]:
        where = f"{row['network']}, M = {row['members']}, {row['contender']}"
        lines.append(f"- first step (within 25 s), slowest: {row['first_step_s']:.1f} s, {where}")
    return "\n".join(lines)


def sizes(args: argparse.Namespace) -> None:
    """Print the time of stacked members relative to members in turn, for some sizes."""
    torch.set_num_threads(args.threads)
    for inputs, hidden, layers, batch in product((16, 64), (32, 128, 256), (1, 2), (32, 128, 512)):

        def build(inputs: int = inputs, hidden: int = hidden, layers: int = layers) -> nn.Module:
            middle = [nn.Linear(hidden, hidden), nn.ReLU()] * (layers - 1)
            return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), *middle, nn.Linear(hidden, 10))

        NETWORKS["sizes"] = Network(build, (inputs,), 10, batch, 60, "1")
        work = Work("sizes", 5, "cpu")
        measured = [
            [min(cmcl_fit(work, members=members)[0]) for members in ("stacked", "sequential")]
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
    parser.add_argument("--network", default="mlp", help=f"some of {', '.join(NETWORKS)}; or NAME:MEMBERS")
    parser.add_argument("--members", default="1,2,5,10,25")
    parser.add_argument(
        "--predict", type=int, default=0, metavar="EXAMPLES", help="measure predictions, not steps"
    )
    parser.add_argument("--also-predict", type=int, metavar="EXAMPLES", help="after a network's first steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, help="the most of a measurement; two epochs of fit")
    parser.add_argument(
        "--target", type=float, default=0.0, help="seconds of a measurement, if fewer steps do"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is measured after so long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON lines are added to this file")
    args = parser.parse_args()
    if args.records in (["sizes"], ["start"]):
        {"sizes": sizes, "start": start}[args.records[0]](args)
    elif args.records:
        print(tables([json.loads(line) for line in Path(args.records[-1]).read_text().splitlines()]))
    elif unknown := {name for name, _ in jobs(args)} - NETWORKS.keys():
        parser.error(f"--network must name some of {', '.join(NETWORKS)}. Got {', '.join(unknown)}.")
    else:
        measure(args)


if __name__ == "__main__":
    main()
