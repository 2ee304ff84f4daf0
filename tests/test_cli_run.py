"""`cmcl train`, `evaluate`, `predict`: real runs of two steps on scikit-learn's digits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

import cmcl as package
from cmcl.calibration import Threshold, uncertainty
from cmcl.cli.runs import SETS, classes_of, data_of, find_ensembles, first_ensemble, number_as, seek
from cmcl.cli.train import change, changed_name
from cmcl.data.dataset import evenly_spaced
from cmcl.data.transforms import MeanStd
from cmcl.reproduction import find
from cmcl.reproduction.recipes import RECIPES, SHAPES
from cmcl.reproduction.record import Record
from cmcl.reproduction.run import few

TINY = replace(
    find("digits-300-cmcl"),
    members=3,
    overlap=2,
    epochs=None,
    steps=2,
    network_options=dict(find("digits-cmcl").network_options) | {"filters": [2, 4]},
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny-cmcl", TINY)
    monkeypatch.setitem(
        RECIPES,
        "tiny-shapes",
        replace(
            SHAPES,
            members=2,
            epochs=None,
            steps=1,
            batch_size=4,
            subset=8,
            network_options={"filters": [2, 2]},
        ),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder, to be looked at only."""
    from cmcl.reproduction.run import run, run_folder

    out = tmp_path_factory.mktemp("runs")
    run(TINY, (0,), out=out, name="tiny-cmcl", options=package.Options(device="cpu", quiet=True))
    return run_folder(out, "tiny-cmcl", TINY, (0,))


class TestTrain:
    def test_a_run_folder(self, cmcl, tmp_path):
        code, out, err = cmcl("train", "tiny-cmcl", "--out", tmp_path, "--json", "--quiet", "--device", "cpu")
        found = json.loads(out)
        assert (code, err) == (0, "")
        folder = tmp_path / f"tiny-cmcl--{TINY.hash}--seed0"
        assert found["run"] == str(folder)
        (row,) = found["results"]
        assert set(row) == {"seed", "top1", "oracle", "member", "ece", "seconds"}
        for name in ("recipe.json", "telemetry.jsonl", "checkpoints", "record.json", "ensemble/config.json"):
            assert (folder / name).exists(), name
        test = package.data.load("digits", split="test")
        scores = package.evaluate(package.load(folder / "ensemble"), test)
        assert row["top1"] == pytest.approx(scores["top1"], abs=1e-5)
        assert row["member"] == pytest.approx(scores["member"], abs=1e-5)

    def test_what_is_there_is_not_trained_again(self, cmcl, trained, tmp_path):
        shutil.copytree(trained, tmp_path / trained.name)
        code, _, err = cmcl("train", "tiny-cmcl", "--out", tmp_path, "--quiet")
        assert code == 2
        assert "It holds this run, finished. Look at it with `cmcl evaluate" in err
        (tmp_path / trained.name / "record.json").unlink()
        code, _, err = cmcl("train", "tiny-cmcl", "--out", tmp_path, "--quiet")
        assert code == 2
        assert "interrupted at step 2 of 2. Go on with --resume" in err
        code, out, _ = cmcl("train", "tiny-cmcl", "--out", tmp_path, "--quiet", "--resume")
        assert code == 0
        assert "tiny-cmcl: errors on 359 test images" in out

    def test_a_record_is_not_replaced_by_another_run(self, cmcl, tmp_path):
        """The same seed with another precision, say: two numbers, and nobody may choose between them."""
        words = ["train", "tiny-cmcl", "--results", tmp_path, "--quiet", "--out"]
        assert cmcl(*words, tmp_path / "first")[0] == 0
        (path,) = (tmp_path / "records").iterdir()
        before = path.read_bytes()
        for more in ([], ["--resume"], ["--seeds", "2"]):
            code, _, err = cmcl(*words, tmp_path / "second", "--precision", "bf16", *more)
            assert code == 2
            assert f"{path} must not be there yet" in err
        assert not (tmp_path / "second").exists()
        begun = tmp_path / "third" / f"tiny-cmcl--{TINY.hash}--seed0"
        begun.mkdir(parents=True)  # as a run leaves it that died before its first checkpoint
        assert cmcl(*words, tmp_path / "third", "--resume")[0] == 2
        assert cmcl(*words, tmp_path / "first", "--resume")[0] == 0  # the run itself is only measured again
        assert path.read_bytes() == before
        other = json.loads(before)
        other["calibration"]["ece"] = 50.0  # as another version would have measured it
        path.write_text(json.dumps(other))
        assert cmcl(*words, tmp_path / "first", "--resume")[0] == 0
        assert path.read_bytes() == before
        path.write_text("damaged")
        assert cmcl(*words, tmp_path / "second")[0] == 0
        assert Record.read(path) is not None

    def test_time_over_and_on(self, cmcl, tmp_path):
        words = ["train", "tiny-cmcl", "--steps", "200", "--out", tmp_path, "--quiet", "--json"]
        code, out, err = cmcl(*words, "--budget", "0.01s")
        assert (code, out) == (3, "")
        assert "time over at step" in err
        assert err.endswith(": go on with the same command and --resume.\n")
        code, out, _ = cmcl(*words, "--resume")
        assert code == 0
        assert json.loads(out)["name"] == "tiny-cmcl-steps200"

    @pytest.mark.slow
    def test_ctrl_c(self, tmp_path):
        """A real process, stopped by a real signal once it trains."""
        source = str(Path(__file__).parents[1] / "src")
        words = [
            "train",
            "digits-300-cmcl",
            "--epochs",
            "9999",
            "--out",
            str(tmp_path),
            "--save-every",
            "0.1",
        ]
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
        assert "stopped by SIGINT at step" in err.splitlines()[-1]

    @pytest.mark.parametrize("moment", ["cmcl.reproduction.run.fit", "cmcl.reproduction.run.measure"])
    def test_ctrl_c_at_another_moment(self, cmcl, tmp_path, monkeypatch, moment):
        """Before the first step, and after the last: the one has nothing to lose, the other loses nothing."""

        def interrupt(*args, **more):
            raise KeyboardInterrupt

        words = ["train", "tiny-cmcl", "--out", tmp_path, "--quiet"]
        with monkeypatch.context() as patch:
            patch.setattr(moment, interrupt)
            code, out, err = cmcl(*words)
        assert (code, out) == (130, "")
        assert err == "cmcl: stopped. What was saved is kept: go on with the same command and --resume.\n"
        code, out, err = cmcl(*words, "--resume")
        assert (code, err) == (0, "")

    @pytest.mark.filterwarnings("default")  # shown, as to a user
    def test_dead_members_are_told_of_even_when_quiet(self, cmcl, tmp_path, monkeypatch):
        monkeypatch.setattr("cmcl.training.telemetry.DeadMembers.update", lambda self, rates: [1])
        code, out, err = cmcl("train", "tiny-cmcl", "--out", tmp_path, "--quiet", "--json", "--device", "cpu")
        assert code == 0
        assert json.loads(out)["results"]
        assert err.startswith("cmcl: seed 0: Member 1 won under a tenth of the fair share")
        assert err.count("\n") == 1

    @pytest.mark.parametrize(("examples", "told"), [(9, True), (10, False)])
    def test_fewer_examples_than_classes(self, cmcl, tmp_path, examples, told):
        words = [
            "train",
            "tiny-cmcl",
            "--subset",
            examples,
            "--batch-size",
            5,
            "--out",
            tmp_path,
            "--quiet",
        ]
        code, _, err = cmcl(*words)
        assert code == 0
        assert err == told * "cmcl: digits has 10 classes: 9 examples leave out 1 of them.\n"

    def test_one_image_has_all_classes_of_its_pixels(self, cmcl, tmp_path):
        code, _, err = cmcl("train", "tiny-shapes", "--subset", 1, "--out", tmp_path, "--quiet")
        assert (code, err) == (0, "")

    def test_what_a_finished_run_ran_on(self, cmcl, tmp_path, monkeypatch):
        """It is the training's, whatever measures it later."""
        words = ["train", "tiny-cmcl", "--out", tmp_path, "--quiet", "--device", "cpu"]
        monkeypatch.setenv("CMCL_COMMIT", "first")
        cmcl(*words)
        (path,) = tmp_path.glob("*/record.json")
        before = path.read_bytes()
        monkeypatch.setenv("CMCL_COMMIT", "other")
        assert cmcl(*words, "--resume", "--precision", "bf16")[0] == 0
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--epochs", "inf"], "Got inf."),
            (["--epochs", "nan"], "Got nan."),
            (["--set", "lr=1e400"], "lr must be valid: input should be a finite number. Got inf."),
            (["--set", "learning_rate=1"], "Recipe has no field 'learning_rate'"),
            (["--device", "meta"], "Got 'meta'"),
            (["--set", "network=resnet21"], "Did you mean 'resnet20'?"),
            (["--set", "preprocess=foo"], "Valid names: mean_std, gcn, gcn_zca."),
            (["--set", "data=shapes"], "network cnn must fit the data shapes"),
            (["--set", "data=arrays"], "Got arrays, which live in Python. Use cmcl.fit there."),
            (["--budget", "0m"], "budget must be a time above 0, such as 90s, 25m or 1h30m. Got '0m'."),
        ],
    )
    def test_mistakes(self, cmcl, tmp_path, words, message):
        code, out, err = cmcl("train", "tiny-cmcl", *words, "--out", tmp_path / "runs", "--quiet")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
        assert not (tmp_path / "runs").exists()

    def test_a_run_that_diverges(self, cmcl, tmp_path):
        code, out, err = cmcl(
            "train", "tiny-cmcl", "--lr", "1e30", "--steps", "20", "--out", tmp_path, "--quiet"
        )
        assert (code, out) == (1, "")
        assert "NaN or infinite at step" in err
        assert err.count("\n") == 1

    def test_it_says_what_it_measures(self, cmcl, tmp_path):
        _, _, err = cmcl("train", "tiny-cmcl", "--out", tmp_path)
        assert "seed 0: measuring on 359 test images\n" in err

    def test_seeds_together(self, cmcl, tmp_path):
        code, out, err = cmcl(
            *("train", "tiny-cmcl", "--out", tmp_path, "--seed", 3, "--seeds", 2, "--quiet", "--results"),
            tmp_path / "results",
        )
        assert code == 0
        (folder,) = tmp_path.glob("tiny-cmcl--*--seeds3-4")
        assert [line.split()[0] for line in out.splitlines()[2:5]] == ["3", "4", "mean"]
        assert out.splitlines()[4].count("±") == 4
        assert not err, "asked to be quiet"
        assert [p.parent.name for p in find_ensembles(folder)] == ["seed3", "seed4"]
        assert len(list((tmp_path / "results" / "records").glob("*.json"))) == 2
        code, out, _ = cmcl("evaluate", folder, "--json", "--limit", 20)
        found = json.loads(out)
        assert len(found["ensembles"]) == 2
        assert found["top1"] == pytest.approx(sum(e["top1"] for e in found["ensembles"]) / 2)


class TestChange:
    def test_values_are_the_recipes_own(self):
        """1 and 1.0 are one recipe, with one hash and one folder."""
        base = find("digits-cmcl")
        same = change(base, {"epochs": float(base.epochs), "beta": 0.75, "lr": base.lr})
        assert same == base
        assert same.hash == base.hash
        assert change(base, {"beta": 1}).hash == change(base, {"beta": 1.0}).hash
        assert change(base, {"epochs": 2.5}).epochs == 2.5
        for name in ("clip_norm", "decay", "momentum", "share_prob"):
            assert change(base, {name: 1}).hash == change(base, {name: 1.0}).hash, name
        assert change(base, {"clip_norm": 1}).hash != base.hash
        assert change(base, {"clip_norm": None}).hash == base.hash
        drops = [change(base, {"milestones": pairs}).hash for pairs in ([[0.5, 1]], [[0.5, 1.0]])]
        drops += [change(base, {"milestones": pairs}).hash for pairs in ([[100, 0.1]], [[100.0, 0.1]])]
        assert (drops[0], drops[2]) == (drops[1], drops[3])

    def test_one_length_replaces_the_other(self):
        assert (change(TINY, {"epochs": 3}).steps, change(TINY, {"epochs": 3}).epochs) == (None, 3)
        digits = change(find("digits-cmcl"), {"steps": 7})
        assert (digits.steps, digits.epochs) == (7, None)

    def test_names(self):
        base = find("digits-cmcl")
        changed = change(base, {"beta": 0.5, "batch_size": 64, "milestones": [[0.5, 0.1]], "steps": 9})
        assert changed_name("digits-cmcl", base, base) == "digits-cmcl"
        assert (
            changed_name("digits-cmcl", base, changed) == "digits-cmcl-beta0.5-steps9-batchsize64-milestones"
        )

    def test_one_option_of_the_network(self):
        base = find("digits-cmcl")
        changed = change(base, {"network_options.hidden": 16, "network_options.dropout": 0.25})
        assert changed.network_options == {**base.network_options, "hidden": 16}
        assert changed_name("digits-cmcl", base, changed) == "digits-cmcl-hidden16"
        both = change(base, {"network_options": {"channels": 1}, "network_options.hidden": 16})
        assert both.network_options == {"channels": 1, "hidden": 16}
        assert changed_name("d", base, both) == "d-hidden16", "what is left out the hash tells"
        fewer = change(base, {"network_options": {"channels": 1}})
        assert changed_name("d", base, fewer) == "d-networkoptions"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"clip_norm": "x"}, "clip_norm must .*Got 'x'."),
            ({"milestones": 3}, "milestones must .*Got 3."),
            ({"milestones": [[1]]}, r"milestones must be pairs .*Got \[\[1\]\]."),
            ({"beta": float("nan")}, "beta must .*Got nan."),
            ({"network_options": []}, r"network_options must .*Got \[\]."),
            (
                {"network_options": 5, "network_options.hidden": 3},
                "network_options must .*Got 5.",
            ),
            ({"sharing": 1}, "sharing must .*Got 1."),
            ({"overlap": 2.5}, "overlap must .*Got 2.5."),
        ],
    )
    def test_kinds(self, changes, message):
        with pytest.raises(ValueError, match=message):
            change(TINY, changes)


class TestFew:
    def test_drawn_evenly(self):
        train = package.data.load("digits")
        part = few(train, 300)
        assert part.targets.bincount().tolist() == [30] * 10
        assert few(train, 304).targets.bincount().max() == 31
        assert few(train, 300).checksum == part.checksum
        originals = {image.numpy().tobytes() for image in train.images}
        chosen = [image.numpy().tobytes() for image in part.images]
        assert originals >= set(chosen)

    def test_the_smaller_is_part_of_the_larger(self):
        train = package.data.load("digits")
        small, large = (
            {(i.numpy().tobytes(), int(t)) for i, t in zip(p.images, p.targets, strict=True)}
            for p in (few(train, 50), few(train, 120))
        )
        assert small <= large

    def test_all(self):
        train = package.data.load("digits")
        assert few(train, len(train)).checksum == train.checksum
        with pytest.raises(ValueError, match="at most 1438, the whole set. Got 1439"):
            few(train, 1439)

    def test_groups_of_segmentation(self):
        train = package.data.load("shapes", groups=4, per_group=5, size=16)
        groups = few(train, 8).groups
        assert sorted(groups) == sorted([*set(train.groups)] * 2)

    def test_a_record_has_the_checksum_of_the_whole_set(self, trained):
        record = json.loads((trained / "record.json").read_text())
        assert record["recipe"]["subset"] == 300
        assert record["checksums"]["train"] == package.data.load("digits").checksum


class TestEvaluate:
    def test_agrees_with_the_record(self, cmcl, trained):
        code, out, _ = cmcl("evaluate", trained, "--json")
        found, record = json.loads(out), json.loads((trained / "record.json").read_text())
        assert code == 0
        for key in ("top1", "oracle"):
            assert found[key] == pytest.approx(record["errors"]["expected"][key], abs=1e-4)
        assert found["ece"] == pytest.approx(record["calibration"]["ece"], abs=1e-3)
        assert found["examples"] == 359
        assert "auroc" not in found

    def test_what_it_has_never_seen(self, cmcl, trained):
        code, out, _ = cmcl("evaluate", trained, "--ood", "digits", "--json", "--limit", 50)
        found = json.loads(out)
        assert code == 0
        assert found["ood"] == "digits"
        assert found["ood_entropy"] == found["entropy"], "the same images"
        assert found["auroc"] == pytest.approx(0.5), "and so no way to tell them apart"
        assert "entropy, unseen" in cmcl("evaluate", trained, "--ood", "digits", "--limit", 5)[1]

    def test_a_folder_that_it_has_never_seen(self, cmcl, trained, tmp_path, monkeypatch):
        (tmp_path / "odd" / "noise").mkdir(parents=True)
        for i in range(3):
            Image.effect_noise((20, 20), 90).save(tmp_path / "odd" / "noise" / f"{i}.png")
        own = ["--ood-root", tmp_path / "odd", "--ood-option", "size=8", "--ood-option", "mode=L"]
        words = ["evaluate", trained, "--limit", "5", "--device", "cpu"]
        code, out, _ = cmcl(*words, "--ood", "folder", *own, "--json")
        whole = json.loads(out)
        assert code == 0
        (tmp_path / "odd" / "train").mkdir()
        for split in ("train", "test"):
            shutil.copytree(tmp_path / "odd" / "noise", tmp_path / "odd" / split / "noise")
        shutil.rmtree(tmp_path / "odd" / "noise")
        assert json.loads(cmcl(*words, "--ood", "folder", *own, "--json")[1]) == whole
        (tmp_path / "odd" / "test" / "noise").rename(tmp_path / "odd" / "test" / "of another name")
        monkeypatch.setenv("HOME", str(tmp_path))
        own[1] = "~/odd"  # a shell leaves it so after --ood-root=
        assert json.loads(cmcl(*words, "--ood", "folder", *own, "--json")[1]) == whole
        shutil.rmtree(tmp_path / "odd" / "train")
        assert json.loads(cmcl(*words, "--ood", "folder", *own, "--json")[1]) == whole
        code, _, err = cmcl(*words, "--ood", "folder", "--root", tmp_path)
        assert code == 2
        assert "--ood-root must name the folder of --ood folder" in err
        code, _, err = cmcl(*words, *own)
        assert code == 2
        assert "--ood must name the set of --ood-root" in err

    def test_a_table(self, cmcl, trained):
        code, out, _ = cmcl("evaluate", trained, "--limit", 10)
        assert code == 0
        assert out.splitlines()[0] == "digits: 10 (of 359) test images"
        assert out.splitlines()[2].startswith(trained.name)

    def test_an_ensemble_alone(self, cmcl, trained, tmp_path):
        shutil.copytree(trained / "ensemble", tmp_path / "mine")
        assert data_of(trained / "ensemble") == "digits"
        assert data_of(tmp_path / "mine") is None, "the transform was fitted to a part of a set"
        code, _, err = cmcl("evaluate", tmp_path / "mine")
        assert code == 2
        assert "--data must name the set to test on" in err
        assert cmcl("evaluate", tmp_path / "mine", "--data", "digits", "--limit", 5)[0] == 0

    def test_interrupted(self, cmcl, trained, tmp_path):
        shutil.copytree(trained / "checkpoints", tmp_path / "run" / "checkpoints")
        code, _, err = cmcl("evaluate", tmp_path / "run")
        assert code == 2
        assert "Go on with the command that began it: `cmcl train RECIPE --resume`" in err

    def test_a_folder_of_runs(self, cmcl, trained, tmp_path):
        (tmp_path / "no run").mkdir()
        (tmp_path / "seedling" / "ensemble").mkdir(parents=True)
        assert cmcl("evaluate", tmp_path)[2].endswith("Got neither.\n")
        shutil.copytree(trained, tmp_path / "one")
        assert cmcl("evaluate", tmp_path)[2].endswith(f"Got neither. Name {tmp_path / 'one'}.\n")
        shutil.copytree(trained, tmp_path / "two")
        code, _, err = cmcl("evaluate", tmp_path)
        assert code == 2
        assert err.endswith(f"Got neither. Name {tmp_path / 'one'}, one of 2 runs in it.\n")

    def test_broken_json(self, cmcl, trained, tmp_path):
        shutil.copytree(trained, tmp_path / "run")
        (tmp_path / "run" / "recipe.json").write_text("{")
        code, _, err = cmcl("evaluate", tmp_path / "run")
        assert code == 2
        assert "recipe.json must be JSON" in err


class TestNames:
    """Classes are paired by name where the ensemble's names are known: of digits, "0" to "9"."""

    KINDS = (3, 7)

    @pytest.fixture
    def some(self):
        test = package.data.load("digits", split="test")
        return test.subset(torch.isin(test.targets, torch.tensor(self.KINDS)))

    @pytest.fixture
    def pictures(self, tmp_path, some):
        """A folder of threes and sevens, whose own numbers are 0 and 1."""

        def write(*names):
            for i, (image, target) in enumerate(some):
                name = names[self.KINDS.index(int(target))]
                for split in ("train", "test"):
                    (tmp_path / "pictures" / split / name).mkdir(parents=True, exist_ok=True)
                    Image.fromarray(image[0].numpy()).save(
                        tmp_path / "pictures" / split / name / f"{i:03}.png"
                    )
            return ["--data", "folder", "--root", tmp_path / "pictures", "--option", "mode=L"]

        return write

    def test_evaluate(self, cmcl, trained, pictures, some):
        code, out, _ = cmcl("evaluate", trained, *pictures("3", "7"), "--json", "--device", "cpu")
        expected = package.evaluate(package.load(trained / "ensemble"), some)
        assert code == 0
        for key in ("top1", "oracle"):
            assert json.loads(out)[key] == pytest.approx(expected[key], abs=1e-4)
        assert expected["oracle"] < 100, "what blind numbers give"

    @pytest.mark.parametrize("limit", [None, 40])
    def test_reject(self, cmcl, trained, pictures, some, limit):
        words = ["reject", trained, *pictures("3", "7"), "--json", "--device", "cpu", "--risk", "0.99"]
        code, out, _ = cmcl(*words, *(["--limit", limit] if limit else []))
        found = json.loads(out)
        ordered = some.subset(some.targets.argsort(stable=True))  # as a folder is read
        some = ordered = evenly_spaced(ordered, limit)
        assert len(set(some.targets.tolist())) == 2, "of both classes, though they are sorted"
        wrong = package.load(trained / "ensemble").predict(ordered.images).probs.argmax(1) != ordered.targets
        assert code == 0
        assert found["tried"] == {
            "examples": len(some) // 2,
            "answered": len(some) // 2,
            "errors": int(wrong[1::2].sum()),
        }

    @pytest.mark.parametrize("command", ["evaluate", "reject"])
    def test_a_name_that_it_does_not_know(self, cmcl, trained, pictures, command):
        code, out, err = cmcl(command, trained, *pictures("3", "seven"), "--device", "cpu")
        assert (code, out) == (2, "")
        assert "test must have classes that the ensemble knows by name. Got seven. Valid names: 0, 1," in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize("layout", ["whole", "test"])
    def test_new_images_alone_will_do(self, cmcl, trained, pictures, tmp_path, layout):
        """A folder of classes, or test/ without train/: the ensemble knows the names."""
        arguments = pictures("3", "7")
        expected = cmcl("evaluate", trained, *arguments, "--json")[1]
        shutil.rmtree(tmp_path / "pictures" / "train")
        if layout == "whole":
            arguments[3] = tmp_path / "pictures" / "test"
        code, out, _ = cmcl("evaluate", trained, *arguments, "--json")
        assert code == 0
        assert json.loads(out)["top1"] == json.loads(expected)["top1"]

    def test_names_travel_with_the_ensemble(self, cmcl, tmp_path, pictures):
        root = pictures("three", "seven")[3]
        train = package.data.load("folder", root=root, mode="L")
        ensemble = package.Ensemble(
            lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)), 2
        )
        package.fit(
            ensemble, train, recipe=package.Recipe(members=2, steps=1), options=package.Options(quiet=True)
        )
        assert ensemble.classes == ("seven", "three")
        ensemble.save(tmp_path / "alone")
        assert classes_of(tmp_path / "alone") == ["seven", "three"]
        again = package.load(
            tmp_path / "alone",
            network=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)),
        )
        assert again.classes == ("seven", "three")
        package.fit(
            ensemble,
            replace(train, classes=("0", "1")),
            recipe=package.Recipe(members=2, steps=1),
            options=package.Options(quiet=True),
        )
        assert ensemble.classes is None, "these have no names"

    def test_a_network_with_more_outputs_than_names(self, cmcl, trained, pictures, tmp_path):
        """It was made for ten classes and learned two: those are known by name all the same."""
        arguments = pictures("three", "seven")
        mine = package.load(trained)
        mine.classes = ("one", "seven")
        mine.save(tmp_path / "mine")
        code, _, err = cmcl("evaluate", tmp_path / "mine", *arguments, "--json")
        assert code == 2
        assert "must have classes that the ensemble knows by name. Got three." in err
        picture = next((tmp_path / "pictures").rglob("*.png"))
        (answer,) = json.loads(cmcl("predict", tmp_path / "mine", picture, "--json")[1])
        index = answer["answer"]["index"]
        assert answer["answer"]["class"] == (["one", "seven"][index] if index < 2 else str(index))

    def test_an_ensemble_without_names(self, cmcl, trained, pictures, tmp_path, some):
        shutil.copytree(trained / "ensemble", tmp_path / "mine")
        assert classes_of(tmp_path / "mine") is None
        code, _, err = cmcl("evaluate", tmp_path / "mine", *pictures("three", "seven"), "--json")
        assert code == 2
        assert "must have 10 classes, as many as the ensemble answers, which does not know their names" in err

    def test_the_names_of_a_run_of_ones_own(self, cmcl, trained, tmp_path, pictures):
        """They stand in its gallery."""
        shutil.copytree(trained / "ensemble", tmp_path / "run" / "ensemble")
        (tmp_path / "run" / "gallery").mkdir()
        gallery = tmp_path / "run" / "gallery" / "gallery.json"
        gallery.write_text(json.dumps({"classes": [str(i) for i in range(10)]}))
        assert classes_of(tmp_path / "run" / "ensemble") is None, "arrays without names"
        names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
        gallery.write_text(json.dumps({"classes": names}))
        ours = cmcl("evaluate", tmp_path / "run", *pictures("three", "seven"), "--json")[1]
        shutil.rmtree(tmp_path / "pictures")
        digits = cmcl("evaluate", trained, *pictures("3", "7"), "--json")[1]
        assert json.loads(ours)["top1"] == json.loads(digits)["top1"]
        picture = next((tmp_path / "pictures").rglob("*.png"))
        (answer,) = json.loads(cmcl("predict", tmp_path / "run", picture, "--json")[1])
        assert answer["answer"]["class"] == names[answer["answer"]["index"]]

    def test_pixels_to_ignore_stay(self):
        class Two:
            classes = ("sky", "sea")

            def predict(self, images):
                return package.ensemble.prediction(torch.zeros(1, len(images), 2, 1, 3))

        masks = torch.tensor([[[0, 1, 255]]], dtype=torch.uint8)
        data = package.data.Dataset(torch.zeros(1, 3, 1, 3, dtype=torch.uint8), masks, ("sea", "sky"))
        found = number_as(Two(), data)
        assert found.targets.tolist() == [[[1, 0, 255]]]
        assert found.targets.dtype == torch.uint8
        assert found.classes == ("sky", "sea")
        Two.classes = ("sky", "sea", "land")
        assert number_as(Two(), data) is data, "it has two answers: others' names"


class TestPredict:
    @pytest.fixture
    def pictures(self, tmp_path):
        test = package.data.load("digits", split="test")
        paths = []
        for i in range(2):
            paths.append(tmp_path / f"{i}.png")
            Image.fromarray(test.images[i, 0].numpy()).save(paths[-1])
        return paths

    def test_answers_are_those_of_the_library(self, cmcl, trained, pictures):
        code, out, _ = cmcl("predict", trained, *pictures, "--json")
        answers = json.loads(out)
        images = package.data.load("digits", split="test").images[:2]
        expected = package.load(trained / "ensemble").predict(images)
        assert code == 0
        assert [answer["image"] for answer in answers] == [str(path) for path in pictures]
        for i, answer in enumerate(answers):
            assert answer["answer"]["index"] == int(expected.probs[i].argmax())
            assert answer["answer"]["class"] == str(answer["answer"]["index"]), "the names of digits"
            assert answer["answer"]["confidence"] == pytest.approx(float(expected.probs[i].max()), abs=1e-5)
            assert answer["probs"] == pytest.approx(expected.probs[i].tolist(), abs=1e-5)
            assert answer["chosen"] == int(expected.chosen[i])
            assert [m["index"] for m in answer["members"]] == expected.member_probs[:, i].argmax(1).tolist()
            assert [m["entropy"] for m in answer["members"]] == pytest.approx(
                expected.entropy[:, i].tolist(), abs=1e-5
            )

    def test_a_table(self, cmcl, trained, pictures):
        code, out, _ = cmcl("predict", trained, *pictures)
        lines = out.splitlines()
        assert code == 0
        assert len(lines) == 1 + 2 * (1 + 3)
        assert sum("most confident" in line for line in lines) == 2

    def test_sizes(self, cmcl, trained, tmp_path):
        Image.new("RGB", (28, 20)).save(tmp_path / "large.png")
        code, _, err = cmcl("predict", trained, tmp_path / "large.png")
        assert code == 1
        assert "large.png must be 8 x 8 pixels (height x width). Got 20 x 28. Pass --resize." in err
        assert cmcl("predict", trained, tmp_path / "large.png", "--resize")[0] == 0

    def test_the_size_is_told_before_the_pixels_are_read(self, cmcl, trained, tmp_path, monkeypatch):
        Image.new("RGB", (28, 20)).save(tmp_path / "large.png")
        monkeypatch.setattr("cmcl.data.images.read_image", pytest.fail)
        assert "Got 20 x 28. Pass --resize." in cmcl("predict", trained, tmp_path / "large.png")[2]

    def test_a_photo_stored_on_its_side_has_the_size_that_is_seen(self, cmcl, trained, tmp_path, monkeypatch):
        monkeypatch.setitem(SETS, "digits", ((1, 16, 4), SETS["digits"][1]))
        monkeypatch.setattr("cmcl.cli.predict._ask", lambda _, pixels, *__: dict.fromkeys(pixels, "asked"))
        exif = Image.Exif()
        for orientation, code in ((6, 0), (1, 1)):
            exif[0x0112] = orientation
            Image.new("L", (16, 4)).save(tmp_path / "x.jpg", exif=exif)
            assert cmcl("predict", trained, tmp_path / "x.jpg", "--json")[0] == code

    def test_folders(self, cmcl, trained, pictures, tmp_path):
        inside = tmp_path / "some"
        (inside / "deeper").mkdir(parents=True)
        code, _, err = cmcl("predict", trained, inside)
        assert code == 2
        assert "some must hold images. Got none; folders inside it are not looked into." in err
        for path in (inside / "b.png", inside / "a.png", inside / "deeper" / "c.png"):
            shutil.copy(pictures[1], path)
        (inside / "notes.txt").touch()
        code, out, _ = cmcl("predict", trained, pictures[0], inside, pictures[0], "--json")
        assert code == 0
        found = [answer["image"] for answer in json.loads(out)]
        assert found == [str(p) for p in (pictures[0], inside / "a.png", inside / "b.png", pictures[0])]

    def test_one_damaged_among_several(self, cmcl, trained, pictures, tmp_path):
        (tmp_path / "cut.png").write_bytes(pictures[0].read_bytes()[:60])
        Image.new("L", (9, 8)).save(tmp_path / "wide.png")
        given = (pictures[0], tmp_path / "cut.png", tmp_path / "wide.png", pictures[1])
        alone = json.loads(cmcl("predict", trained, *pictures, "--json")[1])
        code, out, err = cmcl("predict", trained, *given, "--json")
        first, cut, wide, last = json.loads(out)
        assert (code, err) == (1, "")
        assert [first, last] == alone
        assert set(cut) == set(wide) == {"image", "error"}
        assert cut["image"] == str(tmp_path / "cut.png")
        assert "cut.png is damaged" in cut["error"]
        assert "wide.png must be 8 x 8 pixels (height x width). Got 8 x 9." in wide["error"]
        code, out, err = cmcl("predict", trained, *given)
        assert code == 1
        assert len(out.splitlines()) == 1 + 2 * (1 + 3)
        assert err == f"cmcl: {cut['error']}\ncmcl: {wide['error']}\n"

    def test_all_damaged(self, cmcl, trained, tmp_path):
        for i in range(5):
            (tmp_path / f"{i}.png").write_text("hello")
        code, out, err = cmcl("predict", trained, tmp_path, "--json")
        assert (code, err) == (1, "")
        assert [Path(told["image"]).name for told in json.loads(out)] == [f"{i}.png" for i in range(5)]
        assert all("is not an image that Pillow reads" in told["error"] for told in json.loads(out))
        code, out, err = cmcl("predict", trained, tmp_path)
        assert (code, out) == (1, "")
        assert err.count("\n") == 5

    @pytest.fixture
    def threshold(self, cmcl, trained, pictures, tmp_path):
        """Between the scores of the two pictures, in a file of `cmcl reject`: only the surer one is answered."""
        path = tmp_path / "threshold.json"
        options = ("--score", "mean_entropy", "--limit", 20, "--device", "cpu")
        assert cmcl("reject", trained, *options, "-o", path)[0] == 0
        values = json.loads(path.read_text())
        images = package.data.load("digits", split="test").images[:2]
        scores = uncertainty(package.load(trained / "ensemble").predict(images).member_probs, "mean_entropy")
        values |= {"value": float(scores.mean()), "answered": 5}
        path.write_text(json.dumps(values))
        return path, scores.tolist()

    def test_a_threshold(self, cmcl, trained, pictures, threshold, tmp_path):
        path, scores = threshold
        silent = [score > min(scores) for score in scores]
        code, out, err = cmcl("predict", trained, *pictures, "--threshold", path, "--json")
        answers = json.loads(out)
        assert (code, err) == (0, "")
        assert [answer["score"] for answer in answers] == pytest.approx(scores, abs=1e-6)
        assert [answer["abstained"] for answer in answers] == silent
        lines = cmcl("predict", trained, *pictures, "--threshold", path)[1].splitlines()
        assert [line.endswith("  abstains") for line in lines if "ensemble" in line] == silent
        printed = tmp_path / "printed.json"  # as `cmcl reject --json > printed.json` leaves it
        printed.write_text(json.dumps({"threshold": json.loads(path.read_text()), "tried": {}}))
        assert cmcl("predict", trained, *pictures, "--threshold", printed, "--json")[1] == out

    def test_a_threshold_that_answers_nothing_says_so(self, cmcl, trained, pictures, threshold):
        values = json.loads(threshold[0].read_text()) | {"value": "-inf", "answered": 0, "errors": 0}
        threshold[0].write_text(json.dumps(values))
        code, out, err = cmcl("predict", trained, *pictures, "--threshold", threshold[0], "--json")
        assert code == 0
        assert all(answer["abstained"] for answer in json.loads(out))
        assert "cannot be promised from 10 calibration examples, so every example is rejected" in err

    def test_the_threshold_of_another_ensemble(self, cmcl, trained, pictures, threshold, tmp_path):
        ensemble = package.load(trained / "ensemble")
        with torch.no_grad():
            next(ensemble.parameters()).add_(1)
        ensemble.save(tmp_path / "other")
        words = ("predict", tmp_path / "other", *pictures, "--threshold", threshold[0])
        code, _, err = cmcl(*words)
        assert code == 2
        assert f"--threshold must be calibrated for {tmp_path / 'other'}. Got {threshold[0]}, of" in err
        assert f"Write it with: cmcl reject {tmp_path / 'other'} -o {threshold[0]}." in err
        values = json.loads(threshold[0].read_text())
        del values["weights"]  # as the library writes it
        threshold[0].write_text(json.dumps(values))
        assert cmcl(*words)[0] == 0

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "t.json must exist. Got no such file. Write it with: cmcl reject "),
            ("{", "--threshold must be a file of `cmcl reject`. Got "),
            ("[1]", "t.json: a threshold must be a dict. Got list."),
            ("{}", "t.json: a threshold must have the fields that to_json writes"),
        ],
    )
    def test_no_threshold(self, cmcl, trained, pictures, tmp_path, monkeypatch, text, message):
        if text is not None:
            (tmp_path / "t.json").write_text(text)
        monkeypatch.setattr("cmcl.serialization.load", pytest.fail)
        code, _, err = cmcl("predict", trained, *pictures, "--threshold", tmp_path / "t.json")
        assert code == 2
        assert message in err

    def test_not_an_image(self, cmcl, trained, tmp_path):
        (tmp_path / "x.png").write_text("hello")
        code, _, err = cmcl("predict", trained, tmp_path / "x.png")
        assert code == 1
        assert "x.png is not an image" in err

    def test_pixels(self, cmcl, tmp_path):
        assert cmcl("train", "tiny-shapes", "--out", tmp_path / "runs", "--quiet")[0] == 0
        Image.new("RGB", (40, 24), "red").save(tmp_path / "any.png")
        code, out, _ = cmcl("predict", *(tmp_path / "runs").iterdir(), tmp_path / "any.png", "--json")
        (answer,) = json.loads(out)
        assert code == 0
        assert (
            answer["answer"]["percent_of_pixels"] == answer["members"][answer["chosen"]]["percent_of_pixels"]
        )
        assert sum(answer["answer"]["percent_of_pixels"].values()) == pytest.approx(100)
        assert "background" in cmcl("predict", *(tmp_path / "runs").iterdir(), tmp_path / "any.png")[1]
        Image.new("RGB", (24, 40)).save(tmp_path / "other.png")
        code, _, err = cmcl(
            "predict", *(tmp_path / "runs").iterdir(), tmp_path / "any.png", tmp_path / "other.png"
        )
        assert code == 1
        assert "probs" not in answer
        assert "other.png must be 24 x 40 pixels (height x width). Got 40 x 24." in err
        made = Threshold(0.25, "confidence", 0.01, 0.95, 1000, 500, 1, 0.009)
        (tmp_path / "t.json").write_text(json.dumps(made.to_json()))
        words = (tmp_path / "any.png", "--threshold", tmp_path / "t.json")
        code, _, err = cmcl("predict", *(tmp_path / "runs").iterdir(), *words)
        assert code == 2
        assert "where an image has one answer. Got an answer per pixel." in err


@pytest.mark.parametrize("name", ["digits", "shapes"])
def test_what_is_written_of_the_sets_is_true(name):
    options = {"groups": 1, "per_group": 5} if name == "shapes" else {}
    data = package.data.load(name, split="test", **options)
    assert SETS[name] == (tuple(data.images.shape[1:]), list(data.classes))


class TestReport:
    @pytest.mark.parametrize(("format", "name"), [("html", "report.html"), ("md", "report.md")])
    def test_of_a_run(self, cmcl, trained, tmp_path, monkeypatch, format, name):
        monkeypatch.chdir(tmp_path)
        code, out, err = cmcl("report", trained, "--format", format)
        assert (code, out, err) == (0, f"{name}\n", "")
        assert "tiny-cmcl" in (tmp_path / name).read_text()

    def test_of_what_is_here(self, cmcl, trained, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        code, _, err = cmcl("report")
        assert code == 2
        assert "here must be results/ or runs/ or cmcl-demo/ to report on. Got none." in err
        shutil.copytree(trained, tmp_path / "runs" / trained.name)
        assert cmcl("report", "--format", "md", "-o", "mine.md")[1] == "mine.md\n"
        assert (tmp_path / "mine.md").exists()


class TestSeek:
    """Under --root, or else in the default place."""

    @pytest.fixture
    def read(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CMCL_DATA", str(tmp_path / "default"))

        def read(folder):
            if not (folder / "set").exists():
                raise FileNotFoundError(f"{folder}/set must exist.")
            return folder.name

        return read

    def test_where_it_is(self, read, tmp_path):
        own, default = tmp_path / "own", tmp_path / "default"
        (default / "set").mkdir(parents=True)
        assert seek(read, None, "it") == "default"
        assert seek(read, own, "it") == "default"
        (own / "set").mkdir(parents=True)
        assert seek(read, own, "it") == "own"

    def test_nowhere(self, read, tmp_path):
        own, default = tmp_path / "own", tmp_path / "default"
        for root in (None, default):
            with pytest.raises(FileNotFoundError) as caught:
                seek(read, root, "it")
            assert str(caught.value) == f"{default}/set must exist."
        with pytest.raises(FileNotFoundError) as caught:
            seek(read, own, "it")
        expected = f"it must be in {own} or {default}. Got neither: {default}/set must exist."
        assert str(caught.value) == expected


@pytest.mark.parametrize("command", ["evaluate", "reject"])
def test_root_need_not_hold_the_set_of_the_preprocessing(cmcl, tmp_path, monkeypatch, command):
    (tmp_path / "sets" / "svhn").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    savemat(
        tmp_path / "sets" / "svhn" / "train_32x32.mat", {"X": pixels, "y": np.array([[1], [2], [3], [10]])}
    )
    for place in ("train/3", "train/7", "test/3", "test/7"):
        (tmp_path / "pictures" / place).mkdir(parents=True)
        for i in range(4):
            Image.effect_noise((32, 32), 90).save(tmp_path / "pictures" / place / f"{i}.png")
    network = package.networks.cnn
    ensemble = package.Ensemble(lambda: network(filters=(2, 2), kernel=3, padding=1, hidden=None), 2)
    ensemble.transform = MeanStd().fit(package.data.load("svhn", root=tmp_path / "sets"))
    monkeypatch.setattr("cmcl.serialization.SMALL", 0)  # as if it were whitening
    ensemble.save(tmp_path / "saved")
    own = ["--data", "folder", "--root", tmp_path / "pictures"]
    monkeypatch.setenv("CMCL_DATA", str(tmp_path / "sets"))
    assert cmcl(command, tmp_path / "saved", *own, "--device", "cpu")[0] == 0
    monkeypatch.setenv("CMCL_DATA", str(tmp_path / "nowhere"))
    code, _, err = cmcl(command, tmp_path / "saved", *own, "--device", "cpu")
    assert code == 2
    places = f"{tmp_path / 'pictures'} or {tmp_path / 'nowhere'}"
    assert f"svhn, on which the ensemble's preprocessing is fitted again, must be in {places}. Got" in err
    assert "cmcl data fetch svhn" in err
    assert err.count("\n") == 1


def test_of_several_ensembles_the_first_is_taken_and_named(tmp_path, capsys):
    for seed in (0, 1, 10):
        place = tmp_path / "run" / f"seed{seed}" / "ensemble"
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
    assert first_ensemble(tmp_path / "run") == tmp_path / "run/seed0/ensemble"
    assert "holds 3 ensembles. This is the first, run/seed0." in " ".join(capsys.readouterr().err.split())
    assert first_ensemble(tmp_path / "run/seed1") == tmp_path / "run/seed1/ensemble"
    assert not capsys.readouterr().err
