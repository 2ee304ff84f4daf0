"""Settings and JSON files: one style of message, and nothing that a file holds can hang or crash the reader."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from cmcl._files import STALE, parse_json, read_json, replacing
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
            ({"x": "far"}, r"^x must be a valid number.* Got 'far'\.$"),
            ({"x": float("nan")}, "x must be a finite number. Got nan"),
            ({}, "Point must have a field 'x'"),
            ({"x": 1, "nane": "a"}, "Point has no field 'nane'. Did you mean 'name'"),
            ([1], "Point must be a valid dictionary"),
            ({"x": 10**400}, "x must be a valid number. Got 1"),
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
        ["", "{", "[" * 200_000, "[" * 300 + "]" * 300, "9" * 5000, '{"a": ', "\udcff"],
        ids=["empty", "cut", "endlessly nested", "nested", "huge integer", "half", "not UTF-8"],
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


class TestReplacing:
    def test_a_whole_file_or_none_with_the_permissions_of_any_other(self, tmp_path):
        path, link, plain = tmp_path / "a.json", tmp_path / "link", tmp_path / "plain"
        plain.touch()
        link.symlink_to(path)
        with replacing(link) as part:
            assert part.parent == tmp_path
            part.write_text("new")
        assert (path.read_text(), link.is_symlink()) == ("new", True)
        assert path.stat().st_mode == plain.stat().st_mode
        with suppress(RuntimeError), replacing(path) as part:
            part.write_text("half")
            raise RuntimeError
        assert path.read_text() == "new"
        assert sorted(tmp_path.iterdir()) == [path, link, plain]

    def test_what_killed_processes_left_is_removed(self, tmp_path):
        old, young, other = (tmp_path / name for name in (".a.12345678.part", ".b.12345678.part", ".c.part"))
        for path in (old, young, other):
            path.touch()
        for path in (old, other):
            os.utime(path, (0, path.stat().st_mtime - STALE - 1))
        with replacing(tmp_path / "d"):
            pass
        assert sorted(tmp_path.iterdir()) == [young, other, tmp_path / "d"]

    def test_a_device_is_never_replaced(self):
        with pytest.raises(ValueError, match="must be a file to be replaced"), replacing(Path("/dev/null")):
            pass
