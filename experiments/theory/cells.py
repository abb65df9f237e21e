"""The theory's statements as cells: what a formula predicts, what a simulation finds, and what was known before.

A result is {"predicted", "simulated", "standard_error", "printed", "known"}, None where there is no such number.
`printed` is the paper's number. `known` is from an independent program, with as many digits as were kept. The
simulations at the end use no formula of `dpoptim.theory`, because a check must not use what it checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpoptim import theory
from dpoptim.noise import (
    Banded,
    BandedToeplitz,
    Dense,
    Independent,
    SquareRoot,
    Strategy,
    ToeplitzStrategy,
)
from dpoptim.noise.series import Series
from dpoptim.privacy import Adjacency, PrivacyPlan, Shuffled
from dpoptim.privacy.release_types import square_sensitivity
from dpoptim.theory import Signal
from experiments.framework import Outcome
from experiments.theory.pictures import window_paths

Cell = dict[str, Any]
DRAWS = {"smoke": 200, "small": 4_000, "paper": 20_000}
WINDOW_STEPS = {"smoke": 300, "small": 5_000, "paper": 20_000}
PRINTED_LIMITS = {("bias correction", "optimistic"): 1e6, ("bias correction", "pessimistic"): 2e4}
MECHANISMS: dict[str, tuple[Callable[[], Any], int, bool, float]] = {
    "dense": (Dense, 16, False, 1.689404),
    "dense, 256 steps": (Dense, 256, False, 2.524414),
    "square root": (SquareRoot, 64, False, 2.229676),
    "square root, noisiest step": (SquareRoot, 64, True, 2.388848),
    "square root, 2,000 steps": (SquareRoot, 2000, False, 3.322963),
    "square root, 2,000 steps, noisiest": (SquareRoot, 2000, True, 3.485678),
    "banded Toeplitz, 16 bands": (lambda: BandedToeplitz(bands=16), 256, False, 3.637574),
    "banded Toeplitz, 128 bands": (lambda: BandedToeplitz(bands=128), 2000, False, 4.253252),
    "banded, 8 bands": (lambda: Banded(bands=8), 64, False, 2.620517),
    "independent": (Independent, 2000, False, 31.6307),
}
"""Kind of noise, steps, whether the noisiest step is meant, and the known error of prefix sums."""
KNOWN_EPSILON = {1.0: 10.0453, 0.134466: 149.093}
KNOWN_SQUARES = {1: 1.0, 8: 0.234375}
KNOWN_NEGATIVE = {1: 0.68269}
KNOWN_LOGISTIC = {"loss at 1": 0.5994382, "second derivative at 1": 0.1442245}


def cells(scale: str) -> list[Cell]:
    """All cells of a scale; each with draws has its own seed."""
    draws, found = DRAWS[scale], list[Cell]()

    def add(quantity: str, case: str, **settings: Any) -> None:
        own_seed = {"seed": len(found)} if "draws" in settings else {}
        found.append({"quantity": quantity, "case": case, **settings, **own_seed})

    long_average = {"beta2": 0.999, "steps": 8_000, "draws": draws}
    small_problem = {"batch_size": 100, "noise_multiplier": 1.0, "beta2": 0.99}
    for method in ("post-processing", "bias correction", "IME"):
        for signal in Signal:
            add("dimension limit", method, signal=signal.value, batch_size=2048, noise_multiplier=1.0, **long_average)
    add("IME condition", "B/σ over m", **long_average)
    window = {"dimension": 400, "eps_scale": 1e-3, "steps": WINDOW_STEPS[scale], **small_problem}
    for start in (1.0, 0.0):
        for clip_norm in (19.0, 22.0, 40.0, 70.0, 120.0):
            add("window", f"ζ = {clip_norm:g}", clip_norm=clip_norm, start=start, **window)
    for clip_norm in (22.0, 40.0, 70.0):
        add("contraction", f"ζ = {clip_norm:g}", clip_norm=clip_norm, steps=100, draws=draws, **small_problem)
    for step in (1, 3, 10, 30, 100, 1000, 5000):
        add("negative fraction", f"step {step}", beta2=0.999, steps=step, draws=draws)
    add("update size", "pure noise", beta1=0.9, **long_average)
    add("noise's share", "C = (1, .5, .3)", beta2=0.9, steps=20, draws=draws)
    for name, (_, steps, _, _) in MECHANISMS.items():
        if scale != "smoke" or steps == 16:  # the others take seconds to optimize or simulate
            add("prefix error", name, steps=steps, draws=min(draws, 2000))
    for multiplier in KNOWN_EPSILON:
        add("epsilon", f"σ = {multiplier:g}", noise_multiplier=multiplier, participations=3, delta=1e-7)
    for batch_size in KNOWN_SQUARES:
        add("change of a square", f"B = {batch_size}", batch_size=batch_size)
    for name in KNOWN_LOGISTIC:
        add("logistic regression", name, draws=50 * draws)
    return found


def compute(cell: Cell) -> Outcome:
    """One cell."""
    return Outcome(result=_COMPUTE[cell["quantity"]](cell), note="public synthetic numbers; nothing here is private")


def _result(
    predicted: float, simulated: Estimate | None = None, printed: float | None = None, known: float | None = None
) -> dict[str, Any]:
    value, error = simulated if simulated is not None else (None, None)
    return {"predicted": predicted, "simulated": value, "standard_error": error, "printed": printed, "known": known}


def _limit(cell: Cell) -> dict[str, Any]:
    """m at which the noise in ν̂ equals ‖g‖²/m; in the simulation the noise is measured instead of computed."""
    signal = Signal(cell["signal"])
    given = {"batch_size": cell["batch_size"], "noise_multiplier": cell["noise_multiplier"], "signal": signal}
    squared_norm = 1.0 if signal is Signal.OPTIMISTIC else 1 / cell["batch_size"]
    phi = (cell["noise_multiplier"] / cell["batch_size"]) ** 2
    noise, predicted = _left_over(cell), 0.0
    if cell["case"] == "post-processing":
        predicted = theory.largest_dimension_post_processing(**given)
        noise = Estimate(phi * noise.value, phi * noise.standard_error)
    elif cell["case"] == "bias correction":  # the formula leaves out the √2 of the square of a normal
        predicted = theory.largest_dimension_bias_correction(**given, beta2=cell["beta2"])
        noise = Estimate(phi * noise.value / math.sqrt(2), phi * noise.standard_error / math.sqrt(2))
    else:
        predicted = theory.largest_dimension_ime(**given, beta2=cell["beta2"])
        stddev = math.sqrt(2) * cell["noise_multiplier"] * 2 / cell["batch_size"]
        noise = Estimate(stddev * noise.value, stddev * noise.standard_error)
    value = squared_norm / noise.value
    printed = PRINTED_LIMITS.get((cell["case"], cell["signal"]))
    return _result(predicted, Estimate(value, value * noise.standard_error / noise.value), printed)


def _left_over(cell: Cell) -> Estimate:
    """The mean of the averaged squares of unit noise (post-processing), or the spread of what averaging leaves."""
    square = cell["case"] in ("post-processing", "bias correction")
    values = averaged_noise(
        square=square, beta2=cell["beta2"], steps=cell["steps"], draws=cell["draws"], seed=cell["seed"]
    )
    return average_of(values) if cell["case"] == "post-processing" else spread_of(values)


def _ime_condition(cell: Cell) -> dict[str, Any]:
    predicted = theory.smallest_batch_ime(dimension=1.0, noise_multiplier=1.0, beta2=cell["beta2"])
    noise, factor = _left_over(cell), 2 * math.sqrt(2)
    return _result(predicted, Estimate(factor * noise.value, factor * noise.standard_error), known=0.0633)


def _window(cell: Cell) -> dict[str, Any]:
    """ν̂/g² at the end, the predicted and the simulated regime, and both paths, thinned."""
    clip_norm = cell["clip_norm"]
    names = ("start", "steps", "dimension", "batch_size", "noise_multiplier", "beta2", "eps_scale")
    field, simulated = window_paths(clip_norms=(clip_norm,), **{name: cell[name] for name in names})
    name = f"{clip_norm:g}"
    last = max(1, cell["steps"] // 10)
    ends = [float(path.y[name][-last:].mean()) for path in (field, simulated)]
    setting = {"noise_multiplier": cell["noise_multiplier"], "batch_size": cell["batch_size"]}
    regime = theory.predict(clip_norm, dimension=cell["dimension"], **setting)
    rest = float(theory.steady_second_moment(1.0, clip_norm=clip_norm, **setting))
    shown = np.unique(np.geomspace(1, cell["steps"], 60).round().astype(int)) - 1
    return {
        "predicted": ends[0],
        "simulated": ends[1],
        "standard_error": None,
        "printed": None,
        "known": None,
        "rest": rest if math.isfinite(rest) else None,
        "predicted_fate": regime.value,
        "simulated_fate": seen_regime(simulated.y[name]),
        "steps": [int(t) + 1 for t in shown],
        "predicted_path": [float(x) for x in field.y[name][shown]],
        "simulated_path": [float(x) for x in simulated.y[name][shown]],
    }


def seen_regime(path: Sequence[float] | Any) -> str:
    """The regime of a simulated path of ν̂/g², from its second half: steady (within a factor 1.25), fallen or risen.

    A path that rests far below 1 has collapsed.

    >>> seen_regime([1.0] * 10), seen_regime([0.01] * 10), seen_regime(2.0 ** np.arange(10))
    ('steady', 'collapses', 'diverges')
    """
    values = np.asarray(path, dtype=np.float64)
    half, end = float(values[len(values) // 2]), float(values[-max(1, len(values) // 10) :].mean())
    if end / half > 1.25:
        return "diverges"
    return "collapses" if end / half < 0.8 or end < 0.5 else "steady"


def _contraction(cell: Cell) -> dict[str, Any]:
    setting = {name: cell[name] for name in ("clip_norm", "noise_multiplier", "batch_size")}
    simulated = contraction(
        feedback=theory.feedback(**setting), beta2=cell["beta2"], steps=cell["steps"], draws=cell["draws"],
        seed=cell["seed"],
    )  # fmt: skip
    return _result(theory.contraction_factor(**setting, beta2=cell["beta2"]), simulated)


def _negative(cell: Cell) -> dict[str, Any]:
    predicted = theory.negative_probability(noise_variance=1.0, step=cell["steps"], beta2=cell["beta2"])
    values = averaged_noise(
        square=True, beta2=cell["beta2"], steps=cell["steps"], draws=cell["draws"], seed=cell["seed"]
    )
    below = average_of((values < 1).astype(np.float64))
    return _result(float(predicted), below, known=KNOWN_NEGATIVE.get(cell["steps"]))


def _update_size(cell: Cell) -> dict[str, Any]:
    predicted = theory.post_processing_update_rms(beta1=cell["beta1"], beta2=cell["beta2"])
    given = {name: cell[name] for name in ("beta1", "beta2", "steps", "draws", "seed")}
    found = average_of(update_squares(**given))
    root = math.sqrt(found.value)
    return _result(predicted, Estimate(root, found.standard_error / (2 * root)))


def _share(cell: Cell) -> dict[str, Any]:
    strategy = ToeplitzStrategy(steps=cell["steps"], strategy_coefs=(1.0, 0.5, 0.3))
    predicted = float(theory.second_moment_bias(strategy, beta2=cell["beta2"])[-1])
    simulated = averaged_correlated_squares(
        strategy.noising_matrix(), beta2=cell["beta2"], draws=cell["draws"], seed=cell["seed"]
    )
    return _result(predicted, average_of(simulated), known=1.2836411)


def _prefix_error(cell: Cell) -> dict[str, Any]:
    kind, _, largest, known = MECHANISMS[cell["case"]]
    strategy: Strategy = kind().optimize(steps=cell["steps"])
    error = strategy.max_error() if largest else strategy.mean_error()
    simulated = prefix_errors(
        strategy.noising_matrix(), column_norm=strategy.column_norm, draws=cell["draws"], seed=cell["seed"],
        last=largest,
    )  # fmt: skip
    return _result(error * strategy.sensitivity(max_participations=1, min_separation=1), simulated, known=known)


def _epsilon(cell: Cell) -> dict[str, Any]:
    plan = PrivacyPlan(
        num_examples=1000, batch_size=100, steps=10 * cell["participations"], noise_multiplier=cell["noise_multiplier"]
    )
    return _result(plan.epsilon(delta=cell["delta"]), known=KNOWN_EPSILON[cell["noise_multiplier"]])


def _square_change(cell: Cell) -> dict[str, Any]:
    """Δ₂ for exactly B examples; the change by equal gradients of norm ζ = 1 takes the place of a simulation."""
    size = cell["batch_size"]
    predicted = square_sensitivity(
        squares="of_average", sampling=Shuffled(), adjacency=Adjacency.ZERO_OUT, clip_norm=1.0, batch_size=size
    )
    attained = 1.0 - ((size - 1) / size) ** 2
    return _result(predicted, Estimate(attained, 0.0), printed=(2 * size + 1) / size**2, known=KNOWN_SQUARES[size])


def _logistic(cell: Cell) -> dict[str, Any]:
    """By quadrature over x, and by simulation."""
    loss, curvature = logistic_draws(draws=cell["draws"], seed=cell["seed"])

    def density(x: float) -> float:
        return math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)

    def chance(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def mean_loss(x: float) -> float:
        return density(x) * (chance(x) * math.log1p(math.exp(-x)) + chance(-x) * math.log1p(math.exp(x)))

    def mean_curvature(x: float) -> float:
        return density(x) * x**2 * chance(x) * chance(-x)

    wanted = mean_loss if cell["case"] == "loss at 1" else mean_curvature
    from scipy.integrate import quad

    predicted = float(quad(wanted, -12, 12, epsabs=1e-12)[0])
    draws = loss if cell["case"] == "loss at 1" else curvature
    return _result(predicted, average_of(draws), known=KNOWN_LOGISTIC[cell["case"]])


_COMPUTE: dict[str, Callable[[Cell], dict[str, Any]]] = {
    "dimension limit": _limit,
    "IME condition": _ime_condition,
    "window": _window,
    "contraction": _contraction,
    "negative fraction": _negative,
    "update size": _update_size,
    "noise's share": _share,
    "prefix error": _prefix_error,
    "epsilon": _epsilon,
    "change of a square": _square_change,
    "logistic regression": _logistic,
}


class Estimate(NamedTuple):
    """A number found by simulation and its standard error."""

    value: float
    standard_error: float


def average_of(values: Series) -> Estimate:
    """The mean of draws.

    >>> average_of(np.array([1.0, 3.0]))
    Estimate(value=2.0, standard_error=1.0)
    """
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))


def spread_of(values: Series) -> Estimate:
    """The standard deviation of draws, with its standard error for any distribution."""
    squares = average_of((values - values.mean()) ** 2)
    root = math.sqrt(squares.value)
    return Estimate(root, squares.standard_error / (2 * root))


def averaged_noise(*, square: bool, beta2: float, steps: int, draws: int, seed: int) -> Series:
    """[draws]: the debiased exponential average, after `steps` steps, of z_t or of z_t², z_t standard normal."""
    rng, total = np.random.default_rng(seed), np.zeros(draws)
    for _ in range(steps):
        z = rng.standard_normal(draws)
        total = beta2 * total + (1 - beta2) * (z**2 if square else z)
    return np.asarray(total / (1 - beta2**steps))


def averaged_correlated_squares(noising: Series, *, beta2: float, draws: int, seed: int) -> Series:
    """[draws]: the debiased exponential average of (C⁻¹z)_t² after as many steps as `noising` = C⁻¹ has rows."""
    rows = noising @ np.random.default_rng(seed).standard_normal((len(noising), draws))
    powers = beta2 ** np.arange(len(noising) - 1, -1, -1)
    return np.asarray((powers / powers.sum()) @ rows**2)


def prefix_errors(noising: Series, *, column_norm: float, draws: int, seed: int, last: bool) -> Estimate:
    """The root mean square of the noise in prefix sums over draws: of all steps, or of the last one."""
    rows = column_norm * noising @ np.random.default_rng(seed).standard_normal((len(noising), draws))
    squares = np.cumsum(rows, axis=0) ** 2
    per_draw = squares[-1] if last else squares.mean(0)
    found = average_of(per_draw)
    root = math.sqrt(found.value)
    return Estimate(root, found.standard_error / (2 * root))


def update_squares(*, beta1: float, beta2: float, steps: int, draws: int, seed: int) -> Series:
    """[draws]: μ̂²/ν̂ of Adam in pure noise after `steps` steps, without ε."""
    rng, mu, nu = np.random.default_rng(seed), np.zeros(draws), np.zeros(draws)
    for _ in range(steps):
        z = rng.standard_normal(draws)
        mu, nu = beta1 * mu + (1 - beta1) * z, beta2 * nu + (1 - beta2) * z**2
    return np.asarray((mu / (1 - beta1**steps)) ** 2 / (nu / (1 - beta2**steps)))


def contraction(*, feedback: float, beta2: float, steps: int, draws: int, seed: int) -> Estimate:
    """The factor by which a step multiplies the distance of the mean of ν̂ from its fixed point, for g = 1.

        ν ← β₂ν + (1−β₂)(1 + √(φν)·z)²

    A second group of draws starts at a different value with the same normals. The mean difference of the two groups
    falls by the same factor, whatever the fixed point is.
    """
    rng = np.random.default_rng(seed)
    high, low = np.full(draws, 2 / (1 - feedback)), np.ones(draws)
    start = high - low
    for _ in range(steps):
        z = rng.standard_normal(draws)
        high = beta2 * high + (1 - beta2) * (1 + np.sqrt(feedback * high) * z) ** 2
        low = beta2 * low + (1 - beta2) * (1 + np.sqrt(feedback * low) * z) ** 2
    left = average_of((high - low) / start)
    factor = left.value ** (1 / steps)
    return Estimate(factor, factor * left.standard_error / (steps * left.value))


def logistic_draws(*, draws: int, seed: int) -> tuple[Series, Series]:
    """[draws] of the loss at θ = 1 and of its second derivative there, x ~ N(0,1), y ~ Bernoulli(sigmoid(x))."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(draws)
    chance = 1 / (1 + np.exp(-x))
    sign = np.where(rng.random(draws) < chance, 1.0, -1.0)
    return np.logaddexp(0.0, -sign * x), x**2 * chance * (1 - chance)
