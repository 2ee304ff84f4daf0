"""`cmcl train`: real runs of two steps on scikit-learn's digits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import cmcl as package
from cmcl.cli.train import change, changed_name
from cmcl.reproduction import find
from cmcl.reproduction.recipes import RECIPES, SHAPES
from cmcl.reproduction.record import read
from cmcl.training.config import Augment

DIGITS = find("digits-cmcl")
FILTERS = dict(DIGITS.network_options) | {"filters": [2, 4]}
BOTH = {"sharing": True, "labels": "sampled"}
TINY = replace(find("digits-300-cmcl"), members=3, epochs=None, steps=2, network_options=FILTERS, **BOTH)
TINY_SHAPES = replace(
    SHAPES, members=2, epochs=None, steps=1, batch_size=4, subset=8, network_options={"filters": [2, 2]}
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny-cmcl", TINY)
    monkeypatch.setitem(RECIPES, "tiny-shapes", TINY_SHAPES)


@pytest.fixture
def train(cmcl, tmp_path):
    return lambda *words: cmcl("train", "tiny-cmcl", "--out", tmp_path, "--quiet", "--device", "cpu", *words)


FOLDER = f"tiny-cmcl--{TINY.hash}--seed0"


def test_a_run_folder(train, tmp_path):
    code, out, err = train("--json")
    (row,) = json.loads(out)
    assert (code, err) == (0, "")
    assert row["run"] == str(tmp_path / FOLDER)
    for name in ("recipe.json", "telemetry.jsonl", "checkpoints", "record.json", "ensemble/config.json"):
        assert (tmp_path / FOLDER / name).exists(), name
    scores = package.evaluate(
        package.load(tmp_path / FOLDER / "ensemble"), package.data.load("digits", split="test")
    )
    assert row["examples"] == 359
    for key in ("top1", "oracle", "member"):
        assert row[key] == pytest.approx(scores[key], abs=1e-5)


def test_what_is_there_is_not_trained_again(train, tmp_path):
    assert train()[0] == 0
    code, _, err = train()
    assert code == 2
    assert "It holds this run, finished. Evaluate it with `cmcl evaluate" in err
    (tmp_path / FOLDER / "record.json").unlink()
    code, _, err = train()
    assert code == 2
    assert "interrupted at step 2 of 2. Resume it with --resume" in err
    code, out, _ = train("--resume")
    assert code == 0
    assert "tiny-cmcl: errors on 359 test images" in out


def test_resume_needs_something_to_resume(train, tmp_path):
    code, out, err = train("--resume")
    assert (code, out) == (2, "")
    assert f"Got none at {tmp_path / FOLDER}; {tmp_path} holds no run" in err
    assert train("--seed", 1)[0] == 0
    code, _, err = train("--resume")
    assert code == 2
    assert f"holds tiny-cmcl--{TINY.hash}--seed1" in err
    assert train("--resume", "--seeds", 2)[0] == 0, "one of the two runs is there"
    shutil.rmtree(tmp_path / FOLDER / "checkpoints")
    record = (tmp_path / FOLDER / "record.json").read_bytes()
    code, _, err = train("--resume")
    assert code == 2
    assert "holds a finished run without one" in err
    assert (tmp_path / FOLDER / "record.json").read_bytes() == record, "it was not trained again"


def test_the_best_of_several_runs_is_bold_on_a_terminal(train, cmcl, tmp_path, monkeypatch):
    """In the tables of `train` and `evaluate`; the mean below them is not a run."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def bold(text):  # without the heads, which are bold too
        return [line for line in text.splitlines() if line.startswith("\x1b[1m") and "top-1" not in line]

    assert bold(train("--seed", 2)[1]) == []
    shown = train("--seeds", 2)[1]
    folders = [tmp_path / f"{FOLDER[:-1]}{seed}" for seed in range(2)]
    errors = [read(folder / "record.json").errors["expected"]["top1"] for folder in folders]
    assert errors[0] != errors[1]
    best = errors.index(min(errors))
    for text, start in ((shown, f"{best} "), (cmcl("evaluate", *folders)[1], folders[best].name)):
        (line,) = bold(text)
        assert line.removeprefix("\x1b[1m").startswith(start)
        assert f"{min(errors):.2f}" in line


def test_a_record_is_not_replaced_by_another_run(cmcl, mistake, tmp_path):
    """The same seed with another precision, say: two numbers, and nobody may choose between them."""
    words = ["train", "tiny-cmcl", "--results", tmp_path, "--quiet", "--out"]
    assert cmcl(*words, tmp_path / "first")[0] == 0
    (path,) = (tmp_path / "records").iterdir()
    before = path.read_bytes()
    for more in ([], ["--seeds", "2"]):
        err = mistake(*words, tmp_path / "second", "--precision", "bf16", *more)
        assert f"{path} must not exist yet" in err
    assert not (tmp_path / "second").exists()
    (tmp_path / "third" / FOLDER).mkdir(
        parents=True
    )  # as a run leaves it that died before its first checkpoint
    assert cmcl(*words, tmp_path / "third", "--resume")[0] == 2
    assert cmcl(*words, tmp_path / "first", "--resume")[0] == 0  # the run itself is evaluated again
    assert path.read_bytes() == before
    path.write_text("damaged")
    assert cmcl(*words, tmp_path / "second")[0] == 0
    assert read(path) is not None


def test_time_over_and_resume(train):
    words = ["--steps", "200", "--json"]
    code, out, err = train(*words, "--budget", "0.01s")
    assert (code, out) == (3, "")
    assert "time over at step" in err
    assert err.endswith("resume with the same command and --resume.\n")
    code, out, _ = train(*words, "--resume")
    assert code == 0
    assert json.loads(out)[0]["name"] == "tiny-cmcl-steps200"


def test_time_over_while_k_is_chosen(train):
    code, _, err = train("--steps", "200", "--overlap", "auto", "--budget", "0.01s")
    assert code == 3
    assert "It was choosing K, and begins that again: resume with the same command and --resume." in err
    assert train("--steps", "200", "--overlap", "auto", "--resume")[0] == 0


@pytest.mark.slow
def test_a_signal(tmp_path):
    """A real process, stopped by a real signal once it trains."""
    words = ["train", "digits-300-cmcl", "--epochs", "9999", "--out", str(tmp_path), "--save-every", "0.1"]
    source = str(Path(__file__).parents[1] / "src")
    process = subprocess.Popen(
        [sys.executable, "-m", "cmcl", *words],
        env=os.environ | {"PYTHONPATH": source},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("*/checkpoints/*.safetensors")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 3
    assert "SIGINT at step" in err.splitlines()[-1]


@pytest.mark.parametrize("moment", ["cmcl.reproduction.runner.fit", "cmcl.reproduction.runner.evaluate_run"])
def test_ctrl_c_outside_of_the_loop(train, monkeypatch, moment):
    """Before the first step, and after the last."""

    def interrupt(*args, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(moment, interrupt)
        code, out, err = train()
    assert (code, out, err.count("\n")) == (130, "", 1)
    assert "resume with the same command and --resume" in err
    assert train("--resume")[0] == 0


@pytest.mark.parametrize(("examples", "warned"), [(9, True), (10, False)])
def test_a_subset_smaller_than_the_number_of_classes(train, examples, warned):
    code, _, err = train("--subset", examples, "--batch-size", 5)
    assert code == 0
    assert err == warned * "cmcl: digits has 10 classes: a subset of 9 leaves out 1 of them.\n"


def test_one_image_has_all_classes_of_its_pixels(cmcl, tmp_path):
    code, _, err = cmcl("train", "tiny-shapes", "--subset", 1, "--out", tmp_path, "--quiet")
    assert (code, err) == (0, "")


def test_the_record_of_a_finished_run_stays(train, tmp_path, monkeypatch):
    monkeypatch.setenv("CMCL_COMMIT", "first")
    train()
    before = (tmp_path / FOLDER / "record.json").read_bytes()
    monkeypatch.setenv("CMCL_COMMIT", "other")
    assert train("--resume", "--precision", "bf16")[0] == 0
    assert (tmp_path / FOLDER / "record.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "inf"], "epochs"),
        (["--epochs", "nan"], "epochs"),
        (["--set", "lr=Infinity"], "lr"),
        (["--device", "meta"], "'meta'"),
        (["--set", "network=resnet21"], "Did you mean 'resnet20'?"),
        (["--set", "preprocess=foo"], "mean_std, gcn, gcn_zca"),
        (["--set", "data=shapes"], "inputs that the networks accept"),
        (["--set", "data=arrays"], "Got 'arrays'"),
        (["--budget", "0m"], "Got '0m'."),
    ],
)
def test_mistakes(mistake, tmp_path, words, message):
    assert message in mistake("train", "tiny-cmcl", *words, "--out", tmp_path / "runs", "--quiet")
    assert not (tmp_path / "runs").exists()


def test_several_recipes_and_seeds(cmcl, tmp_path, monkeypatch):
    """One diverges, the others are trained; a record each."""
    monkeypatch.setitem(RECIPES, "tiny-wild", replace(TINY, lr=1e30, steps=20))
    words = [
        "--seed",
        3,
        "--seeds",
        2,
        "--limit",
        50,
        "--quiet",
        "--out",
        tmp_path,
        "--results",
        tmp_path / "results",
    ]
    code, out, err = cmcl("train", "tiny-cmcl", "tiny-wild", "tiny-shapes", *words)
    assert code == 1
    assert err.count("NaN or infinite at step") == err.count("\n") == 2
    lines = out.splitlines()
    assert lines[0] == "tiny-cmcl: errors on 50 test images"
    assert [line.split()[0] for line in lines[2:5]] == ["3", "4", "mean"]
    assert lines[4].count("±") == 4
    assert lines[-1] == str(next(tmp_path.glob("tiny-shapes--*--seed4")))
    assert len(list((tmp_path / "results" / "records").glob("*.json"))) == 4
    code, out, _ = cmcl("evaluate", *sorted(tmp_path.glob("tiny-*--seed*")), "--limit", 20)
    assert code == 2, "the diverged runs have no ensemble"
    code, out, _ = cmcl("evaluate", *sorted(tmp_path.glob("tiny-cmcl*")), "--json", "--limit", 20)
    assert [row["name"][-5:] for row in json.loads(out)] == ["seed3", "seed4"]


class TestTemperature:
    def test_nothing_is_scaled_without_held_out_data(self, train, tmp_path):
        out = train()[1]
        assert "scaled ECE" not in out
        ece = read(tmp_path / FOLDER / "record.json").calibration["ece"]
        line, command, _ = out.splitlines()[-3:]
        assert line.startswith(f"ECE {ece:.1f} %: " if ece > 5 else "The probabilities ")
        assert command == f"cmcl calibrate {tmp_path / FOLDER}"
        assert package.load(tmp_path / FOLDER).temperature is None
        (row,) = json.loads(train("--resume", "--json")[1])
        assert (row["temperature"], row["scaled_ece"]) == (None, None)

    def test_it_is_that_of_the_held_out_part(self, train, tmp_path):
        (row,) = json.loads(train("--validation", 0.2, "--json")[1])
        ensemble, test = package.load(row["run"]), package.data.load("digits", split="test")
        record = read(Path(row["run"]) / "record.json")
        assert row["temperature"] == ensemble.temperature == record.calibration["temperature"]
        prediction = ensemble.predict(test.images)
        for key, probs in (("ece", prediction.member_probs), ("scaled_ece", prediction.probs[None])):
            assert row[key] == record.calibration[key]
            assert row[key] == pytest.approx(100 * package.metrics.ece(probs, test.targets), abs=1e-3)
        assert row["ece"] != row["scaled_ece"]
        out = train("--validation", 0.2, "--resume")[1]
        assert out.splitlines()[1].split()[-4:] == ["scaled", "ECE", "%", "seconds"]
        assert "Fit a temperature" not in out

    def test_evaluating_again_keeps_that_of_calibrate(self, cmcl, train, tmp_path):
        """The temperature and its ECE, in the record and with the ensemble."""
        assert train()[0] == 0
        assert cmcl("calibrate", tmp_path / FOLDER, "--risk", 0.99, "--device", "cpu")[0] == 0
        calibrated = read(tmp_path / FOLDER / "record.json").calibration
        assert train("--resume")[0] == 0
        assert read(tmp_path / FOLDER / "record.json").calibration == calibrated
        assert package.load(tmp_path / FOLDER).temperature == calibrated["temperature"]


def test_a_run_folder_behind_a_link(train, tmp_path, monkeypatch):
    """Only the folder that is written must be writable."""
    assert train()[0] == 0
    shutil.move(tmp_path / FOLDER, tmp_path / "elsewhere")
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or Path(path) != tmp_path)
    assert train("--resume")[0] == 0


class TestChange:
    def test_values_are_the_recipes_own(self):
        """1 and 1.0 are one recipe, with one hash and one folder."""
        assert change(DIGITS, {"epochs": float(DIGITS.epochs), "beta": 0.25, "lr": DIGITS.lr}) == DIGITS
        assert change(DIGITS, {"epochs": 2.5}).epochs == 2.5
        for name in ("beta", "clip_norm", "decay", "momentum", "share_prob"):
            assert change(DIGITS, {name: 1}).hash == change(DIGITS, {name: 1.0}).hash != DIGITS.hash, name
        assert change(DIGITS, {"clip_norm": None}) == DIGITS
        for one, other in (([[0.5, 1]], [[0.5, 1.0]]), ([[100, 0.1]], [[100.0, 0.1]])):
            assert change(DIGITS, {"milestones": one}).hash == change(DIGITS, {"milestones": other}).hash

    def test_one_length_replaces_the_other(self):
        assert (change(TINY, {"epochs": 3}).steps, change(TINY, {"epochs": 3}).epochs) == (None, 3)
        assert (change(DIGITS, {"steps": 7}).steps, change(DIGITS, {"steps": 7}).epochs) == (7, None)

    def test_names(self):
        changed = change(DIGITS, {"beta": 0.5, "batch_size": 64, "milestones": [[0.5, 0.1]], "steps": 9})
        assert changed_name("digits-cmcl", DIGITS, DIGITS) == "digits-cmcl"
        assert changed_name("d", DIGITS, changed) == "d-beta0.5-steps9-batchsize64-milestones"

    def test_one_option_of_the_network(self):
        changed = change(DIGITS, {"network_options.hidden": 16, "network_options.dropout": 0.25})
        assert changed.network_options == {**DIGITS.network_options, "hidden": 16}
        assert changed_name("d", DIGITS, changed) == "d-hidden16"
        both = change(DIGITS, {"network_options": {"channels": 1}, "network_options.hidden": 16})
        assert both.network_options == {"channels": 1, "hidden": 16}
        fewer = change(DIGITS, {"network_options": {"channels": 1}})
        assert changed_name("d", DIGITS, fewer) == "d-networkoptions"

    @pytest.mark.parametrize(
        "changes",
        [
            {"clip_norm": "x"},
            {"milestones": 3},
            {"milestones": [[1]]},
            {"beta": float("nan")},
            {"network_options": []},
            {"network_options": 5, "network_options.hidden": 3},
            {"sharing": 2},
            {"overlap": 2.5},
        ],
    )
    def test_values_of_another_type(self, changes):
        with pytest.raises(ValueError, match=next(iter(changes))):
            change(TINY, changes)


def test_one_augmentation_of_several_is_set():
    base = change(find("digits-cmcl"), {"augment": {"flip": True, "crop": 1}})
    assert change(base, {"augment.crop": 2}).augment == Augment(flip=True, crop=2)
    assert change(base, {"augment.crop": 2, "network_options.hidden": 7}).network_options["hidden"] == 7
    with pytest.raises((ValueError, TypeError), match="crops"):
        change(base, {"augment.crops": 2})
