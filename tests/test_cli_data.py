import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cmcl import cli

DOCS = Path(__file__).parents[1] / "docs"


def test_list(cmcl):
    """The same as `cmcl list data`, whose names test_cli.py compares."""
    found = json.loads(cmcl("data", "list", "--json")[1])
    assert found == json.loads(cmcl("list", "data", "--json")[1])["data"]
    lines = cmcl("data", "list")[1].splitlines()[1:]
    assert [line.split()[0] for line in lines] == [entry["name"] for entry in found]


@pytest.mark.parametrize("page", ["guides/data.md", "guides/choosing-beta-and-k.md"])
def test_the_documents_train_on_a_folder(cmcl, tmp_path, monkeypatch, page):
    """The commands as they stand there, on pictures that lie as data.md says; only shorter."""
    monkeypatch.chdir(tmp_path)
    rng, own = np.random.default_rng(0), page == "guides/data.md"
    for place in ("cat", "dog") if own else ("train/cat", "train/dog", "test/cat", "test/dog"):
        (folder := tmp_path / "my-images" / place).mkdir(parents=True)
        for i in range(20):
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / f"{i}.jpg")
    text = (DOCS / page).read_text().replace(" \\\n        ", " ")
    if not own:
        command = re.search(r"^    cmcl (.* --set data=folder .*)$", text, re.MULTILINE)[1]
        short = ["--set", "steps=3", "--betas", "0.5", "--overlaps", "2", "--quiet", "--device", "cpu"]
        code, out, err = cmcl(*command.split(), *short)
        assert (code, err) == (0, "")
        assert "datafolder" in out
        return
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "mynet", None)  # so that it is forgotten after the test
    del sys.modules["mynet"]
    network = "lambda classes, channels: cmcl.networks.resnet20(classes=classes, channels=channels, width=1)"
    (tmp_path / "mynet.py").write_text(f"import cmcl\nbuild = {network}\n")
    train, evaluate, *more = re.findall(
        r"^    cmcl ((?:train|evaluate) .* folder:my-images.*|evaluate .*)$", text, re.M
    )
    code, _, err = cmcl(*train.split(), "--steps", 2, "--quiet", "--device", "cpu")
    assert (code, err) == (0, "")
    (run,) = tmp_path.glob(evaluate.split()[1])
    code, out, _ = cmcl("evaluate", run, *evaluate.split()[2:])
    assert code == 0
    assert ": 8 test images" in out, "a fifth of 40"
    assert len(more) == 2
    for command in more:
        assert cmcl(*command.split(), "--steps", 1, "--members", 2, "--overlap", 1, "--quiet")[0] == 0, (
            command
        )


def test_check_prints_what_a_person_wants_to_know(cmcl):
    code, out, _ = cmcl("data", "check", "digits")
    assert code == 0
    assert out.splitlines()[0] == "digits: 1,438 train, 359 test"
    assert "  3  146" in out.splitlines()
    assert "  mean  0.3060" in out


def test_check_prints_json(cmcl):
    code, out, _ = cmcl("data", "check", "digits", "--json", "--validation", "0.1", "--seed", "2")
    report = json.loads(out)
    assert code == 0
    assert set(report["counts"]) == {"train", "validation", "test"}
    assert sum(report["classes"].values()) == report["counts"]["train"]
    assert len(report["mean"]) == len(report["std"]) == 1


def test_options_of_a_set(cmcl):
    code, out, _ = cmcl(
        "data",
        "check",
        "shapes",
        "--json",
        "--option",
        "groups=2",
        "--option",
        "per_group=5",
        "--option",
        "size=[8,12]",
    )
    assert code == 0
    assert json.loads(out)["classes"].keys() == {"background", "foreground"}
    assert sum(json.loads(out)["classes"].values()) == 8 * 8 * 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "check", "cifarten"], "Did you mean 'cifar10'?"),
        (["data", "check", "cifar10", "--root", "ROOT"], "cmcl data fetch cifar10"),
        (["data", "check", "svhn", "--root", "ROOT"], "cmcl data fetch svhn"),
        (["data", "check", "icoseg", "--root", "ROOT"], "chenlab.ece.cornell.edu"),
        (["data", "check", "digits", "--validation", "1.5"], "between 0 and 1. Got 1.5."),
        (["data", "check", "digits", "--option", "size"], "NAME=VALUE. Got 'size'."),
        (["data", "check", "shapes", "--option", "siez=3"], "Did you mean 'size'?"),
        (["data", "check", "shapes", "--option", "size=8,8"], "Got '8,8'. Write size=[75,125] or size=64."),
        (["data", "check", "folder"], "root must name the folder"),
        (["data", "check"], "Missing argument"),
        (["data", "check", "digits", "--what"], "No such option"),
        (["data", "fetch", "digits"], "cifar10, svhn"),
        (["date"], "No such command"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(mistake, tmp_path, arguments, message):
    assert message in mistake(*(tmp_path if argument == "ROOT" else argument for argument in arguments))


def test_all_broken_files_fit_on_the_one_line(mistake, tmp_path):
    (tmp_path / "cat").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "cat" / name).touch()
    err = mistake("data", "check", "folder", "--root", tmp_path)
    assert "a.png is empty" in err
    assert "b.png is empty" in err


def test_debugging_shows_the_traceback(cmcl, monkeypatch):
    monkeypatch.setenv("CMCL_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["cmcl", "data", "check", "cifarten"])
    with pytest.raises(ValueError, match="Did you mean"):
        cli.main()


def test_float_values_survive_json(cmcl, tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((2, 2, 3), 51, np.uint8)).save(tmp_path / "a" / "x.png")
    _, out, _ = cmcl("data", "check", "folder", "--root", tmp_path, "--json")
    assert json.loads(out)["mean"] == pytest.approx([0.2, 0.2, 0.2])
