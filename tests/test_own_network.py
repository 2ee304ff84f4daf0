"""`cmcl train mymodule:build --data folder:PATH`: a user's own network and images, through every command."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import cmcl as package
from cmcl.reproduction.record import read
from cmcl.reproduction.runner import options_for

MODULE = """
from torch import nn


def build(classes, channels, size=28):
    flat = 4 * (size - 2) ** 2
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(flat, classes))


def fixed():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def colour(classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes))


def deep(classes, depth):
    return nn.Linear(depth, classes)
"""
NAMES = ("zero", "one", "two")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A current folder with mynet.py and photos/, 30 of scikit-learn's digits of each of three classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "mynet", None)  # so that it is forgotten after the test
    del sys.modules["mynet"]
    (tmp_path / "mynet.py").write_text(MODULE)
    images, labels = load_digits(return_X_y=True)
    for label, name in enumerate(NAMES):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for i, image in enumerate(images[labels == label][:30]):
            Image.fromarray((image.reshape(8, 8) * 15).astype(np.uint8)).save(folder / f"{i:02}.png")
    return tmp_path


WORDS = ("train", "mynet:build", "--data", "folder:photos", "--epochs", 2, "--members", 3, "--quiet")


def test_every_command_works_on_such_a_run(cmcl, mistake, own):
    code, out, err = cmcl(*WORDS, "--json", "--validation", 0.2)
    assert (code, err) == (0, "")
    (row,) = json.loads(out)
    assert row["examples"] == 18, "a fifth of every class"
    assert row["scaled_ece"] is not None
    record = read(Path(row["run"]) / "record.json")
    recipe = record.recipe
    assert recipe["network_options"] == {"classes": 3, "channels": 1, "size": 8}
    assert recipe["data"] == "folder:photos?mode=L&test=0.2"
    assert record.network["class"] == "Sequential"

    run, network = row["run"], ("--network", "mynet:build")
    err = mistake("evaluate", run)
    assert "--network mynet:build" in err, "code of the user's runs only if it is named"
    code, out, _ = cmcl("evaluate", run, *network, "--json")
    assert code == 0
    (found,) = json.loads(out)
    for key in ("top1", "oracle", "ece", "scaled_ece"):
        assert found[key] == pytest.approx(row[key], abs=1e-4), key
    code, out, _ = cmcl("predict", run, "photos/one/00.png", *network, "--json")
    assert code == 0
    assert json.loads(out)["prediction"]["class"] in NAMES
    Image.new("RGB", (20, 30)).save("large.png")
    assert cmcl("predict", run, "large.png", "--resize", *network)[0] == 0
    code, out, _ = cmcl("export", run, "-o", "model.pt2", *network, "--json")
    assert code == 0
    assert json.loads(out)["input"] == "uint8 (batch, 1, 8, 8)"
    assert cmcl("calibrate", run, "--risk", 0.9, *network)[0] in (0, 1)
    assert cmcl("report", "runs", "-o", "report.md", "--format", "md")[0] == 0
    assert "mynet-build-photos" in (own / "report.md").read_text()
    assert "finished" in mistake(*WORDS, "--validation", 0.2)
    assert cmcl(*WORDS, "--validation", 0.2, "--resume")[0] == 0


def test_features_are_shared_after_the_suggested_layer(cmcl, own):
    code, out, _ = cmcl(*WORDS, "--sharing", "--json")
    assert code == 0
    import mynet

    ensemble = package.load(
        json.loads(out)[0]["run"], network=lambda: mynet.build(classes=3, channels=1, size=8)
    )
    assert ensemble.share_after == "1", "after the ReLU"


def test_predicting_reads_no_training_image(cmcl, own):
    """The saved ensemble knows the size of its images, and that they are grey."""
    code, out, _ = cmcl(*WORDS, "--json")
    assert code == 0
    words = ("predict", json.loads(out)[0]["run"], "new.png", "--network", "mynet:build", "--json")
    (own / "photos" / "one" / "00.png").rename("new.png")
    for path in (own / "photos").rglob("*.png"):
        path.write_text("no image")
    for _ in range(2):
        code, out, err = cmcl(*words)
        assert (code, err) == (0, "")
        assert "prediction" in json.loads(out)
        shutil.rmtree(own / "photos", ignore_errors=True)
    Image.new("RGB", (20, 30)).save("large.png")
    code, out, _ = cmcl("predict", *words[1:2], "large.png", *words[3:])
    assert code == 1
    assert "must be 8 x 8 pixels (height x width). Got 30 x 20. Pass --resize." in json.loads(out)["error"]


def test_a_network_of_ours_takes_its_shape_from_the_data(cmcl, own):
    code, out, _ = cmcl("train", "resnet20", *WORDS[2:], "--json")
    assert code == 0
    assert json.loads(out)[0]["name"].startswith("resnet20-photos")
    code, out, _ = cmcl("train", "digits-cmcl", *WORDS[2:], "--overlap", 1, "--json")
    assert code == 0
    assert package.load(json.loads(out)[0]["run"]).members[0].options["classes"] == 3


def test_without_held_out_data_nothing_is_scaled_and_the_command_that_fits_one_is_shown(cmcl, own):
    code, out, _ = cmcl(*WORDS)
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("cmcl calibrate ")]
    assert line.endswith(" --network mynet:build")
    assert cmcl(*line.split()[1:], "--risk", 0.99)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mynet:build"], "--data must name the data to train mynet:build on"),
        (["mynet:build", "--data", "photos"], "Use folder:photos"),
        (["mynet:build", "--data", "folder"], "folder:PATH"),
        (["mynet:build", "--data", "folder:phots"], "Did you mean 'photos'"),
        (["mynet:build", "--data", "digits", "--option", "size=4"], "--option must be left out"),
        (["mynet:build", "--data", "folder:photos", "--option", "sise=4"], "Did you mean 'size'"),
        (["mynet:deep", "--data", "folder:photos"], "Got depth"),
        (["mynet:nothing", "--data", "folder:photos"], "must have the function nothing"),
        (["nonet:build", "--data", "folder:photos"], "nonet must be a Python module"),
        (["mynet:fixed", "--data", "folder:photos"], "per class of photos, 3. Got 10"),
        (["mynet:colour", "--data", "folder:photos"], "--option mode=RGB"),
        (["digits-cmcl", "--option", "size=4"], "--data must name the data of --option"),
    ],
)
def test_errors_say_how_to_fix_them(mistake, own, words, message):
    assert message in mistake("train", *words, "--epochs", 1, "--quiet")
    assert not (own / "runs").exists()


def test_options_are_offered_under_their_usual_names(own):
    assert options_for("mynet:build", (3, 8, 8), 7) == {"classes": 7, "channels": 3, "size": 8}
    assert options_for("mynet:build", (3, 8, 6), 7)["size"] == [8, 6]
    assert options_for("resnet20", (1, 8, 8), 7) == {"classes": 7, "channels": 1}
    assert options_for("mynet:fixed", (1, 8, 8), 7) == {}
