"""Runs and their records: what is measured, what is written, and what fills a cell of the paper."""

import json
from dataclasses import asdict, replace

import pytest
import torch

import cmcl
from cmcl.data.dataset import Dataset
from cmcl.experiments import Cell, environment, find
from cmcl.experiments.measure import errors, measure
from cmcl.experiments.recipes import DIGITS, RECIPES
from cmcl.experiments.records import Record, choose, fills, known_checksums, load_records, summarise
from cmcl.experiments.run import build, run, run_folder

OPTIONS = cmcl.Options(device="cpu", quiet=True)
TINY = replace(
    DIGITS, members=2, epochs=None, steps=4, network_options=DIGITS.network_options | {"filters": [2, 4]}
)
CELL = Cell("table0/tiny-ie", "tiny-ie", ("table0", "ie"), {"oracle": 1.0, "top1": 2.0})
ALONE = replace(CELL, id="table0/tiny-single", single=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.fixture(autouse=True)
def tiny(monkeypatch, folder):
    monkeypatch.setenv("CMCL_CACHE", str(folder / "cache"))
    monkeypatch.setitem(RECIPES, "tiny-ie", TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    assert len((tmp_path / "record.json").read_text().splitlines()) == len(asdict(records[0])) + 2


def test_a_record_tells_what_decided_it(records):
    record = records[1]
    assert cmcl.Recipe.from_json(record.recipe) == TINY
    assert (record.name, record.seed, record.recipe_hash) == ("tiny-ie", 1, TINY.hash)
    assert (record.steps, record.together, record.precision) == (4, [0, 1], "float32")
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
    first, again, other = build(TINY, 0), build(replace(TINY, method="cmcl", sharing=True), 0), build(TINY, 1)
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
    recipe = replace(TINY, validation=0.1)
    (record,) = run(recipe, out=tmp_path, name="tiny-search", options=OPTIONS)
    assert set(record.validation) == {"top1", "oracle", "picked", "averaged"}
    assert choose([record])["chosen_on"] == "validation"


def test_what_fills_a_cell(records):
    record = records[0]
    assert fills(record, CELL)
    for change in (
        {"recipe_hash": "0" * 16},
        {"full_length": False},
        {"full_test": False},
    ):
        assert not fills(replace(record, **change), CELL), change
    other = {"digits": {"train": "a", "test": "b"}}
    assert not fills(record, CELL, other)
    assert not fills(record, replace(CELL, where=("fig2a", "ie"))), "figure 2 needs unseen data"
    assert fills(replace(record, outside="svhn"), replace(CELL, where=("fig2a", "ie")))


def test_data_unlike_the_others_do_not_count(records):
    stray = replace(records[0], seed=9, checksums={"train": "x", "test": "y"})
    assert known_checksums([*records, stray])["digits"] == records[0].checksums
    (summary,) = summarise([CELL], [*records, stray])
    assert summary["ours"]["top1"]["n"] == 2
    assert summary["partial"] == [stray.file_name]


def test_summary(records):
    a, b = (
        replace(r, errors={"expected": e}, members=m)
        for r, e, m in zip(
            records,
            [{"top1": 10.0, "oracle": 4.0}, {"top1": 12.0, "oracle": 4.0}],
            [[10.0, 20.0], [11.0, 13.0]],
            strict=True,
        )
    )
    both, alone, figure = summarise([CELL, ALONE, replace(CELL, paper=None)], [a, b])
    assert both["id"] == "table0/tiny-ie"
    assert both["paper"] == {"oracle": 1.0, "top1": 2.0}
    assert both["ours"] == {
        "oracle": {"mean": 4.0, "std": 0.0, "n": 2},
        "top1": {"mean": 11.0, "std": pytest.approx(2**0.5, abs=1e-6), "n": 2},
    }
    assert alone["ours"]["top1"] == {"mean": 13.5, "std": pytest.approx(4.5**0.5, abs=1e-6), "n": 2}
    assert alone["ours"]["oracle"] == alone["ours"]["top1"]
    assert figure["paper"] == {"oracle": None, "top1": None}
    assert summarise([CELL], [a])[0]["ours"]["top1"] == {"mean": 10.0, "std": None, "n": 1}
    assert summarise([CELL], [])[0]["ours"] is None
    json.dumps([both, alone, figure], allow_nan=False)


def test_choose(records):
    def made(name, top1, held_out):
        validation = None if held_out is None else {"top1": held_out}
        return replace(records[0], name=name, errors={"expected": {"top1": top1}}, validation=validation)

    found = [made("a", 5.0, 8.0), made("a", 5.0, 9.0), made("b", 6.0, 7.0), made("c", 1.0, None)]
    assert choose(found)["name"] == "b"
    assert choose(found, on="test")["name"] == "c"
    assert choose(found, on="test")["chosen_on"] == "test"
    assert choose(found)["top1"] == {"mean": 7.0, "std": None, "n": 1}
    with pytest.raises(ValueError, match="Got none"):
        choose([])
    with pytest.raises(ValueError, match="'validation' or 'test'. Got 'train'"):
        choose(found, on="train")


def test_a_file_that_is_no_record(tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "x.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="x.json must be a record of a run"):
        load_records(tmp_path)
    (tmp_path / "records" / "x.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="later version"):
        load_records(tmp_path)
    assert load_records(tmp_path / "nowhere") == []


def digits(n=40):
    test = cmcl.data.load("digits", split="test")[:n]
    return replace(test, images=test.images / 255)


def test_measures_without_sharing():
    found = measure(build(TINY, 0), digits())
    assert found["errors"]["expected"] == found["errors"]["sampled"]
    assert "outside" not in found["entropy"]
    assert len(found["calibration"]["risk_coverage"]) == 100
    assert sum(found["calibration"]["reliability"]["count"]) == 40
    assert len(found["classwise"]) == 2
    assert len(found["classwise"][0]) == 10
    for mine, other in zip(found["entropy"]["specialised"], found["entropy"]["other"], strict=True):
        assert sum(mine) + sum(other) == 40
        assert len(mine) == 50


def test_measures_with_sharing_and_unseen_data():
    ensemble = build(replace(TINY, sharing=True), 0)
    unseen = replace(digits(30), images=torch.rand(30, 1, 8, 8) * 3)
    found = measure(ensemble, digits(), outside=unseen, seed=3)
    assert found == measure(ensemble, digits(), outside=unseen, seed=3), "the masks have a seed"
    assert sum(found["entropy"]["outside"][0]) == sum(found["entropy"]["averaged_outside"]) == 30
    assert 0 <= found["calibration"]["auroc"] <= 1
    assert ensemble.share_at_test == "expected"


def test_errors_by_hand():
    probs = torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.2, 0.8], [0.3, 0.7]]])  # (M, N, C)
    assert errors(probs, torch.tensor([0, 1])) == {
        "top1": 0.0,  # averages 0.55 and 0.45: classes 0 and 1
        "oracle": 0.0,
        "picked": 0.0,  # member 0 is surer of the first, member 1 of the second
        "averaged": 0.0,
    }
    assert errors(probs, torch.tensor([1, 1]))["picked"] == 50.0
    assert errors(probs, torch.tensor([1, 1]))["oracle"] == 0.0


def test_segmentation_counts_the_most_confident_member():
    recipe = replace(find("shapes-ie"), network_options={"filters": [2, 4]})
    shapes = cmcl.data.load("shapes", split="test", groups=2, per_group=5, size=8)
    found = measure(build(recipe, 0), replace(shapes, images=shapes.images / 255))
    assert found["errors"]["expected"]["top1"] == found["errors"]["expected"]["picked"]
    assert sum(found["entropy"]["test"][0]) == len(shapes)
    json.dumps(found, allow_nan=False)


def test_classes_without_examples_are_none():
    test = digits()
    rows = [i for i, label in enumerate(test.targets.tolist()) if label != 3]
    found = measure(build(TINY, 0), Dataset(test.images[rows], test.targets[rows], test.classes))
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
        run(replace(TINY, data=None), out="nowhere", options=OPTIONS)
