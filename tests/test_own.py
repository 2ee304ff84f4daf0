"""A run of one's own leaves what a named recipe leaves."""

import pytest
import torch
from torch import nn

import cmcl
from cmcl.experiments.records import Record


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
