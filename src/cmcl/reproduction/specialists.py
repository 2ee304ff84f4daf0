"""What a record tells of its members: who knows what, and how sure they are. Behind figures 1 and 2."""

from collections.abc import Sequence
from statistics import fmean

from .records import Record


def specialisation(record: Record) -> float:
    """Points of accuracy between the best and the worst member of a class, mean over the classes."""
    columns = [[x for x in column if x is not None] for column in zip(*record.classwise, strict=True)]
    return fmean(max(column) - min(column) for column in columns if column)


def pooled(record: Record, group: str) -> list[float]:
    """The members' entropy histograms in one, the averaged answer's as it is; empty if there is none."""
    found = record.entropy.get(group, [])
    if group.startswith("averaged"):
        return list(found)
    return [sum(counts) for counts in zip(*found, strict=True)]


def median_entropies(record: Record, group: str) -> list[float]:
    """`median_entropy` of each member that has answers in a group, or of the averaged answer."""
    found = record.entropy.get(group, [])
    medians = map(median_entropy, [found] if group.startswith("averaged") else found)
    return [median for median in medians if median is not None]


def median_entropy(histogram: Sequence[float]) -> float | None:
    """The median's place as a share of the range, by linear interpolation in its bin."""
    half, below = sum(histogram) / 2, 0.0
    for bin_, count in enumerate(histogram):
        if count and below + count >= half:
            return (bin_ + (half - below) / count) / len(histogram)
        below += count
    return None
