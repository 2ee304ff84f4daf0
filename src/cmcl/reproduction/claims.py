"""The paper's claims as data, each judged by the records that there are.

A claim has checks and holds if all of them do. A difference of two errors counts only if it is significant.
M members, K overlap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..data.registry import DATASETS
from ..networks import NETWORKS
from .cells import CELLS, TARGETS, Evidence, Records, techniques
from .record import Record
from .significance import Comparison

HOLDS, FAILS, UNMEASURED = "holds", "does not hold", "not measured"
INCONCLUSIVE = "inconclusive"  # the difference is not significant
UNTESTED = "holds, n = 1"  # one run each, and no test for it
LEFT_OUT = "left out"  # of a part, which is reported and not counted

ENOUGH = 0.5  # of a printed reduction
FLAT = 1.0  # percent; a smaller change is none
SLIGHT = f"under {FLAT:g} % lower or higher"
REPAIRED = 0.9  # of the distance from MCL's top-1 error to that of IE
ALMOST = 1.25  # times the training time: "almost the same"
RIVALS = ("IE", "MCL")
AT_MOST = f"at most {ALMOST:g} times as long as the faster of IE and MCL"
LONG = 120.0  # seconds; in shorter runs start-up and compilation dominate
SPECIAL, ALIKE = 50.0, 20.0  # points between a class's best and worst member: specialists above, none below

Check = tuple[Any, ...]  # a function below that returns parts, and its arguments after the evidence


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
    found: Evidence, text: str, cell: str, rival: str, key: str = "top1", least: float = 0.0, paper: str = ""
) -> list[Part]:
    """The error of a cell is significantly lower than its rival's, by `least` percent or more."""
    mine, other = found.filling[cell], found.filling[rival]
    if not (mine and other):
        return [Part(text)]
    pair = Comparison.of(mine, other, key)
    return [Part(text, _status(pair, pair.gain > 0 and pair.gain >= least), f"{pair}{paper}")]


def _printed(text: str, cell: str, rival: str, reduction: float, *, key: str = "top1") -> Check:
    """A check that the error is lower by half of the printed reduction or more."""
    least = ENOUGH * reduction
    text = f"{text}, by {least:.1f} % or more (half of the printed)"
    return _lower, text, cell, rival, key, least, f"; paper: {reduction:.2f} % lower"


def _flat(found: Evidence, text: str, few: str, many: str) -> list[Part]:
    """The error changes by less than `FLAT` with more members; it need not be significant."""
    if not (found.filling[few] and found.filling[many]):
        return [Part(text)]
    pair = Comparison.of(found.filling[many], found.filling[few])
    return [Part(text, HOLDS if abs(pair.gain) < FLAT else _status(pair, False), str(pair))]


def _status(pair: Comparison, holds: bool) -> str:
    """The status of a part that this difference decides."""
    if pair.p_value is None:
        return UNTESTED if holds else INCONCLUSIVE
    return (HOLDS if holds else FAILS) if pair.significant else INCONCLUSIVE


def _repaired(found: Evidence) -> list[Part]:
    """CMCL's top-1 error in Table 1 is near that of IE, and not near that of MCL."""
    text = f"CMCL closes {100 * REPAIRED:.0f} % or more of the distance from MCL's top-1 error to that of IE"
    ours = [found.cells[f"table1/cifar10-cnn-{method}"]["ours"] for method in ("ie", "mcl", "cmcl")]
    if not all(ours):
        return [Part(text)]
    ie, mcl, cmcl = (errors["top1"]["mean"] for errors in ours)
    closed = (mcl - cmcl) / (mcl - ie) if mcl > ie else 0.0
    numbers = f"MCL {mcl:.2f}, IE {ie:.2f}, CMCL {cmcl:.2f} %: {100 * closed:.0f} % closed"
    return [Part(text, HOLDS if closed >= REPAIRED else FAILS, numbers)]


def _cost(found: Evidence) -> list[Part]:
    """Runs of the paper's recipes that differ in the method alone: same data, network, length and device.

    The fastest of several counts: the others may have shared the device.
    """
    parts = []
    for (data, network, members, *_), seconds in _times(found.records).items():
        rivals = [time for name, times in seconds.items() if name in RIVALS for time in times]
        for name, times in seconds.items():
            if name in RIVALS or not rivals or not min(rivals):
                continue
            mine, other = min(times), min(rivals)
            what = f"{DATASETS[data].title}, {NETWORKS[network].title}, M = {members}"
            text = f"{what}: {name} takes {AT_MOST}"
            numbers = (
                f"{mine:.0f} against {other:.0f} s, the fastest of {len(times)} and {len(rivals)} runs: "
                f"{mine / other:.2f} times"
            )
            if min(mine, other) < LONG:
                parts.append(Part(text, LEFT_OUT, f"{numbers}; under {LONG:.0f} s, too short to compare"))
            else:
                parts.append(Part(text, HOLDS if mine <= ALMOST * other else FAILS, numbers))
    counted = any(part.status != LEFT_OUT for part in parts)
    return parts if counted else [*parts, Part(f"CMCL takes {AT_MOST}")]


def _times(records: Sequence[Record]) -> dict[tuple[Any, ...], dict[str, list[float]]]:
    """Seconds by what must be the same, then by method."""
    times: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    paper = {cell.name: cell.recipe.hash for cell in CELLS}
    for r in records:
        recipe = r.recipe
        more = " and ".join(techniques(recipe))
        name = recipe["method"].upper() + (f" with {more}" if more else "")
        compares = name in RIVALS or name.startswith("CMCL")  # the paper's IE shares nothing
        if compares and r.complete and not recipe.get("adversarial") and paper.get(r.name) == r.recipe_hash:
            where = (r.device, r.mesh, r.precision)
            same = (recipe["data"], recipe["network"], recipe["members"], r.steps, *where)
            times.setdefault(same, {}).setdefault(name, []).append(r.seconds)
    return times


def _specialists(found: Evidence, panel: str, text: str, low: float, high: float) -> list[Part]:
    """The mean `specialisation` is in range."""
    if not (records := found.in_figure(panel)):
        return [Part(text)]
    mean = fmean(map(specialisation, records))
    return [Part(text, HOLDS if low < mean < high else FAILS, f"{mean:.1f} points")]


def _entropies(found: Evidence, panel: str, text: str, group: str, low: float, high: float) -> list[Part]:
    """Every median is in range: the paper speaks of each member, and a mean hides outliers."""
    medians = [m for record in found.in_figure(panel) for m in median_entropies(record, group)]
    if not medians:
        return [Part(text)]
    right = [low < median < high for median in medians]
    least, most = (f"{value:.2f}" for value in (min(medians), max(medians)))
    numbers = f"{least if least == most else f'{least} to {most}'} of the largest"
    of = "" if len(right) == 1 else f"{sum(right)} of {len(right)}: "
    return [Part(text, HOLDS if all(right) else FAILS, of + numbers)]


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


def _segmentation() -> Iterator[Check]:
    """By the most confident member, as the paper scores it, and by the averaged prediction."""
    for key, scored in (("picked", "most confident member"), ("top1", "averaged prediction")):
        for m in range(2, 6):  # one member alone is the same for every method
            for rival in ("ie", "mcl"):
                mine, other = (f"fig4bc/icoseg-fcn-m{m}-{method}" for method in ("cmcl", rival))
                text = f"M={m}: CMCL below {rival.upper()}, {scored}"
                if (m, rival) == (5, "ie"):
                    yield _printed(text, mine, other, *PRINTED["figure 4b"], key=key)
                else:
                    yield _lower, text, mine, other, key


def _confident(panel: str, title: str, group: str) -> Check:
    return _entropies, panel, f"{title}: median entropy below a third of the largest", group, 0, 1 / 3


def _uncertain(panel: str, title: str, group: str) -> Check:
    return _entropies, panel, f"{title}: median entropy above two thirds of the largest", group, 2 / 3, 1


APART = "points between best and worst member, mean over the classes"
PRINTED = {claim["where"]: claim.get("reductions", []) for claim in TARGETS["claims"]}  # percent
LARGE, CMCL = "table3/{}-resnet20-{}".format, "table1/cifar10-cnn-cmcl"
CNN, RESNET = "table2/cifar10-cnn-m{}".format, "fig4a/cifar10-resnet20-m{}".format
CHECKS: Mapping[str, Sequence[Check]] = {
    "abstract": [
        _printed(f"{title}: CMCL below IE", LARGE(data, "cmcl"), LARGE(data, "ie"), reduction)
        for data, title, reduction in zip(
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
        _printed("M=10, K=4: CMCL below IE", CNN("10-cmcl-k4"), CNN("10-ie"), *PRINTED["table 2"]),
        (_flat, f"IE neither gains nor loses from 5 to 10 members ({SLIGHT})", CNN("5-ie"), CNN("10-ie")),
    ],
    "introduction": [(_cost,)],
    "figure 1": [
        (_specialists, "fig1a", f"MCL: over {SPECIAL:g} {APART}", SPECIAL, 100.1),
        (_specialists, "fig1b", f"CMCL: over {SPECIAL:g} {APART}", SPECIAL, 100.1),
        (_specialists, "fig1c", f"IE: under {ALIKE:g} {APART}", -0.1, ALIKE),
    ],
    "figure 2": [
        _confident("fig2b", "each CMCL member on its own classes", "specialised"),
        _uncertain("fig2b", "each CMCL member on the other classes", "other"),
        _uncertain("fig2b", "each CMCL member on SVHN", "ood"),
        _confident("fig2a", "each MCL member on its own classes", "specialised"),
        _confident("fig2a", "each MCL member on the other classes", "other"),
        _confident("fig2a", "each MCL member on SVHN", "ood"),
        _confident("fig2c", "IE with adversarial training on SVHN, averaged", "averaged_ood"),
    ],
    "figure 4a": [
        _printed(
            "M=10: CMCL below IE with sharing",
            RESNET("10-cmcl"),
            RESNET("10-ie-sharing"),
            *PRINTED["figure 4a"],
        ),
        (
            _flat,
            f"IE with sharing is flat from 5 to 10 members ({SLIGHT})",
            RESNET("5-ie-sharing"),
            RESNET("10-ie-sharing"),
        ),
        (
            _lower,
            f"CMCL is not (at least {FLAT:g} % lower)",
            RESNET("10-cmcl"),
            RESNET("5-cmcl"),
            "top1",
            FLAT,
        ),
    ],
    "figure 4b": list(_segmentation()),
}
