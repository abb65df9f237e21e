"""Calibration reaches its target from below. The cache is never trusted and never causes an error."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpoptim import disk_cache
from dpoptim.privacy import accounting, calibration
from dpoptim.privacy.accounting import GaussianRun, PoissonRun, TruncatedPoissonRun
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.calibration import calibrate, tolerance


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def poisson(rate, steps, adjacency=Adjacency.ZERO_OUT):
    return PoissonRun(sampling_prob=rate, steps=steps, adjacency=adjacency)


RUNS = [
    GaussianRun(sensitivity=math.sqrt(3)),
    GaussianRun(sensitivity=1e3),
    poisson(256 / 60_000, 10_000),
    poisson(0.02, 200, Adjacency.REPLACE),
    poisson(0.7, 3),
]
SLOW_RUNS = [
    poisson(2048 / 1_700_000, 2000, Adjacency.ADD_REMOVE),
    TruncatedPoissonRun(
        sampling_prob=0.01, steps=100, adjacency=Adjacency.ZERO_OUT, num_examples=5000, max_batch_size=80
    ),
]


@pytest.mark.parametrize(
    ("run", "target"),
    [
        *zip(RUNS, [0.5, 8.0, 0.5, 8.0, 0.5], strict=True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in zip(SLOW_RUNS, [8.0, 0.5], strict=True)),
    ],
    ids=repr,
)
def test_meets_the_target_from_below(run, target, monkeypatch):
    monkeypatch.setattr(disk_cache, "load", lambda *inputs: None)
    multiplier = calibrate(run, epsilon=target, delta=1e-6)
    achieved = accounting.epsilon(run, noise_multiplier=multiplier, delta=1e-6)
    assert target - 1e-4 <= achieved <= target


@pytest.mark.slow
def test_extreme_targets():
    run = poisson(0.01, 100)
    for target in (0.01, 100.0):
        achieved = accounting.epsilon(run, noise_multiplier=calibrate(run, epsilon=target, delta=1e-6), delta=1e-6)
        assert target - tolerance(target) <= achieved <= target
    assert calibrate(run, epsilon=math.inf, delta=1e-6) == 0.0
    with pytest.raises(ValueError, match="smaller epsilon"):
        calibrate(poisson(0.4, 1), epsilon=1.0, delta=0.5)


@pytest.mark.parametrize("target", [501.0, 1e3, 1e6])
@pytest.mark.parametrize("run", [poisson(0.1, 30), poisson(0.01, 1000, Adjacency.REPLACE), SLOW_RUNS[1]], ids=repr)
def test_sampled_targets_beyond_float64_are_refused_at_once(run, target, monkeypatch):
    monkeypatch.setattr(accounting, "epsilon", lambda *args, **named: pytest.fail("a search began"))
    with pytest.raises(ValueError, match=r"> 500 .*smaller epsilon, Shuffled\(\) sampling"):
        calibrate(run, epsilon=target, delta=1e-7)


@pytest.mark.parametrize("target", [50.0, 300.0, 500.0])
def test_large_targets_are_met(target):
    for run in (poisson(0.1, 30), GaussianRun(sensitivity=3.0)):
        achieved = accounting.epsilon(run, noise_multiplier=calibrate(run, epsilon=target, delta=1e-7), delta=1e-7)
        assert target - 1e-4 <= achieved <= target


@pytest.mark.parametrize(("target", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (math.nan, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_bad_targets_are_named(target, delta):
    with pytest.raises(ValueError, match="epsilon" if not target > 0 else "delta"):
        calibrate(poisson(0.1, 10), epsilon=target, delta=delta)


def _count_searches(monkeypatch):
    calls = []
    search = calibration._coarse_root

    def counted(*args):
        calls.append(args)
        return search(*args)

    monkeypatch.setattr(calibration, "_coarse_root", counted)
    return calls


def test_second_calibration_comes_from_the_cache(cache_dir, monkeypatch):
    calls = _count_searches(monkeypatch)
    run = poisson(0.05, 50)
    first = calibrate(run, epsilon=2.0, delta=1e-6)
    (file,) = cache_dir.iterdir()
    assert np.load(file)["values"].tolist() == [first]
    assert calibrate(run, epsilon=2.0, delta=1e-6) == first
    assert len(calls) == 1
    calibrate(run, epsilon=2.0, delta=1e-5)
    calibrate(poisson(0.05, 50, Adjacency.REPLACE), epsilon=2.0, delta=1e-6)
    monkeypatch.setattr(accounting, "ACCOUNTING_VERSION", 999)
    calibrate(run, epsilon=2.0, delta=1e-6)
    assert len(calls) == 4


def test_a_corrupt_entry_is_replaced(cache_dir):
    run = poisson(0.05, 50)
    first = calibrate(run, epsilon=2.0, delta=1e-6)
    (file,) = cache_dir.iterdir()
    file.write_text("null")
    assert calibrate(run, epsilon=2.0, delta=1e-6) == first
    assert np.load(file)["values"].tolist() == [first]


@pytest.mark.parametrize("forged", [[0.5], [1.5], [-1.0], [0.0], [1.0, 1.0], []])
def test_a_forged_entry_is_ignored(cache_dir, forged):
    run = poisson(0.05, 50)
    first = calibrate(run, epsilon=2.0, delta=1e-6)
    (file,) = cache_dir.iterdir()
    inputs = np.load(file)["inputs"]
    np.savez(file, inputs=inputs, values=np.array(forged) * first)
    assert calibrate(run, epsilon=2.0, delta=1e-6) == first


def test_an_entry_just_above_the_target_is_not_used(cache_dir):
    run = poisson(0.05, 50)
    calibrate(run, epsilon=2.0, delta=1e-6)
    (file,) = cache_dir.iterdir()
    too_little = calibrate(run, epsilon=2.0 + tolerance(2.0), delta=1e-6)
    np.savez(file, inputs=np.load(file)["inputs"], values=np.array([too_little]))
    found = calibrate(run, epsilon=2.0, delta=1e-6)
    assert accounting.epsilon(run, noise_multiplier=found, delta=1e-6) <= 2.0


def test_a_true_entry_is_used(cache_dir, monkeypatch):
    run = poisson(0.05, 50)
    first = calibrate(run, epsilon=2.0, delta=1e-6)
    monkeypatch.setattr(calibration, "refine", None)
    assert calibrate(run, epsilon=2.0, delta=1e-6) == first
    assert disk_cache.cache_dir() == cache_dir
