import math
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cmcl import metrics

BY_IMAGE = ("top1_error", "oracle_error", "picked_error", "nll", "brier")

# Two members, four examples, three classes. Answers: member 0 says 0, 1, 2, 0; member 1 says 0, 2, 1, 1.
PROBS = torch.tensor(
    [
        [[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0]],
        [[0.6, 0.3, 0.1], [0.0, 0.0, 1.0], [0.2, 0.6, 0.2], [0.1, 0.8, 0.1]],
    ]
)
TARGETS = torch.tensor([0, 1, 1, 2])


def random_case(seed, *, members, examples, classes, pixels=()):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(members, examples, classes, *pixels, generator=generator, dtype=torch.float64)
    targets = torch.randint(classes, (examples, *pixels), generator=generator)
    return (3 * logits).softmax(2), targets


cases = st.builds(
    random_case,
    st.integers(0, 10_000),
    members=st.integers(1, 5),
    examples=st.integers(1, 12),
    classes=st.integers(2, 5),
    pixels=st.sampled_from([(), (1, 1), (2, 3)]),
)


def brute_force(member_probs, targets, ignore=None):
    """Every per-image metric with loops over numpy numbers, nothing vectorised."""
    probs, targets = member_probs.numpy(), targets.numpy()
    members, examples, classes = probs.shape[:3]
    probs, targets = probs.reshape(members, examples, classes, -1), targets.reshape(examples, -1)
    found = {name: [] for name in (*BY_IMAGE, "members")}
    for n in range(examples):
        counted = [i for i, label in enumerate(targets[n]) if label != ignore]
        if not counted:
            continue
        mean = probs[:, n].mean(0)  # (C, P)
        wrong = [
            np.mean([probs[m, n, :, i].argmax() != targets[n, i] for i in counted]) for m in range(members)
        ]
        unsure = [
            np.mean([-sum(p * math.log(p) for p in pixel if p > 0) for pixel in probs[m, n].T])
            for m in range(members)
        ]
        found["members"].append(wrong)
        found["top1_error"].append(np.mean([mean[:, i].argmax() != targets[n, i] for i in counted]))
        found["oracle_error"].append(min(wrong))
        found["picked_error"].append(wrong[unsure.index(min(unsure))])
        found["nll"].append(np.mean([-math.log(mean[targets[n, i], i]) for i in counted]))
        found["brier"].append(
            np.mean([sum((mean[c, i] - (c == targets[n, i])) ** 2 for c in range(classes)) for i in counted])
        )
    return {name: np.mean(values, axis=0) for name, values in found.items()}


# --- by hand


def test_errors_by_hand():
    # Means: (.7 .2 .1) right, (.1 .25 .65) wrong, (.15 .4 .45) wrong, (.55 .4 .05) wrong.
    assert metrics.top1_error(PROBS, TARGETS) == 3 / 4
    # Right: member 0 on examples 0 and 1, member 1 on 0 and 2, nobody on 3.
    assert metrics.oracle_error(PROBS, TARGETS) == 1 / 4
    # The surer: member 0 on 0 (right), member 1 on 1 (wrong), member 0 on 2 (wrong) and 3 (wrong).
    assert metrics.picked_error(PROBS, TARGETS) == 3 / 4
    assert metrics.member_errors(PROBS, TARGETS).tolist() == [2 / 4, 2 / 4]
    by_class = [[1, 1 / 2, 0], [1, 1 / 2, 0]]
    assert metrics.classwise_accuracy(PROBS, TARGETS).tolist() == by_class


def test_probabilistic_metrics_by_hand():
    true = (0.7, 0.25, 0.4, 0.05)
    assert metrics.nll(PROBS, TARGETS) == pytest.approx(-sum(map(math.log, true)) / 4)
    squares = (
        0.3**2 + 0.2**2 + 0.1**2,
        0.1**2 + 0.75**2 + 0.65**2,
        0.15**2 + 0.6**2 + 0.45**2,
        0.55**2 + 0.4**2 + 0.95**2,
    )
    assert metrics.brier(PROBS, TARGETS) == pytest.approx(sum(squares) / 4)
    # Confidences .7 right, .65, .45, .55 wrong; of two bins, [.5, 1) holds three and [0, .5) one.
    expected = abs((0.7 + 0.65 + 0.55) - 1) / 4 + abs(0.45 - 0) / 4
    assert metrics.ece(PROBS, TARGETS, bins=2) == pytest.approx(expected)
    # An edge belongs to the bin above it: .5 right and .7 wrong in [.5, 1), .45 wrong in [0, .5).
    probs = torch.tensor([[[0.5, 0.25, 0.25], [0.7, 0.2, 0.1], [0.45, 0.35, 0.2]]])
    assert metrics.ece(probs, torch.tensor([0, 1, 1]), bins=2) == pytest.approx((0.45 + abs(1.2 - 1)) / 3)


def test_dense_errors_by_hand():
    answers = torch.tensor(
        [[[[0, 0, 1, 1]], [[1, 1, 1, 1]]], [[[0, 1, 1, 1]], [[0, 0, 1, 1]]]]
    )  # (M, N, 1, 4)
    probs = torch.where(answers[:, :, None] == torch.arange(2)[:, None, None], 0.75, 0.25)
    targets = torch.tensor([[[0, 0, 0, 0]], [[0, 1, 1, 1]]])
    # Wrong pixels of four, member by image: 2 and 1; 3 and 1.
    assert metrics.member_errors(probs, targets).tolist() == [(2 / 4 + 1 / 4) / 2, (3 / 4 + 1 / 4) / 2]
    assert metrics.oracle_error(probs, targets) == (2 / 4 + 1 / 4) / 2
    assert metrics.picked_error(probs, targets) == (2 / 4 + 1 / 4) / 2  # a tie everywhere: the first member
    # Equal means go to class 0: image 0 answers 0 0 1 1, image 1 answers 0 0 1 1.
    assert metrics.top1_error(probs, targets) == (2 / 4 + 1 / 4) / 2


def test_ignored_pixels_and_images_do_not_count():
    answers = torch.tensor([[[[0, 1]], [[1, 1]], [[0, 0]]]])  # (1, N, 1, 2)
    probs = torch.where(answers[:, :, None] == torch.arange(2)[:, None, None], 0.9, 0.1)
    targets = torch.tensor([[[0, 255]], [[0, 0]], [[255, 255]]], dtype=torch.uint8)
    assert metrics.top1_error(probs, targets, ignore_index=255) == (0 + 1) / 2
    assert metrics.classwise_accuracy(probs, targets, ignore_index=255)[0, 0] == 1 / 3
    assert metrics.nll(probs, targets, ignore_index=255) == pytest.approx(
        (-math.log(0.9) - math.log(0.1)) / 2
    )


def test_entropy_by_hand():
    probs = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]])
    third = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    torch.testing.assert_close(metrics.entropy(probs), torch.tensor([[math.log(2), 0, third]]))
    torch.testing.assert_close(metrics.entropy(probs[0], dim=1), torch.tensor([math.log(2), 0, third]))
    torch.testing.assert_close(metrics.entropy(probs[0], dim=-1), metrics.entropy(probs[0], dim=1))
    # dense: per pixel, and the mean over pixels
    probs = torch.tensor([[0.5, 1.0], [0.5, 0.0]]).reshape(1, 1, 2, 1, 2)
    assert metrics.entropy(probs, pixelwise=True).shape == (1, 1, 1, 2)
    torch.testing.assert_close(metrics.entropy(probs), torch.tensor([[math.log(2) / 2]]))
    torch.testing.assert_close(metrics.entropy(probs.mean(0), dim=1), torch.tensor([math.log(2) / 2]))


def test_picked_tie_goes_to_the_lowest_member():
    probs = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]], [[0.1, 0.9]]])
    assert metrics.picked_error(probs, torch.tensor([0])) == 0
    assert metrics.picked_error(probs, torch.tensor([1])) == 1


def test_picked_member_is_chosen_without_looking_at_what_is_ignored():
    sure_right, unsure_wrong = [[1.0, 0.5], [0.0, 0.5]], [[0.4, 1.0], [0.6, 0.0]]  # (C, P)
    probs = torch.tensor([[sure_right], [unsure_wrong]])[..., None, :]
    both = metrics.entropy(probs)[:, 0]
    assert (
        both[1] < both[0]
    )  # over both pixels the second member is the surer, over the first pixel the first
    assert metrics.picked_error(probs, torch.tensor([[[0, 9]]]), ignore_index=9) == 1


def test_specialised_means_strictly_above_the_threshold():
    answers = torch.zeros(2, 20, dtype=torch.long)
    answers[:, 10:] = 1
    answers[0, 0] = 1  # member 0: 9 of 10 zeros right, 10 of 10 ones
    probs = torch.nn.functional.one_hot(answers, 3).float()
    targets = torch.tensor([0] * 10 + [1] * 10)
    expected = [[False, True, False], [True, True, False]]
    assert metrics.specialised_classes(probs, targets).tolist() == expected
    assert metrics.specialised_classes(probs, targets, 0.89)[0].tolist() == [True, True, False]
    assert metrics.classwise_accuracy(probs, targets)[:, 2].isnan().all()  # no example of class 2


def test_out_of_distribution_by_hand():
    inside, outside = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0])
    # Of 6 pairs the outsider scores higher in 1 + 3, ties in 1.
    assert metrics.auroc(inside, outside) == pytest.approx(4.5 / 6)
    # All outsiders are flagged from score 2 on, and so are 2 of the 3 others.
    assert metrics.fpr95(inside, outside) == pytest.approx(2 / 3)
    assert metrics.auroc(inside, inside + 9) == 1
    assert metrics.fpr95(inside, inside + 9) == 0
    assert metrics.auroc(outside + 9, inside) == 0
    assert metrics.auroc(torch.tensor([0.0, 1.0]), torch.tensor([torch.inf])) == 1


def test_fpr95_at_exactly_95_percent():
    """A threshold that detects 19 of 20 is enough."""
    outside = torch.arange(20.0)  # 19 of 20 lie at 1 or above
    inside = torch.tensor([0.5, 0.9, 1.0, 7.0])
    assert metrics.fpr95(inside, outside) == 2 / 4
    # Thresholds 3, 2 and 1 lie on one straight piece of the ROC curve; 2 detects 19 of 20.
    assert metrics.fpr95(torch.tensor([0.0] * 8 + [1, 2]), torch.tensor([3.0] * 18 + [1, 2])) == 1 / 10


def test_risk_coverage_by_hand():
    confidence = torch.tensor([0.2, 0.9, 0.5, 0.7])
    correct = torch.tensor([True, True, False, False])
    coverage, risk = metrics.risk_coverage(confidence, correct)
    assert coverage.tolist() == [1 / 4, 2 / 4, 3 / 4, 1]
    assert risk.tolist() == [0, 1 / 2, 2 / 3, 2 / 4]
    assert metrics.aurc(confidence, correct) == pytest.approx((0 + 1 / 2 + 2 / 3 + 2 / 4) / 4)


def test_tied_confidences_give_the_mean_over_their_orders():
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.1])
    correct = torch.tensor([True, False, True, True, False])
    orders = [[1, *order, 0] for order in permutations([0, 1, 1])]
    curves = [(1 - np.array(order)).cumsum() / np.arange(1, 6) for order in orders]
    np.testing.assert_allclose(metrics.risk_coverage(confidence, correct)[1], np.mean(curves, axis=0))


# --- against brute force


@given(cases, st.none() | st.integers(0, 4))
@settings(deadline=None, max_examples=100)
def test_errors_and_scores_against_loops(case, ignored):
    member_probs, targets = case
    if ignored is not None and (targets == ignored).all():
        with pytest.raises(ValueError, match="ignore_index"):
            metrics.top1_error(member_probs, targets, ignore_index=ignored)
        return
    expected = brute_force(member_probs, targets, ignored)
    for name in BY_IMAGE:
        found = getattr(metrics, name)(member_probs, targets, ignore_index=ignored)
        assert found == pytest.approx(expected[name], abs=1e-12), name
    members = metrics.member_errors(member_probs, targets, ignore_index=ignored)
    np.testing.assert_allclose(members, expected["members"])


@given(cases)
@settings(deadline=None, max_examples=40)
def test_classwise_accuracy_against_loops(case):
    member_probs, targets = case
    accuracy = metrics.classwise_accuracy(member_probs, targets).numpy()
    answers, labels = member_probs.argmax(2).flatten(1).numpy(), targets.flatten().numpy()
    for m, c in np.ndindex(*accuracy.shape):
        of_class = labels == c
        expected = (answers[m] == labels)[of_class].mean() if of_class.any() else np.nan
        np.testing.assert_allclose(accuracy[m, c], expected)


@given(cases, st.integers(1, 20))
@settings(deadline=None, max_examples=60)
def test_calibration_against_loops(case, bins):
    member_probs, targets = case
    mean = member_probs.mean(0).movedim(1, -1).flatten(0, -2).numpy()
    confidence, right = mean.max(1).astype(np.float32), mean.argmax(1) == targets.flatten().numpy()
    edges = np.linspace(0, 1, bins + 1, dtype=np.float32)
    expected = sum(
        inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
        for low, high in pairwise([*edges, np.inf])  # 1 itself has the last bin
        if (inside := (low <= confidence) & (confidence < high)).any()
    )
    assert metrics.ece(member_probs, targets, bins=bins) == pytest.approx(expected, abs=1e-5)


scores = st.lists(st.integers(-4, 12), min_size=1, max_size=30)  # whole numbers: many ties


@given(scores, scores, st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=60)
def test_out_of_distribution_against_all_pairs(inside, outside, dtype):
    a, b = torch.tensor(inside, dtype=dtype), torch.tensor(outside, dtype=dtype)
    pairs = [(y > x) + (y == x) / 2 for x in inside for y in outside]
    assert metrics.auroc(a, b) == pytest.approx(np.mean(pairs), abs=1e-6)
    rates = [
        np.mean([x >= t for x in inside])
        for t in {*inside, *outside}
        if sum(y >= t for y in outside) * 100 >= 95 * len(outside)
    ]
    assert metrics.fpr95(a, b) == pytest.approx(min(rates), abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40))
@settings(deadline=None, max_examples=60)
def test_aurc_against_loops(answers):
    confidence, correct = (torch.tensor(column) for column in zip(*answers, strict=True))
    share = {c: np.mean([not right for value, right in answers if value == c]) for c, _ in answers}
    errors = [share[c] for c in sorted(confidence.tolist(), reverse=True)]
    expected = np.mean([sum(errors[:k]) / k for k in range(1, len(errors) + 1)])
    assert metrics.aurc(confidence.float(), correct) == pytest.approx(expected)


# --- identities


@given(cases)
@settings(deadline=None, max_examples=40)
def test_the_oracle_bounds_the_others_and_one_member_is_its_own(case):
    oracle = metrics.oracle_error(*case)
    assert oracle <= metrics.member_errors(*case).min() + 1e-12
    assert oracle <= metrics.picked_error(*case) + 1e-12
    member_probs, targets = case[0][:1], case[1]
    alone = metrics.member_errors(member_probs, targets).item()
    for error in (metrics.top1_error, metrics.oracle_error, metrics.picked_error):
        assert error(member_probs, targets) == pytest.approx(alone)


@given(cases)
@settings(deadline=None, max_examples=20)
def test_member_order_matters_only_to_ties(case):
    member_probs, targets = case
    turned = metrics.summary(member_probs.flip(0), targets)
    assert turned == pytest.approx(metrics.summary(member_probs, targets), abs=1e-6)


def test_dense_with_one_pixel_is_the_plain_case():
    member_probs, targets = random_case(3, members=3, examples=30, classes=4)
    dense = metrics.summary(member_probs[..., None, None], targets[:, None, None])
    assert dense == pytest.approx(metrics.summary(member_probs, targets))


def test_summary_holds_every_scalar_metric():
    member_probs, targets = random_case(4, members=3, examples=30, classes=4)
    ood, _ = random_case(5, members=3, examples=20, classes=4)
    found = metrics.summary(member_probs, targets, ood=ood)
    mean, far = member_probs.mean(0), ood.mean(0)
    expected = {name: getattr(metrics, name)(member_probs, targets) for name in (*BY_IMAGE, "ece")}
    expected["member_error"] = metrics.member_errors(member_probs, targets).mean().item()
    expected["aurc"] = metrics.aurc(mean.max(1).values, mean.argmax(1) == targets)
    entropies = metrics.entropy(mean, dim=1), metrics.entropy(far, dim=1)
    expected |= {"entropy": entropies[0].mean().item(), "ood_entropy": entropies[1].mean().item()}
    expected |= {"auroc": metrics.auroc(*entropies), "fpr95": metrics.fpr95(*entropies)}
    assert found == pytest.approx(expected, rel=1e-12)
    assert all(type(value) is float for value in found.values())


# --- batch by batch


@given(cases, st.integers(1, 5), st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_batches_give_the_numbers_of_the_whole(case, size, ignored):
    member_probs, targets = case
    scores = metrics.Accumulator(bins=7, curves=True)
    for probs, labels in zip(member_probs.split(size, 1), targets.split(size), strict=True):
        scores.update(probs, labels, ignore_index=ignored)
        scores.update_ood(torch.full_like(probs, 1 / probs.shape[2]))
    if (targets == ignored).all():
        with pytest.raises(ValueError, match="ignore_index"):
            scores.compute()
        return
    options = {"ignore_index": ignored}
    whole = metrics.summary(
        member_probs, targets, ood=torch.full_like(member_probs, 1 / member_probs.shape[2]), bins=7, **options
    )
    assert scores.compute() == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(scores.member_errors, metrics.member_errors(member_probs, targets, **options))
    torch.testing.assert_close(
        scores.classwise_accuracy,
        metrics.classwise_accuracy(member_probs, targets, **options),
        equal_nan=True,
    )


def test_large_inputs_are_worked_on_in_parts(monkeypatch):
    member_probs, targets = random_case(7, members=2, examples=9, classes=3, pixels=(2, 2))
    whole = metrics.summary(member_probs, targets)
    monkeypatch.setattr(metrics, "LARGEST", 1)
    assert metrics.summary(member_probs, targets) == pytest.approx(whole, abs=1e-12)


def test_there_are_15_bins_if_nothing_else_is_said():
    member_probs, _ = random_case(8, members=2, examples=200, classes=3)
    case = member_probs, member_probs.mean(0).multinomial(1)[:, 0]  # calibrated: every bin errs either way
    for bins, same in ((14, False), (15, True), (16, False)):
        expected = metrics.ece(*case, bins=bins)
        scores = metrics.Accumulator()
        scores.update(*case)
        for found in (metrics.ece(*case), metrics.summary(*case)["ece"], scores.compute()["ece"]):
            assert (found == expected) == same


def test_reliability_by_hand():
    # Confidences .7 right, .65, .45, .55 wrong, and 1 right, which belongs to the last bin here.
    probs = torch.cat([PROBS, torch.tensor([[[1.0, 0, 0]]] * 2)], 1)
    scores = metrics.Accumulator(bins=2)
    scores.update(probs, torch.tensor([0, 1, 1, 2, 0]))
    count, confidence, accuracy = scores.reliability
    assert count.tolist() == [1, 4]
    assert confidence.tolist() == pytest.approx([0.45, (0.7 + 0.65 + 0.55 + 1) / 4])
    assert accuracy.tolist() == [0, 2 / 4]


def test_memory_does_not_grow_with_the_number_of_examples():
    def kept(scores):
        tensors = [*scores._sums.values(), *(x for xs in scores._scores.values() for x in xs)]
        return sum(tensor.nbytes for tensor in tensors)

    scores, curves = metrics.Accumulator(), metrics.Accumulator(curves=True)
    sizes = []
    for _ in range(3):
        for one in (scores, curves):
            one.update(PROBS, TARGETS)
            one.update_ood(PROBS)
        sizes.append((kept(scores), kept(curves)))
    assert sizes[0][0] == sizes[2][0]
    assert sizes[2][1] - sizes[1][1] == 4 * (4 + 1 + 4 + 4)  # confidence, correct, two entropies


PEAK = """
import resource, torch, cmcl

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

ensemble = cmcl.Ensemble([torch.nn.Conv2d(3, 21, 1) for _ in range(5)])
images, targets = torch.randn(60, 3, 128, 128), torch.randint(21, (60, 128, 128))
ensemble.predict(images[:1])
before = peak()
cmcl.evaluate(ensemble, (images, targets))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_evaluation_streams():
    """The probabilities of all images take 394 MB; a batch of four with all temporaries under half of that."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 250


def test_batches_of_dense_targets_are_smaller():
    sizes = {(7,): 1000, (7, 16, 16): 256, (7, 128, 128): 4, (7, 999, 999): 1, (0, 8, 8): 1000}
    for shape, size in sizes.items():
        assert metrics.examples_per_batch(torch.zeros(shape), 1000) == size
    assert metrics.examples_per_batch(torch.zeros(7, 16, 16), 10) == 10


def test_percent():
    assert metrics.percent(1 / 3) == 33.333333
    assert metrics.percent(torch.tensor([[0.5, torch.nan], [0.0, 1.0]])) == [[50.0, None], [0.0, 100.0]]
    assert metrics.percent(torch.tensor(0.25)) == 25.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_precisions(dtype):
    member_probs, targets = random_case(6, members=3, examples=50, classes=4)
    exact = metrics.summary(member_probs, targets)
    found = metrics.summary(member_probs.to(dtype), targets)
    assert found == pytest.approx(exact, abs=1e-6 if dtype in (torch.float32, torch.float64) else 0.05)


def test_certainty_stays_finite():
    certain = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    assert metrics.nll(certain, torch.tensor([1])) == pytest.approx(
        -math.log(torch.finfo(torch.float32).tiny)
    )
    assert metrics.ece(certain, torch.tensor([1])) == 1
    assert metrics.ece(certain, torch.tensor([0])) == 0


def test_sums_may_be_off_by_rounding():
    assert metrics.top1_error(PROBS * 1.004, TARGETS) == metrics.top1_error(PROBS, TARGETS)
    above = torch.tensor([[[1.0000001, 0.0], [0.5, 0.5]]])
    assert metrics.ece(above, torch.tensor([0, 0])) == pytest.approx(0.25, abs=1e-6)


def test_half_precision_may_be_off_by_eight_roundings():
    for last, sound in ((72, True), (73, False)):  # 64 + 72 of 128 is 1 + 8 * eps of bfloat16
        probs = torch.tensor([[[64, last]]], dtype=torch.bfloat16) / 128
        with nullcontext() if sound else pytest.raises(ValueError, match="sum to 1"):
            metrics.entropy(probs)


def test_entropy_has_gradients():
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: metrics.entropy(z.softmax(2)), logits)


# --- what must hold of the input


@pytest.mark.parametrize(
    ("member_probs", "targets", "error", "words"),
    [
        (PROBS.log(), TARGETS, ValueError, r"apply softmax\(2\)"),
        (PROBS * 2, TARGETS, ValueError, "sum to 1 over axis 2. Got values from 0 to 2"),
        (PROBS * torch.nan, TARGETS, ValueError, "sum to 1"),
        (PROBS * 1.01, TARGETS, ValueError, "sum to 1"),
        (torch.cat([PROBS[:, :3], PROBS[:, 3:] * 2], 1), TARGETS, ValueError, "sum to 1"),  # one of four
        (torch.tensor([[[1.2, -0.2, 0.0]] * 4]), TARGETS, ValueError, "at least 0 and sum to 1"),
        (PROBS[0], TARGETS, ValueError, r"classes on axis 2.* Add the members' axis: member_probs\[None\]"),
        (PROBS[:, :0], TARGETS[:0], ValueError, "at least one example"),
        (PROBS.long(), TARGETS, TypeError, "floating-point tensor. Got a torch.int64"),
        (PROBS.tolist(), TARGETS, TypeError, "floating-point tensor. Got list"),
        (PROBS, TARGETS[:3], ValueError, r"shape \(4,\). Got a torch.int64 tensor of shape \(3,\)"),
        (PROBS, TARGETS.float(), ValueError, "integer tensor"),
        (PROBS, TARGETS.tolist(), ValueError, "Got list"),
        (PROBS, TARGETS + 1, ValueError, "between 0 and 2 .*Got 1 to 3"),
        (PROBS, TARGETS - 1, ValueError, "between 0 and 2 .*Got -1 to 1"),
        (PROBS, TARGETS.to("meta"), ValueError, "targets must be on cpu"),
    ],
)
def test_bad_input_is_named(member_probs, targets, error, words):
    for name in (*BY_IMAGE, "member_errors", "classwise_accuracy", "ece", "summary"):
        with pytest.raises(error, match=words):
            getattr(metrics, name)(member_probs, targets)


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="threshold must be between 0 and 1"):
        metrics.specialised_classes(PROBS, TARGETS, 90)
    with pytest.raises(ValueError, match="bins must be"):
        metrics.ece(PROBS, TARGETS, bins=0)
    with pytest.raises(ValueError, match="ood must be at least 0 and sum to 1"):
        metrics.summary(PROBS, TARGETS, ood=PROBS.log())
    with pytest.raises(ValueError, match="probs must have its classes on axis 2"):
        metrics.entropy(PROBS[0])


@pytest.mark.parametrize("bad", [torch.tensor([]), torch.tensor([[1.0]]), torch.tensor([torch.nan]), [1.0]])
def test_bad_scores_are_named(bad):
    good = torch.tensor([1.0])
    with pytest.raises(ValueError, match="scores_in must be a tensor"):
        metrics.auroc(bad, good)
    with pytest.raises(ValueError, match="scores_out must be a tensor"):
        metrics.fpr95(good, bad)
    with pytest.raises(ValueError, match="confidence must be a tensor"):
        metrics.aurc(bad, torch.tensor([True]))
    with pytest.raises(ValueError, match="correct must be boolean"):
        metrics.aurc(good, good)
