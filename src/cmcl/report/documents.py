"""`python -m cmcl.report.documents README.md ... [--check]`: tables in documents, from results/.

A document has regions, `<!-- cmcl:headline -->` to `<!-- cmcl:end -->`, whose content is written here.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ..reproduction.cells import Evidence, Records
from ..reproduction.claims import judge
from ..reproduction.record import load_records
from .markdown import claims, headline, paper_markdown
from .summary import coverage, paper_summary

REGIONS: dict[str, Callable[[Evidence], str]] = {
    "headline": headline,
    "table1": partial(paper_markdown, "table1"),
    "table2": partial(paper_markdown, "table2"),
    "table3": partial(paper_markdown, "table3"),
    "claims": claims,
    "finding": lambda records: " ".join(paper_summary(records)),
    "coverage": lambda records: coverage(records, judge(records)),
}


def refresh(path: str | Path, records: Records, check: bool = False) -> bool:
    """Fill a document's regions from records, or with `check` only compare; returns whether it was stale."""
    path = Path(path)
    before = path.read_text(encoding="utf-8")
    after = filled(before, records, path.name)
    if before != after and not check:
        path.write_text(after, encoding="utf-8")
    return before != after


def filled(text: str, records: Records, name: str = "the document") -> str:
    """The text with its regions filled."""
    evidence = Evidence.of(records)
    return fill(text, "cmcl", {region: partial(write, evidence) for region, write in REGIONS.items()}, name)


def fill(text: str, word: str, regions: Mapping[str, Callable[[], str]], name: str = "the document") -> str:
    """The text with everything between `<!-- word:REGION -->` and `<!-- word:end -->` replaced."""
    close = f"<!-- {word}:end -->"
    # At the start of a line: an indented one is an example.
    head, *found = re.split(rf"^<!-- {word}:(?!end\b)(\S+) -->$", text, flags=re.MULTILINE)
    parts = [head]
    for region, follows in zip(found[::2], found[1::2], strict=True):
        if region not in regions:
            raise ValueError(f"regions of {name} must be one of {', '.join(regions)}. Got {region!r}.")
        _, closed, rest = follows.partition(f"\n{close}")
        if not closed:
            raise ValueError(f"region {region} of {name} must end with {close}. Got no such line. Add it.")
        parts.append(f"<!-- {word}:{region} -->\n{regions[region]()}\n{close}{rest}")
    return "".join(parts)


def main(words: Sequence[str] | None = None) -> int:
    """Refresh or check; exit code 1 if a checked document is stale."""
    parser = argparse.ArgumentParser(prog="python -m cmcl.report.documents", description=__doc__)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=Path("results"), help="has the records/")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is stale")
    asked = parser.parse_args(words)
    records = Evidence.of(load_records(asked.results))
    stale = [path for path in asked.documents if refresh(path, records, asked.check)]
    for path in stale:
        sys.stdout.write(f"{path}: {'stale' if asked.check else 'written'}\n")
    return 1 if stale and asked.check else 0


if __name__ == "__main__":
    sys.exit(main())
