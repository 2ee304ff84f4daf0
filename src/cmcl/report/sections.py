"""The order of a report: which sections there are, and what is in each. What has no material is left out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..reproduction.cells import CELLS, TARGETS, Evidence
from ..reproduction.claims import Verdict
from ..reproduction.record import Record
from . import charts, curves
from .drawing import Figure, method_label
from .gather import Material, Run
from .pictures import Gallery, gallery
from .story import modest
from .tables import Table, paper_tables, summary_table
from .words import data_name

RESNETS = ("table3/cifar10-resnet20-ie", "table3/cifar10-resnet20-mcl", "table3/cifar10-resnet20-cmcl")


@dataclass
class Section:
    """A heading, and under it tables, charts and pictures."""

    id: str
    title: str
    intro: str = ""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    galleries: list[Gallery] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # what should be here, and why it is not


def sections(material: Material, verdicts: list[Verdict]) -> list[Section]:
    """All of a report but its first screen and its records."""
    found = list(_of_runs(material))
    return [*_of_paper(material, verdicts), *found] if material.paper else found


def _of_paper(material: Material, verdicts: list[Verdict]) -> Iterator[Section]:
    yield Section(
        "tables",
        "The paper's tables",
        "The paper's numbers, with ours beside them. A number of ours leads to the records behind it.",
        tables=paper_tables(material.evidence),
    )
    yield Section(
        "claims",
        "The paper's claims",
        "A claim holds if all its parts do. What each part needs to hold is said beside it.",
        verdicts=verdicts,
    )
    yield _figures(material)
    if known := _standing(material.evidence, RESNETS):
        yield Section(
            "calibration",
            "Calibration",
            f"Five ResNet-20 on CIFAR-10. {_modest(material.evidence)}",
            figures=[
                charts.reliability("paper-reliability", "Reliability", known),
                charts.risk_coverage("paper-risk", "Risk and coverage", known),
            ],
        )


def _modest(evidence: Evidence) -> str:
    ie, _, cmcl = RESNETS
    return modest(evidence.standing(cmcl), evidence.standing(ie))


def _figures(material: Material) -> Section:
    """Figures 1 to 4, and which of them are missing."""
    section = Section("figures", "The paper's figures")
    for id, found in paper_figures(material.evidence).items():
        if found is not None:
            section.figures.append(found)
            continue
        cells = [cell for cell in CELLS if cell.where[0].startswith(f"fig{id}")]
        begun = any(material.evidence.standing(cell.id) for cell in cells)
        section.missing.append(_missing(id, "only single points so far" if begun else "not measured yet"))
    pictured = _pictured([run for run in material.runs if run.data == "icoseg"])
    section.galleries = [gallery(run, f"figure3-{i}") for i, run in enumerate(pictured)]
    if not pictured:
        shown = "its pictures are in run folders, so name those too"
        section.missing.append(_missing("3", shown))
    section.missing.sort()
    return section


def _missing(figure: str, hint: str) -> str:
    return f"Figure {figure}: {TARGETS['figures'][figure]} ({hint})"


def paper_figures(evidence: Evidence) -> dict[str, Figure | None]:
    """Figures 1, 2 and 4 as far as they are measured; each panel shows the first seed there is."""
    one, two = (
        _standing(evidence, [cell.id for cell in CELLS if cell.where[0].startswith(figure)])
        for figure in ("fig1", "fig2")
    )
    return {
        "1": charts.heat_maps("figure1", "Figure 1: who knows which class", one) if one else None,
        "2": charts.entropies("figure2", "Figure 2: how sure the members are", two, averaged=["ie"])
        if two
        else None,
        "4": curves.against_members("figure4", "Figure 4: error against the number of members", evidence),
    }


def _standing(evidence: Evidence, ids: Sequence[str]) -> list[tuple[str, Record]]:
    """For each cell that is measured, its method and its first record."""
    return [(method_label(record), record) for id in ids for record in evidence.standing(id)[:1]]


def _of_runs(material: Material) -> Iterator[Section]:
    if material.paper and material.records:
        intro = "Everything that this report is made from."
        table = summary_table(material.records, material.labels)
        yield Section("runs", "All runs", intro, tables=[table])
    for (key, name), runs in _by_data(material.runs).items():
        yield from _of_data(key, name, runs, material)


def _by_data(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs by their data's key and name; own data have none, and are told apart by what was measured."""
    own = list(dict.fromkeys(_checksum(run) for run in runs if run.data is None))
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        key, name = run.data or "own", data_name(run.data)
        if run.data is None and len(own) > 1:
            number = own.index(_checksum(run)) + 1
            key, name = f"{key}-{number}", f"{name} {number}"
        groups.setdefault((key, name), []).append(run)
    return groups


def _checksum(run: Run) -> str | None:
    return run.record.checksums.get("test") if run.record else None


def _of_data(key: str, data: str, runs: list[Run], material: Material) -> Iterator[Section]:
    measured = [(run.label, run.record) for run in runs if run.record]
    with_rows = [run for run in runs if run.rows]
    if trained := [run for run in with_rows if len({row["epoch"] for row in run.rows}) > 1]:
        learning = Section(f"training-{key}", f"Training on {data}")
        learning.figures = [curves.training(f"curves-{key}", "Training curves", trained)]
        learning.figures += [
            curves.wins(f"wins-{key}-{i}", f"Who learns what: {run.label}", run, len(material.runs))
            for i, run in enumerate(_one_of_each(filter(_has_choice, trained)))
        ]
        yield learning
    if measured:
        few = [(run.label, run.record) for run in _one_of_each(runs) if run.record]
        few = [
            pair for pair in few if len(pair[1].members) > 1
        ] or few  # one network alone has none to compare
        classes = next((run.classes for run in runs if run.classes), None)
        yield Section(
            f"members-{key}",
            f"The members on {data}",
            figures=[
                charts.heat_maps(f"classes-{key}", "Who knows which class", few, classes),
                charts.entropies(f"entropies-{key}", "How sure the members are", few),
            ],
        )
        yield Section(
            f"trust-{key}",
            f"Calibration on {data}",
            figures=[
                charts.reliability(f"reliability-{key}", "Reliability", measured),
                charts.risk_coverage(f"risk-{key}", "Risk and coverage", measured),
            ],
        )
    shown = material.paper and key == "icoseg"  # as figure 3
    if not shown and (pictured := _pictured(runs)):
        dense = pictured[0].gallery is not None and pictured[0].gallery["task"] == "segmentation"
        yield Section(
            f"pictures-{key}",
            f"What the members see: {data}" if dense else f"Where members disagree: {data}",
            INTRO_SCENES if dense else INTRO_CARDS,
            galleries=[gallery(run, f"gallery-{key}-{i}") for i, run in enumerate(pictured)],
        )


INTRO_SCENES = (
    "Image, ground truth and each member's prediction with its share of wrong pixels, for the images on "
    "which the members differ most. Chosen is the most confident member."
)
INTRO_CARDS = (
    "The test images on which members contradict each other most surely. Marked with an arrow: the most "
    "confident member. All: the averaged answer."
)


def _has_choice(run: Run) -> bool:
    """Whether its members compete at all: in an independent ensemble everybody learns everything."""
    method = None if run.record is None else run.record.recipe["method"]
    return method != "ie" and any(row.get("win_rates") for row in run.rows)


def _one_of_each(runs: "Sequence[Run] | filter[Run]") -> list[Run]:
    """The first seed of each recipe: more would fill the page with the same."""
    return list({run.name: run for run in reversed(list(runs))}.values())[::-1]


def _pictured(runs: Sequence[Run]) -> list[Run]:
    """Runs whose members can disagree, CMCL first: the page unfolds the first."""
    found = [run for run in _one_of_each(runs) if run.gallery and _several(run.gallery["items"])]
    return sorted(found, key=lambda run: run.record is None or run.record.recipe["method"] != "cmcl")


def _several(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are pictures, with answers of two members or more."""
    return any(len(item["members"]) > 1 for item in items)
