"""Settings and JSON files: one style of message, and nothing that a file holds can hang or crash the reader."""

import os

import pytest

from cmcl._files import parse_json, read_json
from cmcl._schema import Schema


class Point(Schema):
    x: float
    name: str = ""


class TestSchema:
    def test_values_and_defaults(self):
        point = Point.parse({"x": 2})
        assert (point.x, point.name) == (2.0, "")

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"x": "far"}, r"^x must be valid: .*number.* Got 'far'\.$"),
            ({"x": float("nan")}, "x must be valid: .*finite"),
            ({}, "Point must have a field 'x'"),
            ({"x": 1, "nane": "a"}, "Point has no field 'nane'. Did you mean 'name'"),
            ([1], "Point must be valid"),
            ({"x": 10**400}, "x must be valid"),
            ({"x": "a" * 1000}, r"\.\.\."),
        ],
    )
    def test_messages_name_field_and_value(self, values, said):
        with pytest.raises(ValueError, match=said) as error:
            Point.parse(values)
        assert len(str(error.value)) < 300

    def test_the_source_comes_first(self):
        with pytest.raises(ValueError, match=r"^a\.json: x must"):
            Point.parse({"x": "far"}, source="a.json")

    def test_frozen(self):
        with pytest.raises(ValueError, match="frozen"):
            Point.parse({"x": 1}).x = 2.0


class TestReadJson:
    @pytest.mark.parametrize(
        "text",
        ["", "{", "[" * 200_000, "9" * 5000, '{"a": ', "\udcff"],
        ids=["empty", "cut", "nested", "huge integer", "half", "not UTF-8"],
    )
    def test_damage_is_a_value_error_with_the_path(self, tmp_path, text):
        path = tmp_path / "record.json"
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"record\.json must be JSON"):
            read_json(path)

    def test_devices_pipes_and_large_files_are_not_read(self, tmp_path):
        endless, pipe, large = tmp_path / "zero", tmp_path / "pipe", tmp_path / "large"
        endless.symlink_to("/dev/zero")
        os.mkfifo(pipe)
        large.write_bytes(b" " * 100)
        for path in (endless, pipe, tmp_path / "missing", tmp_path):
            with pytest.raises(ValueError, match="must be a JSON file"):
                read_json(path)
        with pytest.raises(ValueError, match="at most 99 bytes. Got 100"):
            read_json(large, largest=99)

    def test_values(self):
        assert parse_json('{"a": [1, 2.5, null]}', "text") == {"a": [1, 2.5, None]}
