"""`cmcl evaluate`, `predict`, `calibrate` and `export`, on a run of two steps and on a user's own network."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

import cmcl as package
from cmcl import calibration
from cmcl.calibration import Threshold, uncertainty
from cmcl.cli.loading import align_classes, find_saved, search_root
from cmcl.data.dataset import evenly_spaced
from cmcl.data.transforms import MeanStd
from cmcl.reproduction import find
from cmcl.reproduction.record import read
from cmcl.reproduction.runner import run, run_folder
from cmcl.serialization import save_temperature

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "many-machines.md"
CPU = ("--device", "cpu")
QUIET = package.Options(device="cpu", quiet=True)
DIGITS = find("digits-cmcl")
TINY = replace(
    find("digits-300-cmcl"),
    members=3,
    sharing=True,
    labels="sampled",
    epochs=None,
    steps=60,
    network_options=dict(DIGITS.network_options) | {"filters": [2, 4]},
)
MODULE = """
import torch
from torch import nn

def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

class Dict(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = network()

    def forward(self, x):
        return {"logits": self.inside(x)}

def logits(out):
    return out["logits"]

number = 3
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    run(TINY, (0,), out=out, name="tiny-cmcl", options=QUIET)
    return run_folder(out, "tiny-cmcl", TINY, 0)


@pytest.fixture
def trained(original, tmp_path_factory):
    """A run folder."""
    return shutil.copytree(original, tmp_path_factory.mktemp("runs") / original.name)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """What the tutorial leaves: runs/mine by `cmcl.record`, and an ensemble that was made with output=."""
    home = tmp_path_factory.mktemp("home")
    (home / "my_own_net.py").write_text(MODULE)
    names = {}
    exec(MODULE, names)
    train, test = (
        evenly_spaced(package.data.load("digits", split=split), 100) for split in ("train", "test")
    )
    recipe = package.Recipe(members=2, overlap=1, steps=2, optimizer="adam", lr=0.01)
    for name, network, output in (("mine", "network", None), ("dicts", "Dict", names["logits"])):
        torch.manual_seed(0)
        ensemble = package.Ensemble(names[network], 2, output=output)
        folder = home / "runs" / name
        result = package.fit(
            ensemble, (train.images, train.targets), recipe=recipe, out=folder, options=QUIET
        )
        package.record(folder, ensemble, test, recipe=recipe, result=result)
    for place in ("train/0", "train/1", "test/0", "test/1"):  # images of another size
        (home / "images" / place).mkdir(parents=True)
        Image.new("L", (9, 9)).save(home / "images" / place / "wide.png")
    np.save(home / "inputs.npy", test.images[:6].numpy())
    np.save(home / "float64.npy", test.images[:6].numpy() / 255)
    np.save(home / "wide.npy", np.zeros((4, 1, 9, 9), np.float32))
    (home / "text.npy").write_text("hello")
    Image.fromarray(test.images[0, 0].numpy()).save(home / "digit.png")
    Image.new("L", (9, 9)).save(home / "wide.png")
    return home


@pytest.fixture
def here(home, monkeypatch):
    """In that folder, which is no part of this process's path afterwards."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_own_net", raising=False)
    return home


MINE = ("--network", "my_own_net:network")
DICTS = ("--network", "my_own_net:Dict", "--logits", "my_own_net:logits")
FOLDER = ("--data", "folder", "--root", "images", "--option", "mode=L")


@pytest.mark.parametrize(("name", "own"), [("mine", MINE), ("dicts", DICTS)])
def test_own_network(cmcl, here, tmp_path, name, own):
    words = (f"runs/{name}", "--data", "digits", *own, *CPU, "--json")
    code, out, _ = cmcl("evaluate", *words, "--limit", 100)
    record = json.loads((here / "runs" / name / "record.json").read_text())
    assert code == 0
    assert json.loads(out)[0]["top1"] == pytest.approx(record["errors"]["expected"]["top1"])
    code, out, _ = cmcl("calibrate", *words, "--limit", 60, "--risk", 0.99)
    assert code == 0
    assert json.loads(out)["threshold"]["examples"] == 30
    code, out, _ = cmcl("predict", f"runs/{name}", "digit.png", *own, *CPU, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["prediction"]["class"] == str(found["prediction"]["index"])
    assert len(found["members"]) == 2
    words = ("export", f"runs/{name}", "--example", "inputs.npy", "-o", tmp_path / "m.pt2", *own, "--json")
    code, out, _ = cmcl(*words)
    found = json.loads(out)
    assert code == 0
    assert (found["format"], found["input"]) == ("torch", "uint8 (batch, 1, 8, 8)"), "by the suffix"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "runs/mine", "--example", "inputs.npy", "-o", "m.pt2"], "--network MODULE:FUNCTION"),
        (["evaluate", "runs/mine", "--data", "digits"], "--network MODULE:FUNCTION"),
        (["predict", "runs/mine", "digit.png"], "--network MODULE:FUNCTION"),
        (["calibrate", "runs/mine", "--data", "digits"], "--network MODULE:FUNCTION"),
        (["calibrate", "runs/mine", *MINE], "--data must name the test data"),
        (["export", "runs/mine", "-o", "m.pt2", *MINE], "--example must name a .npy file"),
        (["evaluate", "runs/dicts", "--data", "digits", *DICTS[:2]], "--logits MODULE:FUNCTION"),
        (["predict", "runs/mine", "digit.png", "--network", "net"], "--network must be MODULE:FUNCTION"),
        (["predict", "runs/mine", "digit.png", "--network", "no_such:f"], "no_such must be a Python module"),
        (["predict", "runs/mine", "digit.png", "--network", "my_own_net:f"], "must have the function f"),
        (["predict", "runs/mine", "digit.png", "--network", "my_own_net:number"], "Got int."),
        (["layers", "cnn", "--input", "784"], "must describe an input that cnn takes. Got 784;"),
        (["layers", "my_own_net:network", "--input", "1,9,9"], "Got 1,9,9;"),
        (["export", "runs/mine", "--example", "float64.npy", "-o", "m.pt2", *MINE], "float32"),
        (["export", "runs/mine", "--example", "wide.npy", "-o", "m.pt2", *MINE], "(4, 1, 9, 9)"),
        (["export", "runs/mine", "--example", "text.npy", "-o", "m.pt2", *MINE], "--example must be a .npy"),
        (["evaluate", "runs/mine", "--data", "shapes", "--limit", 4, *MINE], "Name another dataset"),
        (["evaluate", "runs/mine", *FOLDER, *MINE, *CPU], "--data must name images that the ensemble takes"),
        (["calibrate", "runs/mine", *FOLDER, *MINE, *CPU], "--option size=[HEIGHT,WIDTH]"),
        (
            ["evaluate", "runs/mine", "--data", "digits", "--ood", "shapes", "--limit", 4, *MINE, *CPU],
            "--ood must name images that the ensemble takes. Got 3 x 64 x 64",
        ),
        (["predict", "runs/mine", "wide.png", *MINE], "must have the size that runs/mine was trained on"),
        (["calibrate", "runs/mine", "-o", "."], "--out must name a file"),
        (["calibrate", "runs/mine", "--risk", "2"], "risk must be"),
        (["calibrate", "runs/mine", "--score", "guess"], "score must be"),
    ],
)
def test_mistakes(mistake, here, arguments, message):
    assert message in mistake(*arguments)


class TestEvaluate:
    def test_agrees_with_the_record(self, cmcl, trained):
        code, out, _ = cmcl("evaluate", trained, "--json")
        (found,), record = json.loads(out), json.loads((trained / "record.json").read_text())
        assert code == 0
        for key in ("top1", "oracle"):
            assert found[key] == pytest.approx(record["errors"]["expected"][key], abs=1e-4)
        assert found["ece"] == pytest.approx(record["calibration"]["ece"], abs=1e-3)
        assert found["examples"] == 359
        assert "auroc" not in found
        assert (found["temperature"], found["scaled_ece"]) == (None, None)

    def test_before_and_after_temperature_scaling(self, cmcl, trained, tmp_path):
        """A column where an ensemble has a temperature, a line where one has none."""
        other = shutil.copytree(trained, tmp_path / trained.name.replace("seed0", "seed1"))
        advice = "The probabilities are not scaled. Fit a temperature:\ncmcl calibrate"
        out = cmcl("evaluate", trained)[1]
        assert out.endswith(f"{advice} {trained}\n")
        assert "scaled ECE" not in out
        save_temperature(trained / "ensemble", 0.5)
        (found,) = json.loads(cmcl("evaluate", trained, "--json")[1])
        test = package.data.load("digits", split="test")
        scaled = package.load(trained).predict(test.images).probs[None]
        assert found["temperature"] == 0.5
        assert found["scaled_ece"] == pytest.approx(100 * package.metrics.ece(scaled, test.targets), abs=1e-3)
        assert found["scaled_ece"] != found["ece"]
        out = cmcl("evaluate", trained)[1]
        assert "Fit a temperature" not in out
        assert f"{found['scaled_ece']:.2f}" in out.splitlines()[-1].split()
        _, head, *rows, _, last = cmcl("evaluate", trained, other)[1].splitlines()
        assert "scaled ECE" in head
        assert ["-" in row.split() for row in rows] == [False, True, True], "no mean over one of two"
        assert last == f"cmcl calibrate {other}"

    def test_several_runs(self, cmcl, trained, tmp_path):
        """As `cmcl evaluate runs/digits-*` names them."""
        other = tmp_path / trained.name.replace("seed0", "seed1")
        shutil.copytree(trained, other)
        one, two = json.loads(cmcl("evaluate", trained, other, "--limit", 50, "--json")[1])
        assert {**one, "run": "", "name": ""} == {**two, "run": "", "name": ""}
        code, out, _ = cmcl("evaluate", trained, other, "--limit", 50)
        lines = [line.split() for line in out.splitlines()]
        assert code == 0
        assert out.splitlines()[0] == "digits: 50 test images, errors and ECE in %"
        assert [line[0] for line in lines[2:5]] == [trained.name, other.name, "mean"], "seeds of one recipe"
        assert lines[2][1:] == lines[3][1:] == lines[4][1:]
        shutil.move(other, tmp_path / "another")
        assert "mean" not in cmcl("evaluate", trained, tmp_path / "another", "--limit", 50)[1]

    def test_out_of_distribution(self, cmcl, trained):
        (found,) = json.loads(cmcl("evaluate", trained, "--ood", "digits", "--json", "--limit", 50)[1])
        assert found["ood"] == "digits"
        assert found["ood_entropy"] == found["entropy"], "the same images"
        assert found["auroc"] == pytest.approx(0.5), "and so not to be told apart"
        assert "OOD entropy" in cmcl("evaluate", trained, "--ood", "digits", "--limit", 5)[1]

    def test_an_out_of_distribution_folder(self, cmcl, mistake, trained, tmp_path, monkeypatch):
        """Classes in it, or test/ beside train/, or test/ alone."""
        (tmp_path / "odd" / "noise").mkdir(parents=True)
        for i in range(3):
            Image.effect_noise((20, 20), 90).save(tmp_path / "odd" / "noise" / f"{i}.png")
        own = ["--ood-root", tmp_path / "odd", "--ood-option", "size=8", "--ood-option", "mode=L"]
        words = ["evaluate", trained, "--limit", "5", *CPU]
        whole = json.loads(cmcl(*words, "--ood", "folder", *own, "--json")[1])
        for split in ("train", "test"):
            shutil.copytree(tmp_path / "odd" / "noise", tmp_path / "odd" / split / "noise")
        shutil.rmtree(tmp_path / "odd" / "noise")
        assert json.loads(cmcl(*words, "--ood", "folder", *own, "--json")[1]) == whole
        monkeypatch.setenv("HOME", str(tmp_path))
        own[1] = "~/odd"  # a shell leaves it so after --ood-root=
        shutil.rmtree(tmp_path / "odd" / "train")
        assert json.loads(cmcl(*words, "--ood", "folder", *own, "--json")[1]) == whole
        assert "--ood-root must name" in mistake(*words, "--ood", "folder", "--root", tmp_path)
        assert "--ood must name" in mistake(*words, *own)

    def test_an_ensemble_alone(self, cmcl, mistake, trained, tmp_path):
        shutil.copytree(trained / "ensemble", tmp_path / "mine")
        assert find_saved(trained / "ensemble").data == "digits"
        assert find_saved(tmp_path / "mine").data is None, "the transform was fitted to a part of a dataset"
        assert "--data must name the test data" in mistake("evaluate", tmp_path / "mine")
        assert cmcl("evaluate", tmp_path / "mine", "--data", "digits", "--limit", 5)[0] == 0

    def test_folders_that_are_no_run(self, mistake, trained, tmp_path):
        shutil.copytree(trained / "checkpoints", tmp_path / "interrupted" / "checkpoints")
        assert "`cmcl train RECIPE --resume`" in mistake("evaluate", tmp_path / "interrupted")
        assert mistake("evaluate", tmp_path).endswith("Got neither.\n")
        shutil.copytree(trained, tmp_path / "one")
        assert mistake("evaluate", tmp_path).endswith(f"Got neither. Name {tmp_path / 'one'}.\n")
        shutil.copytree(trained, tmp_path / "two")
        assert mistake("evaluate", tmp_path).endswith(f"Name {tmp_path / 'one'}, one of 2 runs in it.\n")

    @pytest.mark.parametrize("text", ["{", "[" * 99999])
    def test_damaged_files(self, cmcl, mistake, trained, tmp_path, text):
        shutil.copytree(trained, tmp_path / "run")
        (tmp_path / "run" / "recipe.json").write_text(text)
        assert "recipe.json must be JSON" in mistake("evaluate", tmp_path / "run")
        (tmp_path / "run" / "recipe.json").unlink()
        (tmp_path / "run" / "recipe.json").symlink_to("/dev/zero")  # a file without an end is never read
        assert cmcl("evaluate", tmp_path / "run", "--limit", 5)[0] == 0, "record.json has the dataset, too"


class TestClasses:
    """Labels are matched by name where the ensemble has class names: for digits "0" to "9"."""

    LABELS = (3, 7)

    @pytest.fixture
    def some(self):
        test = package.data.load("digits", split="test")
        return test.subset(torch.isin(test.targets, torch.tensor(self.LABELS)))

    @pytest.fixture
    def images(self, tmp_path, some):
        """A folder of threes and sevens, whose own numbers are 0 and 1."""

        def write(*names):
            for i, (image, target) in enumerate(some):
                for split in ("train", "test"):
                    folder = tmp_path / "images" / split / names[self.LABELS.index(int(target))]
                    folder.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(image[0].numpy()).save(folder / f"{i:03}.png")
            return ["--data", "folder", "--root", tmp_path / "images", "--option", "mode=L", *CPU]

        return write

    @pytest.mark.parametrize("layout", ["split", "whole", "test"])
    def test_evaluate(self, cmcl, trained, images, some, tmp_path, layout):
        """train/ and test/, classes right in the folder, or test/ alone."""
        arguments = images("3", "7")
        if layout != "split":
            shutil.rmtree(tmp_path / "images" / "train")
        if layout == "whole":
            arguments[3] = tmp_path / "images" / "test"
        code, out, _ = cmcl("evaluate", trained, *arguments, "--json")
        expected = package.evaluate(package.load(trained / "ensemble"), some)
        assert code == 0
        for key in ("top1", "oracle"):
            assert json.loads(out)[0][key] == pytest.approx(expected[key], abs=1e-4)
        assert expected["oracle"] < 100, "which the folder's own numbers would give"

    @pytest.mark.parametrize("limit", [None, 40])
    def test_calibrate(self, cmcl, trained, images, some, limit):
        words = ["calibrate", trained, *images("3", "7"), "--json", "--risk", "0.99"]
        code, out, _ = cmcl(*words, *(["--limit", limit] if limit else []))
        part = evenly_spaced(some.subset(some.targets.argsort(stable=True)), limit)  # as a folder is read
        assert len(set(part.targets.tolist())) == 2, "both classes, though they are sorted"
        wrong = package.load(trained / "ensemble").predict(part.images).probs.argmax(1) != part.targets
        half = len(part) // 2
        assert code == 0
        tested = json.loads(out)["tested"]
        counts = {"examples": half, "predicted": half, "errors": int(wrong[1::2].sum())}
        assert counts == {key: tested[key] for key in counts}

    @pytest.mark.parametrize("command", ["evaluate", "calibrate"])
    def test_an_unknown_name(self, mistake, trained, images, command):
        err = mistake(command, trained, *images("3", "seven"))
        assert "classes that the ensemble knows by name. Got seven. Valid names: 0, 1," in err

    def test_a_network_with_more_outputs_than_names(self, cmcl, mistake, tmp_path, images):
        """It was made for ten classes and trained on two: those are known by name all the same."""
        arguments = images("three", "seven")
        train = package.data.load("folder", root=tmp_path / "images", mode="L")
        network = package.networks.cnn
        ensemble = package.Ensemble(lambda: network(**FILTERS), 2)
        package.fit(ensemble, train, recipe=package.Recipe(members=2, steps=1), options=QUIET)
        ensemble.save(tmp_path / "mine")
        assert cmcl("evaluate", tmp_path / "mine", *arguments)[0] == 0
        (tmp_path / "images" / "test" / "three").rename(tmp_path / "images" / "test" / "drei")
        (tmp_path / "images" / "train" / "three").rename(tmp_path / "images" / "train" / "drei")
        assert "knows by name. Got drei." in mistake("evaluate", tmp_path / "mine", *arguments)
        image = next((tmp_path / "images").rglob("*.png"))
        found = json.loads(cmcl("predict", tmp_path / "mine", image, "--json")[1])
        index = found["prediction"]["index"]
        assert found["prediction"]["class"] == (["seven", "three"][index] if index < 2 else str(index))

    def test_an_ensemble_without_names(self, mistake, trained, images, tmp_path):
        shutil.copytree(trained / "ensemble", tmp_path / "mine")
        err = mistake("evaluate", tmp_path / "mine", *images("three", "seven"), "--json")
        assert "must have 10 classes" in err

    def test_pixels_to_ignore_stay(self):
        masks = torch.tensor([[[0, 1, 255]]], dtype=torch.uint8)
        data = package.data.Dataset(torch.zeros(1, 3, 1, 3, dtype=torch.uint8), masks, ("sea", "sky"))
        found = align_classes(data, ("sky", "sea"), 2)
        assert found.targets.tolist() == [[[1, 0, 255]]]
        assert found.targets.dtype == torch.uint8
        assert found.classes == ("sky", "sea")
        assert align_classes(data, ("sky", "sea", "land"), 2) is data, (
            "more names than outputs are not its own"
        )


FILTERS = dict(TINY.network_options)


def lines_of(out):
    return [json.loads(line) for line in out.splitlines()]


class TestPredict:
    @pytest.fixture
    def images(self, tmp_path):
        test = package.data.load("digits", split="test")
        paths = [tmp_path / f"{i}.png" for i in range(2)]
        for i, path in enumerate(paths):
            Image.fromarray(test.images[i, 0].numpy()).save(path)
        return paths

    def test_predictions_are_those_of_the_library(self, cmcl, trained, images):
        code, out, _ = cmcl("predict", trained, *images, "--json")
        found = lines_of(out)
        expected = package.load(trained / "ensemble").predict(
            package.data.load("digits", split="test").images[:2]
        )
        assert code == 0
        assert [one["image"] for one in found] == [str(path) for path in images]
        for i, one in enumerate(found):
            top = one["prediction"]
            assert top["index"] == int(expected.probs[i].argmax())
            assert top["class"] == str(top["index"]), "the names of digits"
            assert top["confidence"] == pytest.approx(float(expected.probs[i].max()), abs=1e-5)
            assert one["probs"] == pytest.approx(expected.probs[i].tolist(), abs=1e-5)
            assert one["chosen"] == int(expected.chosen[i])
            assert [m["index"] for m in one["members"]] == expected.member_probs[:, i].argmax(1).tolist()
            entropy = expected.entropy[:, i].tolist()
            assert [m["entropy"] for m in one["members"]] == pytest.approx(entropy, abs=1e-5)
        lines = cmcl("predict", trained, *images)[1].splitlines()
        assert len(lines) == 1 + 2 * (1 + 3)
        assert sum("most confident" in line for line in lines) == 2

    def test_sizes(self, cmcl, trained, tmp_path, monkeypatch):
        Image.new("RGB", (28, 20)).save(tmp_path / "large.png")
        assert cmcl("predict", trained, tmp_path / "large.png", "--resize")[0] == 0
        monkeypatch.setattr("cmcl.data.images.read_image", pytest.fail)  # pixels may fill the memory
        code, _, err = cmcl("predict", trained, tmp_path / "large.png")
        assert code == 1
        assert "large.png must be 8 x 8 pixels (height x width). Got 20 x 28. Pass --resize." in err

    def test_a_photo_stored_on_its_side_has_the_size_that_is_seen(self, cmcl, trained, tmp_path, monkeypatch):
        monkeypatch.setattr("cmcl.cli.inference._image_shape", lambda *_: (1, (16, 4)))

        def predict(_, batch, *__):
            return [{"error": found} if isinstance(found, str) else {} for _, found in batch]

        monkeypatch.setattr("cmcl.cli.inference._predict", predict)
        exif = Image.Exif()
        for orientation, code in ((6, 0), (1, 1)):
            exif[0x0112] = orientation
            Image.new("L", (16, 4)).save(tmp_path / "x.jpg", exif=exif)
            assert cmcl("predict", trained, tmp_path / "x.jpg", "--json")[0] == code

    def test_folders(self, cmcl, mistake, trained, images, tmp_path):
        inside = tmp_path / "some"
        (inside / "deeper").mkdir(parents=True)
        assert "some must hold images" in mistake("predict", trained, inside)
        for path in (inside / "b.png", inside / "a.png", inside / "deeper" / "c.png"):
            shutil.copy(images[1], path)
        (inside / "notes.txt").touch()
        found = lines_of(cmcl("predict", trained, images[0], inside, images[0], "--json")[1])
        paths = (images[0], inside / "a.png", inside / "b.png", images[0])
        assert [one["image"] for one in found] == [str(path) for path in paths]

    def test_some_damaged(self, cmcl, trained, images, tmp_path):
        (tmp_path / "cut.png").write_bytes(images[0].read_bytes()[:60])
        Image.new("L", (9, 8)).save(tmp_path / "wide.png")
        given = (images[0], tmp_path / "cut.png", tmp_path / "wide.png", images[1])
        alone = lines_of(cmcl("predict", trained, *images, "--json")[1])
        code, out, err = cmcl("predict", trained, *given, "--json")
        first, cut, wide, last = lines_of(out)
        assert (code, err) == (1, "")
        assert [first, last] == alone
        assert set(cut) == set(wide) == {"image", "error"}
        assert "cut.png is damaged" in cut["error"]
        assert "wide.png must be 8 x 8 pixels (height x width). Got 8 x 9." in wide["error"]
        code, out, err = cmcl("predict", trained, *given)
        assert (code, len(out.splitlines())) == (1, 1 + 2 * (1 + 3))
        assert err == f"cmcl: {cut['error']}\ncmcl: {wide['error']}\n"

    def test_all_damaged(self, cmcl, trained, tmp_path):
        for i in range(3):
            (tmp_path / f"{i}.png").write_text("hello")
        code, out, err = cmcl("predict", trained, tmp_path, "--json")
        assert (code, err) == (1, "")
        assert [Path(one["image"]).name for one in lines_of(out)] == ["0.png", "1.png", "2.png"]
        assert all("is not an image" in one["error"] for one in lines_of(out))
        code, out, err = cmcl("predict", trained, tmp_path)
        assert (code, out, err.count("\n")) == (1, "", 3)

    def test_a_class_per_pixel(self, cmcl, mistake, tmp_path):
        tiny = replace(find("shapes-ie"), members=2, epochs=None, steps=1, batch_size=4, subset=8)
        tiny = replace(tiny, network_options={"filters": [2, 2]})
        run(tiny, (0,), out=tmp_path, name="tiny", options=QUIET)
        folder = run_folder(tmp_path, "tiny", tiny, 0)
        Image.new("RGB", (40, 24), "red").save(tmp_path / "any.png")
        Image.new("RGB", (24, 40)).save(tmp_path / "other.png")
        found = json.loads(cmcl("predict", folder, tmp_path / "any.png", "--json")[1])
        parts = found["prediction"]["percent_of_pixels"]
        assert parts == found["members"][found["chosen"]]["percent_of_pixels"]
        assert list(parts) == ["background", "foreground"]
        assert sum(parts.values()) == pytest.approx(100)
        assert "probs" not in found
        code, out, _ = cmcl("predict", folder, tmp_path / "any.png", tmp_path / "other.png", "--json")
        assert code == 0
        assert lines_of(out)[0] == found, "images of two sizes are two batches"
        counts = {"examples": 1000, "predicted": 500, "errors": 1, "bound": 0.009}
        made = Threshold(value=0.25, score="confidence", risk=0.01, confidence=0.95, **counts)
        (tmp_path / "t.json").write_text(json.dumps(made.to_json()))
        err = mistake("predict", folder, tmp_path / "any.png", "--threshold", tmp_path / "t.json")
        assert "Got a class per pixel" in err


class TestManyFiles:
    """Read ahead by other processes, predicted batch by batch, printed as they come."""

    @pytest.fixture
    def images(self, tmp_path):
        return TestPredict.images.__wrapped__(self, tmp_path)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_list_of_files(self, cmcl, trained, images, tmp_path, monkeypatch, workers):
        """Damaged ones among several batches; the order is that of the list."""
        monkeypatch.setattr("cmcl.cli.inference.BATCH", 7)
        (tmp_path / "cut.png").write_bytes(images[0].read_bytes()[:60])
        one, two = (lines_of(cmcl("predict", trained, image, "--json")[1])[0] for image in images)
        given = [images[0], tmp_path / "cut.png", images[1], tmp_path / "none.png", images[0]] * 6
        (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in given) + "\n")
        words = ("predict", trained, "--from", tmp_path / "list.txt", "--workers", workers)
        code, out, err = cmcl(*words, "--json")
        assert (code, err) == (1, "")
        found = lines_of(out)
        assert [Path(row["image"]) for row in found] == given
        assert found[0::5] == found[4::5] == [one] * 6
        assert found[2::5] == [two] * 6
        assert all("cut.png is damaged" in row["error"] for row in found[1::5])
        assert all("none.png must exist" in row["error"] for row in found[3::5])
        code, out, err = cmcl(*words)
        assert (code, err.count("\n")) == (1, 12)
        assert out.count("ensemble ") == 18

    def test_from_stdin(self, cmcl, trained, images, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{images[0]}\n"))
        assert (
            cmcl("predict", trained, "--from", "-", "--json")[:2]
            == cmcl("predict", trained, images[0], "--json")[:2]
        )

    @pytest.mark.skipif(not GUIDE.exists(), reason="needs the repository")
    def test_an_array_of_tasks_as_the_guide_shows_it(self, trained, images, tmp_path):
        """No file is lost, none predicted twice, also after a task was killed while it wrote a line."""
        array, left = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
        programs = tmp_path / "bin"
        programs.mkdir()
        for name, program in (("cmcl", f"{sys.executable} -m cmcl"), ("python", sys.executable)):
            (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (programs / name).chmod(0o755)
        array = array.replace("runs/mine", str(trained)).replace("--workers 8", "--workers 1")

        def bash(script, **more):
            environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"} | more
            subprocess.run(["bash", "-c", script], check=True, env=environment, cwd=tmp_path)

        names = [f"images/{i}.png" for i in range(9)]
        (tmp_path / "images").mkdir()
        for i, name in enumerate(names):
            shutil.copy(images[i % 2], tmp_path / name)
        (tmp_path / "files.txt").write_text("".join(f"{name}\n" for name in names))
        for task in range(2):
            bash(array, SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_TASK_COUNT="2")
        rows = [lines_of(path.read_text()) for path in sorted(tmp_path.glob("predictions-*.jsonl"))]
        assert [[row["image"] for row in part] for part in rows] == [names[::2], names[1::2]]
        os.truncate(tmp_path / "predictions-0.jsonl", (tmp_path / "predictions-0.jsonl").stat().st_size - 50)
        bash(left)
        assert (tmp_path / "left.txt").read_text() == "images/8.png\n"

    @pytest.mark.parametrize("words", [[], ["x.png", "--from", "y"]])
    def test_nothing_or_both(self, mistake, trained, images, words, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "x.png").touch()
        assert "name IMAGES, or a list of them with --from" in mistake("predict", trained, *words)

    def test_memory_does_not_grow_with_the_number_of_files(self, images):
        """What is read of 600 and of 6,000 files; holding all of these would take 74 MB."""
        from cmcl.cli.inference import _batches
        from cmcl.data.images import ImageReader, read_many

        def peak(count):
            tracemalloc.start()
            reader = ImageReader("RGB", size=(64, 64))  # 12 kB each
            paths = (Path(str(images[i % 2])) for i in range(count))
            seen = sum(len(batch) for batch in _batches(read_many(reader, paths, 0), any_size=False))
            assert seen == count
            found = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return found

        peak(20)
        one_batch, many = peak(600), peak(6000)
        assert many < 1.2 * one_batch + 2**20
        assert one_batch > 250 * 64 * 64 * 3, "what is measured holds a batch"

    @pytest.mark.slow
    def test_the_command_holds_neither_images_nor_rows(self, trained, images, tmp_path):
        """Peak memory of the process. The 5,000 more rows take about 20 MB."""
        code = (
            "import atexit, resource, sys\n"
            "peak = lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
            "atexit.register(peak)\n"
            "from cmcl import cli\n"
            "cli.main()\n"
        )

        def peak(count):
            (tmp_path / "files.txt").write_text(f"{images[0]}\n" * count)
            words = ["predict", trained, "--from", tmp_path / "files.txt", "--json", "--workers", "0", *CPU]
            command = [sys.executable, "-c", code, *map(str, words)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stdout.count("\n") == count
            return int(done.stderr.split()[-1]) / 1024  # MB

        peak(10)
        assert peak(6000) - peak(1000) < 8

    def test_large_images_make_small_batches(self):
        from cmcl.cli.inference import PIXELS, _batches

        image = np.zeros((3, 1024, 1024), np.uint8)
        sizes = [len(batch) for batch in _batches([(Path("x"), image)] * 20, any_size=True)]
        assert sizes == [6, 6, 6, 2]
        assert PIXELS == 2**24


class TestThreshold:
    @pytest.fixture
    def images(self, tmp_path):
        return TestPredict.images.__wrapped__(self, tmp_path)

    @pytest.fixture
    def threshold(self, cmcl, trained, images, tmp_path):
        """Between the scores of the two images, in a file of `cmcl calibrate`: one of them is predicted."""
        path = tmp_path / "threshold.json"
        options = ("--score", "mean_entropy", "--limit", 20, "--risk", 0.9, *CPU)
        cmcl("calibrate", trained, *options, "-o", path)
        values = json.loads(path.read_text())
        test = package.data.load("digits", split="test").images[:2]
        scores = uncertainty(package.load(trained / "ensemble").predict(test).member_probs, "mean_entropy")
        path.write_text(json.dumps(values | {"value": float(scores.mean()), "predicted": 5, "errors": 0}))
        return path, scores.tolist()

    def test_abstain(self, cmcl, trained, images, threshold, tmp_path):
        path, scores = threshold
        above = [score > min(scores) for score in scores]
        code, out, err = cmcl("predict", trained, *images, "--threshold", path, "--json")
        assert (code, err) == (0, "")
        assert [one["score"] for one in lines_of(out)] == pytest.approx(scores, abs=1e-6)
        assert [one["abstained"] for one in lines_of(out)] == above
        lines = cmcl("predict", trained, *images, "--threshold", path)[1].splitlines()
        assert [line.endswith("  abstains") for line in lines if "ensemble" in line] == above
        printed = tmp_path / "printed.json"  # as `cmcl calibrate --json > printed.json` leaves it
        printed.write_text(json.dumps({"threshold": json.loads(path.read_text()), "tested": {}}))
        assert cmcl("predict", trained, *images, "--threshold", printed, "--json")[1] == out

    def test_temperature(self, cmcl, trained):
        """Fitted on every second image, measured on the others."""
        _, out, _ = cmcl("calibrate", trained, "--risk", 0.99, *CPU, "--json")
        found, test = json.loads(out), package.data.load("digits", split="test")
        probs = package.load(trained / "ensemble").predict(test.images).member_probs
        expected = calibration.fit_temperature(probs[:, ::2], test.targets[::2])
        assert found["temperature"] == pytest.approx(expected, rel=1e-3)
        scaled = calibration.apply_temperature(probs[:, 1::2], expected)[None]
        for key, values in (("ece", probs[:, 1::2]), ("scaled_ece", scaled)):
            ece = 100 * package.metrics.ece(values, test.targets[1::2])
            assert found["tested"][key] == pytest.approx(ece, abs=0.05), key
        assert "after temperature scaling" in cmcl("calibrate", trained, "--risk", 0.99, *CPU)[1]
        record = read(trained / "record.json")
        assert record.calibration["temperature"] == found["temperature"]
        assert record.calibration["scaled_ece"] == found["tested"]["scaled_ece"]
        assert sum(record.calibration["scaled_reliability"]["count"]) == len(test) // 2
        cmcl("calibrate", trained, "--risk", 0.99, "--limit", 40, *CPU)
        kept = read(trained / "record.json").calibration
        assert not {"temperature", "scaled_ece", "scaled_reliability"} & kept.keys(), "not of the same data"

    def test_the_temperature_is_saved(self, cmcl, trained, images):
        """`predict` uses it later, whether a threshold was found or not; the weights are not written."""
        before = cmcl("predict", trained, *images, "--json")[1]
        files = {path: path.read_bytes() for path in (trained / "ensemble").glob("*.safetensors")}
        code, out, _ = cmcl("calibrate", trained, "--json", "--risk", 1e-6, *CPU)
        temperature = json.loads(out)["temperature"]
        assert code == 1
        assert package.load(trained).temperature == temperature != 1
        assert files == {path: path.read_bytes() for path in files}
        after = cmcl("predict", trained, *images, "--json")[1]
        for old, new in zip(lines_of(before), lines_of(after), strict=True):
            powers = np.array(old["probs"]) ** (1 / temperature)
            assert new["probs"] == pytest.approx(powers / powers.sum(), abs=1e-3)
            assert old["members"] == new["members"]

    def test_of_segmentation(self, cmcl, mistake, tmp_path):
        """A temperature, and no threshold."""
        tiny = replace(find("shapes-ie"), members=2, epochs=None, steps=4, batch_size=4, subset=8)
        run(tiny, (0,), out=tmp_path, name="shapes", options=QUIET)
        folder = run_folder(tmp_path, "shapes", tiny, 0)
        err = mistake("calibrate", folder, "--limit", 8, "-o", tmp_path / "t.json", *CPU)
        assert "--out must be left out for segmentation" in err
        code, out, _ = cmcl("calibrate", folder, "--limit", 8, "--json", *CPU)
        found, test = json.loads(out), evenly_spaced(package.data.load("shapes", split="test"), 8)
        assert (code, found["threshold"], found["tested"]["examples"]) == (0, None, 4)
        ensemble = package.load(folder)
        assert ensemble.temperature == found["temperature"]
        member_probs = ensemble.predict(test.images[::2]).member_probs
        expected = calibration.fit_temperature(member_probs, test.targets[::2], ignore_index=255)
        assert found["temperature"] == pytest.approx(expected, rel=1e-2)
        assert "after temperature scaling" in cmcl("calibrate", folder, "--limit", 8, *CPU)[1]

    def test_a_folder_that_cannot_be_written(self, mistake, trained, monkeypatch):
        monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
        assert "RUN must name a folder that can be written" in mistake("calibrate", trained, *CPU)

    def test_none_reaches_the_risk(self, cmcl, trained, images, tmp_path):
        """`calibrate` fails, and `predict` says why it abstains on everything."""
        path = tmp_path / "t.json"
        code, out, err = cmcl("calibrate", trained, "--limit", 20, "-o", path, "--json")
        assert code == 1
        assert json.loads(out)["tested"]["predicted"] == 0
        assert "abstain on every image" in err
        code, out, err = cmcl("predict", trained, *images, "--threshold", path, "--json")
        assert code == 0
        assert all(one["abstained"] for one in lines_of(out))
        assert "10 calibration examples" in err

    def test_a_very_small_risk(self, mistake, trained):
        assert "--risk" in mistake("calibrate", trained, "--limit", 20, "--risk", "1e-320")

    def test_of_another_ensemble(self, cmcl, mistake, trained, images, threshold, tmp_path):
        ensemble = package.load(trained / "ensemble")
        with torch.no_grad():
            next(ensemble.parameters()).add_(1)
        ensemble.save(tmp_path / "other")
        words = ("predict", tmp_path / "other", *images, "--threshold", threshold[0])
        err = mistake(*words)
        assert f"--threshold must be calibrated for {tmp_path / 'other'}. Got {threshold[0]}, of" in err
        assert f"cmcl calibrate {tmp_path / 'other'} -o {threshold[0]}." in err
        values = json.loads(threshold[0].read_text())
        del values["weights"]  # as the library writes it
        threshold[0].write_text(json.dumps(values))
        assert cmcl(*words)[0] == 0

    def test_of_predictions_with_other_mirror_images(self, cmcl, mistake, trained, images, threshold):
        path, _ = threshold
        words = ("predict", trained, *images, "--threshold", path)
        assert "must be used with --no-flip, as calibrated. Got --flip." in mistake(*words, "--flip")
        values = json.loads(path.read_text())
        assert values["flip"] is False
        path.write_text(json.dumps(values | {"flip": True}))
        assert cmcl(*words, "--flip")[0] == 0
        assert "must be used with --flip, as calibrated. Got --no-flip." in mistake(*words)

    @pytest.mark.parametrize("text", [None, "{", "[1]", "{}", "[" * 99999])
    def test_not_a_threshold(self, mistake, trained, images, tmp_path, monkeypatch, text):
        if text is not None:
            (tmp_path / "t.json").write_text(text)
        monkeypatch.setattr("cmcl.serialization.load", pytest.fail)
        err = mistake("predict", trained, *images, "--threshold", tmp_path / "t.json")
        assert "--threshold must be a file of `cmcl calibrate`" in err
        assert "Write it with: cmcl calibrate" in err


class TestReport:
    @pytest.mark.parametrize(("format", "name"), [("html", "report.html"), ("md", "report.md")])
    def test_of_a_run(self, cmcl, trained, tmp_path, monkeypatch, format, name):
        monkeypatch.chdir(tmp_path)
        code, out, err = cmcl("report", trained, "--format", format)
        assert (code, out, err) == (0, f"{name}\n", "")
        assert "tiny-cmcl" in (tmp_path / name).read_text()

    def test_of_the_current_folder(self, cmcl, mistake, trained, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert "results/ or runs/ or cmcl-demo/ must exist" in mistake("report")
        shutil.copytree(trained, tmp_path / "runs" / trained.name)
        assert cmcl("report", "--format", "md", "-o", "mine.md")[1] == "mine.md\n"


def test_search_root(tmp_path, monkeypatch):
    """Under --root, or else in the default folder."""
    own, default = tmp_path / "own", tmp_path / "default"
    monkeypatch.setenv("CMCL_DATA", str(default))

    def read(folder):
        if not (folder / "set").exists():
            raise FileNotFoundError(f"{folder}/set must exist.")
        return folder.name

    for root, message in (
        (None, f"{default}/set must exist."),
        (own, f"it must be in {own} or {default}. Got neither"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            search_root(read, root, "it")
    (default / "set").mkdir(parents=True)
    assert search_root(read, None, "it") == search_root(read, own, "it") == "default"
    (own / "set").mkdir(parents=True)
    assert search_root(read, own, "it") == "own"


@pytest.mark.parametrize("command", ["evaluate", "calibrate"])
def test_root_need_not_hold_the_dataset_of_the_preprocessing(cmcl, mistake, tmp_path, monkeypatch, command):
    (tmp_path / "sets" / "svhn").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    labels = np.array([[1], [2], [3], [10]])
    savemat(tmp_path / "sets" / "svhn" / "train_32x32.mat", {"X": pixels, "y": labels})
    for place in ("train/3", "train/7", "test/3", "test/7"):
        (tmp_path / "images" / place).mkdir(parents=True)
        for i in range(4):
            Image.effect_noise((32, 32), 90).save(tmp_path / "images" / place / f"{i}.png")
    network = package.networks.cnn
    ensemble = package.Ensemble(lambda: network(filters=(2, 2), kernel=3, padding=1, hidden=None), 2)
    ensemble.transform = MeanStd().fit(package.data.load("svhn", root=tmp_path / "sets"))
    monkeypatch.setattr("cmcl.serialization.SMALL", 0)  # as if it were whitening
    ensemble.save(tmp_path / "saved")
    own = [command, tmp_path / "saved", "--data", "folder", "--root", tmp_path / "images", *CPU]
    own += ["--risk", 0.999] if command == "calibrate" else []
    monkeypatch.setenv("CMCL_DATA", str(tmp_path / "sets"))
    assert cmcl(*own)[0] in (0, 1), "1: so few images reach no risk"
    monkeypatch.setenv("CMCL_DATA", str(tmp_path / "nowhere"))
    err = mistake(*own)
    assert f"preprocessing is fitted again must be in {tmp_path / 'images'}" in err
    assert "cmcl data fetch svhn" in err
