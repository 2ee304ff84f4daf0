"""Recipes: every rule, schedules worked out by hand, one objective for three methods, a hash of the meaning."""

import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import cmcl
from cmcl import Recipe
from cmcl.reproduction import find

BASE = Recipe(epochs=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(method="dropout"), "method must be one of 'ie', 'mcl', 'cmcl'. Got 'dropout'."),
        (dict(optimizer="lion"), "optimizer must be one of 'sgd', 'adam', 'adamw'. Got 'lion'."),
        (dict(labels="smooth"), "labels must be one of 'exact', 'sampled'. Got 'smooth'."),
        (dict(examples=0), "examples must be an int, 1 or more. Got 0."),
        (dict(members=0, overlap=0), "members must be an int, 1 or more. Got 0."),
        (dict(overlap=0), "overlap must be an int, 1 or more. Got 0."),
        (dict(members=None), "members must be an int, 1 or more. Got None."),
        (dict(batch_size=8.0), "batch_size must be an int, 1 or more. Got 8.0."),
        (dict(epochs=None, steps=10.5), "steps must be an int, 1 or more. Got 10.5."),
        (dict(decay_steps=0), "decay_steps must be an int, 1 or more. Got 0."),
        (dict(overlap=6), "overlap must be between 1 and 5. Got 6."),
        (dict(beta=-0.1), "beta must be a finite number, 0 or more. Got -0.1."),
        (dict(beta=float("inf")), "beta must be a finite number, 0 or more. Got inf."),
        (dict(beta=float("nan")), "beta must be a finite number, 0 or more. Got nan."),
        (dict(samples=0), "samples must be an int, 1 or more. Got 0."),
        (dict(share_prob=1.1), "share_prob must be between 0 and 1. Got 1.1."),
        (dict(validation=1.0), "validation must be at least 0 and below 1. Got 1.0."),
        (dict(validation=-0.1), "validation must be at least 0 and below 1. Got -0.1."),
        (dict(batch_size=0), "batch_size must be an int, 1 or more. Got 0."),
        (dict(accumulate=0), "accumulate must be an int, 1 or more. Got 0."),
        (dict(accumulate=3), "accumulate must divide batch_size. Got 3."),
        (dict(steps=10), "give either epochs or steps. Got (10, 10)."),
        (dict(epochs=None), "give either epochs or steps. Got (None, None)."),
        (dict(epochs=0), "epochs or steps must be positive and finite. Got 0."),
        (dict(epochs=None, steps=-3), "steps must be an int, 1 or more. Got -3."),
        (dict(lr=0.0), "lr must be positive and finite. Got 0.0."),
        (dict(lr=float("nan")), "lr must be positive and finite. Got nan."),
        (dict(lr=float("inf")), "lr must be positive and finite. Got inf."),
        (dict(epochs=float("inf")), "epochs or steps must be positive and finite. Got inf."),
        (dict(epochs=float("nan")), "epochs or steps must be positive and finite. Got nan."),
        (dict(decay=0.0), "decay must be above 0 and at most 1. Got 0.0."),
        (dict(decay=1.5), "decay must be above 0 and at most 1. Got 1.5."),
        (dict(clip=0.0), "clip must be positive. Got 0.0."),
        (dict(clip=-1.0), "clip must be positive. Got -1.0."),
        (dict(weight_decay=-1e-4), "weight_decay must be 0 or more. Got -0.0001."),
        (dict(adversarial=-0.1), "adversarial must be 0 or more. Got -0.1."),
        (dict(drops=((0.5, -0.1),)), "drops must be by factors of 0 or more. Got ((0.5, -0.1),)."),
        (
            dict(network_options={"size": {8}}),
            "network_options must be plain Python, to be kept as JSON. Got {'size': {8}}.",
        ),
        (dict(adversarial=0.1, sharing=True), "adversarial training must go without sharing. Got both."),
    ],
)
def test_rules(changes, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the whole text is compared)
        replace(BASE, **changes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "changes",
    [
        dict(examples=1),
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
        dict(clip=0.1),
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
        assert Recipe(epochs=2, batch_size=100, examples=300).total_steps(1000) == 6
        assert Recipe(epochs=2, batch_size=100, examples=3000).total_steps(1000) == 20

    def test_a_batch_size_of_the_datas_own(self):
        assert Recipe(epochs=2, batch_size=128).total_steps(320, batch_size=32) == 20


class TestSchedule:
    def test_constant(self):
        assert {BASE.lr_at(step, 100) for step in range(100)} == {0.1}

    def test_drops_by_step(self):
        recipe = replace(BASE, lr=1.0, drops=((30, 0.1), (60, 0.5)))
        lrs = [recipe.lr_at(step, 100) for step in (0, 29, 30, 59, 60, 99)]
        assert lrs == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.05, 0.05], rel=1e-12)

    def test_drops_by_share(self):
        recipe = replace(BASE, lr=1.0, drops=((0.5, 0.1), (0.75, 0.1)))
        lrs = [recipe.lr_at(step, 64) for step in (0, 31, 32, 47, 48, 63)]
        assert lrs == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01, 0.01], rel=1e-12)

    def test_a_share_that_rounding_would_put_off(self):
        recipe = replace(BASE, lr=1.0, drops=((0.55, 0.1),))  # 0.55 * 100 is 55.00000000000001
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
        recipe = replace(BASE, lr=8.0, decay=0.25, drops=((50, 0.1),))
        assert recipe.lr_at(49, 100) == pytest.approx(8 * 0.25**0.49)
        assert recipe.lr_at(50, 100) == pytest.approx(0.4)


def test_numbers_of_numpy():
    """As scikit-learn's searches bring them."""
    plain = replace(BASE, members=3, lr=0.5, clip=2.0)
    other = replace(BASE, members=np.int64(3), lr=np.float32(0.5), clip=Fraction(2))
    assert (other, other.hash, other.to_json()) == (plain, plain.hash, plain.to_json())
    assert type(other.members) is int
    with pytest.raises(ValueError, match="members must be an int, 1 or more. Got True."):
        replace(BASE, members=True)


def test_equal_recipes_have_equal_hashes():
    whole, same = replace(BASE, epochs=2), replace(BASE, epochs=2.0)
    assert (whole == same, whole.hash == same.hash) == (True, True)
    assert replace(BASE, decay_steps=10).hash != BASE.hash
    assert not {"examples", "decay_steps"} & BASE.to_json().keys(), "as runs of before have it"


@pytest.mark.parametrize(
    ("changes", "objective"),
    [
        (dict(method="ie"), dict(beta=0.75, overlap=5, labels="exact", samples=1)),
        (
            dict(method="ie", overlap=2, labels="sampled"),
            dict(beta=0.75, overlap=5, labels="exact", samples=1),
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
    assert replace(BASE, **changes).objective == objective


class TestHash:
    @pytest.mark.parametrize(
        ("recipe", "changes"),
        [
            (BASE, dict(share_prob=0.3)),  # nothing is shared
            (BASE, dict(sharing=False)),  # as records say that were made when it was the default
            (BASE, dict(samples=3)),  # labels are exact
            (BASE, dict(beta=0.75, overlap=1)),  # the defaults, said aloud
            (replace(BASE, method="ie"), dict(beta=0.1, overlap=3, labels="sampled", warm_start=2)),
            (replace(BASE, method="mcl"), dict(beta=0.1, labels="sampled", samples=2)),
            (replace(BASE, optimizer="adam"), dict(momentum=0.5, nesterov=True)),
        ],
    )
    def test_blind_to_what_is_not_used(self, recipe, changes):
        assert replace(recipe, **changes).hash == recipe.hash

    def test_sees_every_change_of_meaning(self):
        changes = [
            dict(),
            dict(data="cifar10"),
            dict(preprocess="gcn_zca"),
            dict(examples=300),
            dict(network="resnet20"),
            dict(network_options={"classes": 7}),
            dict(method="ie"),
            dict(method="mcl"),
            dict(members=4),
            dict(overlap=2),
            dict(beta=0.5),
            dict(labels="sampled"),
            dict(labels="sampled", samples=2),
            dict(sharing=True),
            dict(sharing=True, share_prob=0.5),
            dict(warm_start=1),
            dict(adversarial=0.1),
            dict(epochs=11),
            dict(epochs=None, steps=10),
            dict(batch_size=64),
            dict(accumulate=2),
            dict(optimizer="adam"),
            dict(optimizer="adamw"),
            dict(lr=0.2),
            dict(momentum=0.8),
            dict(nesterov=True),
            dict(weight_decay=1e-4),
            dict(drops=((0.5, 0.1),)),
            dict(drops=((5, 0.1),)),
            dict(decay=0.5),
            dict(clip=1.0),
            dict(validation=0.1),
        ]
        hashes = [replace(BASE, **change).hash for change in changes]
        assert len(set(hashes)) == len(changes)

    def test_records_still_match_their_recipes(self):
        """A changed hash orphans records: whatever is added to a recipe, those it does not concern keep theirs."""
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
            drops=[(30, 0.1), (0.75, 0.2)],
            clip=1.0,
        )
        back = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
        assert back == recipe
        assert back.hash == recipe.hash
        assert back.drops == ((30, 0.1), (0.75, 0.2))

    def test_what_a_later_version_wrote(self):
        with pytest.raises(
            ValueError, match="recipe fields must be known to this version. Got speed, wings."
        ):
            Recipe.from_json({**BASE.to_json(), "wings": 2, "speed": 9})

    def test_as_before_there_were_examples(self):
        """Or runs of an earlier version could not be resumed."""
        assert "examples" not in BASE.to_json()
        few = replace(BASE, examples=300)
        assert few.to_json()["examples"] == 300
        assert Recipe.from_json(few.to_json()) == few

    def test_what_an_earlier_version_did_not_write(self):
        values = BASE.to_json()
        del values["clip"]
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
