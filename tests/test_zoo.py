"""The trained ensembles that come with the program give the errors that are written beside them."""

import json
import os
from pathlib import Path

import pytest

import cmcl
from cmcl.reproduction.recipes import find
from cmcl.reproduction.record import Record

ZOO = sorted(path.parent for path in (Path(__file__).parents[1] / "zoo").glob("*/config.json"))
DATA = os.environ.get("CMCL_DATA")


@pytest.mark.parametrize("folder", ZOO, ids=lambda folder: folder.name)
class TestZoo:
    def test_its_record_is_of_its_recipe(self, folder):
        record = Record.load(folder / "record.json")
        assert record.name == folder.name
        assert record.recipe_hash == find(folder.name).hash
        assert record.complete

    def test_the_file_is_as_good_as_the_run(self, folder):
        """Half precision, measured from the file, against what the run measured before it was saved."""
        measured = json.loads((folder / "measured.json").read_text())
        record = Record.load(folder / "record.json")
        assert measured["examples"] == record.test_examples
        for name in ("top1", "oracle"):
            assert measured[name] == pytest.approx(record.errors["expected"][name], abs=0.05)

    @pytest.mark.slow
    @pytest.mark.real
    @pytest.mark.skipif(DATA is None, reason="CMCL_DATA names no folder")
    def test_measured_again(self, folder):
        """As `cmcl evaluate` does it; minutes on a CPU."""
        measured = json.loads((folder / "measured.json").read_text())
        test = cmcl.data.load(measured["data"], split="test", root=DATA)
        scores = cmcl.evaluate(cmcl.load(folder, root=DATA), test, batch_size=250)
        for name in ("top1", "oracle", "member"):
            assert scores[name] == pytest.approx(measured[name], abs=0.05)
