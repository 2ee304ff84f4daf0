"""Whether two errors differ, or only seem to: seeds are few, and so are test examples."""

from collections.abc import Mapping, Sequence
from typing import Any

from .records import Record, spread
from .significance import significant


def within_noise(mine: Mapping[str, Any], other: Mapping[str, Any], examples: int | None) -> bool:
    """Whether the difference of two mean errors is not significant; arguments as for `p_value`."""
    return not significant(mine, other, examples)


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
