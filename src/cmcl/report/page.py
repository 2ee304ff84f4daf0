"""The report as one HTML file that needs nothing else: style, script, charts and images are inside."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from .. import __version__
from ..reproduction.cells import ABSTRACT, CELLS, TARGETS, Evidence
from ..reproduction.claims import Verdict, judge
from ..reproduction.recipes import find
from ..reproduction.record import Record
from ..training.config import Recipe
from . import figures, modern
from .examples import Examples, Shot, compared, scenes
from .figures import Figure
from .load import METHODS, Inputs, Run, grouped, method_of
from .markdown import EXCLUDED
from .summary import coverage, pairs, paper_pairs, result_tables
from .tables import Table, dataset_title, headline_table, paper_table
from .theme import DARK, FONT, LIGHT, variables

TEMPLATES = Path(__file__).parent / "template"
PAPER = "https://arxiv.org/abs/1706.03475"
FIGURE3 = {cell.recipe.data for cell in CELLS if cell.where[0] == "fig3"}  # datasets with images in figure 3
SCENES = (
    "Image, ground truth and each member's prediction with its percentage of wrong pixels: images from all "
    "over the test set, then those on which the members differ most. A frame marks the most confident member."
)


@dataclass
class Section:
    """A heading with tables, figures and images."""

    id: str
    title: str
    intro: str = ""
    tables: Sequence[Table] = ()
    figures: list[Figure] = field(default_factory=list)
    verdicts: Sequence[Verdict] = ()
    examples: Examples | None = None
    scenes: Sequence[Shot] = ()
    missing: list[str] = field(default_factory=list)  # what should be here, and why it is not


def render(inputs: Inputs) -> str:
    """The page."""
    verdicts = judge(inputs.evidence) if inputs.paper else []
    own = [run for run in inputs.runs if run.record]
    page = _environment().get_template("page.html")
    return page.render(
        title=f"Confident multiple choice learning: {'reproduction' if inputs.paper else 'runs'}",
        version=__version__,
        paper=PAPER,
        font=FONT,
        pairs=[*(paper_pairs(inputs.evidence) if inputs.paper else []), *pairs(own)],
        coverage=coverage(inputs.evidence, verdicts) if inputs.paper else "",
        skipped=inputs.skipped,
        unfinished=[run.label for run in inputs.runs if run.record is None],
        excluded=EXCLUDED.format(inputs.excluded) if inputs.excluded else "",
        sections=sections(inputs, verdicts),
        records=_by_recipe(inputs.measured),
        light=variables(LIGHT),
        dark=variables(DARK),
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "page.js").read_text(encoding="utf-8"),
    )


def save_figures(inputs: Inputs, folder: Path, format: str) -> None:
    """Write every figure of the page into a folder, as svg, png or pdf."""
    found = [figure for section in sections(inputs, []) for figure in section.figures]
    if not found:
        raise ValueError(
            "sources must hold something to draw. Got no figure of the paper, and no run that is finished "
            "and evaluated on the whole test set."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for figure in found:
        figures.save(figure, folder / f"{figure.id}.{format}")


def sections(inputs: Inputs, verdicts: Sequence[Verdict]) -> list[Section]:
    """Everything below the verdict but the records; sections without content are left out."""
    found = list(_paper_sections(inputs, verdicts)) if inputs.paper else []
    drawn = (modern.error_against_seconds(inputs.evidence), modern.gain_against_size(inputs.evidence))
    if shown := [figure for figure in drawn if figure]:
        found.append(Section("modern", "Members trained as today", figures=shown))
    datasets = grouped(inputs.runs, lambda run: run.dataset)
    own = sum(runs[0].data is None for runs in datasets)
    for number, runs in enumerate(datasets, start=1):
        suffix = f" {number}" if own > 1 and runs[0].data is None else ""
        key = (runs[0].data or "own") + suffix.replace(" ", "-")
        found += _run_sections(key, dataset_title(runs[0].data) + suffix, runs)
    return found


def _paper_sections(inputs: Inputs, verdicts: Sequence[Verdict]) -> Iterator[Section]:
    yield Section("results", "Results", tables=[headline_table(inputs.evidence)])
    intro = "The paper's numbers, with ours beside them. Each of ours links to its records."
    tables = [paper_table(name, inputs.evidence) for name in ("table1", "table2", "table3")]
    yield Section("tables", "The paper's tables", intro, tables)
    yield Section("claims", "The paper's claims", "A claim holds if all its parts do.", verdicts=verdicts)
    found = paper_figures(inputs.evidence)
    missing = {number: "not measured" for number, figure in found.items() if figure is None}
    if not any(run.data in FIGURE3 and run.gallery for run in inputs.runs):
        missing["3"] = "its images are in run folders, so name those too"
    yield Section(
        "figures",
        "The paper's figures",
        figures=[figure for figure in found.values() if figure],
        missing=[f"Figure {n}: {TARGETS['figures'][n]} ({reason})" for n, reason in sorted(missing.items())],
    )
    first = [cell.id for cell in ABSTRACT if cell.where[-1] == ABSTRACT[0].where[-1]]
    if runs := _of_cells(inputs.evidence, first):
        title = f"Calibration on {dataset_title(runs[0].data)}"
        yield Section("calibration", title, figures=_calibration("paper", runs))
    if inputs.measured:
        tables = result_tables("all", inputs.measured)
        yield Section("runs", "All runs", "All records behind this report.", tables)


def _calibration(key: str, runs: Sequence[Run]) -> list[Figure]:
    reliability = figures.reliability(f"reliability-{key}", "Reliability", runs)
    risk = figures.risk_coverage(f"risk-{key}", "Risk and coverage", runs)
    return [reliability, risk] if reliability.panels else [risk]  # with few images no bin has enough


def paper_figures(evidence: Evidence) -> dict[str, Figure | None]:
    """Figures 1, 2 and 4 as far as they are measured; each panel shows the first seed."""
    one, two = (
        _of_cells(evidence, [cell.id for cell in CELLS if cell.where[0].startswith(figure)])
        for figure in ("fig1", "fig2")
    )
    title = "Figure 2: entropy of the predictions"
    return {
        "1": figures.heat_maps("figure1", "Figure 1: accuracy by member and class", one) if one else None,
        "2": figures.entropies("figure2", title, two, averaged=["ie"]) if two else None,
        "4": figures.against_members("figure4", "Figure 4: error against the number of members", evidence),
    }


def _of_cells(evidence: Evidence, ids: Iterable[str]) -> list[Run]:
    """The first record of each cell, labelled with its method."""
    found = {}
    for record in (record for id in ids for record in evidence.filling[id][:1]):
        more = " + adversarial training" * bool(record.recipe.get("adversarial"))
        found[record.identity] = Run.of(record, METHODS[method_of(record)] + more)
    return list(found.values())


def _run_sections(key: str, title: str, runs: Sequence[Run]) -> Iterator[Section]:
    measured, trained = ([run for run in runs if run.record], [run for run in runs if len(run.rows) > 1])
    firsts = _first_seeds(measured)
    if measured:
        yield Section(
            f"results-{key}", f"Results on {title}", tables=result_tables(f"summary-{key}", measured)
        )
    pictured = sorted(_first_seeds(runs), key=lambda run: run.method != "cmcl")
    if cards := compared(pictured):
        yield Section(f"pictures-{key}", f"Predictions on {title}", cards.intro, examples=cards)
    if shots := scenes(pictured):
        yield Section(f"pictures-{key}", f"Predictions on {title}", SCENES, scenes=shots)
    if measured:
        several = [run for run in firsts if run.method != "single"] or firsts
        classes = next((run.gallery.classes for run in runs if run.gallery), ())
        charts = [
            figures.heat_maps(f"classes-{key}", "Specialisation", several, classes),
            figures.entropies(f"entropies-{key}", "Entropy of the predictions", several),
        ]
        yield Section(f"members-{key}", f"Members on {title}", figures=charts)
        yield Section(f"trust-{key}", f"Calibration on {title}", figures=_calibration(key, firsts))
    if trained:
        chart = figures.training(f"curves-{key}", "Training curves", trained)
        yield Section(f"training-{key}", f"Training on {title}", figures=[chart])


def _first_seeds(runs: Iterable[Run]) -> list[Run]:
    """The first seed of each recipe."""
    return list({run.name: run for run in reversed(list(runs))}.values())[::-1]


def _by_recipe(runs: Sequence[Run]) -> dict[str, list[Record]]:
    """Records by recipe, each under a name of its own: a name may stand for several recipes."""
    groups: dict[str, list[Record]] = {}
    for record in (run.measured for run in runs):
        taken = groups.get(record.name, [record])[0].recipe_hash != record.recipe_hash
        groups.setdefault(f"{record.name} {record.recipe_hash}" if taken else record.name, []).append(record)
    return groups


def command(records: Sequence[Record]) -> str:
    """What trains these seeds of a recipe again: a command, or Python for your own network and data."""
    first, seeds = records[0], sorted(record.seed for record in records)
    words = [["--seed", str(seed)] for seed in seeds]
    if len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        words = [[*words[0], "--seeds", str(len(seeds))]]
    for name in (first.name, *(first.name.rsplit("-", cut)[0] for cut in range(1, first.name.count("-")))):
        with suppress(ValueError, TypeError):
            base = find(name)
            before = base.to_json()
            changes = {key: value for key, value in first.recipe.items() if before.get(key) != value}
            if replace(base, **changes).hash == first.recipe_hash:
                sets = [f"--set={key}={json.dumps(value)}" for key, value in changes.items()]
                return "\n".join(shlex.join(["cmcl", "train", name, *more, *sets]) for more in words)
    usual = Recipe(steps=1).to_json()
    fields = ", ".join(f"{k}={v!r}" for k, v in first.recipe.items() if usual.get(k) != v or k == "steps")
    calls = [f"cmcl.fit(ensemble, train, recipe=recipe, seed={seed})" for seed in seeds]
    return "\n".join([f"recipe = cmcl.Recipe({fields})", *calls])


def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {"slug": slug, "heads": heads, "command": command, "svg": figures.inline_svg}
    filters["compact"] = lambda value: value if isinstance(value, str) else json.dumps(value)
    found.filters |= filters
    return found


def slug(name: str) -> str:
    """A name as part of an address in the page."""
    return re.sub(r"[^\w.-]+", "-", name)


def heads(table: Table) -> list[tuple[str, int]]:
    """The upper heads of a table and how many columns each spans; none if no column has one."""
    groups = [(name, len(list(columns))) for name, columns in groupby(c.group for c in table.columns)]
    return groups if any(name for name, _ in groups) else []
