"""The training loop at its edges: strange networks, uneven batches, signals to a whole group of processes."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from cmcl import Ensemble, Recipe, fit, record
from cmcl._messages import private_torch
from cmcl.data import Dataset, from_arrays
from cmcl.data.dataset import stratified_subset
from cmcl.data.transforms import MeanStd
from cmcl.training import Diverged, Interrupted, loop
from cmcl.training.batches import Loaded
from cmcl.training.cuda import Snapshot, check_in_place
from cmcl.training.monitor import TelemetryFile
from cmcl.training.preflight import preflight
from cmcl.training.step import TrainState
from test_train import (
    CLASSES,
    QUIET,
    ROOT,
    before_step,
    data,
    go,
    identical,
    interrupt,
    small,
    stopped,
    weights,
)

LINEAR = Recipe(members=2, epochs=2, batch_size=8, lr=0.1)


def dataset(n=40):
    images, targets = data(n)
    return Dataset(images, targets, tuple("abcd"))


def linear(*more):
    return nn.Sequential(nn.Flatten(), nn.Linear(25, CLASSES), *more)


def apart(network=linear, members=2):
    torch.manual_seed(0)
    return Ensemble(network, members)


class TestExamples:
    def test_so_many_are_learned_from(self):
        limited, small_set = apart(), apart()
        recipe = replace(LINEAR, subset=16)
        result = fit(limited, dataset(), recipe=recipe, options=QUIET)
        assert result.steps == 4
        fit(small_set, stratified_subset(dataset(), 16), recipe=LINEAR, options=QUIET)
        assert identical(weights(limited), weights(small_set))
        assert stratified_subset(dataset(), 16).targets.bincount().tolist() == [4, 4, 4, 4]

    def test_as_many_as_there_are(self):
        assert fit(apart(), data(16), recipe=replace(LINEAR, subset=16), options=QUIET).steps == 4

    @pytest.mark.parametrize(
        "train", [data(), DataLoader(TensorDataset(*data()), 8)], ids=["tuple", "loader"]
    )
    def test_of_what_is_no_dataset(self, train):
        with pytest.raises(TypeError, match=r"train must be a Dataset for recipe.subset. Got"):
            fit(apart(), train, recipe=replace(LINEAR, subset=16), options=QUIET)


class TestRows:
    def test_every_example_weighs_the_same(self):
        """Batches of 12, 12, 12 and 4: a mean over examples, not over batches."""
        frozen = replace(LINEAR, epochs=1, lr=1e-30)
        rows = [
            fit(apart(), DataLoader(TensorDataset(*data()), size), recipe=frozen, options=QUIET).rows
            for size in (12, 40)
        ]
        for name in ("loss", "task", "kl", "nonspecialist_entropy"):
            assert rows[0][0][name] == pytest.approx(rows[1][0][name], rel=1e-5), name

    def test_adversarial_loss_is_all_that_is_minimised(self):
        recipe = replace(LINEAR, epochs=1, method="ie", batch_size=40, lr=1e-30)
        plain, attacked = (
            fit(apart(), data(), recipe=replace(recipe, adversarial=step), options=QUIET).rows[0]["loss"]
            for step in (0.0, 1e-9)
        )
        assert attacked == pytest.approx(2 * plain, rel=1e-4), "the same images twice"

    def test_speed_counts_images_whoever_makes_the_batches(self, monkeypatch):
        """A DataLoader with a batch_sampler has no batch size."""
        monkeypatch.setattr("cmcl.training.loop.time.perf_counter", iter(range(10**6)).__next__)
        sampler = BatchSampler(SequentialSampler(range(40)), 8, drop_last=False)
        loaders = [
            DataLoader(TensorDataset(*data()), 8),
            DataLoader(TensorDataset(*data()), batch_sampler=sampler),
        ]
        speeds = [
            fit(apart(), loader, recipe=LINEAR, options=QUIET).rows[0]["images_per_second"]
            for loader in loaders
        ]
        assert speeds[0] == speeds[1] > 0


class Masked(nn.Module):
    """One class can never be the answer: its logit is minus infinity."""

    def __init__(self):
        super().__init__()
        self.net = linear()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

    def forward(self, x):
        return self.net(x) + self.mask


class Averaging(nn.Module):
    """Puts a new tensor in its buffer's place, which is not saved with the weights either."""

    poison = 99

    def __init__(self, persistent=False):
        super().__init__()
        self.net = linear()
        self.register_buffer("average", torch.zeros(CLASSES), persistent=persistent)
        self.steps = 0

    def forward(self, x):
        logits = self.net(x)
        if self.training:
            self.steps += 1
            value = logits.detach().mean(0) * (torch.nan if self.steps == self.poison else 1.0)
            self.average = 0.9 * self.average + 0.1 * value
        return logits + 0.1 * self.average


class Caching(nn.Module):
    """Makes its buffer when it is first needed."""

    def __init__(self):
        super().__init__()
        self.net = linear()
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x):
        if self.cache is None and self.training:
            self.cache = torch.ones(CLASSES)
        return self.net(x) + (0 if self.cache is None else self.cache)


class Last(nn.Module):
    """Remembers what it saw last, however many that are."""

    def __init__(self):
        super().__init__()
        self.net = linear()
        self.register_buffer("last", torch.zeros(2, CLASSES), persistent=False)

    def forward(self, x):
        logits = self.net(x)
        self.last = logits.detach()
        return logits


def one_step(ensemble):
    """A step as `fit` would take it first."""
    plan = preflight(
        *(ensemble, data(), None), recipe=LINEAR, seed=0, task=None, ignore_index=None, options=QUIET
    )
    state = TrainState(ensemble, plan.recipe, 0, CLASSES, 10)
    batches = plan.batches()
    batches.seek(0, 0)
    plan.train_mode(ensemble)
    return loop._make_step(state, batches, plan, 0)


class TestNetworks:
    @pytest.mark.parametrize("method", ["ie", "mcl"])
    def test_a_class_that_is_masked_out(self, method):
        """Its infinite KL is no part of the loss."""
        images, targets = data()
        rows = fit(
            apart(Masked), (images, targets % 3), recipe=replace(LINEAR, method=method), options=QUIET
        ).rows
        assert all(0 < row["specialist_entropy"] < 2 and row["loss"] > 0 for row in rows)

    def test_and_where_it_is_part_of_the_loss(self):
        images, targets = data()
        with pytest.raises(Diverged, match="at step 0"):
            fit(apart(Masked), (images, targets % 3), recipe=LINEAR, options=QUIET)

    def test_buffers_that_are_not_saved_with_the_weights_are_saved(self, tmp_path):
        whole, part, again = (apart(Averaging) for _ in range(3))
        fit(whole, data(), recipe=LINEAR, options=QUIET)
        with before_step(4, interrupt), pytest.raises(RuntimeError, match="stopped by SIGINT"):
            fit(part, data(), recipe=LINEAR, out=tmp_path, options=QUIET)
        fit(again, data(), recipe=LINEAR, out=tmp_path, resume=True, options=QUIET)
        assert identical(dict(again.named_buffers()), dict(whole.named_buffers()))
        assert identical(weights(again), weights(whole))

    def test_buffers_in_whose_place_another_comes_are_put_back(self):
        ensemble = apart(Averaging)
        ensemble.members[1].poison = 4
        with pytest.raises(Diverged, match="at step 3"):
            fit(ensemble, data(), recipe=LINEAR, options=QUIET)
        assert all(buffer.isfinite().all() for buffer in ensemble.buffers())

    def test_such_buffers_are_not_captured(self):
        ensemble = apart(Averaging)
        before = dict(ensemble.named_buffers())
        check_in_place(before, dict(ensemble.named_buffers()))
        ensemble(data()[0])
        with pytest.raises(RuntimeError, match="replaces its buffer 'members.0.average'"):
            check_in_place(before, dict(ensemble.named_buffers()))

    @pytest.mark.parametrize("network", [Averaging, Caching, Last])
    def test_what_a_try_changed_is_put_back(self, network):
        """As a GPU's warm-up does, whatever became of the buffers."""
        ensemble = apart(network).train()
        step = one_step(ensemble)
        before = dict(ensemble.named_buffers())
        kept = [tensor.clone() for tensor in step.tensors()]
        backup = Snapshot(step)
        step()
        assert not all(map(torch.equal, step.tensors()[:2], kept[:2]))
        backup.restore()
        assert dict(ensemble.named_buffers()).keys() == before.keys()
        assert all(buffer is before[name] for name, buffer in ensemble.named_buffers())
        assert all(map(torch.equal, step.tensors(), kept))

    @pytest.mark.parametrize("network", [Caching, Last])
    def test_buffers_that_come_or_change_their_shape(self, network, tmp_path):
        whole, part, again = (apart(network) for _ in range(3))
        train = DataLoader(TensorDataset(*data()), 12)  # 12, 12, 12, 4
        fit(whole, train, recipe=LINEAR, options=QUIET)
        with before_step(5, interrupt), pytest.raises(RuntimeError, match="stopped by SIGINT"):
            fit(part, train, recipe=LINEAR, out=tmp_path, options=QUIET)
        fit(again, train, recipe=LINEAR, out=tmp_path, resume=True, options=QUIET)
        assert identical(weights(again), weights(whole))

    def test_state_that_is_no_tensor_is_refused_at_once(self, tmp_path):
        class Extra(nn.Linear):
            def get_extra_state(self):
                return {"seen": 3}

        ensemble = apart(lambda: nn.Sequential(nn.Flatten(), Extra(25, CLASSES)))
        with pytest.raises(TypeError, match=r"Got members.0.1._extra_state, from get_extra_state"):
            fit(ensemble, data(), recipe=LINEAR, out=tmp_path, options=QUIET)
        fit(ensemble, data(), recipe=LINEAR, options=QUIET)


def test_other_data_are_not_resumed(tmp_path):
    stopped(tmp_path, 7)
    kept = "data must be that of the run to resume, 40 examples with targets [0-9a-f]{12}. Got"
    with pytest.raises(ValueError, match=f"{kept} 32 examples"):
        go(tmp_path, resume=True, train=data(32))
    images, targets = data()
    with pytest.raises(ValueError, match=f"{kept} 40 examples"):
        go(tmp_path, resume=True, train=(images, targets.roll(1)))
    ensemble = small()
    ensemble.transform = MeanStd().fit(images)
    with pytest.raises(ValueError, match=f"{kept} 40 examples with targets [0-9a-f]+, transformed by"):
        go(tmp_path, resume=True, ensemble=ensemble)
    go(tmp_path, resume=True, train=(images + 1e-7, targets))  # whitened on another device


def test_other_batches_are_not_resumed(tmp_path):
    """Their number decides where in the data a step is."""

    def loader(size):
        return DataLoader(TensorDataset(*data()), size)

    with before_step(4, interrupt), pytest.raises(Interrupted):
        fit(apart(), loader(8), recipe=LINEAR, out=tmp_path, options=QUIET)
    for train in (loader(4), data()):
        with pytest.raises(ValueError, match="data must be that of the run to resume, 5 batches of 8. Got"):
            fit(apart(), train, recipe=LINEAR, out=tmp_path, resume=True, options=QUIET)


def test_a_loader_decides_the_batch_size_and_is_recorded(tmp_path):
    loader = DataLoader(TensorDataset(*data()), 10)
    result = fit(ensemble := apart(), loader, recipe=LINEAR, options=QUIET)
    assert LINEAR.batch_size != 10
    assert result.batch_size == 10
    assert record(tmp_path, ensemble, data(), recipe=LINEAR, result=result).recipe["batch_size"] == 10
    parts = replace(LINEAR, accumulate=4)  # of the recipe's 8; of 10 it makes parts of other sizes
    result = fit(ensemble := apart(), loader, recipe=parts, options=QUIET)
    told = record(tmp_path, ensemble, data(), recipe=parts, result=result).recipe
    assert (told["batch_size"], told["accumulate"]) == (8, 4), "no recipe has 10 in 4 parts"
    sampler = BatchSampler(SequentialSampler(range(40)), 10, drop_last=False)
    result = fit(
        apart(), DataLoader(TensorDataset(*data()), batch_sampler=sampler), recipe=LINEAR, options=QUIET
    )
    assert result.batch_size is None, "not told"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("first", [0, 5])  # the networks are called with the first two before training
def test_images_that_are_not_finite(value, first):
    images, targets = data()
    images[first, 0, 0, 0] = images[9, 0, 0, 0] = value
    where = f"NaN or infinity in 2 of 40 examples, first in number {first}"
    error, match = (ValueError, "Look for NaN in the inputs") if first == 0 else (Diverged, "look for NaN")
    with pytest.warns(UserWarning, match=f"train images hold {where}"), pytest.raises(error, match=match):
        fit(apart(), (images, targets), recipe=LINEAR, options=QUIET)
    with pytest.raises(ValueError, match=f"train images must be finite.* Got {where}"):
        fit(apart(), (images, targets), recipe=replace(LINEAR, adversarial=0.1), options=QUIET)


def test_values_that_are_missing_are_left_to_networks_and_tasks_that_know_them():
    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return self.inner(x.nan_to_num(0))

    images, targets = data()
    images = images.clone()
    images[5, 0] = torch.nan
    with pytest.warns(UserWarning, match="Most networks return NaN for them"):
        fit(apart(Filled), (images, targets), recipe=LINEAR, options=QUIET)

    def known(logits, targets):
        return nn.functional.cross_entropy(logits, targets.nan_to_num(0).long(), reduction="none")

    missing = targets.double()
    missing[3] = torch.nan
    fit(apart(), (data()[0], missing), recipe=LINEAR, task=known, options=QUIET)


@pytest.mark.filterwarnings("error")
def test_rows_taken_for_channels_are_told():
    images, targets = torch.randint(255, (8, 6, 6, 3), dtype=torch.uint8), torch.zeros(8).long()

    def flat():
        return Ensemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 2)), 2)

    with pytest.warns(UserWarning, match=r"look like channels last, and are taken for \(N,C,H,W\). If"):
        fit(flat(), (images, targets), recipe=LINEAR, options=QUIET)
    named = from_arrays(images.permute(0, 2, 3, 1).numpy(), targets.numpy(), layout="NHWC")
    fit(flat(), named, recipe=LINEAR, options=QUIET)


def test_one_step_at_a_time_is_kept():
    """A graph holds its memory: that of the warm start must be gone before the next one is made."""
    made = []
    make = loop._make_step

    def watched(state, *arguments):
        gc.collect()
        assert all(before() is None for before in made)
        step = make(state, *arguments)
        assert all(p.grad is None for p in state.ensemble.parameters()), "a graph's memory too"
        made.append(weakref.ref(step))
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_make_step", watched)
        fit(apart(), data(), recipe=replace(LINEAR, warm_start=1), options=QUIET)
    assert len(made) == 2


WORKERS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import test_train as t
from torch.utils.data import DataLoader, TensorDataset
class Slow(TensorDataset):
    def __getitem__(self, i):
        time.sleep(60 if i == 20 else 0)  # in the third batch
        return super().__getitem__(i)
def watched(step, plain=t.engine_step.Step.__call__, calls=[]):
    plain(step)
    calls.append(step)
    if len(calls) == 2:
        print("waiting for the third batch", flush=True)
t.engine_step.Step.__call__ = watched
loader = DataLoader(Slow(*t.data()), batch_size=t.B, num_workers=2)
t.fit(t.small(), loader, recipe=t.RECIPE, out=t.Path(sys.argv[2]), options=t.QUIET)
"""


@pytest.mark.parametrize("error", [RuntimeError, ConnectionResetError, EOFError])
def test_workers_that_die_before_the_signal_is_heard(error, tmp_path, monkeypatch):
    """Whatever the loader makes of it: torch's own error, or what a broken connection to a worker gives."""

    def broken(self, number, todo, plain=Loaded.epoch):
        for count, size in enumerate(plain(self, number, todo)):
            if count == 2:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
                raise error("worker")
            yield size

    monkeypatch.setattr(Loaded, "epoch", broken)
    loader = DataLoader(TensorDataset(*data()), 8)
    with pytest.raises(Interrupted, match="stopped by SIGTERM at step 2 of 10"):
        fit(apart(), loader, recipe=LINEAR, out=tmp_path, options=QUIET)
    assert [path.name[:13] for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]


@pytest.mark.slow  # torch looks after its workers every 5 s
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_signal_to_the_whole_group_ends_workers_but_loses_nothing(tmp_path):
    """As schedulers and service managers send it: a DataLoader's workers die of it, and their loss is noticed."""
    child = subprocess.Popen(
        [sys.executable, "-c", WORKERS, str(Path(__file__).parent), str(tmp_path)],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with child:
        assert child.stdout.readline() == "waiting for the third batch\n"
        os.killpg(child.pid, signal.SIGTERM)
        _, error = child.communicate(timeout=120)
    assert "Interrupted: stopped by SIGTERM at step 2 of 20" in error
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 1


def test_what_was_learned_is_kept_when_scoring_fails(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no room for the answers")

    monkeypatch.setattr(loop, "evaluate_together", broken)
    options = replace(QUIET, checkpoint_seconds=1e9)
    given = {"recipe": LINEAR, "seed": 1, "test": data(), "options": options}
    torch.manual_seed(0)
    with pytest.raises(MemoryError):
        fit(apart(), data(), **given, out=tmp_path)
    assert list((tmp_path / "checkpoints").glob("step-00000010-*"))
    monkeypatch.undo()
    torch.manual_seed(0)
    whole = fit(apart(), data(), **given).rows
    kept = [json.loads(line) for line in (tmp_path / "telemetry.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["seed"], row["loss"]) for row in kept] == [
        (row["epoch"], row["seed"], row["loss"]) for row in whole
    ]


def test_what_was_learned_is_kept_when_telemetry_cannot_be_written(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(TelemetryFile, "write", broken)
    with pytest.raises(OSError, match="gone"):
        fit(apart(), data(), recipe=LINEAR, out=tmp_path, options=replace(QUIET, checkpoint_seconds=1e9))
    assert list((tmp_path / "checkpoints").glob("step-00000005-*"))


def test_no_worker_outlives_the_run():
    train = DataLoader(TensorDataset(*data()), 8, num_workers=1)
    gc.disable()
    try:
        fit(apart(), train, recipe=LINEAR, options=QUIET)
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("precision", "cpu", "cuda"),
    [("auto", "float32", "bf16"), ("bf16", "bf16", "bf16"), ("float32", "float32", "float32")],
)
def test_precision(precision, cpu, cuda):
    options = replace(QUIET, precision=precision)
    assert (options.precision_on("cpu"), options.precision_on("cuda")) == (cpu, cuda)
    ensemble, computed = apart(), set()
    for layer in ensemble.members[0].modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda layer, _, y: computed.add(y.dtype) if layer.training else None)
    fit(ensemble, data(), recipe=LINEAR, options=options)
    assert computed == {torch.bfloat16 if cpu == "bf16" else torch.float32}
    assert {p.dtype for p in ensemble.parameters()} == {torch.float32}


def test_a_loader_that_ends_early_says_so():
    class Short(IterableDataset):
        def __len__(self):
            return 40

        def __iter__(self):
            return iter(list(zip(*data(), strict=True))[:20])

    with pytest.raises(ValueError, match="train must yield as many batches as its length says, 5. Got fewer"):
        fit(apart(), DataLoader(Short(), 8), recipe=LINEAR, options=QUIET)


def test_several_threads_may_ask_a_trained_ensemble():
    """Batch statistics and dropout would make each answer another one, and change the statistics."""
    images, targets = data()

    def network():
        layers = nn.Linear(25, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, CLASSES)
        return nn.Sequential(nn.Flatten(), *layers)

    ensemble = apart(network)
    fit(ensemble, (images, targets), recipe=LINEAR, options=QUIET)
    assert not any(module.training for module in ensemble.modules())
    alone = ensemble.predict(images).probs
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: ensemble.predict(images).probs, range(40)))
    assert all(torch.equal(answer, alone) for answer in answers)


@pytest.mark.parametrize("name", ["_foreach_norm", "_foreach_copy_"])
def test_a_torch_without_a_private_function_is_warned_about_once(monkeypatch, name):
    recipe = replace(LINEAR, clip_norm=0.1, ema=0.1)
    usual, other = apart(), apart()
    fit(usual, dataset(), recipe=recipe, options=QUIET)
    monkeypatch.delattr(torch, name)
    private_torch.cache_clear()
    try:
        with pytest.warns(UserWarning, match=f"has no torch.{name}; cmcl works without it") as warned:
            fit(other, dataset(), recipe=recipe, options=QUIET)
        assert len(warned) == 1
    finally:
        private_torch.cache_clear()
    for one, two in zip(usual.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_run_that_cannot_start_moves_the_ensemble_back(monkeypatch):
    """Without a GPU: what `Ensemble.to` is asked for."""
    places, (cpu, gpu) = [], map(torch.device, ("cpu", "cuda"))
    monkeypatch.setattr(Ensemble, "to", lambda self, *place, **layout: places.extend(place))
    with pytest.raises(StopIteration), loop._on_device(small(), gpu):
        next(iter(()))
    assert places == [gpu, cpu]
