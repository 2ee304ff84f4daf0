"""The temperature that `fit` fits to held-out data: from which examples, where it is kept, and what it does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import cmcl
from cmcl import CMCLClassifier, Ensemble, Options, Recipe, calibration, fit, metrics
from cmcl.data import Dataset, split_validation
from cmcl.training import scoring
from cmcl.training.scoring import held_out_temperature
from test_export import needs_onnx
from test_train import QUIET, RECIPE, data, small

HELD = replace(RECIPE, validation=0.25, epochs=2)


def dataset(n=80):
    images, targets = data(n)
    return Dataset(images, targets, tuple("abcd"))


def expected(ensemble, held):
    return calibration.fit_temperature(ensemble.predict(held.images).member_probs, held.targets)


@pytest.mark.parametrize("more", [{}, {"ema": 0.2}])
def test_it_is_that_of_the_held_out_part(more):
    """Of the final weights, averaged if they are, and not of the test data."""
    recipe, ensemble, test = replace(HELD, **more), small(), data(40, seed=5)
    result = fit(ensemble, dataset(), recipe=recipe, test=test, options=QUIET)
    held = split_validation(dataset(), 0.25)[1]
    assert result.temperature == ensemble.temperature
    assert result.temperature == pytest.approx(expected(ensemble, held), rel=1e-4)
    assert result.temperature != pytest.approx(expected(ensemble, Dataset(*test, tuple("abcd"))), rel=1e-2)
    unscaled = ensemble.predict(held.images).member_probs.mean(0)
    torch.testing.assert_close(
        ensemble.predict(held.images).probs, cmcl.ensemble.scale_temperature(unscaled, result.temperature)
    )


def test_nothing_is_scaled_without_held_out_data():
    """Not even by the temperature of earlier weights; test data do not count as held out."""
    ensemble = small()
    ensemble.temperature = 0.5
    result = fit(ensemble, dataset(), recipe=replace(HELD, validation=0.0), test=data(40), options=QUIET)
    assert (result.temperature, ensemble.temperature) == (None, None)


def test_a_finished_run_finds_it_again(tmp_path):
    first = fit(small(), dataset(), recipe=HELD, out=tmp_path, options=QUIET).temperature
    again = small()
    result = fit(again, dataset(), recipe=HELD, out=tmp_path, resume=True, options=QUIET)
    assert result.temperature == again.temperature == first


def test_sampled_masks_of_it_leave_the_test_scores_alone():
    scores = []
    for train, validation in ((dataset(), 0.25), (split_validation(dataset(), 0.25)[0], 0.0)):
        ensemble, test = small(), data(200, seed=5)
        ensemble.share_at_test = "sampled"
        recipe = replace(HELD, validation=validation)
        scores.append(fit(ensemble, train, recipe=recipe, test=test, options=QUIET).scores)
    assert scores[0] == scores[1]


def test_ignored_pixels_do_not_count():
    """By hand: 160 pixels count, 16 of them are wrong, and one error is added: confidence 144 / 161."""
    logits = nn.Conv2d(1, 2, 1, bias=False)
    with torch.no_grad():
        logits.weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
    images, targets = torch.full((10, 1, 5, 4), 0.1), torch.zeros(10, 5, 4, dtype=torch.long)
    targets[0, :4] = 1  # in 16 of 160 pixels
    targets[:, 4] = 255
    ensemble, held = Ensemble(lambda: logits, 1), Dataset(images, targets, ("a", "b"))
    temperature = held_out_temperature(ensemble, held, batch_size=3)
    ensemble.temperature = temperature
    assert ensemble.predict(images).probs[:, 0].mean().item() == pytest.approx(144 / 161, abs=1e-4)
    assert temperature == pytest.approx(0.2 / np.log(144 / 17), rel=1e-3), "logits +-0.1"


def test_memory_is_bounded(monkeypatch):
    """A random part of the pixels gives nearly the same temperature."""
    torch.manual_seed(0)
    ensemble = Ensemble(lambda: nn.Conv2d(1, 3, 1), 2)
    images = torch.randn(20, 1, 16, 16)
    probs = ensemble.predict(images).member_probs.mean(0).square().movedim(1, -1)  # T = 1 / 2
    targets = torch.multinomial(probs.reshape(-1, 3), 1).view(20, 16, 16).to(torch.uint8)
    held, kept = Dataset(images, targets, tuple("abc")), []
    whole = held_out_temperature(ensemble, held)
    real = calibration.fit_temperature
    monkeypatch.setattr(calibration, "fit_temperature", lambda p, t: kept.append(p.shape) or real(p, t))
    monkeypatch.setattr(scoring, "LARGEST", 3 * 1280)  # a quarter of 5,120 pixels
    part = held_out_temperature(ensemble, held)
    assert kept[0] == (1, pytest.approx(1280, rel=0.1), 3)
    assert part == held_out_temperature(ensemble, held), "drawn alike each time"
    assert part != whole
    assert part == pytest.approx(whole, rel=0.2)
    assert whole == pytest.approx(0.5, rel=0.1)


@pytest.fixture(scope="module")
def calibrated():
    """An ensemble of CMCL with a temperature, and its result."""
    train = cmcl.data.load("digits", split="train")
    torch.manual_seed(0)
    network = lambda: cmcl.networks.cnn(  # noqa: E731
        channels=1, size=8, kernel=3, padding=1, filters=(4, 8), hidden=None
    )
    ensemble = Ensemble(network, 4, share_after="stem")
    recipe = Recipe(members=4, overlap=1, epochs=6, batch_size=50, optimizer="adam", lr=0.01, validation=0.2)
    return ensemble, fit(ensemble, train, recipe=recipe, options=Options(quiet=True, device="cpu"))


def test_an_underconfident_ensemble_is_calibrated(calibrated):
    ensemble, result = calibrated
    test = cmcl.data.load("digits", split="test")
    prediction = ensemble.predict(test.images)
    before, after = (metrics.ece(p, test.targets) for p in (prediction.member_probs, prediction.probs[None]))
    assert result.temperature < 0.7
    assert before > 0.2
    assert after < 0.06


def test_it_is_saved_and_loaded(calibrated, tmp_path):
    ensemble, result = calibrated
    images = cmcl.data.load("digits", split="test").images[:20]
    ensemble.save(tmp_path / "saved")
    loaded = cmcl.load(tmp_path / "saved")
    assert loaded.temperature == result.temperature
    torch.testing.assert_close(loaded.predict(images).probs, ensemble.predict(images).probs)


@needs_onnx
def test_an_exported_file_uses_it(calibrated, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    images = cmcl.data.load("digits", split="test").images[:20]
    cmcl.export.export(calibrated[0], tmp_path / "model.onnx", images, format="onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (probs,) = session.run(["probs"], {session.get_inputs()[0].name: images.numpy()})
    prediction = calibrated[0].predict(images)
    np.testing.assert_allclose(probs, prediction.probs.numpy(), atol=1e-4)
    assert not np.allclose(probs, prediction.member_probs.mean(0).numpy(), atol=1e-2), "scaled"


def test_the_estimator_uses_one_that_is_set():
    images, targets = data(80)
    model = CMCLClassifier(members=2, epochs=1, random_state=0, device="cpu", validation=0)
    X = images.flatten(1).numpy()
    unscaled = model.fit(X, targets.numpy()).predict_proba(X)
    assert model.ensemble_.temperature is None
    model.ensemble_.temperature = 0.5
    squared = unscaled**2
    np.testing.assert_allclose(
        model.predict_proba(X), squared / squared.sum(1, keepdims=True), rtol=1e-4, atol=1e-6
    )
