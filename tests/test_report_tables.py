"""The paper's tables with ours beside them, in words, in Markdown and in documents."""

import shutil
from pathlib import Path

import pytest

from cmcl.report import documents, markdown, story, tables
from cmcl.report.comparing import of_runs
from cmcl.reproduction import CELLS, claims, significance
from cmcl.reproduction.cells import Evidence
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
    assert (row[4].mark, row[7].mark) == (None, None), "one run of IE alone"
    assert row[7].link == CMCL
    single = row_of(table, "ResNet-20", "CIFAR-10", "single network")
    assert texts(single[3:6]) == ["14.03", "14.24", "+0.21"], "the mean of IE's members"


def twice(name, **values):
    return [made_record(name, seed, **values) for seed in (0, 1)]


def test_marks_tell_the_side_of_ie():
    ie = [made_record(IE, seed, top1=9.8 + seed / 5) for seed in range(3)]  # mean 10, standard deviation 0.2
    for top1, mark in ((9.0, "same"), (9.7, "near"), (10.0, "near"), (10.4, "near"), (11.0, "other")):
        cmcl = [made_record(CMCL, seed, top1=top1 + seed / 5 - 0.2) for seed in range(3)]
        table = tables.paper_tables([*ie, *cmcl])[2]
        assert row_of(table, "ResNet-20", "CIFAR-10", "CMCL")[7].mark == mark, top1
        assert row_of(table, "ResNet-20", "CIFAR-10", "IE")[7].mark is None, "it is what others meet"
        assert row_of(table, "ResNet-20", "CIFAR-10", "single network")[7].mark is None, "IE's own members"
    alone = tables.paper_tables([*twice(CMCL, top1=9.0)])[2]
    assert row_of(alone, "ResNet-20", "CIFAR-10", "CMCL")[7].mark is None, "nothing to compare with"
    once = tables.paper_tables([made_record(IE, top1=10.0), *twice(CMCL, top1=2.0)])[2]
    assert row_of(once, "ResNet-20", "CIFAR-10", "CMCL")[7].mark is None, "one run may be chance"


def test_worse_than_the_paper_is_marked_as_worse():
    for top1, worse in ((9.24, False), (9.26, True), (5.0, False)):  # the paper has 8.75
        table = tables.paper_tables([*twice(IE, top1=12.0), *twice(CMCL, top1=top1, oracle=50.0)])[2]
        row = row_of(table, "ResNet-20", "CIFAR-10", "CMCL")
        assert (row[4].worse, row[7].worse) == (False, worse), "of top-1 only"
        assert ("▲" in markdown._marked(row[7])) is worse
    assert row_of(table, "ResNet-20", "CIFAR-10", "single network")[7].worse, "14.03 there, 16 here"


def test_a_legend_tells_what_stands_in_the_table_and_no_more():
    plain, marked = tables.Value("8.84"), tables.Value("8.84 ± 0.10", mark="same")
    assert tables.legend([[plain]]) == "n: runs with different seeds."
    assert tables.legend([[tables.Value("9.40", worse=True)]]).startswith("▲: worse than the paper")
    text = tables.legend([[plain], [marked]])
    assert "✓" in text
    assert "≈" in text
    assert "▲" not in text
    assert text.endswith("Mean ± standard deviation over n runs with different seeds.")


def test_the_title_claims_no_more_than_was_measured():
    def title(records):
        return story.title(Evidence.of(records))

    assert title([]).endswith(": nothing measured yet")
    assert title([made_record(CMCL)]).endswith(": 1 of 47 cells measured again")
    assert title(whole_paper(1)).endswith("learning, measured again")
    assert "reproduced" not in title(whole_paper(1))


def test_seeds_have_their_mean_before_them():
    runs = [made_record("digits-ie", seed, top1=2.0 + 2 * seed, oracle=1.0) for seed in (0, 1)]
    partial = [changed(made_record("digits-mcl", seed), full_length=False) for seed in (0, 1)]
    rows = tables.summary_table([*runs, *partial, made_record("digits-cmcl")]).rows
    assert [row[0].text.split(":")[-1] for row in rows].count(" mean") == 1
    assert texts(rows[0])[:3] == ["digits-ie: mean", "3.00 ± 1.41", "1.00 ± 0.00"]
    assert "n = 2" in texts(rows[0])
    many = [changed(made_record("digits-ie", seed), name=f"ie-{seed}") for seed in range(5)]
    assert texts(tables.summary_table(many).rows[0])[0] == "ie-0 to ie-4: mean"


def test_only_like_runs_have_a_mean_and_each_seed_counts_once():
    one, two = (made_record("digits-ie", seed, top1=2.0 + 2 * seed) for seed in (0, 1))
    elsewhere = changed(two, name="another-folder")
    (mean, *_) = tables.summary_table([one, elsewhere, one]).rows
    assert texts(mean)[:2] == ["digits-ie, another-folder: mean", "3.00 ± 1.41"]
    unlike = ({"task": "smooth"}, {"test_examples": 7}, {"full_length": False})
    for other in (changed(two, **changes) for changes in unlike):
        rows = tables.summary_table([one, other]).rows
        assert len(rows) == 2, "no mean"
    assert "(n = 2)" in of_runs([one, two, one])[0]


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (("mine-seed0", "mine-seed1"), True),
        (("mine_0", "mine_1"), True),
        (("mine-seed00", "mine-seed01"), True),
        (("mine.0", "mine.1"), True),
        (("plain-seed0", "balanced-seed1"), False),
        (("k-3", "k-4"), False),
        (("mine-lr1.0", "mine-lr0.1"), False),
        (("mine-10", "mine-1"), False),
    ],
)
def test_loops_of_ones_own_are_repeats_if_called_alike(names, alike):
    """What else they did no record tells, unless `fit` ran them."""
    own = [made_record("digits-ie", seed) for seed in (0, 1)]
    own = [
        changed(record, name=name, checksums={"test": record.checksums["test"]})
        for record, name in zip(own, names, strict=True)
    ]
    assert len(tables.summary_table(own).rows) == (3 if alike else 2)
    by_fit = [changed(record, trained_on="1,438 examples") for record in own]
    assert len(tables.summary_table(by_fit).rows) == 3


def test_a_seed_that_comes_twice_under_two_names_is_two_things():
    """Trained on other images, say, which no record tells; neither may vanish, nor be the other's repeat."""
    one, other = (changed(made_record("digits-ie", top1=top1), name=f"own{top1:g}") for top1 in (2.0, 4.0))
    rows = tables.summary_table([one, other]).rows
    assert [row[0].text for row in rows] == ["own2", "own4"]
    assert of_runs([one, other]) == [
        "On digits, of the test images: own2 errs on 2.00 %; own4 errs on 4.00 %."
    ]


def test_a_table_tells_where_its_numbers_come_from():
    ie, cmcl = (f"cifar10-resnet20-{method}" for method in ("ie", "cmcl"))
    here = {"device": "cpu", "precision": "float32", "versions": {"torch": "2.13.0"}, "commit": "a" * 40}
    there = here | {"device": "NVIDIA H200", "precision": "bf16", "commit": None}
    assert story.made_on([]) == ""
    assert story.made_on([made_record(ie, **here)] * 2) == (
        "Trained on cpu (float32, torch 2.13.0), commit aaaaaaa."
    )
    both = [made_record(ie, **here), made_record(cmcl, **there, resumed_with=[{"step": 0}, {"step": 5}])]
    assert story.made_on(both) == (
        "Trained on cpu (float32, torch 2.13.0) and NVIDIA H200 (bf16, torch 2.13.0), commits aaaaaaa and "
        "unknown. 1 of the 2 runs was resumed with another machine, version or commit; the record has the "
        "stretches."
    )
    for text in (markdown.headline(both), markdown.paper_markdown(3, both)):
        assert text.endswith(story.made_on(both))
    assert "Trained on" not in markdown.paper_markdown(1, both)  # nothing of it is measured


def test_own_data_have_a_name():
    record = made_record("digits-ie")
    own = changed(record, recipe={**record.recipe, "data": None})
    assert "own data" in texts(tables.summary_table([own]).rows[0])
    assert of_runs([own]) == [
        "On own data, an independent ensemble (IE) errs on 10.00 % of the test examples."
    ]


def test_partial_runs_are_named_so():
    short = changed(made_record(CMCL), full_length=False)
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
    svhn = made_record("svhn-resnet20-ie", top1=4.79)
    text = markdown.headline([made_record(CMCL, top1=8.84), made_record(IE, top1=10.24), svhn])
    lines = text.splitlines()
    assert lines[0].startswith("| Method | CIFAR-10: paper | CIFAR-10: ours | CIFAR-10: n |")
    assert lines[2] == "| single network | 14.03 | 14.24 | 1 | 5.31 | 8.79 ▲ | 1 |"
    assert lines[5] == "| CMCL | 8.75 | 8.84 | 1 | 3.68 | not measured | 0 |"


def test_markdown_keeps_foreign_signs_apart():
    table = tables.Table("t", "c", [tables.Column("a|b")], [[tables.Value("<b>x</b> | `y`\n*z*")]])
    assert markdown.markdown(table).splitlines()[2] == r"| \<b\>x\</b\> \| \`y\` \*z\* |"


def test_sentences_are_computed():
    assert "is not measured yet" in story.of_the_paper([])
    better = story.of_the_paper([made_record(CMCL, top1=9.0), made_record(IE, top1=10.0)])
    assert (
        "make 10.0 % fewer errors on CIFAR-10 (9.00 against 10.00 %, n = 1 and 1, z-test over 10,000 "
        "examples, p = 0.016; paper: 14.05 % fewer)." in better
    )
    worse = story.of_the_paper([made_record(CMCL, top1=11.0), made_record(IE, top1=10.0)])
    assert "make 10.0 % more errors on CIFAR-10" in worse
    several = story.of_the_paper(
        [*twice(CMCL, top1=9.8), *twice(IE, top1=10.0), made_record(IE, 2, top1=10.0)]
    )
    assert "(9.80 ± 0.00 against 10.00 ± 0.00 %, n = 2 and 3, Welch's t-test" in several
    everything = whole_paper(1)
    assert story.how_far(everything, judge(everything)).startswith("47 of the 47 cells")
    assert story.how_far([], judge([])).startswith("0 of the 47 cells")


def test_sentences_of_runs():
    runs = [
        made_record("digits-ie", top1=4.0, oracle=1.0),
        made_record("digits-ie", 1, top1=4.0, oracle=1.0),
        made_record("digits-mcl", top1=70.0, oracle=0.5),
        made_record("digits-cmcl", top1=3.0, oracle=1.0),
        made_record("digits-cmcl", 1, top1=3.1, oracle=1.0),
        made_record("shapes-ie", top1=5.0, classes=2),
    ]
    digits, more, shapes = of_runs(runs)
    assert f"{digits} {more}" == (
        "On digits, CMCL errs on 3.05 ± 0.07 % (n = 2) of the test images, an independent ensemble (IE) on "
        "4.00 ± 0.00 % (n = 2): 23.8 % fewer errors. Multiple choice learning (MCL) errs on 70.00 %, although MCL's best "
        "member for each image errs on 0.50 % only."
    )
    assert shapes == "On shapes, an independent ensemble (IE) errs on 5.00 % of the pixels."


def test_small_differences_are_called_noise():
    def demo(single, cmcl, ie):
        errors = {"digits-single": single, "digits-cmcl": cmcl, "digits-ie": ie}
        return " ".join(of_runs([made_record(n, top1=e, test_examples=359) for n, e in errors.items()]))

    assert demo(3.06, 3.34, 3.62) == (
        "On digits, CMCL errs on 3.34 % of the test images, an independent ensemble (IE) on 3.62 %: a "
        "difference within the noise of 359 test images and one run each. A single network errs on 3.06 % "
        "(within the noise of CMCL's). One of the 359 test images is 0.28 %."
    )
    clear = demo(20.0, 3.0, 12.0)
    assert "on 12.00 %: 75.0 % fewer errors (one run each). A single network errs on 20.00 %." in clear
    assert "on 3.00 %: 300.0 % more errors (one run each)." in demo(20.0, 12.0, 3.0)


def test_one_run_of_a_segmentation_tells_nothing():
    def told(seeds_of_ie, cmcl, ie):
        runs = [made_record("shapes-cmcl", top1=cmcl, classes=2)]
        runs += [made_record("shapes-ie", s, top1=ie + s / 10, classes=2) for s in range(seeds_of_ie)]
        return of_runs([*runs, made_record("shapes-mcl", top1=8.0, classes=2)])[:2]

    assert told(1, 5.63, 6.34) == [
        "On shapes, CMCL errs on 5.63 % of the pixels, an independent ensemble (IE) on 6.34 %: a difference "
        "that may be chance; with one run each of a segmentation nobody can tell.",
        "Multiple choice learning (MCL) errs on 8.00 % (noise not known).",
    ]
    both = [
        made_record(f"shapes-{m}", s, top1=e, classes=2) for m, e in (("ie", 6), ("cmcl", 5)) for s in (0, 1)
    ]
    assert of_runs(both)[0].endswith(": 16.7 % fewer errors.")


def test_what_cannot_be_told_is_counted():
    runs = [
        made_record(f"{d}-resnet20-{m}", top1=e)
        for d in ("cifar10", "svhn")
        for m, e in (("ie", 9.0), ("cmcl", 9.1))
    ]
    told = story.how_far(runs, judge(runs))
    assert "1 held up, 0 did not, 1 inconclusive, 6 are not yet measured" in told


def test_only_like_runs_are_compared():
    whole = [made_record("digits-ie", top1=4.0), made_record("digits-cmcl", top1=3.0)]
    short = [changed(made_record("digits-cmcl", s, top1=30.0), full_length=False, steps=60) for s in (0, 1)]
    first, last = of_runs([*whole, *short])
    assert first == of_runs(whole)[0], "partial runs change nothing"
    assert last == "On digits: 2 partial runs are in the table only, and not compared."
    assert of_runs(short) == ["On digits, there are partial runs only, which are not compared."]
    longer = changed(made_record("digits-cmcl", top1=1.0), steps=999)
    apart = of_runs([*whole, longer])
    assert apart[0].startswith("On digits with 5 small CNN (100 steps), CMCL errs on 3.00 %")
    assert apart[1] == "On digits with 5 small CNN (999 steps), CMCL errs on 1.00 % of the test images."
    other = changed(longer, steps=100, checksums={"test": "other"})
    assert len(of_runs([*whole, other])) == 2


def test_no_superlative_and_no_mean_over_recipes():
    alone = of_runs([made_record("digits-cmcl", seed, top1=3.0 + seed % 2) for seed in range(30)])
    assert alone == ["On digits, CMCL errs on 3.50 ± 0.51 % (n = 30) of the test images."]
    one, ie = made_record("digits-cmcl", top1=3.0), made_record("digits-ie", top1=5.0)
    other = made_record("digits-cmcl", top1=9.0, oracle=1.0, recipe_hash="f" * 16)
    other = changed(other, name="mine")
    assert of_runs([one, other, ie]) == [
        "On digits, of the test images: digits-cmcl errs on 3.00 %, beside IE 40.0 % fewer errors (one run "
        "each); mine errs on 9.00 %, beside IE 80.0 % more errors (one run each); an independent ensemble (IE) "
        "errs on 5.00 %."
    ]
    assert "beside" not in of_runs([one, other])[0]
    near = changed(made_record("digits-cmcl", top1=4.9, oracle=1.0, recipe_hash="f" * 16), name="mine")
    assert "mine errs on 4.90 %, beside IE a difference within the noise" in of_runs([one, near, ie])[0]


def test_no_calibration_of_several_recipes_together():
    def calibrated(name, confidence):
        bins = {"count": [100], "confidence": [confidence], "accuracy": [97.0]}
        calibration = {"ece": 97.0 - confidence, "risk_coverage": [1.0], "reliability": bins}
        record = made_record("digits-cmcl", calibration=calibration, recipe_hash=name)
        return record.model_copy(update={"name": name})

    both = [made_record("digits-ie", recipe_hash=name) for name in ("one", "other")]
    assert "IE's" not in of_runs([calibrated("digits-cmcl", 60.0), *both])[-1]
    told = of_runs([calibrated("digits-cmcl", 60.0), calibrated("mine", 20.0)])[-1]
    assert told.startswith("On digits, digits-cmcl: CMCL's averaged answer is too modest: 60.0 % sure")


def test_modest_answers_are_told_only_where_they_are():
    def calibrated(confidence, accuracy, ece):
        bins = {"count": [0, 100], "confidence": [None, confidence], "accuracy": [None, accuracy]}
        calibration = {"ece": ece, "risk_coverage": [1.0], "reliability": bins}
        return [made_record("digits-cmcl", calibration=calibration), made_record("digits-ie")]

    told = of_runs(calibrated(60.0, 97.0, 37.0))[1]
    assert told.startswith(
        "On digits, CMCL's averaged answer is too modest: 60.0 % sure on average, and right in 97.0 % (its "
        "calibration error is 37.0 %, IE's 2.5 %)."
    )
    assert "cmcl.calibration.fit_temperature" in told
    for fine in ((95.0, 97.0, 2.0), (97.0, 60.0, 37.0), (90.0, 92.0, 20.0)):
        assert len(of_runs(calibrated(*fine))) == 1, fine


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
    assert markdown.headline(records) in text
    assert not documents.refresh(path, records)
    assert documents.refresh(path, [made_record(CMCL, top1=8.5)], check=True), "other records, stale document"


@pytest.mark.parametrize("name", documents.REGIONS)
def test_every_region_can_be_filled(name):
    region = f"<!-- cmcl:{name} -->\n<!-- cmcl:end -->\n"
    once = documents.filled(region, [made_record(CMCL)])
    assert len(once) > len(region) + 40
    assert documents.filled(once, [made_record(CMCL)]) == once
    assert documents.filled(region + region, []).count("<!-- cmcl:end -->") == 2


def test_regions_of_another_word_stay():
    text = "<!-- a:x -->\nold\n<!-- a:end -->\n<!-- b:x -->\nold\n<!-- b:end -->\n"
    assert documents.fill(text, "a", {"x": lambda: "new"}) == text.replace("old", "new", 1)


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
    assert f"changes by less than {claims.FLAT:g} %, up or down" in text
    for mark in (*tables.MARKS.values(), tables.WORSE):
        assert mark in text
    assert f"more than {tables.MUCH:g} points" in text
    assert f"p-value is below {significance.LEVEL:g}" in text
    assert f"closes {100 * claims.REPAIRED:.0f} %" in text
    assert f"at most {claims.ALMOST:g} times" in text
    assert claims.LONG == 120
    assert "two minutes or more" in text
    assert f"{claims.SPECIAL:g} points or more" in text
    assert f"{claims.ALIKE:g} or fewer" in text
    assert (claims.LOW, claims.HIGH) == (1 / 3, 2 / 3)
    for region in documents.REGIONS:
        assert f"`{region}`" in text
