"""When to stay silent, what looks unfamiliar, and probabilities that can be taken at their word.

M members, N examples, C classes. Everything works on `member_probs` (M, N, C), what `Ensemble.predict` gives.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from . import _checks, metrics
from .telling import tell

ABSTAIN = -1  # in the place of a class
LEVELS = 20  # coverages that `calibrate` tries: 5 %, 10 %, ..., 100 %


def _confidence(member_probs: Tensor) -> Tensor:
    confidence = 1 - member_probs.mean(0).amax(1)
    return confidence.flatten(1).mean(1) if confidence.ndim > 1 else confidence


def _mean_entropy(member_probs: Tensor) -> Tensor:
    return metrics.entropy(member_probs.mean(0), dim=1)


def _member_entropy(member_probs: Tensor) -> Tensor:
    return metrics.entropy(member_probs).mean(0)


def _lowest_entropy(member_probs: Tensor) -> Tensor:
    return metrics.entropy(member_probs).amin(0)


def _disagreement(member_probs: Tensor) -> Tensor:
    return _mean_entropy(member_probs) - _member_entropy(member_probs)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # (M, N, C, ...) -> (N,); higher: less sure
    "confidence": _confidence,  # 1 - the averaged answer's highest probability
    "mean_entropy": _mean_entropy,  # of the averaged answer, nats: unsure, or of several minds
    "member_entropy": _member_entropy,  # mean over members, nats: how silent they are, agreed or not
    "lowest_entropy": _lowest_entropy,  # of the surest member, nats: high if this is nobody's speciality
    "disagreement": _disagreement,  # the second less the third, nats: members are sure of different answers
}


def uncertainty(member_probs: Tensor, score: str = "mean_entropy") -> Tensor:
    """How unsure the ensemble is of each example, (N,): to reject by, or to rank by as unfamiliar.

    Args:
        member_probs: (M, N, C), or dense (M, N, C, H, W), which gives the pixel mean.
        score: a name in `SCORES`. "lowest_entropy" reads CMCL at its word: members are trained to be silent
            outside their speciality, so an input on which even the surest is silent is nobody's.
            "disagreement" is for independent members only: specialists disagree by design. How well each
            ranks, measured: docs/rejecting.md.
    """
    _checks.choice("score", score, tuple(SCORES))
    if not isinstance(member_probs, Tensor) or member_probs.ndim < 3:
        raise ValueError(
            f"member_probs must have shape (members, examples, classes). Got {_checks.kind(member_probs)}."
        )
    return SCORES[score](member_probs)


def check_promise(risk: float, confidence: float, score: str) -> None:
    """What `calibrate` can be asked for: to be known before its examples are computed."""
    for name, value in (("risk", risk), ("confidence", confidence)):
        _checks.probability(name, value)
        if value in (0, 1):
            raise ValueError(f"{name} must be above 0 and below 1. Got {value}.")
    _checks.choice("score", score, tuple(SCORES))


@dataclass(frozen=True)
class Threshold:
    """Answer where the uncertainty is below `value`. Made by `calibrate`, used by `decide`."""

    value: float  # +inf: always answer; -inf: never
    score: str
    risk: float  # what was asked for ...
    confidence: float
    examples: int  # ... and what the calibration data showed
    answered: int
    errors: int
    bound: float  # upper confidence bound of the error among answered examples; 1 if none is
    weights: str | None = None  # checksum of the saved ensemble that it is for, where that is known

    def __post_init__(self) -> None:
        check_promise(self.risk, self.confidence, self.score)
        _check_value(self.value)
        _checks.at_least(1, examples=self.examples)
        _checks.at_least(0, answered=self.answered, errors=self.errors)
        if not self.errors <= self.answered <= self.examples:
            counts = f"{self.errors}, {self.answered} and {self.examples}"
            raise ValueError(f"errors must be at most answered, and that at most examples. Got {counts}.")
        _checks.probability("bound", self.bound)
        if not isinstance(self.weights, str | None):
            raise TypeError(f"weights must be a checksum, or None. Got {_checks.kind(self.weights)}.")

    @property
    def reached(self) -> bool:
        """Whether the risk can be promised for any share of the examples."""
        return self.answered > 0

    @property
    def coverage(self) -> float:
        """Share of the calibration examples that is answered."""
        return self.answered / self.examples

    def to_json(self) -> dict[str, Any]:
        """JSON values; an infinite `value` is written as text, and `weights` only where they are known."""
        values = asdict(self) | {"value": self.value if math.isfinite(self.value) else str(self.value)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Threshold":
        """What `to_json` wrote, or all that `cmcl calibrate --json` printed."""
        inside = values.get("threshold", values) if isinstance(values, Mapping) else values
        if not isinstance(inside, Mapping):
            message = f"a threshold must be a dict. Got {_checks.kind(inside)}."
            raise TypeError(f"{message} Of a file, pass json.loads(path.read_text()).")
        known = [field.name for field in fields(cls)]
        missing = [name for name in known if name not in inside and name != "weights"]
        unknown = [str(name) for name in inside if name not in known]
        if missing or unknown:
            got = f"{len(missing)} missing ({', '.join(missing)})" if missing else ", ".join(unknown)
            message = f"a threshold must have the fields that to_json writes, and no others. Got {got}."
            raise ValueError(f"{message} Make it with calibrate() or `cmcl calibrate -o FILE`.")
        value = inside["value"]
        return cls(**dict(inside) | {"value": float(value) if value in ("inf", "-inf") else value})

    def __str__(self) -> str:
        promise = f"at most {self.risk:.2%} wrong among the answered, with {self.confidence:.0%} confidence"
        if self.reached:
            return (
                f"{promise}: answers {self.coverage:.1%} ({self.errors} wrong of {self.answered:,} in "
                f"{self.examples:,} calibration examples, bound {self.bound:.2%})"
            )
        return (
            f"{promise}: cannot be promised from {self.examples:,} calibration examples, so every example is "
            f"rejected. {examples_needed(self.risk, self.confidence):,} answers without an error are the "
            "least it takes; allow a higher risk, or bring more examples or a better ensemble"
        )


def calibrate(
    member_probs: Tensor,
    targets: Tensor,
    *,
    risk: float = 0.01,
    confidence: float = 0.95,
    score: str = "confidence",
) -> Threshold:
    """The threshold that answers most, and is wrong on at most the share `risk` of what it answers.

    The guarantee: with probability `confidence` over the draw of the calibration examples, the averaged
    answer is wrong with probability at most `risk` on a new example, given that it is answered. It holds
    for any ensemble and any score, at any number of examples, if

    - calibration examples and new ones are drawn independently from the same distribution,
    - the ensemble was neither trained nor chosen on the calibration examples, and
    - risk, confidence and score were fixed before looking at them.

    It is about all answered examples together, not about each class, and says nothing once the data change.

    How: twenty thresholds are tried, those that answer 5 %, 10 %, ..., all of the calibration examples.
    Given such a threshold (a fixed rank of the scores), the examples beyond it are independent draws, so
    their errors are binomial, and the Clopper-Pearson bound at level (1 - confidence) / 20 holds for each;
    together they hold with `confidence`. The loosest threshold whose bound is within the risk is returned.

    Args:
        member_probs: (M, N, C) of held-out examples.
        targets: their classes, (N,).
        risk: the share of wrong answers to allow, between 0 and 1 exclusive.
        confidence: of the guarantee, between 0 and 1 exclusive.
        score: what to reject by, a name in `SCORES`.
    """
    check_promise(risk, confidence, score)
    scores = uncertainty(member_probs, score)  # (N,)
    if member_probs.ndim != 3:
        raise ValueError(
            "member_probs must have one answer per example, shape (members, examples, classes). "
            f"Got {_checks.kind(member_probs)}; reject dense outputs by uncertainty()."
        )
    metrics.top1_error(member_probs, targets)  # for its checks
    wrong = member_probs.mean(0).argmax(1) != targets
    level = (1 - confidence) / LEVELS
    for value in _candidates(scores):
        answered = scores < value  # strictly: examples that tie with the threshold are not independent of it
        n, k = int(answered.sum()), int(wrong[answered].sum())
        if (bound := upper_bound(k, n, level)) <= risk:
            return Threshold(value, score, risk, confidence, len(scores), n, k, bound)
    return Threshold(-math.inf, score, risk, confidence, len(scores), 0, 0, 1.0)


def decide(member_probs: Tensor, threshold: Threshold) -> Tensor:
    """The ensemble's answers (N,), `ABSTAIN` (-1) where it is less sure than the threshold asks."""
    sure = uncertainty(member_probs, threshold.score) < threshold.value
    return member_probs.mean(0).argmax(1).where(sure, ABSTAIN)


def temperature(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """The T for `tempered` that gives held-out examples the lowest negative log-likelihood.

    Silent members pull the averaged answer of CMCL towards uniform, so T is below 1 there as a rule.
    """
    from scipy.optimize import minimize_scalar

    averaged = member_probs.mean(0, keepdim=True).double()  # (1, N, C, ...)

    def cost(log_t: float) -> float:
        probs = tempered(averaged, math.exp(log_t))[None]
        return metrics.nll(probs, targets, ignore_index=ignore_index)

    # Convex in 1 / T, so there is one minimum; beyond a factor of 20 nothing is left of the answer.
    widest = math.log(20)
    found = minimize_scalar(cost, bounds=(-widest, widest), method="bounded")
    if abs(found.x) > widest - 1e-3:
        tell(
            f"the temperature, {math.exp(found.x):.3g}, is the end of its range: these examples have no best "
            "one. Where none of them is answered wrong, any surer answer looks better; give it more."
        )
    return math.exp(found.x)


def tempered(member_probs: Tensor, temperature: float) -> Tensor:
    """The averaged answer (N, C, ...), its probabilities raised to 1 / temperature and normed again."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0. Got {temperature}. Fit it with temperature().")
    averaged = member_probs.mean(0)
    tiny = torch.finfo(averaged.dtype).tiny  # log 0 is no number
    return (averaged.clamp(min=tiny).log() / temperature).softmax(1)


def upper_bound(errors: int, n: int, level: float) -> float:
    """Clopper-Pearson: the error rate at which so few of `n` are wrong with probability `level` only."""
    from scipy.stats import beta

    return 1.0 if errors >= n else float(beta.ppf(1 - level, errors + 1, n - errors))


def examples_needed(risk: float, confidence: float) -> int:
    """How many answers, none of them wrong, it takes before `calibrate` can promise anything."""
    return math.ceil(math.log((1 - confidence) / LEVELS) / math.log1p(-risk))


def _check_value(value: float) -> None:
    """A number or an infinity. Not NaN: no score is below it, so all would be rejected without a word."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ValueError(f"value must be a number, or 'inf' or '-inf' in JSON. Got {_checks.kind(value)}.")


def _candidates(scores: Tensor) -> list[float]:
    """Thresholds from the loosest, which answers all, to the strictest."""
    n, ordered = len(scores), scores.sort().values
    ranks = [n * level // LEVELS for level in range(LEVELS - 1, 0, -1)]
    return [math.inf, *(float(ordered[rank]) for rank in ranks)]
