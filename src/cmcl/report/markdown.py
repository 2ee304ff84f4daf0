"""The report as Markdown: the tables, for a README."""

from ..experiments.claims import judge
from . import story
from .alarms import CURE, alarms
from .comparing import of_runs
from .gather import Material
from .tables import below, claims_markdown, escaped, headline, markdown, paper_markdown, summary_table


def render(material: Material) -> str:
    """All tables that there is material for."""
    parts: list[str] = []
    if material.paper:
        records = material.evidence
        verdicts = judge(records)
        parts += [
            "## Results",
            story.of_the_paper(records),
            story.how_far(records, verdicts),
            headline(records),
        ]
        for number in (1, 2, 3):
            parts += [f"## Table {number}", paper_markdown(number, records)]
        parts += ["## Claims", claims_markdown(records)]
    if own := [run.record for run in material.runs if run.record]:
        labels = {run.record.file_name: run.label for run in material.runs if run.record}
        table = summary_table(own, labels)
        parts += ["## Runs", *map(escaped, of_runs(own)), markdown(table), below(table)]
    if material.left_out:
        parts.append(material.left_out)
    if found := alarms(material.runs):
        parts += [
            "## Members that learned next to nothing",
            "\n".join(f"- {escaped(a)}" for a in found),
            CURE,
        ]
    if material.notes:
        notes = "\n".join(f"- {escaped(note)}" for note in material.notes)
        parts += ["## Not everything could be read", notes]
    return "\n\n".join(parts) + "\n"
