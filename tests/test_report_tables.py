"""The paper's tables with ours beside them, the summary, Markdown and documents."""

import shutil
from pathlib import Path

import pytest

from cmcl.report import documents, markdown, tables
from cmcl.report.load import Run
from cmcl.report.summary import coverage, paper_summary, repeats, summary
from cmcl.reproduction import CELLS, claims, significance
from cmcl.reproduction.claims import judge
from cmcl.reproduction.record import load_records
from report_samples import changed, made_record, whole_paper

ROOT = Path(__file__).parents[1]
IE, CMCL = "cifar10-resnet20-ie", "cifar10-resnet20-cmcl"


def row_of(table, *keys):
    (found,) = [row for row in table.rows if [value.text for value in row[: table.keys]] == list(keys)]
    return found


def texts(row):
    return [value.text for value in row]


def table3(*records):
    return tables.paper_table("table3", list(records))


def twice(name, **values):
    return [made_record(name, seed, **values) for seed in (0, 1)]


def run_table(*records):
    return tables.run_table(repeats([Run.of(record) for record in records]))


def summed(*records):
    return summary([Run.of(record) for record in records])


def test_every_printed_number_is_in_a_table():
    found = [tables.paper_table(name, []) for name in ("table1", "table2", "table3")]
    assert [len(table.rows) for table in found] == [5, 18, 24]
    top1 = [[c.title for c in table.columns].index("paper", table.keys + 3) for table in found]
    shown = [float(row[i].text) for table, i in zip(found, top1, strict=True) for row in table.rows]
    assert sorted(shown) == sorted(cell.paper["top1"] for cell in CELLS if cell.paper)
    for table in found:
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert {row[table.keys + 1].text for row in table.rows} == {"not measured"}
        assert all(row[table.keys + 1].missing and row[table.keys + 2].missing for row in table.rows)


def test_a_row_by_hand():
    records = [made_record(CMCL, seed, top1=top1, oracle=2.8) for seed, top1 in ((0, 8.0), (1, 9.0))]
    table = table3(*records, made_record(IE, top1=10.24, oracle=3.88))
    row = row_of(table, "ResNet-20", "CIFAR-10", "CMCL")
    assert texts(row[3:]) == ["2.79", "2.80 ± 0.00", "+0.01", "8.75", "8.50 ± 0.71", "−0.25", "2"]
    assert [value.sort for value in row[3:]] == pytest.approx([2.79, 2.8, 0.01, 8.75, 8.5, -0.25, 2])
    assert (row[4].mark, row[7].mark) == (None, None), "one run of IE alone"
    assert row[7].link == CMCL
    single = row_of(table, "ResNet-20", "CIFAR-10", "single network (mean of IE's members)")
    assert texts(single[3:6]) == ["14.03", "14.24", "+0.21"], "the mean of IE's members"


def test_marks_give_the_side_of_ie():
    # two runs each with a standard deviation of 0.14: Welch's t-test, 0.61 points are significant at 5 %
    ie = [made_record(IE, seed, top1=10.0 + seed / 5) for seed in (0, 1)]
    for top1, mark in ((9.0, "same"), (9.8, "near"), (10.2, "near"), (11.2, "other")):
        table = table3(*ie, *(made_record(CMCL, seed, top1=top1 + seed / 5) for seed in (0, 1)))
        assert row_of(table, "ResNet-20", "CIFAR-10", "CMCL")[7].mark == mark, top1
        for method in ("IE", "single network (mean of IE's members)"):
            assert row_of(table, "ResNet-20", "CIFAR-10", method)[7].mark is None, "nothing to compare"
    for others in ([], ie[:1]):
        alone = table3(*others, *twice(CMCL, top1=9.0))
        assert row_of(alone, "ResNet-20", "CIFAR-10", "CMCL")[7].mark is None


def test_worse_than_the_paper_is_marked():
    for top1, worse in ((9.24, False), (9.26, True), (5.0, False)):  # the paper has 8.75
        table = table3(*twice(IE, top1=12.0), *twice(CMCL, top1=top1, oracle=50.0))
        row = row_of(table, "ResNet-20", "CIFAR-10", "CMCL")
        assert (row[4].worse, row[7].worse) == (False, worse), "of top-1 only"
        assert ("▲" in markdown.markdown(table).split("CIFAR-10 | CMCL")[-1].splitlines()[0]) is worse


def test_a_legend_explains_the_marks_of_its_table_only():
    plain, marked = tables.Value("8.84"), tables.Value("8.84 ± 0.10", mark="same")
    assert tables.legend([[plain]]) == "n: runs with different seeds."
    assert tables.legend([[tables.Value("9.40", worse=True)]]).startswith("▲: worse than the paper")
    text = tables.legend([[plain], [marked]])
    assert [sign in text for sign in "✓≈▲"] == [True, True, False]
    assert text.endswith("Mean ± standard deviation over n runs with different seeds.")


def test_errors_in_percent():
    record = made_record("digits-ie", top1=3.0, oracle=1.0, picked=2.0)
    assert record.scores == {"top1": 3.0, "picked": 2.0, "oracle": 1.0, "member": 7.0, "ece": 2.5}
    assert texts(run_table(record).rows[0])[1:6] == ["3.00", "2.00", "1.00", "7.00", "2.50"]


def test_the_ece_after_temperature_scaling_where_it_is_known():
    def scaled(name, seed, ece):
        record = made_record(name, seed)
        return changed(record, calibration=record.calibration | {"temperature": 0.5, "scaled_ece": ece})

    assert "Scaled ECE" not in markdown.markdown(run_table(*twice("digits-ie")))
    known = [scaled("digits-ie", seed, 1.0 + 2 * seed) for seed in (0, 1)]
    table = run_table(*known, scaled("digits-cmcl", 0, 0.5), made_record("digits-cmcl", 1))
    assert [column.title for column in table.columns][5:7] == ["ECE", "Scaled ECE"]
    assert "after temperature scaling" in table.note
    assert [row[6].text for row in table.rows] == ["2.00 ± 1.41", "1.00", "3.00", "–", "0.50", "–"]
    assert summed(*known, scaled("digits-cmcl", 0, 0.5))[0].endswith(
        " and an ECE of 2.50 against 2.50 %, 0.50 against 2.00 % after temperature scaling."
    )
    assert summed(*known, made_record("digits-cmcl"))[0].endswith(" and an ECE of 2.50 against 2.50 %.")


def test_seeds_have_their_mean_before_them():
    runs = [made_record("digits-ie", seed, top1=2.0 + 2 * seed, oracle=1.0) for seed in (0, 1)]
    partial = [made_record("digits-mcl", seed, full_length=False) for seed in (0, 1)]
    rows = run_table(*runs, *partial, made_record("digits-cmcl")).rows
    assert [row[0].text.split(":")[-1] for row in rows].count(" mean") == 1
    assert {len(row) for row in rows} == {len(run_table(*runs).columns)}
    assert texts(rows[1])[6:9] == ["IE", "digits", "0"]
    assert texts(rows[0])[:4] == ["digits-ie: mean", "3.00 ± 1.41", "3.00 ± 1.41", "1.00 ± 0.00"]
    assert "n = 2" in texts(rows[0])
    assert rows[3][0].text == "digits-mcl (partial)"
    many = [changed(made_record("digits-ie", seed), name=f"ie-{seed}") for seed in range(5)]
    assert texts(run_table(*many).rows[0])[0] == "ie-0 to ie-4: mean"


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
    assert len(run_table(one, other).rows) == 3
    assert len(run_table(one, changed(other, **changes)).rows) == 2


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
    assert len(run_table(*own).rows) == (3 if alike else 2)


def test_the_summary_compares_cmcl_with_its_baseline():
    ie, cmcl = (
        made_record("digits-ie", top1=4.0, oracle=1.0),
        made_record("digits-cmcl", top1=3.0, oracle=0.5),
    )
    single = made_record("digits-single", top1=5.0, oracle=5.0)
    assert summed(ie, made_record("digits-mcl", top1=70.0), cmcl, single) == [
        "CMCL and IE on digits have a top-1 error of 3.00 against 4.00 %: 25.0 % lower (n = 1 and 1, z-test over "
        "10,000 examples, p < 0.001), an oracle error of 0.50 against 1.00 % and an ECE of 2.50 against 2.50 %."
    ]
    assert summed(cmcl, single)[0].startswith(
        "CMCL and single network on digits have a top-1 error of 3.00 ag"
    )
    assert summed(cmcl) == [
        "CMCL on digits has a top-1 error of 3.00 % (n = 1), an oracle error of 0.50 % and an ECE of 2.50 %."
    ]
    assert summed(ie) == []
    assert summed(changed(cmcl, full_length=False), ie) == [], "complete runs only"
    stronger = changed(
        ie, name="tuned", recipe_hash="f" * 16, errors=made_record("digits-ie", top1=3.5).errors
    )
    assert "3.00 against 3.50 %" in summed(ie, cmcl, stronger)[0]


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
    assert ("IE" in summed(cmcl, ie)[0]) is compared


def test_the_summary_of_the_paper():
    assert "not measured yet" in paper_summary([])[0]
    (found,) = paper_summary([made_record(CMCL, top1=9.0), made_record(IE, top1=10.0)])
    assert found.startswith(
        "CMCL and IE on CIFAR-10 with five ResNet-20 have a top-1 error of 9.00 against 10.00"
    )
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
    row = row_of(table3(made_record(CMCL, full_length=False)), "ResNet-20", "CIFAR-10", "CMCL")
    assert (row[4].text, row[4].missing) == ("1 partial", True)
    row = row_of(table3(made_record(CMCL, top1=8.7499, oracle=2.79)), "ResNet-20", "CIFAR-10", "CMCL")
    assert row[8].text == "0.00"


def test_headline():
    """With the small CNN, where CMCL alone is worse than IE, and IE with adversarial training."""
    svhn = made_record("svhn-resnet20-ie", top1=4.79)
    small = [
        made_record("cifar10-cnn-cmcl", top1=16.04),
        made_record("cifar10-cnn-ie-adversarial", top1=14.99),
    ]
    text = markdown.headline([made_record(CMCL, top1=8.84), made_record(IE, top1=10.24), svhn, *small])
    lines = text.splitlines()
    assert lines[0].startswith("| Network | Method | CIFAR-10: paper | CIFAR-10: ours | CIFAR-10: n |")
    single = "single network (mean of IE's members)"
    assert lines[2] == f"| ResNet-20 | {single} | 14.03 | 14.24 | 1 | 5.31 | 8.79 ▲ | 1 |"
    assert lines[5] == "| ResNet-20 | CMCL | 8.75 | 8.84 | 1 | 3.68 | not measured | 0 |"
    assert "| small CNN | CMCL | 15.65 | 16.04 | 1 | – | – | – |" in lines
    assert "| small CNN | IE + adversarial training | – | 14.99 | 1 | – | – | – |" in lines
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
    assert text.startswith("before\n<!-- cmcl:headline -->\n| Network | Method |")
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
