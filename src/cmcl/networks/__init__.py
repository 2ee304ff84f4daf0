"""Networks: the paper's five, a fast one for images, and the default of `CMCLClassifier`.

Importing this package does not load torch: a network's module is imported when the network is first used.
To add one: a module with the function that builds it, and its entry in `NETWORKS`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..lazy import attach


@dataclass(frozen=True)
class NetworkInfo:
    """One network. Called with keyword options, it builds the network with freshly drawn weights."""

    name: str  # of the function that builds it
    title: str
    description: str
    paper: str  # where the paper uses it
    module: str  # that defines the function
    dense: bool = False  # a class per pixel, for images of any size

    @property
    def build(self) -> Callable[..., Any]:
        """The function that builds it."""
        function: Callable[..., Any] = getattr(import_module(f"{__name__}.{self.module}"), self.name)
        return function

    def __call__(self, **options: Any) -> "SplitNetwork | Plain":
        """The network with these options."""
        network: SplitNetwork | Plain = self.build(**options)
        return network

    @property
    def __signature__(self) -> inspect.Signature:  # inspect.signature(info) shows the options
        return inspect.signature(self.build)


NETWORKS = {
    info.name: info
    for info in (
        NetworkInfo("cnn", "small CNN", "two convolutions, the small network", "Tables 1 and 2", "convnet"),
        NetworkInfo("vggnet17", "VGGNet-17", "VGGNet with 17 layers", "Table 3", "vggnet"),
        NetworkInfo("googlenet18", "GoogLeNet-18", "GoogLeNet with 18 layers", "Table 3", "googlenet"),
        NetworkInfo("resnet20", "ResNet-20", "ResNet with 20 layers", "Table 3", "resnet"),
        NetworkInfo("fastcnn", "fast CNN", "six convolutions, trains fast", "not in the paper", "airbench"),
        NetworkInfo(
            "fcn", "FCN", "fully convolutional, a class per pixel", "figures 3 and 4", "fullyconv", True
        ),
    )
}
PLAIN = NetworkInfo("plain", "plain network", "one hidden layer, or two convolutions", "", "mlp")
BUILDERS = {**NETWORKS, PLAIN.name: PLAIN}  # what a saved ensemble may name

_HOME = {info.name: info.module for info in BUILDERS.values()} | {
    "Plain": "mlp",
    "SplitNetwork": "base",
    "describe": "table",
}

__getattr__, __dir__ = attach(__name__, _HOME)
__all__ = ["BUILDERS", "NETWORKS", "NetworkInfo", *_HOME]

if TYPE_CHECKING:
    from .airbench import fastcnn as fastcnn
    from .base import SplitNetwork as SplitNetwork
    from .convnet import cnn as cnn
    from .fullyconv import fcn as fcn
    from .googlenet import googlenet18 as googlenet18
    from .mlp import Plain as Plain
    from .mlp import plain as plain
    from .resnet import resnet20 as resnet20
    from .table import describe as describe
    from .vggnet import vggnet17 as vggnet17
