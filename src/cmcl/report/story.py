"""What the numbers mean, in plain sentences that are computed from them."""

from collections.abc import Iterable, Iterator, Sequence

from ..reproduction.cells import TARGETS, Evidence, Records
from ..reproduction.claims import FAILS, HOLDS, INCONCLUSIVE, UNTESTED, Comparison, Verdict
from ..reproduction.record import Record, distinct
from ..reproduction.significance import describe
from .words import DATA, spread

PAPER = "Confident multiple choice learning"


def title(evidence: Evidence) -> str:
    """Of a page on the paper: no more than what is measured."""
    measured, printed = _measured(evidence)
    if not measured:
        return f"{PAPER}: nothing measured yet"
    whole = measured == printed
    return f"{PAPER}, measured again" if whole else f"{PAPER}: {measured} of {printed} cells measured again"


def _measured(evidence: Evidence) -> tuple[int, int]:
    """How many cells of Tables 1 to 3 are measured, and of how many."""
    printed = [row for row in evidence.cells.values() if row["paper"]["top1"] is not None]
    return sum(row["ours"] is not None for row in printed), len(printed)


def of_the_paper(records: Records) -> str:
    """ResNet-20, as the paper's abstract puts it."""
    found = Evidence.of(records)
    parts: list[str] = []
    for data in ("cifar10", "svhn"):
        cells = [f"table3/{data}-resnet20-{method}" for method in ("cmcl", "ie")]
        mine, other = (found.error(cell) for cell in cells)
        if mine and other:
            pair = Comparison.of(found.standing(cells[0]), found.standing(cells[1]))
            numbers = f"{spread(mine)} against {spread(other)} %, {describe(*pair)}"
            beside = f"({numbers}; paper: {_printed(data):.2f} % fewer)"
            change = _change(mine["mean"], other["mean"])
            parts.append(f"{change}{'' if parts else ' errors'} on {DATA[data]} {beside}")
    if not parts:
        return (
            "Whether CMCL makes fewer errors than an independent ensemble of ResNet-20 is not measured yet."
        )
    return (
        f"Compared with an independent ensemble, five ResNet-20 trained with CMCL make {' and '.join(parts)}."
    )


def _printed(data: str) -> float:
    rows = TARGETS["table3"]["rows"]
    cmcl = next(row for row in rows if (row["network"], row["method"]) == ("resnet20", "cmcl"))
    return abs(float(cmcl[data]["relative"]))


def _change(mine: float, other: float) -> str:
    share = 100 * (mine - other) / other if other else 0.0
    return f"{abs(share):.1f} % {'more' if share > 0 else 'fewer'}"


def how_far(records: Records, verdicts: Sequence[Verdict]) -> str:
    """How much of the paper is measured."""
    measured, printed = _measured(Evidence.of(records))
    statuses = [verdict.status for verdict in verdicts]
    held, failed, open_ = map(statuses.count, (HOLDS, FAILS, INCONCLUSIVE))
    near = statuses.count(UNTESTED)
    rest = len(verdicts) - held - near - failed - open_
    noise = f" ({near} by one run each, without a test)" if near else ""
    undecided = f"{open_} inconclusive, " if open_ else ""
    return (
        f"{measured} of the {printed} cells of Tables 1 to 3 are measured. Of {len(verdicts)} claims of the "
        f"paper {held + near} held up{noise}, {failed} did not, {undecided}"
        f"{rest} are not yet measured in full."
    )


def made_on(records: Iterable[Record]) -> str:
    """Which machines and which state of the program the numbers come from; empty without any."""
    found = distinct(records)
    if not found:
        return ""
    machines = _distinct(f"{r.device} ({r.precision}, torch {r.versions.get('torch')})" for r in found)
    commits = _distinct((r.commit or "unknown")[:7] for r in found)
    text = (
        f"Trained on {_listed(machines)}, {'commit' if len(commits) == 1 else 'commits'} {_listed(commits)}."
    )
    if pieces := sum(bool(r.resumed_with) for r in found):
        text += (
            f" {pieces} of the {len(found)} runs {'was' if pieces == 1 else 'were'} resumed with another "
            "machine, version or commit; the record has the stretches."
        )
    return text


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _listed(texts: Sequence[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def modest(cmcl: Sequence[Record], ie: Sequence[Record] = (), *, where: str = "") -> str:
    """Whether CMCL's averaged answers are less sure than they are right, and what mends it; else empty."""
    found = list(_modesty(cmcl))
    if not found:
        return ""
    gap, confidence, accuracy, ece = (sum(column) / len(found) for column in zip(*found, strict=True))
    if ece < MODEST or gap < 0.8 * ece:  # unsure of too much, in most of it
        return ""
    rival = [record.calibration["ece"] for record in ie]
    beside = f", IE's {sum(rival) / len(rival):.1f} %" if rival else ""
    return (
        f"{where}CMCL's averaged answer is too modest: {confidence:.1f} % sure on average, and right in "
        f"{accuracy:.1f} % (its calibration error is {ece:.1f} %{beside}). Members that stay silent lower "
        "the average. One temperature, fitted on held-out examples, mends that: "
        "cmcl.calibration.fit_temperature, docs/rejecting.md."
    )


MODEST = 5.0  # percent of calibration error, from where it is worth a sentence


def _modesty(records: Sequence[Record]) -> Iterator[tuple[float, float, float, float]]:
    """Accuracy less confidence, both of them, and the calibration error, in percent."""
    for record in records:
        bins = record.calibration["reliability"]
        columns = zip(bins["count"], bins["confidence"], bins["accuracy"], strict=True)
        filled = [(n, c, a) for n, c, a in columns if n and c is not None and a is not None]
        if images := sum(n for n, _, _ in filled):
            confidence = sum(n * c for n, c, _ in filled) / images
            accuracy = sum(n * a for n, _, a in filled) / images
            yield accuracy - confidence, confidence, accuracy, record.calibration["ece"]
