"""A run of one's own leaves what a named recipe leaves."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cmcl
from cmcl.experiments.own import described
from cmcl.experiments.records import Record
from cmcl.report.comparing import of_runs


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    train, test = (cmcl.data.load("digits", split=split) for split in ("train", "test"))
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(network, 3, share_after="1")
    recipe = cmcl.Recipe(members=3, overlap=2, sharing=True, epochs=1, optimizer="adam", lr=0.01)
    result = cmcl.fit(ensemble, train, recipe=recipe, out=folder, options=cmcl.Options(quiet=True))
    return folder, ensemble, test, recipe, result


def test_what_it_measures_is_what_evaluate_says(trained):
    folder, ensemble, test, recipe, result = trained
    made = cmcl.record(folder, ensemble, test, recipe=recipe, result=result)
    scores = cmcl.evaluate(ensemble, test)
    assert made.errors["expected"]["top1"] == pytest.approx(scores["top1"])
    assert made.errors["expected"]["oracle"] == pytest.approx(scores["oracle"])
    assert made.errors["sampled"] != made.errors["expected"]  # features are shared
    assert (made.name, made.steps, made.recipe_hash) == ("mine", result.steps, recipe.hash)


def test_what_it_leaves(trained):
    folder, ensemble, test, recipe, result = trained
    made = cmcl.record(folder, ensemble, test, recipe=recipe, result=result)
    assert Record.load(folder / "record.json") == made
    assert (folder / "gallery" / "gallery.json").exists()
    again = cmcl.load(folder / "ensemble", network=network)
    assert again.predict(test.images).probs.equal(ensemble.predict(test.images).probs)


def test_it_says_whether_features_were_shared(trained):
    """Also where the recipe left that to the ensemble."""
    folder, ensemble, test, recipe, result = trained
    left_open = replace(recipe, sharing=None)
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
    two = cmcl.record(folder, ensemble, pair, recipe=recipe, result=result, outside=noise)
    assert one.errors == two.errors
    assert one.outside is None
    assert two.outside == "arrays"
    assert "averaged_outside" in two.entropy


def test_the_page_shows_it(trained, tmp_path):
    folder, ensemble, test, recipe, result = trained
    cmcl.record(folder, ensemble, test, recipe=recipe, result=result)
    page = cmcl.report.write([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "mine" in page


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def recorded(folder, network, method, *, members=3, task=None, seed=0, images=None, **settings):
    train, test = (cmcl.data.load("digits", split=split) for split in ("train", "test"))
    train = train[:images]
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(network, members, **settings)
    recipe = cmcl.Recipe(method=method, members=members, overlap=1, steps=2, batch_size=16, optimizer="adam")
    options = cmcl.Options(quiet=True)
    result = cmcl.fit(ensemble, train, recipe=recipe, out=folder, task=task, seed=seed, options=options)
    return cmcl.record(folder, ensemble, test, recipe=recipe, result=result)


def test_unlike_networks_are_not_compared(tmp_path):
    tiny = recorded(tmp_path / "tiny", small, "ie")
    conv = recorded(tmp_path / "conv", network, "cmcl")
    assert tiny.network == {"class": "Sequential", "parameters": 650, "digest": tiny.network["digest"]}
    first, second = [told for told in of_runs([tiny, conv]) if " errs on " in told]
    assert first.startswith(
        "On own data with 3 Sequential of 650 parameters (2 steps), an independent ensemble"
    )
    assert second.startswith("On own data with 3 Sequential of 1,490 parameters (2 steps), CMCL errs")
    assert " errors" not in first + second
    assert Record.load(tmp_path / "tiny" / "record.json") == tiny


def test_unlike_tasks_are_not_compared(tmp_path):
    smoothed = partial(F.cross_entropy, label_smoothing=0.1, reduction="none")

    def smooth(logits, targets):
        return smoothed(logits, targets)

    runs = [recorded(tmp_path / f"plain{seed}", small, "cmcl", seed=seed) for seed in (0, 1)]
    runs += [recorded(tmp_path / f"own{seed}", small, "cmcl", seed=seed, task=smooth) for seed in (0, 1)]
    assert [run.task for run in runs] == [
        None,
        None,
        *["test_unlike_tasks_are_not_compared.<locals>.smooth"] * 2,
    ]
    told = [text for text in of_runs(runs) if " errs on " in text]
    assert len(told) == 2
    assert all("(n = 2)" in text for text in told), "and not 4"
    assert "task test_unlike_tasks" in told[1]
    assert Record.load(tmp_path / "own1" / "record.json") == runs[3]
    of_partial = recorded(tmp_path / "part", small, "ie", task=smoothed).task
    assert of_partial == "cross_entropy {'label_smoothing': 0.1, 'reduction': 'none'}"


def test_a_task_is_told_by_all_that_a_partial_holds(tmp_path):
    def weighted(weights, power, logits, targets):
        return F.cross_entropy(logits, targets, weights, reduction="none") ** power

    names = [
        recorded(tmp_path / str(power), small, "ie", task=partial(weighted, torch.ones(10), power)).task
        for power in (0.5, 2.0)
    ]
    assert names[0] == "test_a_task_is_told_by_all_that_a_partial_holds.<locals>.weighted [10] 0.5 {}"
    assert names[1].endswith(" [10] 2.0 {}")


def test_runs_that_learned_from_other_examples_have_no_mean(tmp_path):
    whole = recorded(tmp_path / "whole", small, "ie")
    again = recorded(tmp_path / "again", small, "ie", seed=1)
    part = recorded(tmp_path / "part", small, "ie", images=60, seed=2)
    assert whole.checksums == again.checksums != part.checksums
    told = [text for text in of_runs([whole, again, part]) if " errs on " in text]
    assert ["(n = 2)" in text for text in told] == [True, False]
    assert not any("(n = 3)" in text for text in told)


def test_runs_in_folders_of_one_name_are_all_there(tmp_path):
    """Such as few/ie and many/ie, of one recipe and one seed."""
    runs = {
        images: recorded(tmp_path / str(images) / "ie", small, "ie", images=images) for images in (60, 600)
    }
    assert runs[60].file_name == runs[600].file_name
    sources = [tmp_path / "60", tmp_path / "600"]
    page = cmcl.report.write(sources, tmp_path / "report.md", format="md").read_text()
    for made in runs.values():
        assert f"| {made.errors['expected']['top1']:.2f} |" in page
    twice = cmcl.report.write([sources[0], sources[0]], tmp_path / "twice.md", format="md").read_text()
    assert twice.count(f"| {runs[60].errors['expected']['top1']:.2f} |") == 1, "the same one once"


def test_a_loop_of_ones_own(tmp_path):
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


class TestWhatIsMeasuredOn:
    def test_a_loader_is_its_batches_together(self, trained, tmp_path):
        _, ensemble, test, recipe, result = trained
        pair = test.images[:50] / 255, test.targets[:50]
        loader = DataLoader(TensorDataset(*pair), batch_size=16)
        given = {"recipe": recipe, "result": result}
        one, other = (cmcl.record(tmp_path / "run", ensemble, data, **given) for data in (pair, loader))
        assert one == other

    def test_nothing_and_something_else(self, trained):
        folder, ensemble, test, recipe, result = trained
        empty = DataLoader(TensorDataset(test.images[:0], test.targets[:0]))
        with pytest.raises(ValueError, match="test must hold at least one batch. Got an empty DataLoader"):
            cmcl.record(folder, ensemble, empty, recipe=recipe, result=result)
        with pytest.raises(TypeError, match="test must be a Dataset, .* or a DataLoader of such pairs. Got"):
            cmcl.record(folder, ensemble, test.images, recipe=recipe, result=result)


def test_the_gallery_shows_the_answers_that_are_measured(trained):
    """Of mode "expected", not of drawn masks."""
    folder, ensemble, test, recipe, result = trained
    cmcl.record(folder, ensemble, test, recipe=recipe, result=result)
    answer = ensemble.predict(test.images)
    for item in json.loads((folder / "gallery" / "gallery.json").read_text())["items"]:
        shown = [member["confidence"] for member in item["members"]]
        assert shown == pytest.approx(answer.member_probs[:, item["index"]].amax(1).tolist(), abs=1e-4)


def test_a_task_is_called_the_same_in_every_process(tmp_path):
    class Weights:
        pass

    def own(logits, targets, weights):
        return F.cross_entropy(logits, targets, reduction="none")

    runs = [recorded(tmp_path / str(i), small, "ie", task=partial(own, weights=Weights())) for i in (0, 1)]
    assert runs[0].task == runs[1].task
    assert "Weights object" in runs[0].task
    assert "0x" not in runs[0].task


class TestSeed:
    def test_is_that_of_the_training(self, tmp_path):
        assert recorded(tmp_path / "run", small, "ie", seed=7).seed == 7

    def test_of_numpy(self, trained):
        folder, ensemble, test, recipe, result = trained
        made = cmcl.record(folder, ensemble, test, recipe=recipe, result=result, seed=np.int64(0))
        assert type(made.seed) is int

    def test_another_is_refused(self, trained):
        folder, ensemble, test, recipe, result = trained
        given = {"recipe": recipe, "result": result}
        with pytest.raises(ValueError, match="seed must be that of the training, 0. Got 1."):
            cmcl.record(folder, ensemble, test, **given, seed=1)
        several = replace(result, seeds=[3, 4])
        with pytest.raises(ValueError, match=r"seed must say which of \[3, 4\] .* Got none"):
            cmcl.record(folder, ensemble, test, recipe=recipe, result=several)

    def test_of_a_run_that_was_finished_before(self, tmp_path):
        given = {"recipe": cmcl.Recipe(members=2, steps=2, batch_size=16), "seed": 7, "out": tmp_path}
        train, test = (cmcl.data.load("digits", split=split) for split in ("train", "test"))
        for resume in (False, True):
            torch.manual_seed(0)
            ensemble = cmcl.Ensemble(small, 2)
            result = cmcl.fit(ensemble, train, **given, resume=resume, options=cmcl.Options(quiet=True))
            made = cmcl.record(tmp_path, ensemble, test, recipe=given["recipe"], result=result)
            assert (made.seed, made.together) == (7, [7])
        assert result.rows == [], "nothing was left to train"

    def test_several_have_folders_of_their_own(self, tmp_path):
        ensembles = [cmcl.Ensemble(small, 2) for _ in range(2)]
        given = {
            "recipe": cmcl.Recipe(members=2, steps=2, batch_size=16),
            "options": cmcl.Options(quiet=True),
        }
        train, test = (cmcl.data.load("digits", split=split) for split in ("train", "test"))
        result = cmcl.fit(ensembles, train, seed=[3, 4], out=tmp_path / "both", **given)
        for seed, ensemble in zip((3, 4), ensembles, strict=True):
            made = cmcl.record(tmp_path / "both", ensemble, test, result=result, seed=seed, **given)
            assert Record.load(tmp_path / "both" / f"seed{seed}" / "record.json") == made
            assert (made.name, made.seed, made.together) == ("both", seed, [3, 4])
        assert "(n = 2)" in cmcl.report.write([tmp_path], tmp_path / "r.md", format="md").read_text()


def test_like_networks_are_compared(tmp_path):
    """Cut or whole, one alone or several."""
    cmcl_, ie, one = (
        recorded(tmp_path / "cmcl", network, "cmcl", share_after="1"),
        recorded(tmp_path / "ie", network, "ie"),
        recorded(tmp_path / "one", network, "ie", members=1),
    )
    assert cmcl_.network == ie.network == one.network
    assert ", an independent ensemble (IE) on " in of_runs([cmcl_, ie, one])[0]
    other = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))
    assert described(nn.ModuleList([other]))["digest"] != ie.network["digest"], "same shapes, other layers"
    low, high = (described(nn.ModuleList([nn.Dropout(p)]))["digest"] for p in (0.1, 0.9))
    assert low != high, "same layers, otherwise set"

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = lambda: None

        def extra_repr(self):
            return str(self.f)  # with its address

    one, other = Called(), Called()
    assert str(one) != str(other)
    assert described(nn.ModuleList([one])) == described(nn.ModuleList([other]))


def test_records_of_before_are_compared_among_themselves(tmp_path):
    cmcl_, ie = (recorded(tmp_path / method, network, method) for method in ("cmcl", "ie"))
    old = [replace(record, network=None) for record in (cmcl_, ie)]
    assert "independent ensemble" in of_runs(old)[0]
    assert len([told for told in of_runs([old[0], ie]) if " errs on " in told]) == 2
    text = json.loads((tmp_path / "ie" / "record.json").read_text())
    del text["network"]
    (tmp_path / "ie" / "record.json").write_text(json.dumps(text))
    assert Record.load(tmp_path / "ie" / "record.json") == old[1]


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
    made = cmcl.record(folder, ensemble, (x, y), recipe=recipe, result=result, outside=x.flip(0))
    right = (ensemble.predict(x).probs.argmax(1) == y).double().mean().item()
    assert made.errors["expected"]["averaged"] == pytest.approx(100 * (1 - right), abs=1e-4)
    assert (made.test_examples, made.outside) == (64, "arrays")
    assert Record.load(folder / "record.json") == made
    assert not (folder / "gallery").exists()
    page = cmcl.report.write([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "mine" in page


def test_as_many_targets_as_inputs(trained):
    folder, ensemble, test, recipe, result = trained
    with pytest.raises(ValueError, match="a target for each of 359 inputs. Got 3."):
        cmcl.record(folder, ensemble, (test.images, test.targets[:3]), recipe=recipe, result=result)
