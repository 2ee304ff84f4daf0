"""Test-time flip: the mean of the logits for images and for their mirror images, wherever predictions are used."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

import cmcl as package
from cmcl.export import export, onnx_runner
from cmcl.reproduction import find
from cmcl.reproduction.recipes import RECIPES

X = torch.rand(6, 1, 4, 5, generator=torch.Generator().manual_seed(0))


def classifier():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(20, 3))


@pytest.fixture
def ensemble():
    torch.manual_seed(0)
    return package.Ensemble(classifier, 2).eval()


def test_the_mean_of_both_logits_and_so_the_same_for_mirror_images(ensemble):
    by_hand = ((ensemble(X) + ensemble(X.flip(3))) / 2).softmax(2)
    found = ensemble.predict(X, flip=True)
    assert torch.allclose(found.member_probs, by_hand)
    assert torch.allclose(found.probs, ensemble.predict(X.flip(3), flip=True, batch_size=4).probs)
    assert not torch.allclose(found.probs, ensemble.predict(X).probs)
    ensemble.flip_at_test = True
    assert torch.equal(ensemble.predict(X).probs, found.probs)
    assert torch.equal(ensemble.predict(X, flip=False).member_probs, ensemble(X).softmax(2))
    assert torch.equal(ensemble.member_probs(X), found.member_probs)


def test_dense_outputs_are_mirrored_back():
    torch.manual_seed(0)
    ensemble = package.Ensemble(lambda: torch.nn.Conv2d(1, 3, 3, padding=1), 2).eval()
    found = ensemble.predict(X, flip=True).member_probs
    assert torch.allclose(found, ((ensemble(X) + ensemble(X.flip(3)).flip(4)) / 2).softmax(2))
    both = ensemble.predict(X.flip(3), flip=True).member_probs
    assert torch.allclose(found.flip(4), both, atol=1e-6), "mirrored images have mirrored predictions"


def test_only_images_can_be_mirrored():
    vectors = package.Ensemble(lambda: torch.nn.Linear(4, 3), 2)
    with pytest.raises(ValueError, match="flip needs images"):
        vectors.predict(torch.rand(2, 4), flip=True)
    recipe = package.Recipe(members=2, steps=1, flip_at_test=True)
    with pytest.raises(ValueError, match="for flip_at_test"):
        package.fit(vectors, (torch.rand(8, 4), torch.arange(8) % 3), recipe=recipe)


def test_evaluate_save_and_export_use_it(ensemble, tmp_path):
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    wrong = ensemble.predict(X, flip=True).probs.argmax(1) != labels
    assert package.evaluate(ensemble, (X, labels), flip=True)["top1"] == pytest.approx(
        100 * wrong.float().mean().item()
    )
    ensemble.flip_at_test = True
    ensemble.save(tmp_path / "saved")
    loaded = package.load(tmp_path / "saved", network=classifier)
    assert loaded.flip_at_test
    assert torch.equal(loaded.predict(X).probs, ensemble.predict(X).probs)
    pytest.importorskip("onnxruntime")
    export(ensemble, tmp_path / "model.onnx", X)
    probs = onnx_runner(tmp_path / "model.onnx")(X)[0]
    assert torch.allclose(probs, ensemble.predict(X).probs, atol=1e-5)
    assert not torch.allclose(probs, ensemble.predict(X, flip=False).probs, atol=1e-5)


def test_a_recipe_says_so_for_its_record_and_options_overrule_it(cmcl, tmp_path, monkeypatch):
    base = find("digits-ie")
    tiny = replace(base, members=2, subset=60, epochs=None, steps=4, flip_at_test=True, validation=0.2)
    monkeypatch.setitem(RECIPES, "tiny", tiny)
    code, out, _ = cmcl("train", "tiny", "--out", tmp_path, "--quiet", "--json")
    assert code == 0
    run = json.loads(out)[0]["run"]
    flipped, plain, default = (
        json.loads(cmcl("evaluate", run, *more, "--json")[1])[0] for more in (["--flip"], ["--no-flip"], [])
    )
    assert default == flipped
    assert {key for key in plain if plain[key] != flipped[key]} >= {"ece", "entropy"}
    assert json.loads(out)[0]["ece"] == pytest.approx(flipped["ece"], abs=1e-4)
    image = tmp_path / "digit.png"
    Image.fromarray(package.data.load("digits").images[0, 0].numpy()).save(image)
    rows = [json.loads(cmcl("predict", run, image, *more, "--json")[1]) for more in ([], ["--no-flip"])]
    assert rows[0]["probs"] != rows[1]["probs"]
