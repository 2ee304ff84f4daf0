"""Train an ensemble: one step, eager on a CPU or captured on a GPU, and a loop that resumes exactly."""

from typing import TYPE_CHECKING

from ..lazy import attach

_HOME = {
    "fit": "loop",
    "evaluate": "scoring",
    "Recipe": "config",
    "Options": "config",
    "Result": "loop",
    "Interrupted": "checkpoint",
    "Diverged": "step",
}
__getattr__, __dir__ = attach(__name__, _HOME)
__all__ = [*_HOME]

if TYPE_CHECKING:
    from .checkpoint import Interrupted as Interrupted
    from .config import Options as Options
    from .config import Recipe as Recipe
    from .loop import Result as Result
    from .loop import fit as fit
    from .scoring import evaluate as evaluate
    from .step import Diverged as Diverged
