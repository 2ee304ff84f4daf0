"""Recipes: every rule, schedules worked out by hand, one objective for three methods, a hash of the meaning."""

import inspect
import json
import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from fractions import Fraction
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

import cmcl
from cmcl import Options, Recipe
from cmcl.cli.train import train as train_command
from cmcl.reproduction import find
from cmcl.training.config import Augment, check_seed

NESTED = json.loads("[" * 700 + "]" * 700)

ROOT = Path(__file__).parents[1]
BASE = Recipe(epochs=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(method="dropout"), "method must .* Got 'dropout'"),
        (dict(optimizer="lion"), "optimizer must .* Got 'lion'"),
        (dict(labels="smooth"), "labels must .* Got 'smooth'"),
        (dict(subset=0), "subset must .* Got 0"),
        (dict(members=0, overlap=0), "members must .* Got 0"),
        (dict(members=None), "members must .* Got None"),
        (dict(members=True), "members must .* Got True"),
        (dict(members=10**400), r"members must .* Got 10{70,}\.\.\.\.$"),
        (dict(batch_size=8.0), "batch_size must .*integer. Got 8.0"),
        (dict(epochs=None, steps=10.5), "steps must .*integer. Got 10.5"),
        (dict(epochs=None, steps=-3), "steps must .* Got -3"),
        (dict(decay_steps=0), "decay_steps must .* Got 0"),
        (dict(overlap=0), "overlap must .* Got 0"),
        (dict(overlap=6), "overlap must be between 1 and 5. Got 6."),
        (dict(overlap=2.5), "overlap must be an integer from 1 on, or 'auto'. Got 2.5"),
        (dict(overlap=True), "overlap must be .* Got True"),
        (dict(overlap="all"), "overlap must be .* Got 'all'"),
        (dict(overlap="auto", rule="annealed"), "overlap must be 1 with rule='annealed'. Got auto"),
        (dict(overlap=2, rule="annealed"), "overlap must be 1 with rule='annealed'. Got 2"),
        (dict(evolve=0.5, rule="annealed"), "evolve must be 0 with rule='annealed'. Got 0.5"),
        (dict(beta=-0.1), "beta must .* Got -0.1"),
        (dict(beta=float("inf")), "beta must .*finite number. Got inf"),
        (dict(beta=float("nan")), "beta must .*finite number. Got nan"),
        (dict(samples=0), "samples must .* Got 0"),
        (dict(share_prob=1.1), "share_prob must .* Got 1.1"),
        (dict(validation=1.0), "validation must .* Got 1.0"),
        (dict(validation=-0.1), "validation must .* Got -0.1"),
        (dict(warm_start=-1), "warm_start must .* Got -1"),
        (dict(warm_start=0.5), "warm_start must .*integer. Got 0.5"),
        (dict(accumulate=3), "accumulate must divide batch_size. Got 3."),
        (dict(steps=10), "give either epochs or steps. Got \\(10.0, 10\\)."),
        (dict(epochs=None), "give either epochs or steps. Got \\(None, None\\)."),
        (dict(epochs=0), "epochs must .* Got 0"),
        (dict(lr=0.0), "lr must .* Got 0.0"),
        (dict(lr="0.1"), "lr must .*number. Got '0.1'"),
        (dict(lr=float("nan")), "lr must .*finite number. Got nan"),
        (dict(learning_rate=0.1), "Recipe has no field 'learning_rate'. Its fields are .*lr"),
        (dict(drop=3), "Recipe has no field 'drop'."),
        (dict(milestone=()), "Recipe has no field 'milestone'. Did you mean 'milestones'"),
        (dict(decay=0.0), "decay must .* Got 0.0"),
        (dict(decay=1.5), "decay must .* Got 1.5"),
        (dict(clip_norm=0.0), "clip_norm must .* Got 0.0"),
        (dict(weight_decay=-1e-4), "weight_decay must .* Got -0.0001"),
        (dict(adversarial=-0.1), "adversarial must .* Got -0.1"),
        (dict(milestones=((0.5, -0.1),)), "milestones.0.1 must .* Got -0.1"),
        (dict(milestones=((1.5, 0.1),)), "milestones must be at a step"),
        (dict(milestones=((0, 0.1),)), "milestones must be at a step"),
        (dict(milestones=(0.5, 0.1)), "milestones must be pairs"),
        (dict(network_options={"size": {8}}), "network_options must be JSON values"),
        (dict(network_options={"size": NESTED}), "network_options must be JSON values"),
        (dict(adversarial=0.1, sharing=True), "adversarial training must not share features. Got both."),
    ],
)
def test_rules(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(BASE, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(subset=1),
        dict(members=1),
        dict(overlap=5),
        dict(beta=0.0),
        dict(share_prob=0.0),
        dict(share_prob=1.0),
        dict(validation=0.99),
        dict(accumulate=128),
        dict(epochs=0.5),
        dict(epochs=None, steps=1),
        dict(decay=1.0),
        dict(clip_norm=0.1),
        dict(adversarial=0.1),
    ],
)
def test_the_borders_are_allowed(changes):
    assert replace(BASE, **changes) != replace(BASE, lr=0.2)


class TestLength:
    def test_epochs(self):
        # 2.5 epochs of 1000 examples are 2500 examples, 20 batches of 128 do not reach: 19.53 of them
        assert Recipe(epochs=2.5, batch_size=128).total_steps(1000) == 20
        assert Recipe(epochs=2, batch_size=100).total_steps(1000) == 20

    def test_steps(self):
        assert Recipe(steps=7).total_steps(1000) == 7

    def test_fewer_examples(self):
        assert Recipe(epochs=2, batch_size=100, subset=300).total_steps(1000) == 6
        assert Recipe(epochs=2, batch_size=100, subset=3000).total_steps(1000) == 20

    def test_a_batch_size_of_the_datas_own(self):
        assert Recipe(epochs=2, batch_size=128).total_steps(320, batch_size=32) == 20


class TestSchedule:
    def test_constant(self):
        assert {BASE.lr_at(step, 100) for step in range(100)} == {0.1}

    def test_milestones_by_step(self):
        recipe = replace(BASE, lr=1.0, milestones=((30, 0.1), (60, 0.5)))
        lrs = [recipe.lr_at(step, 100) for step in (0, 29, 30, 59, 60, 99)]
        assert lrs == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.05, 0.05], rel=1e-12)
        assert replace(BASE, lr=1.0, milestones=((1, 0.5),)).lr_at(1, 100) == 0.5, "a step, no fraction"

    def test_milestones_by_fraction(self):
        recipe = replace(BASE, lr=1.0, milestones=((0.5, 0.1), (0.75, 0.1)))
        lrs = [recipe.lr_at(step, 64) for step in (0, 31, 32, 47, 48, 63)]
        assert lrs == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01, 0.01], rel=1e-12)

    def test_a_fraction_that_rounding_would_put_off(self):
        recipe = replace(BASE, lr=1.0, milestones=((0.55, 0.1),))  # 0.55 * 100 is 55.00000000000001
        assert [recipe.lr_at(step, 100) for step in (54, 55)] == pytest.approx([1.0, 0.1])

    def test_exponential_by_step(self):
        recipe = replace(BASE, lr=8.0, decay=0.5, decay_steps=10)
        for steps in (30, 1000):  # however long the run is
            assert [recipe.lr_at(step, steps) for step in (0, 10, 20)] == pytest.approx([8.0, 4.0, 2.0])

    def test_exponential(self):
        recipe = replace(BASE, lr=8.0, decay=0.25)
        # half of the way down is the square root of a quarter
        assert [recipe.lr_at(step, 100) for step in (0, 50, 100)] == pytest.approx([8.0, 4.0, 2.0])

    def test_both(self):
        recipe = replace(BASE, lr=8.0, decay=0.25, milestones=((50, 0.1),))
        assert recipe.lr_at(49, 100) == pytest.approx(8 * 0.25**0.49)
        assert recipe.lr_at(50, 100) == pytest.approx(0.4)


def test_numbers_of_numpy():
    """As scikit-learn's searches bring them."""
    plain = replace(BASE, members=3, lr=0.5, clip_norm=2.0)
    other = replace(BASE, members=np.int64(3), lr=np.float32(0.5), clip_norm=Fraction(2))
    assert (other, other.hash, other.to_json()) == (plain, plain.hash, plain.to_json())
    assert type(other.members) is int


def test_equal_recipes_have_equal_hashes():
    whole, same = replace(BASE, epochs=2), replace(BASE, epochs=2.0)
    assert (whole == same, whole.hash == same.hash) == (True, True)


@pytest.mark.parametrize(
    ("changes", "objective"),
    [
        (dict(method="ie"), dict(beta=0.25, overlap=5, labels="exact", samples=1)),
        (
            dict(method="ie", overlap=2, labels="sampled"),
            dict(beta=0.25, overlap=5, labels="exact", samples=1),
        ),
        (dict(method="mcl", overlap=2), dict(beta=0.0, overlap=2, labels="exact", samples=1)),
        (dict(method="mcl", labels="sampled"), dict(beta=0.0, overlap=1, labels="exact", samples=1)),
        (
            dict(beta=0.5, overlap=3, labels="sampled", samples=4),
            dict(beta=0.5, overlap=3, labels="sampled", samples=4),
        ),
    ],
)
def test_one_objective_for_three_methods(changes, objective):
    assert replace(BASE, **changes).objective == objective | {"rule": "hard", "epsilon": 0.05}


@pytest.mark.parametrize(
    ("changes", "overlap"),
    [({}, 4), ({"members": 2}, 1), ({"members": 1}, 1), ({"method": "mcl"}, 1), ({"rule": "annealed"}, 1)],
)
def test_the_default_overlap_is_one_less_than_the_members(changes, overlap):
    assert replace(BASE, **changes).objective["overlap"] == overlap


def test_one_default_everywhere():
    """K = M - 1 and beta = 0.25 in the objective, recipes, the estimator, the commands and the documents."""
    beta = Recipe.beta
    assert inspect.signature(cmcl.confident_oracle_loss).parameters["beta"].default == beta
    assert cmcl.CMCLClassifier().beta == beta
    assert cmcl.CMCLClassifier().overlap is Recipe.overlap is None
    for members in (2, 3, 5):
        k = Recipe(members=members, epochs=1).objective["overlap"]
        loss = cmcl.confident_oracle_loss(torch.randn(members, 7, 4), torch.zeros(7, dtype=torch.long))
        assert loss.assignment.sum(0).tolist() == [k] * 7 == [members - 1] * 7
    options = inspect.signature(train_command).parameters  # None: the recipe's own
    assert options["overlap"].default is options["beta"].default is None
    for name in ("README.md", "docs/guides/choosing-beta-and-k.md"):
        (said,) = re.findall(r"K = M - 1 and beta = ([\d.]+\d)", (ROOT / name).read_text())
        assert float(said) == beta, name


def test_rules_are_not_for_independent_training():
    relaxed = replace(BASE, rule="relaxed", epsilon=0.2, method="mcl")
    assert (relaxed.objective["rule"], relaxed.objective["epsilon"]) == ("relaxed", 0.2)
    assert replace(relaxed, method="ie").objective["rule"] == "hard"


class TestSchedules:
    def test_cosine_by_hand(self):
        """Half a cosine from lr to 0: 1, (1 + cos 45°) / 2, 1/2, ... of lr at quarters of the run."""
        recipe = replace(BASE, lr=0.2, schedule="cosine")
        found = [recipe.lr_at(step, 8) / 0.2 for step in (0, 2, 4, 6, 8)]
        half = (1 + math.sqrt(0.5)) / 2
        assert found == pytest.approx([1, half, 0.5, 1 - half, 0])

    def test_one_cycle_by_hand(self):
        """Up from 0 in the first four of eight steps, at fifths, then down to 0 in the other four."""
        recipe = replace(BASE, lr=1.0, schedule="linear", warmup=0.5)
        found = [recipe.lr_at(step, 8) for step in range(9)]
        assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 0.75, 0.5, 0.25, 0])

    def test_they_combine_with_milestones_and_decay(self):
        recipe = replace(BASE, lr=1.0, schedule="linear", milestones=((0.5, 0.1),), decay=0.01)
        assert recipe.lr_at(5, 10) == pytest.approx(0.5 * 0.1 * 0.1)

    def test_evolving_overlap_falls_from_m_to_its_value(self):
        recipe = replace(BASE, overlap=1, evolve=0.8)
        assert [recipe.overlap_at(step, 10) for step in range(10)] == [5, 4, 4, 4, 3, 2, 2, 2, 1, 1]
        assert replace(BASE, overlap=2).overlap_at(0, 10) == 2

    def test_the_temperature_falls_to_a_thousandth(self):
        recipe = replace(BASE, rule="annealed", temperature=5.0)
        assert [recipe.temperature_at(step, 6) for step in (0, 2, 6)] == pytest.approx([5, 0.5, 0.005])


class TestAugment:
    def test_numbers_of_numpy(self):
        assert Augment(crop=np.int64(4)) == Augment(crop=4)

    def test_from_json(self):
        recipe = replace(BASE, augment=Augment(flip="alternating", crop=4))
        assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
        assert not BASE.augment
        assert recipe.augment

    @pytest.mark.parametrize("wrong", [{"flips": True}, {"crop": -1}, {"jitter": 2.0}, {"flip": "often"}])
    def test_mistakes(self, wrong):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            replace(BASE, augment=wrong)


class TestHash:
    def test_covers_every_field(self):
        """Also where the method does not use it, or the value is a default: defaults may change."""
        changes = dict(
            data="cifar10",
            preprocess="gcn_zca",
            subset=300,
            network="resnet20",
            network_options={"classes": 7},
            method="ie",
            members=4,
            overlap=2,
            beta=0.5,
            labels="sampled",
            samples=2,
            sharing=True,
            share_prob=0.5,
            warm_start=1,
            adversarial=0.1,
            rule="relaxed",
            epsilon=0.1,
            temperature=2.0,
            evolve=0.5,
            schedule="cosine",
            warmup=0.1,
            label_smoothing=0.1,
            augment={"flip": True},
            ema=0.1,
            epochs=11,
            batch_size=64,
            accumulate=2,
            optimizer="adam",
            lr=0.2,
            momentum=0.8,
            nesterov=True,
            weight_decay=1e-4,
            milestones=((0.5, 0.1),),
            decay=0.5,
            decay_steps=7,
            clip_norm=1.0,
            validation=0.1,
            flip_at_test=True,
        )
        assert changes.keys() | {"steps"} == {f.name for f in fields(Recipe)}
        hashes = [replace(BASE, **{name: value}).hash for name, value in changes.items()]
        hashes += [BASE.hash, replace(BASE, epochs=None, steps=10).hash]
        assert len(set(hashes)) == len(hashes)

    def test_worked_out_by_hand(self):
        """The names and values of all fields and the schema's version, whatever the defaults are."""
        values = BASE.to_json()
        assert set(values) == {f.name for f in fields(Recipe)}
        assert values.pop("flip_at_test") is False  # came later: recipes without it keep their hash
        content = json.dumps({"schema": 3, **values}, sort_keys=True)
        assert BASE.hash == sha256(content.encode()).hexdigest()[:16]

    def test_records_still_match_their_recipes(self):
        """A changed hash orphans records."""
        root = Path(__file__).parents[1]
        records = [*(root / "results" / "records").glob("*.json"), *root.glob("zoo/*/record.json")]
        assert records
        for path in records:
            record = json.loads(path.read_text())
            assert Recipe.from_json(record["recipe"]).hash == record["recipe_hash"], path.name
            if record["full_length"]:
                assert find(record["name"]).hash == record["recipe_hash"], path.name

    def test_the_same_in_another_process(self):
        """Not Python's own hash, which is salted; and it needs no torch."""
        code = "import sys, cmcl; print(cmcl.Recipe(epochs=10).hash); sys.exit('torch' in sys.modules)"
        source = str(Path(cmcl.__file__).parents[1])
        run = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": source},
        )
        assert run.stdout.strip() == BASE.hash


class TestJson:
    def test_round_trip(self):
        recipe = Recipe(
            network="cnn",
            network_options={"filters": [4, 8]},
            steps=100,
            milestones=[(30, 0.1), (0.75, 0.2)],
            clip_norm=1.0,
        )
        back = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
        assert back == recipe
        assert back.hash == recipe.hash
        assert back.milestones == ((30, 0.1), (0.75, 0.2))

    def test_what_a_later_version_wrote(self):
        with pytest.raises(ValueError, match="Recipe has no field 'wings'"):
            Recipe.from_json({**BASE.to_json(), "wings": 2})
        with pytest.raises(ValueError, match="recipe must be a JSON object. Got list"):
            Recipe.from_json([])

    def test_what_an_earlier_version_did_not_write(self):
        values = BASE.to_json()
        del values["clip_norm"]
        assert Recipe.from_json(values) == BASE


def test_a_network_by_name_shares_only_if_told():
    """And whoever brings an ensemble has said it there."""
    assert BASE.sharing is None
    assert [replace(BASE, network="cnn", sharing=said).sharing for said in (None, False, True)] == [
        False,
        False,
        True,
    ]


def test_frozen():
    with pytest.raises(AttributeError):
        BASE.lr = 1.0
    options = {"classes": 3}
    recipe = replace(BASE, network_options=options)
    options["classes"] = 4
    assert recipe.network_options == {"classes": 3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(device="gpu"), "device must be 'auto', 'cpu', 'cuda'.* Got 'gpu'"),
        (dict(device="cuda:x"), "device must .* Got 'cuda:x'"),
        (dict(device="auto:3"), "device must .* Got 'auto:3'"),
        (dict(precision="fp8"), "precision must .* Got 'fp8'"),
        (dict(evaluate_every=-1), "evaluate_every must .* Got -1"),
        (dict(evaluation_batch=0), "evaluation_batch must .* Got 0"),
        (dict(max_seconds=0), "max_seconds must .* Got 0"),
        (dict(workers=2), "Options has no field 'workers'"),
    ],
)
def test_options(values, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Options(**values)


@pytest.mark.parametrize("seed", [10**22, -1])
def test_seeds_that_torch_does_not_take(seed):
    with pytest.raises(ValueError, match="seed must be between 0 and"):
        check_seed(seed)
    with pytest.raises(TypeError, match="seed must be a whole number. Got float"):
        check_seed(0.5)
    assert check_seed(np.int32(3)) == 3


def test_the_decay_that_ties_a_run_to_its_length():
    plain = replace(BASE, milestones=())
    assert plain.tied_to_length == []
    assert replace(plain, decay=0.5).tied_to_length == ["decay"]
    assert replace(plain, decay=0.5, decay_steps=9).tied_to_length == []
