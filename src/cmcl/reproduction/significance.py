"""Whether two mean errors differ significantly: the one test behind the report, the tables and the claims."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from scipy import stats

LEVEL = 0.05  # a difference with a larger p-value is not significant


def p_value(mine: Mapping[str, Any], other: Mapping[str, Any], examples: int | None) -> float | None:
    """The two-sided p-value of the difference of two mean errors; None if one run each says nothing.

    The variance of a mean is that of the seeds, std²/n, plus that of the test examples, p(1 - p)/examples
    with the pooled p. Both methods are tested on the same examples, so the test is conservative.

    Args:
        mine: {"mean", "std", "n"}, in percent; std is None for one run, which then takes the other's.
        other: the same.
        examples: in the test set, if they err independently. None for pixels, which do not: then only the
            seeds measure the variance (Student's t), and both sides need two runs.
    """
    known = [side["std"] for side in (mine, other) if side["std"] is not None]
    if examples is None and len(known) < 2:
        return None
    pooled = (mine["mean"] + other["mean"]) / 200
    variance = 2 * 100**2 * pooled * (1 - pooled) / examples if examples else 0.0
    for side in (mine, other):
        std = side["std"] if side["std"] is not None else (known or [0.0])[0]
        variance += std**2 / side["n"]
    difference = abs(mine["mean"] - other["mean"])
    if variance == 0 or difference == 0:
        return 1.0 if difference == 0 else 0.0
    ratio = difference / sqrt(variance)
    tail = stats.norm.sf(ratio) if examples else stats.t.sf(ratio, mine["n"] + other["n"] - 2)
    return float(2 * tail)


def significant(mine: Mapping[str, Any], other: Mapping[str, Any], examples: int | None) -> bool:
    """Whether the difference has a p-value below `LEVEL`."""
    found = p_value(mine, other, examples)
    return found is not None and found < LEVEL
