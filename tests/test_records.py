"""Runs and their records: what is measured, what is written, and what fills a cell of the paper."""

import io
import json

import pytest
import torch

import cmcl
from cmcl.data.dataset import Dataset
from cmcl.data.transforms import MeanStd
from cmcl.reproduction import Cell, environment, find
from cmcl.reproduction.cells import choose, fills, known_checksums, summarise
from cmcl.reproduction.evaluate import ask, errors, measure
from cmcl.reproduction.recipes import DIGITS, RECIPES
from cmcl.reproduction.record import Record, load_records, read
from cmcl.reproduction.runner import build, load_sets, run, run_folder
from cmcl.training.locking import FolderInUseError, locked
from cmcl.training.run import Run
from report_samples import changed

OPTIONS = cmcl.Options(device="cpu", quiet=True)
TINY = changed(
    DIGITS, members=2, epochs=None, steps=4, network_options=DIGITS.network_options | {"filters": [2, 4]}
)
CELL = Cell("table0/tiny-ie", "tiny-ie", ("table0", "ie"), {"oracle": 1.0, "top1": 2.0})
ALONE = changed(CELL, id="table0/tiny-single", single=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.fixture(autouse=True)
def tiny(monkeypatch, folder):
    monkeypatch.setenv("CMCL_CACHE", str(folder / "cache"))
    monkeypatch.setitem(RECIPES, "tiny-ie", TINY)


@pytest.fixture(scope="module")
def records(folder):
    """Two seeds of the tiny recipe, trained together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CMCL_CACHE", str(folder / "cache"))
        patch.setitem(RECIPES, "tiny-ie", TINY)
        return run("tiny-ie", (0, 1), out=folder / "runs", results=folder / "results", options=OPTIONS)


def test_a_record_comes_back_as_it_was(records, folder, tmp_path):
    for record in records:
        record.save(tmp_path / "record.json")
        assert Record.load(tmp_path / "record.json") == record
    assert load_records(folder / "results") == records
    assert records[0].file_name == f"tiny-ie--{TINY.hash}--seed0.json"
    assert len((tmp_path / "record.json").read_text().splitlines()) == len(Record.model_fields) + 2


def test_a_record_tells_what_decided_it(records):
    record = records[1]
    assert cmcl.Recipe.from_json(record.recipe) == TINY
    assert (record.name, record.seed, record.recipe_hash) == ("tiny-ie", 1, TINY.hash)
    assert (record.steps, record.precision) == (4, "float32")
    assert record.checksums == {
        split: cmcl.data.load("digits", split=split).checksum for split in ("train", "test")
    }
    assert record.versions["torch"] == torch.__version__
    assert record.seconds > 0
    assert record.complete
    assert record.test_examples == 359


def test_a_run_folder_holds_what_cmcl_loads(records, folder):
    place = run_folder(folder / "runs", "tiny-ie", TINY, (0, 1))
    assert json.loads((place / "recipe.json").read_text()) == TINY.to_json()
    assert (place / "telemetry.jsonl").exists()
    ensemble = cmcl.load(place / "seed1" / "ensemble")
    test = cmcl.data.load("digits", split="test")
    assert ensemble.transform is not None
    assert cmcl.evaluate(ensemble, test)["top1"] == pytest.approx(records[1].errors["expected"]["top1"])
    assert Record.load(place / "seed1" / "record.json") == records[1]


def test_weights_depend_on_network_members_and_seed_alone():
    before = torch.get_rng_state()
    first, again, other = build(TINY, 0), build(changed(TINY, method="cmcl", sharing=True), 0), build(TINY, 1)
    assert torch.equal(before, torch.get_rng_state())
    assert again.share_after == "stem"
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_shortened_runs_are_partial(folder, tmp_path):
    (record,) = run("tiny-ie", out=tmp_path, steps=2, test_limit=50, options=OPTIONS)
    assert (record.full_length, record.full_test, record.test_examples) == (False, False, 50)
    assert record.name == "tiny-ie"
    assert record.recipe_hash != TINY.hash
    (summary,) = summarise([CELL], [record])
    assert summary["ours"] is None
    assert summary["partial"] == [record.file_name]


def test_held_out_errors_are_kept(tmp_path):
    recipe = changed(TINY, validation=0.1)
    (record,) = run(recipe, out=tmp_path, name="tiny-search", options=OPTIONS)
    assert set(record.validation) == {"top1", "oracle", "picked"}
    assert choose([record])["chosen_on"] == "validation"


def test_one_split_for_whitening_training_and_choosing(tmp_path, monkeypatch):
    """Contrast normalisation makes blank images equal, and equal images stay on one side."""
    whole = cmcl.data.load("digits")
    images = whole.images.clone()
    images[0], images[1] = 0, 255
    monkeypatch.setattr(
        cmcl.data, "load", lambda name, split, root: changed(whole, images=images, split=split)
    )
    sets = load_sets(changed(TINY, preprocess="gcn", validation=0.25), cache=tmp_path)
    raw = cmcl.data.split_validation(changed(whole, images=images), 0.25)
    seen = cmcl.data.split_validation(sets.train, 0.25)
    for ours, theirs in zip(seen, raw, strict=True):
        torch.testing.assert_close(ours.images, sets.transform.transform(theirs.images))
    alone = cmcl.data.split_validation(changed(sets.train, units=None), 0.25)
    assert not all(a.targets.equal(b.targets) for a, b in zip(alone, raw, strict=True)), "or it shows nothing"


@pytest.mark.parametrize("seeds", [(), (0, 0)])
def test_seeds_are_different_ones(seeds, tmp_path):
    with pytest.raises(ValueError, match=r"seeds must be different numbers, at least one. Got \["):
        run("tiny-ie", seeds, out=tmp_path, options=OPTIONS)


def test_held_out_images_are_not_looked_at(tmp_path):
    """Nor by the whitening; and what was saved is fitted again to the same ones."""
    recipe = changed(TINY, preprocess="mean_std", validation=0.25)
    sets = load_sets(recipe, cache=tmp_path)
    raw = cmcl.data.load("digits")
    kept, _ = cmcl.data.split_validation(raw, 0.25)
    torch.testing.assert_close(
        sets.transform.transform(raw.images), MeanStd().fit(kept).transform(raw.images)
    )
    build(recipe, 0, sets.transform).save(tmp_path / "saved")
    again = cmcl.load(tmp_path / "saved", root=tmp_path).transform
    assert again.checksum == sets.transform.checksum != MeanStd().fit(raw).checksum


def test_what_fills_a_cell(records):
    record = records[0]
    assert fills(record, CELL)
    for change in (
        {"recipe_hash": "0" * 16},
        {"full_length": False},
        {"full_test": False},
    ):
        assert not fills(changed(record, **change), CELL), change
    other = {"digits": {"train": "a", "test": "b"}}
    assert not fills(record, CELL, other)
    assert not fills(record, changed(CELL, where=("fig2a", "ie"))), "figure 2 needs unseen data"
    assert fills(changed(record, ood="svhn"), changed(CELL, where=("fig2a", "ie")))


def test_data_unlike_the_others_do_not_count(records):
    stray = changed(records[0], seed=9, checksums={"train": "x", "test": "y"})
    assert known_checksums([*records, stray])["digits"] == records[0].checksums
    (summary,) = summarise([CELL], [*records, stray])
    assert summary["ours"]["top1"]["n"] == 2
    assert summary["partial"] == [stray.file_name]


def made(top1, oracle=1.0):
    one = {"top1": top1, "picked": top1, "oracle": oracle}
    return {"expected": one, "sampled": one}


def test_summary(records):
    a, b = (
        changed(r, errors=made(*e), members=m)
        for r, e, m in zip(
            records,
            [(10.0, 4.0), (12.0, 4.0)],
            [[10.0, 20.0], [11.0, 13.0]],
            strict=True,
        )
    )
    both, alone, figure = summarise([CELL, ALONE, changed(CELL, paper=None)], [a, b])
    assert both["id"] == "table0/tiny-ie"
    assert both["paper"] == {"oracle": 1.0, "top1": 2.0}
    assert both["ours"] == {
        "oracle": {"mean": 4.0, "std": 0.0, "n": 2},
        "picked": {"mean": 11.0, "std": pytest.approx(2**0.5, abs=1e-6), "n": 2},
        "top1": {"mean": 11.0, "std": pytest.approx(2**0.5, abs=1e-6), "n": 2},
    }
    assert alone["ours"]["top1"] == {"mean": 13.5, "std": pytest.approx(4.5**0.5, abs=1e-6), "n": 2}
    assert alone["ours"]["oracle"] == alone["ours"]["top1"]
    assert figure["paper"] == {"oracle": None, "top1": None}
    assert summarise([CELL], [a])[0]["ours"]["top1"] == {"mean": 10.0, "std": None, "n": 1}
    assert summarise([CELL], [])[0]["ours"] is None
    json.dumps([both, alone, figure], allow_nan=False)


def test_choose(records):
    def one(name, top1, held_out):
        validation = None if held_out is None else made(held_out)["expected"]
        return changed(records[0], name=name, errors=made(top1), validation=validation)

    found = [one("a", 5.0, 8.0), one("a", 5.0, 9.0), one("b", 6.0, 7.0), one("c", 1.0, None)]
    assert choose(found)["name"] == "b"
    assert choose(found, on="test")["name"] == "c"
    assert choose(found, on="test")["chosen_on"] == "test"
    assert choose(found)["top1"] == {"mean": 7.0, "std": None, "n": 1}
    with pytest.raises(ValueError, match="Got none"):
        choose([])
    with pytest.raises(ValueError, match="'validation' or 'test'. Got 'train'"):
        choose(found, on="train")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda values: values | {"errors": {}}, "errors.expected"),
        (lambda values: values | {"errors": {"expected": {"top1": 1.0}}}, "errors.expected.oracle"),
        (lambda values: values | {"errors": made(10**400)}, "errors.expected.top1"),
        (lambda values: values | {"members": []}, "members"),
        (lambda values: values | {"members": [1.0]}, "members .* 2 entries"),
        (lambda values: values | {"classwise": [[1.0], [1.0, 2.0]]}, "classwise"),
        (lambda values: values | {"classwise": [[None], [None]]}, "classwise"),
        (lambda values: values | {"seconds": "long"}, "seconds"),
        (lambda values: values | {"seconds": 10**400}, "seconds"),
        (lambda values: values | {"test_examples": 10**400}, "test_examples"),
        (lambda values: values | {"recipe": {"data": "digits"}}, "epochs"),
        (
            lambda values: values | {"recipe": {k: v for k, v in values["recipe"].items() if k != "data"}},
            "data",
        ),
        (lambda values: values | {"recipe": None}, "None"),
        (lambda values: values | {"seed": "0"}, "seed"),
        (lambda values: values | {"seed": 10**400}, "seed"),
        (lambda values: values | {"format": 99}, "Upgrade"),
        (lambda values: values | {"extra": 1}, "no field 'extra'"),
        (lambda values: {"format": 2}, "name"),
        (lambda values: [], "must be"),
        (lambda values: "[" * 1200 + "]" * 1200, "nested"),
    ],
)
def test_a_damaged_record_is_named_and_left_out(records, tmp_path, change, reason):
    for record in records:
        record.save(tmp_path / "records" / record.file_name)
    damaged = tmp_path / "records" / records[1].file_name
    value = change(json.loads(damaged.read_text()))
    damaged.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(ValueError, match=reason):
        Record.load(damaged)
    with pytest.warns(UserWarning, match=f"skipped: .*{damaged.name}"):
        assert load_records(tmp_path) == [records[0]]
    assert read(damaged) is None
    assert load_records(tmp_path / "nowhere") == []


def test_an_endless_file_is_skipped(records, tmp_path):
    """A link to a device must not hang the report or a resumed run."""
    records[0].save(tmp_path / "records" / "a.json")
    (tmp_path / "records" / "endless.json").symlink_to("/dev/zero")
    with pytest.warns(UserWarning, match="endless"):
        assert load_records(tmp_path) == [records[0]]
    assert read(tmp_path / "records" / "endless.json") is None


def test_records_of_before_are_read(records, tmp_path):
    """Those that were written when a record did not tell of several stretches."""
    records[0].save(tmp_path / "records" / "a.json")
    values = json.loads((tmp_path / "records" / "a.json").read_text())
    del values["resumed_with"]
    (tmp_path / "records" / "a.json").write_text(json.dumps(values))
    assert load_records(tmp_path) == [records[0]]


class TestProvenance:
    @pytest.fixture
    def go(self, tmp_path, monkeypatch):
        """Train or measure as of some commit, in one folder; as many steps as are asked for, then stop."""

        def start(commit, stop_at=None, **changes):
            monkeypatch.setenv("CMCL_COMMIT", commit)
            with monkeypatch.context() as patch:
                if stop_at is not None:
                    patch.setattr(Run, "_save_or_stop", stopping_at(stop_at))
                (record,) = run("tiny-ie", out=tmp_path, options=changed(OPTIONS, **changes))
            return record

        return start

    @pytest.fixture
    def place(self, tmp_path):
        return run_folder(tmp_path, "tiny-ie", TINY, (0,))

    def test_measured_again_is_not_trained_again(self, go, place):
        first = go("one")
        written = (place / "record.json").stat().st_mtime_ns
        assert (first.commit, first.precision, first.resumed_with) == ("one", "float32", [])
        assert go("two", precision="bf16") == first
        assert (place / "record.json").stat().st_mtime_ns == written, "nothing new, nothing written"
        assert len(environment.stretches(place)) == 1

    def test_measured_differently(self, go, place):
        first = go("one")
        changed(first, members=[1.0, 2.0]).save(place / "record.json")
        assert go("two") == first, "what was measured is new, what it ran on is not"
        assert Record.load(place / "record.json") == first

    def test_without_its_record(self, go, place):
        first = go("one")
        (place / "record.json").unlink()
        again = go("two")
        assert changed(again, seconds=first.seconds) == first

    def test_without_any_note_of_before(self, go, place):
        """A finished run of an earlier version: its record knows."""
        first = go("one")
        (place / environment.STRETCHES).unlink()
        assert go("two") == first
        (place / "record.json").unlink()
        assert [one["step"] for one in go("three").resumed_with] == [4], "all of its training is not known"

    def test_resumed_alike(self, go):
        with pytest.raises(cmcl.training.Interrupted):
            go("one", stop_at=2)
        assert (go("one").commit, go("one").resumed_with) == ("one", [])

    def test_resumed_elsewhere(self, go, place):
        with pytest.raises(cmcl.training.Interrupted):
            go("one", stop_at=1)
        with pytest.raises(cmcl.training.Interrupted):
            go("two", stop_at=3, precision="bf16")
        record = go("three")
        assert (record.commit, record.precision) == ("one", "float32")
        told = [(one["step"], one["commit"], one["precision"]) for one in record.resumed_with]
        assert told == [(0, "one", "float32"), (1, "two", "bf16"), (3, "three", "float32")]
        assert Record.load(place / "record.json") == record
        assert go("four") == record

    def test_a_stretch_that_came_to_nothing_is_not_told(self, go, place):
        """One that was refused before its first step: noted, and nothing came of it."""
        environment.keep(place, 0, environment.facts(OPTIONS) | {"commit": "one"})
        assert (go("two").commit, go("two").resumed_with) == ("two", [])

    def test_begun_before_notes_were_kept(self, go, place):
        with pytest.raises(cmcl.training.Interrupted):
            go("one", stop_at=2)
        (place / environment.STRETCHES).unlink()
        assert [one["step"] for one in go("two").resumed_with] == [2], "the first two steps are not known"

    def test_damage(self, go, place):
        """A line that a kill cut short, and a last checkpoint that cannot be read: then it is trained."""
        with pytest.raises(cmcl.training.Interrupted):
            go("one", stop_at=2)
        go("one")
        with (place / environment.STRETCHES).open("a") as file:
            file.write('{"step": 3, "dev\n')
        (last,) = (place / "checkpoints").glob("step-00000004-*")
        last.write_bytes(b"broken")
        with pytest.warns(UserWarning, match="is damaged"):
            record = go("two")
        assert [one["commit"] for one in record.resumed_with] == ["one", "one", "two"]

    def test_a_folder_in_use_is_left_alone(self, go, place):
        with locked(place), pytest.raises(FolderInUseError):
            go("one")
        assert environment.stretches(place) == []


def stopping_at(step):
    """The engine's own look at the signals, with one that comes after so many steps."""
    look = Run._save_or_stop

    def stop(self):
        self.keeper.interrupt.asked, self.keeper.interrupt.name = self.state.step == step, "SIGTERM"
        look(self)

    return stop


def test_a_device_that_cannot_compute():
    with pytest.raises(ValueError, match="device must .*Got 'meta'"):
        run("tiny-ie", out="nowhere", options=changed(OPTIONS, device="meta"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "resnet21"}, "recipe.network must be a known name. Got 'resnet21'. .* 'resnet20'"),
        ({"preprocess": "foo"}, "recipe.preprocess must be a known name. Got 'foo'. Valid names: mean_std"),
        ({"data": "shapes"}, "network cnn must fit the data shapes, images of 3 x 64 x 64. .*refuses"),
        (
            {"network": "fcn", "network_options": {"channels": 1, "filters": [2, 4]}},
            "with an answer per image. Got a network with an answer per pixel",
        ),
        (
            {"network_options": {"expected_pooling": "False"}},
            "network_options.expected_pooling must be true or false. Got 'False'",
        ),
        ({"network_options": {"dropout": "x"}}, "network_options.dropout must be a number. Got 'x'"),
        ({"network_options": {"dropout": None}}, "network_options.dropout must be a number. Got None"),
        (
            {"network_options": {"hidden": True}},
            "network_options.hidden must be a whole number or null. Got True",
        ),
        ({"network_options": {"hiden": 3}}, "must be options of cnn. Got 'hiden'. Did you mean 'hidden'?"),
        (
            {"network_options": DIGITS.network_options | {"classes": 9}},
            "of 10 classes. Got a network for 9",
        ),
    ],
)
def test_recipes_that_cannot_be(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(changed(TINY, **changes), out=tmp_path / "runs", options=OPTIONS)
    assert not (tmp_path / "runs").exists(), "before anything is written"


def test_names_of_folders():
    def name(*seeds):
        return run_folder("", "tiny", TINY, seeds).name.split("--")[2]

    assert (name(3), name(0, 1), name(*range(20))) == (
        "seed3",
        "seeds0-1",
        "seeds" + "-".join(map(str, range(20))),
    )
    assert name(*range(80)) == "seeds0to79"
    others = [name(0, 79), name(*range(79)), name(*range(0, 160, 2)), name(*range(1, 80), 0)]
    others.append(name(0, *range(2, 81), 79))
    assert len({*others, name(*range(80))}) == 6
    assert max(map(len, others)) < 130


def digits(n=40):
    test = cmcl.data.load("digits", split="test")[:n]
    return changed(test, images=test.images / 255)


def measured(ensemble, test, **more):
    return measure(ask(ensemble, test.images, **more), test.targets)


def test_measures_without_sharing():
    found = measured(build(TINY, 0), digits())
    assert found["errors"]["expected"] == found["errors"]["sampled"]
    assert "ood" not in found["entropy"]
    assert len(found["calibration"]["risk_coverage"]) == 100
    assert sum(found["calibration"]["reliability"]["count"]) == 40
    assert len(found["classwise"]) == 2
    assert len(found["classwise"][0]) == 10
    for mine, other in zip(found["entropy"]["specialised"], found["entropy"]["other"], strict=True):
        assert sum(mine) + sum(other) == 40
        assert len(mine) == 50


def test_measures_with_sharing_and_unseen_data():
    ensemble = build(changed(TINY, sharing=True), 0)
    unseen = torch.rand(30, 1, 8, 8) * 3
    found = measured(ensemble, digits(), ood=unseen, seed=3)
    assert found == measured(ensemble, digits(), ood=unseen, seed=3), "the masks have a seed"
    drawn = [ask(ensemble, digits().images, seed=seed).drawn for seed in (3, 4)]
    assert not drawn[0].equal(drawn[1])
    assert sum(found["entropy"]["ood"][0]) == sum(found["entropy"]["averaged_ood"]) == 30
    assert 0 <= found["calibration"]["auroc"] <= 1
    assert ensemble.share_at_test == "expected"


def test_the_gallery_shows_the_answers_that_are_measured(tmp_path):
    """Of mode "expected", not of drawn masks."""
    recipe = changed(TINY, sharing=True, preprocess=None)
    run(recipe, out=tmp_path, name="tiny-sharing", options=OPTIONS)
    (folder,) = tmp_path.iterdir()
    ensemble, test = cmcl.load(folder / "ensemble"), load_sets(recipe).test
    answers = ask(ensemble, test.images).test
    for item in json.loads((folder / "gallery" / "gallery.json").read_text())["items"]:
        shown = [member["confidence"] for member in item["members"]]
        assert shown == pytest.approx(answers[:, item["index"]].amax(1).tolist(), abs=1e-4)


def test_every_test_image_is_asked_once(tmp_path, monkeypatch):
    asked, predict = [], cmcl.Ensemble.predict
    counted = lambda self, x, **more: (asked.append(len(x)), predict(self, x, **more))[1]  # noqa: E731
    monkeypatch.setattr(cmcl.Ensemble, "predict", counted)
    (record,) = run("tiny-ie", out=tmp_path, test_limit=50, options=OPTIONS)
    assert sum(asked) == record.test_examples == 50, "measured, and shown, from the same answers"
    assert list(tmp_path.glob("*/gallery/gallery.json"))


@pytest.mark.parametrize(("title", "terminal"), [("seed 0", True), ("seed 0", False), ("", True)])
def test_measuring_is_shown_on_a_terminal(monkeypatch, title, terminal):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", stderr)
    ask(build(TINY, 0), digits().images, title=title, batch_size=10)
    assert (title in stderr.getvalue() and "100%" in stderr.getvalue()) is bool(title and terminal)


def test_errors_by_hand():
    probs = torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.2, 0.8], [0.3, 0.7]]])  # (M, N, C)
    assert errors(probs, torch.tensor([0, 1])) == {
        "top1": 0.0,  # averages 0.55 and 0.45: classes 0 and 1
        "oracle": 0.0,
        "picked": 0.0,  # member 0 is surer of the first, member 1 of the second
    }
    assert errors(probs, torch.tensor([1, 1]))["picked"] == 50.0
    assert errors(probs, torch.tensor([1, 1]))["oracle"] == 0.0


def test_segmentation_has_both_scores():
    recipe = changed(find("shapes-ie"), network_options={"filters": [2, 4]})
    shapes = cmcl.data.load("shapes", split="test", groups=2, per_group=5, size=8)
    found = measured(build(recipe, 0), changed(shapes, images=shapes.images / 255))
    assert found["errors"]["expected"]["top1"] != found["errors"]["expected"]["picked"]
    assert sum(found["entropy"]["test"][0]) == len(shapes)
    json.dumps(found, allow_nan=False)


def test_classes_without_examples_are_none():
    test = digits()
    rows = [i for i, label in enumerate(test.targets.tolist()) if label != 3]
    found = measured(build(TINY, 0), Dataset(test.images[rows], test.targets[rows], test.classes))
    assert [row[3] for row in found["classwise"]] == [None, None]


def test_commit(monkeypatch):
    monkeypatch.setenv("CMCL_COMMIT", "abc")
    assert environment.commit() == "abc"
    monkeypatch.delenv("CMCL_COMMIT")
    found = environment.commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    monkeypatch.setenv("PATH", "")
    assert environment.commit() is None


def test_recipes_of_the_callers_own_data_cannot_be_run():
    with pytest.raises(ValueError, match="recipe.data must name a data set"):
        run(changed(TINY, data=None), out="nowhere", options=OPTIONS)
