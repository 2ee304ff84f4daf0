"""`CMCLClassifier`: an ensemble as a scikit-learn estimator, for pipelines, cross-validation and grid search.

N examples, M members, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from . import _checks
from .data.dataset import hold_out, identities
from .ensemble import Ensemble, Prediction
from .networks import plain
from .objectives import TaskLoss
from .training import Options, fit
from .training.choosing import FRACTION, HELD_OUT
from .training.config import Recipe
from .training.cuda import find_device
from .training.preflight import probe
from .training.scoring import held_out_temperature

Array = npt.NDArray[Any]


class CMCLClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier of M networks that specialise, by confident multiple choice learning.

    For classification only: y are class labels, of any type. X are vectors (N, features) or images
    (N, channels, height, width). Raw images (uint8) are standardised; other values are taken as they are, so
    put a StandardScaler before it. On a CPU the networks compute in the precision of X; float32 is faster.

    Args:
        network: a function that builds one member, as for `Ensemble`, with an output for each class. None:
            `networks.plain`, one hidden layer for vectors, two convolutions for images; features can be
            shared after "relu".
        members: M, the number of networks.
        method: "cmcl", "mcl" (no KL-to-uniform term) or "ie" (every member learns every example).
        overlap: K, the number of specialists of each example. None: members - 1, or 1 for MCL and for the
            annealed rule. "auto": of 1, members - 1 and members (an independent ensemble), by held-out error
            after short runs.
        beta: weight of the KL-to-uniform term.
        labels: "exact", or "sampled" for stochastic labels.
        rule: how examples are assigned, as in `Recipe`: "hard", "relaxed" or "annealed" (K = 1).
        share_after: submodule after which the members share features.
        hidden: width of the default network. None: 256 for vectors, 64 for images.
        epochs, batch_size, optimizer, lr, weight_decay, label_smoothing: as in `Recipe`.
        validation: how the temperature of `predict_proba` is fitted, without which CMCL's probabilities are
            underconfident. "auto": to a fifth of the examples, predicted by a run over a fifth of the epochs
            on the others; the ensemble itself learns all of them. A number: the fraction, stratified, that is
            held out of all training. 0: there is no temperature.
        class_weight: weights of the classes in the task loss: {class: weight}, or "balanced".
        warm_start: continue from the weights of the last `fit`; the same examples are held out.
        random_state: a seed makes `fit` repeatable, unless others fit in threads of the same process.
        device: "auto" takes a GPU if there is one.
        verbose: show progress.

    Attributes:
        classes_: the classes, sorted.
        ensemble_: the trained `Ensemble`.
        overlap_: K, given or chosen.
        specialist_fraction_: (M,) fraction of examples that each member learned in the last epoch.
        specialist_fraction_by_class_: (M, C) the same for the examples of each class.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module] | None = None,
        *,
        members: int = 5,
        method: str = "cmcl",
        overlap: int | str | None = None,
        beta: float = 0.25,
        labels: str = "exact",
        rule: str = "hard",
        share_after: str | None = None,
        hidden: int | None = None,
        epochs: float = 50,
        batch_size: int = 64,
        optimizer: str = "adam",
        lr: float = 0.01,
        weight_decay: float = 0.0,
        label_smoothing: float = 0.0,
        validation: float | str = "auto",
        class_weight: Mapping[Any, float] | str | None = None,
        warm_start: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.network = network
        self.members = members
        self.method = method
        self.overlap = overlap
        self.beta = beta
        self.labels = labels
        self.rule = rule
        self.share_after = share_after
        self.hidden = hidden
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.label_smoothing = label_smoothing
        self.validation = validation
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> Self:
        """Train on examples X (N, ...) with labels y (N,), which may be text."""
        continues = self.warm_start and hasattr(self, "ensemble_")
        X, y = validate_data(self, X, y, allow_nd=True, reset=not continues)
        if (kind := type_of_target(y, input_name="y")) not in ("binary", "multiclass"):
            raise ValueError(
                f"y must be class labels: CMCLClassifier is for classification. Unknown label type: {kind}. "
                "For regression use another estimator; to predict ranges, bin y (numpy.digitize)."
            )
        classes, targets = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y must hold at least 2 classes. Got 1 class, {classes.tolist()[0]!r}.")
        if continues:
            self._check_continues(X, classes)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if not continues:
            self.classes_, self.shape_, self.raw_ = classes, X.shape[1:], _is_raw(X)
            self.ensemble_ = self._build(seed, X)
            self._built, self._split = self._plan(), seed
        x, labels = self._tensor(X), torch.tensor(targets)
        learned, held = self._hold_out(x, targets)
        task, options = self._task(y), Options(device=self.device, quiet=not self.verbose)
        recipe, early = self._recipe(), self.validation == "auto"
        if task is not None:  # which smooths the labels itself
            recipe = replace(recipe, label_smoothing=0.0)
        train = (x, labels) if early else (x[learned], labels[learned])
        result = fit(self.ensemble_, train, recipe=recipe, seed=seed, task=task, options=options)
        self.overlap_ = result.overlap
        if len(held):
            ensemble = self.ensemble_
            if early:
                ensemble, train = self._build(seed, X), (x[learned], labels[learned])
                recipe = replace(recipe, overlap=result.overlap).shortened(FRACTION)
                quiet = replace(options, quiet=True)
                fit(ensemble, train, recipe=recipe, seed=seed, task=task, options=quiet)
            self.ensemble_.temperature = held_out_temperature(ensemble, (x[held], labels[held]))
        self.specialist_fraction_ = np.array(result.rows[-1]["specialist_fraction"])
        self.specialist_fraction_by_class_ = np.array(result.rows[-1]["specialist_fraction_by_class"])
        return self

    def predict(self, X: Any) -> Array:
        """The class of each example (N,), by the mean of the members' probabilities."""
        return self._classes(self._predict(X).probs)

    def predict_proba(self, X: Any) -> Array:
        """Probabilities (N, C): the mean over members, scaled by `ensemble_.temperature` if there is one."""
        return self._predict(X).probs.numpy()

    def predict_members(self, X: Any) -> Array:
        """The class that each member predicts, (M, N)."""
        return self._classes(self._predict(X).member_probs)

    def predict_members_proba(self, X: Any) -> Array:
        """Each member's probabilities, (M, N, C)."""
        return self._predict(X).member_probs.numpy()

    def _hold_out(self, x: Tensor, targets: Array) -> Sequence[Sequence[int]]:
        """Positions (learned, held) of the examples, both stratified by class."""
        if self.validation == "auto":
            return hold_out(targets.tolist(), identities(x), HELD_OUT, self._split)
        if isinstance(self.validation, str) or not 0 <= self.validation < 1:
            raise ValueError(f"validation must be 'auto' or a fraction below 1. Got {self.validation!r}.")
        rows = range(len(x))
        if not self.validation:
            return rows, ()
        learned: Sequence[Sequence[int]] = train_test_split(
            rows, test_size=self.validation, stratify=targets, random_state=self._split
        )
        return learned

    def _recipe(self) -> Recipe:
        method = ("members", "method", "overlap", "beta", "labels", "rule")
        names = (*method, "epochs", "batch_size", "optimizer", "lr", "weight_decay", "label_smoothing")
        settings = {name: getattr(self, name) for name in names}
        return Recipe(**settings, sharing=self.share_after is not None)

    def _plan(self) -> dict[str, Any]:
        """What the ensemble is built by; a network of the user's own has its own width."""
        names = ("network", "members", "share_after", *(() if self.network else ("hidden",)))
        return {name: getattr(self, name) for name in names}

    def _build(self, seed: int, X: Array) -> Ensemble:
        network = self.network or self._default()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ensemble = Ensemble(network, self.members, share_after=self.share_after)
            # Double for double: then a prediction does not depend on the others in its batch.
            double = X.dtype == np.float64 and find_device(self.device).type == "cpu"
            dtype = torch.float64 if double else torch.float32
            _check_outputs(ensemble.to(dtype), torch.tensor(X[:2], dtype=dtype), len(self.classes_))
        return ensemble

    def _default(self) -> Callable[[], nn.Module]:
        if len(self.shape_) not in (1, 3):
            raise ValueError(
                "X must be vectors (N, features) or images (N, channels, height, width). Got (N, "
                f"{', '.join(map(str, self.shape_))}); pass network= for other shapes."
            )
        hidden = (256 if len(self.shape_) == 1 else 64) if self.hidden is None else self.hidden
        _checks.positive("hidden", hidden)
        # int, because a grid may hold numpy's, which JSON does not know
        return partial(plain, shape=self.shape_, classes=len(self.classes_), hidden=int(hidden))

    def _task(self, y: Array) -> TaskLoss | None:
        if self.class_weight is None:
            return None
        weights = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        like = next(self.ensemble_.parameters())
        on_device = torch.tensor(weights, dtype=like.dtype, device=find_device(self.device))
        smoothing = float(self.label_smoothing)
        return partial(_weighted_cross_entropy, weight=on_device, smoothing=smoothing)

    def _predict(self, X: Any) -> Prediction:
        check_is_fitted(self)
        X = validate_data(self, X, allow_nd=True, reset=False)
        self._check_kind(X)
        return self.ensemble_.predict(self._tensor(X), batch_size=1000)

    def _tensor(self, X: Array) -> Tensor:
        """A copy for torch: raw images stay raw."""
        dtype = None if self.raw_ else next(self.ensemble_.parameters()).dtype
        return torch.tensor(X, dtype=dtype)

    def _classes(self, probs: Tensor) -> Array:
        found: Array = self.classes_[probs.argmax(-1).numpy()]
        return found

    def _check_continues(self, X: Array, classes: Array) -> None:
        """Raise unless `fit` can continue: the same type of examples, classes and network."""
        self._check_kind(X)
        if not np.array_equal(classes, self.classes_):
            raise ValueError(
                f"y must hold the classes of the last fit with warm_start=True, {self.classes_.tolist()}. "
                f"Got {classes.tolist()}."
            )
        built = self._built
        for name, now in self._plan().items():
            if now != built[name]:
                raise ValueError(
                    f"{name} must be as in the fit that warm_start=True continues, {built[name]!r}. "
                    f"Got {now!r}. To start again, fit a clone, or set warm_start=False."
                )

    def _check_kind(self, X: Array) -> None:
        if X.shape[1:] != self.shape_:
            raise ValueError(f"X must have shape (N, {', '.join(map(str, self.shape_))}). Got {X.shape}.")
        if _is_raw(X) != self.raw_:
            kind = "raw, uint8" if self.raw_ else "prepared, not uint8"
            raise ValueError(
                f"X must be images as in fit: {kind}. Got {X.dtype}. Give both the same type, because raw "
                "images are standardised and others are taken as they are."
            )


def _is_raw(X: Array) -> bool:
    return X.dtype == np.uint8 and X.ndim == 4


def _weighted_cross_entropy(logits: Tensor, targets: Tensor, *, weight: Tensor, smoothing: float) -> Tensor:
    # torch's own weight= weighs the smoothed part by the other classes' weights: a rare one gets most of it
    return weight[targets] * F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def _check_outputs(ensemble: Ensemble, x: Tensor, classes: int) -> None:
    """Two examples through the members: a wrong number of outputs would be noticed late, or never."""
    logits = probe("X", ensemble, x)  # (M, 2, outputs)
    if logits.shape[2:] != (classes,):
        got = " x ".join(map(str, logits.shape[2:]))
        raise ValueError(
            f"network must have an output for each of the {classes} classes. Got {got} outputs. Build its "
            f"last layer with {classes}."
        )
