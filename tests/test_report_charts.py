"""Charts: the numbers that are drawn, colours that can be read, and files that other programs take."""

import json
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmcl import report
from cmcl.report import charts, curves, figures
from cmcl.report.drawing import named, series
from cmcl.report.gather import Run
from cmcl.report.sections import paper_figures
from cmcl.report.themes import COLOURS, DARK, LIGHT, TURN, config, filled
from cmcl.reproduction import find
from cmcl.reproduction.cells import Evidence
from report_samples import changed, made_record, save_run, telemetry_row, whole_paper

for name in ("altair", "vl_convert", "jinja2"):
    pytest.importorskip(name)


def values(panel, layer=None):
    """The points of a panel: altair puts equal data in one place."""
    spec = panel.spec if layer is None else panel.spec["layer"][layer]
    data = spec.get("data") or panel.spec["data"]
    return data["values"]


def run_of(name, **options):
    record = made_record(name, **options)
    rows = [telemetry_row(record, epoch) for epoch in range(1, 6)]
    return Run(name, record.seed, record, rows, label=name)


def test_heat_maps_by_hand():
    recipe = changed(find("digits-ie"), members=2)
    record = made_record(
        "digits-ie", recipe=recipe, classwise=[[100.0, None], [50.0, 0.0]], members=[1.0, 2.0]
    )
    figure = charts.heat_maps("f", "t", [("a run", record)], ["cat", "dog"])
    assert values(figure.panels[0]) == [
        {"class": "cat", "member": 0, "accuracy": 100.0},
        {"class": "cat", "member": 1, "accuracy": 50.0},
        {"class": "dog", "member": 1, "accuracy": 0.0},
    ]
    assert [value.text for value in figure.numbers.rows[0]] == ["a run", "25.0"]


def test_many_classes_stay_on_the_screen():
    record = made_record("digits-ie", classes=100)
    spec = charts.heat_maps("f", "t", [("a", record)]).panels[0].spec
    assert spec["height"] == charts.TALLEST
    assert len(spec["layer"]) == 1, "no numbers that nobody can read"


def test_what_is_missing_is_named_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ImportError, match=r"pip install 'confident-mcl\[report\]'"):
        charts.heat_maps("f", "t", [])


def test_classes_without_names_are_numbers():
    record = made_record("digits-ie", classes=12)
    assert values(charts.heat_maps("f", "t", [("a", record)]).panels[0])[11]["class"] == "11"
    short = charts.heat_maps("f", "t", [("a", record)], ["only one"])
    assert [p["class"] for p in values(short.panels[0])[:3]] == ["only one", "1", "2"]


def test_entropies_by_hand():
    entropy = {
        "bins": 4,
        "largest": 2.0,
        "averaged": [8, 0, 0, 0],
        "specialised": [[3, 1, 0, 0], [3, 1, 0, 0]],
        "other": [[0, 0, 0, 4]] * 2,
    }
    figure = charts.entropies("f", "t", [("a", made_record("digits-cmcl", entropy=entropy))])
    points = values(figure.panels[0])
    assert {"from": 0.0, "to": 0.5, "group": "own classes", "share": 75.0} in points
    assert {"from": 1.5, "to": 2.0, "group": "other classes", "share": 100.0} in points
    medians = {row[1].text: row[2].text for row in figure.numbers.rows}
    assert medians == {"own classes": "17", "other classes": "88"}  # 2/3 of the first bin; half of the last
    assert [s.name for s in figure.legend] == ["own classes", "other classes"]


def test_entropies_of_the_averaged_answer():
    """As the paper draws its independent ensemble, beside the members of the others."""
    entropy = {"bins": 2, "largest": 2.0, "averaged": [3, 1], "averaged_ood": [1, 4]}
    entropy |= {"specialised": [[4, 0]] * 5, "other": [[4, 0]] * 5, "ood": [[9, 0]] * 5}
    names = ("cifar10-cnn-mcl", "cifar10-cnn-ie-adversarial")
    records = [(name, made_record(name, entropy=entropy, ood="svhn")) for name in names]
    figure = charts.entropies("f", "t", records, averaged=["ie"])
    mcl, ie = ({p["group"] for p in values(panel)} for panel in figure.panels)
    assert mcl == {"own classes", "other classes", "SVHN"}
    assert ie == {"test images", "SVHN"}
    assert {"from": 1.0, "to": 2.0, "group": "SVHN", "share": 80.0} in values(figure.panels[1])
    assert "averaged answer" in figure.caption
    assert "averaged answer" not in charts.entropies("f", "t", records).caption


def test_figure_2_of_the_paper_shows_ie_as_one():
    figure = paper_figures(Evidence.of(whole_paper(1)))["2"]
    groups = {panel.title: {p["group"] for p in values(panel)} for panel in figure.panels}
    members = {"own classes", "other classes", "SVHN"}
    adversarial = "IE, adversarially trained"
    assert groups == {"MCL": members, "CMCL": members, adversarial: {"test images", "SVHN"}}


def test_reliability_leaves_out_empty_bins():
    figure = charts.reliability("f", "t", [("a", made_record("digits-ie"))])
    points = [p for layer in (1, 2) for p in values(figure.panels[0], layer)]
    assert {(p["images"], p["confidence"], p["accuracy"]) for p in points} == {
        (5, 50.0, 40.0),
        (95, 95.0, 96.0),
    }


def test_risk_coverage_by_hand():
    record = made_record(
        "digits-ie", top1=10.0
    )  # the error among the most confident 1 %, 2 %, ... is 0.1, 0.2, ...
    figure = charts.risk_coverage("f", "t", [("a", record)])
    points = values(figure.panels[0])
    assert (points[0]["coverage"], points[0]["error"]) == (1, 0.1)
    assert (points[-1]["coverage"], points[-1]["error"]) == (100, 10.0)
    assert [value.text for value in figure.numbers.rows[0]] == ["a", "5.00", "8.00", "9.00", "10.00"]


def test_training_curves():
    figure = curves.training("f", "t", [run_of("digits-ie"), run_of("digits-cmcl")])
    assert [panel.title for panel in figure.panels][:2] == ["training loss", "top-1 error, %"]
    loss = values(figure.panels[0])
    assert [p["value"] for p in loss if p["run"] == "digits-ie"] == [2.0, 1.0, 0.6667, 0.5, 0.4]
    assert [value.text for value in figure.numbers.rows[0]] == ["digits-ie", "5", "0.4000", "10.00"]


def test_what_was_not_looked_at_is_not_drawn():
    run = run_of("digits-ie")
    for row in run.rows:
        del row["top1"]
        row["losers_entropy"] = 0.0
    titles = [panel.title for panel in curves.training("f", "t", [run]).panels]
    assert "top-1 error, %" not in titles
    assert "entropy of the losers, nats" not in titles


def test_who_wins_what():
    run = run_of("digits-mcl")
    run.rows[2]["win_rates_by_class"][1] = [1.0] + [0.0] * 9
    figure = curves.wins("f", "t", run, 1)
    assert [panel.title for panel in figure.panels] == [f"member {m}" for m in range(5)], "as predict counts"
    third = [p for p in values(figure.panels[1]) if p["epoch"] == 3]
    assert [p["won"] for p in third] == [100] + [0] * 9
    dense = curves.wins("f", "t", run_of("shapes-cmcl", classes=2), 1)
    assert len(dense.panels) == 1
    assert [s.name for s in dense.legend] == ["member 0", "member 1", "member 2"]


def test_long_runs_are_thinned():
    run = run_of("digits-mcl")
    run.rows = [telemetry_row(run.record, epoch) for epoch in range(1, 501)]
    figure = curves.wins("f", "t", run, 4)
    points = values(figure.panels[0])
    epochs = sorted({p["epoch"] for p in points})
    assert (epochs[0], epochs[-1]) == (1, 500)
    assert len(points) * 5 * 4 <= curves.MOST_POINTS
    assert len(values(curves.training("f", "t", [run]).panels[0])) == 120


@given(st.lists(st.integers(), min_size=1, max_size=60), st.integers(2, 30))
def test_thinning(numbers, most):
    found = curves._thinned(numbers, most)
    assert len(found) == min(len(numbers), most)
    assert (found[0], found[-1]) == (numbers[0], numbers[-1])
    places = curves._thinned(range(len(numbers)), most)
    assert all(a < b for a, b in pairwise(places)), "each once, in order"


def test_errors_against_members():
    assert curves.against_members("f", "t", Evidence.of([])) is None
    one = Evidence.of([made_record("icoseg-fcn-m2-ie", classes=2)])
    assert curves.against_members("f", "t", one) is None, "one point is no curve"
    figure = curves.against_members("f", "t", Evidence.of(whole_paper(1)))
    assert len(figure.panels) == 4, "segmentation by the most confident member and by the average"
    members = {(p["method"], p["members"]) for p in values(figure.panels[1])}
    assert members == {(method, m) for method in ("IE", "MCL", "CMCL") for m in range(1, 6)}


def test_colours_follow_the_methods():
    found = series(["x", "y"], {"x": "ie", "y": "cmcl"})
    assert [s.colour for s in found] == ["c2", "c1"]
    several = series(["a", "b", "c"], {"a": "cmcl", "b": "cmcl", "c": "ie"})
    assert len({s.colour for s in several}) == 3
    assert several[2].colour == "c2"
    assert len({s.colour for s in series(map(str, range(8)))}) == 8
    many = series(map(str, range(30)))
    assert len({(s.colour, *s.dash) for s in many}) == 30, "more than there are colours"


@given(st.lists(st.sampled_from(["cmcl", "ie", "mcl", "single", "other"]), max_size=8))
def test_no_two_series_look_alike_while_a_colour_is_free(methods):
    names = dict(zip(map(str, range(len(methods))), methods, strict=True))
    assert len({s.colour for s in series(names, names)}) == len(methods)


def test_seeds_of_one_recipe_share_a_colour():
    records = [(f"digits-ie seed {seed}", made_record("digits-ie", seed)) for seed in (0, 1)]
    other = ("mine", made_record("digits-cmcl"))
    assert named([*records, other]) == {
        "digits-ie seed 0": "digits-ie",
        "digits-ie seed 1": "digits-ie",
        "mine": "mine",
    }


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


def test_themes_fill_every_token():
    assert LIGHT.keys() == DARK.keys()
    assert filled({"a": ["@ink", "ink", 3, "@nothing"]}, DARK) == {"a": [DARK["ink"], "ink", 3, "@nothing"]}
    json.dumps([config(LIGHT), config(DARK)], allow_nan=False)


def tokens(value):
    if isinstance(value, dict):
        return [found for entry in value.values() for found in tokens(entry)]
    if isinstance(value, list):
        return [found for entry in value for found in tokens(entry)]
    return [value[1:]] if isinstance(value, str) and value.startswith("@") else []


def test_charts_use_tokens_for_all_colours():
    runs = [run_of("digits-ie"), run_of("digits-mcl")]
    records = [(run.label, run.record) for run in runs]
    made = [
        charts.heat_maps("a", "t", records),
        charts.entropies("b", "t", records),
        charts.reliability("c", "t", records),
        charts.risk_coverage("d", "t", records),
        curves.training("e", "t", runs),
        curves.wins("f", "t", runs[1], 1),
    ]
    for figure in made:
        for panel in figure.panels:
            assert set(tokens(panel.spec)) <= LIGHT.keys()
            assert "#" not in json.dumps(panel.spec), "no colour of one theme only"
            assert panel.spec["width"] == "container"


@pytest.mark.slow
@pytest.mark.parametrize(("format", "start"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_figures_as_files(tmp_path, format, start):
    for name in ("digits-mcl", "digits-cmcl"):
        save_run(tmp_path / "runs" / name, made_record(name))
    folder = report.write([tmp_path / "runs"], tmp_path / "figures", format=format)
    files = sorted(path.name for path in folder.iterdir())
    expected = ["classes-digits", "curves-digits", "entropies-digits", "reliability-digits", "risk-digits"]
    assert files == [f"{name}.{format}" for name in [*expected, "wins-digits-0", "wins-digits-1"]]
    for path in folder.iterdir():
        assert path.read_bytes().startswith(start)
    if format == "svg":
        text = (folder / "curves-digits.svg").read_text()
        assert "digits-cmcl" in text, "the legend"
        assert "@" not in text, "no token is left"


def test_a_legend_is_added_for_files():
    figure = charts.risk_coverage("f", "t", [("a", made_record("digits-ie"))])
    joined = figures._joined(figure)
    assert joined["concat"][0]["encoding"]["color"]["legend"] == {
        "title": None,
        "orient": "bottom",
        "symbolOpacity": 1,
    }
    assert joined["concat"][0]["width"] == figures.WIDTH
    maps = charts.heat_maps("f", "t", [("a", made_record("digits-ie"))])
    assert figures._joined(maps)["concat"][0]["layer"][0]["encoding"]["color"]["legend"] is None
