"""What the numbers mean, in plain sentences that are computed from them."""

from collections.abc import Sequence
from statistics import fmean

from ..experiments.claims import FAILS, HOLDS, Verdict
from ..experiments.evidence import Evidence, Records
from ..experiments.paper import TARGETS
from ..experiments.records import Record
from .words import DATA, LONG, METHODS, data_name, method_of

FEW = 1000  # test images; with fewer, a reader should know what one of them weighs


def of_the_paper(records: Records) -> str:
    """ResNet-20, as the paper's abstract puts it."""
    found = Evidence.of(records).cells
    parts: list[str] = []
    for data in ("cifar10", "svhn"):
        cmcl, ie = (found[f"table3/{data}-resnet20-{method}"] for method in ("cmcl", "ie"))
        if cmcl["ours"] and ie["ours"]:
            mine, other = (row["ours"]["top1"]["mean"] for row in (cmcl, ie))
            beside = f"({mine:.2f} against {other:.2f} %; paper: {_printed(data):.2f} % fewer)"
            parts.append(f"{_change(mine, other)}{'' if parts else ' errors'} on {DATA[data]} {beside}")
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
    printed = [row for row in Evidence.of(records).cells.values() if row["paper"]["top1"] is not None]
    measured = sum(row["ours"] is not None for row in printed)
    count = {status: sum(v.status == status for v in verdicts) for status in (HOLDS, FAILS)}
    rest = len(verdicts) - sum(count.values())
    return (
        f"{measured} of the {len(printed)} cells of Tables 1 to 3 are measured. Of the paper's "
        f"{len(verdicts)} claims {count[HOLDS]} held up, {count[FAILS]} did not, {rest} are not yet measured "
        "in full."
    )


def of_runs(records: Sequence[Record]) -> list[str]:
    """For each data set, who is best, and what MCL's oracle error is worth."""
    return [
        _of_data(data, [r for r in records if r.recipe["data"] == data])
        for data in dict.fromkeys(r.recipe["data"] for r in records)
    ]


def _of_data(data: str | None, records: Sequence[Record]) -> str:
    errors: dict[str, list[Record]] = {}
    for record in records:
        errors.setdefault(method_of(record.recipe), []).append(record)
    top1 = {method: _mean(found, "top1") for method, found in errors.items()}
    best = min(top1, key=lambda method: top1[method])
    others = [
        f"{METHODS[m]} {top1[m]:.2f} %" for m in ("cmcl", "single", "ie", "mcl") if m in top1 and m != best
    ]
    text = f"On {data_name(data)}, {LONG[best]} errs least, on {top1[best]:.2f} % of {_things(records[0])}"
    if others:
        text += f"; {', '.join(others[:-1]) + ' and ' if others[1:] else ''}{others[-1]}"
    if "mcl" in top1 and top1["mcl"] > 2 * top1[best]:
        text += (
            f", although MCL's best member for each image errs on {_mean(errors['mcl'], 'oracle'):.2f} % only"
        )
    images = records[0].test_examples
    if images < FEW and "test" not in records[0].entropy:
        text += f". One of the {images} test images is {100 / images:.2f} %"
    return f"{text}."


def _mean(records: Sequence[Record], key: str) -> float:
    return fmean(record.errors["expected"][key] for record in records)


def _things(record: Record) -> str:
    return "the pixels" if "test" in record.entropy else "the test images"
