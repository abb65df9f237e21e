"""The rows and columns of the table: which optimizer, which noise, and which settings of each are tuned over what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dpoptim.noise import BandedInverse, BandedToeplitz, BufferedToeplitz, Independent, StrategySpec
from dpoptim.privacy import CyclicPoisson, Poisson, Sampling, Shuffled

DELTA = 1e-7
BANDS = 128


@dataclass(frozen=True)
class Hyperparameter:
    """A setting that is tuned: its grid, and where the search begins."""

    name: str
    grid: tuple[float, ...]
    start: float

    def __post_init__(self) -> None:
        if self.start not in self.grid:
            raise ValueError(f"start={self.start} of {self.name} must be on its grid {self.grid}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """An optimizer. `note` says what is not private about it (None: it is)."""

    name: str
    label: str
    knobs: tuple[Hyperparameter, ...]
    starts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by column, where not the knob's own
    note: str | None = None
    beyond: bool = False  # not in the paper's table


@dataclass(frozen=True, kw_only=True)
class Column:
    """Noise and sampling, each for a number of steps, at a given multiplier or calibrated to an ε."""

    name: str
    label: str
    noise: Callable[[int], StrategySpec] = lambda steps: Independent()
    sampling: Callable[[int], Sampling] = lambda steps: Shuffled()
    noise_multiplier: float | None = None
    epsilon: float | None = None
    beyond: bool = False
    paper: dict[str, float] = field(default_factory=dict)  # the paper's test losses, by the rows that it has


def _rates(start: float, *, low: float = 1e-5, high: float = 30.0) -> Hyperparameter:
    """Learning rates 1, 2, 5 times powers of ten."""
    grid = [digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 5)]
    return Hyperparameter("lr", tuple(float(f"{rate:.0e}") for rate in grid if low <= rate <= high), start)


def _banded(bands: int) -> Callable[[int], StrategySpec]:
    return lambda steps: BandedToeplitz(bands=min(bands, steps))


def _in_much_noise(**start: float) -> dict[str, dict[str, float]]:
    """Another start in every column of the paper's but the one of little noise."""
    return dict.fromkeys(("banded", "independent"), start)


_EPS = Hyperparameter("eps", (3e-5, 1e-4, 3e-4, 1e-3), 1e-4)
_EPS_SCALE = Hyperparameter("eps_over_noise", (1.1, 1.5, 2.0, 4.0, 8.0), 2.0)
_CLIP_NORM = Hyperparameter("clip_norm", (0.03, 0.1, 0.25, 0.5, 1.0, 2.0), 1.0)
_EPS_OVER_LITTLE = Hyperparameter("eps_over_noise", (0.1, 0.25, 0.5, 1.1, 1.5, 2.0, 4.0, 8.0), 2.0)
"""Where un-noised squares make the scale, noise does not feed on itself, and ε may lie below it."""
_MOMENTUM = Hyperparameter("momentum", (0.0, 0.9), 0.9)
_CORRELATED = {"lr": 0.01, "clip_norm": 0.25, "eps_over_noise": 1.1}
_AT_AN_EPSILON = {
    "banded_10": _CORRELATED,
    "buffered_10": _CORRELATED,
    "inverse_10": _CORRELATED,
    "poisson_10": {"lr": 1e-3, "clip_norm": 0.25, "eps_over_noise": 1.1},
    "cyclic_10": _CORRELATED,
}
"""There the search begins where an earlier one ended, which had the noise that its own number of steps needs."""
_NOISELESS = "NOT private: trained on un-noised squares"

ROWS: tuple[Row, ...] = (
    Row(
        name="non_private_sgd", label="non-private SGD", note="NOT private: no clipping, no noise",
        knobs=(_rates(0.05), _MOMENTUM),
    ),
    Row(
        name="non_private_adam", label="non-private Adam", note="NOT private: no clipping, no noise",
        knobs=(_rates(2e-3),),
    ),
    Row(name="noiseless", label="noiseless preconditioner", note=_NOISELESS, knobs=(_rates(5e-4), _EPS)),
    Row(
        name="noiseless_scaled", label="noiseless + scale-then-privatize", note=_NOISELESS,
        knobs=(_rates(1e-3), _EPS_OVER_LITTLE, Hyperparameter("clip_norm", (0.5, 1.0, 2.0), 1.0)),
        starts=_in_much_noise(lr=5e-3, eps_over_noise=0.5),
    ),
    Row(name="post_processing", label="post-processing", knobs=(_rates(1e-3),)),
    Row(
        name="post_processing_eps", label="post-processing, ε_s tuned", knobs=(_rates(1e-3), _EPS),
        starts={"independent_low": {"lr": 2e-3}, "banded": {"lr": 0.01}, "independent": {"lr": 5e-4}},
    ),
    Row(name="independent_moments", label="IME", knobs=(_rates(5e-4), _EPS)),
    Row(name="bias_correction", label="bias correction", knobs=(_rates(5e-4), _EPS)),
    Row(
        name="scale_then_privatize", label="scale-then-privatize", knobs=(_rates(1e-3), _CLIP_NORM, _EPS_SCALE),
        starts=_in_much_noise(clip_norm=0.25) | _AT_AN_EPSILON,
    ),
    Row(name="dp_sgd", label="DP-SGD", knobs=(_rates(0.5), _MOMENTUM)),
    Row(name="exponent_quarter", label="scale-then-privatize, p = 1/4", beyond=True,
        knobs=(_rates(1e-3), _CLIP_NORM, _EPS_SCALE), starts=_in_much_noise(clip_norm=0.25)),
    Row(name="exponent_third", label="scale-then-privatize, p = 1/3", beyond=True,
        knobs=(_rates(1e-3), _CLIP_NORM, _EPS_SCALE), starts=_in_much_noise(clip_norm=0.25)),
    Row(name="average_of_squares", label="IME, average of squares", beyond=True, knobs=(_rates(5e-4), _EPS)),
    Row(
        name="delayed", label="delayed preconditioner (DP²)", beyond=True,
        knobs=(_rates(0.2), Hyperparameter("period", (50, 100, 200), 100), Hyperparameter("eps", (1e-4, 3e-4, 1e-3), 3e-4)),
    ),
)  # fmt: skip
"""In the table's order."""

EXPONENTS = {"scale_then_privatize": 0.5, "exponent_quarter": 0.25, "exponent_third": 1 / 3}
NON_PRIVATE = ("non_private_sgd", "non_private_adam")

COLUMNS: tuple[Column, ...] = (
    Column(name="none", label="no noise"),
    Column(
        name="independent_low", label="independent, σ = 0.134", noise_multiplier=0.134,
        paper={
            "noiseless": 3.251, "noiseless_scaled": 3.071, "post_processing": 3.251, "independent_moments": 3.433,
            "bias_correction": 3.223, "scale_then_privatize": 3.097, "dp_sgd": 3.373,
        },
    ),
    Column(
        name="banded", label="BandMF, σ = 1, b = 128", noise=_banded(BANDS), noise_multiplier=1.0,
        paper={
            "noiseless": 3.497, "noiseless_scaled": 3.302, "post_processing": 3.493, "independent_moments": 3.520,
            "bias_correction": 3.492, "scale_then_privatize": 3.423, "dp_sgd": 3.605,
        },
    ),
    Column(
        name="independent", label="independent, σ = 1", noise_multiplier=1.0,
        paper={
            "noiseless": 3.697, "noiseless_scaled": 3.659, "post_processing": 3.697, "independent_moments": 3.823,
            "bias_correction": 3.727, "scale_then_privatize": 3.659, "dp_sgd": 3.726,
        },
    ),
    Column(name="banded_10", label="BandMF, b = 128", noise=_banded(BANDS), epsilon=10.0,
           beyond=True),
    Column(name="buffered_10", label="BLT", noise=lambda steps: BufferedToeplitz(buffers=3), epsilon=10.0, beyond=True),
    Column(
        name="inverse_10", label="banded inverse, 16 bands", noise=lambda steps: BandedInverse(bands=min(16, steps)),
        epsilon=10.0, beyond=True,
    ),
    Column(
        name="poisson_10", label="independent, Poisson samples", sampling=lambda steps: Poisson(), epsilon=10.0,
        beyond=True,
    ),
    Column(
        name="cyclic_10", label="BandMF, b = 16, cyclic Poisson samples", noise=_banded(16),
        sampling=lambda steps: CyclicPoisson(bands=min(16, steps)), epsilon=10.0, beyond=True,
    ),
)  # fmt: skip
WITH_NOISE = tuple(each for each in COLUMNS if not each.beyond and each.name != "none")
"""The paper's columns of noise."""

PAPER_WITHOUT_NOISE = {"none": 4.955, "non_private_sgd": 3.269, "non_private_adam": 2.781}
"""The paper's test losses that have no noise column; "none" is no fine-tuning."""
PAPER_GRADIENT = 0.27
"""The paper's mean of ‖g_t‖/ζ."""


def row(name: str) -> Row:
    """The row of that name."""
    return next(each for each in ROWS if each.name == name)


def column(name: str) -> Column:
    """The column of that name."""
    return next(each for each in COLUMNS if each.name == name)


def places(*, beyond: bool) -> list[tuple[str, str]]:
    """The (row, column) pairs of the paper's table and of a row that it lacks, or those beyond it.

    >>> len(places(beyond=False))
    26
    """
    if not beyond:
        first = [(name, "none") for name in NON_PRIVATE]
        rows = [each.name for each in ROWS if not each.beyond and each.name not in NON_PRIVATE]
        return first + [(name, each.name) for each in COLUMNS[1:] if not each.beyond for name in rows]
    rows = [each.name for each in ROWS if each.beyond]
    at_ten = [each.name for each in COLUMNS if each.beyond]
    return [(name, "independent") for name in rows] + [("scale_then_privatize", name) for name in at_ten]
