"""The paper's experiments: recipes and cells, runs, records, and the campaign that makes them."""

from .cells import CELLS, TARGETS, Cell
from .recipes import RECIPES, find, grid

__all__ = ["CELLS", "RECIPES", "TARGETS", "Cell", "find", "grid"]
