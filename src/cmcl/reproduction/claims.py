"""The paper's claims, each judged by records: it holds, it does not, or nobody can tell yet.

A claim has parts, and holds if all of them do. What a part needs to hold is written in its text; amounts come
from the claim as printed. What chance may have done decides nothing. M members, K overlap.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .evidence import Evidence, Records
from .paper import TARGETS
from .recipes import RECIPES
from .records import Record
from .specialists import median_entropies, specialisation

HOLDS, FAILS, UNMEASURED = "holds", "does not hold", "not yet measured"
NEARLY, UNKNOWN = "holds, within the noise", "holds, noise not known"
UNDECIDED = "cannot be told"  # it goes the other way, and that may be chance
LEFT_OUT = "left out"  # of a part alone

ENOUGH = 0.5  # of a printed reduction: the sign alone would call noise a success
FLAT = 1.0  # percent; a change below it is none
REPAIRED = 0.9  # of the distance from MCL's top-1 error to that of IE
ALMOST = 1.25  # times the training time: "almost the same"
RIVALS, FASTER = ("IE", "MCL"), "the faster of IE and MCL"  # with which costs are compared
LONG = 120.0  # seconds; in shorter runs starting and compiling weigh more than the method
SPECIAL, ALIKE = 50.0, 20.0  # points between a class's best and worst member: specialists above, none below
SURE, UNSURE = 1 / 3, 2 / 3  # of the largest entropy, for the median


@dataclass(frozen=True)
class Part:
    """One statement of a claim."""

    text: str  # what must be so
    holds: bool | None = None  # None: not yet measured
    found: str = ""  # the numbers
    chance: str = ""  # why the numbers may differ by chance alone, as `Evidence.chance` says it
    left_out: bool = False  # measured, told, and not counted

    @property
    def status(self) -> str:
        """In words."""
        if self.left_out:
            return LEFT_OUT
        if self.holds is None:
            return UNMEASURED
        if self.holds:
            return f"{HOLDS}, {self.chance}" if self.chance else HOLDS
        return UNDECIDED if self.chance else FAILS


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, judged."""

    where: str
    claim: str
    parts: tuple[Part, ...]

    @property
    def status(self) -> str:
        """Fails with any part that fails, holds when all do."""
        found = [part.status for part in self.parts]
        weakest = (FAILS, UNMEASURED, UNDECIDED, UNKNOWN, NEARLY)
        return next((status for status in weakest if status in found), HOLDS)

    @property
    def counted(self) -> int:
        """How many parts decide."""
        return sum(not part.left_out for part in self.parts)

    @property
    def measured(self) -> int:
        """How many of them are measured."""
        return sum(part.holds is not None for part in self.parts)


def judge(records: Records) -> list[Verdict]:
    """Every claim in targets.json, in its order."""
    evidence = Evidence.of(records)
    return [
        Verdict(claim["where"], claim["claim"], tuple(JUDGES[claim["where"]](evidence, _printed(claim))))
        for claim in TARGETS["claims"]
    ]


def _printed(claim: Mapping[str, str]) -> list[float]:
    """The percentages in a claim's text."""
    return [float(number) for number in re.findall(r"([\d.]+) %", claim["claim"])]


def _lower(
    found: Evidence, what: str, cell: str, rival: str, printed: float | None = None, key: str = "top1"
) -> Part:
    """The error of a cell is lower than its rival's, by at least half of the printed share."""
    least = 0.0 if printed is None else ENOUGH * printed
    text = what if printed is None else f"{what}, by {least:.1f} % or more (half of what is printed)"
    mine, other = found.error(cell, key), found.error(rival, key)
    if mine is None or other is None:
        return Part(text)
    share, chance = _gain(other, mine), found.chance(cell, rival, key)
    beside = "" if printed is None else f"; paper: {printed:.2f} % lower"
    holds = share >= least and share > 0
    return Part(text, holds, _change(other, mine, chance) + beside, chance)


def _flat(found: Evidence, what: str, few: str, many: str, *, flat: bool = True) -> Part:
    """The error changes by less than 1 %, up or down; or, with flat=False, falls by that or more."""
    text = f"{what} ({f'under {FLAT:g} % lower or higher' if flat else f'at least {FLAT:g} % lower'})"
    before, after = found.error(few), found.error(many)
    if before is None or after is None:
        return Part(text)
    gain, chance = _gain(before, after), found.chance(few, many)
    holds = abs(gain) < FLAT if flat else gain >= FLAT
    counts = not (flat and holds)  # to differ by no more is what "flat" claims
    return Part(text, holds, _change(before, after, chance), chance if counts else "")


def _mean(text: str, values: list[float], bound: float, *, below: bool, form: str) -> Part:
    """The mean over the runs lies below the bound; or, with below=False, above it."""
    if not values:
        return Part(text)
    mean = fmean(values)
    return Part(text, mean < bound if below else mean > bound, form.format(mean))


def _gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """By how many percent the mean error is lower."""
    return 100 * (before["mean"] - after["mean"]) / before["mean"] if before["mean"] else 0.0


def _change(before: Mapping[str, Any], after: Mapping[str, Any], chance: str) -> str:
    """In words."""
    gain = _gain(before, after)
    word = "lower" if gain >= 0 else "higher"
    text = f"{after['mean']:.2f} against {before['mean']:.2f} %: {abs(gain):.1f} % {word}"
    n = after["n"], before["n"]
    runs = " (single runs)" if max(n) == 1 else f" (n = {n[0]} and {n[1]})" if min(n) == 1 else ""
    return f"{text}{chance and f', {chance}'}{runs}"


def _abstract(found: Evidence, printed: list[float]) -> Iterator[Part]:
    for data, title, share in zip(("cifar10", "svhn"), ("CIFAR-10", "SVHN"), printed, strict=True):
        stem = f"table3/{data}-resnet20"
        yield _lower(found, f"{title}: CMCL below IE", f"{stem}-cmcl", f"{stem}-ie", share)


def _table1(found: Evidence, printed: list[float]) -> Iterator[Part]:
    spreads = [found.error(f"table1/cifar10-cnn-{cell}") for cell in ("ie", "mcl", "cmcl")]
    ie, mcl, cmcl = (0.0 if spread is None else float(spread["mean"]) for spread in spreads)
    text = f"CMCL closes {100 * REPAIRED:.0f} % or more of the distance from MCL's top-1 error to that of IE"
    if None in spreads:
        yield Part(text)
    else:
        closed = (mcl - cmcl) / (mcl - ie) if mcl > ie else 0.0
        numbers = f"MCL {mcl:.2f}, IE {ie:.2f}, CMCL {cmcl:.2f} %: {100 * closed:.0f} % closed"
        yield Part(text, closed >= REPAIRED, numbers)
    stem = "table1/cifar10-cnn-cmcl"
    shared, both = f"{stem}-sharing", f"{stem}-sharing-sampled"
    yield _lower(found, "sharing lowers top-1", shared, stem)
    for key, title in (("top1", "top-1"), ("oracle", "oracle")):
        yield _lower(found, f"stochastic labels lower {title}", both, shared, key=key)


def _table2(found: Evidence, printed: list[float]) -> Iterator[Part]:
    five, ten, cmcl = (f"table2/cifar10-cnn-{cell}" for cell in ("m5-ie", "m10-ie", "m10-cmcl-k4"))
    yield _lower(found, "M=10, K=4: CMCL below IE", cmcl, ten, printed[0])
    yield _flat(found, "IE neither gains nor loses from 5 to 10 members", five, ten)


def _cost(found: Evidence, printed: list[float]) -> Iterator[Part]:
    """The paper's runs that differ in the method alone: same data, network, length, device, seeds together.

    Of several the fastest counts: the others may have had company on the device.
    """
    compared = 0
    for (data, network, members, *_), seconds in _times(found.records).items():
        rivals = [time for name, times in seconds.items() if name in RIVALS for time in times]
        other = min(rivals, default=0.0)
        for name, times in seconds.items():
            mine = min(times)
            if name in RIVALS or not min(mine, other):
                continue
            text = f"{data}, {members} {network}: {name} takes at most {ALMOST:g} times as long as {FASTER}"
            runs = f"{len(times)} and {len(rivals)} runs"
            numbers = f"{mine:.0f} against {other:.0f} s, the fastest of {runs}: {mine / other:.2f} times"
            if min(mine, other) < LONG:
                yield Part(text, found=f"{numbers}; under {LONG:.0f} s, too short to compare", left_out=True)
            else:
                compared += 1
                yield Part(text, mine <= ALMOST * other, numbers)
    if not compared:
        yield Part(f"CMCL takes at most {ALMOST:g} times as long as {FASTER}")


def _times(records: Sequence[Record]) -> dict[tuple[Any, ...], dict[str, list[float]]]:
    """Seconds by what must be alike, then by method."""
    times: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for r in records:
        more = ["feature sharing"] * bool(r.recipe.get("sharing"))
        more += ["stochastic labels"] * (r.recipe.get("labels") == "sampled")
        name = r.recipe["method"].upper() + (f" with {' and '.join(more)}" if more else "")
        compares = name in RIVALS or name.startswith("CMCL")  # the paper's IE shares nothing
        printed = r.name.startswith(("cifar10", "svhn", "icoseg")) and r.name in RECIPES
        ours = printed and r.complete and r.recipe_hash == RECIPES[r.name].hash
        if ours and compares and not r.recipe.get("adversarial"):
            alike = (*(r.recipe.get(key) for key in ("data", "network", "members")), r.steps, r.device)
            methods = times.setdefault((*alike, r.precision, len(r.together)), {})
            methods.setdefault(name, []).append(r.seconds)
    return times


def _figure1(found: Evidence, printed: list[float]) -> Iterator[Part]:
    for panel, method in (("fig1a", "MCL"), ("fig1b", "CMCL"), ("fig1c", "IE")):
        alike = method == "IE"
        bound = f"under {ALIKE:g}" if alike else f"over {SPECIAL:g}"
        text = f"{method}: {bound} points between best and worst member, mean over the classes"
        gaps = [specialisation(record) for record in found.in_figure(panel)]
        yield _mean(text, gaps, ALIKE if alike else SPECIAL, below=alike, form="{:.1f} points")


def _figure2(found: Evidence, printed: list[float]) -> Iterator[Part]:
    for panel, title, group, sure in (
        ("fig2b", "each CMCL member on its own classes", "specialised", True),
        ("fig2b", "each CMCL member on the other classes", "other", False),
        ("fig2b", "each CMCL member on SVHN", "outside", False),
        ("fig2a", "each MCL member on its own classes", "specialised", True),
        ("fig2a", "each MCL member on the other classes", "other", True),
        ("fig2a", "each MCL member on SVHN", "outside", True),
        ("fig2c", "IE with adversarial training on SVHN, averaged", "averaged_outside", True),
    ):
        medians = [m for record in found.in_figure(panel) for m in median_entropies(record, group)]
        yield _each(title, medians, sure=sure)


def _each(title: str, medians: Sequence[float], *, sure: bool) -> Part:
    """Every median is low, or high: the paper speaks of each member, and a mean hides the odd one out."""
    text = f"{title}: median entropy {'below a third' if sure else 'above two thirds'} of the largest"
    if not medians:
        return Part(text)
    so = [median < SURE if sure else median > UNSURE for median in medians]
    low, high = (f"{bound:.2f}" for bound in (min(medians), max(medians)))
    numbers = f"{low if low == high else f'{low} to {high}'} of the largest"
    return Part(text, all(so), numbers if len(so) == 1 else f"{sum(so)} of {len(so)}: {numbers}")


def _figure4a(found: Evidence, printed: list[float]) -> Iterator[Part]:
    ie5, ie10, cmcl5, cmcl10 = (
        f"fig4a/cifar10-resnet20-m{m}-{method}" for method in ("ie", "cmcl") for m in (5, 10)
    )
    yield _lower(found, "M=10: CMCL below IE with sharing", cmcl10, ie10, printed[0])
    yield _flat(found, "IE with sharing is flat from 5 to 10 members", ie5, ie10)
    yield _flat(found, "CMCL is not", cmcl5, cmcl10, flat=False)


def _figure4b(found: Evidence, printed: list[float]) -> Iterator[Part]:
    stem = "fig4bc/icoseg-fcn-m"
    yield _lower(found, "M=5: CMCL below IE", f"{stem}5-cmcl", f"{stem}5-ie", printed[0])
    for m in range(2, 6):  # one member alone is the same for every method
        for other in ("ie", "mcl"):
            what = f"M={m}: CMCL below {other.upper()}"
            yield _lower(found, what, f"{stem}{m}-cmcl", f"{stem}{m}-{other}")


JUDGES: dict[str, Callable[[Evidence, list[float]], Iterator[Part]]] = {
    "abstract": _abstract,
    "table 1": _table1,
    "table 2": _table2,
    "introduction": _cost,
    "figure 1": _figure1,
    "figure 2": _figure2,
    "figure 4a": _figure4a,
    "figure 4b": _figure4b,
}
