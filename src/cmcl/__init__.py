"""Confident multiple choice learning: ensembles of deep networks that know what they know.

The public names, loaded when they are first used, so that `import cmcl` costs nothing.
"""

from typing import TYPE_CHECKING

from .lazy import attach

__version__ = "0.1.0"

_HOME = {  # public name -> module that defines it; "": it is a module
    "confident_oracle_loss": "objectives",
    "independent_loss": "objectives",
    "oracle_loss": "objectives",
    "OracleLoss": "objectives",
    "share_features": "sharing",
    "Ensemble": "ensemble",
    "Prediction": "prediction",
    "find_places": "places",
    "Place": "places",
    "from_pretrained": "finetuning",
    "OneStem": "finetuning",
    "load": "saving",
    "Recipe": "recipe",
    "Options": "engine",
    "Result": "engine",
    "Interrupted": "engine",
    "Diverged": "engine",
    "fit": "engine",
    "evaluate": "engine",
    "record": "experiments.own",
    "CMCLClassifier": "estimator",
    "metrics": "",
    "networks": "",
    "data": "",
    "rejecting": "",
    "export": "",
    "tuning": "",
    "report": "",
}

__getattr__, __dir__ = attach(__name__, _HOME)
__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from . import data as data
    from . import export as export
    from . import metrics as metrics
    from . import networks as networks
    from . import rejecting as rejecting
    from . import report as report
    from . import tuning as tuning
    from .engine import Diverged as Diverged
    from .engine import Interrupted as Interrupted
    from .engine import Options as Options
    from .engine import Result as Result
    from .engine import evaluate as evaluate
    from .engine import fit as fit
    from .ensemble import Ensemble as Ensemble
    from .estimator import CMCLClassifier as CMCLClassifier
    from .experiments.own import record as record
    from .finetuning import OneStem as OneStem
    from .finetuning import from_pretrained as from_pretrained
    from .objectives import OracleLoss as OracleLoss
    from .objectives import confident_oracle_loss as confident_oracle_loss
    from .objectives import independent_loss as independent_loss
    from .objectives import oracle_loss as oracle_loss
    from .places import Place as Place
    from .places import find_places as find_places
    from .prediction import Prediction as Prediction
    from .recipe import Recipe as Recipe
    from .saving import load as load
    from .sharing import share_features as share_features
