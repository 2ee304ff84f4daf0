"""The p-value of a difference of two errors, against hand-worked numbers and scipy's own tests."""

import pytest
from scipy import stats

from cmcl.reproduction.record import spread
from cmcl.reproduction.significance import Comparison
from report_samples import made_record

A, B = [8.0, 9.0, 8.2, 8.9], [11.0, 12.5, 10.1]


def test_two_proportions():
    """10 and 9 % of 10,000 images, pooled 9.5 %: the standard error of the difference is 0.4147 points."""
    found = Comparison(spread([10.0]), spread([9.0]), 10_000).p_value
    assert found == pytest.approx(0.01588, rel=1e-3)
    ones = stats.chi2_contingency([[1000, 9000], [900, 9100]], correction=False)
    assert found == pytest.approx(ones.pvalue, rel=1e-6)


def test_seeds_are_tested_by_welch():
    for examples in (None, 10_000):
        found = Comparison(spread(A), spread(B), examples).p_value
        assert found == pytest.approx(stats.ttest_ind(A, B, equal_var=False).pvalue, rel=1e-4)


def test_one_run_beside_several_takes_their_variance():
    """Student's t: (8 - 11.2) / (s sqrt(1 + 1/3)) with the three's s and two degrees of freedom."""
    s, mean = stats.tstd(B), sum(B) / 3
    expected = 2 * stats.t.sf((mean - 8) / (s * (1 + 1 / 3) ** 0.5), df=2)
    assert Comparison(spread([8.0]), spread(B), 10_000).p_value == pytest.approx(expected, rel=1e-4)
    assert Comparison(spread(B), spread([8.0]), None).p_value == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("mine", "other", "examples", "expected"),
    [
        ([8.0], [8.76], 10_000, False),  # 1.96 standard errors of 0.393 are 0.770 points
        ([8.0], [8.78], 10_000, True),
        ([0.0], [200 / 359], 359, False),  # two images
        ([0.0], [1200 / 359], 359, True),
        ([0.0], [0.0], 100, False),
        ([5.0, 5.0], [6.0, 6.0], None, True),
        ([5.0, 5.0], [5.0, 5.0], None, False),
        ([9.14], [60.0], None, False),  # pixels of one run each
    ],
)
def test_by_hand(mine, other, examples, expected):
    assert Comparison(spread(mine), spread(other), examples).significant is expected
    assert Comparison(spread(other), spread(mine), examples).significant is expected


def test_the_change_in_percent():
    pair = Comparison(spread([9.96]), spread([10.0]), 100)
    assert pair.gain == pytest.approx(0.4)
    assert str(pair) == "9.96 against 10.00 %: 0.4 % lower (n = 1 and 1, z-test over 100 examples, p = 0.99)"
    assert "0.4 % higher" in str(Comparison(pair.other, pair.mine, 100))
    assert Comparison(pair.mine, spread([0.0]), 100).gain == 0
    assert Comparison(pair.mine, pair.mine, 100).p_value == 1
    records = [made_record("digits-ie", test_examples=n) for n in (7, 5)]
    assert Comparison.of(records[:1], records[1:]).examples == 5
    dense = made_record("shapes-ie", classes=2)
    assert Comparison.of([dense], [dense]).examples is None


def test_the_description_names_runs_test_and_p():
    assert Comparison(spread(A), spread(B), None).test.startswith("n = 4 and 3, Welch's t-test, p = 0.0")
    assert Comparison(spread([8.0]), spread(B), 10).test == "n = 1 and 3, Student's t-test, p = 0.15"
    assert (
        Comparison(spread([10.0]), spread([9.0]), 10_000).test
        == "n = 1 and 1, z-test over 10,000 examples, p = 0.016"
    )
    assert Comparison(spread([10.0]), spread([50.0]), 10_000).test.endswith("p < 0.001")
    assert Comparison(spread([10.0]), spread([9.0]), None).test == "n = 1 and 1, no test"
