"""How a run ends: what it keeps when the end fails, and what it leaves behind."""

import gc
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cmcl
from cmcl import fit
from test_train import CLASSES, QUIET, data
from test_train_edges import LINEAR, apart


def test_what_was_learned_is_kept_when_scoring_fails(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no room for the answers")

    monkeypatch.setattr(cmcl.training.loop, "evaluate", broken)
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

    monkeypatch.setattr(cmcl.training.monitor.TelemetryFile, "write", broken)
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
