"""Confident multiple choice learning: ensembles of specialised deep networks.

The public names, loaded when they are first used, so that `import cmcl` costs nothing.
"""

from typing import TYPE_CHECKING

from .lazy import attach

__version__ = "0.1.0"

_HOME = {  # public name -> module that defines it; "": it is a module
    "confident_oracle_loss": "objectives",
    "independent_loss": "objectives",
    "oracle_loss": "objectives",
    "winner_takes_all": "objectives",
    "assign": "objectives",
    "OracleLoss": "objectives",
    "WinnerTakesAll": "objectives",
    "share_features": "sharing",
    "Ensemble": "ensemble",
    "Prediction": "ensemble",
    "shareable_layers": "splitting",
    "Layer": "splitting",
    "from_pretrained": "pretrained",
    "SharedStemEnsemble": "pretrained",
    "load": "serialization",
    "Recipe": "training.config",
    "Options": "training",
    "Result": "training",
    "Interrupted": "training",
    "Diverged": "training",
    "fit": "training",
    "evaluate": "training",
    "record": "reproduction.custom",
    "CMCLClassifier": "estimator",
    "metrics": "",
    "networks": "",
    "data": "",
    "calibration": "",
    "export": "",
    "report": "",
}

__getattr__, __dir__ = attach(__name__, _HOME)
__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from . import calibration as calibration
    from . import data as data
    from . import export as export
    from . import metrics as metrics
    from . import networks as networks
    from . import report as report
    from .ensemble import Ensemble as Ensemble
    from .ensemble import Prediction as Prediction
    from .estimator import CMCLClassifier as CMCLClassifier
    from .objectives import OracleLoss as OracleLoss
    from .objectives import WinnerTakesAll as WinnerTakesAll
    from .objectives import assign as assign
    from .objectives import confident_oracle_loss as confident_oracle_loss
    from .objectives import independent_loss as independent_loss
    from .objectives import oracle_loss as oracle_loss
    from .objectives import winner_takes_all as winner_takes_all
    from .pretrained import SharedStemEnsemble as SharedStemEnsemble
    from .pretrained import from_pretrained as from_pretrained
    from .reproduction.custom import record as record
    from .serialization import load as load
    from .sharing import share_features as share_features
    from .splitting import Layer as Layer
    from .splitting import shareable_layers as shareable_layers
    from .training import Diverged as Diverged
    from .training import Interrupted as Interrupted
    from .training import Options as Options
    from .training import Result as Result
    from .training import evaluate as evaluate
    from .training import fit as fit
    from .training.config import Recipe as Recipe
