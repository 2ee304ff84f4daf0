"""The report as one HTML file that needs nothing else: style, script, charts and pictures are inside."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from .._files import replacing
from ..data.registry import cache_root
from ..reproduction.claims import judge
from ..reproduction.record import Record
from . import story
from .alarms import CURE, alarms
from .comparing import of_runs
from .drawing import library, vega_lite_version, vl_convert
from .gather import Material
from .sections import Section, sections
from .tables import Table, headline_table, summary_table
from .themes import DARK, LIGHT, config

TEMPLATES = Path(__file__).parent / "template"


def render(material: Material) -> str:
    """The page."""
    verdicts = judge(material.evidence) if material.paper else []
    parts = sections(material, verdicts)
    sentences = of_runs([run.record for run in material.runs if run.record])
    if material.paper:
        sentences = [
            story.of_the_paper(material.evidence),
            story.how_far(material.evidence, verdicts),
            *sentences,
        ]
    specs = {f"{f.id}-{i}": p.spec for part in parts for f in part.figures for i, p in enumerate(f.panels)}
    template = _environment().get_template("page.html")
    page = template.render(
        title=story.title(material.evidence) if material.paper else "Ensembles that know what they know",
        version=__version__,
        sentences=sentences,
        headline=_headline(material),
        notes=material.notes,
        alarms=alarms(material.runs),
        cure=CURE,
        unfinished=[run.label for run in material.runs if run.record is None],
        left_out=material.left_out,
        sections=parts,
        records=_grouped(material.records),
        specs=specs,
        themes={
            name: {**theme, "config": config(theme)} for name, theme in (("light", LIGHT), ("dark", DARK))
        },
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "page.js").read_text(encoding="utf-8"),
        vega=_vega() if specs else "",
    )
    return str(page)


def _environment() -> Any:
    jinja2 = library("jinja2")
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"slug": slug, "compact": _compact, "heads": heads}
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return found


def slug(name: str) -> str:
    """A name as part of an address in the page."""
    return re.sub(r"[^\w.-]+", "-", name)


def heads(table: Table) -> list[tuple[str, int]]:
    """The upper heads of a table and how many columns each spans; none if no column has one."""
    groups: list[tuple[str, int]] = []
    for column in table.columns:
        if groups and groups[-1][0] == column.group:
            groups[-1] = (column.group, groups[-1][1] + 1)
        else:
            groups.append((column.group, 1))
    return groups if any(name for name, _ in groups) else []


def _compact(value: Any) -> str:
    """A value of a recipe, short."""
    return value if isinstance(value, str) else json.dumps(value)


def _headline(material: Material) -> Table | None:
    if material.paper:
        return headline_table(material.evidence)
    measured = [run.record for run in material.runs if run.record]
    return summary_table(measured, material.labels) if measured else None


def _grouped(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by recipe, each under a name of its own: a name may have stood for several recipes."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        taken = groups.get(record.name, [record])[0].recipe_hash != record.recipe_hash
        groups.setdefault(f"{record.name} {record.recipe_hash}" if taken else record.name, []).append(record)
    return groups


def _vega() -> str:
    """The libraries that draw the charts, from vl-convert; bundled once and kept: it takes seconds."""
    library, version = vl_convert(), vega_lite_version()
    kept = cache_root(None) / "report" / f"vega-{version}-{library.__version__}.js"
    try:
        return kept.read_text(encoding="utf-8")
    except OSError:
        bundle = str(library.javascript_bundle(vl_version=version)).replace("</script", r"<\/script")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept) as part:
            part.write_text(bundle, encoding="utf-8")
    except OSError:  # a read-only place costs time, not the report
        pass
    return bundle


__all__ = ["Section", "heads", "render", "slug"]
