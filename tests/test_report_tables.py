"""The paper's tables with ours beside them, the summary, Markdown and documents."""

import shutil
from pathlib import Path

import pytest

from cmcl.report import documents, markdown, tables
from cmcl.report.load import Run
from cmcl.report.summary import NOTE, coverage, pairs, paper_summary, result_tables
from cmcl.reproduction import CELLS, claims, significance
from cmcl.reproduction.claims import judge
from cmcl.reproduction.record import load_records
from report_samples import changed, made_record, whole_paper

ROOT = Path(__file__).parents[1]
IE, CMCL = "cifar10-resnet20-ie", "cifar10-resnet20-cmcl"
WHERE, SINGLE = ("ResNet-20", "CIFAR-10"), "single network (mean of IE's members)"


def row_of(table, *keys):
    (found,) = [row for row in table.rows if [value.text for value in row[: table.keys]] == list(keys)]
    return found


def texts(row):
    return [value.text for value in row]


def table3(*records):
    return tables.paper_table("table3", list(records))


def twice(name, **values):
    return [made_record(name, seed, **values) for seed in (0, 1)]


def results(*records):
    (table,) = result_tables("t", [Run.of(record) for record in records])
    return table


def verdict(*records):
    (pair,) = pairs([Run.of(record) for record in records])
    return pair


def test_every_printed_number_is_in_a_table():
    found = [tables.paper_table(name, []) for name in ("table1", "table2", "table3")]
    assert [len(table.rows) for table in found] == [5, 18, 24]
    shown = [float(row[table.keys].text) for table in found for row in table.rows]
    assert sorted(shown) == sorted(cell.paper["top1"] for cell in CELLS if cell.paper)
    for table in found:
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert {row[table.keys + 1].text for row in table.rows} == {"not measured"}
        assert all(row[table.keys + 1].missing and row[table.keys + 2].missing for row in table.rows)


def test_a_row_by_hand():
    records = [made_record(CMCL, seed, top1=top1, oracle=2.8) for seed, top1 in ((0, 8.0), (1, 9.0))]
    table = table3(*records, made_record(IE, top1=10.24, oracle=3.88))
    row = row_of(table, "CMCL", *WHERE)
    assert texts(row[3:]) == ["8.75", "8.50 ± 0.71", "−0.25", "2.79", "2.80 ± 0.00", "+0.01", "2"]
    assert [value.sort for value in row[3:]] == pytest.approx([8.75, 8.5, -0.25, 2.79, 2.8, 0.01, 2])
    assert (row[4].mark, row[7].mark) == (None, None), "one run of IE alone"
    assert (row[4].link, row[4].best, row[3].best) == (CMCL, True, False)
    single = row_of(table, SINGLE, *WHERE)
    assert texts(single[3:6]) == ["14.03", "14.24", "+0.21"], "the mean of IE's members"


def test_marks_give_the_side_of_ie():
    # two runs each with a standard deviation of 0.14: Welch's t-test, 0.61 points are significant at 5 %
    ie = [made_record(IE, seed, top1=10.0 + seed / 5) for seed in (0, 1)]
    for top1, mark in ((9.0, "same"), (9.8, "near"), (10.2, "near"), (11.2, "other")):
        table = table3(*ie, *(made_record(CMCL, seed, top1=top1 + seed / 5) for seed in (0, 1)))
        assert row_of(table, "CMCL", *WHERE)[4].mark == mark, top1
        for method in ("IE", SINGLE):
            assert row_of(table, method, *WHERE)[4].mark is None, "nothing to compare"
    for others in ([], ie[:1]):
        alone = table3(*others, *twice(CMCL, top1=9.0))
        assert row_of(alone, "CMCL", *WHERE)[4].mark is None


def test_worse_than_the_paper_is_marked():
    for top1, worse in ((9.24, False), (9.26, True), (5.0, False)):  # the paper has 8.75
        table = table3(*twice(IE, top1=12.0), *twice(CMCL, top1=top1, oracle=50.0))
        row = row_of(table, "CMCL", *WHERE)
        assert (row[7].worse, row[4].worse) == (False, worse), "of top-1 only"
        assert (
            "▲" in markdown.markdown(table).split("| CMCL | ResNet-20 | CIFAR-10")[-1].splitlines()[0]
        ) is worse


def test_a_legend_explains_the_marks_of_its_table_only():
    plain, marked = tables.Value("8.84"), tables.Value("8.84 ± 0.10", mark="same")
    assert tables.legend([[plain]]) == "n: runs with different seeds."
    assert tables.legend([[tables.Value("9.40", worse=True)]]).startswith("▲: worse than the paper")
    text = tables.legend([[plain], [marked]])
    assert [sign in text for sign in "✓≈▲"] == [True, True, False]
    assert text.endswith("Mean ± standard deviation over n runs with different seeds.")


def scaled(name, seed, ece):
    record = made_record(name, seed)
    return changed(record, calibration=record.calibration | {"temperature": 0.5, "scaled_ece": ece})


def test_a_row_for_each_recipe_with_the_mean_of_its_seeds():
    runs = [made_record("digits-ie", seed, top1=2.0 + 2 * seed, picked=3.0, oracle=1.0) for seed in (0, 1)]
    table = results(*runs, made_record("digits-cmcl", top1=2.5), made_record("digits-mcl", full_length=False))
    assert [column.title for column in table.columns][:5] == [
        "Method",
        "Run",
        "Top-1",
        "difference",
        "Oracle",
    ]
    ie, mcl, cmcl = table.rows
    assert texts(ie) == [
        "IE", "digits-ie", "3.00 ± 1.41", "–", "1.00 ± 0.00", "2.50 ± 0.00", "3.00 ± 0.00", "7.00 ± 1.41", "150", "2"
    ]  # fmt: skip
    assert texts(mcl)[1] == "digits-mcl (partial)"
    assert texts(mcl)[3] == "–", "partial runs compare with none"
    assert (cmcl[2].best, cmcl[3].text, cmcl[3].mark) == (True, "−0.50", "near"), "Student's t"
    assert (ie[2].best, ie[4].best) == (False, True)
    assert table.note == NOTE
    single, *_, last = results(made_record("digits-single"), *runs, made_record("digits-cmcl", top1=2.5)).rows
    assert (single[3].text, last[3].text) == ("–", "−0.50"), "one baseline in a column"
    text = markdown.markdown(table)
    assert text.startswith("| Method | Run | Top-1 ↓ | difference | Oracle ↓ |")
    assert "| CMCL | digits-cmcl | **2.50** | −0.50 ≈ | 4.00 |" in text
    many = [changed(made_record("digits-ie", seed), name=f"ie-{seed}") for seed in range(5)]
    assert texts(results(*many).rows[0])[1] == "ie-0 to ie-4"


def test_the_ece_after_temperature_scaling_where_it_is_known():
    assert "Scaled ECE" not in markdown.markdown(results(*twice("digits-ie")))
    known = [scaled("digits-ie", seed, 1.0 + 2 * seed) for seed in (0, 1)]
    table = results(*known, scaled("digits-cmcl", 0, 0.5), made_record("digits-mcl"))
    assert [column.title for column in table.columns][5:7] == ["ECE", "Scaled ECE"]
    assert [row[6].text for row in table.rows] == ["2.00 ± 1.41", "–", "0.50"]


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "smooth"},
        {"test_examples": 7},
        {"full_length": False},
        {"trained_on": "60 examples"},
        {"network": {"class": "Net", "parameters": 7, "digest": "d"}},
        {"checksums": {"test": "other"}},
        {"recipe_hash": "f" * 16},
        {"steps": 999},
        {"name": "balanced"},
        {"seed": 0, "weights": "f" * 64},
    ],
)
def test_runs_that_differ_in_more_than_the_seed_have_no_mean(changes):
    one, other = twice("digits-ie")
    assert len(results(one, other).rows) == 1
    assert len(results(one, changed(other, **changes)).rows) == 2


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (("mine-seed0", "mine-seed1"), True),
        (("mine_0", "mine_1"), True),
        (("mine-seed00", "mine-seed01"), True),
        (("plain-seed0", "balanced-seed1"), False),
        (("k-3", "k-4"), False),
        (("mine-lr1.0", "mine-lr0.1"), False),
        (("mine-10", "mine-1"), False),
    ],
)
def test_names_that_end_with_the_seed_are_repeats(names, alike):
    own = [changed(record, name=name) for record, name in zip(twice("digits-ie"), names, strict=True)]
    assert len(results(*own).rows) == (1 if alike else 2)


def test_the_verdict_compares_cmcl_with_its_baseline():
    ie = made_record("digits-ie", top1=4.0, oracle=1.0, seconds=100.0)
    cmcl = made_record("digits-cmcl", top1=3.0, oracle=0.5, seconds=150.0)
    single = made_record("digits-single", top1=5.0, oracle=5.0)
    top1, oracle, ece, cost = verdict(ie, made_record("digits-mcl", top1=70.0), cmcl, single).tiles
    assert top1[:3] == ("Top-1 error", "3.00 %", "IE 4.00 %")
    # pooled 3.5 % of 10,000: the standard error of the difference is 0.2599 points
    assert top1.verdict == (
        "−1.00 points, 95 % CI −1.51 to −0.49; significant (n = 1 and 1, z-test over 10,000 examples, p < 0.001)"
    )
    assert (top1.kind, oracle.kind) == ("good", "good")
    assert (ece.title, ece.value, ece.other, ece.kind) == ("ECE, as trained", "2.50 %", "IE 2.50 %", "")
    assert "cmcl calibrate" in ece.verdict
    assert (cost.value, cost.other) == ("2 min", "IE 2 min")
    assert cost.verdict == "1.50 times IE; prediction runs 5 networks"
    assert verdict(changed(ie, device="another"), cmcl).tiles[3].verdict.startswith("on other devices")
    assert verdict(cmcl, single).rival == "single network"
    alone = verdict(cmcl)
    assert (alone.tiles[0].other, alone.tiles[0].verdict) == ("", "n = 1, no baseline to compare with")
    assert str(alone).startswith("CMCL on digits. Top-1 error 3.00 %")
    assert pairs([Run.of(ie)]) == pairs([Run.of(changed(cmcl, full_length=False))]) == []
    errors = made_record("digits-ie", top1=3.5).errors
    stronger = changed(ie, name="tuned", recipe_hash="f" * 16, errors=errors)
    assert verdict(ie, cmcl, stronger).tiles[0].other == "IE 3.50 %"
    adversarial = changed(stronger, recipe=stronger.recipe | {"adversarial": 0.01})
    assert verdict(ie, cmcl, adversarial).tiles[0].other == "IE 4.00 %"
    worse = verdict(ie, made_record("digits-cmcl", top1=6.0))
    assert worse.tiles[0].kind == "bad"
    near = verdict(ie, made_record("digits-cmcl", top1=4.1)).tiles[0]
    assert (near.kind, "not significant" in near.verdict) == ("near", True)
    dense = [made_record(f"shapes-{method}", classes=2) for method in ("ie", "cmcl")]
    first = verdict(*dense).tiles[0]
    assert (first.title, first.value) == (
        "Error of the most confident member",
        f"{dense[1].scores['picked']:.2f} %",
    )
    assert first.verdict == "0.00 points (n = 1 and 1, no test)"


def test_the_verdict_shows_the_ece_before_and_after_temperature_scaling():
    ece = verdict(scaled("digits-ie", 0, 2.0), scaled("digits-cmcl", 0, 0.5)).tiles[2]
    assert ece == ("ECE, temperature-scaled", "0.50 %", "IE 2.00 %", "as trained: 2.50 % (IE 2.50 %)", "")
    assert verdict(scaled("digits-ie", 0, 2.0), made_record("digits-cmcl")).tiles[2].value == "2.50 %"


@pytest.mark.parametrize(
    ("changes", "compared"),
    [
        ({"steps": 999}, False),
        ({"checksums": {"test": "other"}}, False),
        ({"task": "smooth"}, False),
        ({"network": {"class": "Net", "parameters": 7, "digest": "d"}}, False),
        ({"trained_on": "60 examples"}, False),
        ({"trained_on": None}, True),
        ({"recipe_hash": "f" * 16}, True),
    ],
)
def test_only_comparable_runs_are_compared(changes, compared):
    cmcl = changed(made_record("digits-cmcl"), trained_on="600 examples")
    ie = changed(made_record("digits-ie"), **({"trained_on": "600 examples"} | changes))
    assert (verdict(cmcl, ie).rival == "IE") is compared


def test_the_summary_of_the_paper():
    assert "not measured yet" in paper_summary([])[0]
    (found,) = paper_summary([made_record(CMCL, top1=9.0), made_record(IE, top1=10.0)])
    assert found.startswith("CMCL against IE on CIFAR-10 with five ResNet-20. Top-1 error 9.00 %, IE 10.00 %")
    assert "p = 0.016" in found
    assert found.endswith("The paper reports 14.05 % lower.")
    everything = whole_paper(1)
    assert coverage(everything, judge(everything)).startswith("47 of 47 cells")
    assert coverage([], judge([])) == "0 of 47 cells of Tables 1 to 3 are measured. Claims: not measured (8)."


def test_a_table_names_machines_and_commits():
    here = {"device": "cpu", "precision": "float32", "versions": {"torch": "2.13.0"}, "commit": "a" * 40}
    there = here | {"device": "NVIDIA H200", "precision": "bf16", "commit": None}
    assert tables.origin([]) == ""
    both = [made_record(IE, **here), made_record(CMCL, **there, resumed_with=[{"step": 0}, {"step": 5}])]
    assert tables.origin([*both, both[0]]) == (
        "Trained on cpu (float32, torch 2.13.0), NVIDIA H200 (bf16, torch 2.13.0), commit aaaaaaa, unknown. "
        "1 of 2 runs resumed on another machine, version or commit (see the records)."
    )
    for text in (markdown.headline(both), markdown.paper_markdown("table3", both)):
        assert text.endswith(tables.origin(both))
    assert "Trained on" not in markdown.paper_markdown("table1", both)  # nothing of it is measured


def test_partial_runs_and_negative_zero():
    row = row_of(table3(made_record(CMCL, full_length=False)), "CMCL", *WHERE)
    assert (row[4].text, row[4].missing) == ("1 partial", True)
    row = row_of(table3(made_record(CMCL, top1=8.7499, oracle=2.79)), "CMCL", *WHERE)
    assert row[5].text == "0.00"


def test_headline():
    """With the small CNN, where CMCL alone is worse than IE, and IE with adversarial training."""
    svhn = made_record("svhn-resnet20-ie", top1=4.79)
    small = [
        made_record("cifar10-cnn-cmcl", top1=16.04),
        made_record("cifar10-cnn-ie-adversarial", top1=14.99),
    ]
    text = markdown.headline([made_record(CMCL, top1=8.84), made_record(IE, top1=10.24), svhn, *small])
    lines = text.splitlines()
    assert lines[0].startswith("| Method | Network | CIFAR-10: paper ↓ | CIFAR-10: ours ↓ | CIFAR-10: n |")
    assert lines[2] == f"| {SINGLE} | ResNet-20 | 14.03 | 14.24 | 1 | 5.31 | 8.79 ▲ | 1 |"
    assert lines[5] == "| CMCL | ResNet-20 | 8.75 | **8.84** | 1 | 3.68 | not measured | 0 |"
    assert "| CMCL | small CNN | 15.65 | 16.04 | 1 | – | – | – |" in lines
    assert "| IE + adversarial training | small CNN | – | **14.99** | 1 | – | – | – |" in lines
    assert tables.headline_table([]).keys == 2
    table3 = markdown.paper_markdown("table3", [])
    assert "ours has one setting" in table3


def test_markdown_escapes_signs():
    table = tables.Table("t", "c", [tables.Column("a|b")], [[tables.Value("<b>x</b> | `y`\n*z*")]])
    assert markdown.markdown(table).splitlines()[2] == r"| \<b\>x\</b\> \| \`y\` \*z\* |"


def test_documents_are_filled(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- cmcl:headline -->\nold\n<!-- cmcl:end -->\nafter\n")
    records = [made_record(CMCL, top1=8.84)]
    assert documents.refresh(path, records, check=True)
    assert "old" in path.read_text(), "checking writes nothing"
    assert documents.refresh(path, records)
    text = path.read_text()
    assert text.startswith("before\n<!-- cmcl:headline -->\n| Method | Network |")
    assert text.endswith("<!-- cmcl:end -->\nafter\n")
    assert markdown.headline(records) in text
    assert not documents.refresh(path, records)
    assert documents.refresh(path, [made_record(CMCL, top1=8.5)], check=True), "other records, stale document"
    other = "<!-- a:x -->\nold\n<!-- a:end -->\n<!-- b:x -->\nold\n<!-- b:end -->\n"
    assert documents.fill(other, "a", {"x": lambda: "new"}) == other.replace("old", "new", 1)


@pytest.mark.parametrize("name", documents.REGIONS)
def test_every_region_can_be_filled(name):
    region = f"<!-- cmcl:{name} -->\n<!-- cmcl:end -->\n"
    once = documents.filled(region, [made_record(CMCL)])
    assert len(once) > len(region) + 40
    assert documents.filled(once, [made_record(CMCL)]) == once
    assert documents.filled(region + region, []).count("<!-- cmcl:end -->") == 2
    assert f"`{name}`" in (ROOT / "docs" / "guides" / "report.md").read_text()


def test_mistakes_in_documents(tmp_path):
    with pytest.raises(ValueError, match="must be one of headline, .* Got 'table9'"):
        documents.filled("<!-- cmcl:table9 -->\n<!-- cmcl:end -->", [])
    with pytest.raises(ValueError, match="table1 .*must end with"):
        documents.filled("<!-- cmcl:table1 -->\n", [])
    plain = tmp_path / "plain.md"
    plain.write_text("no regions, but how to make one:\n\n    <!-- cmcl:table1 -->\n    <!-- cmcl:end -->\n")
    assert not documents.refresh(plain, [])


def test_the_command(tmp_path, capsys):
    path = tmp_path / "a.md"
    path.write_text("<!-- cmcl:table1 -->\n<!-- cmcl:end -->\n")
    words = [str(path), "--results", str(tmp_path / "results")]
    assert documents.main([*words, "--check"]) == 1
    assert documents.main(words) == 0
    assert documents.main([*words, "--check"]) == 0
    assert capsys.readouterr().out == f"{path}: stale\n{path}: written\n"


def test_our_documents_are_not_stale(tmp_path):
    """After new records: `python -m cmcl.report.documents README.md docs/*.md docs/*/*.md`."""
    records = load_records(ROOT / "results")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        assert not documents.refresh(shutil.copy(path, tmp_path), records), path.name


def test_the_report_page_documents_marks_and_bounds():
    text = (ROOT / "docs" / "guides" / "report.md").read_text()
    for mark in (*tables.MARKS.values(), tables.WORSE, f"more than {tables.MUCH:g} points"):
        assert mark in text
    assert f"p-value is below {significance.LEVEL:g}" in text
    assert claims.ENOUGH == 0.5
    assert "at least half of the printed reduction" in text
    assert f"changes by less than {claims.FLAT:g} %, up or down" in text
    assert f"closes {100 * claims.REPAIRED:.0f} %" in text
    assert f"at most {claims.ALMOST:g} times" in text
    assert claims.LONG == 120
    assert "two minutes or more" in text
    assert f"{claims.SPECIAL:g} points or more" in text
    assert f"{claims.ALIKE:g} or fewer" in text
