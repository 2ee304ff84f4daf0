"""Several processes train one ensemble: in every mesh they give the losses and weights of one process.

The processes are real ones, started by torchrun. They talk by gloo, on the CPU or sharing one GPU; NCCL and
several GPUs are not tested. `PYTHONPATH=src python tests/test_mesh.py` writes the comparison to
results/mesh.txt.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import cmcl
import mesh_cases
from cmcl import Ensemble, Options, confident_oracle_loss, share_features
from cmcl.metrics import Accumulator
from cmcl.pretrained import SharedStemEnsemble
from cmcl.training import checkpoint, preflight
from cmcl.training.mesh import ALONE, Mesh, Shape, Sizes, Traffic, choose, parse, slices, traffic
from mesh_cases import CASES, MESHES, M, Plain, ensemble

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
EXACT = [case for case in CASES if case not in ("dropout", "bf16")]
QUICK = ["ie", "cmcl-shared-sampled", "uneven-loader", "batchnorm", "syncbatchnorm", "auto"]


def torchrun(processes, *command, restarts=0, **more):
    """The command in so many processes."""
    own = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    own += ["--max-restarts", str(restarts), "--master-port", "0", "--rdzv-endpoint", "localhost:0"]
    own += ["--rdzv-backend", "c10d"]
    return [*own, *map(str, command)]


def run(*command, environment=ENVIRONMENT, **more):
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


class Outcomes:
    """What processes make of cases, trained once for all tests."""

    def __init__(self, folder, device="cpu"):
        self.folder, self.device, self.trained = folder, device, set()

    def train(self, processes, cases):
        new = [case for case in cases if (processes, case) not in self.trained]
        if new:
            script = ROOT / "tests" / "mesh_cases.py"
            code, out, err = run(*torchrun(processes, script, self.device, self.folder, *new))
            assert code == 0, out + err
            self.trained |= {(processes, case) for case in new}

    def of(self, case, mesh):
        return torch.load(self.folder / f"{case}--{mesh}.pt", map_location="cpu")

    def checkpoint_of(self, case, mesh):
        return checkpoint.Checkpoints(self.folder / f"{case}--{mesh}" / "checkpoints").latest()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return Outcomes(tmp_path_factory.mktemp("mesh"))


@cache
def alone(case):
    folder = tempfile.mkdtemp()
    return mesh_cases.train(case, out=Path(folder)), checkpoint.Checkpoints(
        Path(folder) / "checkpoints"
    ).latest()


def numbers(row):
    """The numbers of a row of telemetry, but for the speed."""
    kept = {key: value for key, value in row.items() if key != "images_per_second"}
    return torch.cat([torch.tensor(value, dtype=torch.float64).flatten() for value in kept.values()])


def largest_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    pairs = ((ours[key].double(), theirs[key].double()) for key in ours)
    # two infinities are equal; the maximum of a tensor is NaN if any number in it is
    return torch.stack([torch.where(a == b, 0.0, (a - b).abs()).max() for a, b in pairs]).max().item()


def differences(outcome, expected):
    """The largest differences of losses (all numbers of telemetry) and of weights."""
    assert len(outcome["rows"]) == len(expected["rows"])
    rows = [
        (numbers(a) - numbers(b)).abs().max() for a, b in zip(outcome["rows"], expected["rows"], strict=True)
    ]
    return float(max(rows)), largest_difference(outcome["weights"], expected["weights"])


def check_equal(outcomes, case, mesh):
    outcome, (expected, checkpoint_alone) = outcomes.of(case, mesh), alone(case)
    losses, weights = differences(outcome, expected)
    assert losses < 1e-5
    assert weights < 1e-5
    assert outcome["scores"] == expected["scores"]
    assert outcome["overlap_errors"] == expected["overlap_errors"]
    assert outcome["steps"] == expected["steps"] >= mesh_cases.STEPS
    ours = outcomes.checkpoint_of(case, mesh)
    assert ours.facts.model_copy(update={"seconds": 0.0}) == checkpoint_alone.facts.model_copy(
        update={"seconds": 0.0}
    )
    assert largest_difference(ours.tensors, checkpoint_alone.tensors) < 1e-4, "moments, sums, random states"


class TestTheResultOfOneProcess:
    """Losses, weights, errors and the checkpoint's file after 20 steps."""

    @pytest.mark.parametrize("case", QUICK)
    @pytest.mark.parametrize("mesh", MESHES[2])
    def test_two_processes(self, outcomes, case, mesh):
        outcomes.train(2, QUICK)
        check_equal(outcomes, case, mesh)

    @pytest.mark.slow
    @pytest.mark.parametrize("case", EXACT)
    @pytest.mark.parametrize(("processes", "mesh"), [(n, mesh) for n in MESHES for mesh in MESHES[n]])
    def test_every_mesh(self, outcomes, case, processes, mesh):
        outcomes.train(processes, EXACT)
        check_equal(outcomes, case, mesh)

    @pytest.mark.slow
    def test_what_depends_on_the_mesh_still_learns(self, outcomes):
        """Dropout draws other numbers, and bf16 rounds elsewhere."""
        outcomes.train(4, ["dropout", "bf16"])
        for case in ("dropout", "bf16"):
            expected = alone(case)[0]["rows"]
            for mesh in MESHES[4]:
                rows = outcomes.of(case, mesh)["rows"]
                assert rows[-1]["loss"] < rows[0]["loss"]
                assert rows[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.25)


ON_GPU = [case for case in EXACT if case != "muon"]  # which computes in bf16 there


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    """The outcomes of two processes on one GPU."""
    outcomes = Outcomes(tmp_path_factory.mktemp("gpu"), "cuda")
    outcomes.train(2, ON_GPU)
    return outcomes


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnOneGPU:
    """Two processes share a GPU and exchange by gloo: all but NCCL, which allows one process a GPU."""

    @pytest.mark.parametrize("case", ON_GPU)
    def test_the_result_of_one_process(self, on_gpu, case, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        expected = mesh_cases.train(case, **mesh_cases.on_gpu())
        expected["weights"] = {name: tensor.cpu() for name, tensor in expected["weights"].items()}
        for mesh in MESHES[2]:
            losses, weights = differences(on_gpu.of(case, mesh), expected)
            assert losses < 1e-4
            assert weights < 1e-4


class TestBytes:
    def test_of_a_step_worked_by_hand(self):
        """5 members, batch 12, 100 weights, 7 shared values, one BatchNorm of 4 channels; 2 x 2 processes."""
        found = traffic(Shape(2, 2), 5, 12, Sizes(100, 4 * 7, (4,)))
        # a process has up to 3 members and 6 examples
        assert found.scores == 5 * 6 * 4
        assert found.telemetry == (4 * 5 * 12 + 1 + 1) * 4  # task, KL, entropy, v; the loss; the norm
        assert found.features == 2 * (5 * 6 * 7) * 4  # there and back
        assert found.statistics == 2 * 3 * (4 + 1 + 4) * 4  # sums and count, then squares; there and back
        assert found.gradients == 3 * 100 * 4
        assert found.total == sum(found)

    def test_along_one_axis_less_travels(self):
        sizes = Sizes(100, 7, (4,))
        assert traffic(Shape(2, 1), 5, 12, sizes)[3:] == (0, 0), "members: no gradients"
        assert traffic(Shape(1, 2), 5, 12, sizes)._replace(telemetry=0, statistics=0, gradients=0) == (0,) * 5
        assert traffic(Shape(1, 1), 5, 12, sizes).total == 0

    @pytest.mark.parametrize("mesh", MESHES[2])
    def test_as_measured(self, outcomes, mesh):
        """The formula against what the collectives of 20 steps were given."""
        cases = ("ie", "cmcl-shared-sampled", "batchnorm", "bf16")
        outcomes.train(2, [*QUICK, "bf16"])
        for case in cases:
            measured, per_step = outcomes.of(case, mesh)["bytes"]
            assert measured == mesh_cases.STEPS * per_step


class TestTheMesh:
    def test_parts_are_as_equal_as_possible(self):
        assert slices(5, 2) == [slice(0, 3), slice(3, 5)]
        for count in range(1, 12):
            for parts in range(1, count + 1):
                lengths = [len(range(count)[part]) for part in slices(count, parts)]
                assert sum(lengths) == count
                assert max(lengths) - min(lengths) <= 1

    def test_names(self):
        assert parse("members=2,data=2", 4) == Shape(2, 2)
        assert parse("members=4", 4) == Shape(4, 1)
        assert parse("data=2", 4) == Shape(2, 2)
        assert str(Shape(2, 3)) == "members=2,data=3"
        with pytest.raises(ValueError, match=r"as many places as there are processes, 4\. Got members=3"):
            parse("members=3,data=2", 4)
        for text in ("members", "data=2,members=2", "members=0", "2x2"):
            with pytest.raises(ValueError, match="must look like members=2,data=2"):
                Options(mesh=text)

    def test_the_choice_has_the_least_work_then_the_fewest_bytes(self):
        sizes = Sizes(weights=1000)
        assert choose(4, 4, 128, sizes) == Shape(4, 1), "no gradients travel"
        assert choose(2, 5, 128, sizes) == Shape(1, 2), "3 members of 5 would be more than half"
        assert choose(4, 8, 128, Sizes(weights=1000, features=10**6)) == Shape(1, 4), (
            "features outweigh weights"
        )
        assert choose(8, 4, 4, sizes).members == 4
        with pytest.raises(ValueError, match="at most as many as the members times the batch, 1 x 2"):
            choose(8, 1, 2, sizes)

    def test_alone_it_does_nothing(self):
        assert ALONE.part(5, 12) is None
        assert ALONE.members(5) == slice(0, 5)
        assert ALONE.collected("x") == ["x"]
        assert ALONE.largest(3) == 3
        x = torch.ones(2)
        assert ALONE.norm(x) is x
        assert ALONE.shipped == 0


class Given:
    """A part of a batch whose other scores are known: what a process sees, without processes."""

    def __init__(self, shape, members, examples, scores):
        self.shape, self.members, self.examples, self.scores = shape, members, examples, scores

    def of_all_members(self, own):
        assert own.equal(self.scores[self.members, self.examples]), "bit-identical to those of the whole"
        return self.scores[:, self.examples]


class TestAPartOfTheFormula:
    """The parts of a loss, and of what is shared, are those of the whole."""

    @pytest.mark.parametrize(
        "options",
        [
            {"overlap": 2},
            {"labels": "sampled", "samples": 3},
            {"rule": "relaxed", "overlap": 2, "epsilon": 0.2},
            {"rule": "annealed", "overlap": 1, "temperature": 0.7},
            {"overlap": torch.tensor(3)},
        ],
    )
    def test_losses_add_up(self, options):
        logits, targets = torch.randn(5, 12, 4), torch.arange(12) % 4
        whole = confident_oracle_loss(logits, targets, **options, generator=torch.Generator().manual_seed(7))
        scores = (whole.task - 0.25 * whole.kl).detach()
        total = 0.0
        for members in slices(5, 2):
            for examples in slices(12, 3):
                part = confident_oracle_loss(
                    logits[members, examples],
                    targets[examples],
                    **options,
                    generator=torch.Generator().manual_seed(7),
                    part=Given((5, 12), members, examples, scores),
                )
                assert part.assignment.equal(whole.assignment[members, examples])
                assert part.weights.equal(whole.weights[members, examples])
                total += part.total * 4 / 12
        torch.testing.assert_close(total, whole.total)

    @pytest.mark.parametrize("mode", ["sampled", "expected"])
    def test_features_are_shared_as_in_the_whole(self, mode):
        h = torch.randn(5, 12, 3, 2)
        whole = share_features(h, mode=mode, generator=torch.Generator().manual_seed(7))
        for members in slices(5, 4):
            for examples in slices(12, 2):
                part = share_features(
                    h[:, examples],
                    mode=mode,
                    generator=torch.Generator().manual_seed(7),
                    part=Given((5, 12), members, examples, None),
                )
                for ours, theirs in zip(part, whole[members], strict=True):
                    assert ours.equal(theirs[examples])

    def test_metrics_merge(self):
        probs, targets = torch.rand(3, 30, 4).softmax(2), torch.arange(30) % 4
        whole, parts = Accumulator(curves=True), [Accumulator(curves=True) for _ in range(3)]
        whole.update(probs, targets)
        merged = Accumulator(curves=True)
        for part, examples in zip(parts, slices(30, 2), strict=False):  # one stays empty
            part.update(probs[:, examples], targets[examples])
        for part in parts:
            merged.merge(part)
        assert merged.compute() == pytest.approx(whole.compute())
        assert merged.risks.equal(whole.risks)


class TestRefused:
    """Before anything is changed."""

    @pytest.fixture(autouse=True)
    def four(self, monkeypatch):
        monkeypatch.setattr(preflight, "launched", lambda: 4)

    def plan(self, own=None, train=None, recipe=mesh_cases.RECIPE, **options):
        own = own or ensemble()
        train = train or mesh_cases.data()
        how = {"recipe": recipe, "seed": 0, "task": None, "ignore_index": None}
        return preflight.preflight(own, train, None, **how, options=Options(device="cpu", **options))

    def test_what_fits(self):
        assert self.plan(mesh="members=2,data=2").mesh == Shape(2, 2)
        assert isinstance(self.plan().traffic, Traffic)
        assert self.plan().mesh == Shape(1, 4), "3 of 12 examples x 5 members are less than 2 members x 12"

    def test_more_places_than_members(self, monkeypatch):
        monkeypatch.setattr(preflight, "launched", lambda: 6)
        with pytest.raises(ValueError, match=r"at most 5 places for members\. Got members=6"):
            self.plan(mesh="members=6")

    def test_a_place_for_every_member(self, monkeypatch):
        monkeypatch.setattr(preflight, "launched", lambda: 5)
        assert self.plan(mesh="members=5").mesh == Shape(5, 1)

    def test_a_batch_with_too_few_examples(self):
        last = DataLoader(TensorDataset(*mesh_cases.data(50)), 12)  # the last batch has 2
        with pytest.raises(ValueError, match=r"at most 2 places along data.*drop_last"):
            self.plan(train=last, mesh="data=4")
        with pytest.raises(ValueError, match="at most 2 places along data"):
            self.plan(recipe=replace(mesh_cases.RECIPE, accumulate=6), mesh="data=4")

    def test_a_distributed_sampler(self):
        dataset = TensorDataset(*mesh_cases.data(48))
        own = DataLoader(dataset, 12, sampler=DistributedSampler(dataset, num_replicas=4, rank=0))
        with pytest.raises(TypeError, match=r"must yield whole batches.*DistributedSampler"):
            self.plan(train=own)

    def test_weights_that_members_share(self):
        own = SharedStemEnsemble(Plain, M, stem="stem")
        with pytest.raises(ValueError, match="members must not share trained weights"):
            self.plan(own, mesh="members=4")
        self.plan(own, mesh="data=4")
        self.plan(SharedStemEnsemble(Plain, M, stem="stem", freeze=True), mesh="members=4")

    def test_a_batch_norm_of_its_own(self):
        class Own(nn.BatchNorm2d):
            def forward(self, x):
                return super().forward(x).relu()

        class OwnSync(nn.SyncBatchNorm):
            def forward(self, x):
                return super().forward(x).relu()

        def network(norm=Own):
            return nn.Sequential(nn.Conv2d(1, 2, 3), norm(2), nn.Flatten(), nn.Linear(32, 4))

        with pytest.raises(ValueError, match=r"BatchNorm must compute as torch's.*Got Own"):
            self.plan(Ensemble(network, M), mesh="data=4")
        self.plan(Ensemble(network, M), mesh="members=4")
        with pytest.raises(ValueError, match=r"SyncBatchNorm must compute as torch's.*Got OwnSync"):
            self.plan(Ensemble(lambda: network(OwnSync), M), mesh="members=4")

    @pytest.mark.parametrize("name", ["capture", "compile"])
    def test_a_cuda_graph_and_a_compiler(self, name):
        with pytest.raises(ValueError, match="capture and compile must be left out with several processes"):
            self.plan(mesh="members=4", **{name: True})


def test_a_mesh_without_processes_says_how_to_start_them():
    with pytest.raises(ValueError, match=r"there are processes, 1.*Start 4 processes by torchrun"):
        mesh_cases.train("ie", "members=2,data=2")


GROUP = """
import torch.distributed as dist
from cmcl.training.mesh import Mesh, Shape, group_on_cpu
from torch import device
dist.init_process_group("cuda:gloo")  # as with "nccl": none for tensors on the CPU
try:
    Mesh(Shape(2, 1), device("cpu"))
except ValueError as error:
    print(f"{error}\\n", end="")  # in one call, or lines of two processes mix
mesh = Mesh(Shape())
mesh.size, mesh.groups["cpu"] = 2, group_on_cpu()
print(f"{mesh.largest(dist.get_rank())} {mesh.collected(dist.get_rank())}\\n", end="")
dist.destroy_process_group()
"""


def test_a_group_of_the_users_that_carries_nothing_on_the_cpu(tmp_path):
    """What is no tensor of the run travels on the CPU all the same."""
    (tmp_path / "group.py").write_text(GROUP)
    code, out, err = run(*torchrun(2, tmp_path / "group.py"))
    assert code == 0, err
    assert out.count("1 [0, 1]\n") == 2
    assert (
        out.count("the process group must carry tensors on cpu. Got cuda:gloo. Call init_process_group") == 2
    )


LEFT = """
import atexit, sys
from pathlib import Path
def threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print(f"left: {[name for name in names if 'gloo' in name]}\\n", end="")
atexit.register(threads)  # runs last
import mesh_cases
import torch.distributed as dist
if sys.argv[1] == "own":
    dist.init_process_group("gloo")
mesh_cases.train("ie", "members=2")
if sys.argv[1] == "own":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("group", ["own", "ours"])
def test_no_thread_is_left_when_python_ends(tmp_path, group):
    """One of gloo's that needs Python then aborts a process whose training is done."""
    (tmp_path / "left.py").write_text(LEFT)
    code, out, err = run(*torchrun(2, tmp_path / "left.py", group))
    assert code == 0, err
    assert out.count("left: []\n") == 2, out


SILENT = """
import os, time, torch
from datetime import timedelta
from cmcl.training import mesh
mesh.TIMEOUT = timedelta(seconds=15)
place = mesh.Mesh(mesh.Shape(2, 2), torch.device("cpu"))
began, axis = time.monotonic(), {1: "members", 2: "data"}.get(place.rank)  # along which process 3 is
if axis:
    try:
        place.total(torch.ones(1), axis)
    except mesh.ProcessLost:
        print(f"{axis}: {time.monotonic() - began < 30}\\n", end="", flush=True)
time.sleep(max(0, began + 40 - time.monotonic()))
os._exit(0)
"""


@pytest.mark.slow
def test_a_process_that_falls_silent_is_noticed_along_each_axis(tmp_path):
    (tmp_path / "silent.py").write_text(SILENT)
    code, out, err = run(*torchrun(4, tmp_path / "silent.py"))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["data: True", "members: True"]


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cuda", 3)])
def test_a_gpu_without_a_number_is_the_current_one(monkeypatch, device, index):
    """As in a process group of the user's, started without torchrun."""

    def join(device):
        raise InterruptedError

    chosen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("cmcl.training.mesh._join", join)
    with pytest.raises(InterruptedError):
        Mesh(Shape(2, 1), torch.device(device))
    assert chosen == [index]


COPIED = """
import torch
from cmcl.training.mesh import Mesh, Shape
mesh = Mesh(Shape(2, 1), torch.device("cpu"))
image = torch.full((4, 1, 3, 3), float(mesh.rank)).to(memory_format=torch.channels_last)
column = torch.arange(6).reshape(2, 3).T * (1 - mesh.rank)
mesh.copy([image, column])
assert image.unique().tolist() == [0.0]
assert column.stride() == (1, 3) and column.T.tolist() == [[0, 1, 2], [3, 4, 5]]
del mesh  # with its groups, before torch ends the communication
"""


def test_tensors_are_copied_in_their_memory_layout(tmp_path):
    """Weights of one input channel are contiguous and channels last, with other strides."""
    (tmp_path / "copied.py").write_text(COPIED)
    code, _, err = run(*torchrun(2, tmp_path / "copied.py"))
    assert code == 0, err


# Faults: the processes train in steps that wait a little, so that there is time to strike.

SLOW_RUN = """
import sys, time, mesh_cases
from dataclasses import replace
from pathlib import Path
from cmcl.training import batches, loop
out, steps, pause, mesh, case = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5]
recipe, *rest = mesh_cases.CASES[case]
mesh_cases.CASES[case] = (replace(recipe, steps=steps, epochs=None), *rest)
advance = batches.Resident.advance
def slowly(self):
    time.sleep(pause)
    return advance(self)
batches.Resident.advance = slowly
from cmcl.training.checkpoint import last_step
resume = "resume" in sys.argv and last_step(Path(out)) is not None
mesh_cases.train(case, None if mesh == "none" else mesh, out=out, resume=resume, checkpoint_seconds=0.0)
"""


@pytest.fixture
def slow_run(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_RUN)
    return tmp_path / "slow.py"


def children(pid):
    """The processes that torchrun started."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in found.read_text().split()] if found.exists() else []


def wait_for(condition, launcher, log):
    """Wait until it is true; fail if torchrun ends before."""
    while not (found := condition()):
        assert launcher.poll() is None, Path(log).read_text()
        time.sleep(0.02)
    return found


def rank_of(pid):
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)


def workers(launcher):
    """The process of each rank."""
    return {rank: pid for pid in children(launcher.pid) if (rank := rank_of(pid)) is not None}


def lives(pid):
    """Whether a process has not ended; one that torchrun has not asked about yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_done(folder):
    return checkpoint.last_step(Path(folder)) or 0


def final_tensors(folder):
    return checkpoint.Checkpoints(Path(folder) / "checkpoints").latest()


def uninterrupted(folder, steps, case):
    recipe, *rest = CASES[case]
    CASES[case] = (replace(recipe, steps=steps, epochs=None), *rest)
    try:
        mesh_cases.train(case, out=folder)
    finally:
        CASES[case] = (recipe, *rest)
    return final_tensors(folder)


def killed_run(folder, script, case, mesh, steps, kills):
    """A run in which random processes are killed by SIGKILL, and which torchrun restarts; tells about each."""
    chance, told = random.Random(1), []
    processes = math.prod(parse(mesh, {m: n for n in MESHES for m in MESHES[n]}[mesh]))
    command = torchrun(processes, script, folder, steps, 0.02, mesh, case, restarts=kills)
    log = (Path(folder).parent / f"{Path(folder).name}.log").open("w")
    launcher = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        for _ in range(kills):
            before = steps_done(folder)
            wait_for(lambda b=before: steps_done(folder) >= b + 5, launcher, log.name)
            alive, rank = workers(launcher), chance.randrange(processes)
            time.sleep(chance.uniform(0, 0.05))
            struck = time.monotonic()
            os.kill(alive[rank], signal.SIGKILL)
            step = steps_done(folder)
            wait_for(lambda a=alive: not any(map(lives, a.values())), launcher, log.name)
            told.append((rank, step, time.monotonic() - struck))
        assert launcher.wait() == 0, Path(log.name).read_text()
    finally:
        launcher.kill()
        log.close()
    return told


class TestFaults:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("case", "mesh"), [("ema", "members=2,data=1"), ("augmented", "members=1,data=2")]
    )
    def test_killed_and_restarted_by_torchrun(self, tmp_path, slow_run, case, mesh):
        steps, kills = 60, 3
        told = killed_run(tmp_path / "killed", slow_run, case, mesh, steps, kills)
        assert len(told) == kills
        assert max(seconds for *_, seconds in told) < 60, "the others stop within a minute"
        ours, theirs = final_tensors(tmp_path / "killed"), uninterrupted(tmp_path / "whole", steps, case)
        assert ours.facts.step == theirs.facts.step == steps
        assert largest_difference(ours.tensors, theirs.tensors) < 1e-4

    @pytest.mark.slow
    def test_without_restarts_the_others_say_what_happened(self, tmp_path, slow_run):
        with (tmp_path / "log").open("w") as log:
            command = torchrun(2, slow_run, tmp_path / "out", 10_000, 0.02, "members=2,data=1", "ie")
            launcher = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
            wait_for(lambda: steps_done(tmp_path / "out"), launcher, log.name)
            os.kill(workers(launcher)[1], signal.SIGKILL)
            assert launcher.wait() != 0
        assert "ProcessLost: process 0 of 2 lost the others" in (tmp_path / "log").read_text()

    @pytest.mark.slow
    def test_a_signal_stops_all_at_one_step_and_another_mesh_resumes(self, tmp_path, slow_run):
        """Stopped in 2 processes by a signal to one of them, resumed in 4, stopped, finished in 1."""
        out, steps, case = tmp_path / "out", 60, "ema"
        for number, mesh in ((2, "members=2,data=1"), (4, "members=2,data=2")):
            before = steps_done(out)
            command = torchrun(number, slow_run, out, steps, 0.05, mesh, case, "resume")
            with (tmp_path / f"log{number}").open("w") as log:
                launcher = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
                wait_for(lambda b=before: steps_done(out) >= b + 5, launcher, log.name)
                os.kill(workers(launcher)[number - 1], signal.SIGTERM)
                assert launcher.wait() != 0
            assert (
                f"Interrupted: stopped by SIGTERM at step {checkpoint.last_step(out)} of {steps}"
                in (tmp_path / f"log{number}").read_text()
            )
            assert before < checkpoint.last_step(out) < steps
        code, _, err = run(sys.executable, slow_run, out, steps, 0, "none", case, "resume")
        assert code == 0, err
        ours, theirs = final_tensors(out), uninterrupted(tmp_path / "whole", steps, case)
        assert largest_difference(ours.tensors, theirs.tensors) < 1e-4

    @pytest.mark.slow
    def test_what_fails_in_one_process_is_raised_in_all(self, tmp_path, slow_run):
        for _ in range(2):  # the second finds the run of the first
            command = torchrun(2, slow_run, tmp_path / "out", 5, 0, "members=2,data=1", "ie")
            code, _, err = run(*command)
        assert code != 0
        assert err.count("must be a new folder. It holds a run at step 5") >= 2

    @pytest.mark.slow
    def test_an_evaluation_that_takes_longer_than_a_process_may_hang(self, tmp_path):
        """Process 0 evaluates the first seed while the others wait to train the second."""
        script = tmp_path / "seeds.py"
        script.write_text("""
import sys, time
from datetime import timedelta
from cmcl import Options
from cmcl.reproduction import runner
from cmcl.training import mesh
mesh.TIMEOUT, pauses = timedelta(seconds=20), [0, 25]
evaluate = runner._evaluate
def slowly(*given):
    time.sleep(pauses.pop())
    return evaluate(*given)
runner._evaluate = slowly
options = Options(quiet=True, device="cpu", mesh="members=2")
records = runner.run("digits-ie", (0, 1), out=sys.argv[1], options=options, steps=5, test_limit=10)
print([record.seed for record in records])
""")
        code, out, err = run(*torchrun(2, script, tmp_path / "runs"))
        assert code == 0, err
        assert sorted(out.splitlines()) == ["[0, 1]", "[]"]

    @pytest.mark.slow
    def test_a_loss_that_is_not_finite_stops_all(self, tmp_path):
        """NaN in an input that one process alone sees."""
        script = tmp_path / "nan.py"
        script.write_text("""
import sys, torch, mesh_cases
from cmcl.training import Diverged
recipe, network, (images, targets), more = mesh_cases.CASES["ie"]
images[7] = float("nan")
mesh_cases.CASES["ie"] = recipe, network, (images, targets), more
try:
    mesh_cases.train("ie", sys.argv[1])
except Diverged as error:
    print(error)
""")
        images, targets = mesh_cases.data()
        images[7] = float("nan")
        options = Options(quiet=True, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the NaN
            with pytest.raises(cmcl.Diverged) as expected:
                cmcl.fit(ensemble(), (images, targets), recipe=CASES["ie"][0], seed=3, options=options)
        for mesh in MESHES[2]:
            code, out, err = run(*torchrun(2, script, mesh))
            assert code == 0, err
            assert out.count(str(expected.value)) == 2, out + err


class TestTheCommandLine:
    """`torchrun -m cmcl train` gives the record of one process, and says what travels."""

    TRAIN = ("-m", "cmcl", "train", "digits-cmcl", "--steps", "25", "--set", "network_options.dropout=0")
    TRAIN += ("--sharing", "--labels", "sampled")

    @pytest.mark.slow
    @pytest.mark.parametrize(("processes", "mesh"), [(n, mesh) for n in (2, 4) for mesh in MESHES[n]])
    def test_the_record_of_one_process(self, tmp_path, processes, mesh):
        code, _, err = run(sys.executable, *self.TRAIN, "--quiet", "--out", tmp_path / "alone")
        assert code == 0, err
        command = torchrun(processes, *self.TRAIN, "--mesh", mesh, "--out", tmp_path / "mesh")
        code, out, err = run(*command)
        assert code == 0, err
        assert f"{processes} processes, {mesh}: " in err
        assert err.count("bytes a step") == out.count("top-1") == 1, "process 0 alone prints"
        ours, theirs = (
            json.loads(next((tmp_path / n).glob("*/record.json")).read_text()) for n in ("mesh", "alone")
        )
        assert (ours["mesh"], theirs["mesh"]) == (mesh, None)
        errors, scores, moved = record_differences(ours, theirs)
        assert errors <= 1.01, "rounding may decide about an example whose two best classes are equal"
        assert scores < 1e-3
        assert moved <= 3, "an entropy on the border of two bins"

    def test_no_other_command_runs_in_several_processes(self):
        several = ENVIRONMENT | {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0"}
        code, _, err = run(sys.executable, "-m", "cmcl", "list", environment=several)
        assert (code, err) == (
            2,
            "cmcl: torchrun must start `cmcl train`. Got list. Start it without torchrun.\n",
        )

    @pytest.mark.slow
    def test_a_mistake_is_said_once(self, tmp_path):
        code, _, err = run(*torchrun(2, "-m", "cmcl", "train", "digits-cmcI", "--out", tmp_path))
        assert code != 0
        assert err.count("cmcl: ") == 1


SAME = ("recipe", "recipe_hash", "seed", "full_length", "full_test", "test_examples", "checksums", "steps")


def record_differences(ours, theirs):
    """The largest difference of errors, in examples; of scores; the examples in another bin of entropy."""
    assert ours.keys() == theirs.keys()
    assert all(ours[key] == theirs[key] for key in SAME)

    def flat(value):
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return [value] if parts is None else [number for part in parts for number in flat(part)]

    def largest(*pairs):
        return max(abs(a - b) for one, other in pairs for a, b in zip(flat(one), flat(other), strict=True))

    errors = largest(*((ours[key], theirs[key]) for key in ("errors", "members")))
    scores = largest(
        *((ours["calibration"][key], theirs["calibration"][key]) for key in ("nll", "brier", "aurc"))
    )
    bins = flat(ours["entropy"]), flat(theirs["entropy"])
    errors *= ours["test_examples"] / 100
    return errors, scores, sum(abs(a - b) for a, b in zip(*bins, strict=True)) / 2


def main():
    lines = [
        "$ PYTHONPATH=src python tests/test_mesh.py",
        f"torch {torch.__version__}, gloo on one CPU; networks of tests/mesh_cases.py, M={M}, 20 steps or more",
        "largest difference from one process: of losses and all telemetry, of weights",
        "",
        "| case | mesh | telemetry | weights | errors |",
        "|---|---|--:|--:|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        found = Outcomes(Path(name))
        for processes, meshes in MESHES.items():
            found.train(processes, EXACT)
            for case in EXACT:
                for mesh in meshes:
                    outcome, expected = found.of(case, mesh), alone(case)[0]
                    losses, weights = differences(outcome, expected)
                    same = "equal" if outcome["scores"] == expected["scores"] else "DIFFERENT"
                    lines.append(f"| {case} | {mesh} | {losses:.1e} | {weights:.1e} | {same} |")
        lines += ["", "Processes killed by SIGKILL, restarted by torchrun --max-restarts, 60 steps:", ""]
        lines += [
            "| case | mesh | killed | at step | all others had stopped after |",
            "|---|---|--:|--:|--:|",
        ]
        script = Path(name) / "slow.py"
        script.write_text(SLOW_RUN)
        for case, mesh in (
            ("ema", "members=2,data=1"),
            ("augmented", "members=1,data=2"),
            ("ema", "members=2,data=2"),
        ):
            folder = Path(name) / f"killed-{case}-{mesh}"
            for rank, step, seconds in killed_run(folder, script, case, mesh, 60, 3):
                lines.append(f"| {case} | {mesh} | process {rank} | {step} | {seconds:.1f} s |")
            whole = uninterrupted(Path(name) / f"whole-{case}-{mesh}", 60, case)
            largest = largest_difference(final_tensors(folder).tensors, whole.tensors)
            lines.append(
                f"| {case} | {mesh} | largest difference of the end from an uninterrupted run | | {largest:.1e} |"
            )
    text = "\n".join(lines) + "\n"
    (ROOT / "results" / "mesh.txt").write_text(text)
    print(text)  # noqa: T201


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
