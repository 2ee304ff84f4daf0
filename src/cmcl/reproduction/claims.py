"""The paper's claims as data, each judged by the records that there are.

A claim has checks and holds if all of them do. A difference of two errors counts only if it is significant.
M members, K overlap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

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
    found = Evidence.of(records)
    return [
        Verdict(
            claim["where"],
            claim["claim"],
            tuple(part for check, *words in CHECKS[claim["where"]] for part in check(found, *words)),
        )
        for claim in TARGETS["claims"]
    ]


def _lower(
    found: Evidence, text: str, cell: str, rival: str, key: str = "top1", printed: float = 0.0
) -> Iterator[Part]:
    """The error of a cell is significantly lower than its rival's, by half of the printed or more."""
    least = ENOUGH * printed
    text = f"{text}, by {least:.1f} % or more (half of the printed)" if least else text
    mine, other = found.standing(cell), found.standing(rival)
    if not (mine and other):
        yield Part(text)
        return
    pair = Comparison.of(mine, other, key)
    paper = f"; paper: {printed:.2f} % lower" if least else ""
    yield Part(text, pair.status(pair.gain >= least and pair.gain > 0), f"{pair}{paper}")


def _flat(found: Evidence, text: str, few: str, many: str) -> Iterator[Part]:
    """The error changes by less than 1 % with more members; to be not significant is no objection."""
    text = f"{text} (under {FLAT:g} % lower or higher)"
    if not (found.standing(few) and found.standing(many)):
        yield Part(text)
        return
    pair = Comparison.of(found.standing(many), found.standing(few))
    yield Part(text, HOLDS if abs(pair.gain) < FLAT else pair.status(holds=False), str(pair))


def _falls(found: Evidence, text: str, few: str, many: str) -> Iterator[Part]:
    """The error falls by 1 % or more with more members."""
    text = f"{text} (at least {FLAT:g} % lower)"
    if not (found.standing(few) and found.standing(many)):
        yield Part(text)
        return
    pair = Comparison.of(found.standing(many), found.standing(few))
    yield Part(text, pair.status(pair.gain >= FLAT), str(pair))


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


def _specialists(found: Evidence, panel: str, method: str, alike: bool = False) -> Iterator[Part]:
    """Members differ in accuracy by class; or hardly, if alike."""
    bound = f"under {ALIKE:g}" if alike else f"over {SPECIAL:g}"
    text = f"{method}: {bound} points between best and worst member, mean over the classes"
    if not (records := found.in_figure(panel)):
        yield Part(text)
        return
    mean = fmean(map(specialisation, records))
    holds = mean < ALIKE if alike else mean > SPECIAL
    yield Part(text, HOLDS if holds else FAILS, f"{mean:.1f} points")


def _confident(found: Evidence, panel: str, title: str, group: str) -> Iterator[Part]:
    """Every median entropy is low."""
    return _entropies(found, panel, f"{title}: median entropy below a third of the largest", group, 0, LOW)


def _uncertain(found: Evidence, panel: str, title: str, group: str) -> Iterator[Part]:
    """Every median entropy is high."""
    return _entropies(
        found, panel, f"{title}: median entropy above two thirds of the largest", group, HIGH, 1
    )


def _entropies(found: Evidence, panel: str, text: str, group: str, low: float, high: float) -> Iterator[Part]:
    """Every median is in range: the paper speaks of each member, and a mean hides outliers."""
    medians = [m for record in found.in_figure(panel) for m in median_entropies(record, group)]
    if not medians:
        yield Part(text)
        return
    right = [low < median < high for median in medians]
    least, most = (f"{value:.2f}" for value in (min(medians), max(medians)))
    numbers = f"{least if least == most else f'{least} to {most}'} of the largest"
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


Check = tuple[Any, ...]  # a function above and its arguments after the evidence
PRINTED = {claim["where"]: claim.get("reductions", []) for claim in TARGETS["claims"]}  # percent


def _segmentation() -> Iterator[Check]:
    """By the most confident member, as the paper scores it, and by the averaged prediction."""
    for key, scored in (("picked", "most confident member"), ("top1", "averaged prediction")):
        for m in range(2, 6):  # one member alone is the same for every method
            for other in ("ie", "mcl"):
                cells = (f"fig4bc/icoseg-fcn-m{m}-{method}" for method in ("cmcl", other))
                printed = PRINTED["figure 4b"][0] if (m, other) == (5, "ie") else 0.0
                yield _lower, f"M={m}: CMCL below {other.upper()}, {scored}", *cells, key, printed


LARGE, CMCL = "table3/{}-resnet20-{}".format, "table1/cifar10-cnn-cmcl"
CNN, RESNET = "table2/cifar10-cnn-m{}".format, "fig4a/cifar10-resnet20-m{}".format
CHECKS: Mapping[str, Sequence[Check]] = {
    "abstract": [
        (_lower, f"{title}: CMCL below IE", LARGE(data, "cmcl"), LARGE(data, "ie"), "top1", printed)
        for data, title, printed in zip(
            ("cifar10", "svhn"), ("CIFAR-10", "SVHN"), PRINTED["abstract"], strict=True
        )
    ],
    "table 1": [
        (_repaired,),
        (_lower, "sharing lowers top-1", f"{CMCL}-sharing", CMCL),
        (_lower, "stochastic labels lower top-1", f"{CMCL}-sharing-sampled", f"{CMCL}-sharing"),
        (_lower, "stochastic labels lower oracle", f"{CMCL}-sharing-sampled", f"{CMCL}-sharing", "oracle"),
    ],
    "table 2": [
        (_lower, "M=10, K=4: CMCL below IE", CNN("10-cmcl-k4"), CNN("10-ie"), "top1", *PRINTED["table 2"]),
        (_flat, "IE neither gains nor loses from 5 to 10 members", CNN("5-ie"), CNN("10-ie")),
    ],
    "introduction": [(_cost,)],
    "figure 1": [
        (_specialists, "fig1a", "MCL"),
        (_specialists, "fig1b", "CMCL"),
        (_specialists, "fig1c", "IE", True),
    ],
    "figure 2": [
        (_confident, "fig2b", "each CMCL member on its own classes", "specialised"),
        (_uncertain, "fig2b", "each CMCL member on the other classes", "other"),
        (_uncertain, "fig2b", "each CMCL member on SVHN", "ood"),
        (_confident, "fig2a", "each MCL member on its own classes", "specialised"),
        (_confident, "fig2a", "each MCL member on the other classes", "other"),
        (_confident, "fig2a", "each MCL member on SVHN", "ood"),
        (_confident, "fig2c", "IE with adversarial training on SVHN, averaged", "averaged_ood"),
    ],
    "figure 4a": [
        (
            _lower,
            "M=10: CMCL below IE with sharing",
            RESNET("10-cmcl"),
            RESNET("10-ie-sharing"),
            "top1",
            *PRINTED["figure 4a"],
        ),
        (
            _flat,
            "IE with sharing is flat from 5 to 10 members",
            RESNET("5-ie-sharing"),
            RESNET("10-ie-sharing"),
        ),
        (_falls, "CMCL is not", RESNET("5-cmcl"), RESNET("10-cmcl")),
    ],
    "figure 4b": list(_segmentation()),
}
