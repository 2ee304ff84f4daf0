"""The paper's tables with ours beside them, in words, in Markdown and in documents."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cmcl.experiments import CELLS, claims
from cmcl.experiments.claims import judge
from cmcl.experiments.records import load_records
from cmcl.report import documents, story, tables
from report_samples import made_record, whole_paper

ROOT = Path(__file__).parents[1]
IE, CMCL = "cifar10-resnet20-ie", "cifar10-resnet20-cmcl"


def row_of(table, *keys):
    (found,) = [row for row in table.rows if [value.text for value in row[: table.keys]] == list(keys)]
    return found


def texts(row):
    return [value.text for value in row]


def test_every_printed_number_is_in_a_table():
    found = tables.paper_tables([])
    assert [len(table.rows) for table in found] == [5, 18, 24]
    printed = sorted(cell.paper["top1"] for cell in CELLS if cell.paper)
    top1 = [[c.title for c in table.columns].index("paper", table.keys + 3) for table in found]
    shown = [float(row[i].text) for table, i in zip(found, top1, strict=True) for row in table.rows]
    assert sorted(shown) == printed
    for table in found:
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert {row[table.keys + 1].text for row in table.rows} == {"not measured"}


def test_a_row_by_hand():
    records = [made_record(CMCL, seed, top1=top1, oracle=2.8) for seed, top1 in ((0, 8.0), (1, 9.0))]
    records.append(made_record(IE, top1=10.24, oracle=3.88))
    table = tables.paper_tables(records)[2]
    row = row_of(table, "ResNet-20", "CIFAR-10", "CMCL")
    assert texts(row[3:]) == ["2.79", "2.80 ± 0.00", "+0.01", "8.75", "8.50 ± 0.71", "−0.25", "2"]
    assert row[4].agrees
    assert row[7].agrees
    assert row[7].link == CMCL
    assert row_of(table, "ResNet-20", "CIFAR-10", "IE")[7].agrees is None, (
        "it is what others are compared with"
    )
    single = row_of(table, "ResNet-20", "CIFAR-10", "single network")
    assert texts(single[3:6]) == ["14.03", "14.24", "+0.21"], "the mean of IE's members"
    assert single[7].agrees


def test_marks_tell_the_side_of_ie():
    ie = made_record(IE, top1=10.0, oracle=4.0)
    for top1, agrees in ((9.0, True), (11.0, False), (10.0, False)):
        table = tables.paper_tables([ie, made_record(CMCL, top1=top1)])[2]
        assert row_of(table, "ResNet-20", "CIFAR-10", "CMCL")[7].agrees is agrees
    alone = tables.paper_tables([made_record(CMCL, top1=9.0)])[2]
    assert row_of(alone, "ResNet-20", "CIFAR-10", "CMCL")[7].agrees is None, "nothing to compare with"


def test_partial_runs_are_named_so():
    short = replace(made_record(CMCL), full_length=False)
    row = row_of(tables.paper_tables([short])[2], "ResNet-20", "CIFAR-10", "CMCL")
    assert row[4].text == "1 partial"
    assert row[4].missing
    summary = tables.summary_table([short])
    assert summary.rows[0][0].text == f"{CMCL} (partial)"


def test_no_negative_zero():
    row = row_of(
        tables.paper_tables([made_record(CMCL, top1=8.7499, oracle=2.79)])[2], "ResNet-20", "CIFAR-10", "CMCL"
    )
    assert row[8].text == "0.00"


def test_headline():
    text = tables.headline([made_record(CMCL, top1=8.84), made_record(IE, top1=10.24)])
    lines = text.splitlines()
    assert lines[0].startswith("| Method | CIFAR-10: paper | CIFAR-10: ours | CIFAR-10: n |")
    assert lines[2] == "| single network | 14.03 | 14.24 ✓ | 1 | 5.31 | not measured | 0 |"
    assert lines[5] == "| CMCL | 8.75 | 8.84 ✓ | 1 | 3.68 | not measured | 0 |"


def test_markdown_keeps_foreign_signs_apart():
    table = tables.Table("t", "c", [tables.Column("a|b")], [[tables.Value("<b>x</b> | `y`\n*z*")]])
    assert tables.markdown(table).splitlines()[2] == r"| \<b\>x\</b\> \| \`y\` \*z\* |"


def test_sentences_are_computed():
    assert "is not measured yet" in story.of_the_paper([])
    better = story.of_the_paper([made_record(CMCL, top1=9.0), made_record(IE, top1=10.0)])
    assert "make 10.0 % fewer errors on CIFAR-10 (9.00 against 10.00 %; paper: 14.05 % fewer)." in better
    worse = story.of_the_paper([made_record(CMCL, top1=11.0), made_record(IE, top1=10.0)])
    assert "make 10.0 % more errors on CIFAR-10" in worse
    everything = whole_paper(1)
    assert story.how_far(everything, judge(everything)).startswith("47 of the 47 cells")
    assert story.how_far([], judge([])).startswith("0 of the 47 cells")


def test_sentences_of_runs():
    runs = [
        made_record("digits-ie", top1=4.0, oracle=1.0),
        made_record("digits-mcl", top1=70.0, oracle=0.5),
        made_record("digits-cmcl", top1=3.0, oracle=1.0),
        made_record("digits-cmcl", 1, top1=3.5, oracle=1.0),
        made_record("shapes-ie", top1=5.0, classes=2),
    ]
    digits, shapes = story.of_runs(runs)
    assert digits == (
        "On digits, CMCL errs least, on 3.25 % of the test images; IE 4.00 % and MCL 70.00 %, although MCL's "
        "best member for each image errs on 0.50 % only."
    )
    small = story.of_runs([made_record("digits-ie", top1=4.0, test_examples=400)])
    assert small[0].endswith("on 4.00 % of the test images. One of the 400 test images is 0.25 %.")
    assert shapes == "On shapes, an independent ensemble (IE) errs least, on 5.00 % of the pixels."


def test_documents_are_filled(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- cmcl:headline -->\nold\n<!-- cmcl:end -->\nafter\n")
    records = [made_record(CMCL, top1=8.84)]
    assert documents.refresh(path, records, check=True)
    assert "old" in path.read_text(), "checking writes nothing"
    assert documents.refresh(path, records)
    text = path.read_text()
    assert text.startswith("before\n<!-- cmcl:headline -->\n| Method |")
    assert text.endswith("<!-- cmcl:end -->\nafter\n")
    assert tables.headline(records) in text
    assert not documents.refresh(path, records)
    assert documents.refresh(path, [made_record(CMCL, top1=8.5)], check=True), "other records, stale document"


@pytest.mark.parametrize("name", documents.REGIONS)
def test_every_region_can_be_filled(name):
    region = f"<!-- cmcl:{name} -->\n<!-- cmcl:end -->\n"
    once = documents.filled(region, [made_record(CMCL)])
    assert len(once) > len(region) + 40
    assert documents.filled(once, [made_record(CMCL)]) == once
    assert documents.filled(region + region, []).count("<!-- cmcl:end -->") == 2


def test_mistakes_in_documents(tmp_path):
    with pytest.raises(ValueError, match="must be one of headline, .* Got 'table9'"):
        documents.filled("<!-- cmcl:table9 -->\n<!-- cmcl:end -->", [])
    with pytest.raises(ValueError, match="region table1 of the document must end with"):
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
    """After new records: `python -m cmcl.report.documents README.md docs/*.md`."""
    records = load_records(ROOT / "results")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        copy = shutil.copy(path, tmp_path)
        assert not documents.refresh(copy, records), path.name


def test_the_report_page_tells_the_rules_that_claims_are_judged_by():
    text = (ROOT / "docs" / "report.md").read_text()
    assert claims.ENOUGH == 0.5
    assert "at least half of the printed reduction" in text
    assert f"falls by less than {claims.FLAT:g} %" in text
    assert f"closes {100 * claims.REPAIRED:.0f} %" in text
    assert f"at most {claims.ALMOST:g} times" in text
    assert claims.LONG == 120
    assert "two minutes or more" in text
    assert f"{claims.SPECIAL:g} points or more" in text
    assert f"{claims.ALIKE:g} or fewer" in text
    assert (claims.SURE, claims.UNSURE) == (1 / 3, 2 / 3)
    for region in documents.REGIONS:
        assert f"`{region}`" in text
