"""The training engine: one step, run eagerly on a CPU or captured on a GPU, and a loop that loses nothing."""

from .keeper import Interrupted
from .run import Diverged, Result
from .scoring import evaluate
from .setup import Options
from .train import fit

__all__ = ["Diverged", "Interrupted", "Options", "Result", "evaluate", "fit"]
