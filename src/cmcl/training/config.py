"""`Recipe`: everything that decides a run's result, except the seed. `Options`: how the run is carried out.

Neither needs torch, so that commands which only list or plan start quickly.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from functools import cached_property
from hashlib import sha256
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from .._files import nested_too_deep
from .._schema import explains_errors

SCHEMA = 3  # of `Recipe`; raise it when a field is removed or changes its meaning: then all hashes change
# Fields added since, with the values that change nothing: with these a recipe keeps the hash it had before.
LATER = {"flip_at_test": False}
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Count = Annotated[int, Field(ge=1, le=2**53)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _plain_number(value: Any) -> Any:
    """Accept numbers of numpy, as a search gives them."""
    if isinstance(value, Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


@explains_errors
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Augment:
    """Augmentation of training images, on the training device; all members see the same batch.

    Images must be standardised (mean 0), as `fit` does. Masks of segmentation move with their images.
    """

    flip: bool | Literal["alternating"] = False  # horizontal; "alternating": every example every other epoch
    crop: Annotated[int, Field(ge=0)] = 0  # shift by up to this number of pixels, with reflected borders
    cutout: Annotated[int, Field(ge=0)] = 0  # side of a square that is set to 0
    jitter: Probability = 0.0  # of brightness and contrast
    mixup: NotNegative = 0.0  # alpha of its Beta distribution; 0: off
    cutmix: NotNegative = 0.0  # likewise; if both are on, each example gets one of them

    _plain = field_validator("*", mode="before")(_plain_number)

    def __bool__(self) -> bool:
        return self != Augment()


@explains_errors
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """What one run needs. A row of a table is one of these, an ablation `replace(row, sharing=True)`.

    One formula serves all methods: "ie" is CMCL with overlap = members, "mcl" is CMCL with beta = 0.
    """

    data: str | None = None  # name of a dataset; None: the caller passes the data
    preprocess: str | None = None  # name of a transform: "gcn_zca", "gcn" or "mean_std"
    subset: Count | None = None  # train on a stratified subset of this size; None: on all examples
    network: str | None = None  # name of a network of cmcl; None: the caller passes the ensemble
    network_options: dict[str, Any] = field(default_factory=dict)  # its arguments

    method: Literal["ie", "mcl", "cmcl"] = "cmcl"  # independent ensemble, multiple choice learning, or CMCL
    members: Count = 5  # M
    # K: specialists of each example; None: members - 1, or 1 for MCL; "auto": chosen on held-out examples
    overlap: int | Literal["auto"] | None = None
    beta: NotNegative = 0.25  # weight of the KL-to-uniform term; the paper has 0.75
    labels: Literal["exact", "sampled"] = "exact"  # "sampled": stochastic labels
    samples: Count = 1  # S, random labels per member and example
    sharing: bool | None = None  # of features, after the stem; None: as the caller's ensemble was built
    share_prob: Probability = 0.7  # probability of 1 in the masks of feature sharing
    rule: Literal["hard", "relaxed", "annealed"] = "hard"  # how examples are assigned, see `cmcl.assign`
    epsilon: Probability = 0.05  # of the relaxed rule
    temperature: Positive = 1.0  # of the annealed rule, at the start; it falls to a thousandth of that
    evolve: Probability = 0.0  # fraction of the run in which the overlap falls from M to its value
    warm_start: Annotated[int, Field(ge=0)] = 0  # epochs of IE before the method
    adversarial: NotNegative = 0.0  # step of the fast gradient sign, a fraction of each input value's range

    epochs: Annotated[float, Field(gt=0, le=10**9)] | None = None  # give epochs or steps
    steps: Count | None = None  # of the whole run
    batch_size: Count = 128  # examples of a step
    accumulate: Count = 1  # parts that a batch is computed in, to save memory
    optimizer: Literal["sgd", "adam", "adamw", "muon"] = "sgd"  # one for all members
    lr: Positive = 0.1  # learning rate
    schedule: Literal["constant", "cosine", "linear"] = "constant"  # of lr, falling to 0 at the end
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0  # fraction of the run in which lr rises from 0
    momentum: NotNegative = 0.9  # of SGD
    nesterov: bool = False  # Nesterov momentum of SGD
    weight_decay: NotNegative = 0.0  # on the weights of convolutions and linear layers only
    # (when, factor) of the learning rate: an int is a step, a float below 1 a fraction of the run
    milestones: tuple[tuple[int | float, NotNegative], ...] = ()
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0  # lr decays exponentially by this factor...
    decay_steps: Count | None = None  # ...every decay_steps steps; None: by the end
    clip_norm: Positive | None = None  # largest norm of the ensemble's gradient
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the specialists' cross-entropy
    augment: Augment = field(default_factory=Augment)  # augmentation of training images
    # average weights (exponentially) over this fraction of the run; 0: off. Beyond a quarter, the random
    # initial weights would still count.
    ema: Annotated[float, Field(ge=0, le=0.25)] = 0.0
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0  # fraction of the training set that is held out
    flip_at_test: bool = False  # predictions are averaged with those for mirror images

    _plain = field_validator("*", mode="before")(_plain_number)

    @field_validator("overlap", mode="before")
    @classmethod
    def _count_or_auto(cls, value: Any) -> Any:
        known = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
        if value is None or known or (isinstance(value, str) and value == "auto"):
            return value
        raise ValueError(f"overlap must be an integer from 1 on, or 'auto'. Got {value!r}.")

    @field_validator("augment", mode="before")
    @classmethod
    def _to_augment(cls, value: Any) -> Any:
        """Accept the object of JSON."""
        return Augment(**value) if isinstance(value, Mapping) else value

    @field_validator("milestones", mode="before")
    @classmethod
    def _to_tuples(cls, value: Any) -> Any:
        """Accept the lists of JSON; a step may be written 100.0."""
        pairs = isinstance(value, list | tuple) and all(isinstance(p, list | tuple) for p in value)
        if not pairs or not all(len(p) == 2 and isinstance(p[0], int | float) for p in value):
            raise ValueError(f"milestones must be pairs such as [[0.5, 0.1], [3000, 0.1]]. Got {value!r}.")
        return tuple((int(w) if 1 <= w < math.inf and w == int(w) else w, factor) for w, factor in value)

    def __post_init__(self) -> None:
        object.__setattr__(self, "network_options", dict(self.network_options))
        if self.network is not None and self.sharing is None:  # no ensemble of the caller's to ask
            object.__setattr__(self, "sharing", False)
        fits = not isinstance(self.overlap, int) or self.overlap <= self.members
        _must(fits, f"overlap must be between 1 and {self.members}", self.overlap)
        _must(
            all(when > 0 and (isinstance(when, int) or when < 1) for when, _ in self.milestones),
            "milestones must be at a step, a whole number, or at a fraction of the run, below 1",
            self.milestones,
        )
        _must(self.batch_size % self.accumulate == 0, "accumulate must divide batch_size", self.accumulate)
        lengths = (self.epochs, self.steps)
        _must(lengths.count(None) == 1, "give either epochs or steps", lengths)
        _must(not (self.adversarial and self.sharing), "adversarial training must not share features", "both")
        _must(
            self.rule != "annealed" or self.overlap in (None, 1),
            "overlap must be 1 with rule='annealed'",
            self.overlap,
        )
        _must(
            self.rule != "annealed" or not self.evolve,
            "evolve must be 0 with rule='annealed'",
            self.evolve,
        )
        _must(_is_json(self.network_options), "network_options must be JSON values", self.network_options)

    @property
    def chooses_overlap(self) -> bool:
        """Whether `fit` has to choose K."""
        return self.overlap == "auto" and self.method != "ie"

    @property
    def objective(self) -> dict[str, Any]:
        """The arguments of `confident_oracle_loss` that make it this method."""
        _must(not self.chooses_overlap, "overlap must be a number here: `fit` chooses it", self.overlap)
        few = self.method == "mcl" or self.rule == "annealed"
        overlap = self.overlap or (1 if few else max(1, self.members - 1))
        return {
            "beta": 0.0 if self.method == "mcl" else self.beta,
            "overlap": self.members if self.method == "ie" else overlap,
            "labels": self.labels if self.method == "cmcl" else "exact",
            "samples": self.samples,
            "rule": "hard" if self.method == "ie" else self.rule,
            "epsilon": self.epsilon,
        }

    def overlap_at(self, step: int, steps: int) -> int:
        """K at a step of a run of `steps`: evolving winner-takes-all lets it fall from M."""
        overlap: int = self.objective["overlap"]
        if step >= self.evolve * steps:
            return overlap
        return round(self.members - (self.members - overlap) * step / (self.evolve * steps))

    def temperature_at(self, step: int, steps: int) -> float:
        """The temperature of the annealed rule at a step: it falls exponentially to a thousandth."""
        temperature: float = self.temperature * 1e-3 ** (step / steps)
        return temperature

    @property
    def tied_to_length(self) -> list[str]:
        """The fields by which a step depends on the length of the run, which then cannot be extended."""
        used = {
            "schedule": self.schedule != "constant",
            "warmup": self.warmup > 0,
            "milestones": any(when < 1 for when, _ in self.milestones),
            "decay": self.decay < 1 and self.decay_steps is None,
            "evolve": self.evolve > 0,
            "rule": self.rule == "annealed",
            "ema": self.ema > 0,
        }
        return [name for name, applies in used.items() if applies]

    def check_extends(self, other: "Recipe") -> None:
        """Raise unless this recipe is the other one with another length, on which no step depends."""
        own, before = self.to_json(), other.to_json()
        fixed = [key for key in own if own[key] != before[key] and key not in ("epochs", "steps")]
        if fixed or not self.tied_to_length:
            now, then = (", ".join(f"{key}={values[key]!r}" for key in fixed) for values in (own, before))
            _must(not fixed, f"recipe must be that of the run to resume, {then}", now)
            return
        field = self.tied_to_length[0]
        raise ValueError(
            f"a run to extend must do the same in each step whatever its length. Got {field}={own[field]!r}. "
            "Train anew in another folder. What can be extended has schedule='constant', milestones at steps "
            "(whole numbers) or decay_steps, and no warmup, evolve or ema."
        )

    def shortened(self, fraction: float) -> "Recipe":
        """The recipe over a fraction of its length; warm start and schedule scale with it."""
        if fraction == 1:
            return self
        return replace(
            self,
            epochs=self.epochs and self.epochs * fraction,
            steps=self.steps and max(1, round(self.steps * fraction)),
            warm_start=round(self.warm_start * fraction),
            decay_steps=self.decay_steps and max(1, round(self.decay_steps * fraction)),
            milestones=tuple(
                (max(1, round(when * fraction)) if when >= 1 else when, by) for when, by in self.milestones
            ),
        )

    def total_steps(self, examples: int, batch_size: int | None = None) -> int:
        """Steps of the whole run on this number of training examples; a DataLoader has its own batch size."""
        if self.steps is not None:
            return self.steps
        examples = min(examples, self.subset or examples)
        assert self.epochs is not None  # __post_init__ checks it
        return math.ceil(round(self.epochs * examples / (batch_size or self.batch_size), 6))

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate at a step of a run of `steps`."""
        lr: float = self.lr * self.decay ** (step / (self.decay_steps or steps))
        rise = self.warmup * steps
        if step < rise:
            lr *= (step + 1) / (rise + 1)
        elif self.schedule != "constant":
            done = (step - rise) / (steps - rise)
            lr *= 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        for when, factor in self.milestones:
            if step >= (when if when >= 1 else round(when * steps, 6)):  # 0.55 * 100 is above 55
                lr *= factor
        return lr

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @classmethod
    def from_json(cls, values: Any) -> "Recipe":
        """The recipe that `to_json` wrote; an unknown field is an error, a missing one its default."""
        _must(isinstance(values, Mapping), "recipe must be a JSON object", type(values).__name__)
        return cls(**values)

    @cached_property
    def hash(self) -> str:
        """A checksum of all fields and the schema's version; equal for equal recipes only."""
        values = {key: v for key, v in self.to_json().items() if key not in LATER or v != LATER[key]}
        content = json.dumps({"schema": SCHEMA, **values}, sort_keys=True)
        return sha256(content.encode()).hexdigest()[:16]


@explains_errors
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Options:
    """How a run is carried out: it changes no result, except for rounding and random numbers.

    Compiled code, and another kind of device, draw other masks, labels and dropout from the same seed.
    """

    device: str = "auto"  # a GPU if there is one
    precision: Literal["auto", "bf16", "float32"] = "auto"  # "auto": bf16 on CUDA, over float32 weights
    compile: bool | None = None  # None: on CUDA
    capture: bool | None = None  # the step in a CUDA graph; None: on CUDA, for data kept on the device
    # how members run: "stacked": at once, if they are alike and all weights are in linear layers; "streams":
    # side by side on a GPU; "sequential"; "auto": stacked on a CPU where that is faster, streams on a GPU
    members: Literal["auto", "stacked", "streams", "sequential"] = "auto"
    deterministic: bool = False  # the same weights again on the same GPU; slower
    evaluate_every: Annotated[int, Field(ge=0)] = 0  # epochs; 0: at the end
    evaluation_batch: Count = 1000  # examples evaluated at a time
    checkpoint_seconds: NotNegative = 60.0  # time between checkpoints
    mesh: str | None = None  # of torchrun's processes: "members=2,data=2"; None: that with the least work
    max_seconds: Positive | None = None  # then the run saves itself and raises `Interrupted`
    quiet: bool = False  # no progress on stderr
    tensorboard: bool = False  # write the telemetry for TensorBoard too

    def precision_on(self, device_type: str) -> str:
        """The precision of a run on a "cpu" or "cuda" device."""
        usual = "bf16" if device_type == "cuda" else "float32"
        return usual if self.precision == "auto" else self.precision

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        kind, _, number = name.partition(":")
        numbered = kind != "auto" and number.isdecimal()
        if kind not in ("auto", "cpu", "cuda", "mps", "xpu") or (":" in name and not numbered):
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'. Got {name!r}.")
        return name

    @field_validator("mesh")
    @classmethod
    def _readable_mesh(cls, text: str | None) -> str | None:
        if text is not None and not re.fullmatch(r"members=[1-9]\d*(,data=[1-9]\d*)?|data=[1-9]\d*", text):
            raise ValueError(f"mesh must look like members=2,data=2. Got {text!r}.")
        return text


def check_seed(seed: Any) -> int:
    """The seed as an int, if torch's generators take it."""
    if isinstance(seed, bool) or (not isinstance(seed, Integral) and getattr(seed, "ndim", None) != 0):
        raise TypeError(f"seed must be a whole number. Got {type(seed).__name__}.")
    _must(0 <= int(seed) < 2**63, "seed must be between 0 and 2**63 - 1", int(seed))
    return int(seed)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return not nested_too_deep(value)


def _must(holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{rule}. Got {got}.")
