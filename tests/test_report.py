"""The report as a whole: what is gathered, what the page holds, what it never does."""

import json
import re
from collections import Counter
from dataclasses import asdict
from html.parser import HTMLParser

import pytest

from cmcl import report
from cmcl.report import page
from cmcl.report.gather import gather
from cmcl.report.sections import sections
from cmcl.reproduction import RECIPES
from report_samples import changed, made_record, save_results, save_run, whole_paper

for name in ("altair", "vl_convert", "jinja2"):
    pytest.importorskip(name)

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"


@pytest.fixture(autouse=True)
def no_bundle(monkeypatch):
    """The drawing library takes seconds to bundle; the browser's tests use the real one."""
    monkeypatch.setattr(page, "_vega", lambda: "/* vega */")


@pytest.fixture
def runs(tmp_path):
    """A folder of runs: three of digits, one of shapes."""
    return save_runs(tmp_path / "runs")


def save_runs(folder):
    for name in ("digits-ie", "digits-mcl", "digits-cmcl"):
        save_run(folder / f"{name}--0--seed0", made_record(name))
    save_run(folder / "shapes-cmcl--0--seed0", made_record("shapes-cmcl", classes=2))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page of everything there can be."""
    folder = tmp_path_factory.mktemp("whole")
    results, runs = save_results(folder / "results", whole_paper(1)), save_runs(folder / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_vega", lambda: "/* vega */")
        return page_of(results, runs, out=folder)


class Page(HTMLParser):
    """What a page consists of; tags that are left open or closed twice are an error."""

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

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*sources, out):
    return report.write(sources, out / "page.html").read_text()


def test_a_page_of_runs(runs, tmp_path):
    text = page_of(runs, out=tmp_path)
    for words in (
        "Training curves",
        "Who learns what",
        "Reliability",
        "Risk and coverage",
        "Errors on the test",
    ):
        assert words in text, words
    assert "Table 1" not in text, "no empty paper tables"
    assert "not yet measured" not in text
    found = Page(text)
    titles = [a["id"] for a in found.all("section")]
    assert "training-digits" in titles
    assert "pictures-shapes" in titles


def test_a_page_of_results(tmp_path):
    results = save_results(tmp_path / "results", whole_paper(1))
    text = page_of(results, out=tmp_path)
    for words in ("Table 1.", "Table 2.", "Table 3.", "Figure 1:", "Figure 2:", "Figure 4:", "does not hold"):
        assert words in text, words
    assert "Training curves" not in text


def test_a_page_of_nothing_measured(tmp_path):
    (tmp_path / "empty" / "records").mkdir(parents=True)
    text = page_of(tmp_path / "empty", out=tmp_path)
    assert text.count("not measured") > 90
    assert "<h1>Confident multiple choice learning: nothing measured yet</h1>" in text
    assert "vega" not in text.split("</style>")[1].split("application/json")[0], "nothing to draw, no library"


def test_the_page_is_whole_and_its_links_lead_somewhere(whole):
    found = Page(whole)
    twice = [name for name, count in Counter(found.ids).items() if count > 1]
    assert twice == []
    for link in found.links:
        assert link.startswith("#")
        assert link[1:] in found.ids, link
    names = [found.ids.count(a["aria-labelledby"]) for _, a in found.tags if "aria-labelledby" in a]
    assert set(names) == {1}


def test_the_page_is_usable_without_eyes_or_mouse(whole):
    found = Page(whole)
    assert found.headings[0] == 1
    assert found.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(found.headings, found.headings[1:], strict=False)), (
        "no level skipped"
    )
    assert len(found.all("table")) == len(found.all("caption"))
    assert all("scope" in a for a in found.all("th"))
    assert all(a.get("alt") for a in found.all("img"))
    assert [len(found.all(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    charts = [a for a in found.all("div") if "data-chart" in a]
    assert charts
    assert all(a["role"] == "img" and a["aria-label"] for a in charts)
    assert all(a.get("type") == "button" for a in found.all("button"))
    assert found.all("html")[0]["lang"] == "en"


def test_nothing_comes_from_elsewhere(whole):
    found = Page(whole)
    assert found.all("link") == []
    for tag, attributes in found.tags:
        for name in ("src", "href", "action", "data"):
            if name in attributes:
                assert attributes[name].startswith(("#", "data:image/png;base64,")), (tag, attributes)
    assert "url(" not in whole
    assert "@import" not in whole
    policy = next(a["content"] for a in found.all("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "eval" not in policy


@pytest.mark.slow
def test_the_page_is_small(tmp_path):
    """The drawing library adds 0.9 MB; five seeds of everything must leave room for it."""
    results = save_results(tmp_path / "results", whole_paper(5))
    for name in ("digits-ie", "digits-mcl", "digits-cmcl"):
        for seed in range(4):
            save_run(tmp_path / "runs" / f"{name}-{seed}", made_record(name, seed), epochs=300)
    assert len(page_of(results, tmp_path / "runs", out=tmp_path)) < 3_000_000


def test_texts_from_outside_stay_texts(tmp_path):
    record = made_record("digits-cmcl", device=NASTY, commit=NASTY, versions={NASTY: NASTY})
    record = changed(record, name=NASTY, recipe={**record.recipe, "data": NASTY})
    save_run(tmp_path / "runs" / "nasty", record, classes=[NASTY + str(i) for i in range(10)])
    with (tmp_path / "runs" / "nasty" / "telemetry.jsonl").open("a") as file:
        file.write(NASTY + "\n")
    text = page_of(tmp_path / "runs", out=tmp_path)
    found = Page(text)
    assert "alert(1)" in text, "it is shown"
    assert not any("onerror" in attributes for _, attributes in found.tags)
    assert len(found.all("script")) == 4
    assert "{{ 7 * 7 }}" in text
    markdown = report.write([tmp_path / "runs"], tmp_path / "page.md", format="md").read_text()
    assert "<script>" not in markdown


def test_charts_are_json_in_the_page(whole):
    raw = re.search(r'<script type="application/json" id="charts">(.*?)</script>', whole, re.DOTALL)[1]
    charts = json.loads(raw)
    drawn = {a["data-chart"] for a in Page(whole).all("div") if "data-chart" in a}
    assert drawn == set(charts)
    maps = charts["classes-digits-0"]["layer"][0]["encoding"]["x"]
    assert maps["field"] == "member"


def test_damage_is_told_not_fatal(runs, tmp_path):
    results = save_results(tmp_path / "results", [made_record("cifar10-resnet20-ie")])
    good = json.loads(next((results / "records").glob("*.json")).read_text())
    damaged = {
        "text": "{",
        "empty": "{}",
        "errors": json.dumps(good | {"errors": {"expected": {"top1": "many"}}}),
        "nan": json.dumps(good | {"members": [float("nan")] * 5}),
        "rows": json.dumps(good | {"classwise": [[1.0], [1.0, 2.0], [1.0], [1.0], [1.0]]}),
        "seed": json.dumps(good | {"seed": "0"}),
        "recipe": json.dumps(good | {"recipe": {}}),
        "later": json.dumps(good | {"format": 99}),
        "reliability": json.dumps(
            good | {"calibration": {"ece": 1.0, "risk_coverage": [], "reliability": {}}}
        ),
        "list": "[1, 2]",
    }
    damaged |= {
        name: json.dumps(good | change)
        for name, change in {
            "no-data": {"recipe": {k: v for k, v in good["recipe"].items() if k != "data"}},
            "no-risks": {"calibration": good["calibration"] | {"risk_coverage": []}},
            "no-classes": {"classwise": [[] for _ in good["members"]]},
            "no-accuracies": {"classwise": [[None] * 10 for _ in good["members"]]},
            "no-images": {"test_examples": 0},
            "percent": {"errors": {"expected": good["errors"]["expected"] | {"top1": 250.0}}},
            "commit": {"commit": {"sha": "c"}},
            "network": {"network": {"class": "Net", "parameters": "many", "digest": "d"}},
            "no-digest": {"network": {"class": "Net", "parameters": 7}},
        }.items()
    }
    for name, text in damaged.items():
        (results / "records" / f"{name}.json").write_text(text)
    folder = runs / "digits-cmcl--0--seed0"
    lines = (folder / "telemetry.jsonl").read_text().splitlines()
    rows = [*lines, lines[0][:20], "[]", '{"epoch": "x"}', '{"epoch": 9, "loss": "low"}', '{"epoch": NaN}']
    (folder / "telemetry.jsonl").write_text("\n".join(rows))
    (runs / "digits-ie--0--seed0" / "gallery" / "1.png").write_text("<svg onload=alert(1)>")
    (runs / "digits-mcl--0--seed0" / "record.json").write_text("")
    found = gather([results, runs])
    for name in damaged:
        assert any(note.startswith(f"records/{name}.json") for note in found.notes), name
    assert any("telemetry.jsonl: lines 5, 6, 7, 8, 9 cannot be read" in note for note in found.notes)
    assert any("gallery/gallery.json: pictures cannot be shown" in note for note in found.notes)
    assert len(found.notes) == len(damaged) + 3
    assert [len(run.rows) for run in found.runs] == [4, 4, 4, 4]
    text = page_of(results, runs, out=tmp_path)
    assert "Not everything could be read" in text
    assert "digits-mcl" in text, "its telemetry is still there"
    assert str(tmp_path) not in text, "no paths of the machine"


@pytest.mark.parametrize(
    "change",
    [
        {"task": "guessing"},
        {"items": [{}]},
        {"classes": [1, 2]},
        {"classes": []},
        {"classes": "0123456789"},
        {"items": {}},
        {"items": [{"index": 1, "image": "../../record.json", "chosen": 0}]},
        {"items": [{"index": 1, "image": "nowhere.png", "chosen": 0}]},
    ],
)
def test_galleries_with_mistakes(tmp_path, change):
    folder = save_run(tmp_path / "run", made_record("digits-ie"))
    path = folder / "gallery" / "gallery.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = gather([folder])
    assert found.runs[0].gallery is None
    assert "gallery/gallery.json" in found.notes[0]


def test_where_runs_are_looked_for(runs, tmp_path):
    one = gather([runs / "digits-ie--0--seed0"])
    assert [run.label for run in one.runs] == ["digits-ie"]
    assert not one.paper
    assert [run.label for run in gather([runs]).runs] == [
        "digits-ie",
        "digits-mcl",
        "digits-cmcl",
        "shapes-cmcl",
    ]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        gather([tmp_path / "nowhere"])
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="must hold runs .*bare"):
        gather([tmp_path / "bare"])
    with pytest.raises(ValueError, match="Got no folder"):
        gather([])


def test_seeds_that_trained_together(tmp_path):
    folder = tmp_path / "digits-ie--0--seeds0-1"
    rows = []
    for seed in (0, 1):
        record = made_record("digits-ie", seed)
        save_run(folder / f"seed{seed}", record)
        rows += (folder / f"seed{seed}" / "telemetry.jsonl").read_text().splitlines()
        (folder / f"seed{seed}" / "telemetry.jsonl").unlink()
    (folder / "telemetry.jsonl").write_text("\n".join(rows) + "\n")
    found = gather([tmp_path])
    assert [(run.label, run.seed, len(run.rows)) for run in found.runs] == [
        ("digits-ie seed 0", 0, 4),
        ("digits-ie seed 1", 1, 4),
    ]
    assert len(found.records) == 2


def test_a_run_that_is_not_finished(tmp_path):
    folder = save_run(tmp_path / "digits-cmcl--0--seed3", made_record("digits-cmcl", 3))
    (folder / "record.json").unlink()
    (run,) = gather([folder]).runs
    assert (run.name, run.seed, run.record, len(run.rows)) == ("digits-cmcl", 3, None, 4)
    assert run.data == "digits", "as it was planned"
    text = page_of(folder, out=tmp_path)
    assert "Without a record" in text
    assert "Training curves" in text


def test_an_epoch_that_was_done_twice_counts_once(tmp_path):
    folder = save_run(tmp_path / "run", made_record("digits-ie"))
    path = folder / "telemetry.jsonl"
    again = json.loads(path.read_text().splitlines()[1]) | {"loss": 0.125}
    path.write_text(path.read_text() + json.dumps(again) + "\n")
    (run,) = gather([folder]).runs
    assert [row["epoch"] for row in run.rows] == [1, 2, 3, 4]
    assert run.rows[1]["loss"] == 0.125


def test_runs_measured_on_part_of_the_test_images_show_no_numbers(runs, tmp_path):
    whole = report.write([runs], tmp_path / "whole.md", format="md").read_text()
    losing = [made_record("digits-cmcl", seed, top1=0.0, full_test=False, test_examples=1) for seed in (5, 6)]
    for record in losing:
        save_run(runs / f"losing-{record.seed}", record)
    short = made_record("digits-mcl", 7, full_length=False)
    results = save_results(tmp_path / "results", losing[:1])
    line = "2 runs are left out, measured on part of the test images only, as cmcl tune does with candidates"
    assert line not in whole
    assert line in (text := page_of(runs, results, out=tmp_path))
    assert "losing" not in text
    assert "1 test examples" not in text
    for name in ("digits-cmcl seed 5", "digits-cmcl seed 6"):
        assert name not in text
    markdown = report.write([runs], tmp_path / "page.md", format="md").read_text()
    assert line in markdown
    assert [row for row in markdown.splitlines() if row not in whole.splitlines()] == [
        next(row for row in markdown.splitlines() if line in row)
    ], "nothing else is said of them"
    save_run(runs / "short", short)
    assert "digits-mcl seed 7 (partial)" in page_of(runs, out=tmp_path)


def test_nothing_but_runs_that_are_left_out(tmp_path):
    folder = save_run(tmp_path / "run", made_record("digits-cmcl", full_test=False))
    assert "1 run is left out" in page_of(folder, out=tmp_path)
    assert report.write([folder], tmp_path / "p.md", format="md").read_text().startswith("1 run is left out")
    with pytest.raises(ValueError, match="measured on all test images"):
        report.write([folder], tmp_path / "figures", format="svg")


def test_a_record_in_two_places_counts_once(tmp_path):
    record = made_record("cifar10-resnet20-ie")
    results = save_results(tmp_path / "results", [record])
    folder = save_run(tmp_path / "run", record)
    assert gather([results, folder]).records == [record]
    assert gather([results / "records"]).records == gather([results]).records


def test_recipes_of_one_name_are_told_apart(tmp_path):
    same = made_record("digits-ie")
    records = [same, changed(same, seed=1), changed(same, recipe_hash="f" * 16)]
    text = page_of(save_results(tmp_path / "results", records), out=tmp_path)
    found = Page(text)
    assert [a["id"] for a in found.all("details") if a.get("class") == "record"] == [
        "recipe-digits-ie",
        f"recipe-digits-ie-{'f' * 16}",
    ]


def test_runs_of_one_name_are_told_apart(tmp_path):
    for place in ("a", "b", "deep/a"):
        save_run(tmp_path / place / "digits-ie", made_record("digits-ie", weights=place))

    def labels(*places):
        return [run.label for run in gather([tmp_path / place for place in places]).runs]

    assert labels("a", "b") == ["a/digits-ie", "b/digits-ie"]
    assert labels("a", "deep/a") == ["digits-ie seed 0 (1)", "digits-ie seed 0 (2)"]
    assert labels("a", "a") == ["digits-ie"], "the same one"
    save_run(tmp_path / "b" / "again", made_record("digits-ie", 1, weights="b1"))
    assert labels("a", "b") == ["a/digits-ie", "b/digits-ie seed 0", "b/digits-ie seed 1"], (
        "seeds stay together"
    )


def test_markdown(runs, tmp_path):
    results = save_results(tmp_path / "results", whole_paper(1))
    text = report.write([results, runs], tmp_path / "deep" / "report.md", format="md").read_text()
    for words in (
        "## Results",
        "## Table 3",
        "## Claims",
        "## Runs",
        "| digits-cmcl | 10.00 | 4.00 |",
    ):
        assert words in text, words
    assert "## Table" not in report.write([runs], tmp_path / "runs.md", format="md").read_text()


def test_formats(runs, tmp_path):
    with pytest.raises(ValueError, match="format must be one of html, md, svg, png, pdf. Got 'docx'"):
        report.write([runs], tmp_path / "x", format="docx")
    (tmp_path / "empty" / "records").mkdir(parents=True)
    with pytest.raises(ValueError, match="something to draw"):
        report.write([tmp_path / "empty"], tmp_path / "figures", format="svg")


def test_a_single_network(tmp_path):
    save_run(tmp_path / "runs" / "single", made_record("digits-single", top1=8.0))
    save_run(tmp_path / "runs" / "cmcl", made_record("digits-cmcl", top1=3.0))
    assert "A single network errs on 8.00\u00a0%" in page_of(tmp_path / "runs", out=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("junk", [None, 0, "x", [], {}, [None]], ids=str)
def test_no_field_of_a_record_brings_the_report_down(tmp_path, junk):
    """Whatever stands in one field, the rest is shown, and what is left out is named."""
    good = json.loads(json.dumps(asdict(made_record("digits-cmcl"))))
    places = [(key,) for key in good]
    nested = ("recipe", "calibration", "entropy", "errors")
    places += [(key, inner) for key in nested for inner in good[key]]
    places += [("calibration", "reliability", key) for key in good["calibration"]["reliability"]]
    for i, place in enumerate(places):
        damaged = json.loads(json.dumps(good))
        inside = damaged
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = junk
        folder = tmp_path / "runs" / f"run{i}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(damaged))
    save_run(tmp_path / "runs" / "good", made_record("digits-ie"))
    text = page_of(tmp_path / "runs", out=tmp_path)
    assert "digits-ie" in text
    assert report.write([tmp_path / "runs"], tmp_path / "page.md", format="md").exists()


def test_members_that_learned_nothing_are_told(tmp_path):
    folder = save_run(tmp_path / "runs" / "mine", made_record("digits-mcl"), epochs=5)
    path = folder / "telemetry.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[2]["dead_members"], rows[3]["dead_members"] = [0, 4], [1]
    rows[4]["win_rates"] = [0.0, 0.01, 0.5, 0.3, 0.19]
    path.write_text("\n".join(map(json.dumps, rows)))
    text = page_of(tmp_path / "runs", out=tmp_path)
    assert (
        "digits-mcl: member 0 won next to nothing, noted in epoch 3 and not mended since; member 1 won next to "
        "nothing, noted in epoch 4 and not mended since; member 4 won next to nothing, noted in epoch 3, and "
        "recovered later." in text
    )
    assert "Try a larger overlap" in text
    assert "member 0 won" in report.write([tmp_path / "runs"], tmp_path / "m.md", format="md").read_text()
    rows[2]["dead_members"] = "all"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert "telemetry.jsonl: line 3 cannot be read" in page_of(tmp_path / "runs", out=tmp_path)
    healthy = save_run(tmp_path / "healthy", made_record("digits-mcl"))
    assert "learned next to nothing" not in page_of(healthy, out=tmp_path)


def test_runs_that_were_not_measured_have_no_tables(tmp_path):
    folder = save_run(tmp_path / "mine", made_record("digits-ie"))
    (folder / "record.json").unlink()
    with pytest.raises(ValueError, match="must have records for tables. Got runs that were not measured"):
        report.write([folder], tmp_path / "tables.md", format="md")
    assert not (tmp_path / "tables.md").exists()
    assert "Training curves" in page_of(folder, out=tmp_path)


def test_what_is_worse_or_left_out_can_be_seen(tmp_path):
    records = [made_record("svhn-resnet20-ie", top1=4.79)]  # the paper has 3.94
    records += [made_record(f"icoseg-fcn-m5-{m}", classes=2, seconds=20.0) for m in ("ie", "cmcl")]
    text = page_of(save_results(tmp_path / "results", records), out=tmp_path)
    assert text.count('<span class="bad" aria-hidden="true">▲</span>') == 4, "IE and single, in two tables"
    worse = [a for a in Page(text).all("td") if "differs" in (a.get("class") or "")]
    assert [a["data-sort"] for a in worse] == ["8.79", "4.79"] * 2
    assert '"number agrees"' not in text
    assert "20 against 20 s, the fastest of 1 and 1 runs: 1.00 times; under 120 s" in text
    assert '<span class="hidden">left out: </span>' in text
    long = [made_record(f"cifar10-resnet20-{m}", seconds=200.0) for m in ("ie", "cmcl")]
    text = page_of(save_results(tmp_path / "results", long), out=tmp_path)
    assert "1 of 2 comparisons counted" in text


@pytest.mark.slow
@pytest.mark.parametrize("junk", [None, 0, "x", [], {}, [None], [[]]], ids=str)
def test_no_field_of_telemetry_or_pictures_brings_the_report_down(tmp_path, junk):
    folder = save_run(tmp_path / "run", made_record("digits-cmcl"), epochs=3)
    path = folder / "telemetry.jsonl"
    first, *rows = map(json.loads, path.read_text().splitlines())
    path.write_text(
        "\n".join(json.dumps(row) for row in [*(first | {key: junk} for key in first), junk, *rows])
    )
    path = folder / "gallery" / "gallery.json"
    content = json.loads(path.read_text())
    (item,) = content["items"]
    for change in ({}, *({key: junk} for key in item)):
        path.write_text(json.dumps(content | {"items": [item | change]}))
        assert "digits-cmcl" in page_of(folder, out=tmp_path)


def test_pictures_begin_with_cmcl_and_leave_out_single_networks(tmp_path):
    for name in ("digits-single", "digits-ie", "digits-cmcl"):
        save_run(tmp_path / "runs" / name, made_record(name))
    found = sections(gather([tmp_path / "runs"]), [])
    (shown,) = [part.galleries for part in found if part.id == "pictures-digits"]
    assert [gallery.title for gallery in shown] == ["digits-cmcl", "digits-ie"]
    assert [answer.who for answer in shown[0].cards[0].answers] == ["0", "1", "2", "3", "4", "all"]
    alone = sections(gather([tmp_path / "runs" / "digits-single"]), [])
    assert not any(part.galleries for part in alone)


def test_pictures_of_segmentations_begin_with_cmcl_too(tmp_path):
    for name in ("icoseg-fcn-m1-ie", "icoseg-fcn-m5-ie", "icoseg-fcn-m5-cmcl"):
        save_run(tmp_path / "runs" / name, made_record(name, classes=2))
    own = sections(gather([tmp_path / "runs"]), [])
    save_results(tmp_path / "results", [])
    (tmp_path / "results" / "records").mkdir(parents=True)
    paper = sections(gather([tmp_path / "runs", tmp_path / "results"]), [])
    for parts in (own, paper):
        (titles,) = [[g.title for g in part.galleries] for part in parts if part.galleries]
        assert titles == ["icoseg-fcn-m5-cmcl", "icoseg-fcn-m5-ie"]
    scene = next(part.galleries[0].scenes[0] for part in own if part.galleries)
    assert scene[2].title == "member 0"


def test_runs_on_own_data(tmp_path):
    for i, name in enumerate(("mine", "other")):
        record = made_record("digits-cmcl", classes=10 - i, checksums={"test": name})
        record = changed(record, name=name, recipe={**record.recipe, "data": None}, ood=None)
        save_run(tmp_path / "runs" / name, record, classes=[f"{name} {c}" for c in range(10)])
    text = page_of(tmp_path / "runs", out=tmp_path)
    assert "None" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "On own data" in text
    titles = [a["id"] for a in Page(text).all("section")]
    assert [title for title in titles if title.startswith("members")] == ["members-own-1", "members-own-2"]
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)[1])
    assert "mine 3" in json.dumps(charts["classes-own-1-0"]), "each with its own classes"
    assert "mine 3" not in json.dumps(charts["classes-own-2-0"])


def test_every_recipe_can_be_shown(tmp_path):
    for name in ("cifar10-cnn-m10-cmcl-k4", "icoseg-fcn-m5-cmcl", "svhn-vggnet17-mcl"):
        assert name in RECIPES
        save_run(tmp_path / name, made_record(name, classes=2 if "icoseg" in name else 10))
    text = page_of(tmp_path, out=tmp_path)
    assert "What the members see: iCoseg" in text
