"""The paper's claims as data, each judged by the records that there are.

A claim has checks and holds if all of them do. A difference of two errors counts only if it is significant.
M members, K overlap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from .cells import TARGETS, Evidence, Records
from .recipes import RECIPES
from .record import Record, spread_of
from .significance import Spread, describe, p_value, significant

HOLDS, FAILS, UNMEASURED = "holds", "does not hold", "not measured"
INCONCLUSIVE = "inconclusive"  # the difference is not significant
UNTESTED = "holds, n = 1"  # one run each, and no test for it
LEFT_OUT = "left out"  # of a part alone: reported, not counted

ENOUGH = 0.5  # of a printed reduction
FLAT = 1.0  # percent; a smaller change is none
REPAIRED = 0.9  # of the distance from MCL's top-1 error to that of IE
ALMOST = 1.25  # times the training time: "almost the same"
RIVALS, FASTER = ("IE", "MCL"), "the faster of IE and MCL"
LONG = 120.0  # seconds; in shorter runs start-up and compilation dominate
SPECIAL, ALIKE = 50.0, 20.0  # points between a class's best and worst member: specialists above, none below
LOW, HIGH = 1 / 3, 2 / 3  # of the largest entropy, for the median


class Comparison(NamedTuple):
    """The errors of two groups of runs and the test of their difference."""

    mine: Spread
    other: Spread
    examples: int | None  # as for `p_value`

    @classmethod
    def of(cls, mine: Sequence[Record], other: Sequence[Record], key: str = "top1") -> "Comparison":
        """Compare runs by their errors in records."""
        dense = any(record.dense for record in (*mine, *other))
        examples = None if dense else min(record.test_examples for record in (*mine, *other))
        return cls(spread_of(mine, key), spread_of(other, key), examples)

    @property
    def gain(self) -> float:
        """By how many percent the first error is lower."""
        mine, other = self.mine["mean"], self.other["mean"]
        return float(100 * (other - mine) / other) if other else 0.0

    def status(self, holds: bool) -> str:
        """The status of a part that this difference decides."""
        if p_value(*self) is None:
            return UNTESTED if holds else INCONCLUSIVE
        return (HOLDS if holds else FAILS) if significant(*self) else INCONCLUSIVE

    def __str__(self) -> str:
        """The errors, the change and the test."""
        mine, other, word = self.mine["mean"], self.other["mean"], "lower" if self.gain >= 0 else "higher"
        return f"{mine:.2f} against {other:.2f} %: {abs(self.gain):.1f} % {word} ({describe(*self)})"


@dataclass(frozen=True)
class Part:
    """The result of one check."""

    text: str  # what must hold
    status: str = UNMEASURED
    found: str = ""  # the numbers


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, judged."""

    where: str
    claim: str
    parts: tuple[Part, ...]

    @property
    def status(self) -> str:
        """The weakest status of its parts."""
        found = {part.status for part in self.parts}
        return next((s for s in (FAILS, UNMEASURED, INCONCLUSIVE, UNTESTED) if s in found), HOLDS)

    @property
    def counted(self) -> int:
        """How many parts decide."""
        return sum(part.status != LEFT_OUT for part in self.parts)

    @property
    def measured(self) -> int:
        """How many of them are measured."""
        return sum(part.status not in (LEFT_OUT, UNMEASURED) for part in self.parts)


def judge(records: Records) -> list[Verdict]:
    """Every claim in targets.json, in its order."""
    evidence = Evidence.of(records)
    return [
        Verdict(claim["where"], claim["claim"], tuple(p for c in CHECKS[claim["where"]] for p in c(evidence)))
        for claim in TARGETS["claims"]
    ]


class Check(Protocol):
    """Judges one statement, or several of a kind."""

    def __call__(self, found: Evidence) -> Iterator[Part]:
        """The parts of a verdict."""


@dataclass(frozen=True)
class Lower:
    """The error of a cell is significantly lower than its rival's, by at least half of the printed amount."""

    text: str
    cell: str
    rival: str
    key: str = "top1"
    printed: float = 0.0  # percent

    def __call__(self, found: Evidence) -> Iterator[Part]:
        """One part."""
        least = ENOUGH * self.printed
        text = f"{self.text}, by {least:.1f} % or more (half of the printed)" if least else self.text
        mine, other = found.standing(self.cell), found.standing(self.rival)
        if not (mine and other):
            yield Part(text)
            return
        pair = Comparison.of(mine, other, self.key)
        paper = f"; paper: {self.printed:.2f} % lower" if least else ""
        yield Part(text, pair.status(pair.gain >= least and pair.gain > 0), f"{pair}{paper}")


@dataclass(frozen=True)
class Changes:
    """The error changes by less than 1 % from one cell to the other; or falls by 1 % or more, if not flat."""

    text: str
    before: str
    after: str
    flat: bool = True

    def __call__(self, found: Evidence) -> Iterator[Part]:
        """One part."""
        bound = f"under {FLAT:g} % lower or higher" if self.flat else f"at least {FLAT:g} % lower"
        text = f"{self.text} ({bound})"
        after, before = found.standing(self.after), found.standing(self.before)
        if not (after and before):
            yield Part(text)
            return
        pair = Comparison.of(after, before)
        holds = abs(pair.gain) < FLAT if self.flat else pair.gain >= FLAT
        yield Part(text, HOLDS if self.flat and holds else pair.status(holds), str(pair))


def _repaired(found: Evidence) -> Iterator[Part]:
    """CMCL's top-1 error in Table 1 is near that of IE, and not near that of MCL."""
    text = f"CMCL closes {100 * REPAIRED:.0f} % or more of the distance from MCL's top-1 error to that of IE"
    errors = [found.error(f"table1/cifar10-cnn-{method}") for method in ("ie", "mcl", "cmcl")]
    means = [error["mean"] for error in errors if error]
    if len(means) < 3:
        yield Part(text)
        return
    ie, mcl, cmcl = means
    closed = (mcl - cmcl) / (mcl - ie) if mcl > ie else 0.0
    numbers = f"MCL {mcl:.2f}, IE {ie:.2f}, CMCL {cmcl:.2f} %: {100 * closed:.0f} % closed"
    yield Part(text, HOLDS if closed >= REPAIRED else FAILS, numbers)


def _cost(found: Evidence) -> Iterator[Part]:
    """Runs of the paper's recipes that differ in the method alone: same data, network, length and device.

    Of several the fastest counts: the others may have shared the device.
    """
    parts = []
    for (data, network, members, *_), seconds in _times(found.records).items():
        rivals = [time for name, times in seconds.items() if name in RIVALS for time in times]
        other = min(rivals, default=0.0)
        for name, times in seconds.items():
            mine = min(times)
            if name in RIVALS or not min(mine, other):
                continue
            text = f"{data}, {members} {network}: {name} takes at most {ALMOST:g} times as long as {FASTER}"
            numbers = (
                f"{mine:.0f} against {other:.0f} s, the fastest of {len(times)} and {len(rivals)} runs: "
                f"{mine / other:.2f} times"
            )
            if min(mine, other) < LONG:
                parts.append(Part(text, LEFT_OUT, f"{numbers}; under {LONG:.0f} s, too short to compare"))
            else:
                parts.append(Part(text, HOLDS if mine <= ALMOST * other else FAILS, numbers))
    yield from parts
    if all(part.status == LEFT_OUT for part in parts):
        yield Part(f"CMCL takes at most {ALMOST:g} times as long as {FASTER}")


def _times(records: Sequence[Record]) -> dict[tuple[Any, ...], dict[str, list[float]]]:
    """Seconds by what must be the same, then by method."""
    times: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for r in records:
        more = ["feature sharing"] * bool(r.recipe.get("sharing"))
        more += ["stochastic labels"] * (r.recipe.get("labels") == "sampled")
        name = r.recipe["method"].upper() + (f" with {' and '.join(more)}" if more else "")
        compares = name in RIVALS or name.startswith("CMCL")  # the paper's IE shares nothing
        paper = r.name.startswith(("cifar10", "svhn", "icoseg")) and r.name in RECIPES
        ours = paper and r.complete and r.recipe_hash == RECIPES[r.name].hash
        if ours and compares and not r.recipe.get("adversarial"):
            same = (*(r.recipe.get(key) for key in ("data", "network", "members")), r.steps, r.device)
            times.setdefault((*same, r.precision), {}).setdefault(name, []).append(r.seconds)
    return times


@dataclass(frozen=True)
class Specialises:
    """Members of a method differ in accuracy by class, or do not."""

    panel: str
    method: str
    specialists: bool = True

    def __call__(self, found: Evidence) -> Iterator[Part]:
        """One part."""
        bound = f"over {SPECIAL:g}" if self.specialists else f"under {ALIKE:g}"
        text = f"{self.method}: {bound} points between best and worst member, mean over the classes"
        gaps = [specialisation(record) for record in found.in_figure(self.panel)]
        if not gaps:
            yield Part(text)
            return
        mean = fmean(gaps)
        holds = mean > SPECIAL if self.specialists else mean < ALIKE
        yield Part(text, HOLDS if holds else FAILS, f"{mean:.1f} points")


@dataclass(frozen=True)
class Entropies:
    """Every median entropy is low, or high: the paper speaks of each member, and a mean hides outliers."""

    panel: str
    title: str
    group: str
    low: bool

    def __call__(self, found: Evidence) -> Iterator[Part]:
        """One part."""
        bound = "below a third" if self.low else "above two thirds"
        text = f"{self.title}: median entropy {bound} of the largest"
        medians = [m for r in found.in_figure(self.panel) for m in median_entropies(r, self.group)]
        if not medians:
            yield Part(text)
            return
        right = [median < LOW if self.low else median > HIGH for median in medians]
        low, high = (f"{value:.2f}" for value in (min(medians), max(medians)))
        numbers = f"{low if low == high else f'{low} to {high}'} of the largest"
        of = "" if len(right) == 1 else f"{sum(right)} of {len(right)}: "
        yield Part(text, HOLDS if all(right) else FAILS, of + numbers)


def specialisation(record: Record) -> float:
    """Points of accuracy between the best and the worst member of a class, mean over the classes."""
    columns = [[x for x in column if x is not None] for column in zip(*record.classwise, strict=True)]
    return fmean(max(column) - min(column) for column in columns if column)


def histograms(record: Record, group: str) -> list[list[int]]:
    """The entropy histograms of a group: of each member, or one of the averaged prediction."""
    found: Any = record.entropy.get(group, [])
    return [found] if found and group.startswith("averaged") else list(found)


def pooled(record: Record, group: str) -> list[float]:
    """The sum of a group's entropy histograms."""
    return [sum(counts) for counts in zip(*histograms(record, group), strict=True)]


def median_entropies(record: Record, group: str) -> list[float]:
    """The `median_entropy` of each histogram of a group that has examples."""
    return [m for one in histograms(record, group) if (m := median_entropy(one)) is not None]


def median_entropy(histogram: Sequence[float]) -> float | None:
    """The median as a fraction of the range, by linear interpolation in its bin."""
    half, below = sum(histogram) / 2, 0.0
    for bin_, count in enumerate(histogram):
        if count and below + count >= half:
            return (bin_ + (half - below) / count) / len(histogram)
        below += count
    return None


def _reductions(where: str) -> list[float]:
    """The relative reductions, in percent, that a claim prints."""
    return next(list(claim["reductions"]) for claim in TARGETS["claims"] if claim["where"] == where)


def _abstract() -> Iterator[Check]:
    for data, printed in zip(("cifar10", "svhn"), _reductions("abstract"), strict=True):
        stem, title = f"table3/{data}-resnet20", {"cifar10": "CIFAR-10", "svhn": "SVHN"}[data]
        yield Lower(f"{title}: CMCL below IE", f"{stem}-cmcl", f"{stem}-ie", printed=printed)


def _segmentation() -> Iterator[Check]:
    """By the most confident member, as the paper scores it, and by the averaged prediction."""
    stem, (printed,) = "fig4bc/icoseg-fcn-m", _reductions("figure 4b")
    for key, scored in (("picked", "most confident member"), ("top1", "averaged prediction")):
        for m in range(2, 6):  # one member alone is the same for every method
            for other in ("ie", "mcl"):
                text = f"M={m}: CMCL below {other.upper()}, {scored}"
                amount = printed if (m, other) == (5, "ie") else 0.0
                yield Lower(text, f"{stem}{m}-cmcl", f"{stem}{m}-{other}", key, amount)


CMCL, CNN, RESNET = "table1/cifar10-cnn-cmcl", "table2/cifar10-cnn-m", "fig4a/cifar10-resnet20-m"
CHECKS: Mapping[str, Sequence[Check]] = {
    "abstract": list(_abstract()),
    "table 1": [
        _repaired,
        Lower("sharing lowers top-1", f"{CMCL}-sharing", CMCL),
        Lower("stochastic labels lower top-1", f"{CMCL}-sharing-sampled", f"{CMCL}-sharing"),
        Lower("stochastic labels lower oracle", f"{CMCL}-sharing-sampled", f"{CMCL}-sharing", "oracle"),
    ],
    "table 2": [
        Lower("M=10, K=4: CMCL below IE", f"{CNN}10-cmcl-k4", f"{CNN}10-ie", "top1", *_reductions("table 2")),
        Changes("IE neither gains nor loses from 5 to 10 members", f"{CNN}5-ie", f"{CNN}10-ie"),
    ],
    "introduction": [_cost],
    "figure 1": [
        Specialises("fig1a", "MCL"),
        Specialises("fig1b", "CMCL"),
        Specialises("fig1c", "IE", specialists=False),
    ],
    "figure 2": [
        Entropies("fig2b", "each CMCL member on its own classes", "specialised", low=True),
        Entropies("fig2b", "each CMCL member on the other classes", "other", low=False),
        Entropies("fig2b", "each CMCL member on SVHN", "ood", low=False),
        Entropies("fig2a", "each MCL member on its own classes", "specialised", low=True),
        Entropies("fig2a", "each MCL member on the other classes", "other", low=True),
        Entropies("fig2a", "each MCL member on SVHN", "ood", low=True),
        Entropies("fig2c", "IE with adversarial training on SVHN, averaged", "averaged_ood", low=True),
    ],
    "figure 4a": [
        Lower(
            "M=10: CMCL below IE with sharing",
            f"{RESNET}10-cmcl",
            f"{RESNET}10-ie-sharing",
            "top1",
            *_reductions("figure 4a"),
        ),
        Changes(
            "IE with sharing is flat from 5 to 10 members", f"{RESNET}5-ie-sharing", f"{RESNET}10-ie-sharing"
        ),
        Changes("CMCL is not", f"{RESNET}5-cmcl", f"{RESNET}10-cmcl", flat=False),
    ],
    "figure 4b": list(_segmentation()),
}
