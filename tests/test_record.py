"""Records: what is written comes back, and everything damaged is named and skipped."""

import json

import pytest

from cmcl.reproduction.record import Record, distinct, load_records, read, spread
from report_samples import changed, made_record

RECORD = made_record("cifar10-resnet20-ie")
NESTED = json.loads("[" * 700 + "]" * 700)
OTHER = made_record("cifar10-resnet20-ie", 1)


UNEVEN = RECORD.calibration["reliability"] | {"count": [1]}


def errors(value):
    one = {"top1": value, "picked": value, "oracle": value}
    return {"expected": one, "sampled": one}


def without(values, key):
    return {name: value for name, value in values.items() if name != key}


def test_a_record_comes_back_as_it_was(tmp_path):
    RECORD.save(tmp_path / "records" / RECORD.file_name)
    assert load_records(tmp_path) == [RECORD]
    path = tmp_path / "records" / f"cifar10-resnet20-ie--{RECORD.recipe_hash}--seed0.json"
    assert len(path.read_text().splitlines()) == len(Record.model_fields) + 2, "a line for each field"
    before = path.stat().st_mtime_ns
    RECORD.save(path)
    assert path.stat().st_mtime_ns == before, "nothing new, nothing written"
    assert load_records(tmp_path / "nowhere") == []


def test_the_schema_is_frozen():
    """A change needs a new FORMAT, and a conversion of results/ and zoo/."""
    assert list(Record.model_fields) == [
        *("name", "recipe", "recipe_hash", "seed", "full_length", "full_test", "test_examples", "checksums"),
        *("errors", "members", "classwise", "calibration", "entropy", "network", "task", "trained_on"),
        *("weights", "ood", "validation", "overlap", "steps", "seconds", "device", "mesh", "precision"),
        *("versions", "commit", "resumed_with", "format"),
    ]
    assert RECORD.format == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"errors": {}}, "errors.expected"),
        ({"errors": {"expected": {"top1": 1.0}}}, "errors.expected.oracle"),
        ({"errors": errors(10**400)}, "errors.expected.top1"),
        ({"errors": errors(100.5)}, "less than or equal to 100"),
        ({"members": []}, "members"),
        ({"members": [1.0]}, "members .* 5 entries"),
        ({"members": [float("nan")] * 5}, "finite"),
        ({"classwise": [[1.0], [1.0, 2.0], [1.0], [1.0], [1.0]]}, "classwise"),
        ({"classwise": [[None]] * 5}, "classwise"),
        ({"classwise": [[]] * 5}, "classwise"),
        ({"entropy": RECORD.entropy | {"other": [[1], [1, 2], [1], [1], [1]]}}, "50 bins"),
        ({"calibration": RECORD.calibration | {"reliability": UNEVEN}}, "one length"),
        ({"seconds": "long"}, "seconds"),
        ({"seconds": 10**400}, "seconds"),
        ({"test_examples": 10**400}, "test_examples"),
        ({"test_examples": 0}, "test_examples"),
        ({"recipe": {"data": "digits"}}, "epochs"),
        ({"recipe": without(RECORD.recipe, "data")}, "data"),
        ({"recipe": RECORD.recipe | {"lr": 10**400}}, "lr"),
        ({"recipe": None}, "None"),
        ({"recipe": RECORD.recipe | {"network_options": {"size": NESTED}}}, "nested too deep"),
        ({"seed": "0"}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"calibration": RECORD.calibration | {"risk_coverage": []}}, "risk_coverage"),
        ({"calibration": RECORD.calibration | {"temperature": 0.0}}, "temperature"),
        ({"calibration": RECORD.calibration | {"scaled_ece": 101.0}}, "scaled_ece"),
        ({"network": {"class": "Net", "parameters": 7}}, "network.digest"),
        ({"format": 99}, "Upgrade"),
        ({"extra": 1}, "no field 'extra'"),
    ],
)
def test_a_damaged_record_is_named_and_skipped(tmp_path, change, reason):
    damaged = tmp_path / "records" / "damaged.json"
    RECORD.save(tmp_path / "records" / "good.json")
    damaged.write_text(json.dumps(json.loads((tmp_path / "records" / "good.json").read_text()) | change))
    with pytest.raises(ValueError, match=rf"damaged.json.*{reason}"):
        Record.load(damaged)
    with pytest.warns(UserWarning, match="skipped: .*damaged.json"):
        assert load_records(tmp_path) == [RECORD]
    assert read(damaged) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 1200 + "]" * 1200, '{"a":' * 1200, "1" * 5000])
def test_what_is_no_record(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match=r"record.json"):
        Record.load(tmp_path / "record.json")


def test_an_endless_file_is_skipped(tmp_path):
    """A link to a device must not hang the report or a resumed run."""
    RECORD.save(tmp_path / "records" / "a.json")
    (tmp_path / "records" / "endless.json").symlink_to("/dev/zero")
    with pytest.warns(UserWarning, match="endless"):
        assert load_records(tmp_path) == [RECORD]
    assert read(tmp_path / "records" / "endless.json") is None


def test_a_missing_field_with_a_default(tmp_path):
    """Early records lack some."""
    RECORD.save(tmp_path / "a.json")
    values = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(without(values, "resumed_with")))
    assert Record.load(tmp_path / "a.json") == RECORD


def test_a_temperature_is_optional(tmp_path):
    """Records without one are written as before; one with it comes back, as the same run."""
    RECORD.save(tmp_path / "a.json")
    written = json.loads((tmp_path / "a.json").read_text())["calibration"]
    assert not {"temperature", "scaled_ece"} & set(written)
    scaled = changed(RECORD, calibration=RECORD.calibration | {"temperature": 0.5, "scaled_ece": 1.5})
    scaled.save(tmp_path / "b.json")
    assert Record.load(tmp_path / "b.json") == scaled
    assert scaled.scores == RECORD.scores | {"scaled_ece": 1.5}
    assert scaled.identity == RECORD.identity


def test_copies_of_one_run_count_once():
    copy = changed(RECORD, errors=errors(3.0), ood=None)  # evaluated again
    assert len(distinct([RECORD, copy, OTHER])) == 2
    known = changed(RECORD, weights="f" * 64)
    assert known.identity == changed(known, device="another", seed=9).identity
    assert known.identity != changed(known, test_examples=7).identity


def test_spread_by_hand():
    assert spread([10.0, 12.0]) == {"mean": 11.0, "std": pytest.approx(2**0.5, abs=1e-6), "n": 2}
    assert spread([10.0]) == {"mean": 10.0, "std": None, "n": 1}
