"""The results of runs: CMCL against its baseline with the significance of the difference, and all recipes.

Only comparable runs are compared: same data, network, task, length and number of members. What is tuned for
each method (learning rate, optimizer, batch size) may differ.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from ..networks import NETWORKS
from ..reproduction.cells import ABSTRACT, Evidence, Records
from ..reproduction.claims import Verdict
from ..reproduction.record import Record, spread, spread_text
from ..reproduction.significance import Comparison
from .load import METHODS, Run, grouped, method_of
from .tables import Column, Table, Value, dataset_title, names, number, origin, signed, with_best

BASELINES = ("single", "ie")
MOST = 4  # comparisons shown; the table has all runs
SETTINGS = ("data", "network", "network_options", "preprocess", "subset", "validation")
ERRORS = {
    "top1": "Top-1",
    "oracle": "Oracle",
    "ece": "ECE",
    "scaled_ece": "Scaled ECE",
    "picked": "Picked",
    "member": "Member",
}
NOTE = (
    "Top-1: error of the averaged prediction. Difference: to IE, or else to the single network, on the same "
    "data; ≈: not significant. Oracle: error of the best member for each example. ECE: expected calibration "
    "error; scaled: after temperature scaling. Picked: error of the most confident member's prediction. "
    "Member: mean over the members. Mean ± standard deviation over n seeds; bold: the lowest."
)


class Tile(NamedTuple):
    """One number of the verdict."""

    title: str
    value: str
    other: str  # the baseline's
    verdict: str
    kind: str = ""  # good, bad or near


@dataclass(frozen=True)
class Pair:
    """Runs of CMCL, and comparable runs of a baseline if there are any."""

    where: str
    mine: Sequence[Record]
    other: Sequence[Record]
    more: str = ""

    @property
    def rival(self) -> str:
        """The baseline's method."""
        return METHODS[method_of(self.other[0])] if self.other else ""

    @property
    def scaled(self) -> bool:
        """Whether the ECE after temperature scaling is known."""
        return all("scaled_ece" in record.scores for record in (*self.mine, *self.other))

    def means(self, key: str) -> list[float]:
        """The mean scores of both sides."""
        return [fmean(record.scores[key] for record in side) for side in (self.mine, self.other) if side]

    def __str__(self) -> str:
        """The verdict in a sentence."""
        parts = [
            f"{t.title} {t.value}, {', '.join(filter(None, (t.other, t.verdict)))}" for t in self.tiles[:3]
        ]
        who = f"CMCL against {self.rival} on {self.where}" if self.other else f"CMCL on {self.where}"
        return f"{who}. {'. '.join(parts)}.{self.more}"

    @property
    def tiles(self) -> list[Tile]:
        """Error, oracle error, calibration and cost, each against the baseline."""
        # the paper's prediction of a segmentation is that of the most confident member
        dense = self.mine[0].dense
        key, title = ("picked", "Error of the most confident member") if dense else ("top1", "Top-1 error")
        errors = [
            self._tile(title, key, *self._significance(key)),
            self._tile("Oracle error", "oracle", *self._significance("oracle")),
        ]
        if self.scaled:
            raw = [f"{value:.2f} %" for value in self.means("ece")]
            unscaled = f"as trained: {raw[0]}" + (f" ({self.rival} {raw[1]})" if self.other else "")
            ece = self._tile("ECE, temperature-scaled", "scaled_ece", unscaled)
        else:
            ece = self._tile("ECE, as trained", "ece", "not scaled: cmcl calibrate fits a temperature")
        return [*errors, ece, self._cost()]

    def _tile(self, title: str, key: str, verdict: str, kind: str = "") -> Tile:
        mine, *other = (f"{value:.2f} %" for value in self.means(key))
        return Tile(title, mine, f"{self.rival} {other[0]}" if other else "", verdict, kind)

    def _significance(self, key: str) -> tuple[str, str]:
        """The difference with its interval and p-value, and what they mean."""
        if not self.other:
            return f"n = {len(self.mine)}, no baseline to compare with", ""
        pair = Comparison.of(self.mine, self.other, key)
        difference = f"{signed(pair.difference)} points"
        if pair.interval is None:
            return f"{difference} ({pair.test})", "near"
        low, high = pair.interval
        interval = f"{difference}, 95 % CI {signed(low)} to {signed(high)}"
        if not pair.significant:
            return f"{interval}; not significant ({pair.test})", "near"
        return f"{interval}; significant ({pair.test})", "good" if pair.gain > 0 else "bad"

    def _cost(self) -> Tile:
        """Training time; its ratio only on the same device in the same precision."""
        m = len(self.mine[0].members)
        seconds = [fmean(r.seconds for r in side) for side in (self.mine, self.other) if side]
        value, *other = map(duration, seconds)
        verdict = f"prediction runs {m} networks" if m > 1 else "prediction runs one network"
        if other and len({(r.device, r.precision) for r in (*self.mine, *self.other)}) > 1:
            verdict = f"on other devices: not comparable; {verdict}"
        elif other and min(seconds) > 0:
            verdict = f"{seconds[0] / seconds[1]:.2f} times {self.rival}; {verdict}"
        return Tile("Training time", value, f"{self.rival} {other[0]}" if other else "", verdict)


def duration(seconds: float) -> str:
    """A time for a person."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def pairs(runs: Sequence[Run]) -> list[Pair]:
    """Each CMCL recipe among complete runs, with the strongest comparable baseline."""
    groups = [group for group in repeats(runs) if group[0].measured.complete]
    own = [group for group in groups if group[0].method == "cmcl"]
    found = []
    for group in own[:MOST]:
        first = group[0]
        several = sum(g[0].data == first.data for g in own) > 1
        where = dataset_title(first.data) + (f" ({first.name})" if several else "")
        found.append(Pair(where, [run.measured for run in group], _baseline(group, groups)))
    return found


def _baseline(group: Sequence[Run], groups: Iterable[Sequence[Run]]) -> list[Record]:
    """The best comparable baseline: IE, then IE with adversarial training, then a single network."""

    def order(found: list[Record]) -> tuple[bool, bool, float]:
        adversarial = bool(found[0].recipe.get("adversarial"))
        return method_of(found[0]) != "ie", adversarial, fmean(record.scores["top1"] for record in found)

    rivals = [[r.measured for r in g] for g in groups if _is_baseline(g[0].measured, group[0].measured)]
    return min(rivals, key=order, default=[])


def paper_pairs(records: Records) -> list[Pair]:
    """The comparison of the paper's abstract, as far as it is measured."""
    evidence, found = Evidence.of(records), []
    for data in dict.fromkeys(cell.where[-1] for cell in ABSTRACT):
        own = {cell.where[2]: cell for cell in ABSTRACT if cell.where[-1] == data}
        mine, other = (evidence.filling[own[method].id] for method in ("cmcl", "ie"))
        if mine and other:
            cmcl, ie = ((own[method].paper or {})["top1"] for method in ("cmcl", "ie"))
            paper = f" The paper reports {100 * (ie - cmcl) / ie:.2f} % lower."
            where = f"{dataset_title(data)} with five {NETWORKS[own['ie'].where[1]].title}"
            found.append(Pair(where, mine, other, paper))
    return found


def paper_summary(records: Records) -> list[str]:
    """The comparison of the paper's abstract in sentences."""
    return list(map(str, paper_pairs(records))) or [
        "The comparison of the paper's abstract is not measured yet."
    ]


def coverage(records: Records, verdicts: Sequence[Verdict]) -> str:
    """How many cells of the paper are measured, and how many claims have which status."""
    printed = [row for row in Evidence.of(records).cells.values() if row["paper"]["top1"] is not None]
    done = sum(row["ours"] is not None for row in printed)
    counts = sorted(Counter(verdict.status for verdict in verdicts).items())
    claims = ", ".join(f"{status} ({count})" for status, count in counts)
    return f"{done} of {len(printed)} cells of Tables 1 to 3 are measured. Claims: {claims}."


def result_tables(id: str, runs: Sequence[Run]) -> list[Table]:
    """A table for each dataset, with a row for each recipe: the mean over its seeds."""
    datasets = grouped([run for run in runs if run.record], lambda run: run.dataset)
    found = [_result_table(f"{id}-{number}", group) for number, group in enumerate(datasets)]
    return [replace(table, note=NOTE if table is found[-1] else "") for table in found]


def _result_table(id: str, runs: Sequence[Run]) -> Table:
    groups = sorted(repeats(runs), key=lambda group: list(METHODS).index(str(group[0].method)))
    known = [key for key in ERRORS if any(key in run.measured.scores for run in runs)]
    columns = [*names("Method", "Run"), *(Column(ERRORS[key], lower=True) for key in known)]
    rows = []
    for group in groups:
        first = group[0].measured
        partial = "" if first.complete else " (partial)"
        row = [Value(METHODS[str(group[0].method)]), Value(_common_name(group) + partial, link=first.name)]
        row += [_mean([run.measured.scores.get(key) for run in group]) for key in known]
        row += [number(fmean(run.measured.seconds for run in group), 0), number(len(group), 0)]
        rows.append([*row[:3], _difference(group, groups), *row[3:]])
    for column in (2, *range(4, 3 + len(known))):
        rows = with_best(rows, column)
    columns = [*columns[:3], Column("difference"), *columns[3:], Column("Seconds"), Column("n")]
    caption = f"Errors on the test set of {dataset_title(runs[0].data)}, %"
    return Table(id, caption, columns, rows, "", origin(run.measured for run in runs), keys=2)


def _difference(group: Sequence[Run], groups: Sequence[Sequence[Run]]) -> Value:
    """The top-1 error less that of the baseline; a dash for the baselines themselves."""
    first = group[0]
    if first.method in BASELINES or not (first.measured.complete and (other := _baseline(group, groups))):
        return Value("–")
    pair = Comparison.of([run.measured for run in group], other)
    return Value(signed(pair.difference), pair.difference, mark=None if pair.significant else "near")


def _mean(values: Sequence[float | None]) -> Value:
    """Mean and standard deviation; a dash unless all values are known."""
    known = [value for value in values if value is not None]
    found = spread(known) if len(known) == len(values) else None
    return number(None) if found is None else Value(spread_text(found), found["mean"])


def _common_name(group: Sequence[Run]) -> str:
    listed = list(dict.fromkeys(run.name for run in group))
    return ", ".join(listed) if len(listed) <= 3 else f"{listed[0]} to {listed[-1]}"


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
    return same and record.complete and len(record.members) == sizes.get(method_of(record), -1)
