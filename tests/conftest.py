"""For all tests."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """What is preprocessed goes to a folder of this test run, never to the user's."""
    monkeypatch.setenv("CMCL_CACHE", str(tmp_path_factory.getbasetemp() / "cmcl-cache"))
