"""Runs: what is trained, what is written, and where it ran."""

import json

import pytest
import torch

import cmcl
from cmcl.data.transforms import MeanStd
from cmcl.reproduction import Cell, environment
from cmcl.reproduction.cells import summarise
from cmcl.reproduction.evaluate import predictions
from cmcl.reproduction.gallery import Gallery
from cmcl.reproduction.recipes import DIGITS, RECIPES
from cmcl.reproduction.record import Record
from cmcl.reproduction.runner import build, load_data, run, run_folder
from cmcl.training.checkpoint import FolderInUseError, RunFolder, locked
from report_samples import changed

OPTIONS = cmcl.Options(device="cpu", quiet=True)
TINY = changed(
    DIGITS, members=2, epochs=None, steps=4, network_options=DIGITS.network_options | {"filters": [2, 4]}
)
CELL = Cell("table0/tiny-ie", "tiny-ie", ("table0", "ie"), {"oracle": 1.0, "top1": 2.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.fixture(autouse=True)
def tiny(monkeypatch, folder):
    monkeypatch.setenv("CMCL_CACHE", str(folder / "cache"))
    monkeypatch.setitem(RECIPES, "tiny-ie", TINY)


@pytest.fixture(scope="module")
def records(folder):
    """Two seeds of the tiny recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CMCL_CACHE", str(folder / "cache"))
        patch.setitem(RECIPES, "tiny-ie", TINY)
        return run("tiny-ie", (0, 1), out=folder / "runs", results=folder / "results", options=OPTIONS)


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
    assert run_folder("runs", "tiny-ie", TINY, 1).name == f"tiny-ie--{TINY.hash}--seed1"
    for seed in (0, 1):
        place = run_folder(folder / "runs", "tiny-ie", TINY, seed)
        assert json.loads((place / "recipe.json").read_text()) == TINY.to_json()
        assert (place / "telemetry.jsonl").exists()
        ensemble = cmcl.load(place / "ensemble")
        test = cmcl.data.load("digits", split="test")
        assert ensemble.transform is not None
        assert cmcl.evaluate(ensemble, test)["top1"] == pytest.approx(
            records[seed].errors["expected"]["top1"]
        )
        assert Record.load(place / "record.json") == records[seed]
        assert Record.load(folder / "results" / "records" / records[seed].file_name) == records[seed]


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


def test_one_split_for_whitening_training_and_choosing(tmp_path, monkeypatch):
    """Contrast normalisation makes blank images equal, and equal images stay on one side."""
    whole = cmcl.data.load("digits")
    images = whole.images.clone()
    images[0], images[1] = 0, 255
    monkeypatch.setattr(
        cmcl.data, "load", lambda name, split, root: changed(whole, images=images, split=split)
    )
    sets = load_data(changed(TINY, preprocess="gcn", validation=0.25), cache=tmp_path)
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
    sets = load_data(recipe, cache=tmp_path)
    raw = cmcl.data.load("digits")
    kept, _ = cmcl.data.split_validation(raw, 0.25)
    torch.testing.assert_close(
        sets.transform.transform(raw.images), MeanStd().fit(kept).transform(raw.images)
    )
    build(recipe, 0, sets.transform).save(tmp_path / "saved")
    again = cmcl.load(tmp_path / "saved", root=tmp_path).transform
    assert again.checksum == sets.transform.checksum != MeanStd().fit(raw).checksum


class TestProvenance:
    @pytest.fixture
    def go(self, tmp_path, monkeypatch):
        """Train or measure as of some commit, in one folder; as many steps as are asked for, then stop."""

        def start(commit, stop_at=None, **changes):
            monkeypatch.setenv("CMCL_COMMIT", commit)
            with monkeypatch.context() as patch:
                if stop_at is not None:
                    patch.setattr(RunFolder, "due", stopping_at(stop_at))
                (record,) = run("tiny-ie", out=tmp_path, options=changed(OPTIONS, **changes))
            return record

        return start

    @pytest.fixture
    def place(self, tmp_path):
        return run_folder(tmp_path, "tiny-ie", TINY, 0)

    def test_measured_again_is_not_trained_again(self, go, place):
        first = go("one")
        written = (place / "record.json").stat().st_mtime_ns
        assert (first.commit, first.precision, first.resumed_with) == ("one", "float32", [])
        assert go("two", precision="bf16") == first
        assert (place / "record.json").stat().st_mtime_ns == written, "nothing new, nothing written"
        assert len(environment.history(place)) == 1

    def test_measured_differently(self, go, place):
        first = go("one")
        changed(first, members=[1.0, 2.0]).save(place / "record.json")
        assert go("two") == first, "the evaluation is new, the environment is not"
        assert Record.load(place / "record.json") == first

    def test_without_its_record(self, go, place):
        first = go("one")
        (place / "record.json").unlink()
        again = go("two")
        assert changed(again, seconds=first.seconds) == first

    def test_without_a_history(self, go, place):
        """A finished run of an earlier version: its record knows."""
        first = go("one")
        (place / environment.HISTORY).unlink()
        assert go("two") == first
        (place / "record.json").unlink()
        assert [one["step"] for one in go("three").resumed_with] == [4], "all of its training is not known"

    def test_resumed_in_the_same_environment(self, go):
        with pytest.raises(cmcl.training.Interrupted):
            go("one", stop_at=2)
        assert (go("one").commit, go("one").resumed_with) == ("one", [])

    def test_resumed_in_another_environment(self, go, place):
        with pytest.raises(cmcl.training.Interrupted):
            go("one", stop_at=1)
        with pytest.raises(cmcl.training.Interrupted):
            go("two", stop_at=3, precision="bf16")
        record = go("three")
        assert (record.commit, record.precision) == ("one", "float32")
        found = [(one["step"], one["commit"], one["precision"]) for one in record.resumed_with]
        assert found == [(0, "one", "float32"), (1, "two", "bf16"), (3, "three", "float32")]
        assert Record.load(place / "record.json") == record
        assert go("four") == record

    def test_a_part_without_steps_is_left_out(self, go, place):
        """One that was refused before its first step: noted, and nothing came of it."""
        environment.append(place, 0, environment.current(OPTIONS) | {"commit": "one"})
        assert (go("two").commit, go("two").resumed_with) == ("two", [])

    def test_a_history_that_begins_late(self, go, place):
        with pytest.raises(cmcl.training.Interrupted):
            go("one", stop_at=2)
        (place / environment.HISTORY).unlink()
        assert [one["step"] for one in go("two").resumed_with] == [2], "the first two steps are not known"

    def test_damage(self, go, place):
        """A line that a kill cut short, and a last checkpoint that cannot be read: then it is trained."""
        with pytest.raises(cmcl.training.Interrupted):
            go("one", stop_at=2)
        go("one")
        with (place / environment.HISTORY).open("a") as file:
            file.write('{"step": 3, "dev\n')
        (last,) = (place / "checkpoints").glob("step-00000004-*")
        last.write_bytes(b"broken")
        with pytest.warns(UserWarning, match="is damaged"):
            record = go("two")
        assert [one["commit"] for one in record.resumed_with] == ["one", "one", "two"]

    def test_a_folder_in_use_is_left_alone(self, go, place):
        with locked(place), pytest.raises(FolderInUseError):
            go("one")
        assert environment.history(place) == []


def stopping_at(step):
    """`RunFolder.due`, with a signal that comes after so many steps."""
    due, count = RunFolder.due, iter(range(1, 10**6))

    def signalled(self):
        if next(count) + (self._saved_step or 0) == step:
            self._signals.received = "SIGTERM"
        return due(self)

    return signalled


def test_a_device_that_cannot_compute():
    with pytest.raises(ValueError, match="device must .*Got 'meta'"):
        run("tiny-ie", out="nowhere", options=changed(OPTIONS, device="meta"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "resnet21"}, "recipe.network must be a known name. Got 'resnet21'. .* 'resnet20'"),
        ({"preprocess": "foo"}, "recipe.preprocess must be a known name. Got 'foo'. Valid names: mean_std"),
        ({"data": "shapes"}, "networks accept. .*3, 64, 64"),
        (
            {"network": "fcn", "network_options": {"channels": 1, "filters": [2, 4]}},
            "targets must have shape \\(2, 8, 8\\)",
        ),
        (
            {"network_options": {"expected_pooling": "False"}},
            "network_options.expected_pooling must be .*boolean. Got 'False'",
        ),
        ({"network_options": {"dropout": "x"}}, "network_options.dropout must be .*number. Got 'x'"),
        ({"network_options": {"dropout": None}}, "network_options.dropout must be .*number. Got None"),
        (
            {"network_options": {"hidden": True}},
            "network_options.hidden must be .*integer. Got True",
        ),
        ({"network_options": {"hiden": 3}}, "must be options of cnn. Got 'hiden'. Did you mean 'hidden'?"),
        (
            {"network_options": DIGITS.network_options | {"classes": 9}},
            "between 0 and 8 .* Got 0 to 9",
        ),
    ],
)
def test_recipes_that_cannot_be(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(changed(TINY, **changes), out=tmp_path / "runs", options=OPTIONS)
    assert not (tmp_path / "runs").exists(), "before anything is written"


def test_commit(monkeypatch):
    monkeypatch.setenv("CMCL_COMMIT", "abc")
    assert environment.commit() == "abc"
    monkeypatch.delenv("CMCL_COMMIT")
    found = environment.commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    monkeypatch.setenv("PATH", "")
    assert environment.commit() is None


def test_recipes_of_the_callers_own_data_cannot_be_run():
    with pytest.raises(ValueError, match="recipe.data must name a dataset"):
        run(changed(TINY, data=None), out="nowhere", options=OPTIONS)


def test_the_gallery_shows_the_predictions_that_are_evaluated(tmp_path):
    """Of mode "expected", not of sampled masks."""
    recipe = changed(TINY, sharing=True, preprocess=None)
    run(recipe, out=tmp_path, name="tiny-sharing", options=OPTIONS)
    (folder,) = tmp_path.iterdir()
    ensemble, test = cmcl.load(folder / "ensemble"), load_data(recipe).test
    (probs,) = predictions(ensemble, test.images)
    shown = Gallery.load(folder / "gallery" / "gallery.json").predictions
    assert shown.confidence[1:].tolist() == pytest.approx(probs.amax(2).numpy(), abs=1e-3)
    assert shown.targets.tolist() == test.targets.tolist()


def test_every_test_image_is_evaluated_once(tmp_path, monkeypatch):
    seen, compute = [], cmcl.Ensemble.member_probs
    counted = lambda self, x, **how: (seen.append(len(x)), compute(self, x, **how))[1]  # noqa: E731
    monkeypatch.setattr(cmcl.Ensemble, "member_probs", counted)
    (record,) = run("tiny-ie", out=tmp_path, test_limit=50, options=OPTIONS)
    assert sum(seen) == record.test_examples == 50
    assert list(tmp_path.glob("*/gallery/gallery.json"))


def test_damaged_files_of_a_run_folder_hang_nothing(tmp_path):
    """A record and a history that are links to a device, and deep nesting."""
    folder = run_folder(tmp_path, "tiny-ie", TINY, 0)
    folder.mkdir()
    (folder / environment.HISTORY).symlink_to("/dev/zero")
    assert environment.history(folder) == []
    (folder / environment.HISTORY).unlink()
    (folder / environment.HISTORY).write_text("[" * 1200 + "\n")
    (folder / "record.json").write_text("[" * 1200)
    (record,) = run("tiny-ie", out=tmp_path, options=OPTIONS)
    assert Record.load(folder / "record.json") == record
