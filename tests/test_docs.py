"""The documents: links and anchors lead somewhere, snippets run, pictures and tables are fresh."""

import importlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

for name in ("altair", "vl_convert", "jinja2", "onnxruntime"):  # what the pages themselves use
    pytest.importorskip(name)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = sorted({*ROOT.glob("*.md"), *PAGES, *ROOT.glob("[!.]*/README.md")})  # not of caches
sys.path.insert(0, str(DOCS))  # as for `python docs/make.py`
make, run = map(importlib.import_module, ("make", "run"))
OTHERS = {"sharing", "answers", "report", *make.FIGURES}  # drawn by hand, photographed, drawn from records
SAVED = {path.name for path in (DOCS / "pictures").iterdir() if path.stem not in OTHERS}  # by blocks of pages


def name(page):
    """A page as mkdocs.yml has it."""
    return str(page.relative_to(DOCS) if page.is_relative_to(DOCS) else page.relative_to(ROOT))


def without_code(text):
    return re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text):
    """As GitHub makes them from headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text):
    return re.findall(r"\]\(((?!https?:)[^)\s]+)\)", without_code(text))


def test_anchors_as_github_makes_them():
    assert anchors("# One, two\n## `fit` and K = 1\n```\n# no\n```\n") == {"one-two", "fit-and-k--1"}
    assert links("[a](b.md#c) `[x](y)` [web](https://e.org) ![p](p.svg)") == ["b.md#c", "p.svg"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_and_anchors_lead_somewhere(document):
    for link in links(document.read_text()):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{link}: no such heading"


def test_every_page_is_in_the_navigation():
    """mkdocs.yml names every page, and the site has a page for every document outside docs/."""
    listed = re.findall(r"^ +- .+: (\S+\.md)\b", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    mirrored = ("reference/zoo.md", "reference/options.md", "project/contributing.md", "project/changelog.md")
    assert set(listed) == {*map(name, PAGES), *mirrored}
    home = DOCS / "README.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(home.read_text())}
    assert set(PAGES) - linked == {home}, "README calls it the list of all pages"


SLOW = [f"tutorials/{name}.md" for name in ("images", "text", "fine-tuning", "segmentation", "several-gpus")]
SLOW += ["README.md", "guides/training.md"]  # they train several seeds, or in several processes


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.slow] * (name(page) in SLOW))
        for page in DOCUMENTS
        if run.BLOCK.search(page.read_text())
    ],
)
def test_snippets_run(page, tmp_path, capsys):
    """Every Python block of a page, one after the other, as a reader would; it prints what the page shows."""
    for block, printed in run.outputs(page.read_text(), tmp_path):
        assert block["output"] is None or run.alike(printed, block["printed"]), (
            f"run python docs/run.py {page}:\n{printed}"
        )
    shown = set(re.findall(r"pictures/([\w-]+\.\w+)", page.read_text()))
    assert {path.name for path in run.pictures_of(page.read_text(), tmp_path)} >= shown & SAVED


def test_outputs_are_alike():
    assert run.alike("IE 5.3 %, K = 4\n", "IE 6.9 %, K = 4\n")
    assert not run.alike("IE 5.3 %\n", "IE 9.9 %\n"), "other numbers"
    assert not run.alike("IE 5.3 %\n", "CMCL 5.3 %\n"), "other words"
    assert not run.alike("1 2\n", "1\n")


def test_outputs_are_written(tmp_path):
    page = "```python\nx = 2\nprint(x, '')\n```\n\n```output\nold\n```\n\n```python\nx += 1\n```\n"
    assert run.executed(page, tmp_path) == page.replace("old", "2")


def test_scripts_of_pages_run_in_a_shell(tmp_path):
    script = '```python title="two.py"\nprint(2)\n```\n\n'
    command = "```sh\npython two.py\n```\n"
    page = f"{script}```sh\nexit 1\n```\n\n{command}\n```output\nold\n```\n"  # without output: not run
    assert run.executed(page, tmp_path) == page.replace("old", "2")
    with pytest.raises(RuntimeError, match=r"must run\. Got .*nothing\.py"):
        run.shell("python nothing.py\n")


def test_every_extra_is_on_the_page_of_the_installation():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "start" / "install.md").read_text(), re.MULTILINE)
    assert set(rows) == set(extras)


def test_every_python_line_is_in_a_block():
    """A block that is only indented is not run: commands and data may be, Python may not."""
    for page in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        found = re.findall(r"^ {4}(?:import|from \S+ import|\w+(?:\.\w+)*\(|\w+ = ).*", text, re.MULTILINE)
        assert not found, f"{page.name}: {found}"


def test_lines_of_code_fit_on_the_site():
    """A code block of the site holds 108 characters on a screen of 1400 pixels."""
    for page in DOCUMENTS:
        blocks = [block["code"] for block in run.BLOCK.finditer(page.read_text())]
        assert [line for code in blocks for line in code.splitlines() if len(line) > 108] == [], page.name


@pytest.mark.slow
def test_the_commands_after_fine_tuning_run(tmp_path, monkeypatch, cmcl, capsys):
    """On what the page's snippets leave, with the network that they define."""
    monkeypatch.delitem(sys.modules, "mynet", raising=False)  # of another test
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = (DOCS / "tutorials" / "fine-tuning.md").read_text()
    blocks = [block["code"] for block in run.BLOCK.finditer(text)]
    names = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "fine-tuning.md", "exec"), names)
    network = re.search(r"^def network.*?^    return net$", text, re.DOTALL | re.MULTILINE)
    Path("mynet.py").write_text(f"from torch import nn\n\n\n{network[0]}\n")
    test = names["cmcl"].data.load("digits", split="test")
    pictures = [Path("photo.png"), *(Path(f"my-images/test/{name}/0.png") for name in test.classes)]
    for i, path in enumerate(pictures):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(test.images[i, 0].numpy()).save(path)
    shutil.copytree("my-images/test", "my-images/train")
    commands = re.findall(r"^    cmcl (.+)$", text, re.MULTILINE)
    capsys.readouterr()  # what the snippets print
    assert [command.split()[0] for command in commands] == ["predict", "evaluate", "export"]
    answers = [cmcl(*command.split(), "--json") for command in commands]
    assert [(code, err) for code, _, err in answers] == [(0, "")] * 3
    said = json.loads(answers[0][1])["prediction"]
    expected = names["ensemble"].predict(test.images[:1]).probs
    assert said["confidence"] == pytest.approx(expected.max().item(), abs=1e-5)
    assert json.loads(answers[2][1])["input"] == "uint8 (batch, 1, 8, 8)"


def test_tables_are_fresh():
    for page in make.PAGES:
        text = page.read_text()
        again = make.fill(text, "make", make.TABLES, page.name)
        assert again == text, f"{page.name} is stale: run python docs/make.py"
        opened = re.findall(r"^<!-- make:(?!end)\S+ -->$", text, re.MULTILINE)
        assert len(opened) == text.count("<!-- make:end -->")


@pytest.mark.parametrize("described", make.DESCRIBED)
def test_every_public_field_has_a_meaning(described):
    rows = [line.split(" | ") for line in make.fields(described)().splitlines()[2:]]
    assert rows
    assert [name for name, meaning, *_ in rows if not meaning.strip()] == []


@pytest.mark.parametrize("name", make.FIGURES)
def test_pictures_are_fresh(name):
    path, figure = DOCS / "pictures" / f"{name}.svg", make.FIGURES[name]()
    if figure is None:  # its records are missing
        assert not path.exists()
        return
    svg = path.read_text()
    ElementTree.fromstring(svg)
    digest = make.digest(figure)
    assert svg.endswith(f"<!-- docs/make.py, {digest} -->\n"), "stale: run python docs/make.py"


def test_every_picture_is_shown():
    shown = {(page.parent / link).resolve() for page in DOCUMENTS for link in links(page.read_text())}
    assert set((DOCS / "pictures").iterdir()) <= shown


def test_the_map_names_functions_that_are_there():
    rows = re.findall(
        r"^\|.*?\]\(\.\./\.\./(src/cmcl/\S+\.py)\) \| (.*) \|$",
        (DOCS / "reproduction" / "paper-to-code.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 15
    for path, names in rows:
        code = (ROOT / path).read_text()
        for name in re.findall("`([^`]+)`", names):
            assert re.search(rf"^(def|class) {name}\b|^{name}\b.* = ", code, re.MULTILINE), (
                f"{path} has no {name}"
            )
