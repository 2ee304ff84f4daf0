"""Temperature scaling, selective prediction, and uncertainty scores.

M members, N examples, C classes. Everything works on `member_probs` (M, N, C), as `Ensemble.predict` gives.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

import torch
from pydantic import BeforeValidator, ConfigDict, Field, field_serializer, model_validator
from torch import Tensor

from . import _checks, metrics
from ._messages import warn
from ._schema import Schema
from .ensemble import scale_temperature

ABSTAIN = -1  # instead of a class
LEVELS = 20  # coverages that `fit_threshold` tries: 5 %, 10 %, ..., 100 %
LOWEST_RISK = 1e-9
WIDEST = 20.0  # a temperature lies between 1 / WIDEST and WIDEST: beyond, nothing is left of a prediction


def _confidence(member_probs: Tensor) -> Tensor:
    confidence = 1 - member_probs.mean(0).amax(1)
    return confidence.flatten(1).mean(1) if confidence.ndim > 1 else confidence


def _mean_entropy(member_probs: Tensor) -> Tensor:
    return metrics.entropy(member_probs.mean(0), dim=1)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # (M, N, C, ...) -> (N,); higher: less confident
    "confidence": _confidence,  # 1 - the averaged prediction's highest probability
    "mean_entropy": _mean_entropy,  # of the averaged prediction, nats: members are uncertain, or disagree
    # mean over members, nats: high if many are near-uniform
    "member_entropy": lambda probs: metrics.entropy(probs).mean(0),
    # of the most confident member, nats: high without a specialist
    "lowest_entropy": lambda probs: metrics.entropy(probs).amin(0),
    # the second less the third, nats: high if members predict different classes
    "disagreement": lambda probs: _mean_entropy(probs) - metrics.entropy(probs).mean(0),
}


def uncertainty(member_probs: Tensor, score: str = "mean_entropy") -> Tensor:
    """The uncertainty of each example, (N,): to abstain by, or to detect out-of-distribution data by.

    Args:
        member_probs: (M, N, C), or dense (M, N, C, H, W), which gives the pixel mean.
        score: a name in `SCORES`. "lowest_entropy" fits CMCL best: members are trained towards uniform
            outside their speciality, so no member is a specialist of an input on which all are uncertain.
            "disagreement" is for independent members only: specialists disagree by design. How well each
            ranks, measured: docs/tutorials/calibration.md.
    """
    _checks.choice("score", score, tuple(SCORES))
    if not isinstance(member_probs, Tensor) or member_probs.ndim < 3:
        raise ValueError(
            f"member_probs must have shape (members, examples, classes). Got {_checks.kind(member_probs)}."
        )
    return SCORES[score](member_probs)


def check_guarantee(risk: float, confidence: float, score: str) -> None:
    """Raise unless `fit_threshold` takes these, so that it is known before anything is computed."""
    _checks.probability("risk", risk)
    _checks.probability("confidence", confidence)
    if not LOWEST_RISK <= risk < 1:
        raise ValueError(f"risk must be at least {LOWEST_RISK:g} and below 1. Got {risk}.")
    if confidence in (0, 1):
        raise ValueError(f"confidence must be above 0 and below 1. Got {confidence}.")
    _checks.choice("score", score, tuple(SCORES))


def _read_value(value: Any) -> Any:
    """JSON has no infinity, so it is written as text."""
    number = float(value) if value in ("inf", "-inf") else value
    if isinstance(number, float) and math.isnan(number):  # all scores fail `score < nan`: always abstain
        raise ValueError("value must be a number, or 'inf' or '-inf' in JSON. Got NaN.")
    return number


class Threshold(Schema):
    """The ensemble predicts where the uncertainty is below `value`, and abstains elsewhere."""

    model_config = ConfigDict(strict=True)

    value: Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_read_value)]  # inf: never abstain
    score: str
    risk: float  # the guarantee ...
    confidence: float
    examples: int = Field(ge=1)  # ... and the calibration data that it rests on
    predicted: int = Field(ge=0)
    errors: int = Field(ge=0)
    bound: float = Field(ge=0, le=1)  # upper confidence bound of the error among the predicted; 1 if none is
    weights: str | None = None  # checksum of the saved ensemble that it is for, if known
    flip: bool | None = None  # whether predictions are averaged with those for mirror images, if known

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_guarantee(self.risk, self.confidence, self.score)
        if not self.errors <= self.predicted <= self.examples:
            counts = f"{self.errors}, {self.predicted} and {self.examples}"
            raise ValueError(f"errors must be at most predicted, and that at most examples. Got {counts}.")
        return self

    @field_serializer("value", when_used="json")
    def _write_value(self, value: float) -> float | str:
        return value if math.isfinite(value) else str(value)

    @property
    def reached(self) -> bool:
        """Whether the guarantee holds at any coverage."""
        return self.predicted > 0

    @property
    def coverage(self) -> float:
        """Fraction of the calibration examples that is predicted."""
        return self.predicted / self.examples

    def to_json(self) -> dict[str, Any]:
        """JSON values; an infinite `value` is text, what is unknown is left out."""
        return self.model_dump(mode="json", exclude_none=True)

    @classmethod
    def from_json(cls, values: Any) -> "Threshold":
        """The threshold that `to_json` wrote, or all that `cmcl calibrate --json` printed."""
        inside = values.get("threshold", values) if isinstance(values, Mapping) else values
        threshold: Threshold = cls.parse(inside, source="threshold")
        return threshold

    def __str__(self) -> str:
        goal = f"at most {self.risk:.2%} of predictions wrong, with {self.confidence:.0%} confidence"
        if self.reached:
            return (
                f"{goal}: coverage {self.coverage:.1%} ({self.errors} wrong of {self.predicted:,} on "
                f"{self.examples:,} calibration examples, bound {self.bound:.2%})"
            )
        return (
            f"{goal}: not reached with {self.examples:,} calibration examples, so the ensemble always "
            f"abstains. {examples_needed(self.risk, self.confidence):,} predictions without an error are the "
            "least it takes; allow a higher risk, or use more examples or a better ensemble"
        )


def fit_threshold(
    member_probs: Tensor,
    targets: Tensor,
    *,
    risk: float = 0.01,
    confidence: float = 0.95,
    score: str = "confidence",
) -> Threshold:
    """The threshold of largest coverage whose predictions are wrong with probability at most `risk`.

    The guarantee: with probability `confidence` over the draw of the calibration examples, the averaged
    prediction is wrong with probability at most `risk` on a new example, given that the ensemble does not
    abstain. It holds for any ensemble, score and number of examples, if

    - calibration examples and new ones are drawn independently from the same distribution,
    - the ensemble was neither trained nor chosen on the calibration examples, and
    - risk, confidence and score were fixed before looking at them.

    It is about all predicted examples together, not about each class, and does not survive a shift.

    How: twenty thresholds are tried, those with coverage 5 %, 10 %, ..., 100 % of the calibration examples.
    Given such a threshold (a fixed rank of the scores), the examples below it are independent draws, so
    their errors are binomial, and the Clopper-Pearson bound at level (1 - confidence) / 20 holds for each;
    together they hold with `confidence`. The loosest threshold whose bound is within the risk is returned.

    Args:
        member_probs: (M, N, C) of held-out examples.
        targets: their classes, (N,).
        risk: the error rate to allow among the predictions, above 0 and below 1.
        confidence: of the guarantee, above 0 and below 1.
        score: the uncertainty to abstain by, a name in `SCORES`.
    """
    check_guarantee(risk, confidence, score)
    scores = uncertainty(member_probs, score)  # (N,)
    if member_probs.ndim != 3:
        raise ValueError(
            "member_probs must have one prediction per example, shape (members, examples, classes). "
            f"Got {_checks.kind(member_probs)}; for dense outputs use uncertainty()."
        )
    metrics.top1_error(member_probs, targets)  # for its checks
    wrong = member_probs.mean(0).argmax(1) != targets
    fixed: dict[str, Any] = {"score": score, "risk": risk, "confidence": confidence, "examples": len(scores)}
    for value in _candidates(scores):
        below = scores < value  # strictly: examples that tie with the threshold are not independent of it
        n, k = int(below.sum()), int(wrong[below].sum())
        if (bound := upper_bound(k, n, (1 - confidence) / LEVELS)) <= risk:
            return Threshold(value=value, predicted=n, errors=k, bound=bound, **fixed)
    return Threshold(value=-math.inf, predicted=0, errors=0, bound=1.0, **fixed)


def decide(member_probs: Tensor, threshold: Threshold) -> Tensor:
    """The predicted classes (N,), `ABSTAIN` (-1) where the uncertainty is not below the threshold."""
    confident = uncertainty(member_probs, threshold.score) < threshold.value
    return member_probs.mean(0).argmax(1).where(confident, ABSTAIN)


def fit_temperature(member_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> float:
    """The T with the lowest negative log-likelihood of the averaged prediction on held-out examples.

    One more error is assumed than these examples show, of the second most probable class: without it a few
    examples that are all predicted correctly would ask for T = 0.

    Near-uniform non-specialists make the averaged prediction of CMCL underconfident, so T is usually below 1.
    Set as `ensemble.temperature`, it is saved with the ensemble and used by `predict` and `export`.
    """
    from scipy.optimize import minimize_scalar

    averaged = member_probs.mean(0)  # (N, C, ...)
    # as `scale_temperature` will read them: a probability of 0 in float32 is one below 1e-38
    averaged = averaged.clamp(min=torch.finfo(averaged.dtype).tiny).double()
    counted = torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index

    def cost(log_t: float) -> float:
        probs = scale_temperature(averaged, math.exp(log_t))
        shown = metrics.nll(probs[None], targets, ignore_index=ignore_index)
        second = probs.topk(2, dim=1).values[:, 1]  # (N, ...)
        second = second[counted].clamp(min=torch.finfo(second.dtype).tiny)  # log 0 is no number
        return shown - float(second.log().mean() / counted.sum())

    widest = math.log(WIDEST)  # the cost is convex in 1 / T, so there is one minimum
    found = minimize_scalar(cost, bounds=(-widest, widest), method="bounded")
    if abs(found.x) > widest - 1e-3:
        warn(
            f"the temperature, {math.exp(found.x):.3g}, is the end of its range: these examples have no best "
            "one. Use more examples, and check that they have the labels the ensemble was trained on."
        )
    return math.exp(found.x)


def apply_temperature(member_probs: Tensor, temperature: float) -> Tensor:
    """The averaged prediction (N, C, ...), its probabilities raised to 1 / temperature and normalised."""
    return scale_temperature(member_probs.mean(0), temperature)


def cross_fitted_ece(member_probs: Tensor, targets: Tensor) -> float:
    """ECE after temperature scaling where there are no held-out examples, as a fraction.

    Examples with an even index are scaled by the temperature of the others, and these by theirs.
    """
    scaled = member_probs.mean(0)
    with warnings.catch_warnings(action="ignore"):  # of a temperature at the end of its range
        fitted = [fit_temperature(member_probs[:, half::2], targets[half::2]) for half in (0, 1)]
    for half, temperature in enumerate(reversed(fitted)):
        scaled[half::2] = apply_temperature(member_probs[:, half::2], temperature)
    return metrics.ece(scaled[None], targets)


def upper_bound(errors: int, n: int, level: float) -> float:
    """Clopper-Pearson: the error rate at which `errors` or fewer among `n` have probability `level`."""
    from scipy.stats import beta

    return 1.0 if errors >= n else float(beta.ppf(1 - level, errors + 1, n - errors))


def examples_needed(risk: float, confidence: float) -> int:
    """The number of predictions, none of them wrong, from which `fit_threshold` can reach the risk."""
    return math.ceil(math.log((1 - confidence) / LEVELS) / math.log1p(-risk))


def _candidates(scores: Tensor) -> list[float]:
    """Thresholds from the loosest, which never abstains, to the strictest."""
    ordered = scores.sort().values.tolist()
    return [math.inf, *(ordered[len(ordered) * level // LEVELS] for level in range(LEVELS - 1, 0, -1))]
