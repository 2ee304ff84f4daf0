"""Records sorted into the cells of the paper that they fill; once, since all tables and claims ask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from .noise import independent, noise_known, within_noise
from .paper import CELLS
from .records import Record, distinct, known_checksums, standing, summarise

Spread = Mapping[str, Any] | None  # {"mean", "std", "n"}; None: not measured
Records = Union[Sequence[Record], "Evidence"]


@dataclass(frozen=True)
class Evidence:
    """What there is for every cell."""

    records: Sequence[Record]
    cells: Mapping[str, Mapping[str, Any]]  # by id, as `summarise` describes them, in the paper's order
    behind: Mapping[str, list[Record]]  # by id

    @classmethod
    def of(cls, records: Records) -> "Evidence":
        """Sort records; what is sorted already stays as it is."""
        if isinstance(records, Evidence):
            return records
        checksums = known_checksums(records)
        behind = {cell.id: standing(cell, records, checksums) for cell in CELLS}
        return cls(records, {row["id"]: row for row in summarise(CELLS, records)}, behind)

    def error(self, cell: str, key: str = "top1") -> Spread:
        """Mean, deviation and number of the runs in a cell."""
        ours = self.cells[cell]["ours"]
        return None if ours is None else ours[key]

    def standing(self, cell: str) -> list[Record]:
        """The records that a cell's numbers are made from, by seed."""
        return self.behind[cell]

    def chance(self, cell: str, rival: str, key: str = "top1") -> str:
        """Why the difference of two cells, both measured, may be chance; empty if it is more."""
        mine, other = self.error(cell, key), self.error(rival, key)
        if mine is None or other is None:
            raise ValueError(f"both must be measured. Got {cell} and {rival}.")
        counts = [independent(record) for id in (cell, rival) for record in self.standing(id)]
        examples = min((n for n in counts if n), default=None)
        if not within_noise(mine, other, examples):
            return ""
        return "within the noise" if noise_known(mine, other, examples) else "noise not known"

    def in_figure(self, figure: str) -> list[Record]:
        """The records of a figure's panel, such as "fig1a"."""
        return distinct(r for cell in CELLS if cell.where[0] == figure for r in self.standing(cell.id))
