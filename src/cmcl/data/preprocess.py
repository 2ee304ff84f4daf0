"""Preprocessing by fitted transforms: building, saving and refitting them. The steps are in steps.py.

whiten = Chain([GCN(), ZCA()]).fit(train)     # what the paper's CIFAR-10 went through
x = whiten.transform(test.images)
whiten.save("whiten.safetensors"); whiten = load("whiten.safetensors")
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .checksum import tensor_checksum
from .files import nearest, open_binary
from .sets import load_recipe
from .steps import GCN, ZCA, Chain, MeanStd, Normalize
from .transform import Transform, norms

__all__ = [
    "GCN",
    "KINDS",
    "PRESETS",
    "ZCA",
    "Chain",
    "MeanStd",
    "Normalize",
    "Transform",
    "build",
    "from_state",
    "load",
    "refit",
]

KINDS: dict[str, type[Transform]] = {kind.kind: kind for kind in (GCN, ZCA, MeanStd, Normalize, Chain)}
PRESETS: dict[str, Callable[[], Transform]] = {
    "mean_std": MeanStd,
    "gcn": GCN,
    "gcn_zca": lambda: Chain([GCN(), ZCA()]),  # the paper's CIFAR-10
}

_DAMAGED = "parameters and tensors of a saved transform must agree with its checksums. Got others: damage"
_CURE = "Save it again, or fit again."


def build(config: Mapping[str, Any]) -> Transform:
    """The unfitted transform that a config (or `parameters()`) describes."""
    kind = config.get("kind")
    if kind not in KINDS:
        raise ValueError(f"kind must be a known transform. Got {kind!r}. {nearest(str(kind), list(KINDS))}")
    if kind == "chain":
        return Chain([build(step) for step in config["steps"]])
    cls = KINDS[kind]
    return cls(**{name: config[name] for name in getattr(cls, "__dataclass_fields__", ())})


def from_state(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Transform:
    """The fitted transform that `state()` took apart. Damage to either part is refused."""
    try:
        transform = build(config)
        transform.source = config["source"]
        transform._set_tensors(tensors)
        intact = tensor_checksum(tensors) == config["digest"] and transform.checksum == config["checksum"]
    except (KeyError, TypeError, AttributeError) as error:  # a config that is not one
        raise ValueError(f"{_DAMAGED} ({type(error).__name__}: {error}). {_CURE}") from None
    if not intact:
        raise ValueError(f"{_DAMAGED}. {_CURE}")
    return transform


def load(path: str | Path) -> Transform:
    """Read what `Transform.save` wrote."""
    place = Path(path)
    open_binary(place, cure="Write it with transform.save(path).").close()
    try:
        with safe_open(place, framework="pt") as file:
            config = json.loads((file.metadata() or {})["cmcl_transform"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, KeyError, ValueError) as error:
        message = (
            f"{place} must be a saved transform. Got a damaged or foreign file ({error}). Save it again."
        )
        raise ValueError(message) from None
    return from_state(config, tensors)


def refit(config: Mapping[str, Any], root: str | Path | None = None) -> Transform:
    """Fit again from a saved config alone, on the same data found under `root`.

    The data must have the same checksum, and what is learned must agree to rounding. The fit is taken
    from the cache, or kept there.
    """
    from .cache import fitted  # which imports this module

    transform, source = build(config), config.get("source")
    if source is None:
        return transform  # nothing was learned
    if source["recipe"] is None:
        message = (
            "a transform can be refitted when it was fitted on a loaded data set. Got one fitted on arrays. "
            "Keep its saved file and use preprocess.load(path)."
        )
        raise ValueError(message)
    data = load_recipe(source["recipe"], root)
    if transform.checksum_for(data.checksum) != config["checksum"]:
        message = (
            f"the data under root must be those of the first fit ({source['recipe']['name']}, sha256 "
            f"{source['checksum'][:12]}...). Got others. Point root at the same data."
        )
        raise ValueError(message)
    transform = fitted(transform, data)
    _check_agreement(norms(transform._get_tensors()), config["norms"])
    return transform


def _check_agreement(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    for name, value in expected.items():
        if not math.isclose(found.get(name, math.nan), value, rel_tol=1e-4, abs_tol=1e-6):
            message = (
                f"{name} of the refitted transform must have norm {value:.6g}. Got {found.get(name)}. "
                "The numerical libraries disagree: use the saved transform instead."
            )
            raise ValueError(message)
