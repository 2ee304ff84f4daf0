"""Markdown: the report for a README, and the tables one by one."""

from collections.abc import Sequence

from ..reproduction.cells import Records
from ..reproduction.claims import judge
from . import story
from .alarms import CURE, alarms
from .comparing import of_runs
from .gather import Material
from .tables import MARKS, WORSE, Table, Value, headline_table, paper_tables, summary_table


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
        table = summary_table(own, material.labels)
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


def markdown(table: Table) -> str:
    """A table in Markdown."""
    heads = [f"{column.group.removesuffix(', %')}: {column.title}".lstrip(": ") for column in table.columns]
    aligned = ["--:" if column.numeric else "---" for column in table.columns]
    lines = [_line(heads), f"|{'|'.join(aligned)}|"]
    lines += [_line([_marked(value) for value in row]) for row in table.rows]
    return "\n".join(lines)


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(text) for text in texts) + " |"


def escaped(text: str) -> str:
    """A text in Markdown, on one line, whose signs are only signs."""
    for sign in "\\|<>`*_[":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def _marked(value: Value) -> str:
    return " ".join(filter(None, (value.text, MARKS.get(value.mark or ""), WORSE * value.worse)))


def headline(records: Records) -> str:
    """The headline table in Markdown."""
    table = headline_table(records)
    return f"{markdown(table)}\n\n{table.caption}, %. {below(table)}"


def paper_markdown(number: int, records: Records) -> str:
    """One of the paper's tables in Markdown, with its caption."""
    table = paper_tables(records)[number - 1]
    return f"{markdown(table)}\n\n{table.caption}. Errors in percent. {below(table)}"


def below(table: Table) -> str:
    """What stands below a table in Markdown: how to read it, where it comes from."""
    return " ".join(filter(None, (table.note, table.source and escaped(table.source))))


def claims_markdown(records: Records) -> str:
    """Every claim with its verdict, and below it the parts that are measured."""
    lines = ["| where | claim | verdict | measured |", "|---|---|---|---|"]
    for verdict in judge(records):
        lines.append(f"| **{verdict.where}** {_line([verdict.claim, verdict.status, ''])}")
        parts = (part for part in verdict.parts if part.found)
        lines += [_line(["", part.text, part.status, part.found]) for part in parts]
    return "\n".join(lines)
