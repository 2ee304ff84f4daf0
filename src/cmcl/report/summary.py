"""The summary: CMCL against its baseline in one sentence, with the significance of the difference.

Only comparable runs are compared: same data, network, task, length and number of members. What is tuned for
each method (learning rate, optimizer, batch size) may differ.
"""

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from ..networks import NETWORKS
from ..reproduction.cells import ABSTRACT, Evidence, Records
from ..reproduction.claims import Verdict
from ..reproduction.record import Record
from ..reproduction.significance import Comparison
from .load import METHODS, Run, grouped, method_of
from .tables import dataset_title

MOST = 4  # sentences; the table has all runs
SETTINGS = ("data", "network", "network_options", "preprocess", "subset", "validation")


def summary(runs: Sequence[Run]) -> list[str]:
    """A sentence for each CMCL recipe among complete runs."""
    groups = [group for group in repeats(runs) if group[0].measured.complete]
    own = [group for group in groups if group[0].method == "cmcl"]
    found = []
    for group in own[:MOST]:
        first = group[0]
        rivals = [g for g in groups if _is_baseline(g[0].measured, first.measured)]
        best = min(([run.measured for run in g] for g in rivals), key=_strength, default=[])
        several = sum(g[0].data == first.data for g in own) > 1
        where = dataset_title(first.data) + (f" ({first.name})" if several else "")
        found.append(sentence(where, [run.measured for run in group], best))
    return found


def _strength(group: Sequence[Record]) -> tuple[bool, float]:
    """Sorts baselines: an independent ensemble before a single network, the stronger of several first."""
    return method_of(group[0]) != "ie", fmean(record.scores["top1"] for record in group)


def paper_summary(records: Records) -> list[str]:
    """The comparison of the paper's abstract, as far as it is measured."""
    evidence = Evidence.of(records)
    found = []
    for data in dict.fromkeys(cell.where[-1] for cell in ABSTRACT):
        own = {cell.where[2]: cell for cell in ABSTRACT if cell.where[-1] == data}
        mine, other = (evidence.filling[own[method].id] for method in ("cmcl", "ie"))
        if mine and other:
            cmcl, ie = ((own[method].paper or {})["top1"] for method in ("cmcl", "ie"))
            paper = f" The paper reports {100 * (ie - cmcl) / ie:.2f} % lower."
            where = f"{dataset_title(data)} with five {NETWORKS[own['ie'].where[1]].title}"
            found.append(sentence(where, mine, other) + paper)
    return found or ["The comparison of the paper's abstract is not measured yet."]


def sentence(where: str, mine: Sequence[Record], other: Sequence[Record]) -> str:
    """The errors of CMCL, against those of a baseline if there is one."""

    def means(key: str) -> str:
        values = [f"{fmean(record.scores[key] for record in side):.2f}" for side in (mine, other) if side]
        return f"{' against '.join(values)} %"

    who = f"CMCL and {METHODS[method_of(other[0])]}" if other else "CMCL"
    top1 = Comparison.of(mine, other) if other else f"{means('top1')} (n = {len(mine)})"
    known = all("scaled_ece" in record.scores for record in (*mine, *other))
    scaled = f", {means('scaled_ece')} after temperature scaling" if known else ""
    return (
        f"{who} on {where} {'have' if other else 'has'} a top-1 error of {top1}, an oracle error of "
        f"{means('oracle')} and an ECE of {means('ece')}{scaled}."
    )


def coverage(records: Records, verdicts: Sequence[Verdict]) -> str:
    """How many cells of the paper are measured, and how many claims have which status."""
    printed = [row for row in Evidence.of(records).cells.values() if row["paper"]["top1"] is not None]
    done = sum(row["ours"] is not None for row in printed)
    counts = sorted(Counter(verdict.status for verdict in verdicts).items())
    claims = ", ".join(f"{status} ({count})" for status, count in counts)
    return f"{done} of {len(printed)} cells of Tables 1 to 3 are measured. Claims: {claims}."


def repeats(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of measured runs that differ in the seed alone.

    A record does not describe a custom training loop, so names must agree too, up to the seed at their end.
    """

    def settings(run: Run) -> str:
        record = run.measured
        name = re.sub(rf"([-_ ]*(seed|run))?[-_ .]*(?<!\d)(?<!\d\.)0*{run.seed}$", "", run.name)
        return repr((name, record.recipe_hash, record.complete, record.trained_on, *_comparable(record)))

    found: list[list[Run]] = []
    for group in grouped([run for run in runs if run.record], settings):
        seeds = {run.seed for run in group}
        found += [group] if len(seeds) == len(group) else [[run] for run in group]
    return found


def _comparable(record: Record) -> list[object]:
    """What two runs to be compared have in common, beside the number of members."""
    network = record.network and record.network["digest"]
    settings = [record.recipe.get(key) for key in SETTINGS]
    return [*settings, network, record.task, record.steps, record.test_examples, record.checksums]


def _is_baseline(record: Record, mine: Record) -> bool:
    trained_on = {record.trained_on, mine.trained_on} - {None}  # None: a custom loop, not known
    sizes = {"ie": len(mine.members), "single": 1}
    same = _comparable(record) == _comparable(mine) and len(trained_on) < 2
    return same and len(record.members) == sizes.get(method_of(record), -1)
