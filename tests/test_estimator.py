"""The scikit-learn estimator keeps scikit-learn's contract, and is the ensemble it says it is."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, make_blobs
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

import cmcl
from cmcl import CMCLClassifier, estimator
from cmcl.data.dataset import hold_out, identities

NEEDS_MORE = {"check_array_api_input", "check_classifier_data_not_an_array"}  # SciPy's switch, pandas


def run_checks(estimator):
    """Every check of scikit-learn passes, except those that need packages which are not installed."""
    results = check_estimator(estimator, on_fail=None, on_skip=None)
    bad = {r["check_name"]: r["exception"] for r in results if r["status"] not in ("passed", "skipped")}
    assert not bad
    assert {r["check_name"] for r in results if r["status"] == "skipped"} <= NEEDS_MORE
    assert len(results) > 40


QUICK = dict(members=2, overlap=1, hidden=16, epochs=15, lr=0.1, batch_size=300)


def test_check_estimator_in_small():
    run_checks(CMCLClassifier(**QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, QUICK | {"share_after": "relu"}], ids=["default", "sharing"])
def test_check_estimator(options):
    run_checks(CMCLClassifier(**options))


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    return StandardScaler().fit_transform(X).astype(np.float32), y


def small(**changes):
    return CMCLClassifier(
        **{"members": 3, "overlap": 2, "epochs": 10, "lr": 0.03, "random_state": 0} | changes
    )


@pytest.fixture(scope="module")
def fitted(iris):
    return small().fit(*iris)


def test_shapes_and_meaning(fitted, iris):
    X, y = iris
    probs, members = fitted.predict_proba(X), fitted.predict_members_proba(X)
    assert probs.shape == (150, 3)
    assert members.shape == (3, 150, 3)
    scaled = members.mean(0) ** (1 / fitted.ensemble_.temperature)
    np.testing.assert_allclose(probs, scaled / scaled.sum(1, keepdims=True), rtol=1e-3, atol=1e-30)
    np.testing.assert_array_equal(fitted.predict(X), members.mean(0).argmax(1))
    np.testing.assert_array_equal(fitted.predict_members(X), members.argmax(2))
    assert fitted.score(X, y) > 0.9


@pytest.mark.parametrize(("members", "overlap"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 4)])
def test_default_overlap_fits_the_members(iris, members, overlap):
    model = CMCLClassifier(members=members, epochs=1).fit(*iris)
    assert model.specialist_fraction_.sum() == pytest.approx(overlap)
    assert model.get_params()["overlap"] is None


@pytest.mark.parametrize(("rule", "overlap"), [("relaxed", 2), ("annealed", 1)])
def test_rules_of_assignment(iris, rule, overlap):
    X, y = iris
    hard, soft = (small(overlap=None, rule=r, validation=0).fit(X, y) for r in ("hard", rule))
    assert soft.overlap_ == overlap
    assert soft.score(X, y) > 0.9
    assert not np.allclose(soft.predict_proba(X), hard.predict_proba(X))


def test_the_overlap_is_chosen(iris):
    """As `fit` chooses it; tests/test_choosing.py has cases where 1, members - 1 and members win."""
    model = small(overlap="auto", epochs=5).fit(*iris)
    assert model.overlap_ in (1, 2, 3)
    assert model.specialist_fraction_.sum() == pytest.approx(model.overlap_)
    given = small(overlap=model.overlap_, epochs=5).fit(*iris)
    np.testing.assert_array_equal(model.predict_proba(iris[0]), given.predict_proba(iris[0]))


def test_the_default_width(iris, digits):
    images = digits[0].astype(np.float32)
    for X, y, hidden in ((*iris, 256), (images, digits[1], 64)):
        model = small(members=1, overlap=1, epochs=0.1).fit(X, y)
        assert model.ensemble_.members[0].options["hidden"] == hidden


def test_specialist_fraction(fitted):
    assert fitted.specialist_fraction_.sum() == pytest.approx(2), "each example is learned by K = 2 members"
    np.testing.assert_allclose(fitted.specialist_fraction_by_class_.sum(0), [2, 2, 2])


def test_it_is_what_fit_and_recipe_make(iris):
    """The same weights as by hand; the temperature of a short run, on a fifth that it does not learn."""
    X, y = (torch.tensor(values) for values in iris)
    ours = small(share_after="relu", beta=0.5, labels="sampled").fit(*iris)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))

    def byhand(rows, epochs):
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 3)) for _ in range(3)]
        ensemble = cmcl.Ensemble(layers, share_after="1")
        recipe = cmcl.Recipe(
            members=3, overlap=2, beta=0.5, labels="sampled", sharing=True,
            epochs=epochs, batch_size=64, optimizer="adam", lr=0.03,
        )  # fmt: skip
        options = cmcl.Options(quiet=True, device="cpu")
        cmcl.fit(ensemble, (X[rows], y[rows]), recipe=recipe, seed=seed, options=options)
        return ensemble

    learned, held = hold_out(y.tolist(), identities(X), 0.2, seed)
    assert len(held) == 30
    early, whole = byhand(learned, 2), byhand(range(150), 10)
    whole.temperature = cmcl.calibration.fit_temperature(early.predict(X[held]).member_probs, y[held])
    assert ours.ensemble_.temperature == pytest.approx(whole.temperature, rel=1e-6)
    for mine, value in zip(ours.ensemble_.parameters(), whole.parameters(), strict=True):
        assert mine.equal(value)
    np.testing.assert_allclose(ours.predict_proba(iris[0]), whole.predict(X).probs.numpy(), rtol=1e-5)


def test_the_same_seed_gives_the_same(iris):
    X, y = iris
    state = torch.get_rng_state()
    a, b, c = (small(random_state=s, epochs=2).fit(X, y).predict_proba(X) for s in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert not np.allclose(a, c)
    assert torch.get_rng_state().equal(state), "the user's own random numbers are not touched"


@pytest.fixture(scope="module")
def letters():
    """Digits with letters for classes: X and y to learn, X and the classes' positions to test."""
    X, y = load_digits(return_X_y=True)
    X, names = (X / 16).astype(np.float32), np.array(list("abcdefghij"))
    return X[:1200], names[y[:1200]], X[1200:], torch.tensor(y[1200:])


@pytest.fixture(scope="module")
def calibrated(letters):
    """Models by their parameter validation."""
    settings = dict(overlap=1, beta=0.75, epochs=15, random_state=0)
    return {v: CMCLClassifier(**settings, validation=v).fit(*letters[:2]) for v in ("auto", 0.2, 0)}


class TestCalibration:
    def test_probabilities_are_calibrated(self, calibrated, letters):
        *_, X, truth = letters
        ece = {
            v: cmcl.metrics.ece(torch.tensor(m.predict_proba(X))[None], truth) for v, m in calibrated.items()
        }
        assert max(ece["auto"], ece[0.2]) < ece[0] / 3

    def test_the_default_changes_nothing_else(self, calibrated, letters):
        assert calibrated[0].ensemble_.temperature is None
        X = letters[2]
        members = [calibrated[v].predict_members_proba(X) for v in ("auto", 0)]
        np.testing.assert_array_equal(*members)
        np.testing.assert_array_equal(calibrated["auto"].predict(X), calibrated[0].predict(X))

    def test_a_fraction_is_not_learned(self, calibrated, letters):
        X, y, *_ = letters
        labels = np.unique(y, return_inverse=True)[1]
        seed = int(np.random.RandomState(0).randint(2**31 - 1))
        held = train_test_split(np.arange(1200), test_size=0.2, stratify=labels, random_state=seed)[1]
        members = torch.tensor(calibrated[0.2].predict_members_proba(X[held]))
        expected = cmcl.calibration.fit_temperature(members, torch.tensor(labels[held]))
        assert calibrated[0.2].ensemble_.temperature == pytest.approx(expected, rel=1e-4)

    def test_too_few_examples_give_no_temperature(self):
        model = small(epochs=1).fit(np.eye(4), [0, 0, 1, 1])
        assert model.ensemble_.temperature is None

    def test_the_chosen_overlap_is_that_of_the_short_run(self, letters, monkeypatch):
        recipes, run = [], estimator.fit
        monkeypatch.setattr(
            estimator, "fit", lambda *a, recipe, **k: recipes.append(recipe) or run(*a, recipe=recipe, **k)
        )
        model = small(overlap="auto", epochs=5).fit(*letters[:2])
        assert [(r.overlap, r.epochs) for r in recipes] == [("auto", 5), (model.overlap_, 1)]

    def test_another_word(self, iris):
        with pytest.raises(ValueError, match="validation must be 'auto' or a fraction below 1. Got 'none'."):
            small(validation="none").fit(*iris)


def test_text_for_classes(iris):
    X, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    named = small().fit(X, names)
    np.testing.assert_array_equal(named.predict(X), named.classes_[small().fit(X, y).predict(X)])
    assert set(named.predict_members(X).ravel()) <= set(names)


def test_precision_follows_x(iris):
    X, y = iris
    assert small(epochs=1).fit(X, y).predict_proba(X).dtype == np.float32
    assert small(epochs=1).fit(X.astype(np.float64), y).predict_proba(X).dtype == np.float64
    assert small(epochs=1).fit((X * 10).astype(int), y).predict_proba(X).dtype == np.float32


def test_copies(fitted, iris):
    X, y = iris
    for model in (fitted, small(share_after="relu", epochs=1).fit(X, y)):
        again = pickle.loads(pickle.dumps(model))  # noqa: S301
        np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    fresh = clone(fitted)
    assert fresh.get_params() == fitted.get_params()
    assert not hasattr(fresh, "ensemble_")


def test_pipeline_and_cross_validation():
    X, y = load_iris(return_X_y=True)
    scores = cross_val_score(make_pipeline(StandardScaler(), small()), X, y, cv=3)
    assert scores.mean() > 0.85


def test_grid_search_over_beta_and_overlap(iris):
    X, y = iris
    search = GridSearchCV(
        small(epochs=3), {"beta": [0.0, 0.75], "overlap": [1, 3]}, cv=2, error_score="raise"
    ).fit(X, y)
    assert len(search.cv_results_["params"]) == 4
    assert search.best_estimator_.overlap in (1, 3)


def test_methods_differ(iris):
    X, y = iris
    entropy = {}
    for method in ("cmcl", "ie"):
        probs = small(method=method, overlap=1, epochs=30).fit(X, y).predict_members_proba(X)
        entropy[method] = cmcl.metrics.entropy(torch.tensor(probs)).mean().item()
    assert entropy["cmcl"] > entropy["ie"], "non-specialists are trained towards uniform"


def test_warm_start_goes_on(iris):
    X, y = iris
    once = small(epochs=5).fit(X, y)
    first = once.predict_proba(X)
    twice = small(epochs=5, warm_start=True).fit(X, y)
    np.testing.assert_array_equal(twice.predict_proba(X), first)
    ensemble = twice.ensemble_
    twice.fit(X, y)
    assert twice.ensemble_ is ensemble
    assert cross_entropy(twice, X, y) < cross_entropy(once, X, y)
    np.testing.assert_array_equal(once.fit(X, y).predict_proba(X), first, "without it, fit starts anew")
    with pytest.raises(
        ValueError, match=r"classes of the last fit with warm_start=True, \[0, 1, 2\]. Got \[0, 1\]"
    ):
        twice.fit(X[:100], y[:100])


def test_warm_start_holds_out_the_same_examples(iris, monkeypatch):
    """Without a seed, too: the next fit must not learn what the temperature is fitted to."""
    held, fitted = [], estimator.held_out_temperature
    monkeypatch.setattr(
        estimator, "held_out_temperature", lambda own, kept: held.append(kept[0]) or fitted(own, kept)
    )
    model = small(warm_start=True, epochs=1, validation=0.2, random_state=None).fit(*iris).fit(*iris)
    assert held[0].equal(held[1])
    model.set_params(warm_start=False).fit(*iris)
    assert not held[0].equal(held[2])


CHANGED = {  # parameter: (value that warm_start cannot follow, other parameters)
    "hidden": (8, {}),
    "members": (2, {}),
    "share_after": (None, {"share_after": "relu"}),
    "network": (lambda: nn.Linear(4, 3), {}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_warm_start_keeps_what_was_built(iris, name):
    """A changed parameter that would be ignored is refused by its own name, with the way out."""
    value, others = CHANGED[name]
    model = small(warm_start=True, epochs=1, **others).fit(*iris)
    before, weights = getattr(model, name), model.predict_proba(iris[0])
    model.set_params(**{name: value})
    with pytest.raises(ValueError, match=f"{name} must be as in .* set warm_start=False") as error:
        model.fit(*iris)
    assert f"{before!r}. Got {value!r}" in str(error.value)
    np.testing.assert_array_equal(model.predict_proba(iris[0]), weights)
    clone(model).fit(*iris)
    model.set_params(warm_start=False).fit(*iris)
    model.set_params(warm_start=True).fit(*iris)


def test_warm_start_follows_what_it_can(iris):
    model = small(network=own_network, warm_start=True, epochs=1).fit(*iris)
    ensemble = model.ensemble_
    again = pickle.loads(pickle.dumps(model)).fit(*iris)  # noqa: S301
    assert len(again.ensemble_.members) == 3
    model.set_params(hidden=8, overlap=1, beta=0.5, lr=0.01).fit(*iris)  # one's own network has no such width
    assert model.ensemble_ is ensemble


def cross_entropy(model, X, y):
    return -np.log(model.predict_proba(X)[np.arange(len(y)), y]).mean()


class TestClassWeight:
    @pytest.fixture
    def overlapping(self):
        """90 of class 0 and 10 of class 1, on top of each other."""
        X, _ = make_blobs(100, centers=1, random_state=0)
        return X.astype(np.float32), np.array([0] * 90 + [1] * 10)

    def test_balanced_finds_the_rare_class(self, overlapping):
        X, y = overlapping
        for method, rise in {"ie": 0.3, "cmcl": 0.05}.items():  # where members specialise, fewer learn it
            plain, balanced = (
                small(method=method, epochs=30, class_weight=weight).fit(X, y).predict_members_proba(X)
                for weight in (None, "balanced")
            )
            assert balanced[..., 1].mean() > plain[..., 1].mean() + rise, method

    def test_a_dict_is_the_weight_it_says(self, overlapping):
        X, y = overlapping
        by_name, by_hand = (small(class_weight=w).fit(X, y) for w in ("balanced", {0: 100 / 180, 1: 5.0}))
        np.testing.assert_allclose(by_name.predict_proba(X), by_hand.predict_proba(X), rtol=1e-5)
        equal = small(class_weight={0: 1.0, 1: 1.0}).fit(X, y)
        np.testing.assert_allclose(
            equal.predict_proba(X), small().fit(X, y).predict_proba(X), rtol=1e-4, atol=1e-5
        )

    def test_labels_are_smoothed_with_and_without_weights(self, overlapping):
        """IE learns the frequencies that it is shown: 0.1 of class 1 become 0.8 * 0.1 + 0.2 / 2."""
        X, y = overlapping
        plain, smooth, weighted = (
            small(method="ie", epochs=60, **more).fit(X, y).predict_members_proba(X)[..., 1].mean()
            for more in (
                {},
                {"label_smoothing": 0.2},
                {"label_smoothing": 0.2, "class_weight": {0: 1.0, 1: 1.0}},
            )
        )
        np.testing.assert_allclose([plain, smooth, weighted], [0.1, 0.18, 0.18], atol=0.03)
        np.testing.assert_allclose(smooth, weighted, rtol=1e-4)

    def test_a_weight_is_that_of_an_example_with_smoothed_labels_too(self):
        """A rare class far from the other, whose examples keep their label."""
        y = (np.arange(300) % 50 == 0).astype(int)
        X = np.random.default_rng(0).normal(size=(300, 2)) + 8 * y[:, None]
        balanced = small(method="ie", epochs=20, class_weight="balanced", label_smoothing=0.1)
        assert balanced.fit(X, y).score(X, y) == 1.0

    def test_nonsense(self, overlapping):
        with pytest.raises(ValueError, match="class_weight"):
            small(class_weight="unfair").fit(*overlapping)
        with pytest.raises(ValueError, match="label_smoothing"):
            small(label_smoothing=1.0, class_weight="balanced").fit(*overlapping)


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return X.reshape(-1, 1, 8, 8)[:300], y[:300]


class TestImages:
    def test_floats(self, digits):
        X, y = digits
        model = small(members=2, overlap=1, hidden=16, epochs=8, share_after="relu").fit(
            (X / 16).astype(np.float32), y
        )
        assert model.predict_proba((X[:5] / 16).astype(np.float32)).shape == (5, 10)
        assert model.score((X / 16).astype(np.float32), y) > 0.5

    def test_raw_ones_are_standardised(self, digits):
        X, y = digits
        raw = (X * 15).astype(np.uint8)
        model = small(members=2, hidden=8, epochs=1).fit(raw, y)
        assert model.ensemble_.transform is not None
        standardised = model.ensemble_.transform.transform(torch.tensor(raw))
        probs = model.ensemble_.member_probs(standardised)
        np.testing.assert_allclose(model.predict_members_proba(raw), probs, rtol=1e-4)

    def test_raw_and_prepared_are_not_mixed(self, digits):
        """The same numbers in another type would miss, or get, the standardisation."""
        X, y = digits
        raw, floats = (X * 15).astype(np.uint8), X.astype(np.float32)
        model = small(epochs=1).fit(raw, y)
        for other in (raw.astype(np.float32), raw.astype(np.float64), raw.astype(np.int64)):
            with pytest.raises(ValueError, match=f"raw, uint8. Got {other.dtype}"):
                model.predict(other)
        with pytest.raises(ValueError, match="prepared, not uint8. Got uint8"):
            small(epochs=1).fit(floats, y).predict_proba(raw)
        model.set_params(warm_start=True)
        with pytest.raises(ValueError, match="raw, uint8. Got float32"):
            model.fit(floats, y)

    def test_another_size(self, digits):
        X, y = digits
        model = small(members=2, hidden=8, epochs=1).fit(X, y)
        with pytest.raises(ValueError, match=r"X must have shape \(N, 1, 8, 8\). Got \(2, 1, 8, 9\)"):
            model.predict(np.zeros((2, 1, 8, 9)))

    def test_other_shapes_need_a_network(self, digits):
        X, y = digits
        with pytest.raises(ValueError, match=r"Got \(N, 8, 8\); pass network= for other shapes"):
            small().fit(X[:, 0], y)


class TestSaved:
    """The default network is described in the folder, so that nobody has to build it."""

    @pytest.mark.parametrize("share_after", [None, "relu"])
    def test_vectors(self, iris, share_after, tmp_path):
        X, y = iris
        model = small(epochs=1, share_after=share_after).fit(X, np.array(["a", "b", "c"])[y])
        model.ensemble_.save(tmp_path)
        loaded = cmcl.load(tmp_path)
        assert loaded.share_after == share_after
        probs = loaded.predict(torch.from_numpy(X)).probs
        assert probs.equal(model.ensemble_.predict(torch.from_numpy(X)).probs)
        assert (model.classes_[probs.argmax(-1)] == model.predict(X)).all()

    @pytest.mark.parametrize("raw", [False, True])
    def test_images(self, digits, raw, tmp_path):
        X, y = digits
        X = (X * 15).astype(np.uint8) if raw else X  # in double precision otherwise
        model = small(epochs=1, hidden=np.int64(8)).fit(X, y)
        model.ensemble_.save(tmp_path)
        probs = cmcl.load(tmp_path).predict(torch.from_numpy(X)).probs
        assert probs.numpy() == pytest.approx(model.predict_proba(X))


def own_network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def test_a_network_of_ones_own(iris):
    X, y = iris
    model = small(network=own_network, share_after="1", epochs=20).fit(X, y)
    assert isinstance(model.ensemble_.members[0][1], nn.Tanh)
    assert model.score(X, y) > 0.8
    assert pickle.loads(pickle.dumps(model)).network is own_network  # noqa: S301


def noisy_network():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 10))


@pytest.mark.parametrize("raw", [False, True])
def test_counting_a_networks_outputs_leaves_no_trace(digits, raw, monkeypatch):
    """With statistics and dropout the same weights come out as without."""
    X, y = digits
    X = (X * 15).astype(np.uint8) if raw else X
    looked = small(network=noisy_network, epochs=1).fit(X, y)
    monkeypatch.setattr(estimator, "_check_outputs", lambda *_: None)
    blind = small(network=noisy_network, epochs=1).fit(X, y)
    for key, value in blind.ensemble_.state_dict().items():
        assert value.equal(looked.ensemble_.state_dict()[key]), key


WRONG = {
    "one class": (dict(), np.zeros(150), "y must hold at least 2 classes. Got 1 class, "),
    "overlap": (dict(overlap=7), None, "overlap must be between 1 and 3. Got 7"),
    "hidden": (dict(hidden=0), None, "hidden must be 1 or more. Got 0"),
    "method": (dict(method="bagging"), None, "method must .*bagging"),
    "rule": (dict(rule="soft"), None, "rule must .*soft"),
    "regression": (dict(), np.linspace(0, 1, 150), "is for classification.*type: continuous.*regression"),
    "too few outputs": (
        dict(network=lambda: nn.Linear(4, 2)),
        None,
        "each of the 3 classes. Got 2 outputs",
    ),
    "pixels": (
        dict(network=lambda: nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (3, 2, 2)))),
        None,
        "the 3 classes. Got 3 x 2 x 2 outputs.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(iris, case):
    changes, y, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        small(**changes).fit(iris[0], iris[1] if y is None else y)


def test_progress(iris, capsys):
    small(epochs=2).fit(*iris)
    assert capsys.readouterr().err == ""
    small(epochs=2, verbose=True).fit(*iris)
    told = capsys.readouterr().err
    assert "epoch 2/2" in told
    assert "seed" not in told, "the user gave random_state, of which the seed is drawn"
