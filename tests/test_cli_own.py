"""The commands on an ensemble of the user's own network, and on inputs that do not fit."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import cmcl as package
from cmcl import cli
from cmcl.data.dataset import evenly_spaced

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
def folder(tmp_path_factory):
    """What the tutorial leaves: runs/mine by `cmcl.record`, and an ensemble that was made with output=."""
    home = tmp_path_factory.mktemp("home")
    (home / "my_own_net.py").write_text(MODULE)
    names = {}
    exec(MODULE, names)
    train, test = (
        evenly_spaced(package.data.load("digits", split=split), 100) for split in ("train", "test")
    )
    recipe = package.Recipe(members=2, overlap=1, steps=2, optimizer="adam", lr=0.01)
    quiet = package.Options(quiet=True, device="cpu")
    for name, network, output in (("mine", "network", None), ("dicts", "Dict", names["logits"])):
        torch.manual_seed(0)
        ensemble = package.Ensemble(names[network], 2, output=output)
        pair = (train.images, train.targets)
        result = package.fit(ensemble, pair, recipe=recipe, out=home / "runs" / name, options=quiet)
        package.record(home / "runs" / name, ensemble, test, recipe=recipe, result=result)
    for place in ("train/0", "train/1", "test/0", "test/1"):  # pictures of another size
        (home / "pictures" / place).mkdir(parents=True)
        Image.new("L", (9, 9)).save(home / "pictures" / place / "wide.png")
    np.save(home / "inputs.npy", test.images[:6].numpy())
    np.save(home / "float64.npy", test.images[:6].numpy() / 255)
    np.save(home / "wide.npy", np.zeros((4, 1, 9, 9), np.float32))
    Image.fromarray(test.images[0, 0].numpy()).save(home / "digit.png")
    return home


@pytest.fixture
def here(folder, monkeypatch):
    """In that folder, which is no part of this process's path afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_own_net", raising=False)
    return folder


MINE = ("--network", "my_own_net:network")
DICTS = ("--network", "my_own_net:Dict", "--output", "my_own_net:logits")
ON_CPU = ("--device", "cpu")
FOLDER = ("--data", "folder", "--root", "pictures", "--option", "mode=L")
COLOUR = ("--data", "folder", "--root", "pictures", "--option", "mode=RGB")


@pytest.mark.parametrize(("run", "own"), [("mine", MINE), ("dicts", DICTS)])
class TestOwnNetwork:
    def test_evaluate(self, cmcl, here, run, own):
        code, out, _ = cmcl(
            "evaluate", f"runs/{run}", "--data", "digits", "--limit", 100, *own, *ON_CPU, "--json"
        )
        record = json.loads((here / "runs" / run / "record.json").read_text())
        assert code == 0
        assert json.loads(out)["top1"] == pytest.approx(record["errors"]["expected"]["top1"])

    def test_predict(self, cmcl, here, run, own):
        code, out, _ = cmcl("predict", f"runs/{run}", "digit.png", *own, *ON_CPU, "--json")
        assert code == 0
        (answer,) = json.loads(out)
        assert answer["answer"]["class"] == str(answer["answer"]["index"])
        assert len(answer["members"]) == 2

    def test_reject(self, cmcl, here, run, own):
        code, out, _ = cmcl(
            "reject", f"runs/{run}", "--data", "digits", "--limit", 60, *own, *ON_CPU, "--json"
        )
        assert code == 0
        assert json.loads(out)["threshold"]["examples"] == 30

    def test_export(self, cmcl, here, run, own, tmp_path):
        words = ("export", f"runs/{run}", "--example", "inputs.npy", "-o", tmp_path / "m.pt2")
        code, out, _ = cmcl(*words, *own, "--format", "torch", "--json")
        assert code == 0
        assert json.loads(out)["input"] == "uint8 (batch, 1, 8, 8)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "runs/mine", "--example", "inputs.npy", "-o", "m.pt2"], "--network MODULE:FUNCTION"),
        (["evaluate", "runs/mine", "--data", "digits"], "--network MODULE:FUNCTION"),
        (["predict", "runs/mine", "digit.png"], "--network MODULE:FUNCTION"),
        (["reject", "runs/mine", "--data", "digits"], "--network MODULE:FUNCTION"),
        (["reject", "runs/mine", *MINE], "--data must name the set to calibrate on"),
        (["evaluate", "runs/dicts", "--data", "digits", *DICTS[:2]], "--output MODULE:FUNCTION"),
        (["predict", "runs/mine", "digit.png", "--network", "net"], "--network must be MODULE:FUNCTION"),
        (["predict", "runs/mine", "digit.png", "--network", "no_such:f"], "no_such must be a Python module"),
        (["predict", "runs/mine", "digit.png", "--network", "my_own_net:f"], "must have the function f"),
        (
            ["predict", "runs/mine", "digit.png", "--network", "my_own_net:number"],
            "must be a function that builds a network. Got int.",
        ),
    ],
)
def test_what_is_missing(cmcl, here, arguments, message):
    code, out, err = cmcl(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers", "cnn", "--input", "784"], "must describe an input that cnn takes. Got 784;"),
        (["layers", "my_own_net:network", "--input", "1,9,9"], "Got 1,9,9;"),
        (
            ["export", "runs/mine", "--example", "float64.npy", "-o", "m.pt2", *MINE],
            "they compute in float32.",
        ),
        (["export", "runs/mine", "--example", "wide.npy", "-o", "m.pt2", *MINE], "of shape (4, 1, 9, 9)"),
        (["evaluate", "runs/mine", "--data", "shapes", "--limit", 4, *MINE], "Name another set."),
        (
            ["evaluate", "runs/mine", *FOLDER, *MINE, *ON_CPU],
            "--data must name images of the kind that the ensemble takes. Got folder (pictures/test),",
        ),
        (
            ["reject", "runs/mine", *FOLDER, *MINE, *ON_CPU],
            "--data must name images of the kind that the ensemble takes. Got folder (pictures/test),",
        ),
        (
            ["evaluate", "runs/mine", "--data", "digits", "--ood", "shapes", "--limit", 4, *MINE, *ON_CPU],
            "--ood must name images of the kind that the ensemble takes. Got shapes (drawn), 3 x 64 x 64:",
        ),
        (
            ["evaluate", "runs/mine", *COLOUR, *MINE, *ON_CPU],
            "Got 3. Change them by --option mode=L (grey) or mode=RGB, and by --option size=[HEIGHT,WIDTH].",
        ),
        (
            ["reject", "runs/mine", *COLOUR, *MINE, *ON_CPU],
            "--data must name images of the kind that the ensemble takes. Got folder (pictures/test),",
        ),
        (["evaluate", "runs/mine", "--data", "arrays", *MINE], "Got arrays, which live in Python. Use cmcl."),
        (["reject", "runs/mine", "--data", "arrays", *MINE], "--data must be a set that is on disk"),
        (
            ["evaluate", "runs/mine", "--data", "digits", "--ood", "arrays", *MINE],
            "--ood must be a set that is on disk or needs no file. Got arrays",
        ),
        (["predict", "runs/mine", "wide.png", *MINE], "must have the size that runs/mine was trained on"),
    ],
)
def test_shapes_that_do_not_fit_are_one_line(cmcl, here, arguments, message):
    Image.new("L", (9, 9)).save("wide.png")
    code, out, err = cmcl(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_fault_that_is_not_the_users_keeps_its_traceback(here, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("ours")

    monkeypatch.setattr("cmcl.serialization.load", broken)
    monkeypatch.setattr(sys, "argv", ["cmcl", "predict", "runs/mine", "digit.png", *MINE])
    with pytest.raises(RuntimeError, match="ours"):
        cli.main()


@pytest.mark.parametrize(
    "command", [["export", "runs/mine", "--example", "inputs.npy"], ["reject", "runs/mine"]]
)
def test_a_folder_to_write_to_is_refused_before_the_work(cmcl, here, monkeypatch, tmp_path, command):
    monkeypatch.setattr("cmcl.serialization.load", pytest.fail)
    code, _, err = cmcl(*command, "-o", tmp_path)
    assert code == 2
    assert "--out must name a file. Got the folder" in err
