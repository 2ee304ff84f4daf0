"""The report as Markdown: the tables, one by one."""

from collections.abc import Sequence

from ..reproduction.cells import Records
from ..reproduction.claims import judge
from .load import Inputs
from .summary import coverage, paper_summary, repeats, summary
from .tables import MARKS, WORSE, Table, Value, headline_table, paper_table, run_table

EXCLUDED = "Excluded runs, evaluated on part of the test set only (as `cmcl tune` does): {}."


def render(inputs: Inputs) -> str:
    """All tables that there are records for."""
    parts: list[str] = []
    if inputs.paper:
        found = inputs.evidence
        parts += ["## Results", *paper_summary(found), coverage(found, judge(found)), headline(found)]
        for number in (1, 2, 3):
            parts += [f"## Table {number}", paper_markdown(f"table{number}", found)]
        parts += ["## Claims", claims(found)]
    if measured := [run for run in inputs.runs if run.record]:
        table = run_table(repeats(measured))
        parts += ["## Runs", *map(escaped, summary(measured)), markdown(table), below(table)]
    if inputs.excluded:
        parts.append(EXCLUDED.format(inputs.excluded))
    if not parts:
        raise ValueError(
            "runs must have records for tables. Got runs that were not evaluated: cmcl.record does that; or "
            "write a page (html), which shows their training curves."
        )
    if inputs.skipped:
        parts += ["## Skipped files", "\n".join(f"- {escaped(text)}" for text in inputs.skipped)]
    return "\n\n".join(parts) + "\n"


def markdown(table: Table) -> str:
    """A table in Markdown."""
    heads = [f"{column.group.removesuffix(', %')}: {column.title}".lstrip(": ") for column in table.columns]
    aligned = ["--:" if column.numeric else "---" for column in table.columns]
    lines = [_line(heads), f"|{'|'.join(aligned)}|"]
    return "\n".join(lines + [_line([_marked(value) for value in row]) for row in table.rows])


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(text) for text in texts) + " |"


def escaped(text: str) -> str:
    """A text on one line, with the signs of Markdown escaped."""
    for sign in "\\|<>`*_[":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def _marked(value: Value) -> str:
    return " ".join(filter(None, (value.text, MARKS.get(value.mark or ""), WORSE * value.worse)))


def headline(records: Records) -> str:
    """The headline table."""
    table = headline_table(records)
    return f"{markdown(table)}\n\n{table.caption}, %. {below(table)}"


def paper_markdown(name: str, records: Records) -> str:
    """One of the paper's tables, with its caption."""
    table = paper_table(name, records)
    return f"{markdown(table)}\n\n{table.caption}. Errors in percent. {below(table)}"


def below(table: Table) -> str:
    """How to read a table, and where its numbers come from."""
    return " ".join(filter(None, (table.note, table.source and escaped(table.source))))


def claims(records: Records) -> str:
    """Every claim with its status, and below it the parts that are measured."""
    lines = ["| where | claim | status | measured |", "|---|---|---|---|"]
    for verdict in judge(records):
        lines.append(f"| **{verdict.where}** {_line([verdict.claim, verdict.status, ''])}")
        lines += [_line(["", part.text, part.status, part.found]) for part in verdict.parts if part.found]
    return "\n".join(lines)
