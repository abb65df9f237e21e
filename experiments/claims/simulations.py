"""The simulations behind the claims. They use numpy and no formula of `dpoptim.theory`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from dpoptim.noise.series import Series

Matrix = npt.NDArray[np.float64]


class Pair(NamedTuple):
    """Adam on one quadratic: the flat coordinate's preconditioner over the steep one's, its size, and the mean loss."""

    ratio: float
    flat_rms: float
    loss: float
    standard_error: float
    second_moments: tuple[float, float]


def same_gradients(
    variant: str, *, private: bool, curvatures: tuple[float, float], noise: float, lr: float, steps: int, repeats: int,
    seed: int, betas: tuple[float, float],
) -> Pair:  # fmt: skip
    """Adam on f(θ) = ½Σc_iθ_i² from (1, 1), one example x ~ N(0, V) per step, nothing clipped.

    If `private`, V = I, and the release is that of the variant. Else nothing is added, and V is such that the gradient
    has the same distribution as that release has, for scale-then-privatize in its steady state. `noise` is σ, for
    scale-then-privatize √φ = ζσ/B.

    Everything is a mean over the second half of the steps.
    """
    rng, c = np.random.default_rng(seed), np.array(curvatures)
    scaled = variant == "scale_then_privatize"
    variance = np.ones(2)
    if not private:  # c²V = c²/(1 − φ), where scaled noise leaves ν̂ steady; or c²V = c² + σ²
        variance = variance / (1 - noise**2) if scaled else (c**2 + noise**2) / c**2
    theta, mu, nu = np.ones((repeats, 2)), np.zeros((repeats, 2)), np.zeros((repeats, 2))
    nu_hat = np.broadcast_to(c**2, nu.shape)
    losses, moments, flat = np.zeros(repeats), np.zeros(2), 0.0
    for t in range(1, steps + 1):
        gradient = c * (theta - np.sqrt(variance) * rng.standard_normal((repeats, 2)))
        z = rng.standard_normal((repeats, 2))
        noisy = gradient + private * noise * z * (np.sqrt(nu_hat) if scaled else 1.0)
        seen = gradient if variant == "noiseless_preconditioner" else noisy
        mu = betas[0] * mu + (1 - betas[0]) * noisy
        nu = betas[1] * nu + (1 - betas[1]) * seen**2
        nu_hat = nu / (1 - betas[1] ** t)
        theta = theta - lr * mu / (1 - betas[0] ** t) / np.sqrt(nu_hat)
        if t > steps // 2:
            losses += theta**2 @ c / 2
            moments += nu_hat.mean(0)
            flat += float((theta[:, 1] ** 2).mean())
    losses, flat = losses / (steps - steps // 2), flat / (steps - steps // 2)
    error = float(losses.std(ddof=1) / math.sqrt(repeats))
    steep, level = (float(x) for x in moments / (steps - steps // 2))
    return Pair(math.sqrt(steep / level), math.sqrt(flat), float(losses.mean()), error, (steep, level))


def decayed_sums(*, beta2: float, steps: int) -> Matrix:
    """A with A_ti = (1−β₂)β₂^{t−i}, without debiasing."""
    lags = np.arange(steps)[:, None] - np.arange(steps)
    return np.asarray(np.where(lags >= 0, (1 - beta2) * beta2 ** np.maximum(lags, 0), 0.0))


def best_gain(*, beta2: float, steps: int) -> float:
    """By brute force over lower triangular Toeplitz C: ‖A‖_F over the least ‖AC⁻¹‖_F·(largest column norm of C)."""
    workload = decayed_sums(beta2=beta2, steps=steps)

    def error(below: Series) -> float:
        strategy = np.eye(steps) + sum(np.diag(np.full(steps - k, x), -k) for k, x in enumerate(below, start=1))
        return float(np.linalg.norm(workload @ np.linalg.inv(strategy)) * np.linalg.norm(strategy, axis=0).max())

    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 20_000, "maxfev": 20_000}
    found = minimize(error, np.zeros(steps - 1), method="Nelder-Mead", options=options)
    return float(np.linalg.norm(workload) / found.fun)


def gain_bound(*, beta2: float, steps: int) -> float:
    """What no strategy, Toeplitz or not, can exceed: ‖A‖_F·√steps/‖A‖_*, as in `excess_error`."""
    workload = decayed_sums(beta2=beta2, steps=steps)
    return float(np.linalg.norm(workload) * math.sqrt(steps) / np.linalg.svd(workload, compute_uv=False).sum())


class Estimate(NamedTuple):
    """A number found by simulation, and its standard error."""

    value: float
    standard_error: float


def noise_ratio(noising: Matrix, *, beta2: float, square: bool, draws: int, seed: int) -> Estimate:
    """The noise that independent noise leaves on ν, over what the noising matrix (column norm included) leaves.

    Root mean squares over the steps; if `square`, standard deviations over draws of the debiased average of the squared
    noise, at the last step.
    """
    rng, steps = np.random.default_rng(seed), len(noising)
    z, own = rng.standard_normal((steps, draws)), rng.standard_normal((steps, draws))
    if square:
        weights = beta2 ** np.arange(steps - 1, -1, -1)
        weights = weights / weights.sum()
        squares = [(values - values.mean()) ** 2 for values in (weights @ z**2, weights @ (noising @ own) ** 2)]
    else:
        workload = decayed_sums(beta2=beta2, steps=steps)
        squares = [((workload @ values) ** 2).mean(0) for values in (z, noising @ own)]
    means = [float(one.mean()) for one in squares]
    relative = [float(one.std(ddof=1)) / mean / math.sqrt(draws) / 2 for one, mean in zip(squares, means, strict=True)]
    ratio = math.sqrt(means[0] / means[1])
    return Estimate(ratio, ratio * math.hypot(*relative))


PROFILES = ("constant", "falls 100-fold", "jumps 10-fold", "random sizes")


def gradients(profile: str, *, steps: int, dimension: int, seed: int) -> Matrix:
    """[steps, dimension]: coordinates of lognormal size, times a factor that depends on the step."""
    rng, t = np.random.default_rng(seed), np.arange(1, steps + 1)
    sizes = np.exp(rng.standard_normal(dimension))
    factors: Series = {
        "constant": np.ones(steps),
        "falls 100-fold": 10 ** (-2 * t / steps),
        "jumps 10-fold": np.where(t <= steps // 2, 1.0, 10.0),
        "random sizes": np.ones(steps),
    }[profile]
    wild = np.exp(1.5 * rng.standard_normal((steps, dimension))) if profile == "random sizes" else 1.0
    return np.asarray(factors[:, None] * sizes * wild)


def second_moments(
    gradient: Matrix, noising: Matrix, *, scaled: bool, clip_norm: float, noise_over_batch: float, beta2: float,
    seed: int,
) -> Matrix:  # fmt: skip
    """[steps + 1, dimension]: ν̂ from ν̂_0 = g_1² on, of scale-then-privatize or of post-processing.

    Post-processing clips at the largest norm of the gradients, which clips nothing.
    """
    noise = noise_over_batch * noising @ np.random.default_rng(seed).standard_normal(gradient.shape)
    largest = float(np.linalg.norm(gradient, axis=1).max())
    nu, nu_hat = np.zeros(gradient.shape[1]), gradient[0] ** 2
    path = [nu_hat]
    for t, (g, z) in enumerate(zip(gradient, noise, strict=True), start=1):
        if scaled:
            s = 1 / np.sqrt(nu_hat)
            clipped = s * g * min(1.0, clip_norm / float(np.linalg.norm(s * g)))
            noisy = (clipped + clip_norm * z) / s
        else:
            noisy = g + largest * z
        nu = beta2 * nu + (1 - beta2) * noisy**2
        nu_hat = nu / (1 - beta2**t)
        path.append(nu_hat)
    return np.array(path)


def excess_error(noising: Matrix, factors: Series) -> float:
    """The rms error of Σ_{j≤t} f_j(C⁻¹z)_j over a lower bound for every strategy of the same sensitivity.

    With F = diag(f), ‖AFC⁻¹‖_F ≥ ‖AF‖_*/‖C‖_F, and ‖C‖_F ≤ √steps if columns of C have norm 1 or less.
    """
    steps = len(factors)
    workload = np.tril(np.ones((steps, steps))) * factors
    least = np.linalg.svd(workload, compute_uv=False).sum() / math.sqrt(steps)
    return float(np.linalg.norm(workload @ noising) / least)
