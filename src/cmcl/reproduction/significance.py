"""Whether two mean errors differ significantly: the one test behind the report, the tables and the claims."""

from collections.abc import Mapping, Sequence
from math import inf, sqrt
from typing import Any, NamedTuple

from scipy import stats

from .record import Record, spread

LEVEL = 0.05  # a difference with a larger p-value is not significant

Spread = Mapping[str, Any]  # {"mean", "std", "n"}, errors in percent; std is None for one run


class Comparison(NamedTuple):
    """The mean errors of two groups of runs, and the test of their difference."""

    mine: Spread
    other: Spread
    examples: int | None  # of the test set; None for segmentation, whose pixels are not independent

    @classmethod
    def of(cls, mine: Sequence[Record], other: Sequence[Record], key: str = "top1") -> "Comparison":
        """Compare runs by their errors in records."""
        dense = any(record.dense for record in (*mine, *other))
        examples = None if dense else min(record.test_examples for record in (*mine, *other))
        ours, theirs = (spread([record.scores[key] for record in side]) for side in (mine, other))
        return cls(ours, theirs, examples)

    @property
    def difference(self) -> float:
        """Of the mean errors, in points."""
        return float(self.mine["mean"] - self.other["mean"])

    @property
    def gain(self) -> float:
        """By how many percent the first error is lower."""
        other = self.other["mean"]
        return float(-100 * self.difference / other) if other else 0.0

    @property
    def p_value(self) -> float | None:
        """The two-sided p-value of the difference; None where no test applies.

        Welch's t-test over the seeds; Student's where one side has one run, which takes the other's variance.
        With one run each, a two-proportion z-test over the test examples.
        """
        known = self._standard_error
        if known is None or self.difference == 0:
            return None if known is None else 1.0
        error, freedom = known
        return float(2 * stats.t.sf(abs(self.difference) / error, freedom)) if error else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The confidence interval of the difference in points, which excludes 0 if it is significant."""
        if (known := self._standard_error) is None:
            return None
        error, freedom = known
        half = float(stats.t.isf(LEVEL / 2, freedom)) * error
        return self.difference - half, self.difference + half

    @property
    def _standard_error(self) -> tuple[float, float] | None:
        """Of the difference, and its degrees of freedom."""
        n, means = (self.mine["n"], self.other["n"]), (self.mine["mean"], self.other["mean"])
        if max(n) == 1:
            if self.examples is None:
                return None
            pooled = sum(means) / 200
            return 100 * sqrt(2 * pooled * (1 - pooled) / self.examples), inf
        std = self.mine["std"] or 0.0, self.other["std"] or 0.0
        if min(n) == 1:
            return max(std) * sqrt(1 / n[0] + 1 / n[1]), sum(n) - 2
        parts = [s**2 / k for s, k in zip(std, n, strict=True)]
        freedom = sum(part**2 / (k - 1) for part, k in zip(parts, n, strict=True))
        return sqrt(sum(parts)), sum(parts) ** 2 / freedom if freedom else inf

    @property
    def significant(self) -> bool:
        """Whether the p-value is below `LEVEL`."""
        return self.p_value is not None and self.p_value < LEVEL

    @property
    def test(self) -> str:
        """The numbers of runs, the test and its p-value: "n = 3 and 3, Welch's t-test, p = 0.012"."""
        n, p = (self.mine["n"], self.other["n"]), self.p_value
        if p is None:
            return f"n = {n[0]} and {n[1]}, no test"
        over_seeds = "Welch's t-test" if min(n) > 1 else "Student's t-test"
        name = over_seeds if max(n) > 1 else f"z-test over {self.examples:,} examples"
        return f"n = {n[0]} and {n[1]}, {name}, {'p < 0.001' if p < 0.001 else f'p = {p:.2g}'}"

    def __str__(self) -> str:
        """The errors, the change and the test."""
        mine, other, word = self.mine["mean"], self.other["mean"], "lower" if self.gain >= 0 else "higher"
        return f"{mine:.2f} against {other:.2f} %: {abs(self.gain):.1f} % {word} ({self.test})"
