"""The badly scaled quadratic, simulated: what noise does to each optimizer where curvatures differ.

    f(θ) = ½ Σ_i h_i θ_i²,   g_j = h⊙(θ − x_j),   g̃_t = (1/B) Σ_j clip(g_j) + (ζσ/B)·(C⁻¹z)_t

θ is measured from the optimum, and x_j ~ N(0, spread²) are the examples. The paper has such an example in two
dimensions; this setting is our own. Geometry, second moments and update rules are the library's slots, applied to all
repeats at once; only clipping is written here, because it works per repeat.

Which optimizer wins depends on the setting. With spread examples, scaling before the noise wins. At spread=0 all
examples are clipped alike, a small clip norm costs nothing, and DP-SGD ends lowest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpoptim import optim
from dpoptim.clipping import Released
from dpoptim.noise import Independent, NoiseKey, NormalSource, Strategy, StrategySpec
from dpoptim.optim.bundle import ParameterBundle
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import (
    Gradient,
    IndependentMoments,
    JointMoments,
    NoiselessSquare,
    PrivacyPlan,
    Release,
)

VARIANTS: dict[str, str] = {
    "adam": "NOT private: Adam without clipping or noise",
    "dp_sgd": "plain clipping and noise, momentum betas[0], no second moment",
    "post_processing": "Adam on the noisy gradient; ν̂ of g̃², inflated by the noise",
    "bias_correction": "post-processing with the noise's known share b_t removed from ν̂",
    "independent_moments": "gradient and squared average released with separate noise (IME)",
    "joint_moments": "gradient and average of squares released as one vector (JME)",
    "scale_then_privatize": "clipping and noise in the space scaled by s_t = ε/(√ν̂ + ε)",
    "noiseless_preconditioner": "NOT private: ν̂ of the un-noised clipped average",
    "noiseless_scale_then_privatize": "NOT private: scale-then-privatize with the un-noised ν̂",
}
WITH_PUBLIC_DATA: dict[str, str] = {
    "side_information": "post-processing with ν̂ of the gradient of public examples",
    "adadps": "clipping, noise and steps in the space scaled by ν of public examples (momentum betas[0])",
}
QUANTILES = (0.1, 0.5, 0.9)
TENSOR, RUN_ID = "theta", "quadratic"
"""Name and run of the normals: a library run with the same names and key sees those of repeat 0."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Quadratic:
    """The problem and the settings of the run, with one coordinate per entry of `curvatures`.

    start: θ_0 − θ*, one number per coordinate.
    spread: standard deviation of the examples x_j, drawn at every step; 0 makes all equal (and the simulation
        batch_size times cheaper).
    eps: Adam's ε; None is the library's default: 1e-8, or the noise's level for bias correction, IME and JME.
    eps_scale: ε of scale-then-privatize; None is the library's default, twice the noise's level. The scale lies in
        (0, 1], so `clip_norm` is eps_scale times the paper's.
    seed: determines the noise key; variants with the same seed see the same normals. Nothing here is secret.
    public_examples: how many public examples WITH_PUBLIC_DATA sees at every step.
    public_spread: their standard deviation per coordinate; None is `spread`.

    >>> Quadratic(curvatures=(1.0, 0.1), batch_size=10, noise_multiplier=2.0).plan().noise_stddevs().gradient_sum
    2.0
    """

    curvatures: tuple[float, ...] = (1.0, 0.01)
    start: tuple[float, ...] = (1.0, 1.0)
    spread: float = 0.0
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    batch_size: int = 20
    steps: int = 300
    lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float | None = None
    eps_scale: float | None = None
    repeats: int = 1000
    seed: int = 0
    public_examples: int = 20
    public_spread: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.curvatures or not all(0 < h < math.inf for h in self.curvatures):
            raise ValueError(f"curvatures={self.curvatures} must be positive numbers, one per coordinate")
        if len(self.start) != len(self.curvatures) or not all(math.isfinite(x) for x in self.start):
            raise ValueError(f"start={self.start} must be {len(self.curvatures)} numbers, one for each of curvatures")
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"spread={self.spread} must be 0 or more")
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"lr={self.lr} must be 0 or more")
        for name in ("batch_size", "steps", "repeats"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number, at least 1")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} must lie in [0, 2^64)")
        self.plan()  # checks clip_norm and noise_multiplier, as the next two check betas, eps and eps_scale
        optim.Adam(betas=self.betas, eps=0.0 if self.eps is None else self.eps)
        optim.InverseRoot(eps_scale=1.0 if self.eps_scale is None else self.eps_scale)

    @property
    def key(self) -> NoiseKey:
        """The noise key from `seed`: not secret, so only for simulations."""
        return NoiseKey.from_bytes(self.seed.to_bytes(32, "little"))

    def plan(self, noise: StrategySpec | Strategy | None = None) -> PrivacyPlan:
        """The plan with batches of exactly batch_size, one participation per example, and this noise."""
        if isinstance(noise, Strategy):
            noise = _Given(noise)
        return PrivacyPlan(
            num_examples=self.batch_size * self.steps,
            batch_size=self.batch_size,
            steps=self.steps,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            noise=Independent() if noise is None else noise,
        )


@dataclass(frozen=True)
class _Given:
    """An optimized strategy, as a kind of noise."""

    strategy: Strategy

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> Strategy:
        if self.strategy.steps != steps:
            raise ValueError(f"noise has steps={self.strategy.steps}, the problem steps={steps}; use the same number")
        return self.strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class Path:
    """The result of a simulation over `repeats` runs. Index t is after t steps; row t−1 is step t = 1, 2, ..."""

    problem: Quadratic
    variant: str
    mean_loss: Floats  # [steps + 1]
    loss_quantiles: Floats  # [3, steps + 1], at QUANTILES
    second_moment: Floats  # [steps, coordinates]: mean ν̂_t, for bias correction ν̂_t − b_t; NaN for dp_sgd
    negative: Floats  # [steps, coordinates]: the share of the repeats in which that is below 0
    squared_gradient: Floats  # [steps, coordinates]: mean of g², g the clipped average without noise
    noise_variance: Floats  # [steps]: φ_t = (ζσ/B)²·‖row t of C⁻¹‖² (times column_norm²), at scale 1
    update_rms: Floats  # [steps, coordinates]: √mean of (θ_t − θ_{t−1})²
    final: Floats  # [repeats, coordinates]: θ_T


def simulate(
    problem: Quadratic, variant: str = "scale_then_privatize", noise: StrategySpec | Strategy | None = None
) -> Path:
    """Run one of VARIANTS or WITH_PUBLIC_DATA on all repeats at once.

    noise: a kind of noise such as BandedToeplitz(bands=8), or an optimized Strategy; None is independent noise.

    Repeat r moves as the library's optimizer of that name would, with the same normals. The same problem always gives
    the same numbers. A run that diverges gives inf or NaN.

    >>> path = simulate(Quadratic(steps=200, repeats=400), "post_processing")
    >>> phi, flat = path.noise_variance[-1], path.squared_gradient[-1, 1]
    >>> bool(path.second_moment[-1, 1] > 10 * flat), round(float(phi), 6)
    (True, 0.0025)
    """
    if variant not in VARIANTS | WITH_PUBLIC_DATA:
        raise ValueError(f"variant={variant!r} must be one of {', '.join(VARIANTS | WITH_PUBLIC_DATA)}")
    theta = torch.tensor(problem.start, dtype=torch.float64).repeat(problem.repeats)
    transient: dict[str, Tensor] = {}

    def public() -> dict[str, Tensor]:
        return {TENSOR: _public_gradients(problem, theta, t)}

    plan, rule, geometry, moment = _slots(problem, variant, noise, public)
    batch, stddevs, row_norms = problem.batch_size, plan.noise_stddevs(), plan.strategy.row_norms()
    rows = _rows(problem, plan.strategy, "gradient") * stddevs.gradient_sum if stddevs.gradient_sum else None
    square_rows = _rows(problem, plan.square_strategy, "square") * stddevs.square if stddevs.square else None
    phi = (stddevs.gradient_sum * plan.strategy.column_norm * row_norms / batch) ** 2
    shape = (problem.repeats, len(problem.curvatures))
    curvatures = torch.tensor(problem.curvatures, dtype=torch.float64)
    state: dict[str, Tensor] = {}
    seen: dict[str, list[Tensor]] = {name: [] for name in ("loss", "nu", "negative", "square", "update")}
    seen["loss"].append((theta.view(shape) ** 2 @ curvatures) / 2)
    for t in range(1, problem.steps + 1):
        before, after = (
            ParameterBundle([TENSOR], [theta], state, transient, rule.defaults(), step) for step in (t - 1, t)
        )
        if t == 1:
            geometry.begin(before)
        scale = geometry.scale(before, rule)
        scale = torch.ones_like(theta) if scale is None else scale
        clipped = _clipped(problem, theta.view(shape), scale.view(shape), plan.clip_norm, t)
        average = clipped.mean(1).flatten()
        noisy_grad = average if rows is None else average + rows[t - 1] / scale / batch
        square = (clipped**2).mean(1).flatten() if isinstance(plan.release, JointMoments) else average**2
        square = square if square_rows is None else square + square_rows[t - 1]
        released = Released(t - 1, {TENSOR: noisy_grad}, {TENSOR: square}, noise_variance=float(phi[t - 1]))
        denominator = moment.denominator(after, rule, noisy_grad, released)
        update = -problem.lr * rule.direction(noisy_grad, denominator, after)
        theta = theta + update
        nu_hat = torch.full_like(theta, math.nan)
        if rule.adaptive:
            nu_hat = rule.estimate(state["second_moment"], after.group, t)
            if "noise_moment" in state:
                nu_hat = nu_hat - rule.estimate(state["noise_moment"], after.group, t)
        seen["loss"].append((theta.view(shape) ** 2 @ curvatures) / 2)
        seen["nu"].append(nu_hat.view(shape).mean(0))
        seen["negative"].append((nu_hat < 0).double().view(shape).mean(0))
        seen["square"].append((average**2).view(shape).mean(0))
        seen["update"].append((update**2).view(shape).mean(0).sqrt())
        geometry.observe(after, {TENSOR: noisy_grad})
    made = {name: torch.stack(values).numpy() for name, values in seen.items()}
    with np.errstate(invalid="ignore"):  # inf − inf, if a run diverged
        quantiles = np.quantile(made["loss"], QUANTILES, axis=1)
    return Path(
        problem=problem, variant=variant, mean_loss=made["loss"].mean(1),
        loss_quantiles=quantiles, second_moment=made["nu"],
        negative=made["negative"], squared_gradient=made["square"], noise_variance=phi,
        update_rms=made["update"], final=theta.view(shape).numpy(),
    )  # fmt: skip


def _slots(
    problem: Quadratic,
    variant: str,
    noise: StrategySpec | Strategy | None,
    public: Callable[[], Mapping[str, Tensor]],
) -> tuple[PrivacyPlan, optim.UpdateRule, optim.Geometry, optim.SecondMoment]:
    """The library's slots of a variant."""
    if variant == "adam":
        problem = dataclasses.replace(problem, clip_norm=math.inf, noise_multiplier=0.0)
    release: Release = Gradient()
    moment: optim.SecondMoment = optim.OfNoisyGradient()
    if variant in ("independent_moments", "joint_moments"):
        release, moment = IndependentMoments() if variant[0] == "i" else JointMoments(), optim.OfReleasedSquare()
    elif variant.startswith("noiseless"):
        release, moment = NoiselessSquare(), optim.OfReleasedSquare()
    elif variant == "bias_correction":
        moment = optim.NoiseCorrected()
    plan = problem.plan(noise).with_release(release)
    if variant == "dp_sgd":
        return plan, optim.SGD(momentum=problem.betas[0]), optim.Flat(), optim.NoSecondMoment()
    if variant == "adadps":
        scale = optim.FromPublic(public, renew_every=1, decay=problem.betas[1])
        return plan, optim.SGD(momentum=problem.betas[0]), scale, optim.OfScale()
    if variant == "side_information":
        moment = optim.OfPublicGradient(public)
    eps = optim.Adam.eps if problem.eps is None else problem.eps
    if problem.eps is None and variant in ("bias_correction", "independent_moments", "joint_moments"):
        eps = max(eps, noise_level(plan, release))
    if variant == "bias_correction" and not eps > 0:
        raise ValueError(f"eps={eps} must be positive for bias_correction: it is the floor of ν̂ − b_t")
    geometry: optim.Geometry = optim.Flat()
    if variant.endswith("scale_then_privatize"):
        least = max(2 * noise_level(plan, Gradient()), optim.Adam.eps)
        geometry = optim.InverseRoot(eps_scale=least if problem.eps_scale is None else problem.eps_scale)
    return plan, optim.Adam(betas=problem.betas, eps=eps), geometry, moment


def _clipped(problem: Quadratic, theta: Tensor, scale: Tensor, clip_norm: float, t: int) -> Tensor:
    """[repeats, examples, coordinates]: g_j·min(1, ζ/‖s⊙g_j‖); one example stands for all if they are equal."""
    examples = theta[:, None]
    if problem.spread:
        numel = problem.batch_size * theta.numel()
        source = NormalSource.of_tensor(problem.key, TENSOR, numel=numel, stream="examples")
        drawn = source.normals(t - 1, dtype=torch.float64).view(len(theta), problem.batch_size, -1)
        examples = examples - problem.spread * drawn
    gradients = examples * torch.tensor(problem.curvatures, dtype=torch.float64)
    norms = (gradients * scale[:, None]).norm(dim=2, keepdim=True)
    return gradients * (clip_norm / norms).clamp(max=1.0)


def _public_gradients(problem: Quadratic, theta: Tensor, t: int) -> Tensor:
    """[repeats·coordinates]: the mean gradient of the public examples of step t at the current θ."""
    spread = problem.public_spread or (problem.spread,) * len(problem.curvatures)
    shape = (problem.repeats, problem.public_examples, len(problem.curvatures))
    source = NormalSource.of_tensor(problem.key, TENSOR, numel=math.prod(shape), stream="public")
    mean = source.normals(t - 1, dtype=torch.float64).view(shape).mean(1) * torch.tensor(spread, dtype=torch.float64)
    return ((theta.view(mean.shape) - mean) * torch.tensor(problem.curvatures, dtype=torch.float64)).flatten()


def _rows(problem: Quadratic, strategy: Strategy, stream: str) -> Tensor:
    """[steps, repeats·coordinates]: column_norm·C⁻¹z, with the normals that the optimizer would draw."""
    numel = problem.repeats * len(problem.curvatures)
    source = NormalSource.of_tensor(problem.key.for_run(RUN_ID), TENSOR, numel=numel, stream=stream)
    z = torch.stack([source.normals(step, dtype=torch.float64) for step in range(problem.steps)])
    return torch.from_numpy(strategy.noising_matrix() * strategy.column_norm) @ z


_FLAT: dict[str, tuple[float, ...]] = {"lr": (0.003, 0.01, 0.03, 0.1), "clip_norm": (0.01, 0.03, 0.1, 0.3)}
_SCALED: dict[str, tuple[float, ...]] = {
    "lr": (0.01, 0.03),
    "clip_norm": (0.01, 0.03, 0.1),
    "eps_scale": (0.003, 0.01, 0.03),
}
_PUBLIC: dict[str, tuple[float, ...]] = {"lr": (0.03, 0.1, 0.3, 1.0), "clip_norm": _FLAT["clip_norm"]}
_PUBLIC_SCALE: dict[str, tuple[float, ...]] = {"lr": (0.0003, 0.001, 0.003, 0.01), "clip_norm": (0.3, 1.0, 3.0, 10.0)}
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "adam": {"lr": _FLAT["lr"]},
    "dp_sgd": {"lr": (0.03, 0.1, 0.3, 1.0), "clip_norm": _FLAT["clip_norm"]},
    "post_processing": _FLAT,
    "bias_correction": _FLAT,
    "independent_moments": _FLAT,
    "joint_moments": _FLAT,
    "scale_then_privatize": _SCALED,
    "noiseless_preconditioner": _FLAT,
    "noiseless_scale_then_privatize": _SCALED,
    "side_information": _PUBLIC,
    "adadps": _PUBLIC_SCALE,
}
"""The settings to tune over, for the curvatures 1 and 0.01.

With spread examples, a clip norm below 0.03 clips them all and only rescales Adam. With equal examples a smaller clip
norm only reduces noise, so the smallest of the grid wins.
"""


def tuned(
    problem: Quadratic, variant: str, noise: StrategySpec | Strategy | None = None, **choices: Sequence[Any]
) -> Quadratic:
    """The problem with the values of the named fields that give the least mean loss over the last tenth of the steps.

    Settings that diverge lose; if all diverge, the first is returned.

    >>> tuned(Quadratic(steps=100, repeats=50), "adam", lr=(1e-4, 0.02)).lr
    0.02
    """
    best, least = problem, math.inf
    for index, values in enumerate(itertools.product(*choices.values())):
        candidate = dataclasses.replace(problem, **dict(zip(choices, values, strict=True)))
        loss = last_loss(simulate(candidate, variant, noise))
        if index == 0 or loss < least:
            best, least = candidate, loss
    return best


def last_loss(path: Path) -> float:
    """Mean loss over the last tenth of the steps; ∞ if not finite."""
    loss = float(path.mean_loss[-max(1, path.problem.steps // 10) :].mean())
    return loss if math.isfinite(loss) else math.inf
