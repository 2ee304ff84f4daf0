"""The campaign of today's training: complete recipes, and its two figures from made-up records."""

import json
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from scipy import stats

from cmcl.networks import NETWORKS
from cmcl.reproduction.cells import CELLS, MODERN_CELLS, select
from cmcl.reproduction.recipes import MODERN_RUNS, RECIPES
from cmcl.training import Recipe
from report_samples import made_record, save_results

pytest.importorskip("altair")
save = pytest.importorskip("cmcl.report.figures").save
modern = pytest.importorskip("cmcl.report.modern")

DEFAULT = (Recipe.beta, Recipe.overlap)
BASES = list(dict.fromkeys(base for base, _, _ in MODERN_RUNS))


def weights(name):
    recipe = RECIPES[name]
    with torch.device("meta"):
        network = NETWORKS[recipe.network](**recipe.network_options)
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("base", BASES)
def test_the_methods_of_a_base_are_trained_alike(base):
    recipes = {method: RECIPES[name] for b, method, name in MODERN_RUNS if b == base}
    ie, paper = recipes["ie"].to_json(), recipes.keys() - {"single", "ie", "cmcl", "cmcl-sharing"}
    differ = {m: {k for k, v in recipe.to_json().items() if v != ie[k]} for m, recipe in recipes.items()}
    assert {m: fields for m, fields in differ.items() if m not in paper} == {
        "single": {"members", "network_options"},
        "ie": set(),
        "cmcl": {"method", "beta", "overlap"},
        "cmcl-sharing": {"method", "beta", "overlap", "sharing"},
    }
    assert {(recipes[m].beta, recipes[m].overlap) for m in ("cmcl", "cmcl-sharing")} == {DEFAULT}
    for method in paper:
        beside = replace(recipes[method], beta=DEFAULT[0], overlap=DEFAULT[1])
        assert beside == recipes[method.removesuffix("-paper-beta")]
        assert (recipes[method].beta, recipes[method].overlap) == (0.75, 4)
    assert len(paper) == (2 if base == "cifar10-resnet20-w16" else 0)
    assert ie["validation"], "for the temperature"
    assert recipes["ie"].flip_at_test == (recipes["ie"].data != "svhn"), "mirrored digits are others"
    five = recipes["ie"].members * weights(f"{base}-modern-ie")
    assert weights(f"{base}-modern-single") == pytest.approx(five, rel=0.02)


def test_a_newcomers_recipe_has_the_librarys_default():
    recipe = RECIPES["digits-cmcl"]
    assert (recipe.beta, recipe.overlap) == DEFAULT
    assert not recipe.sharing
    assert recipe.labels == "exact"


def test_the_campaign_has_a_word_of_its_own():
    assert select(["modern"]) == list(MODERN_CELLS)
    assert not set(select(["all"])) & set(MODERN_CELLS), "the paper's only"
    both = select(["all", "modern"])
    assert both == [*CELLS, *MODERN_CELLS]


def made(errors):
    """Records of {(base, method): top-1 errors by seed}."""
    names = {(base, method): name for base, method, name in MODERN_RUNS}
    return [
        made_record(names[key], seed, top1=top1, seconds=10.0 * (1 + seed) * len(key[0]))
        for key, several in errors.items()
        for seed, top1 in enumerate(several)
    ]


def draws_zero(panel):
    return any(layer["mark"].get("color") == "@edge" for layer in panel.spec["layer"])


ERRORS = {
    ("cifar10-resnet20-w8", "ie"): [9.0, 9.2, 9.1],
    ("cifar10-resnet20-w8", "cmcl"): [8.0, 8.4, 8.1],
    ("cifar10-resnet20-w8", "cmcl-sharing"): [8.5],
    ("cifar10-resnet20-w32", "ie"): [5.0, 5.1],
    ("cifar10-resnet20-w32", "cmcl"): [5.3, 5.5],
    ("cifar10-resnet20-w32", "single"): [6.0],
    ("svhn-resnet20-w16", "cmcl"): [3.0],
}


def test_gain_against_size_is_the_difference_with_welchs_interval(tmp_path):
    figure = modern.gain_against_size(made(ERRORS))
    rows = {(row[0].text, row[1].text): row for row in figure.numbers.rows}
    assert len(rows) == 3, "SVHN has no IE to compare with"
    small = rows["cifar10-resnet20-w8", "CMCL"]
    assert small[2].sort == weights("cifar10-resnet20-w8-modern-ie") == 68_098
    ie, cmcl = (ERRORS["cifar10-resnet20-w8", method] for method in ("ie", "cmcl"))
    assert small[3].sort == pytest.approx(fmean(ie) - fmean(cmcl))
    test = stats.ttest_ind(ie, cmcl, equal_var=False)
    interval = test.confidence_interval(0.95)
    assert [one.sort for one in small[4:7]] == pytest.approx([*interval, test.pvalue], abs=1e-4)
    assert rows["cifar10-resnet20-w8", "CMCL with sharing"][4].sort is None, "one seed has no interval"
    large = rows["cifar10-resnet20-w32", "CMCL"]
    assert large[3].sort < 0, "worse is shown as worse"
    assert large[4].sort < large[3].sort < large[5].sort, "two seeds have an interval"
    assert all(draws_zero(panel) for panel in figure.panels)
    assert small[7].text == "3 and 3"
    assert save(figure, tmp_path / "gain.svg").read_text().startswith("<svg")


def test_error_against_seconds_has_a_point_for_each_method_and_size(tmp_path):
    figure = modern.error_against_seconds(made(ERRORS))
    assert not any(draws_zero(panel) for panel in figure.panels)
    assert [panel.title for panel in figure.panels] == ["CIFAR-10", "SVHN"]
    rows = {(row[0].text, row[1].text): row for row in figure.numbers.rows}
    assert len(rows) == len(ERRORS)
    heads = [column.title for column in figure.numbers.columns]
    ie = dict(zip(heads, rows["cifar10-resnet20-w8", "IE"], strict=True))
    assert ie["Top-1, %"].sort == pytest.approx(9.1)
    assert ie["Seconds"].sort == pytest.approx(10 * len("cifar10-resnet20-w8")), "the fastest"
    assert ie["Risk at 80 %"].sort == pytest.approx(0.8 * 9.1), "the 80th of 100 points"
    assert ie["Scaled ECE, %"].sort is None
    assert ie["n"].sort == 3
    assert save(figure, tmp_path / "seconds.svg").read_text().startswith("<svg")


def test_records_of_other_recipes_or_shortened_runs_do_not_count(tmp_path):
    (record,) = made({("cifar10-resnet20-w8", "ie"): [9.0]})
    assert modern.error_against_seconds([]) is None
    assert modern.error_against_seconds([made_record("cifar10-resnet20-ie")]) is None
    assert modern.error_against_seconds([record.model_copy(update={"full_length": False})]) is None
    assert modern.error_against_seconds([record.model_copy(update={"recipe_hash": "0" * 16})]) is None
    assert modern.gain_against_size([record]) is None


def test_status_lists_every_cell(cmcl, tmp_path):
    save_results(tmp_path, made(ERRORS))
    found = json.loads(cmcl("reproduce", "modern", "--status", "--json", "--results", tmp_path)[1])
    assert [row["id"] for row in found] == [cell.id for cell in MODERN_CELLS]
    assert {row["recipe"]: row["ours"]["top1"]["n"] for row in found if row["ours"]} == {
        name: len(ERRORS[base, method]) for base, method, name in MODERN_RUNS if (base, method) in ERRORS
    }
    everything = json.loads(cmcl("reproduce", "all", "--status", "--json", "--results", tmp_path)[1])
    assert [row["id"] for row in everything] == [cell.id for cell in CELLS]


def test_the_report_shows_them_once_there_are_records(cmcl, tmp_path):
    save_results(tmp_path, made(ERRORS))
    assert cmcl("report", tmp_path, "--format", "svg", "-o", tmp_path / "figures")[0] == 0
    assert {"modern-seconds.svg", "modern-size.svg"} <= {p.name for p in (tmp_path / "figures").iterdir()}
    assert cmcl("report", tmp_path, "-o", tmp_path / "page.html")[0] == 0
    assert "Members trained as today" in (tmp_path / "page.html").read_text()
