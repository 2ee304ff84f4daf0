"""The documentation site: links that leave docs/, the page of options, nothing loaded from the network."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))  # as for `python docs/offline.py`
hooks, offline = map(importlib.import_module, ("hooks", "offline"))


def test_links_fit_the_site():
    page = ROOT / "docs" / "guides" / "data.md"
    text = "[a](../../CONTRIBUTING.md#rules) [b](../tutorials/images.md) [c](../../results/defaults.txt) `[d](../../x)`"
    relinked, outside = hooks.relink(text, page, "guides/data.md")
    own = "[b](../tutorials/images.md) [c](../source/results/defaults.txt.md) `[d](../../x)`"
    assert relinked == f"[a](../project/contributing.md#rules) {own}"
    assert outside == {ROOT / "results" / "defaults.txt"}


def test_links_of_a_document_elsewhere():
    text = "[a](docs/guides/data.md) [b](https://e.org/x.md) [c](#rules) [d](no-such-file.md)"
    relinked, outside = hooks.relink(text, ROOT / "CONTRIBUTING.md", "project/contributing.md")
    assert relinked == "[a](../guides/data.md) [b](https://e.org/x.md) [c](#rules) [d](no-such-file.md)"
    assert outside == set()


def test_files_and_folders_are_shown():
    assert hooks.shown(ROOT / "Makefile").startswith("# Makefile\n\n~~~~~~text\n")
    assert "- `records`" in hooks.shown(ROOT / "results")


def test_every_command_has_its_options():
    page = hooks.options()
    for line in ("## cmcl train", "## cmcl data fetch", "| `--risk` | `0.01` |"):
        assert line in page


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        ('<script src="https://e.org/a.js"></script>', True),
        ('<link rel="stylesheet" href="//e.org/a.css">', True),
        ("<style>@font-face {src: url(https://e.org/f.woff)}</style>", True),
        ('<img src="pictures/a.svg"><a href="https://e.org">read</a>', False),
        ('<link rel="canonical" href="https://e.org/">', False),
    ],
)
def test_what_a_page_loads(tmp_path, text, loads):
    (tmp_path / "a.html").write_text(text)
    assert bool(offline.loaded(tmp_path)) == loads


def test_a_site_without_pages(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a folder with pages"):
        offline.loaded(tmp_path)
