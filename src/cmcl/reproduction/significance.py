"""Whether two mean errors differ significantly: the one test behind the report, the tables and the claims."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from scipy import stats

LEVEL = 0.05  # a difference with a larger p-value is not significant

Spread = Mapping[str, Any]  # {"mean", "std", "n"}, errors in percent; std is None for one run


def p_value(mine: Spread, other: Spread, examples: int | None) -> float | None:
    """The two-sided p-value of the difference of two mean errors; None where no test applies.

    Welch's t-test over the seeds; Student's where one side has one run, which takes the other's variance.
    With one run each, a two-proportion z-test over the test examples.

    Args:
        mine: mean, standard deviation and number of runs.
        other: the same.
        examples: in the test set, if they err independently. None for pixels, which do not.
    """
    a, b, n = mine["mean"], other["mean"], (mine["n"], other["n"])
    if max(n) == 1:
        return None if examples is None else _proportions(a / 100, b / 100, examples)
    std = mine["std"] or 0.0, other["std"] or 0.0
    if not any(std) or a == b:
        return float(a == b)
    return float(stats.ttest_ind_from_stats(a, std[0], n[0], b, std[1], n[1], equal_var=min(n) == 1).pvalue)


def _proportions(a: float, b: float, examples: int) -> float:
    pooled = (a + b) / 2
    if a == b:
        return 1.0
    return float(2 * stats.norm.sf(abs(a - b) / sqrt(2 * pooled * (1 - pooled) / examples)))


def significant(mine: Spread, other: Spread, examples: int | None) -> bool:
    """Whether the difference has a p-value below `LEVEL`."""
    found = p_value(mine, other, examples)
    return found is not None and found < LEVEL


def describe(mine: Spread, other: Spread, examples: int | None) -> str:
    """The numbers of runs, the test and its p-value: "n = 3 and 3, Welch's t-test, p = 0.012"."""
    n, p = (mine["n"], other["n"]), p_value(mine, other, examples)
    runs = f"n = {n[0]} and {n[1]}"
    if p is None:
        return f"{runs}, no test"
    seeds = "Welch's t-test" if min(n) > 1 else "Student's t-test"
    test = seeds if max(n) > 1 else f"z-test over {examples:,} examples"
    return f"{runs}, {test}, {'p < 0.001' if p < 0.001 else f'p = {p:.2g}'}"
