"""The report as a whole: what is loaded, what the page holds, and that no bad file stops it."""

import json
import os
import re
import shlex
import warnings
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest

from cmcl import report
from cmcl.report.load import load
from cmcl.reproduction import find
from report_samples import changed, made_record, save_results, save_run, whole_paper

page = pytest.importorskip("cmcl.report.page")
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
DEEP = "[" * 1200 + "]" * 1200
DIGITS = ("digits-ie", "digits-mcl", "digits-cmcl")


@pytest.fixture
def runs(tmp_path):
    """A folder of runs: three of digits, one of shapes."""
    return save_runs(tmp_path / "runs")


def save_runs(folder):
    for name in DIGITS:
        save_run(folder / f"{name}--0--seed0", made_record(name))
    save_run(folder / "shapes-cmcl--0--seed0", made_record("shapes-cmcl", classes=2))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page of everything there can be."""
    folder = tmp_path_factory.mktemp("whole")
    return page_of(save_results(folder / "results", whole_paper(1)), save_runs(folder / "runs"), out=folder)


class Page(HTMLParser):
    """The elements of a page; tags that are left open or closed twice are an error."""

    VOID = frozenset({"meta", "img", "br", "line", "link"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.headings = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if tag == "a" else []
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag, part=""):
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and part in attributes.get("class", "")
        ]


def page_of(*sources, out):
    return report.write(sources, out / "page.html").read_text()


def markdown_of(*sources, out):
    return report.write(sources, out / "page.md", format="md").read_text()


def test_a_page_of_runs(runs, tmp_path):
    text = page_of(runs, out=tmp_path)
    found = Page(text)
    assert [a["id"] for a in found.all("section") if a.get("id", "").endswith("digits")] == [
        f"{part}-digits" for part in ("results", "pictures", "members", "trust", "training")
    ]
    assert "pictures-shapes" in found.ids
    assert len(found.all("div", "tile ")) == 8, "four numbers for each CMCL recipe"
    assert text.index('class="tiles"') < text.index("Results on digits"), "the verdict comes first"
    assert "Table 1" not in text, "no empty paper tables"


def test_a_page_of_nothing_measured(tmp_path):
    (tmp_path / "empty" / "records").mkdir(parents=True)
    assert page_of(tmp_path / "empty", out=tmp_path).count("not measured") > 90


def test_the_page_is_whole_accessible_and_its_links_lead_somewhere(whole):
    for words in ("Table 1.", "Table 2.", "Table 3.", "Figure 1:", "Figure 2:", "Figure 4:", "does not hold"):
        assert words in whole, words
    found = Page(whole)
    assert [name for name, count in Counter(found.ids).items() if count > 1] == []
    inside = [link for link in found.links if link.startswith("#")]
    assert {link[1:] for link in inside} <= set(found.ids)
    assert set(found.links) - set(inside) == {page.PAPER}
    assert {found.ids.count(a["aria-labelledby"]) for _, a in found.tags if "aria-labelledby" in a} == {1}
    assert found.headings[0] == 1
    assert found.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(found.headings, found.headings[1:], strict=False))
    assert len(found.all("table")) == len(found.all("caption"))
    assert all("scope" in a for a in found.all("th"))
    assert [len(found.all(tag)) for tag in ("nav", "main", "footer")] == [1, 1, 1]
    charts = found.all("div", "chart")
    assert len(charts) > 20
    assert all(a["role"] == "img" and a["aria-label"] for a in charts if a["class"] == "chart")


def test_nothing_comes_from_elsewhere(whole):
    found = Page(whole)
    assert found.all("link") == []
    for tag, attributes in found.tags:
        for name in {"src", "action", "data"} & attributes.keys():
            assert attributes[name].startswith("data:"), (tag, attributes)
    assert "url(" not in whole
    assert "@import" not in whole
    policy = next(a["content"] for a in found.all("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "eval" not in policy


@pytest.mark.slow
def test_the_page_is_small(tmp_path):
    """Five seeds of everything."""
    results = save_results(tmp_path / "results", whole_paper(5))
    for name in DIGITS:
        for seed in range(4):
            save_run(tmp_path / "runs" / f"{name}-{seed}", made_record(name, seed), epochs=300)
    assert len(page_of(results, tmp_path / "runs", out=tmp_path)) < 1_500_000


def test_texts_from_files_stay_texts(tmp_path):
    record = made_record("digits-cmcl", device=NASTY, commit=NASTY, versions={NASTY: NASTY})
    record = changed(record, name=NASTY, recipe={**record.recipe, "data": NASTY})
    save_run(tmp_path / "runs" / "nasty", record, classes=[NASTY + str(i) for i in range(10)])
    text = page_of(tmp_path / "runs", out=tmp_path)
    found = Page(text)
    assert "alert(1)" in text, "it is shown"
    assert not any("onerror" in attributes for _, attributes in found.tags)
    assert len(found.all("script")) == 1
    assert "{{ 7 * 7 }}" in text
    assert "<script>" not in markdown_of(tmp_path / "runs", out=tmp_path)


def test_fixed_and_broken_predictions(runs):
    """IE is wrong on images 0 and 2, CMCL on 1 and 2."""
    found = next(part for part in page.sections(load([runs]), []) if part.id == "pictures-digits").examples
    assert found.counts == {
        "fixed": ("fixed by CMCL", 1),
        "broken": ("broken by CMCL", 1),
        "both": ("wrong in both", 1),
        "disputed": ("disputed", 1),
    }
    assert [(card.kind, card.label) for card in found.cards] == [
        (kind, f"class {i}") for i, kind in enumerate(("fixed", "broken", "both", "disputed"))
    ]
    card = found.cards[0]
    assert list(card.votes) == ["CMCL", "IE"]
    assert card.votes["IE"][0] == ("class 9", 75, False, False), "the averaged prediction"
    assert card.votes["IE"][1] == ("class 0", 75, True, True), "member 0, the most confident"
    assert "fixes 1 errors of IE and adds 1" in found.intro


def test_predictions_of_other_images_are_not_compared(tmp_path):
    save_run(tmp_path / "a", made_record("digits-cmcl"))
    save_run(tmp_path / "b", made_record("digits-ie", checksums={"test": "other"}))
    found = next(part for part in page.sections(load([tmp_path]), []) if part.examples).examples
    assert {kind: count for kind, (_, count) in found.counts.items()} == {"wrong": 2, "disputed": 2}


def test_scenes_show_image_truth_and_the_members_of_each_method(tmp_path):
    for name in ("icoseg-fcn-m1-ie", "icoseg-fcn-m5-ie", "icoseg-fcn-m5-cmcl"):
        save_run(tmp_path / name, made_record(name, classes=2))
    (shot,) = next(part for part in page.sections(load([tmp_path]), []) if part.scenes).scenes
    assert {title: len(masks) for title, masks in shot.masks.items()} == {
        "CMCL": 5,
        "IE": 5,
        "single network": 1,
    }
    assert next(iter(shot.masks)) == "CMCL"
    assert shot.masks["IE"][0][1:] == (2.0, True, True)
    assert len(Page(page_of(tmp_path, out=tmp_path)).all("img")) == 2 + 11 + 1


def test_one_bad_record_never_stops_the_report(tmp_path):
    results = save_results(tmp_path / "results", [made_record("cifar10-resnet20-ie")])
    good = json.loads(next((results / "records").glob("*.json")).read_text())
    texts = {"format": json.dumps(good | {"format": 99}), "recipe": json.dumps(good | {"recipe": {}})}
    texts |= {"text": "{", "list": "[1, 2]", "deep": DEEP, "latin": "\xff"}  # test_record.py has the others
    for name, text in texts.items():
        (results / "records" / f"{name}.json").write_text(text, encoding="latin-1")
    (results / "records" / "zero.json").symlink_to("/dev/zero")
    (results / "records" / "gone.json").symlink_to("nowhere")
    os.mkfifo(results / "records" / "fifo.json")
    with pytest.warns(UserWarning, match="skipped") as caught:
        found = load([results])
    bad = {*texts, "zero", "gone", "fifo"}
    for name in bad:
        assert any(f"{name}.json" in text for text in found.skipped), name
        assert any(str(results / "records" / f"{name}.json") in str(w.message) for w in caught), name
    assert len(found.skipped) == len(bad)
    assert len(found.measured) == 1
    with pytest.warns(UserWarning, match="skipped"):
        text = page_of(results, out=tmp_path)
    assert "Skipped files" in text
    assert str(tmp_path) not in text, "the page shows no paths of the machine"


def test_bad_files_of_a_run_are_skipped(runs, tmp_path):
    folders = {name: runs / f"{name}--0--seed0" for name in DIGITS}
    path = folders["digits-cmcl"] / "telemetry.jsonl"
    bad = ['{"epoch": 1', "[]", '{"epoch": "x"}', '{"epoch": 9, "loss": "low"}', '{"epoch": NaN}', DEEP]
    path.write_text("\n".join([*path.read_text().splitlines(), *bad]))
    (folders["digits-ie"] / "gallery" / "1.png").write_text("<svg onload=alert(1)>")
    (folders["digits-mcl"] / "record.json").write_text(DEEP)
    (folders["digits-mcl"] / "telemetry.jsonl").unlink()
    (folders["digits-mcl"] / "telemetry.jsonl").symlink_to("/dev/zero")
    with pytest.warns(UserWarning, match="skipped"):
        found = load([runs])
    assert "telemetry.jsonl: lines 5, 6, 7, 8, 9, ... cannot be read" in " ".join(found.skipped)
    assert len(found.skipped) == 4
    assert {run.name: len(run.rows) for run in found.runs}["digits-cmcl"] == 4
    with pytest.warns(UserWarning, match="skipped"):
        assert "digits-mcl" in page_of(runs, out=tmp_path)


FOUR = np.zeros(4, np.uint32)
ROWS, REAL = np.zeros((6, 4), np.uint32), np.zeros((6, 4), np.float16)


@pytest.mark.parametrize(
    "change",
    [
        {"task": "guessing"},
        {"task": "segmentation"},
        {"items": [{}]},
        {"classes": []},
        {"classes": "0123456789"},
        {"items": {}},
        ("image", "../../record.json"),
        ("image", "nowhere.png"),
        ("image", "zero.png"),
        ("index", 4),
        ("index", float("nan")),
        ("target", -1),
        DEEP,
        b"junk",
        [FOUR, ROWS, REAL],
        [FOUR, ROWS + 10, REAL, REAL],
        [FOUR[:3], ROWS, REAL, REAL],
        [FOUR, ROWS, REAL[:1], REAL],
        [FOUR, REAL, REAL, REAL],
        [FOUR, ROWS, REAL, np.array(object())],
        [FOUR, np.uint32(0), REAL, REAL],
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_galleries_are_skipped(tmp_path, change):
    folder = save_run(tmp_path / "run", made_record("digits-ie"))
    path, arrays = folder / "gallery" / "gallery.json", folder / "gallery" / "predictions.npz"
    content = json.loads(path.read_text())
    (folder / "gallery" / "zero.png").symlink_to("/dev/zero")
    if isinstance(change, tuple):
        change = {"items": [content["items"][0] | dict([change])]}
    if isinstance(change, list):
        names = ("targets", "classes", "confidence", "entropy")
        np.savez(arrays, **dict(zip(names, change, strict=False)))
    elif isinstance(change, bytes):
        arrays.write_bytes(change)
    else:
        path.write_text(change if isinstance(change, str) else json.dumps(content | change))
    with pytest.warns(UserWarning, match=re.escape(str(path))):
        found = load([folder])
    assert found.runs[0].gallery is None
    assert "gallery/gallery.json" in found.skipped[0]


def test_a_pipe_in_a_gallery_is_not_read(tmp_path):
    folder = save_run(tmp_path / "run", made_record("digits-ie"))
    arrays = folder / "gallery" / "predictions.npz"
    arrays.unlink()
    os.mkfifo(arrays)
    with pytest.warns(UserWarning, match="predictions must be a file"):
        assert load([folder]).runs[0].gallery is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("junk", [None, 0, "x", [], {}, [None], [[]], 10**400, -1], ids=lambda v: str(v)[:5])
def test_no_field_of_any_file_brings_the_report_down(tmp_path, junk):
    good = made_record("digits-cmcl").model_dump()
    places = [(key,) for key in good]
    places += [(k, inner) for k in ("recipe", "calibration", "entropy", "errors") for inner in good[k]]
    places += [("calibration", "reliability", key) for key in good["calibration"]["reliability"]]
    for i, place in enumerate(places):
        damaged = inside = json.loads(json.dumps(good))
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = junk
        folder = tmp_path / "runs" / f"run{i}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(damaged))
    folder = save_run(tmp_path / "runs" / "good", made_record("digits-ie"))
    path = folder / "telemetry.jsonl"
    first, *rows = map(json.loads, path.read_text().splitlines())
    path.write_text("\n".join(map(json.dumps, [*(first | {key: junk} for key in first), junk, *rows])))
    gallery = folder / "gallery" / "gallery.json"
    content = json.loads(gallery.read_text())
    for key in content["items"][0]:
        gallery.write_text(json.dumps(content | {"items": [content["items"][0] | {key: junk}]}))
        assert "digits-ie" in page_of(folder, out=tmp_path)
    assert "digits-ie" in page_of(tmp_path / "runs", out=tmp_path)
    assert "digits-ie" in markdown_of(tmp_path / "runs", out=tmp_path)


def test_where_runs_are_looked_for(runs, tmp_path):
    one = load([runs / "digits-ie--0--seed0"])
    assert [(run.label, run.title) for run in one.runs] == [("digits-ie", "IE")]
    assert not one.paper
    assert [run.label for run in load([runs]).runs] == [*DIGITS, "shapes-cmcl"]
    (tmp_path / "bare").mkdir()
    for sources, error in (
        ([tmp_path / "nowhere"], "nowhere"),
        ([tmp_path / "bare"], "must hold runs .*bare"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=error):
            load(sources)
    with pytest.raises(ValueError, match="no folder"):
        load([])


def test_a_run_that_is_not_finished(tmp_path):
    folder = save_run(tmp_path / "digits-cmcl--0--seed3", made_record("digits-cmcl", 3))
    (folder / "record.json").unlink()
    (run,) = load([folder]).runs
    assert (run.name, run.seed, run.record, len(run.rows)) == ("digits-cmcl", 3, None, 4)
    assert run.data == "digits", "from recipe.json"
    text = page_of(folder, out=tmp_path)
    assert "Runs without a record" in text
    assert "Training curves" in text
    with pytest.raises(ValueError, match="must have records for tables"):
        markdown_of(folder, out=tmp_path)


def test_of_a_repeated_epoch_the_last_counts(tmp_path):
    folder = save_run(tmp_path / "run", made_record("digits-ie"))
    path = folder / "telemetry.jsonl"
    again = json.loads(path.read_text().splitlines()[1]) | {"loss": 0.125}
    path.write_text(path.read_text() + json.dumps(again) + "\n")
    (run,) = load([folder]).runs
    assert [(row.epoch, row.loss) for row in run.rows] == [(1, 2), (2, 0.125), (3, 2 / 3), (4, 0.5)]


def test_runs_evaluated_on_part_of_the_test_set_are_excluded(runs, tmp_path):
    whole = markdown_of(runs, out=tmp_path)
    losing = [made_record("digits-cmcl", seed, top1=0.0, full_test=False, test_examples=1) for seed in (5, 6)]
    for record in losing:
        save_run(runs / f"losing-{record.seed}", record)
    results = save_results(tmp_path / "results", losing[:1])
    text = page_of(runs, results, out=tmp_path)
    assert "part of the test set only (as `cmcl tune` does): 2." in text
    assert "1 test examples" not in text
    more = [line for line in markdown_of(runs, out=tmp_path).splitlines() if line not in whole.splitlines()]
    assert [line.split(",")[0] for line in more] == ["Excluded runs"], "nothing else is said of them"
    save_run(runs / "short", made_record("digits-mcl", 7, full_length=False))
    assert "digits-mcl (partial)" in page_of(runs, out=tmp_path)
    with pytest.raises(ValueError, match="something to draw"):
        report.write([runs / "losing-5"], tmp_path / "figures", format="svg")


def test_a_record_in_two_places_counts_once(tmp_path):
    record = made_record("cifar10-resnet20-ie")
    results = save_results(tmp_path / "results", [record])
    folder = save_run(tmp_path / "run", record)
    for sources in ([results, folder], [results / "records"], [folder, folder]):
        assert [run.record for run in load(sources).measured] == [record]


def test_recipes_of_one_name_have_addresses_of_their_own(tmp_path):
    same = made_record("digits-ie")
    records = [same, changed(same, seed=1), changed(same, recipe_hash="f" * 16)]
    found = Page(page_of(save_results(tmp_path / "results", records), out=tmp_path))
    ids = [a["id"] for a in found.all("details", "record")]
    assert ids == ["recipe-digits-ie", f"recipe-digits-ie-{'f' * 16}"]


def test_runs_of_one_name_have_labels_of_their_own(tmp_path):
    for place in ("a", "b", "deep/a"):
        save_run(tmp_path / place / "digits-ie", made_record("digits-ie", weights=place))

    def labels(*places):
        return [(run.label, run.title) for run in load([tmp_path / place for place in places]).runs]

    assert labels("a", "b") == [("a/digits-ie", "IE (a/digits-ie)"), ("b/digits-ie", "IE (b/digits-ie)")]
    assert [label for label, _ in labels("a", "deep/a")] == ["digits-ie seed 0 (1)", "digits-ie seed 0 (2)"]
    assert labels("a", "a") == [("digits-ie", "IE")], "the same one"
    save_run(tmp_path / "b" / "again", made_record("digits-ie", 1, weights="b1"))
    assert [label for label, _ in labels("a", "b")] == [
        "a/digits-ie", "b/digits-ie seed 0", "b/digits-ie seed 1"
    ]  # fmt: skip


def test_what_trains_a_run_again(tmp_path):
    records = [made_record("digits-cmcl", seed) for seed in (3, 4)]
    assert page.command(records) == "cmcl train digits-cmcl --seed 3 --seeds 2"
    assert page.command([records[0], changed(records[1], seed=7)]).splitlines() == [
        "cmcl train digits-cmcl --seed 3",
        "cmcl train digits-cmcl --seed 7",
    ]
    recipe = changed(find("digits-cmcl"), beta=0.5, network_options={"filters": [2, 4]}, optimizer="sgd")
    name = "digits-cmcl-optimizersgd-beta0.5"
    words = shlex.split(page.command([changed(made_record(name, recipe=recipe), name=name)]))
    assert words[:5] == ["cmcl", "train", "digits-cmcl", "--seed", "0"]
    assert sorted(words[5:]) == [
        "--set=beta=0.5",
        '--set=network_options={"filters": [2, 4]}',
        '--set=optimizer="sgd"',
    ]
    own = changed(recipe, data=None, network=None, network_options={}, preprocess=None, subset=None)
    text = page.command([made_record("mine", recipe=own)])
    assert text.startswith("recipe = cmcl.Recipe(")
    assert text.endswith("cmcl.fit(ensemble, train, recipe=recipe, seed=0)")


def test_markdown_needs_no_extra(runs, tmp_path, without_altair):
    results = save_results(tmp_path / "results", whole_paper(1))
    text = report.write([results, runs], tmp_path / "deep" / "report.md", format="md").read_text()
    for words in ("## Results", "## Table 3", "## Claims", "## Runs", "| CMCL | digits-cmcl | 10.00 |"):
        assert words in text, words
    assert "## Table" not in markdown_of(runs, out=tmp_path)


def test_formats(runs, tmp_path, without_altair):
    with pytest.raises(ImportError, match=r"altair.*confident-mcl\[report\]"):
        page_of(runs, out=tmp_path)
    with pytest.raises(ValueError, match="format must be one of html, md, svg, png, pdf. Got 'docx'"):
        report.write([runs], tmp_path / "x", format="docx")


def test_dead_members_are_in_the_numbers_of_the_curves(tmp_path):
    folder = save_run(tmp_path / "mine", made_record("digits-mcl"), epochs=5)
    path = folder / "telemetry.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[2]["dead_members"], rows[3]["dead_members"] = [4, 0], [1]
    path.write_text("\n".join(map(json.dumps, rows)))
    text = page_of(folder, out=tmp_path)
    assert "0, 1, 4" in re.search(r'<table id="curves-digits-numbers".*?</table>', text, re.DOTALL)[0]


def test_numbers_worse_than_the_paper_and_parts_left_out_are_marked(tmp_path):
    records = [made_record("svhn-resnet20-ie", top1=4.79)]  # the paper has 3.94
    records += [made_record(f"icoseg-fcn-m5-{m}", classes=2, seconds=20.0) for m in ("ie", "cmcl")]
    text = page_of(save_results(tmp_path / "results", records), out=tmp_path)
    assert text.count('<span class="bad" aria-hidden="true">▲</span>') == 4, "IE and single, in two tables"
    assert [a["data-sort"] for a in Page(text).all("td", "differs")] == ["8.79", "4.79"] * 2
    assert '"number agrees"' not in text
    assert '<span class="hidden">left out: </span>' in text


def test_runs_on_own_data(tmp_path):
    for i, name in enumerate(("mine", "other")):
        record = made_record("digits-cmcl", classes=10 - i, checksums={"test": name}, ood=None)
        record = changed(record, name=name, recipe={**record.recipe, "data": None})
        save_run(tmp_path / "runs" / name, record, classes=[f"{name} {c}" for c in range(10)])
    inputs = load([tmp_path / "runs"])
    text = page_of(tmp_path / "runs", out=tmp_path)
    assert "own data" in text
    charts = {
        part.id: json.dumps(part.figures[0].panels[0].spec)
        for part in page.sections(inputs, [])
        if part.figures
    }
    assert "mine 3" in charts["members-own-1"], "each with its own classes"
    assert "mine 3" not in charts["members-own-2"]


def test_no_warnings_for_good_folders(runs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load([runs]).skipped == []
