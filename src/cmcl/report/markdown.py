"""The report as Markdown: the tables, one by one."""

from collections.abc import Iterable

from ..reproduction.cells import Records
from ..reproduction.claims import judge
from .load import Inputs
from .summary import coverage, pairs, paper_summary, result_tables
from .tables import MARKS, WORSE, Column, Table, Value, headline_table, paper_table

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
        parts += ["## Runs", *(escaped(str(pair)) for pair in pairs(measured))]
        for table in result_tables("summary", measured):
            parts += [f"{escaped(table.caption)}.", markdown(table), below(table)]
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
    aligned = ["--:" if column.numeric else "---" for column in table.columns]
    lines = [_line(map(_head, table.columns)), f"|{'|'.join(aligned)}|"]
    return "\n".join(lines + [_line(map(_marked, row)) for row in table.rows])


def _head(column: Column) -> str:
    group = f"{column.group.removesuffix(', %')}: " if column.group else ""
    return escaped(group + column.title + " ↓" * column.lower)


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def escaped(text: str) -> str:
    """A text on one line, with the signs of Markdown escaped."""
    for sign in "\\|<>`*_[":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def _marked(value: Value) -> str:
    text = escaped(value.text)
    return " ".join(
        filter(
            None, (f"**{text}**" if value.best else text, MARKS.get(value.mark or ""), WORSE * value.worse)
        )
    )


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
        lines.append(f"| **{verdict.where}** {_line([escaped(verdict.claim), verdict.status, ''])}")
        parts = [[part.text, part.status, part.found] for part in verdict.parts if part.found]
        lines += [_line(["", *map(escaped, part)]) for part in parts]
    return "\n".join(lines)
