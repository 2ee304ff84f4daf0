"""Figures: the numbers that are drawn, colours that can be read, and files that other programs take."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmcl import report
from cmcl.report.load import Row, Run
from cmcl.report.theme import COLOURS, DARK, LIGHT, TURN, themed
from cmcl.reproduction.cells import Evidence
from report_samples import made_record, save_run, telemetry_row, whole_paper

figures = pytest.importorskip("cmcl.report.figures")
series, thinned = figures.series, figures.thinned


def values(panel, layer=None):
    """The points of a panel: altair puts equal data in one place."""
    spec = panel.spec if layer is None else panel.spec["layer"][layer]
    return (spec.get("data") or panel.spec["data"])["values"]


def run_of(name, epochs=5, label="", **options):
    run = Run.of(made_record(name, **options), label)
    run.rows = [Row.parse(telemetry_row(run.record, epoch)) for epoch in range(1, epochs + 1)]
    return run


def test_heat_maps_by_hand():
    run = run_of("digits-ie", classwise=[[100.0, None], [50.0, 0.0], *[[50.0, 0.0]] * 3], label="a run")
    figure = figures.heat_maps("f", "t", [run], ["cat"])
    assert values(figure.panels[0])[:3] == [
        {"class": "cat", "member": 0, "accuracy": 100.0},
        {"class": "cat", "member": 1, "accuracy": 50.0},
        {"class": "1", "member": 1, "accuracy": 0.0},
    ]
    assert [value.text for value in figure.numbers.rows[0]] == ["a run", "25.0"]
    named = figures.heat_maps("f", "t", [run_of("cifar10-cnn-ie")]).panels[0]
    assert values(named)[3]["class"] == "cat", "from the registry"


def test_many_classes_stay_on_the_screen():
    spec = figures.heat_maps("f", "t", [run_of("digits-ie", classes=100)]).panels[0].spec
    assert spec["height"] == figures.TALLEST
    assert "text" not in json.dumps(spec["layer"]), "no numbers that nobody can read"


ENTROPY = {"bins": 4, "largest": 2.0, "averaged": [3, 1, 0, 0], "averaged_ood": [0, 1, 0, 4]}
ENTROPY |= {"specialised": [[3, 1, 0, 0]] * 5, "other": [[0, 0, 0, 4]] * 5, "ood": [[9, 0, 0, 0]] * 5}


def test_entropies_by_hand():
    figure = figures.entropies("f", "t", [run_of("digits-cmcl", entropy=ENTROPY)])
    points = values(figure.panels[0])
    assert {"from": 0.0, "group": "own classes", "percent": 75.0} in points
    assert {"from": 1.5, "group": "other classes", "percent": 100.0} in points
    medians = {row[1].text: row[2].text for row in figure.numbers.rows}
    # 2/3 of the first bin; half of the last; half of the first
    assert medians == {"own classes": "17", "other classes": "88", "OOD (SVHN)": "12"}
    assert [s.name for s in figure.legend] == list(medians)


def test_the_averaged_prediction_as_the_paper_draws_ie():
    runs = [run_of(name, entropy=ENTROPY) for name in ("cifar10-cnn-mcl", "cifar10-cnn-ie-adversarial")]
    figure = figures.entropies("f", "t", runs, averaged=["ie"])
    mcl, ie = ({p["group"] for p in values(panel)} for panel in figure.panels)
    assert mcl == {"own classes", "other classes", "OOD (SVHN)"}
    assert ie == {"test images", "OOD (SVHN)"}
    assert {"from": 1.5, "group": "OOD (SVHN)", "percent": 80.0} in values(figure.panels[1])
    assert "averaged" in figure.caption
    assert "averaged" not in figures.entropies("f", "t", runs).caption
    page = pytest.importorskip("cmcl.report.page")
    panels = page.paper_figures(Evidence.of(whole_paper(1)))["2"].panels
    groups = {panel.title: {p["group"] for p in values(panel)} for panel in panels}
    assert groups == {"MCL": mcl, "CMCL": mcl, "IE + adversarial training": ie}


def test_reliability_before_and_after_temperature_scaling():
    plain = run_of("digits-ie", label="a")
    bins = {"count": [7, 0, 4], "confidence": [45.0, None, 90.0], "accuracy": [47.0, None, 0.0]}
    after = {"temperature": 0.5, "scaled_ece": 1.25, "scaled_reliability": bins}
    scaled = run_of("digits-cmcl", label="b", calibration=plain.record.calibration | after)
    figure = figures.reliability("f", "t", [plain, scaled])
    shown = [[value.text for value in row] for row in figure.numbers.rows]
    assert shown == [["a", "2.50", "–", "–"], ["b", "2.50", "0.50", "1.25"]]
    assert [panel.title for panel in figure.panels] == ["as trained", "after temperature scaling"]
    found = [
        {(p["run"], p["images"], p["confidence"], p["accuracy"]) for p in values(panel, 1)}
        for panel in figure.panels
    ]
    assert found[0] == {(run, *bin) for run in "ab" for bin in ((5, 50.0, 40.0), (95, 95.0, 96.0))}
    assert found[1] == {("b", 7, 45.0, 47.0)}, "nearly empty bins are left out, and runs that are not scaled"
    assert "strokeDash" in figure.panels[0].spec["layer"][1]["encoding"], "as the legend says"
    assert "cmcl calibrate" in figures.reliability("f", "t", [plain]).caption
    few = after | {"scaled_reliability": bins | {"count": [4, 0, 4]}}
    scaled = run_of("digits-cmcl", label="b", calibration=plain.record.calibration | few)
    assert "cmcl calibrate" not in figures.reliability("f", "t", [scaled]).caption, "it is scaled already"
    page = pytest.importorskip("cmcl.report.page")
    nothing = run_of(
        "digits-cmcl", calibration=scaled.record.calibration | {"reliability": few["scaled_reliability"]}
    )
    assert [figure.id for figure in page._calibration("x", [nothing])] == ["risk-x"], "no empty figure"


def test_risk_coverage_by_hand():
    run = run_of("digits-ie", top1=10.0, label="a")  # the error of the most confident 1 %, 2 % is 0.1, 0.2
    figure = figures.risk_coverage("f", "t", [run])
    points = values(figure.panels[0])
    assert (points[0]["coverage"], points[0]["error"]) == (1, 0.1)
    assert (points[-1]["coverage"], points[-1]["error"]) == (100, 10.0)
    assert [value.text for value in figure.numbers.rows[0]] == ["a", "5.00", "8.00", "9.00", "10.00"]


def test_training_curves():
    figure = figures.training("f", "t", [run_of("digits-ie"), run_of("digits-cmcl")])
    assert [panel.title for panel in figure.panels][:2] == ["training loss", "top-1 error, %"]
    loss = values(figure.panels[0])
    assert [p["value"] for p in loss if p["run"] == "digits-ie"] == [2.0, 1.0, 0.6667, 0.5, 0.4]
    assert [value.text for value in figure.numbers.rows[0]] == ["digits-ie", "5", "0.4000", "10.00", "none"]


def test_what_was_not_recorded_is_not_drawn():
    run = run_of("digits-ie")
    run.rows = [row.model_copy(update={"top1": None, "nonspecialist_entropy": 0.0}) for row in run.rows]
    titles = [panel.title for panel in figures.training("f", "t", [run]).panels]
    assert "top-1 error, %" not in titles
    assert "entropy of non-specialists, nats" not in titles


def test_long_runs_are_thinned():
    run = run_of("digits-mcl", epochs=500)
    assert len(values(figures.training("f", "t", [run]).panels[0])) == figures.EPOCHS


@given(st.lists(st.integers(), min_size=1, max_size=60), st.integers(2, 30))
def test_thinning(numbers, most):
    found = thinned(numbers, most)
    assert len(found) == min(len(numbers), most)
    assert (found[0], found[-1]) == (numbers[0], numbers[-1])
    assert all(a < b for a, b in pairwise(thinned(range(len(numbers)), most))), "each once, in order"


def test_errors_against_members():
    assert figures.against_members("f", "t", Evidence.of([])) is None
    one = Evidence.of([made_record("icoseg-fcn-m2-ie", classes=2)])
    assert figures.against_members("f", "t", one) is None, "one point is no curve"
    figure = figures.against_members("f", "t", Evidence.of(whole_paper(1)))
    assert len(figure.panels) == 4
    members = {(p["run"], p["members"]) for p in values(figure.panels[1])}
    assert members == {(method, m) for method in ("IE", "MCL", "CMCL") for m in range(1, 6)}
    assert {s.name for s in figure.legend} == {"IE", "MCL", "CMCL", "IE with sharing"}


def test_rounds_of_tuning(tmp_path):
    rows = [
        {"name": f"b{b}k{k}", "beta": b, "overlap": k, "held_out": 10 * b + k, "kept": k == 2}
        for b in (0.5, 1.0)
        for k in (2, 3)
    ]
    rungs = [{"length": "5 epochs", "rows": rows}, {"length": "15 epochs", "rows": rows[:1]}]
    figure = figures.tuning({"recipe": "digits-cmcl", "beta": 0.5, "overlap": 2, "rungs": rungs})
    assert [p["held_out"] for p in values(figure.panels[0])] == [7.0, 8.0, 12.0, 13.0]
    assert max(p["shade"] for p in values(figure.panels[0])) == TURN, "every number can be read"
    svg = figures.save(figure, tmp_path / "deep" / "tuning.svg").read_text()
    assert all(word in svg for word in ("15 epochs", "7.0", "13.0"))
    with pytest.raises(ValueError, match=".svg.* Got 'tuning.gif'"):
        figures.save(figure, tmp_path / "tuning.gif")


def test_colours_follow_the_methods():
    assert [s.colour for s in series(["x", "y"], {"x": "ie", "y": "cmcl"})] == ["c2", "c1"]
    several = series(["a", "b", "c"], {"a": "cmcl", "b": "cmcl", "c": "ie"})
    assert len({s.colour for s in several}) == 3
    assert several[2].colour == "c2"
    many = series(map(str, range(30)))
    assert len({(s.colour, *s.dash) for s in many}) == 30, "more than there are colours"


@given(st.lists(st.sampled_from(["cmcl", "ie", "mcl", "single", None]), max_size=8))
def test_no_two_series_look_alike_while_a_colour_is_free(methods):
    names = dict(zip(map(str, range(len(methods))), methods, strict=True))
    assert len({s.colour for s in series(names, names)}) == len(methods)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def mixed(low, high, share):
    parts = [(int(low[i : i + 2], 16), int(high[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in parts)


TEXTS = {
    "ink": ("page", "panel", "good-tint", "bad-tint", "open-tint"),
    "muted": ("page", "panel"),
    "link": ("page", "panel", "good-tint", "bad-tint"),
    "good": ("page", "panel", "good-tint"),
    "bad": ("page", "panel", "bad-tint"),
    "open": ("page", "panel", "open-tint"),
}


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_read(theme):
    """WCAG AA: 4.5 for texts, 3 for lines and marks."""
    for text, grounds in TEXTS.items():
        for ground in grounds:
            assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
    for mark in (*COLOURS, "edge"):
        assert contrast(theme[mark], theme["panel"]) >= 3, mark
    for percent in range(101):
        ground = mixed(theme["low"], theme["high"], percent / 100)
        assert contrast(theme["on-high" if percent > TURN else "on-low"], ground) >= 4.4, percent
    assert themed({"a": ["@ink", "ink", 3, "@nothing"]}, theme) == {"a": [theme["ink"], "ink", 3, "@nothing"]}


def tokens(value):
    if isinstance(value, dict):
        return [found for entry in value.values() for found in tokens(entry)]
    if isinstance(value, list):
        return [found for entry in value for found in tokens(entry)]
    return [value[1:]] if isinstance(value, str) and value.startswith("@") else []


RUNG = {"length": "2 epochs", "rows": [{"beta": 0.5, "overlap": 1, "held_out": 4.0, "kept": True}]}


def test_charts_use_tokens_for_all_colours():
    runs = [run_of("digits-ie", label="IE <x>"), run_of("digits-mcl")]
    made = [draw("a", "t", runs) for draw in (figures.heat_maps, figures.entropies, figures.reliability)]
    made += [draw("b", "t", runs) for draw in (figures.risk_coverage, figures.training)]
    made.append(figures.tuning({"recipe": "r", "beta": 0.5, "overlap": 1, "rungs": [RUNG]}))
    for panel in (panel for figure in made for panel in figure.panels):
        assert set(tokens(panel.spec)) <= LIGHT.keys()
        assert "#" not in json.dumps(panel.spec), "no colour of one theme only"
        svg = figures.inline_svg(panel)
        assert not re.search(r"(fill|stroke)=.(?!none|transparent|var\(--)", svg), (
            "they follow the page's theme"
        )
        assert 'role="' not in svg
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", svg)) <= LIGHT.keys()
    assert re.search(r"""data-tip="[^"]*accuracy: 95""", figures.inline_svg(made[0].panels[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("format", "start"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_figures_as_files(tmp_path, format, start):
    for name in ("digits-mcl", "digits-cmcl"):
        save_run(tmp_path / "runs" / name, made_record(name))
    folder = report.write([tmp_path / "runs"], tmp_path / "figures", format=format)
    files = sorted(path.name for path in folder.iterdir())
    names = ("classes", "curves", "entropies", "reliability", "risk")
    assert files == [f"{name}-digits.{format}" for name in names]
    assert all(path.read_bytes().startswith(start) for path in folder.iterdir())
    if format == "svg":
        text = (folder / "curves-digits.svg").read_text()
        assert ">CMCL<" in text, "the legend"
        assert "@" not in text, "no token is left"


def test_a_legend_is_added_for_files():
    run = run_of("digits-ie")
    panel = figures.joined(figures.risk_coverage("f", "t", [run]))["concat"][0]
    assert panel["encoding"]["color"]["legend"]["orient"] == "bottom"
    assert panel["width"] == figures.WIDTH
    cells = figures.joined(figures.heat_maps("f", "t", [run]))["concat"][0]
    assert "bottom" not in json.dumps(cells)


def test_the_documentation_has_the_palette_of_the_page():
    colours = re.findall(r"#[0-9a-f]{6}", (Path(__file__).parents[1] / "docs" / "style.css").read_text())
    assert len(colours) > 8
    assert set(colours) <= {*LIGHT.values(), *DARK.values()}
