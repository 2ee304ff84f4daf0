"""`cmcl.record`: a custom run leaves what a named recipe leaves."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cmcl
from cmcl.reproduction.record import Record
from own_runs import network, recorded, small
from report_samples import changed


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    train, test = (cmcl.data.load("digits", split=split) for split in ("train", "test"))
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(network, 3, share_after="1")
    recipe = cmcl.Recipe(members=3, overlap=2, sharing=True, epochs=1, optimizer="adam", lr=0.01)
    result = cmcl.fit(ensemble, train, recipe=recipe, out=folder, options=cmcl.Options(quiet=True))
    return folder, ensemble, test, recipe, result


def test_what_it_evaluates_and_writes(trained):
    folder, ensemble, test, recipe, result = trained
    made = cmcl.record(folder, ensemble, test, recipe=recipe, result=result)
    scores = cmcl.evaluate(ensemble, test)
    assert made.errors["expected"]["top1"] == pytest.approx(scores["top1"])
    assert made.errors["expected"]["oracle"] == pytest.approx(scores["oracle"])
    assert made.errors["sampled"] != made.errors["expected"]  # features are shared
    assert (made.name, made.steps, made.recipe_hash) == ("mine", result.steps, recipe.hash)
    assert Record.load(folder / "record.json") == made
    assert (folder / "gallery" / "gallery.json").exists()
    again = cmcl.load(folder / "ensemble", network=network)
    assert again.predict(test.images).probs.equal(ensemble.predict(test.images).probs)


def test_it_says_whether_features_were_shared(trained):
    """Also where the recipe left that to the ensemble."""
    folder, ensemble, test, recipe, result = trained
    left_open = changed(recipe, sharing=None)
    made = cmcl.record(folder, ensemble, test, recipe=left_open, result=result)
    assert made.recipe == recipe.to_json()
    assert made.recipe_hash == recipe.hash != left_open.hash


def test_a_pair_of_tensors_and_data_never_seen(trained):
    folder, ensemble, test, recipe, result = trained
    noise = cmcl.data.from_arrays(
        torch.randint(255, (50, 1, 8, 8), dtype=torch.uint8), torch.zeros(50).long()
    )
    pair = (test.images, test.targets)
    one = cmcl.record(folder, ensemble, test, recipe=recipe, result=result)
    two = cmcl.record(folder, ensemble, pair, recipe=recipe, result=result, ood=noise)
    assert one.errors == two.errors
    assert one.ood is None
    assert two.ood == "arrays"
    assert "averaged_ood" in two.entropy


def test_a_run_that_was_cut_short_is_not_complete(trained, tmp_path):
    _, ensemble, test, recipe, _ = trained
    planned = changed(recipe, epochs=None, steps=1000)
    for steps, whole in ((5, False), (1000, True)):
        result = cmcl.Result(steps=steps, seconds=1.0)
        assert (
            cmcl.record(tmp_path / str(steps), ensemble, test, recipe=planned, result=result).complete
            is whole
        )


def test_what_cannot_be_recorded(trained, tmp_path):
    _, ensemble, test, recipe, result = trained
    with pytest.raises(TypeError, match="must be one Ensemble. Got list"):
        cmcl.record(tmp_path, [ensemble], test, recipe=recipe, result=result)
    ensemble.share_at_test = "off"
    try:
        with pytest.raises(ValueError, match="share_at_test must be .* Got 'off'. cmcl.evaluate measures it"):
            cmcl.record(tmp_path, ensemble, test, recipe=recipe, result=result)
    finally:
        ensemble.share_at_test = "expected"


def test_a_task_is_told_by_all_that_a_partial_holds(tmp_path):
    def weighted(weights, power, logits, targets):
        return F.cross_entropy(logits, targets, weights, reduction="none") ** power

    names = [
        recorded(tmp_path / str(power), small, "ie", task=partial(weighted, torch.ones(10), power)).task
        for power in (0.5, 2.0)
    ]
    assert names[0] == "test_a_task_is_told_by_all_that_a_partial_holds.<locals>.weighted [10] 0.5 {}"
    assert names[1].endswith(" [10] 2.0 {}")


def test_a_custom_training_loop(tmp_path):
    train, test = (cmcl.data.load("digits", split=split) for split in ("train", "test"))
    ensemble, x, y = cmcl.Ensemble(small, 2), train.images[:64] / 255, train.targets[:64]
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    cmcl.confident_oracle_loss(ensemble(x), y, beta=0.75, overlap=1).total.backward()
    optimizer.step()
    recipe = cmcl.Recipe(members=2, steps=1, batch_size=64)
    pair, result = (test.images / 255, test.targets), cmcl.Result(steps=1, seconds=0.5)
    made = cmcl.record(tmp_path / "own", ensemble, pair, recipe=recipe, result=result)
    assert (made.seed, made.steps, made.seconds, set(made.checksums)) == (0, 1, 0.5, {"test"})
    assert made.errors["expected"]["top1"] == pytest.approx(cmcl.evaluate(ensemble, pair)["top1"])
    assert "| own |" in cmcl.report.write([tmp_path], tmp_path / "r.md", format="md").read_text()


def test_curves_of_a_custom_training_loop(trained, tmp_path):
    """Rows of the same epochs are replaced, earlier ones stay, those of another seed go."""
    _, ensemble, test, recipe, _ = trained
    path = tmp_path / "mine" / "telemetry.jsonl"

    def losses(values, first=1, seed=0):
        rows = [{"epoch": i, "loss": torch.tensor(value)} for i, value in enumerate(values, start=first)]
        result = cmcl.Result(steps=9, seconds=1.0, seed=seed, rows=rows)
        cmcl.record(tmp_path / "mine", ensemble, test, recipe=recipe, result=result)
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()]

    assert losses((2.0, 1.0, torch.nan)) == [2.0, 1.0, None]
    assert losses((1.5, 0.75)) == [1.5, 0.75]
    assert losses((0.25,), first=2) == [1.5, 0.25]
    assert "Training curves" in cmcl.report.write([tmp_path], tmp_path / "r.html").read_text()
    assert losses((3.0,), seed=7) == [3.0]


@pytest.mark.parametrize(
    "row", [{"loss": 1.0}, {"epoch": None}, {"epoch": 1, "seed": [1]}, {"epoch": object()}, 7]
)
def test_rows_that_are_none_are_told_before_the_work(trained, tmp_path, row):
    _, ensemble, test, recipe, _ = trained
    result = cmcl.Result(steps=9, seconds=1.0, rows=[row])
    with pytest.raises((TypeError, ValueError), match="rows must (be dicts|have a number)"):
        cmcl.record(tmp_path / "mine", ensemble, test, recipe=recipe, result=result)
    assert not (tmp_path / "mine").exists()


def test_results_of_a_custom_training_loop():
    told = cmcl.Result(steps=np.int64(5), seconds=torch.tensor(0.5), seed=np.int64(3))
    assert (told.steps, told.seconds, told.seed) == (5, 0.5, 3)
    assert [type(value) for value in (told.steps, told.seconds, told.seed)] == [int, float, int]
    for wrong in ({"seed": -1}, {"seconds": math.nan}, {"steps": -1}):
        with pytest.raises(ValueError, match="must be"):
            cmcl.Result(**{"steps": 5, "seconds": 0.5, **wrong})


def test_a_loader_is_evaluated_in_order(trained, tmp_path):
    _, ensemble, test, recipe, result = trained
    pair = test.images[:50], test.targets[:50]
    loaders = [DataLoader(TensorDataset(*pair), 16, shuffle=shuffle) for shuffle in (False, True)]
    one, *others = (
        cmcl.record(tmp_path / "run", ensemble, data, recipe=recipe, result=result)
        for data in (pair, *loaders)
    )
    assert others == [one, one]


def test_data_that_cannot_be_evaluated(trained):
    folder, ensemble, test, recipe, result = trained
    empty = DataLoader(TensorDataset(test.images[:0], test.targets[:0]))
    pairs = [(test.images[:2], test.targets[:2]), (test.images[2:4], test.targets[2:4])]
    for data, kind, message in (
        (empty, ValueError, "test must hold at least one batch. Got an empty DataLoader"),
        (test.images, TypeError, "test must be a Dataset, .* or a DataLoader. Got"),
        (pairs, TypeError, "test must be a Dataset, .* Got list"),
        ((test.images, test.targets[:3]), ValueError, "a target for each of 359 inputs. Got 3."),
    ):
        with pytest.raises(kind, match=message):
            cmcl.record(folder, ensemble, data, recipe=recipe, result=result)
    with pytest.raises(TypeError, match="ood must be a Dataset or a tensor of inputs. Got DataLoader"):
        cmcl.record(folder, ensemble, test, recipe=recipe, result=result, ood=empty)


def test_a_task_is_called_the_same_in_every_process(tmp_path):
    class Weights:
        pass

    def own(logits, targets, weights):
        return F.cross_entropy(logits, targets, reduction="none")

    runs = [recorded(tmp_path / str(i), small, "ie", task=partial(own, weights=Weights())) for i in (0, 1)]
    assert runs[0].task == runs[1].task
    assert "Weights object" in runs[0].task
    assert "0x" not in runs[0].task


def test_the_seed_is_that_of_the_training(tmp_path):
    """Also of a run that was finished before."""
    given = {"recipe": cmcl.Recipe(members=2, steps=2, batch_size=16), "seed": 7, "out": tmp_path}
    train, test = (cmcl.data.load("digits", split=split) for split in ("train", "test"))
    for resume in (False, True):
        torch.manual_seed(0)
        ensemble = cmcl.Ensemble(small, 2)
        result = cmcl.fit(ensemble, train, **given, resume=resume, options=cmcl.Options(quiet=True))
        assert cmcl.record(tmp_path, ensemble, test, recipe=given["recipe"], result=result).seed == 7
    assert result.rows == [], "nothing was left to train"


class Tagger(nn.Module):
    """Token ids (N, 7) -> a class for each token."""

    def __init__(self):
        super().__init__()
        self.embed, self.classify = nn.Embedding(50, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.classify(self.embed(x)).transpose(1, 2)


OTHERS = {  # inputs that are no pictures: network, inputs, shape of the targets
    "vectors": (lambda: nn.Linear(6, 5), torch.randn(64, 6), ()),
    "double": (lambda: nn.Linear(6, 5).double(), torch.randn(64, 6, dtype=torch.float64), ()),
    "tokens": (lambda: nn.Sequential(nn.EmbeddingBag(50, 5)), torch.randint(50, (64, 7)), ()),
    "a class for each token": (Tagger, torch.randint(50, (64, 7)), (7,)),
    "spectra": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), torch.randn(64, 3, 4), ()),
    "feature maps": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 5)), torch.randn(64, 8, 3, 3), ()),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_inputs_of_any_shape(kind, tmp_path):
    build, x, shape = OTHERS[kind]
    y = torch.randint(5, (64, *shape), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(build, 3)
    recipe = cmcl.Recipe(members=3, overlap=2, steps=2, batch_size=16, optimizer="adam", lr=0.01)
    folder = tmp_path / "mine"
    result = cmcl.fit(ensemble, (x, y), recipe=recipe, out=folder, options=cmcl.Options(quiet=True))
    made = cmcl.record(folder, ensemble, (x, y), recipe=recipe, result=result, ood=x.flip(0))
    right = (ensemble.predict(x).probs.argmax(1) == y).double().mean().item()
    assert made.errors["expected"]["top1"] == pytest.approx(100 * (1 - right), abs=1e-4)
    assert (made.test_examples, made.ood) == (64, "arrays")
    assert Record.load(folder / "record.json") == made
    assert not (folder / "gallery").exists()
    page = cmcl.report.write([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "mine" in page
