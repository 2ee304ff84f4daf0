"""`Recipe`: everything that decides a run's result, except the seed. Standard library only."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from numbers import Integral, Real
from typing import Any

METHODS = ("ie", "mcl", "cmcl")
OPTIMIZERS = ("sgd", "adam", "adamw")
MAY_BE_NONE = ("examples", "steps", "decay_steps")
COUNTS = ("members", "overlap", "samples", "batch_size", "accumulate", *MAY_BE_NONE)
LATER = {"examples", "decay_steps"}  # came later: runs of before know nothing of them, and can be resumed


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What one run needs. A row of a table is one of these, an ablation `replace(row, sharing=True)`.

    One formula serves all methods: "ie" is CMCL with overlap = members, "mcl" is CMCL with beta = 0.
    """

    data: str | None = None  # name of a data set; None: the caller brings the data
    preprocess: str | None = None  # name of a transform: "gcn_zca", "gcn" or "mean_std"
    examples: int | None = None  # learn from so many only, drawn evenly from the classes; None: from all
    network: str | None = None  # name of a network of ours; None: the caller brings the ensemble
    network_options: Mapping[str, Any] = field(default_factory=dict)

    method: str = "cmcl"
    members: int = 5
    overlap: int = 1  # K: members that learn each example
    beta: float = 0.75  # weight of silence
    labels: str = "exact"  # or "sampled": stochastic labels
    samples: int = 1  # S, random labels per member and example
    sharing: bool | None = None  # of features, after the stem; None: as the caller's ensemble was built
    share_prob: float = 0.7
    warm_start: int = 0  # epochs of IE before the method
    adversarial: float = 0.0  # step of the fast gradient sign, as a share of each input value's range

    epochs: float | None = None  # give epochs or steps
    steps: int | None = None
    batch_size: int = 128
    accumulate: int = 1  # pieces a batch is computed in, to save memory
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0  # on the weights of convolutions and linear layers only
    drops: tuple[tuple[float, float], ...] = ()  # (when, factor): an int is a step, a float below 1 a share
    decay: float = 1.0  # lr falls exponentially to this share of itself...
    decay_steps: int | None = None  # ...every so many steps; None: by the end
    clip: float | None = None  # largest norm of an ensemble's gradient
    validation: float = 0.0  # share of the training set held out for choosing

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # numpy's numbers, as a search brings them
            if isinstance(value, Real) and not isinstance(value, int | float):
                object.__setattr__(self, name, int(value) if isinstance(value, Integral) else float(value))
        _must(all(len(drop) == 2 for drop in self.drops), "drops must be pairs (when, factor)", self.drops)
        object.__setattr__(self, "drops", tuple((when, factor) for when, factor in self.drops))
        object.__setattr__(self, "network_options", dict(self.network_options))
        if isinstance(self.epochs, float) and self.epochs.is_integer():  # 2.0 is 2, also in a hash
            object.__setattr__(self, "epochs", int(self.epochs))
        if self.network is not None and self.sharing is None:  # no ensemble of the caller's to ask
            object.__setattr__(self, "sharing", False)
        _one_of("method", self.method, METHODS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("labels", self.labels, ("exact", "sampled"))
        for name in COUNTS:
            count = getattr(self, name)
            left_out = count is None and name in MAY_BE_NONE
            _must(
                left_out or (_whole(count) and count >= 1), f"{name} must be an int, 1 or more", repr(count)
            )
        for holds, rule, got in self._rules():
            _must(holds, rule, got)
        for name, value in asdict(self).items():
            _must(_is_json(value), f"{name} must be plain Python, to be kept as JSON", repr(value))

    def _rules(self) -> list[tuple[bool, str, object]]:
        length, divides = self.epochs or self.steps or 0, self.batch_size % self.accumulate == 0
        return [
            (
                1 <= self.overlap <= self.members,
                f"overlap must be between 1 and {self.members}",
                self.overlap,
            ),
            (0 <= self.beta < math.inf, "beta must be a finite number, 0 or more", self.beta),
            (0 <= self.share_prob <= 1, "share_prob must be between 0 and 1", self.share_prob),
            (
                _whole(self.warm_start),
                "warm_start must be a whole number of epochs, an int",
                repr(self.warm_start),
            ),
            (
                all(when > 0 and (_whole(when) or when < 1) for when, _ in self.drops),
                "drops must happen at a step, a whole number, or at a share of the run, below 1",
                self.drops,
            ),
            (0 <= self.validation < 1, "validation must be at least 0 and below 1", self.validation),
            (divides, "accumulate must divide batch_size", self.accumulate),
            (
                (self.epochs is None) != (self.steps is None),
                "give either epochs or steps",
                (self.epochs, self.steps),
            ),
            (0 < length < math.inf, "epochs or steps must be positive and finite", length),
            (0 < self.lr < math.inf, "lr must be positive and finite", self.lr),
            (0 < self.decay <= 1, "decay must be above 0 and at most 1", self.decay),
            (self.clip is None or self.clip > 0, "clip must be positive", self.clip),
            (0 <= self.weight_decay < math.inf, "weight_decay must be 0 or more", self.weight_decay),
            (0 <= self.adversarial < math.inf, "adversarial must be 0 or more", self.adversarial),
            (
                all(factor >= 0 for _, factor in self.drops),
                "drops must be by factors of 0 or more",
                self.drops,
            ),
            (not (self.adversarial and self.sharing), "adversarial training must go without sharing", "both"),
        ]

    @property
    def objective(self) -> dict[str, Any]:
        """The arguments of `confident_oracle_loss` that make it this method."""
        return {
            "beta": 0.0 if self.method == "mcl" else self.beta,
            "overlap": self.members if self.method == "ie" else self.overlap,
            "labels": self.labels if self.method == "cmcl" else "exact",
            "samples": self.samples,
        }

    def total_steps(self, examples: int, batch_size: int | None = None) -> int:
        """Steps of the whole run on so many training examples; a DataLoader has a batch size of its own."""
        if self.steps is not None:
            return self.steps
        examples = min(examples, self.examples or examples)
        assert self.epochs is not None  # __post_init__ saw to it
        return math.ceil(self.epochs * examples / (batch_size or self.batch_size))

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate of a step of the run."""
        lr: float = self.lr * self.decay ** (step / (self.decay_steps or steps))
        for when, factor in self.drops:
            if step >= (when if when >= 1 else round(when * steps, 6)):  # 0.55 * 100 is above 55
                lr *= factor
        return lr

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; those of LATER only where they are set."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {key: value for key, value in values.items() if key not in LATER or value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Recipe":
        """The recipe that `to_json` wrote; an unknown field is an error, a missing one its default."""
        unknown = set(values) - {f.name for f in fields(cls)}
        _must(not unknown, "recipe fields must be known to this version", ", ".join(sorted(unknown)))
        return cls(**values)

    @cached_property
    def hash(self) -> str:
        """Changes when the recipe's meaning does: what is unused or has its default is left out."""
        defaults = {f.name: f.default for f in fields(self)}
        values = {key: value for key, value in self.to_json().items() if value != defaults[key]}
        for key in ("beta", "overlap", "labels", "samples"):  # what the method makes of them
            values[key] = self.objective[key]
        if self.objective["labels"] == "exact":
            del values["samples"]
        if not self.sharing:
            values.pop("sharing", None)  # False was the default once, and left out
            values.pop("share_prob", None)
        if self.optimizer != "sgd":
            values.pop("momentum", None)
            values.pop("nesterov", None)
        if self.method == "ie":
            values.pop("warm_start", None)
            del values["beta"]
        return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _must(holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{rule}. Got {got}.")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _must(value in allowed, f"{name} must be one of {', '.join(map(repr, allowed))}", repr(value))
