"""Whether two errors differ, or only seem to: seeds are few, and so are test examples."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from .records import Record, spread

TIMES = 2  # standard errors, or test images, that a difference must exceed
# Where seeds alone tell how large the noise is, as many as Student's t has for so few runs: by how many there
# are of both sides together, less two.
FEW = {2: 4.3, 3: 3.2, 4: 2.8, 5: 2.6, 6: 2.4, 7: 2.4, 8: 2.3, 9: 2.3, 10: 2.2}


def within_noise(mine: Mapping[str, Any], other: Mapping[str, Any], examples: int | None) -> bool:
    """Whether a difference of two mean errors may be chance: noise that nobody knows may be any.

    Known noise is twice the standard error of the difference, or two test images; more where there are only a
    few runs to know it from.

    Args:
        mine: {"mean", "std", "n"}, in percent; std is None for one run, which then has the other side's.
        other: the same.
        examples: in the test set; they add the variance of a proportion, p (1 - p) / examples. None: not
            known, as for pixels, which are alike within an image.
    """
    if not noise_known(mine, other, examples):
        return True
    variance, one = 0.0, 100 / examples if examples else 0.0
    for found, beside in ((mine, other), (other, mine)):
        share = found["mean"] / 100
        std = next((one["std"] for one in (found, beside) if one["std"] is not None), 0.0)
        variance += 100 * one * share * (1 - share) + std**2 / found["n"]
    times = TIMES if examples else FEW.get(mine["n"] + other["n"] - 2, TIMES)
    # rounded: records hold six digits, and two images apart must count as two
    difference = float(f"{abs(mine['mean'] - other['mean']):.6g}")
    return difference <= float(f"{max(times * sqrt(variance), TIMES * one):.6g}")


def noise_known(mine: Mapping[str, Any], other: Mapping[str, Any], examples: int | None) -> bool:
    """Whether there is anything to estimate it from: examples to count, or two runs of either side."""
    return examples is not None or (mine["std"] is not None and other["std"] is not None)


def independent(record: Record) -> int | None:
    """How many answers were measured that err each on its own; pixels do not."""
    return None if is_dense(record) else record.test_examples


def is_dense(record: Record) -> bool:
    """Whether every pixel has an answer."""
    return "test" in record.entropy


def spread_of(records: Sequence[Record], key: str = "top1") -> dict[str, Any]:
    """Mean, deviation (None for one) and number of the errors in records."""
    return spread([record.errors["expected"][key] for record in records])
