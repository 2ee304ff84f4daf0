"""The objectives against hand-worked numbers, brute force and the paper's identities."""

import math
from contextlib import nullcontext
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cmcl import _checks, confident_oracle_loss, independent_loss, oracle_loss

LOG2, LOG3 = math.log(2), math.log(3)


def draw(members, batch, classes, *pixels, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(members, batch, classes, *pixels, generator=generator, dtype=dtype)
    targets = torch.randint(classes, (batch, *pixels), generator=generator)
    return logits.requires_grad_(), targets


def gradient(loss, logits):
    return torch.autograd.grad(loss.total, logits)[0]


class TestHandWorked:
    """Two members, one example of class 0, two classes: p = (3/4, 1/4) and p = (1/2, 1/2)."""

    logits = torch.tensor([[[LOG3, 0.0]], [[0.0, 0.0]]], dtype=torch.float64)
    targets = torch.tensor([0])
    task = (math.log(4 / 3), LOG2)
    kl = (math.log(4 / 3) / 2 + math.log(4) / 2 - LOG2, 0.0)  # mean of -log p, less log C

    def test_values(self):
        loss = confident_oracle_loss(self.logits, self.targets, beta=0.5)
        assert loss.task[:, 0].tolist() == pytest.approx(self.task)
        assert loss.kl[:, 0].tolist() == pytest.approx(self.kl, abs=1e-12)
        assert loss.assignment.tolist() == [[True], [False]]
        assert loss.total.item() == pytest.approx(self.task[0] + 0.5 * self.kl[1])

    def test_independent_and_oracle(self):
        assert independent_loss(self.logits, self.targets).total.item() == pytest.approx(sum(self.task))
        assert oracle_loss(self.logits, self.targets).total.item() == pytest.approx(min(self.task))

    def test_a_large_beta_turns_the_assignment(self):
        """Class 1 is the label: both members miss it, and the confident one is costly to keep silent."""
        targets = torch.tensor([1])  # task: log 4, log 2; task - beta * kl: 1.386 - 0.144 beta, 0.693
        assert confident_oracle_loss(self.logits, targets, beta=1).assignment[:, 0].tolist() == [False, True]
        assert confident_oracle_loss(self.logits, targets, beta=6).assignment[:, 0].tolist() == [True, False]

    def test_sum_over_members_mean_over_batch(self):
        twice = self.logits.repeat(1, 2, 1)
        once = independent_loss(self.logits, self.targets).total
        assert independent_loss(twice, self.targets.repeat(2)).total.item() == pytest.approx(once.item())

    def test_given_labels(self):
        """One drawn label, the silent member's class 1: -log(1/2) - log 2 = 0; the loud one's: log 4 - log 2."""
        labels = torch.tensor([[[1], [1]]])  # (S=1, M=2, B=1)
        loss = confident_oracle_loss(self.logits, torch.tensor([1]), beta=0.5, labels=labels)
        assert loss.assignment[:, 0].tolist() == [False, True]
        assert loss.total.item() == pytest.approx(LOG2 + 0.5 * (math.log(4) - LOG2))
        assert loss.kl[:, 0].tolist() == pytest.approx(self.kl, abs=1e-12), "kl stays exact"

    @pytest.mark.parametrize(("members", "overlap"), [(1, 1), (2, 1), (5, 4)])
    def test_the_default_is_one_non_specialist_and_a_quarter(self, members, overlap):
        logits, targets = draw(members, 6, 3)
        ours = confident_oracle_loss(logits, targets)
        assert ours.total.equal(confident_oracle_loss(logits, targets, overlap=overlap, beta=0.25).total)

    @pytest.mark.parametrize("members", [5, 20])  # torch sorts few values stably in any case
    def test_ties_go_to_the_lowest_member(self, members):
        loss = confident_oracle_loss(torch.zeros(members, 3, 4), torch.zeros(3, dtype=torch.long), overlap=2)
        assert loss.assignment.tolist() == [[True] * 3] * 2 + [[False] * 3] * (members - 2)


@settings(max_examples=60, deadline=None)
@given(
    members=st.integers(1, 5),
    batch=st.integers(1, 3),
    classes=st.integers(2, 5),
    beta=st.sampled_from([0.0, 0.5, 0.75, 1.5, 10.0]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_assignment_minimises_eq_3(members, batch, classes, beta, seed, data):
    overlap = data.draw(st.integers(1, members))
    logits, targets = draw(members, batch, classes, seed=seed, dtype=torch.float64)
    loss = confident_oracle_loss(logits, targets, beta=beta, overlap=overlap)
    assert (loss.assignment.sum(0) == overlap).all()
    best = 0.0
    for i in range(batch):
        best += min(
            sum((loss.task if m in chosen else beta * loss.kl)[m, i].item() for m in range(members))
            for chosen in combinations(range(members), overlap)
        )
    assert loss.total.item() == pytest.approx(best / batch)


@pytest.mark.parametrize("pixels", [(), (2, 3)])
class TestIdentities:
    def test_independent_is_overlap_m(self, pixels):
        logits, targets = draw(4, 3, 5, *pixels)
        expected = sum(F.cross_entropy(member, targets) for member in logits)
        for loss in (
            independent_loss(logits, targets),
            confident_oracle_loss(logits, targets, beta=7.0, overlap=4, labels="sampled"),
        ):
            torch.testing.assert_close(loss.total, expected)
            torch.testing.assert_close(
                gradient(loss, logits), torch.autograd.grad(expected, logits, retain_graph=True)[0]
            )

    @pytest.mark.parametrize("overlap", [1, 2, 4])
    def test_mcl_is_beta_0(self, pixels, overlap):
        logits, targets = draw(4, 3, 5, *pixels)
        task = torch.stack(
            [F.cross_entropy(m, targets, reduction="none").reshape(3, -1).mean(1) for m in logits]
        )
        expected = task.topk(overlap, dim=0, largest=False).values.sum(0).mean()
        for loss in (
            oracle_loss(logits, targets, overlap=overlap),
            confident_oracle_loss(logits, targets, beta=0, overlap=overlap),
        ):
            torch.testing.assert_close(loss.total, expected)
            torch.testing.assert_close(
                gradient(loss, logits), torch.autograd.grad(expected, logits, retain_graph=True)[0]
            )

    def test_silent_members_of_mcl_get_no_gradient(self, pixels):
        logits, targets = draw(4, 3, 5, *pixels)
        loss = oracle_loss(logits, targets)
        silent = ~loss.assignment
        assert (gradient(loss, logits)[silent] == 0).all()


class TestSampledLabels:
    def test_mean_value_and_gradient_are_the_exact_ones(self):
        logits, targets = draw(3, 4, 5, dtype=torch.float64)
        exact = confident_oracle_loss(logits, targets, beta=0.9)
        sampled = confident_oracle_loss(
            logits,
            targets,
            beta=0.9,
            labels="sampled",
            samples=200_000,
            generator=torch.Generator().manual_seed(1),
        )
        torch.testing.assert_close(sampled.total, exact.total, rtol=0, atol=0.02)
        torch.testing.assert_close(gradient(sampled, logits), gradient(exact, logits), rtol=0, atol=0.01)

    def test_every_label_of_every_member_once_is_exact(self):
        """All C labels, the true one included, average to the KL without noise."""
        logits, targets = draw(3, 4, 5, 2, 2, dtype=torch.float64)
        labels = torch.arange(5).reshape(5, 1, 1, 1, 1).expand(5, 3, 4, 2, 2)
        exact = confident_oracle_loss(logits, targets)
        given = confident_oracle_loss(logits, targets, labels=labels)
        torch.testing.assert_close(given.total, exact.total)
        torch.testing.assert_close(gradient(given, logits), gradient(exact, logits))

    def test_assignment_task_and_kl_do_not_depend_on_the_draw(self):
        logits, targets = draw(5, 6, 10)
        exact = confident_oracle_loss(logits, targets, overlap=2)
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            loss = confident_oracle_loss(logits, targets, overlap=2, labels="sampled", generator=generator)
            assert loss.assignment.equal(exact.assignment)
            assert loss.task.equal(exact.task)
            assert loss.kl.equal(exact.kl)

    def test_deterministic_by_generator(self):
        logits, targets = draw(5, 6, 10)
        totals = [
            confident_oracle_loss(
                logits, targets, labels="sampled", generator=torch.Generator().manual_seed(seed)
            ).total.item()
            for seed in (3, 3, 4)
        ]
        assert totals[0] == totals[1] != totals[2]

    def test_one_label_is_drawn_if_nothing_else_is_said(self):
        """Then the term of the other member is -log p(c) - log 3 of one class c: with p = 1/2, 1/3, 1/6."""
        logits = torch.tensor([[[9.0, 0.0, 0.0]], [[LOG3, LOG2, 0.0]]], dtype=torch.float64)
        found = set()
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            given = {"beta": 1, "labels": "sampled", "generator": generator}
            loss = confident_oracle_loss(logits, torch.tensor([0]), **given)
            found.add(round((loss.total - loss.task[0, 0]).item(), 9))
        assert sorted(found) == pytest.approx([LOG2 - LOG3, 0, math.log(6) - LOG3], abs=1e-8)

    def test_labels_differ_between_members_and_examples(self):
        """With equal logits everywhere, equal labels would give equal gradients."""
        logits = torch.zeros(4, 8, 10, requires_grad=True)
        loss = confident_oracle_loss(
            logits,
            torch.zeros(8, dtype=torch.long),
            labels="sampled",
            generator=torch.Generator().manual_seed(0),
        )
        rows = gradient(loss, logits)[1:].reshape(-1, 10)  # member 0 wins all ties
        assert len(rows.unique(dim=0)) > 5


class TestDense:
    def test_sequences_are_images_of_one_row(self):
        logits, targets = draw(3, 4, 5, 6)
        ours = confident_oracle_loss(logits, targets, overlap=2)
        theirs = confident_oracle_loss(logits[..., None, :], targets[:, None], overlap=2)
        assert ours.assignment.shape == (3, 4)
        assert ours.assignment.equal(theirs.assignment)
        assert ours.total.item() == pytest.approx(theirs.total.item())

    def test_is_the_same_formula_on_pixel_means(self):
        logits, targets = draw(3, 4, 5, 2, 3, dtype=torch.float64)
        loss = confident_oracle_loss(logits, targets, beta=0.6, overlap=2)
        log_p = logits.log_softmax(2)
        task = -log_p.gather(2, targets.expand(3, 4, 2, 3).unsqueeze(2)).squeeze(2).mean((2, 3))
        kl = (-log_p.mean(2) - math.log(5)).mean((2, 3))
        torch.testing.assert_close(loss.task, task)
        torch.testing.assert_close(loss.kl, kl)
        expected = torch.where(loss.assignment, task, 0.6 * kl).sum(0).mean()
        torch.testing.assert_close(loss.total, expected)

    @pytest.mark.parametrize("labels", ["exact", "sampled"])
    def test_ignored_pixels_count_nowhere(self, labels):
        logits, targets = draw(3, 2, 4, 3, 3)
        targets[0, 0] = 255
        kept = confident_oracle_loss(logits, targets, ignore_index=255)
        first = confident_oracle_loss(logits[:, :1, :, 1:], targets[:1, 1:])
        torch.testing.assert_close(kept.task[:, :1], first.task)
        torch.testing.assert_close(kept.kl[:, :1], first.kl)
        loss = confident_oracle_loss(logits, targets, ignore_index=255, labels=labels)
        grad = gradient(loss, logits)
        assert (grad[:, 0, :, 0] == 0).all()
        assert (grad[:, 0, :, 1:] != 0).any()

    def test_an_image_with_nothing_to_count_gives_zero(self):
        logits, targets = draw(3, 2, 4, 3, 3)
        targets[0] = 255
        loss = confident_oracle_loss(logits, targets, ignore_index=255)
        assert (loss.task[:, 0] == 0).all()
        assert gradient(loss, logits).isfinite().all()

    def test_ignored_examples(self):
        logits, targets = draw(3, 4, 5)
        targets[2] = -100
        loss = confident_oracle_loss(logits, targets, ignore_index=-100)
        assert (gradient(loss, logits)[:, 2] == 0).all()


class TestTask:
    def test_class_weights_and_label_smoothing(self):
        logits, targets = draw(3, 4, 5)
        weight = torch.tensor([1.0, 2, 3, 4, 5])

        def task(member, targets):
            return F.cross_entropy(member, targets, weight, reduction="none", label_smoothing=0.1)

        loss = confident_oracle_loss(logits, targets, task=task)
        torch.testing.assert_close(loss.task, torch.stack([task(member, targets) for member in logits]))

    def test_soft_targets(self):
        logits, _ = draw(3, 4, 5)
        soft = torch.rand(4, 5).softmax(1)
        loss = confident_oracle_loss(logits, soft, task=lambda m, t: F.cross_entropy(m, t, reduction="none"))
        assert loss.task.shape == (3, 4)

    def test_ignored_targets_never_reach_the_task(self):
        logits, targets = draw(3, 2, 4, 2, 2)
        targets[0, 0, 0] = 99
        seen = []

        def task(member, targets):
            seen.append(int(targets.max()))
            return F.cross_entropy(member, targets, reduction="none")

        confident_oracle_loss(logits, targets, task=task, ignore_index=99)
        assert max(seen) < 4

    def test_a_reduced_task_is_refused(self):
        logits, targets = draw(3, 4, 5)
        with pytest.raises(
            ValueError, match=r'task must return unreduced values of shape \(4,\).*reduction="none"'
        ):
            confident_oracle_loss(logits, targets, task=F.cross_entropy)


class TestNumerics:
    @pytest.mark.parametrize("labels", ["exact", "sampled"])
    @pytest.mark.parametrize("beta", [0.0, 0.75])
    def test_finite_for_huge_logits(self, labels, beta):
        picks = torch.randint(3, (4, 6, 3), generator=torch.Generator().manual_seed(0))
        logits = torch.tensor([1e4, -1e4, 0.0])[picks].requires_grad_()
        loss = confident_oracle_loss(logits, torch.arange(6) % 3, labels=labels, beta=beta, overlap=2)
        assert loss.total.isfinite()
        assert gradient(loss, logits).isfinite().all()

    @pytest.mark.parametrize("labels", ["exact", "given"])
    def test_gradcheck(self, labels):
        logits, targets = draw(3, 2, 4, dtype=torch.float64)
        drawn = torch.randint(4, (2, 3, 2)) if labels == "given" else "exact"
        assert torch.autograd.gradcheck(
            lambda z: confident_oracle_loss(z, targets, labels=drawn, overlap=2).total, logits
        )

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_computed_in_float32(self, dtype):
        logits, targets = draw(3, 4, 1000)
        half = logits.detach().to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            loss = confident_oracle_loss(half, targets)
        assert loss.total.dtype == loss.kl.dtype == torch.float32
        torch.testing.assert_close(loss.total, confident_oracle_loss(half.float(), targets).total)

    @pytest.mark.parametrize("loss", [oracle_loss, independent_loss])
    def test_a_class_masked_out_by_minus_infinity(self, loss):
        """Its KL is infinite, and 0 * inf is NaN: MCL and IE must not look at it."""
        logits, targets = draw(3, 4, 5)
        masked = logits.detach().clone()
        masked[:, :, 4] = -torch.inf
        targets = targets.clamp(max=3)
        expected = loss(masked[:, :, :4], targets)
        assert loss(masked, targets).assignment.equal(expected.assignment)
        torch.testing.assert_close(loss(masked, targets).total, expected.total)

    def test_float64_stays(self):
        logits, targets = draw(3, 4, 5, dtype=torch.float64)
        assert confident_oracle_loss(logits, targets).total.dtype == torch.float64

    @pytest.mark.parametrize("shape", [(1, 1, 2), (1, 4, 3), (5, 1, 2), (2, 3, 1000)])
    def test_extreme_sizes(self, shape):
        logits, targets = draw(*shape)
        for overlap in {1, shape[0]}:
            loss = confident_oracle_loss(logits, targets, overlap=overlap, labels="sampled", samples=3)
            assert loss.assignment.shape == loss.task.shape == loss.kl.shape == shape[:2]
            assert gradient(loss, logits).isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
    def test_any_integer_targets(self, dtype):
        logits, targets = draw(3, 4, 5)
        expected = confident_oracle_loss(logits, targets).total
        assert confident_oracle_loss(logits, targets.to(dtype)).total.equal(expected)


COMPILED = {"exact": {}, "sampled": {"samples": 2}, "ignoring": {"ignore_index": 0}}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pixels", [(), (3, 2)])
@pytest.mark.parametrize("case", COMPILED)
def test_compiles_in_one_graph(backend, pixels, case):
    torch.compiler.reset()
    logits, targets = draw(3, 4, 5, *pixels)
    labels = torch.randint(5, (2, 3, 4, *pixels)) if case == "sampled" else "exact"

    def objective(logits, targets):
        return confident_oracle_loss(logits, targets, overlap=2, labels=labels, **COMPILED[case])

    plain = objective(logits, targets)
    fast = torch.compile(objective, fullgraph=True, backend=backend)(logits, targets)
    assert fast.assignment.equal(plain.assignment)
    torch.testing.assert_close(fast.total, plain.total)
    torch.testing.assert_close(gradient(fast, logits), gradient(plain, logits))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_draws_labels_inside_a_compiled_graph(backend):
    torch.compiler.reset()
    logits, targets = draw(3, 64, 5)
    fast = torch.compile(
        lambda z, y: confident_oracle_loss(z, y, labels="sampled").total, fullgraph=True, backend=backend
    )
    totals = {fast(logits, targets).item() for _ in range(4)}
    assert len(totals) == 4, "fresh labels at every call"


LOGITS, TARGETS = torch.zeros(5, 4, 3), torch.zeros(4, dtype=torch.long)
WRONG = {
    "overlap too large": (dict(overlap=7), ValueError, r"overlap must be between 1 and 5 \(the number of members\)\. Got 7"),
    "overlap zero": (dict(overlap=0), ValueError, "overlap must be between 1 and 5"),
    "overlap a float": (dict(overlap=2.0), TypeError, "overlap must be an integer. Got float 2.0"),
    "overlap a bool": (dict(overlap=True), TypeError, "overlap must be an integer"),
    "beta negative": (dict(beta=-1), ValueError, "beta must be a finite number, 0 or more. Got -1"),
    "beta NaN": (dict(beta=math.nan), ValueError, "beta must be a finite number"),
    "beta of 400 digits": (dict(beta=10**400), ValueError, "beta must be a finite number"),
    "beta a word": (dict(beta="big"), TypeError, "beta must be a number. Got str 'big'"),
    "samples": (dict(labels="sampled", samples=0), ValueError, "samples must be 1 or more. Got 0"),
    "labels a typo": (dict(labels="stochastic"), ValueError, "labels must be one of 'exact', 'sampled'. Got 'stochastic'"),
    "labels shape": (dict(labels=torch.zeros(5, 4, dtype=torch.long)), ValueError, r"labels must have shape \(samples, 5, 4\)"),
    "labels dtype": (dict(labels=torch.zeros(1, 5, 4)), TypeError, "labels must be an int64 tensor"),
    "labels range": (dict(labels=torch.full((1, 5, 4), 3)), ValueError, "labels must be between 0 and 2"),
    "logits 2-D": (dict(logits=torch.zeros(4, 3)), ValueError, r"logits must have shape \(members, batch, classes\)"),
    "logits empty": (dict(logits=torch.zeros(5, 0, 3)), ValueError, "none of them 0"),
    "logits integer": (dict(logits=torch.zeros(5, 4, 3, dtype=torch.long)), TypeError, "logits must be a floating-point"),
    "logits a list": (dict(logits=[1.0]), TypeError, "logits must be a floating-point tensor. Got list"),
    "logits NaN": (dict(logits=torch.full((5, 4, 3), math.nan)), ValueError, r"NaN or \+inf. Got that from member \[0, 1, 2, 3, 4\]"),
    "one class": (dict(logits=torch.zeros(5, 4, 1)), ValueError, "at least 2 classes"),
    "targets too long": (dict(targets=torch.zeros(5, dtype=torch.long)), ValueError, r"targets must have shape \(4,\).*Got \(5,\)"),
    "targets float": (dict(targets=torch.zeros(4)), TypeError, "targets must be class indices.*default task is classification.*task="),
    "targets a list": (dict(targets=[0, 1, 2, 0]), TypeError, "targets must be a tensor. Got list"),
    "targets too high": (dict(targets=torch.full((4,), 4)), ValueError, "targets must be between 0 and 2.*Got 4 to 4; labels start at 0: name"),
    "targets from 1": (dict(targets=torch.tensor([1, 2, 3, 1])), ValueError, "Got 1 to 3; labels start at 0: subtract 1.$"),
    "targets 2 to 3 of 1 to 3": (dict(targets=torch.tensor([3, 2, 3, 2])), ValueError, "Got 2 to 3; labels start at 0: subtract 1.$"),
    "targets -100": (dict(targets=torch.full((4,), -100)), ValueError, "ignore_index"),
    "ignore_index a float": (dict(ignore_index=2.5), TypeError, "ignore_index must be a whole number"),
    "another device": (dict(targets=TARGETS.to("meta")), ValueError, r"targets must be on cpu.*Got meta"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_named(case):
    changed, error, message = WRONG[case]
    arguments = {"logits": LOGITS, "targets": TARGETS, **changed}
    with pytest.raises(error, match=message):
        confident_oracle_loss(arguments.pop("logits"), arguments.pop("targets"), **arguments)


def test_backward_is_that_of_the_total():
    logits, targets = draw(3, 4, 5)
    loss = confident_oracle_loss(logits, targets)
    expected = torch.autograd.grad(loss.total, logits, retain_graph=True)[0]
    loss.backward()
    assert logits.grad.equal(expected)


@pytest.mark.parametrize("pixels", [(), (2, 2)])
@pytest.mark.parametrize(
    ("layer", "word"), [("softmax", "probabilities"), ("log_softmax", "log-probabilities")]
)
def test_probabilities_are_no_logits(layer, word, pixels):
    """The loss warns once; a single other row, or a row that is not normalised, is no reason."""
    logits, targets = draw(3, 4, 5, *pixels)
    wrong = getattr(logits, layer)(2).detach()
    _checks._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"logits look like {word} .*without {layer}"):
        confident_oracle_loss(wrong, targets)
    confident_oracle_loss(wrong, targets)  # warnings are errors in these tests
    with _checks.blindly():
        _checks._warn_once.cache_clear()
        confident_oracle_loss(wrong, targets)
    wrong[2, 3] += 0.01
    assert _checks.normalised(wrong) is None
    assert _checks.normalised(logits) is None
    assert _checks.normalised(torch.zeros(3, 4, 5)) is None


def test_the_other_two_check_the_same():
    with pytest.raises(ValueError, match="logits must have shape"):
        independent_loss(torch.zeros(4, 3), TARGETS)
    with pytest.raises(ValueError, match="overlap must be between 1 and 5"):
        oracle_loss(LOGITS, TARGETS, overlap=6)


@given(
    st.lists(st.integers(0, 100), max_size=6),
    st.sampled_from([1, 5, 9, 100, 127, 128, 200, 255, 256, 300]),
    st.sampled_from([torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64]),
    st.sampled_from([None, 0, 3, 9]),
)
def test_labels_are_looked_at_as_one_would_by_hand(values, classes, dtype, ignore):
    wrong = [value for value in values if value != ignore and value >= classes]
    targets = torch.tensor(values, dtype=torch.long).to(dtype)
    with pytest.raises(ValueError, match=f"to {max(wrong)};") if wrong else nullcontext():
        _checks.label_range(targets, classes, ignore)
