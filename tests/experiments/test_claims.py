"""The claims' simulations against brute force, and their limits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpoptim.noise import BandedToeplitz, DecayedSums, Independent, NormalSource
from dpoptim.noise.search.objective import workload_matrix
from dpoptim.theory import averaging_gain
from dpoptim.theory.second_moments import squared_weight
from experiments import results_file
from experiments.claims import cells as claims
from experiments.claims import report, simulations
from experiments.quadratic.problem import TENSOR, WITH_PUBLIC_DATA, Quadratic, simulate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMITTED = results_file.read(ROOT / "results" / "claims.jsonl").lines


def committed(quantity: str, **settings: Any) -> list[results_file.Line]:
    found = [line for line in COMMITTED if line["cell"]["quantity"] == quantity]
    return [line for line in found if settings.items() <= line["cell"].items()]


@pytest.mark.parametrize("beta2", [0.5, 0.9])
def test_averaging_gain_by_its_definition(beta2):
    """From dense matrices, for a strategy whose columns do not have norm 1; 1 for independent noise."""
    strategy = BandedToeplitz(bands=4).optimize(steps=7)
    workload = workload_matrix(DecayedSums(beta=beta2, debiased=False), 7)
    noise = workload @ np.linalg.inv(strategy.strategy_matrix()) * strategy.column_norm
    expected = np.linalg.norm(workload) / np.linalg.norm(noise)
    assert averaging_gain(strategy, beta2=beta2) == pytest.approx(expected)
    assert averaging_gain(Independent().optimize(steps=7), beta2=beta2) == pytest.approx(1.0)
    np.testing.assert_allclose(simulations.decayed_sums(beta2=beta2, steps=7), workload, atol=1e-15)


def test_no_toeplitz_strategy_gains_more_than_the_optimal_one():
    """Brute force finds the same gain, random strategies have less, and the bound holds for all."""
    for line in committed("decayed sums", case="brute force"):
        result = line["result"]
        assert result["predicted"] == pytest.approx(result["simulated"], rel=1e-6)
        assert result["predicted"] < result["bound"]
        again = claims.compute(line["cell"]).result
        for name in ("predicted", "simulated", "bound"):
            assert again[name] == pytest.approx(result[name], rel=1e-6)
    best, rng = simulations.best_gain(beta2=0.8, steps=4), np.random.default_rng(0)
    workload = simulations.decayed_sums(beta2=0.8, steps=4)
    for _ in range(200):
        dense = np.tril(rng.standard_normal((4, 4))) + 3 * np.eye(4)
        noise = workload @ np.linalg.inv(dense) * np.linalg.norm(dense, axis=0).max()
        gain = np.linalg.norm(workload) / np.linalg.norm(noise)
        assert gain < simulations.gain_bound(beta2=0.8, steps=4)
        column = np.concatenate([[1.0], 0.5 * rng.standard_normal(3)])
        toeplitz = sum(np.diag(np.full(4 - k, x), -k) for k, x in enumerate(column))
        noise = workload @ np.linalg.inv(toeplitz) * np.linalg.norm(column)
        assert np.linalg.norm(workload) / np.linalg.norm(noise) < best * (1 + 1e-9)


def test_simulated_gains_agree():
    """Within four standard errors; 6.9 for decayed sums, under 7.01; bias correction is louder."""
    for line in committed("decayed sums"):
        result = line["result"]
        if result["standard_error"] is not None:
            assert abs(result["simulated"] - result["predicted"]) < 4 * result["standard_error"]
    (best,) = (line["result"] for line in committed("decayed sums", case="decayed sums"))
    (square,) = (line["result"] for line in committed("decayed sums", case="square of decayed sums"))
    assert best["predicted"] == pytest.approx(6.9, abs=0.01)
    assert best["predicted"] < best["bound"] < 7.02
    assert square["simulated"] < 0.3
    for gain, condition in ((1.0, 0.1495), (best["predicted"], 0.0569)):  # c in B/σ ≥ c·√m is κ^¼/√gain
        assert math.sqrt(math.sqrt(squared_weight(beta=0.999)) / gain) == pytest.approx(condition, abs=1e-4)
    shorter = claims.compute(committed("decayed sums", case="decayed sums")[0]["cell"] | {"steps": 300, "draws": 300})
    assert abs(shorter.result["simulated"] - shorter.result["predicted"]) < 4 * shorter.result["standard_error"]


def test_same_gradients_have_the_same_distribution():
    """The first release, by variant: covariance with privacy noise and with data noise, 200,000 draws, s.e. .3 %."""
    for variant, noise in (("post_processing", 0.3), ("scale_then_privatize", 0.6)):
        rng, c = np.random.default_rng(0), np.array([1.0, 0.1])
        x, z = rng.standard_normal((2, 200_000, 2))
        scaled = variant == "scale_then_privatize"
        steady = c**2 / (1 - noise**2)  # of ν̂ at θ = 0
        release = c * x + noise * z * (np.sqrt(steady) if scaled else 1.0)
        data = c * np.sqrt(1 / (1 - noise**2) if scaled else (c**2 + noise**2) / c**2)
        np.testing.assert_allclose(release.var(0), data**2, rtol=0.015)


def test_a_noiseless_preconditioner_alone_tells_the_pair_apart():
    found = report.pairs(committed("same gradients"))
    assert set(found) == {"noiseless_preconditioner", "post_processing", "scale_then_privatize"}
    for variant, (private, data) in found.items():
        close = abs(math.log(private["preconditioner_ratio"] / data["preconditioner_ratio"])) < 0.02
        assert close == (variant != "noiseless_preconditioner")
        assert (report.apart(private, data) < 4) == (variant != "noiseless_preconditioner")
    for ratio, variant in ((10, "post_processing"), (100, "scale_then_privatize")):
        assert found[variant][0]["preconditioner_ratio"] == pytest.approx(ratio, rel=0.01)
    for line in committed("same gradients", noise_from="data"):
        assert claims.compute(line["cell"]).result == pytest.approx(line["result"], rel=1e-6)


@pytest.mark.parametrize("variant", ["post_processing", "scale_then_privatize"])
def test_second_moments_of_the_pair_are_equal(variant):
    """Both have the same ν̂, and not only the same ratio, within 10 %: scaled noise makes ν̂ forget its start slowly."""
    (line,) = committed("same gradients", variant=variant, noise_from="data")
    cell = line["cell"]
    given = {name: cell[name] for name in ("noise", "lr", "repeats", "curvatures", "betas", "seed")}
    found = [
        simulations.same_gradients(variant, private=private, steps=3000, **given).second_moments
        for private in (True, False)
    ]
    assert found[0] == pytest.approx(found[1], rel=0.1)


def test_without_noise_the_pair_is_one_problem():
    given: dict[str, Any] = {"curvatures": (1.0, 0.1), "noise": 0.0, "lr": 0.01, "steps": 50, "repeats": 5, "seed": 3,
                             "betas": (0.9, 0.99)}  # fmt: skip
    found = {
        simulations.same_gradients(variant, private=private, **given)
        for variant in ("noiseless_preconditioner", "post_processing", "scale_then_privatize")
        for private in (True, False)
    }
    assert len(found) == 1


@pytest.mark.parametrize("scaled", [True, False])
def test_second_moments_step_by_step(scaled):
    """Two coordinates and three steps, written out."""
    gradient, noising = np.array([[1.0, 2.0], [0.5, 4.0], [1.0, 1.0]]), np.array([[1, 0, 0], [0.5, 1, 0], [0, 0.5, 1]])
    path = simulations.second_moments(
        gradient, noising, scaled=scaled, clip_norm=1.2, noise_over_batch=0.1, beta2=0.9, seed=5
    )
    z = np.random.default_rng(5).standard_normal((3, 2))
    rows = [z[0], 0.5 * z[0] + z[1], 0.5 * z[1] + z[2]]
    nu, nu_hat = np.zeros(2), np.array([1.0, 4.0])
    for t in range(3):
        if scaled:
            s = nu_hat**-0.5
            shrink = min(1.0, 1.2 / math.hypot(*(s * gradient[t])))
            noisy = gradient[t] * shrink + 0.12 * rows[t] / s
        else:
            noisy = gradient[t] + 0.1 * math.hypot(0.5, 4.0) * rows[t]
        nu = 0.9 * nu + 0.1 * noisy**2
        nu_hat = nu / (1 - 0.9 ** (t + 1))
        np.testing.assert_allclose(path[t + 1], nu_hat)


def test_excess_error_is_relative_to_a_bound():
    """1 for one step; 1 or more for any strategy; a scaled workload has the same excess."""
    strategy = BandedToeplitz(bands=30).optimize(steps=30)
    noising = strategy.noising_matrix() * strategy.column_norm
    assert simulations.excess_error(np.eye(1), np.array([3.0])) == pytest.approx(1.0)
    plain = simulations.excess_error(noising, np.ones(30))
    assert 1.0 < plain < 1.15 < simulations.excess_error(np.eye(30), np.ones(30))
    assert simulations.excess_error(noising, np.full(30, 7.0)) == pytest.approx(plain)
    assert simulations.excess_error(noising, np.geomspace(1, 1000, 30)) > 1.0


def test_a_committed_ratio_is_reproduced():
    (line,) = committed("ratio", profile="random sizes")
    again = claims.compute(line["cell"]).result
    for name in ("quantiles", "scaled_excess", "plain_excess", "constant_excess"):
        assert again[name] == pytest.approx(line["result"][name], rel=1e-6)


# Public data on the quadratic.

SMALL = Quadratic(spread=1.0, steps=8, repeats=3, clip_norm=0.5, noise_multiplier=0.0, batch_size=4, public_examples=2)


def test_side_information_divides_by_the_public_moment():
    """Without noise and momentum: θ ← θ − lr·clipped average/(√ν̂_pub + ε), with the simulation's own normals."""
    problem = dataclasses.replace(SMALL, betas=(0.0, 0.9), steps=2, public_spread=(0.5, 2.0))
    path = simulate(problem, "side_information")
    before = simulate(dataclasses.replace(problem, steps=1), "side_information").final
    public = [draws(problem, "public", t).mean(1) * [0.5, 2.0] for t in (0, 1)]
    curvatures = np.array(problem.curvatures)
    squares = [(curvatures * (theta - p)) ** 2 for theta, p in zip((np.ones((3, 2)), before), public, strict=True)]
    nu_hat = (0.09 * squares[0] + 0.1 * squares[1]) / 0.19
    gradients = curvatures * (before[:, None] - draws(problem, "examples", 1))
    norms = np.linalg.norm(gradients, axis=2, keepdims=True)
    average = (gradients * np.minimum(1, 0.5 / norms)).mean(1)
    np.testing.assert_allclose(path.final, before - problem.lr * average / (np.sqrt(nu_hat) + 1e-8))


def test_adadps_clips_and_steps_in_the_public_scale():
    problem = dataclasses.replace(SMALL, betas=(0.0, 0.9), steps=1)
    path = simulate(problem, "adadps")
    curvatures, theta = np.array(problem.curvatures), np.ones((3, 2))
    moment = 0.1 * (curvatures * (theta - draws(problem, "public", 0).mean(1))) ** 2
    scale = 1 / np.sqrt(moment + 1e-8)
    gradients = curvatures * (theta[:, None] - draws(problem, "examples", 0))
    norms = np.linalg.norm(gradients * scale[:, None], axis=2, keepdims=True)
    average = (gradients * np.minimum(1, 0.5 / norms)).mean(1)
    np.testing.assert_allclose(path.final, theta - problem.lr * average * scale)


def draws(problem: Quadratic, stream: str, step: int) -> np.ndarray:
    """[repeats, examples, 2], the normals of a step."""
    count = problem.batch_size if stream == "examples" else problem.public_examples
    source = NormalSource.of_tensor(problem.key, TENSOR, numel=problem.repeats * count * 2, stream=stream)
    return source.normals(step, dtype=torch.float64).view(problem.repeats, count, 2).numpy()


def test_public_data_help_before_clipping_only():
    """The order on the page, from the committed lines; every variant with public data was run with both kinds."""
    losses = {
        (line["cell"]["variant"], line["cell"]["public_spread"] is None): line["result"]["loss"]
        for line in committed("side information")
    }
    for variant in WITH_PUBLIC_DATA:
        assert losses[variant, True] < losses[variant, False]
    assert losses["adadps", True] < losses["scale_then_privatize", True] < losses["adadps", False]
    assert losses["adadps", False] < losses["post_processing", True] < losses["side_information", True]
