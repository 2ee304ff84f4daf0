"""Train an ensemble: one step, eager on a CPU or captured on a GPU, and a loop that resumes exactly."""

from typing import TYPE_CHECKING

from ..lazy import attach

_HOME = {
    "fit": "train",
    "evaluate": "scoring",
    "Recipe": "config",
    "Options": "config",
    "Result": "run",
    "Interrupted": "keeper",
    "Diverged": "run",
}
__getattr__, __dir__ = attach(__name__, _HOME)
__all__ = [*_HOME]

if TYPE_CHECKING:
    from .config import Options as Options
    from .config import Recipe as Recipe
    from .keeper import Interrupted as Interrupted
    from .run import Diverged as Diverged
    from .run import Result as Result
    from .scoring import evaluate as evaluate
    from .train import fit as fit
