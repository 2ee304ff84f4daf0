"""How methods, networks and data sets are called in front of people."""

from collections.abc import Mapping
from typing import Any

from .. import networks
from ..data.registry import DATASETS

METHODS = {"single": "single network", "ie": "IE", "mcl": "MCL", "cmcl": "CMCL"}
LONG = {
    "single": "a single network",
    "ie": "an independent ensemble (IE)",
    "mcl": "multiple choice learning (MCL)",
    "cmcl": "CMCL",
}
NETWORKS = {name: info.title for name, info in networks.NETWORKS.items()}
DATA = {name: info.title for name, info in DATASETS.items()}
CLASSES = {name: list(info.classes) for name, info in DATASETS.items() if info.classes}
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five", 10: "ten"}


def method_of(recipe: Mapping[str, Any]) -> str:
    """A key of `METHODS`: one member alone is no ensemble."""
    return "single" if recipe.get("members") == 1 else str(recipe["method"])


def data_name(name: str | None) -> str:
    """Of a data set."""
    return DATA.get(name or "", name or "own data")


def spread(found: Mapping[str, Any], digits: int = 2) -> str:
    """Mean, and the deviation where there is one."""
    mean = f"{found['mean']:.{digits}f}"
    return mean if found["std"] is None else f"{mean} ± {found['std']:.{digits}f}"
