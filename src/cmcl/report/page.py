"""The report as one HTML file that needs nothing else: style, script, charts and images are inside."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from .. import __version__
from .._files import replacing
from ..data.registry import cache_root
from ..reproduction.cells import ABSTRACT, CELLS, TARGETS, Evidence
from ..reproduction.claims import Verdict, judge
from ..reproduction.record import Record
from . import figures
from .figures import VEGA_LITE, Figure
from .load import METHODS, Inputs, Run, method_of
from .markdown import EXCLUDED
from .summary import coverage, paper_summary, repeats, summary
from .tables import Table, dataset_title, headline_table, paper_table, run_table
from .theme import DARK, LIGHT, config

TEMPLATES = Path(__file__).parent / "template"
FIGURE3 = {cell.recipe.data for cell in CELLS if cell.where[0] == "fig3"}  # datasets with images in figure 3
CARDS = (
    "The test images on which members disagree most confidently. An arrow marks the most confident member; "
    "all is the averaged prediction."
)
SCENES = (
    "Image, ground truth and each member's prediction with its percentage of wrong pixels, for the images on "
    "which the members differ most. Chosen is the most confident member."
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
    galleries: list[Run] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # what should be here, and why it is not


def render(inputs: Inputs) -> str:
    """The page."""
    verdicts = judge(inputs.evidence) if inputs.paper else []
    own = [run for run in inputs.runs if run.record]
    parts, sentences = sections(inputs, verdicts), summary(own)
    if inputs.paper:
        sentences = [*paper_summary(inputs.evidence), coverage(inputs.evidence, verdicts), *sentences]
    specs = {f"{f.id}-{i}": p.spec for part in parts for f in part.figures for i, p in enumerate(f.panels)}
    themes = {name: {**theme, "config": config(theme)} for name, theme in (("light", LIGHT), ("dark", DARK))}
    page = _environment().get_template("page.html")
    return page.render(
        title=f"Confident multiple choice learning: {'reproduction' if inputs.paper else 'runs'}",
        version=__version__,
        sentences=sentences,
        headline=headline_table(inputs.evidence)
        if inputs.paper
        else run_table(repeats(own))
        if own
        else None,
        skipped=inputs.skipped,
        unfinished=[run.label for run in inputs.runs if run.record is None],
        excluded=EXCLUDED.format(inputs.excluded) if inputs.excluded else "",
        sections=parts,
        records=_by_recipe(inputs.measured),
        specs=specs,
        themes=themes,
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "page.js").read_text(encoding="utf-8"),
        vega=_vega() if specs else "",
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
    """Everything below the first screen but the records; sections without content are left out."""
    found = list(_paper_sections(inputs, verdicts)) if inputs.paper else []
    datasets = dict.fromkeys(_dataset(run) for run in inputs.runs)
    for number, data in enumerate(datasets):
        runs = [run for run in inputs.runs if _dataset(run) == data]
        own = sum(name is None for name, _ in datasets) > 1 and data[0] is None
        suffix = f" {number + 1}" if own else ""
        title = dataset_title(data[0]) + suffix
        found += _run_sections((data[0] or "own") + suffix.replace(" ", "-"), title, runs, inputs)
    return found


def _dataset(run: Run) -> tuple[str | None, str | None]:
    """A dataset by name, the user's own by the checksum of its test set."""
    return run.data, run.record.checksums.get("test") if run.record and run.data is None else None


def _paper_sections(inputs: Inputs, verdicts: Sequence[Verdict]) -> Iterator[Section]:
    intro = "The paper's numbers, with ours beside them. Each of ours links to its records."
    tables = [paper_table(name, inputs.evidence) for name in ("table1", "table2", "table3")]
    yield Section("tables", "The paper's tables", intro, tables)
    yield Section("claims", "The paper's claims", "A claim holds if all its parts do.", verdicts=verdicts)
    yield _figures(inputs)
    first = [cell.id for cell in ABSTRACT if cell.where[-1] == ABSTRACT[0].where[-1]]
    if runs := _of_cells(inputs.evidence, first):
        charts = [
            figures.reliability("paper-reliability", "Reliability", runs),
            figures.risk_coverage("paper-risk", "Risk and coverage", runs),
        ]
        yield Section("calibration", f"Calibration on {dataset_title(runs[0].data)}", figures=charts)
    if inputs.measured:
        table = run_table(repeats(inputs.measured))
        yield Section("runs", "All runs", "All records behind this report.", [table])


def _figures(inputs: Inputs) -> Section:
    """Figures 1 to 4 of the paper, and which of them are missing."""
    found = paper_figures(inputs.evidence)
    galleries = _pictured([run for run in inputs.runs if run.data in FIGURE3])
    missing = {number: "not measured" for number, figure in found.items() if figure is None}
    if not galleries:
        missing["3"] = "its images are in run folders, so name those too"
    return Section(
        "figures",
        "The paper's figures",
        figures=[figure for figure in found.values() if figure],
        galleries=galleries,
        missing=[f"Figure {n}: {TARGETS['figures'][n]} ({reason})" for n, reason in sorted(missing.items())],
    )


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
        adversarial = ", adversarially trained" if record.recipe.get("adversarial") else ""
        found[record.identity] = Run.of(record, METHODS[method_of(record)] + adversarial)
    return list(found.values())


def _run_sections(key: str, title: str, runs: list[Run], inputs: Inputs) -> Iterator[Section]:
    if trained := [run for run in runs if len(run.rows) > 1]:
        charts = [figures.training(f"curves-{key}", "Training curves", trained)]
        compete = [r for r in trained if r.method not in ("ie", "single") and r.rows[-1].specialist_fraction]
        for i, run in enumerate(_first_seeds(compete)):
            id, name = f"specialists-{key}-{i}", f"Specialists: {run.label}"
            charts.append(figures.specialist_fraction(id, name, run, len(inputs.runs)))
        yield Section(f"training-{key}", f"Training on {title}", figures=charts)
    if measured := [run for run in runs if run.record]:
        firsts = _first_seeds(measured)
        several = [run for run in firsts if run.method != "single"] or firsts
        classes = next((run.classes for run in runs if run.classes), None) or ()
        charts = [
            figures.heat_maps(f"classes-{key}", "Accuracy by member and class", several, classes),
            figures.entropies(f"entropies-{key}", "Entropy of the predictions", several),
        ]
        yield Section(f"members-{key}", f"Members on {title}", figures=charts)
        charts = [
            figures.reliability(f"reliability-{key}", "Reliability", measured),
            figures.risk_coverage(f"risk-{key}", "Risk and coverage", measured),
        ]
        yield Section(f"trust-{key}", f"Calibration on {title}", figures=charts)
    if not (inputs.paper and key in FIGURE3) and (pictured := _pictured(runs)):
        intro = SCENES if pictured[0].gallery and pictured[0].gallery.dense else CARDS
        yield Section(f"pictures-{key}", f"Predictions on {title}", intro, galleries=pictured)


def _first_seeds(runs: Iterable[Run]) -> list[Run]:
    """The first seed of each recipe."""
    return list({run.name: run for run in reversed(list(runs))}.values())[::-1]


def _pictured(runs: Sequence[Run]) -> list[Run]:
    """Runs with a gallery of several members, CMCL first: the page unfolds the first."""
    found = [run for run in _first_seeds(runs) if run.gallery and run.gallery.several]
    return sorted(found, key=lambda run: run.method != "cmcl")


def _by_recipe(runs: Sequence[Run]) -> dict[str, list[Record]]:
    """Records by recipe, each under a name of its own: a name may stand for several recipes."""
    groups: dict[str, list[Record]] = {}
    for record in (run.measured for run in runs):
        taken = groups.get(record.name, [record])[0].recipe_hash != record.recipe_hash
        groups.setdefault(f"{record.name} {record.recipe_hash}" if taken else record.name, []).append(record)
    return groups


def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {"slug": slug, "heads": heads}
    filters["compact"] = lambda value: value if isinstance(value, str) else json.dumps(value)
    found.filters |= filters
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return found


def slug(name: str) -> str:
    """A name as part of an address in the page."""
    return re.sub(r"[^\w.-]+", "-", name)


def heads(table: Table) -> list[tuple[str, int]]:
    """The upper heads of a table and how many columns each spans; none if no column has one."""
    groups = [(name, len(list(columns))) for name, columns in groupby(c.group for c in table.columns)]
    return groups if any(name for name, _ in groups) else []


def _vega() -> str:
    """The libraries that draw the charts; bundled once and cached, because it takes seconds."""
    cached = cache_root() / "report" / f"vega-{VEGA_LITE}-{version('vl-convert-python')}.js"
    if cached.is_file():
        return cached.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg]
    bundle = bundle.replace("</script", r"<\/script")
    with suppress(OSError):  # a read-only cache costs time, not the report
        cached.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cached) as part:
            part.write_text(bundle, encoding="utf-8")
    return bundle
