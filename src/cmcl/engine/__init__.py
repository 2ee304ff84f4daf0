"""The training engine: one step, run eagerly on a CPU or captured on a GPU, and a loop that loses nothing."""

from .setup import Options
from .train import Diverged, Interrupted, Result, evaluate, fit

__all__ = ["Diverged", "Interrupted", "Options", "Result", "evaluate", "fit"]
