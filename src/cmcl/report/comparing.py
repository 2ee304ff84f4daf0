"""Sentences on runs: like is compared with like, CMCL with an independent ensemble first.

Like runs have the same data, network, length and examples; only complete ones count. What is tuned for each
method (learning rate, optimiser, batch size) may differ. M members.
"""

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ..reproduction.record import Record, distinct, spread_of
from ..reproduction.significance import p_value, significant
from .story import modest
from .words import LONG, METHODS, NETWORKS, data_name, method_of, spread

FEW = 1000  # test images; with fewer, a reader should know what one of them weighs
MOST = 3  # sentences on one data set; the table has the rest


def of_runs(records: Sequence[Record]) -> list[str]:
    """For each data set, what its runs tell."""
    records, sentences = distinct(records), []
    for data in dict.fromkeys(record.recipe["data"] for record in records):
        own = [record for record in records if record.recipe["data"] == data]
        sentences += _of_data(data_name(data), own)
    return sentences


def repeats(records: Sequence[Record]) -> list[list[Record]]:
    """Runs that differ in nothing but the seed.

    Of a loop of one's own no record tells all that it did, so its runs must be called alike too, but for the
    seed at the end. Where a seed comes twice they differ in something; only names tell them apart then.
    """
    alike: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        told = record.trained_on or "train" in record.checksums  # by `fit`, or by a command
        name = "" if told else _without_seed(record)
        alike.setdefault((kind(record), record.recipe_hash, str(record.complete), name), []).append(record)
    found: list[list[Record]] = []
    for group in chain.from_iterable(map(_by_what_was_learned, alike.values())):
        names = dict.fromkeys(record.name for record in group)
        named = [[record for record in group if record.name == name] for name in names]
        for one in [group] if _each_seed_once(group) else named:
            found += [one] if _each_seed_once(one) else [[record] for record in one]
    return found


def _without_seed(record: Record) -> str:
    """mine of mine-seed2: loops of one's own often leave a folder for each seed."""
    return re.sub(rf"([-_ ]*(seed|run))?[-_ ]*(?<!\d)(?<!\d\.)0*{record.seed}$", "", record.name)


def _each_seed_once(records: Sequence[Record]) -> bool:
    return len({record.seed for record in records}) == len(records)


def _by_what_was_learned(records: list[Record]) -> list[list[Record]]:
    """Apart, where they are known to have learned from other data."""
    known = dict.fromkeys(record.trained_on for record in records if record.trained_on)
    if len(known) < 2:
        return [records]
    groups = [[record for record in records if record.trained_on == one] for one in [*known, None]]
    return [group for group in groups if group]


def _of_data(data: str, records: Sequence[Record]) -> list[str]:
    complete = [record for record in records if record.complete]
    partial = len(records) - len(complete)
    if not complete:
        return [f"On {data}, there are partial runs only, which are not compared."]
    groups = _groups(complete)
    found: list[str] = []
    silent = ""
    networks = [_network(group[-1]) for group in groups]
    for group, network in list(zip(groups, networks, strict=True))[:MOST]:
        twin = networks.count(network) > 1  # with other options
        more = f" as in {group[-1].name}" if twin else ""
        name = data if len(groups) == 1 else f"{data} with {network}{more}"
        found += _of_group(name, group)
        silent = silent or _modest(name, group)  # once will do
    found[-1] = f"{found[-1]} {_grain(complete[0])}".strip()
    found.append(silent)
    if len(groups) > MOST:
        found.append(f"On {data}, {len(groups) - MOST} more kinds of runs are in the table only.")
    if partial:
        runs = "One partial run is" if partial == 1 else f"{partial} partial runs are"
        found.append(f"On {data}: {runs} in the table only, and not compared.")
    return list(filter(None, found))


def _modest(name: str, group: Sequence[Record]) -> str:
    """Of the first CMCL recipe that is so; a mean over several would be nobody's."""
    recipes, others = repeats(_of(group, "cmcl")), repeats(_of(group, "ie"))
    ie = others[0] if len(others) == 1 else []
    for own in recipes:
        where = f"On {name}, " if len(recipes) == 1 else f"On {name}, {own[0].name}: "
        if text := modest(own, ie, where=where):
            return text
    return ""


def _of(records: Sequence[Record], method: str) -> list[Record]:
    return [record for record in records if method_of(record.recipe) == method]


def _groups(records: Sequence[Record]) -> list[list[Record]]:
    """Like runs together; a single network stands beside the ensembles of its kind."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(kind(record), []).append(record)
    groups = []
    for alike in chain.from_iterable(map(_by_what_was_learned, kinds.values())):
        alone = [record for record in alike if record.recipe["members"] == 1]
        sizes = sorted({record.recipe["members"] for record in alike} - {1})
        ensembles = [[record for record in alike if record.recipe["members"] == m] for m in sizes]
        groups += [[*alone, *group] for group in ensembles or [[]]]
    return groups


def kind(record: Record) -> str:
    """What must be the same for two runs to be compared."""
    keys = ("data", "network", "network_options", "preprocess", "subset", "validation")
    recipe = [record.recipe.get(key) for key in keys]
    own = record.network and record.network["digest"]  # the recipe has no name for it
    alike = [*recipe, own, record.task, record.steps, record.test_examples, record.checksums]
    return json.dumps(alike, sort_keys=True)


def _network(record: Record) -> str:
    network, m = str(record.recipe.get("network") or _own(record)), record.recipe["members"]
    steps = f"({record.steps:,} steps{f', task {record.task}' if record.task else ''})"
    return f"{m if m > 1 else 'a single'} {NETWORKS.get(network, network)} {steps}"


def _own(record: Record) -> str:
    found = record.network
    return f"{found['class']} of {found['parameters']:,} parameters" if found else "own network"


def _of_group(name: str, records: Sequence[Record]) -> list[str]:
    """CMCL beside IE, then the others."""
    order = ("cmcl", "ie", "single", "mcl")
    groups = repeats(sorted(records, key=lambda r: order.index(method_of(r.recipe))))
    methods = [method_of(group[0].recipe) for group in groups]
    if len(set(methods)) < len(methods):  # several of one method: none stands for it
        ie = groups[methods.index("ie")] if methods.count("ie") == 1 else None
        listed = [f"{_called(g, methods)} errs on {_error(g)}{_beside(g, ie)}" for g in groups]
        return [f"On {name}, of {_things(records[0])}: {'; '.join(listed)}."]
    found = dict(zip(methods, groups, strict=True))
    first, *rest = methods
    text = f"On {name}, {LONG[first]} errs on {_error(found[first])} of {_things(records[0])}"
    if methods[:2] == ["cmcl", "ie"]:
        rest = methods[2:]
        text += f", {LONG['ie']} on {_error(found['ie'])}: {_told(found['cmcl'], found['ie'])}"
    if rest:
        others = [f"{LONG[method]} errs on {_error(found[method])}{_near(method, found)}" for method in rest]
        beside = f"{_joined(others)}{_oracle(found)}."
        return [f"{text}.", beside[0].upper() + beside[1:]]
    return [f"{text}."]


def _beside(group: Sequence[Record], ie: Sequence[Record] | None) -> str:
    """A method's difference to an independent ensemble, if there is one."""
    return f", beside IE {_told(group, ie)}" if ie and method_of(group[0].recipe) in ("cmcl", "mcl") else ""


def _called(group: Sequence[Record], methods: Sequence[str]) -> str:
    method = method_of(group[0].recipe)
    return LONG[method] if methods.count(method) == 1 else group[0].name


def _error(records: Sequence[Record]) -> str:
    found = spread_of(records)
    return f"{spread(found)} %" + (f" (n = {found['n']})" if found["n"] > 1 else "")


def _told(cmcl: Sequence[Record], ie: Sequence[Record]) -> str:
    """What the difference is worth."""
    mine, other, examples = spread_of(cmcl), spread_of(ie), cmcl[0].test_examples
    one = "one run each" if mine["n"] == other["n"] == 1 else ""
    if p_value(mine, other, _independent(cmcl[0])) is None:
        runs = one or "one run of one of the two"
        return f"a difference that may be chance; with {runs} of a segmentation nobody can tell"
    if not significant(mine, other, _independent(cmcl[0])):
        noise = f"a difference within the noise of {examples:,} test {_noun(cmcl[0])}s"
        return noise + (f" and {one}" if one else "")
    share = 100 * (mine["mean"] - other["mean"]) / other["mean"] if other["mean"] else 0.0
    amount = f"{abs(share):.1f} % " if share else ""
    return f"{amount}{'fewer' if mine['mean'] < other['mean'] else 'more'} errors" + (one and f" ({one})")


def _near(method: str, found: dict[str, list[Record]]) -> str:
    if "cmcl" not in found:
        return ""
    pair = spread_of(found[method]), spread_of(found["cmcl"]), _independent(found["cmcl"][0])
    if p_value(*pair) is None:
        return " (noise not known)"
    noise = not significant(*pair)
    return f" (within the noise of {METHODS['cmcl']}'s)" if noise else ""


def _oracle(found: dict[str, list[Record]]) -> str:
    """What MCL's oracle error is worth."""
    means: dict[str, Any] = {method: spread_of(group)["mean"] for method, group in found.items()}
    if "mcl" not in means or means["mcl"] <= 2 * min(means.values()):
        return ""
    oracle = spread(spread_of(found["mcl"], "oracle"))
    return f", although MCL's best member for each {_noun(found['mcl'][0])} errs on {oracle} % only"


def _independent(record: Record) -> int | None:
    return None if record.dense else record.test_examples


def _things(record: Record) -> str:
    return "the pixels" if record.dense else f"the test {_noun(record)}s"


def _noun(record: Record) -> str:
    """Own data need not be images."""
    return "example" if record.recipe["data"] is None else "image"


def _grain(record: Record) -> str:
    count = record.test_examples
    few = count < FEW and not record.dense
    return f"One of the {count} test {_noun(record)}s is {100 / count:.2f} %." if few else ""


def _joined(texts: Sequence[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)
