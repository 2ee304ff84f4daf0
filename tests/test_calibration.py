"""Selective prediction keeps its guarantee, temperature scaling finds its optimum, scores rank as named."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cmcl import metrics
from cmcl.calibration import (
    ABSTAIN,
    LEVELS,
    SCORES,
    Threshold,
    apply_temperature,
    decide,
    examples_needed,
    fit_temperature,
    fit_threshold,
    uncertainty,
    upper_bound,
)

THRESHOLD = Threshold(
    value=0.25,
    score="confidence",
    risk=0.01,
    confidence=0.95,
    examples=1000,
    predicted=500,
    errors=1,
    bound=0.009,
)


def probs_of(confidences, classes=3):
    """One member that answers class 0 with these confidences, (1, N, C)."""
    first = torch.as_tensor(confidences, dtype=torch.float64)
    rest = ((1 - first) / (classes - 1))[:, None].expand(-1, classes - 1)
    return torch.cat([first[:, None], rest], 1)[None]


def draw(n, generator, error):
    """Examples whose answer (class 0) is wrong with probability error(confidence); confidence in 0.4..1."""
    confidence = 0.4 + 0.6 * torch.rand(n, generator=generator, dtype=torch.float64)
    wrong = torch.rand(n, generator=generator, dtype=torch.float64) < error(confidence)
    return probs_of(confidence), wrong.long()  # the true class is 1 where it is wrong


# --- scores, worked by hand ---

TWO = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]], [[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]])  # (2, 3, 2)
H = math.log(2)
H75 = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("confidence", [0.5, 0.5, 0.25]),
        ("mean_entropy", [H, H, H75]),
        ("member_entropy", [0, H, H / 2]),
        ("lowest_entropy", [0, H, 0]),
        ("disagreement", [H, 0, H75 - H / 2]),
    ],
)
def test_scores_by_hand(score, expected):
    """Two sure of different things, two silent, a specialist beside a silent one."""
    torch.testing.assert_close(uncertainty(TWO, score), torch.tensor(expected), atol=1e-6, rtol=0)


# lowest_entropy is of the member that is surest of the whole image, not pixel by pixel
@pytest.mark.parametrize("score", sorted(SCORES.keys() - {"lowest_entropy"}))
def test_dense_scores_are_pixel_means(score):
    dense = torch.rand(2, 4, 3, 5, 6).softmax(2)
    flat = dense.permute(0, 1, 3, 4, 2).reshape(2, 4 * 30, 3)
    expected = uncertainty(flat, score).reshape(4, 30).mean(1)
    torch.testing.assert_close(uncertainty(dense, score), expected)
    torch.testing.assert_close(uncertainty(dense.flatten(3), score), expected)  # sequences, one axis


def test_the_scores_have_names():
    with pytest.raises(ValueError, match=r"score must be one of 'confidence', .* Got 'volume'."):
        uncertainty(TWO, "volume")


def test_the_dense_lowest_entropy_is_that_of_one_member():
    """Each member is sure of one half of the image: none is sure of the image."""
    left = torch.tensor([1.0, 0.5]).repeat_interleave(2)  # (W,): sure, sure, silent, silent
    first = torch.stack([left, 1 - left])[None, :, None]  # (N, C, H, W)
    both = torch.stack([first, first.flip(3)])
    torch.testing.assert_close(uncertainty(both, "lowest_entropy"), torch.tensor([H / 2]))


def test_the_order_of_members_does_not_matter():
    probs = torch.rand(4, 7, 3).softmax(2)
    for score in SCORES:
        torch.testing.assert_close(uncertainty(probs, score), uncertainty(probs.flip(0), score))


# --- the bound ---


@pytest.mark.parametrize(("errors", "n", "level"), [(0, 10, 0.05), (3, 40, 0.01), (1, 1000, 0.0025)])
def test_the_bound_is_where_so_few_errors_become_unlikely(errors, n, level):
    p = upper_bound(errors, n, level)
    tail = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(errors + 1))
    assert tail == pytest.approx(level, rel=1e-6)
    assert upper_bound(0, 0, level) == 1 == upper_bound(n, n, level)  # without evidence


def test_examples_needed_is_exact():
    n = examples_needed(0.01, 0.95)
    level = 0.05 / LEVELS
    assert upper_bound(0, n, level) <= 0.01 < upper_bound(0, n - 1, level)


# --- calibrate and decide ---


def test_by_hand():
    """1,000 sure answers are right, 1,000 unsure ones are wrong every second time."""
    confidence = torch.cat([torch.linspace(0.8, 1, 1000), torch.linspace(0.4, 0.7, 1000)])
    targets = torch.zeros(2000, dtype=torch.long)
    targets[1000::2] = 1
    found = fit_threshold(probs_of(confidence), targets, risk=0.01)
    assert (found.predicted, found.errors, found.coverage) == (1000, 0, 0.5)
    assert found.bound == pytest.approx(1 - (0.05 / LEVELS) ** (1 / 1000))
    answers = decide(probs_of([0.9, 0.75, 0.5]), found)
    assert answers.tolist() == [0, 0, -1]  # 0.75 lies above the first unsure one, at 0.7


@pytest.mark.parametrize("level", range(1, LEVELS))
def test_every_level_of_coverage_is_tried(level):
    """Only the most confident 5 %, 10 %, ... are right: the threshold is just there."""
    n = 800 * LEVELS
    targets = (torch.arange(n) >= 800 * level).long()
    probs = probs_of(torch.linspace(1, 0.4, n, dtype=torch.float64))
    found = fit_threshold(probs, targets)
    assert found.coverage == level / LEVELS
    assert int((decide(probs, found) != ABSTAIN).sum()) == found.predicted  # at the threshold it abstains


def test_all_is_answered_where_nothing_goes_wrong():
    found = fit_threshold(probs_of(torch.linspace(0.4, 1, 700)), torch.zeros(700, dtype=torch.long))
    assert found.coverage == 1
    assert found.value == math.inf
    assert decide(probs_of([0.34]), found).tolist() == [0]


def test_nothing_is_answered_where_the_risk_cannot_be_promised():
    few = examples_needed(0.01, 0.95) - 1
    found = fit_threshold(probs_of(torch.linspace(0.4, 1, few)), torch.zeros(few, dtype=torch.long))
    assert not found.reached
    assert found.coverage == 0
    assert decide(probs_of([1.0, 0.5]), found).tolist() == [ABSTAIN, ABSTAIN]
    assert "not reached" in str(found)
    assert f"{few + 1:,} predictions without an error" in str(found)


def test_equal_scores_are_answered_together_or_not_at_all():
    """A saturated softmax: most confidences are exactly 1, and some of those answers are wrong."""
    confidence = torch.cat([torch.ones(1500), torch.full((500,), 0.5)])
    targets = (torch.arange(2000) % 30 == 0).long()
    found = fit_threshold(probs_of(confidence), targets, risk=0.01)
    assert not found.reached
    assert fit_threshold(probs_of(confidence), targets, risk=0.1).predicted in {1500, 2000}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.02, 0.3), st.sampled_from(sorted(SCORES)))
def test_more_risk_and_less_confidence_answer_more(seed, risk, score):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(3, 400, 4, generator=generator).mul(6).softmax(2)
    targets = torch.where(torch.rand(400, generator=generator) < 0.9, probs.mean(0).argmax(1), 0)
    base = fit_threshold(probs, targets, risk=risk, score=score)
    assert fit_threshold(probs, targets, risk=risk + 0.1, score=score).predicted >= base.predicted
    assert fit_threshold(probs, targets, risk=risk, confidence=0.8, score=score).predicted >= base.predicted
    assert base.bound <= risk or not base.reached
    answers = decide(probs, base)
    assert int((answers != ABSTAIN).sum()) == base.predicted
    assert int(((answers != targets) & (answers != ABSTAIN)).sum()) == base.errors


# In closed form: among answers above confidence t the error is what `error` is on average over (t, 1).
CASES = {
    "linear": (lambda c: 0.25 * (1 - c), lambda t: 0.25 * (1 - t) / 2),
    "flat, just too risky": (lambda c: torch.full_like(c, 0.0501), lambda t: 0.0501),
    "the surest are the worst": (lambda c: 0.12 * (c > 0.9), lambda t: 0.12 * 0.1 / (1 - min(t, 0.9))),
}


@pytest.mark.parametrize("case", CASES)
def test_the_guarantee_by_simulation(case):
    """In 200 calibrations at 80 % confidence, the true risk may be exceeded in about 40 at most."""
    error, true_risk = CASES[case]
    broken = reached = 0
    for seed in range(200):
        probs, targets = draw(600, torch.Generator().manual_seed(seed), error)
        found = fit_threshold(probs, targets, risk=0.05, confidence=0.8)
        if found.reached:
            reached += 1
            lowest = max(0.4, 1 - found.value) if math.isfinite(found.value) else 0.4
            broken += true_risk(lowest) > 0.05
    assert broken <= 40 + 3 * 6  # three standard deviations
    assert reached > 50 or case != "linear"


def test_one_threshold_alone_would_break_the_promise():
    """Why twenty bounds are paid for: choosing the best of them without that fails far more often."""
    broken = 0
    for seed in range(200):
        probs, targets = draw(600, torch.Generator().manual_seed(seed), CASES["flat, just too risky"][0])
        ordered = uncertainty(probs, "confidence").argsort()
        wrong = targets[ordered].cumsum(0)
        bounds = [upper_bound(int(wrong[n - 1]), n, 0.2) for n in range(30, 601, 30)]
        broken += min(bounds) <= 0.05
    assert broken > 0.2 * 200 + 3 * 6


@pytest.mark.parametrize("change", [{}, {"value": math.inf}, {"value": -math.inf}, {"weights": "abc"}])
def test_a_threshold_survives_json(change):
    found = THRESHOLD.model_copy(update=change)
    text = json.dumps(found.to_json(), allow_nan=False)
    assert Threshold.from_json(json.loads(text)) == found
    assert Threshold.from_json({"threshold": json.loads(text), "tested": {}}) == found
    assert ("weights" in found.to_json()) == ("weights" in change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": "nan"}, "value must be"),
        ({"value": math.nan}, "value must be"),
        ({"value": True}, "value must be"),
        ({"value": None}, "value must be"),
        ({"value": 10**400}, "value must be"),
        ({"risk": "a"}, "risk must be"),
        ({"risk": 5}, "risk must be between 0 and 1. Got 5."),
        ({"risk": 1e-320}, "risk must be at least 1e-09"),
        ({"confidence": 0}, "confidence must be above 0 and below 1. Got 0."),
        ({"score": "foo"}, "score must be one of 'confidence', .* Got 'foo'."),
        ({"score": ["confidence"]}, "score must be"),
        ({"examples": 0, "predicted": 0}, "examples must be"),
        ({"predicted": 5.5}, "predicted must be"),
        ({"predicted": True}, "predicted must be"),
        ({"errors": -1}, "errors must be"),
        ({"errors": 501}, "errors must be at most predicted, .* Got 501, 500 and 1000."),
        ({"predicted": 1001}, "that at most examples. Got 1, 1001 and 1000."),
        ({"bound": "b"}, "bound must be"),
        ({"bound": 1.5}, "bound must be"),
        ({"weights": 3}, "weights must be"),
        ({"speed": 9}, "has no field 'speed'"),
    ],
)
def test_a_threshold_of_nonsense(change, message):
    with pytest.raises(ValueError, match=f"threshold: .*{message}"):
        Threshold.from_json(THRESHOLD.to_json() | change)


def test_the_least_that_a_threshold_may_hold():
    """Predicting nothing is not reaching the risk; one prediction is."""
    change = {"examples": 1, "predicted": 1, "errors": 0, "bound": 0}
    assert Threshold.from_json(THRESHOLD.to_json() | change).reached
    assert not Threshold.from_json(THRESHOLD.to_json() | change | {"predicted": 0}).reached


@pytest.mark.parametrize("values", ["threshold.json", {"threshold": [1]}, {}, None])
def test_no_threshold_at_all(values):
    with pytest.raises(ValueError, match="^threshold: Threshold must"):
        Threshold.from_json(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"risk": 0}, "^risk must be at least 1e-09 and below 1. Got 0."),
        ({"confidence": 1.0}, "^confidence must be above 0 and below 1. Got 1.0."),
        ({"targets": torch.zeros(4, dtype=torch.long)}, "targets must be an integer tensor of shape"),
        ({"member_probs": torch.rand(5, 3)}, "member_probs must have shape"),
        ({"member_probs": torch.ones(1, 5, 2, 2, 2) / 2}, "must have one prediction per example"),
        ({"member_probs": torch.randn(1, 5, 3)}, "must be at least 0 and sum to 1"),
    ],
)
def test_errors(change, message):
    arguments = {
        "member_probs": probs_of([0.5] * 5),
        "targets": torch.zeros(5, dtype=torch.long),
        "risk": 0.1,
    } | change
    with pytest.raises(ValueError, match=message):
        fit_threshold(arguments.pop("member_probs"), arguments.pop("targets"), **arguments)


def test_the_temperature_that_was_applied_is_found():
    """Answers right with probability p, shown as p ** 2 / sum: T = 2 undoes it."""
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(1, 20_000, 4, generator=generator, dtype=torch.float64).mul(4).softmax(2)
    targets = torch.multinomial(true[0], 1, generator=generator)[:, 0]
    shown = true.square() / true.square().sum(2, keepdim=True)
    t = fit_temperature(shown, targets)
    assert t == pytest.approx(2, rel=0.05)
    torch.testing.assert_close(apply_temperature(shown, 2.0), true[0])
    assert metrics.nll(apply_temperature(shown, t)[None], targets) <= metrics.nll(true, targets)


def test_tempering_keeps_the_answer_and_one_changes_nothing():
    probs = torch.rand(3, 50, 5, dtype=torch.float64).softmax(2)  # in float32 the two largest may tie
    torch.testing.assert_close(apply_temperature(probs, 1.0), probs.mean(0))
    for t in (0.1, 0.5, 3.0):
        assert torch.equal(apply_temperature(probs, t).argmax(1), probs.mean(0).argmax(1))
    assert apply_temperature(torch.tensor([[[1.0, 0.0]]]), 0.05).tolist() == [[1.0, 0.0]]
    with pytest.warns(UserWarning, match="20, is the end of its range"):
        fit_temperature(probs, probs.mean(0).argmin(1))  # all wrong: higher is always better


@pytest.mark.parametrize("n", [2, 4, 30])
def test_one_more_error_is_assumed_than_the_examples_show(n):
    """By hand: n correct predictions of one of two classes, with odds 3 : 2, get the odds n : 1."""
    probs = torch.tensor([0.6, 0.4], dtype=torch.float64).expand(1, n, 2)
    t = fit_temperature(probs, torch.zeros(n, dtype=torch.long))
    assert t == pytest.approx(math.log(1.5) / math.log(n), rel=1e-3)
    assert apply_temperature(probs, t)[0, 0].item() == pytest.approx(n / (n + 1), abs=1e-4)


def test_it_is_fitted_to_what_predictions_will_be():
    """A probability of 0 in float32 is scaled as the smallest number of float32, here and in `predict`."""
    probs = torch.tensor([[[1.0, 0.0]] * 9999 + [[0.0, 1.0]]])
    t = fit_temperature(probs, torch.zeros(10_000, dtype=torch.long))  # one error, and one assumed
    assert t == pytest.approx(-math.log(torch.finfo(torch.float32).tiny) / math.log(9999 / 2), rel=1e-2)


def test_a_silent_half_is_undone():
    """Two members know, two are silent: the average says 0.55, the truth is 0.9 or so."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(10, (4000,), generator=generator)
    said = torch.where(torch.rand(4000, generator=generator) < 0.9, targets, (targets + 1) % 10)
    sure = torch.nn.functional.one_hot(said, 10).double()
    probs = torch.stack([sure, sure, torch.full_like(sure, 0.1), torch.full_like(sure, 0.1)])
    assert metrics.ece(probs, targets) > 0.3
    assert metrics.ece(apply_temperature(probs, fit_temperature(probs, targets))[None], targets) < 0.01


def test_dense_answers_are_tempered_too():
    probs = torch.rand(2, 3, 4, 5, 6).softmax(2)
    targets = probs.mean(0).argmax(1)  # (3, 5, 6)
    targets[:, :2] = torch.randint(4, (3, 2, 6))
    targets[:, 0, 0] = 255
    t = fit_temperature(probs, targets, ignore_index=255)
    before, after = (
        metrics.nll(x, targets, ignore_index=255) for x in (probs, apply_temperature(probs, t)[None])
    )
    assert after <= before
    kept = (targets != 255).flatten()
    pixels = probs.movedim(2, -1).flatten(1, -2)[:, kept]  # (M, Q, C)
    assert t == pytest.approx(fit_temperature(pixels, targets.flatten()[kept]), rel=1e-4)
    with pytest.raises(ValueError, match="temperature must be above 0. Got 0."):
        apply_temperature(probs, 0)
