"""The scikit-learn estimators: its own checks, privacy of what is read from the data, and agreement with the plan."""

from __future__ import annotations

import pickle
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.estimator_checks import check_estimator

from dpoptim.integrations.sklearn import DPClassifier, DPRegressor
from dpoptim.privacy import Poisson

FAST: dict[str, Any] = {"noise": "independent", "sampling": "shuffled", "epochs": 2}
ESTIMATORS = [
    DPClassifier(epsilon=8.0, bounds=(-5, 5), **FAST),
    DPRegressor(epsilon=8.0, bounds=(-5, 5), target_bounds=(-10, 10), **FAST),
]
TWO_FITS = "it compares two fits, and the noise of each is secret and new"
MAY_FAIL = dict.fromkeys(
    (
        "check_fit_idempotent",
        "check_supervised_y_2d",
        "check_regressors_int",
        "check_regressor_data_not_an_array",
        "check_classifier_data_not_an_array",
    ),
    TWO_FITS,
)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda one: type(one).__name__)
def test_scikit_learns_own_checks(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, expected_failed_checks=MAY_FAIL, on_fail=None, on_skip=None)
    failed = {one["check_name"]: one["exception"] for one in results if one["status"] == "failed"}
    assert not failed
    assert len(results) > 40
    assert {one["check_name"] for one in results if one["status"] == "xfail"}, "noise is new in each fit"


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(0).normal(size=(600, 3))
    return X, np.where(X[:, 0] + X[:, 1] > 0, "well", "ill")


def made(**changes: Any) -> DPClassifier:
    fast = {"model": "linear", "sampling": "poisson", "noise": "independent"}
    return DPClassifier(**{"epsilon": 8.0, "bounds": (-3, 3), **fast, **changes})


def test_a_classifier_learns_and_states_its_guarantee(rows):
    X, y = rows
    fitted = made(random_state=0).fit(X, y)
    assert fitted.score(X, y) > 0.9
    probabilities = fitted.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1.0)
    assert (fitted.classes_[probabilities.argmax(1)] == fitted.predict(X)).all()
    assert 7.99 < fitted.plan_.epsilon() <= 8.0
    assert fitted.plan_.num_examples == 600
    assert isinstance(fitted.plan_.sampling, Poisson)
    text = fitted.statement()
    assert text.startswith("Differentially private: epsilon = 8.0000 at delta = 0.0001")
    assert "The bounds of columns and targets and the names of classes are public." in text


def test_a_regressor_predicts_in_its_own_unit():
    X = np.random.default_rng(1).uniform(0, 10, size=(2000, 2))
    y = 100 + 3 * X[:, 0] - X[:, 1]
    bounds = ([0, 0], [10, 10])
    fitted = DPRegressor(epsilon=8.0, bounds=bounds, target_bounds=(80, 140), model="linear", **FAST).set_params(
        epochs=20
    )
    assert fitted.fit(X, y).score(X, y) > 0.9
    assert 85 < fitted.predict(X).min() < fitted.predict(X).max() < 135


@pytest.mark.parametrize(
    ("estimator", "named"),
    [
        (made(bounds=None), "bounds is missing: give the public range"),
        (made(bounds=3), r"bounds=3 must be \(low, high\)"),
        (made(bounds=([0, 0], [1, 1])), "with low < high: one number for each or 3"),
        (made(bounds=(1, 1)), r"bounds=\(1, 1\) must be finite, with low < high"),
        (made(bounds=(-np.inf, 1)), r"bounds=\(-inf, 1\) must be finite"),
        (made(epsilon=0), "Expected epsilon > 0, got 0"),
        (made(model="forest"), "Expected model to be one of 'mlp', 'linear'"),
        (made(adjacency="add_remove"), "Expected adjacency to be one of 'zero_out', 'replace'"),
        (made(delta=0.01), "delta=0.01 is not below 1/600"),
    ],
)
def test_bad_parameters_are_refused_when_fitting(rows, estimator, named):
    with pytest.raises(ValueError, match=named):
        estimator.fit(*rows)
    assert not hasattr(estimator, "plan_")


def test_target_bounds_are_never_read_from_the_data():
    with pytest.raises(ValueError, match="target_bounds is missing"):
        DPRegressor(bounds=(0, 1), **FAST).fit(np.zeros((20, 1)), np.arange(20.0))
    with pytest.raises(ValueError, match=r"target_bounds=\(3, 3\) must be finite, with low < high: one number"):
        DPRegressor(bounds=(0, 1), target_bounds=(3, 3), **FAST).fit(np.zeros((20, 1)), np.arange(20.0))


def test_a_row_is_encoded_by_itself(rows):
    """Neither scaling nor the slots for missing values may depend on other rows."""
    estimator = made(bounds=([-1, 0, -2], [1, 4, 2]))
    X = np.where(np.random.default_rng(2).random((50, 3)) < 0.2, np.nan, rows[0][:50])
    together = estimator._features(X)
    assert together.shape == (50, 6)
    assert together.abs().max() <= 2
    assert torch.equal(torch.cat([estimator._features(row[None]) for row in X]), together)
    assert torch.equal(together[:, 3:], torch.from_numpy(np.isnan(X)).float())
    np.testing.assert_allclose(estimator._features(np.array([[0.5, 1.0, 9.0]]))[0, :3], [1.0, -1.0, 2.0])


def test_the_seed_decides_weights_but_not_noise(rows):
    def weights(seed: int, *, learning_rate: float) -> torch.Tensor:
        fitted = made(random_state=seed, epochs=1, learning_rate=learning_rate).fit(*rows)
        return torch.cat([p.detach().flatten() for p in fitted.model_.parameters()])

    start = weights(0, learning_rate=1e-12)
    torch.testing.assert_close(weights(0, learning_rate=1e-12), start)
    assert not torch.allclose(weights(1, learning_rate=1e-12), start)
    assert not torch.allclose(weights(0, learning_rate=0.1), weights(0, learning_rate=0.1))


def test_it_works_with_clone_pickle_pipelines_and_cross_validation(rows):
    X, y = rows
    estimator = made(epochs=5)
    assert clone(estimator).get_params() == estimator.get_params()
    fitted = estimator.fit(X, y)
    copied = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copied.predict_proba(X), fitted.predict_proba(X))
    assert copied.statement() == fitted.statement()
    assert cross_val_score(made(epochs=5), X, y, cv=2).mean() > 0.7
    wards = np.random.default_rng(3).choice(["a", "b"], size=(600, 1))
    encoder = OneHotEncoder(categories=[["a", "b", "c"]], sparse_output=False)
    pipeline = make_pipeline(encoder, made(bounds=(0, 1), epochs=10)).fit(wards, wards[:, 0])
    assert pipeline.score(wards, wards[:, 0]) > 0.9


def test_a_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "dpoptim.integrations.sklearn")
    with pytest.raises(ValueError, match=r"needs the package scikit-learn; run: pip install 'dpoptim\[sklearn\]'"):
        __import__("dpoptim.integrations.sklearn")
