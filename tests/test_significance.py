"""The p-value of a difference of two errors, against hand-worked numbers and scipy's own tests."""

import pytest
from scipy import stats

from cmcl.reproduction.significance import LEVEL, p_value, significant


def spread(mean, std=None, n=1):
    return {"mean": mean, "std": std, "n": n}


def test_two_proportions():
    """10 and 9 % of 10,000 images, pooled 9.5 %: the standard error of the difference is 0.4147 points."""
    assert p_value(spread(10.0), spread(9.0), 10_000) == pytest.approx(0.01588, rel=1e-3)
    ones = stats.chi2_contingency([[1000, 9000], [900, 9100]], correction=False)
    assert p_value(spread(10.0), spread(9.0), 10_000) == pytest.approx(ones.pvalue, rel=1e-6)


@pytest.mark.parametrize(
    ("mine", "other", "examples", "expected"),
    [
        (spread(8.0), spread(8.76), 10_000, False),  # 1.96 standard errors of 0.393 are 0.770 points
        (spread(8.0), spread(8.78), 10_000, True),
        (spread(0.0), spread(200 / 359), 359, False),  # two images
        (spread(0.0), spread(1200 / 359), 359, True),
        (spread(8.0, 2.0, 4), spread(10.0, 2.0, 4), 10_000, False),  # the seeds alone: sqrt(4/4 + 4/4)
        (spread(8.0, 2.0, 4), spread(11.0, 2.0, 4), 10_000, True),
        (spread(8.0), spread(10.2, 1.0, 4), 10_000, False),  # one run varies as the others do: 1 + 1/4
        (spread(8.0), spread(10.5, 1.0, 4), 10_000, True),
        (spread(0.0), spread(0.0), 100, False),
        (spread(5.0, 0.0, 2), spread(6.0, 0.0, 2), None, True),
    ],
)
def test_by_hand(mine, other, examples, expected):
    assert significant(mine, other, examples) is expected
    assert significant(other, mine, examples) is expected


def test_pixels_count_by_their_seeds_alone():
    a, b = [8.0, 9.0, 8.2, 8.9], [11.0, 12.5, 10.1, 11.7]
    sides = [spread(sum(x) / 4, stats.tstd(x), 4) for x in (a, b)]
    assert p_value(*sides, None) == pytest.approx(stats.ttest_ind(a, b).pvalue, rel=1e-9)


def test_one_run_of_a_segmentation_says_nothing():
    for other in (spread(60.0), spread(60.0, 0.1, 5)):
        assert p_value(spread(9.14), other, None) is None
        assert not significant(spread(9.14), other, None)
    assert LEVEL == 0.05
