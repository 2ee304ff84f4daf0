"""Metrics of several hypotheses against hand-worked numbers and numerical integration."""

import math
import re

import pytest
import torch

from cmcl import assign, metrics


class TestTrajectories:
    """Two hypotheses, one example, two steps in the plane; distances 5, 0 and 1, 1."""

    hypotheses = torch.tensor([[[[3.0, 4.0], [2.0, 2.0]]], [[[0.0, 1.0], [2.0, 3.0]]]])
    targets = torch.tensor([[[0.0, 0.0], [2.0, 2.0]]])

    def test_min_ade_is_the_mean_distance_of_the_best(self):
        assert metrics.min_ade(self.hypotheses, self.targets) == pytest.approx(1)
        assert metrics.min_ade(self.hypotheses[:1], self.targets) == pytest.approx(2.5)

    def test_min_fde_is_the_last_distance_of_the_best_there(self):
        assert metrics.min_fde(self.hypotheses, self.targets) == pytest.approx(0)
        assert metrics.min_fde(self.hypotheses[1:], self.targets) == pytest.approx(1)

    def test_examples_are_averaged(self):
        two = (
            torch.cat([self.hypotheses, self.hypotheses + 1], 1),
            torch.cat([self.targets, self.targets + 1]),
        )
        assert metrics.min_ade(*two) == pytest.approx(1)

    def test_shapes(self):
        with pytest.raises(ValueError, match="hypotheses must be"):
            metrics.min_ade(self.hypotheses, self.targets[0])


def test_distortion_is_the_mean_of_the_smallest_losses():
    assert metrics.distortion(torch.tensor([[1.0, 4.0], [2.0, 3.0]])) == 2
    assert metrics.distortion(torch.tensor([[[1.0, 4.0]], [[2.0, 3.0]]])) == 2
    with pytest.raises(TypeError, match="losses"):
        metrics.distortion(torch.tensor([1.0]))


class TestScores:
    losses = torch.tensor([[1.0, 2, 2, 2], [2, 1, 1, 1]])  # the first wins one of four examples

    def test_scores_that_are_the_frequencies_have_no_error(self):
        scores = torch.tensor([0.25, 0.75]).log()[:, None].expand(2, 4)
        assert metrics.score_ece(scores, self.losses) == pytest.approx(0, abs=1e-6)

    def test_wrong_scores(self):
        """Both probabilities are 1/2; half of all hypotheses win. Reversed scores miss by 1/2 everywhere."""
        assert metrics.score_ece(torch.zeros(2, 4), self.losses) == pytest.approx(0)
        scores = torch.tensor([0.75, 0.25]).log()[:, None].expand(2, 4)
        assert metrics.score_ece(scores, self.losses) == pytest.approx(0.5)

    def test_there_are_15_bins(self):
        scores, losses = torch.randn(3, 300), torch.rand(3, 300)
        found = metrics.score_ece(scores, losses)
        assert [found == metrics.score_ece(scores, losses, bins=b) for b in (14, 15, 16)] == [0, 1, 0]


class TestVoronoi:
    def test_one_hypothesis_is_a_gaussian(self):
        nll = metrics.voronoi_nll(
            torch.zeros(1, 1, 2), torch.zeros(1, 1), torch.tensor([[3.0, 4.0]]), bandwidth=2.0, samples=10
        )
        assert nll == pytest.approx(25 / 8 + 2 * math.log(2 * math.sqrt(2 * math.pi)), rel=1e-5)

    def test_the_density_integrates_to_one(self):
        """Three hypotheses on a line with probabilities 0.2, 0.5, 0.3."""
        points = torch.linspace(-12, 12, 1201)
        hypotheses = torch.tensor([-1.0, 0.0, 2.0])[:, None, None]
        scores = torch.tensor([0.2, 0.5, 0.3]).log()[:, None]
        one = dict(bandwidth=1.0, samples=4000)
        density = [
            math.exp(-metrics.voronoi_nll(hypotheses, scores, p.reshape(1, 1), **one)) for p in points[::20]
        ]
        assert sum(density) * 0.4 == pytest.approx(1, abs=0.05)

    def test_a_probable_hypothesis_makes_its_cell_likely(self):
        hypotheses = torch.tensor([[[-5.0]], [[5.0]]])
        target, options = torch.tensor([[5.0]]), dict(bandwidth=1.0, samples=50)
        low, high = (
            metrics.voronoi_nll(hypotheses, torch.tensor([0.1, 0.9])[order].log()[:, None], target, **options)
            for order in ([1, 0], [0, 1])
        )
        assert low - high == pytest.approx(math.log(9), rel=1e-4)

    def test_a_cell_is_cut_from_its_gaussian(self):
        """Hypotheses at 0 and 2 of bandwidth 1: half-lines at 1 hold Phi(1) = 0.8413 of each Gaussian."""
        nll = metrics.voronoi_nll(
            torch.tensor([0.0, 2.0])[:, None, None],
            torch.tensor([0.3, 0.7]).log()[:, None],
            torch.tensor([[0.5]]),
            bandwidth=1.0,
            samples=20_000,
            generator=torch.Generator().manual_seed(0),
        )
        density = math.exp(-(0.5**2) / 2) / math.sqrt(2 * math.pi)
        assert nll == pytest.approx(-math.log(0.3 * density / 0.841345), abs=0.01)

    def test_shapes(self):
        with pytest.raises(ValueError, match="hypotheses must be"):
            metrics.voronoi_nll(torch.zeros(2, 3, 1), torch.zeros(2, 2), torch.zeros(3, 1), bandwidth=1.0)


TWO = dict(scores=torch.zeros(2, 3), losses=torch.zeros(2, 3))
MIXTURE = dict(
    hypotheses=torch.zeros(2, 3, 1), scores=torch.zeros(2, 3), targets=torch.zeros(3, 1), bandwidth=1.0
)


@pytest.mark.parametrize(
    ("metric", "given", "error", "said"),
    [
        (
            metrics.min_ade,
            dict(hypotheses=[[1.0]], targets=torch.zeros(1)),
            TypeError,
            "hypotheses must be a",
        ),
        (
            metrics.min_fde,
            dict(hypotheses=torch.zeros(1), targets=None),
            TypeError,
            "targets must be a float",
        ),
        (metrics.score_ece, TWO | {"scores": None}, TypeError, "scores must be a floating-point tensor"),
        (
            metrics.score_ece,
            TWO | {"losses": torch.zeros(2, 3, 4)},
            ValueError,
            "losses must be (members, ex",
        ),
        (metrics.score_ece, TWO | {"bins": -1}, ValueError, "bins must be 1 or more. Got -1"),
        (metrics.voronoi_nll, MIXTURE | {"targets": [0.0]}, TypeError, "targets must be a floating-point"),
        (
            metrics.voronoi_nll,
            MIXTURE | {"scores": None},
            TypeError,
            "scores must be a floating-point tensor",
        ),
        (metrics.voronoi_nll, MIXTURE | {"samples": 0}, ValueError, "samples must be 1 or more. Got 0"),
        (
            metrics.voronoi_nll,
            MIXTURE | {"bandwidth": 0},
            ValueError,
            "bandwidth must be a finite number abo",
        ),
        (metrics.voronoi_nll, MIXTURE | {"bandwidth": math.nan}, ValueError, "bandwidth must be a finite"),
        (assign, dict(losses=[[1.0]]), TypeError, "losses must be a floating-point tensor. Got list"),
    ],
)
def test_arguments_of_other_types(metric, given, error, said):
    with pytest.raises(error, match=re.escape(said)):
        metric(**given)
