"""Private classifiers and regressors with the conventions of scikit-learn.

    classifier = DPClassifier(epsilon=3.0, bounds=(low, high)).fit(X, y)
    print(classifier.score(X_test, y_test), classifier.statement())

Bounds are required and must be public. They are never read from the data, not even with a warning: that would void the
guarantee, and notebooks and pipelines hide warnings. In front of the estimator, use only transformers that learn
nothing from the data or are fitted on public data: `OneHotEncoder(categories=[...])`, not `StandardScaler`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import StackDataset

from dpoptim.arguments import check_choice, check_number, default_delta
from dpoptim.data import private_loader
from dpoptim.integrations import tables
from dpoptim.integrations.named_settings import has_correlated_noise, make_optimizer, make_plan, steps_of
from dpoptim.integrations.optional import require
from dpoptim.noise import NoiseKey
from dpoptim.privacy import Adjacency, PrivacyPlan

_base: Any = require("sklearn.base", "dpoptim.integrations.sklearn")
_validation: Any = require("sklearn.utils.validation", "dpoptim.integrations.sklearn")
_multiclass: Any = require("sklearn.utils.multiclass", "dpoptim.integrations.sklearn")
_Estimator: Any = _base.BaseEstimator
_Classifier: Any = _base.ClassifierMixin
_Regressor: Any = _base.RegressorMixin

__all__ = ["DPClassifier", "DPRegressor"]

_FEWEST = 8  # fewer examples do not fill the eight batches of an epoch
_ROWS_AT_ONCE = 1024
_FORM = "(low, high): two numbers, or two lists, all lows and then all highs"


@dataclass(eq=False, repr=False)
class _DPEstimator(_Estimator):
    """What both estimators share. Each `fit` is a separate run: ε adds up over fits on the same data."""

    epsilon: float = 1.0
    delta: float | None = None
    _: KW_ONLY
    bounds: Any = None
    model: str = "mlp"
    width: int = tables.WIDTH
    epochs: float = tables.EPOCHS
    batch_size: int | None = None
    learning_rate: float | None = None
    clip_norm: float | None = None
    noise: str = "auto"
    sampling: str = "shuffled"
    adjacency: str = "zero_out"
    random_state: Any = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = True
        return tags

    def statement(self) -> str:
        """Return the privacy statement of the last fit."""
        _validation.check_is_fitted(self)
        plan: PrivacyPlan = self.plan_
        public = "The bounds of columns and targets and the names of classes are public."
        return f"{plan.statement()}\n  - {public}\n  - Each fit on these records is a separate run, and their ε add up."

    def _features(self, X: NDArray[np.float64]) -> Tensor:
        """Each row by itself: columns scaled from their bounds to [−2, 2], with one more column for missing values."""
        center, scale = _scale("bounds", self.bounds, columns=X.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.clip((X - center) / scale, -2.0, 2.0)
        absent = np.isnan(X)
        return torch.from_numpy(np.concatenate([np.where(absent, 0.0, scaled), absent], axis=1).astype(np.float32))

    def _train(
        self, X: NDArray[np.float64], targets: Tensor, outputs: int, losses: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Make the plan and the model, and train it privately."""
        check_choice("model", self.model, tables.MODELS)
        check_number("epsilon", self.epsilon, above=0)
        check_choice("adjacency", self.adjacency, ("zero_out", "replace"))  # add-remove hides the number of examples
        features, count = self._features(X), len(X)
        batch_size = self.batch_size or tables.batch_size_for(count)
        seed = int(_validation.check_random_state(self.random_state).randint(2**31))  # of the weights, never of noise
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = tables.table_model(self.model, columns=features.shape[1], outputs=outputs, width=self.width)
        plan = make_plan(
            num_examples=count, batch_size=batch_size, epsilon=self.epsilon, noise_multiplier=None,
            steps=steps_of(self.epochs, count, batch_size),
            clip_norm=self.clip_norm or tables.CLIP_NORMS[self.model],
            sampling=self.sampling, noise=self.noise, adjacency=Adjacency(self.adjacency),
            delta=default_delta(count) if self.delta is None else self.delta, parameters=model,
        )  # fmt: skip
        outlook = plan.outlook(parameters=sum(parameter.numel() for parameter in model.parameters()))
        if outlook.verdict != "good":
            warnings.warn(f"outlook {outlook}", stacklevel=3)
        is_correlated = has_correlated_noise(self.noise, self.sampling)
        rate = self.learning_rate or tables.learning_rate_for(is_correlated=is_correlated)
        key = NoiseKey.generate()
        optimizer = make_optimizer(
            "scale_then_privatize", model, plan, learning_rate=rate, betas=(0.9, 0.999), eps=None, eps_scale=None,
            weight_decay=0.0, key=key,
        )  # fmt: skip
        dataset: Any = StackDataset(features, targets)  # type: ignore[arg-type]
        loader = private_loader(dataset, plan, key=key, micro_batch_size=_ROWS_AT_ONCE)
        for rows, labels in loader:
            step = optimizer.mechanism.step
            factor = tables.schedule_factor(step, steps=plan.steps, warmup=tables.WARMUP, schedule="linear")
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            losses(model(rows), labels).sum().backward()
            if loader.step_ends:
                optimizer.step()
        self.plan_, self.n_iter_ = optimizer.plan, plan.steps
        optimizer.detach()
        self.model_ = model.eval()

    def _outputs(self, X: ArrayLike) -> Tensor:
        _validation.check_is_fitted(self)
        checked = _validation.validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        with torch.no_grad():
            found: Tensor = self.model_(self._features(checked))
        return found

    def _checked(self, X: ArrayLike, y: ArrayLike, **named: Any) -> Any:
        named |= {"dtype": np.float64, "ensure_all_finite": "allow-nan", "ensure_min_samples": _FEWEST}
        return _validation.validate_data(self, X, y, **named)


class DPClassifier(_Classifier, _DPEstimator):
    """A private classifier with the conventions of scikit-learn.

    Args:
        epsilon: ε of one fit.
        delta: δ of one fit. Defaults to a power of ten, at most 1/(10·examples).
        bounds: The public range of the columns, (low, high): two numbers, or two lists, all lows and then all highs.
            Values outside count as the nearest bound. NaN counts as missing.
        model: "mlp", with one hidden layer, or "linear", for logistic regression.
        width: The hidden units of "mlp".
        epochs: The number of passes over the data.
        batch_size: The expected batch size. Defaults to a power of two, at most examples/8 and 2048.
        learning_rate: The largest learning rate. Defaults to 0.1, or 0.03 with independent noise.
        clip_norm: The bound on the norm of one example's gradient. Defaults to 3 for "mlp" and 1 for "linear".
        noise: The kind of noise, as in `dpoptim train`.
        sampling: As in `dpoptim train`; with "auto", batches are secret if the noise has a proof for it.
        adjacency: "zero_out" or "replace": which datasets are neighbours. The number of examples is public.
        random_state: The seed of the starting weights. Noise and batches are secret and never repeat.

    Attributes:
        classes_: The classes in y, which are taken to be public.
        plan_: The privacy plan of the fit.
        model_: The trained torch module.

    Guarantee: a fitted estimator satisfies `statement()`, if the bounds and the classes are public.

    >>> X = np.random.default_rng(0).normal(size=(500, 2))
    >>> y = X[:, 0] > 0
    >>> fitted = DPClassifier(epsilon=8.0, bounds=(-3, 3), model="linear", sampling="poisson", noise="independent")
    >>> fitted.fit(X[:400], y[:400]).score(X[400:], y[400:]) > 0.8
    True
    >>> print(fitted.statement().splitlines()[0])
    Differentially private: epsilon = 8.0000 at delta = 0.0001
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train on the examples; the earlier fit is forgotten, but its ε is spent."""
        rows, labels = self._checked(X, y)
        _multiclass.check_classification_targets(labels)
        self.classes_, places = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_.tolist()[0]!r}; a classifier needs two or more classes")
        targets, losses = torch.from_numpy(places.astype(np.int64)), partial(cross_entropy, reduction="none")
        self._train(rows, targets, len(self.classes_), losses)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the probability of each class, [examples, classes]."""
        return self._outputs(X).double().softmax(1).numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable class of each example."""
        places = self._outputs(X).argmax(1).numpy()
        found: NDArray[Any] = self.classes_[places]
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # on the few examples of scikit-learn's checks, noise outweighs them
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class DPRegressor(_Regressor, _DPEstimator):
    """A private regressor with the conventions of scikit-learn.

    It takes the arguments of `DPClassifier`, and one more:

    Args:
        target_bounds: The public range of y, (low, high); values outside count as the nearest bound.

    Guarantee: a fitted estimator satisfies `statement()`, if all bounds are public.

    >>> X = np.random.default_rng(0).normal(size=(500, 2))
    >>> own = dict(bounds=(-3, 3), target_bounds=(-5, 5), model="linear", sampling="poisson", noise="independent")
    >>> model = DPRegressor(epsilon=8.0, **own)
    >>> y = X[:, 0] - X[:, 1]
    >>> model.fit(X[:400], y[:400]).score(X[400:], y[400:]) > 0.7
    True
    """

    target_bounds: Any = None

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train on the examples; the earlier fit is forgotten, but its ε is spent."""
        rows, numbers = self._checked(X, y, y_numeric=True)
        center, scale = _scale("target_bounds", self.target_bounds)
        scaled = np.clip((np.asarray(numbers, dtype=np.float64) - center) / scale, -2.0, 2.0).astype(np.float32)
        self._train(rows, torch.from_numpy(scaled), 1, lambda outputs, labels: (outputs[:, 0] - labels).square())
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the predicted number of each example."""
        outputs = self._outputs(X)[:, 0].double().numpy()
        center, scale = _scale("target_bounds", self.target_bounds)
        return np.asarray(outputs * scale + center)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags


def _scale(name: str, given: Any, *, columns: int | None = None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the center and the scale that take public bounds to [−2, 2]: one of each, or one per column."""
    if given is None:
        raise ValueError(
            f"{name} is missing: give the public range, such as {name}=(0, 120). It is not read from the data, because "
            "that would not be private."
        )
    try:
        low, high = (np.asarray(one, dtype=np.float64) for one in given)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={given!r} must be {_FORM}") from None
    if columns == 2 and isinstance(given, list) and all(isinstance(one, tuple) for one in given):
        raise ValueError(f"{name}={given!r} may mean one pair per column. Give a tuple, {_FORM}")
    shapes, allowed = [()] if columns is None else [(), (columns,)], "" if columns is None else f" or {columns}"
    if low.shape not in shapes or high.shape not in shapes or not np.isfinite(high - low).all() or (low >= high).any():
        raise ValueError(f"{name}={given!r} must be finite, with low < high: one number for each{allowed}")
    return (low + high) / 2, (high - low) / 4
