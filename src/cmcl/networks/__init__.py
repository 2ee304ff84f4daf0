"""The paper's five networks, cut where their members share features.

Each is a function of keyword options that returns a `SplitNetwork`, with the weights drawn anew.
"""

from collections.abc import Callable

from .base import SplitNetwork
from .cnn import cnn
from .fcn import fcn
from .googlenet import googlenet18
from .resnet import resnet20
from .table import describe
from .vggnet import vggnet17

NETWORKS: dict[str, Callable[..., SplitNetwork]] = {
    "cnn": cnn,
    "vggnet17": vggnet17,
    "googlenet18": googlenet18,
    "resnet20": resnet20,
    "fcn": fcn,
}

__all__ = ["NETWORKS", "SplitNetwork", "cnn", "describe", "fcn", "googlenet18", "resnet20", "vggnet17"]
