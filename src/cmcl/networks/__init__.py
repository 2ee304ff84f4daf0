"""The paper's five networks, cut where their members share features.

Each is a function of keyword options that returns a `SplitNetwork`, with the weights drawn anew. `plain`, the
default of `CMCLClassifier`, is not one of them.
"""

from collections.abc import Callable

from .base import SplitNetwork
from .cnn import cnn
from .fcn import fcn
from .googlenet import googlenet18
from .plain import Plain, plain
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
# What a saved ensemble may name.
BUILDERS: dict[str, Callable[..., SplitNetwork | Plain]] = {**NETWORKS, "plain": plain}

__all__ = [
    "BUILDERS",
    "NETWORKS",
    "Plain",
    "SplitNetwork",
    "cnn",
    "describe",
    "fcn",
    "googlenet18",
    "plain",
    "resnet20",
    "vggnet17",
]
