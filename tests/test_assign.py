"""Rules of assignment and winner-takes-all against hand-worked numbers and the published formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

from cmcl import _checks, assign, confident_oracle_loss, independent_loss, oracle_loss, winner_takes_all
from test_objectives import draw, gradient

LOSSES = torch.tensor([[1.0, 4.0], [2.0, 3.0], [3.0, 2.0], [4.0, 1.0]])  # four members, two examples


class TestAssign:
    def test_hard_is_one_for_the_k_smallest(self):
        assert assign(LOSSES, overlap=1).tolist() == [[1, 0], [0, 0], [0, 0], [0, 1]]
        assert assign(LOSSES, overlap=3).tolist() == [[1, 0], [1, 1], [1, 1], [0, 1]]

    def test_relaxed_gives_the_others_equal_parts_of_k_epsilon(self):
        """K = 1: 1 - eps and eps / (M - 1). K = 2: twice 1 - eps, and 2 eps / 2 for each of the others."""
        assert assign(LOSSES, rule="relaxed", epsilon=0.3)[:, 0].tolist() == pytest.approx(
            [0.7, 0.1, 0.1, 0.1]
        )
        two = assign(LOSSES, rule="relaxed", epsilon=0.3, overlap=2)[:, 0]
        assert two.tolist() == pytest.approx([0.7, 0.7, 0.3, 0.3])

    @pytest.mark.parametrize("overlap", [1, 2, 3, 4])
    def test_weights_of_hard_and_relaxed_add_up_to_k(self, overlap):
        for rule in ("hard", "relaxed"):
            q = assign(LOSSES, rule=rule, epsilon=0.2, overlap=overlap)
            assert q.sum(0).tolist() == pytest.approx([overlap] * 2)

    def test_annealed_is_softmin(self):
        """exp(-l / T) over the sum: with l = 1, 2, 3, 4 and T = 1 / log 2 these are 8, 4, 2, 1 fifteenths."""
        q = assign(LOSSES, rule="annealed", temperature=1 / math.log(2))
        assert q[:, 0].tolist() == pytest.approx([8 / 15, 4 / 15, 2 / 15, 1 / 15])
        assert assign(LOSSES, rule="annealed", temperature=1e-3).equal(assign(LOSSES))
        assert assign(LOSSES, rule="annealed", temperature=1e9).allclose(torch.tensor(0.25))

    @pytest.mark.parametrize(
        ("rule", "given"), [("relaxed", {"epsilon": 0.05}), ("annealed", {"temperature": 1.0})]
    )
    def test_defaults(self, rule, given):
        expected = assign(LOSSES, rule=rule, **given)
        assert assign(LOSSES, rule=rule).equal(expected)
        task = (expected * LOSSES).sum(0).mean()
        assert winner_takes_all(LOSSES, rule=rule).task.equal(task)
        logits, targets = draw(4, 6, 3)
        ours, theirs = (
            confident_oracle_loss(logits, targets, rule=rule, overlap=1, **g) for g in ({}, given)
        )
        assert ours.weights.equal(theirs.weights)

    def test_a_function(self):
        assert assign(LOSSES, rule=lambda losses: losses / 10).equal(LOSSES / 10)
        with pytest.raises(ValueError, match="shape"):
            assign(LOSSES, rule=lambda losses: losses[0])

    def test_weights_are_detached(self):
        losses = LOSSES.clone().requires_grad_()
        for rule in ("hard", "relaxed", "annealed", lambda losses: losses * 2):
            assert not assign(losses, rule=rule).requires_grad

    @pytest.mark.parametrize("rule", ["hard", "relaxed"])
    def test_schedules_as_tensors(self, rule):
        """What a captured step reads: overlap, epsilon and temperature in tensors of shape ()."""
        for k in (1, 2, 3, 4):
            ours = assign(LOSSES, rule=rule, overlap=torch.tensor(k), epsilon=torch.tensor(0.2))
            assert ours.allclose(assign(LOSSES, rule=rule, overlap=k, epsilon=0.2))
        ours = assign(LOSSES, rule="annealed", temperature=torch.tensor(0.7))
        assert ours.allclose(assign(LOSSES, rule="annealed", temperature=0.7))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(rule="soft"), "rule must be one of"),
            (dict(overlap=5), "overlap must be between 1 and 4"),
            (dict(rule="annealed", overlap=2), "overlap must be 1"),
            (dict(rule="annealed", temperature=0.0), "temperature must be above 0"),
            (dict(rule="relaxed", epsilon=1.5), "epsilon must be between 0 and 1"),
            (dict(rule="relaxed", epsilon=-0.1), "epsilon must be between 0 and 1"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            assign(LOSSES, **options)


class TestConfidentOracleLoss:
    @pytest.mark.parametrize(
        "options",
        [
            dict(rule="hard"),
            dict(rule="relaxed", epsilon=0.1),
            dict(rule="annealed", temperature=2.0, overlap=1),
        ],
    )
    def test_is_the_weighted_formula(self, options):
        logits, targets = draw(4, 6, 3)
        loss = confident_oracle_loss(logits, targets, **{"beta": 0.6, "overlap": 2} | options)
        q = assign(loss.task - 0.6 * loss.kl, **{"overlap": 2} | options)
        assert loss.weights.equal(q)
        expected = (q * loss.task + 0.6 * (1 - q) * loss.kl).sum(0).mean()
        assert loss.total.item() == pytest.approx(expected.item())
        hard = confident_oracle_loss(logits, targets, beta=0.6, overlap=options.get("overlap", 2))
        assert loss.assignment.equal(hard.assignment), "the specialists, whatever the rule"

    def test_one_specialist_is_the_default_of_the_annealed_rule(self):
        logits, targets = draw(3, 5, 4)
        ours, theirs = (
            confident_oracle_loss(logits, targets, rule="annealed", **given) for given in ({}, {"overlap": 1})
        )
        assert ours.total.equal(theirs.total)
        assert ours.assignment.sum(0).tolist() == [1] * 5

    def test_relaxed_without_others_is_independent_training(self):
        logits, targets = draw(3, 5, 4)
        loss = confident_oracle_loss(logits, targets, rule="relaxed", overlap=3)
        assert loss.total.item() == pytest.approx(independent_loss(logits, targets).total.item())

    def test_others_that_learn_nothing_are_mcl(self):
        logits, targets = draw(3, 5, 4)
        loss = confident_oracle_loss(logits, targets, others="none", overlap=2)
        expected = oracle_loss(logits, targets, overlap=2)
        assert loss.total.equal(expected.total)
        assert gradient(loss, logits).equal(gradient(expected, logits))

    def test_a_falling_overlap_is_the_loss_of_each_overlap(self):
        logits, targets = draw(4, 6, 3)
        for k in (4, 3, 2, 1):
            ours = confident_oracle_loss(logits, targets, overlap=torch.tensor(k))
            assert ours.total.equal(confident_oracle_loss(logits, targets, overlap=k).total)

    @pytest.mark.parametrize("pixels", [(), (2, 3)])
    def test_teacher_logits(self, pixels):
        """MCL-KD: v * task + beta * (1 - v) * T^2 * KL(softmax(teacher / T) || softmax(logits / T))."""
        logits, targets = draw(3, 5, 4, *pixels)
        teacher, _ = draw(3, 5, 4, *pixels, seed=1)
        loss = confident_oracle_loss(logits, targets, beta=0.5, others=teacher, teacher_temperature=2.0)
        p, t = (logits / 2).softmax(2), (teacher / 2).softmax(2)
        kl = 4 * (t * (t / p).log()).sum(2).flatten(2).mean(2) if pixels else 4 * (t * (t / p).log()).sum(2)
        assert loss.kl.allclose(kl, atol=1e-5)
        expected = torch.where(loss.assignment, loss.task, 0.5 * kl).sum(0).mean()
        assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
        assert torch.autograd.grad(loss.total, teacher, allow_unused=True)[0] is None

    def test_a_member_that_is_its_teacher_has_nothing_to_learn(self):
        logits, targets = draw(2, 3, 4)
        loss = confident_oracle_loss(logits, targets, others=logits.detach())
        assert loss.kl.abs().max() < 1e-6

    def test_a_uniform_teacher_is_cmcl(self):
        logits, targets = draw(3, 5, 4)
        ours = confident_oracle_loss(logits, targets, others=torch.zeros_like(logits))
        assert ours.total.item() == pytest.approx(
            confident_oracle_loss(logits, targets).total.item(), rel=1e-5
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(others="silent"), "others must be one of"),
            (dict(others=torch.zeros(3, 5, 2)), "shape of logits"),
            (dict(others=torch.zeros(3, 5, 4), labels="sampled"), "exact"),
            (dict(others=torch.zeros(3, 5, 4), teacher_temperature=0.0), "teacher_temperature"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            confident_oracle_loss(*draw(3, 5, 4), **options)


class TestWinnerTakesAll:
    def test_the_best_hypothesis_learns(self):
        losses = LOSSES.clone().requires_grad_()
        loss = winner_takes_all(losses)
        assert loss.total.item() == pytest.approx((1 + 1) / 2)
        loss.backward()
        assert losses.grad.tolist() == [[0.5, 0], [0, 0], [0, 0], [0, 0.5]]

    def test_relaxed_by_hand(self):
        """Example 1: 0.7 * 1 + 0.1 * (2 + 3 + 4) = 1.6, and the same for example 2."""
        assert winner_takes_all(LOSSES, rule="relaxed", epsilon=0.3).total.item() == pytest.approx(1.6)

    def test_each_target_trains_its_nearest_hypothesis(self):
        """Two hypotheses, one example, three targets: sum over hypotheses, mean over the targets."""
        losses = torch.tensor([[[1.0, 5.0, 2.0]], [[3.0, 4.0, 6.0]]])
        loss = winner_takes_all(losses)
        assert loss.assignment.tolist() == [[[True, False, True]], [[False, True, False]]]
        assert loss.total.item() == pytest.approx((1 + 4 + 2) / 3)

    def test_scores_learn_who_wins(self):
        scores = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
        loss = winner_takes_all(LOSSES, scores=scores)
        expected = F.cross_entropy(scores.T, torch.tensor([0, 3]))
        assert loss.score.item() == pytest.approx(expected.item())
        assert loss.total.item() == pytest.approx(1 + expected.item())

    def test_scores_of_several_targets_are_the_fractions_won(self):
        losses = torch.tensor([[[1.0, 5.0, 2.0]], [[3.0, 4.0, 6.0]]])
        scores = torch.tensor([[0.3], [-0.2]])
        expected = -(torch.tensor([2 / 3, 1 / 3]) * scores[:, 0].log_softmax(0)).sum()
        assert winner_takes_all(losses, scores=scores).score.item() == pytest.approx(expected.item())

    def test_scores_converge_to_the_frequencies_of_winning(self):
        """The cross-entropy is smallest where the probabilities are the frequencies: 1/4 and 3/4."""
        losses = torch.tensor([[1.0, 2, 2, 2], [2, 1, 1, 1]])
        scores = torch.zeros(2, 1, requires_grad=True)
        for _ in range(200):
            (grad,) = torch.autograd.grad(winner_takes_all(losses, scores=scores.expand(2, 4)).total, scores)
            scores.data -= 2 * grad
        assert scores.softmax(0)[:, 0].tolist() == pytest.approx([0.25, 0.75], abs=1e-3)

    def test_an_infinite_loss_of_a_loser_does_not_matter(self):
        losses = torch.tensor([[1.0], [math.inf]], requires_grad=True)
        loss = winner_takes_all(losses)
        assert loss.total.item() == 1
        loss.backward()
        assert losses.grad.tolist() == [[1], [0]]

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (dict(losses=torch.zeros(3)), TypeError, "members, batch"),
            (dict(losses=torch.zeros(3, 2, dtype=torch.long)), TypeError, "floating-point"),
            (dict(losses=torch.zeros(3, 2), overlap=4), ValueError, "overlap must be between 1 and 3"),
            (dict(losses=torch.zeros(3, 2), scores=torch.zeros(2, 3)), ValueError, "scores must have shape"),
        ],
    )
    def test_bad_input(self, arguments, error, message):
        with pytest.raises(error, match=message):
            winner_takes_all(**arguments)


@pytest.mark.parametrize("rule", ["hard", "relaxed", "annealed"])
def test_compiles_in_one_graph_for_all_values_of_a_schedule(rule):
    compiled = torch.compile(
        lambda losses, k, t: assign(losses, rule=rule, overlap=k, epsilon=t, temperature=t),
        backend="eager",
        fullgraph=True,
    )
    with torch.compiler.set_stance("default"):
        for k, t in ((3, 0.5), (2, 0.4), (1, 0.1)):
            ours = compiled(LOSSES, torch.tensor(k), torch.tensor(t))
            k = torch.tensor(k)
            assert ours.allclose(assign(LOSSES, rule=rule, overlap=k, epsilon=t, temperature=t))


class TestSchedulesInCompiledCode:
    """Overlap, epsilon and temperature are inputs of the compiled step: a schedule changes no code."""

    @pytest.fixture
    def compilations(self):
        torch.compiler.reset()
        compiled = []

        def backend(graph, inputs):
            compiled.append(graph)
            return graph.forward

        yield (
            lambda function: torch.compile(function, backend=backend, fullgraph=True, dynamic=False),
            compiled,
        )
        torch.compiler.reset()

    @pytest.mark.parametrize(
        ("options", "name", "values"),
        [
            ({}, "overlap", [5, 4, 3, 2, 1]),
            ({"rule": "relaxed", "overlap": 2}, "epsilon", [0.3, 0.1, 0.0]),
            ({"rule": "relaxed"}, "overlap", [5, 3, 1]),
            ({"rule": "annealed", "overlap": 1}, "temperature", [10.0, 1.0, 1e-3]),
        ],
        ids=["evolving", "epsilon", "relaxed, evolving", "annealed"],
    )
    def test_one_compilation_for_all_values(self, compilations, options, name, values):
        compile, compiled = compilations
        logits, targets = torch.randn(5, 8, 3), torch.randint(3, (8,))

        def loss(logits, targets, value):
            return confident_oracle_loss(logits, targets, **options, **{name: value})

        fast = compile(loss)
        with _checks.blindly():  # as in a training step
            for value in values:
                found, expected = (one(logits, targets, torch.tensor(value)) for one in (fast, loss))
                for ours, theirs in zip(found, expected, strict=True):
                    assert torch.equal(ours, theirs)
            assert len(compiled) == 1
            fast(logits[:, :4], targets[:4], torch.tensor(values[0]))
            assert len(compiled) == 2, "the test counts: another shape is another compilation"
