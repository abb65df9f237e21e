"""The table of BERT-Tiny: which optimizers and noises, what is tuned over what, how large runs are, and their plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from dpoptim.noise import BandedInverse, BandedToeplitz, BufferedToeplitz, Independent, StrategySpec
from dpoptim.privacy import (
    CyclicPoisson,
    Gradient,
    IndependentMoments,
    JointMoments,
    NoiselessSquare,
    Poisson,
    PrivacyPlan,
    Release,
    Sampling,
    Shuffled,
)

DELTA = 1e-7
BANDS = 128


@dataclass(frozen=True)
class Hyperparameter:
    """A setting to tune: its grid, and where the search starts."""

    name: str
    grid: tuple[float, ...]
    start: float

    def __post_init__(self) -> None:
        if self.start not in self.grid:
            raise ValueError(f"start={self.start} of {self.name} must be on its grid {self.grid}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """An optimizer. `note` explains why it is not private (None: it is).

    `moves` are the directions of the search, each as steps on the grids of one or several knobs; by default one per
    knob. A move of several knobs keeps what matters more than either, such as the ratio of the learning rate and eps.
    """

    name: str
    label: str
    knobs: tuple[Hyperparameter, ...]
    moves: tuple[Mapping[str, int], ...] = ()
    starts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by column, if different from the knob's
    note: str | None = None
    beyond: bool = False  # not in the paper's table

    def directions(self) -> tuple[Mapping[str, int], ...]:
        """The moves of the search."""
        return self.moves or tuple({knob.name: 1} for knob in self.knobs)


@dataclass(frozen=True, kw_only=True)
class Column:
    """Noise and sampling as functions of the number of steps, at a given multiplier or calibrated to an ε."""

    name: str
    label: str
    noise: Callable[[int], StrategySpec] = lambda steps: Independent()
    sampling: Callable[[int], Sampling] = lambda steps: Shuffled()
    noise_multiplier: float | None = None
    epsilon: float | None = None
    larger: int = 1  # batches are so many times larger, and steps so many times fewer
    beyond: bool = False
    paper: dict[str, float] = field(default_factory=dict)  # the paper's test losses, by row


def rates(start: float, *, low: float = 1e-5, high: float = 30.0) -> Hyperparameter:
    """Learning rates 1, 2, 5 times powers of ten."""
    grid = [digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 5)]
    return Hyperparameter("lr", tuple(float(f"{rate:.0e}") for rate in grid if low <= rate <= high), start)


def _banded(bands: int) -> Callable[[int], StrategySpec]:
    return lambda steps: BandedToeplitz(bands=min(bands, steps))


def _in_much_noise(**start: float) -> dict[str, dict[str, float]]:
    """A different start in the paper's columns with much noise."""
    return dict.fromkeys(("banded", "independent"), start)


_EPS = Hyperparameter("eps", (3e-5, 1e-4, 3e-4, 1e-3), 1e-4)
_EPS_SCALE = Hyperparameter("eps_over_noise", (1.1, 1.5, 2.0, 4.0, 8.0), 2.0)
_CLIP_NORM = Hyperparameter("clip_norm", (0.03, 0.1, 0.25, 0.5, 1.0, 2.0), 1.0)
_EPS_OVER_LITTLE = Hyperparameter("eps_over_noise", (0.1, 0.25, 0.5, 1.1, 1.5, 2.0, 4.0, 8.0), 2.0)
"""For scales from squares without noise: noise does not feed on itself, so ε may be smaller."""
_MOMENTUM = Hyperparameter("momentum", (0.0, 0.9), 0.9)
_CORRELATED = {"lr": 0.01, "clip_norm": 0.25, "eps_over_noise": 1.1}
_AT_AN_EPSILON = {
    "banded_10": _CORRELATED,
    "buffered_10": _CORRELATED,
    "inverse_10": _CORRELATED,
    "poisson_10": {"lr": 1e-3, "clip_norm": 0.25, "eps_over_noise": 1.1},
    "cyclic_10": _CORRELATED,
}
"""There the search starts where an earlier one ended."""
_NOISELESS = "NOT private: trained on un-noised squares"

ROWS: tuple[Row, ...] = (
    Row(
        name="non_private_sgd", label="non-private SGD", note="NOT private: no clipping, no noise",
        knobs=(rates(0.05), _MOMENTUM),
    ),
    Row(
        name="non_private_adam", label="non-private Adam", note="NOT private: no clipping, no noise",
        knobs=(rates(2e-3),),
    ),
    Row(name="noiseless", label="noiseless preconditioner", note=_NOISELESS, knobs=(rates(5e-4), _EPS)),
    Row(
        name="noiseless_scaled", label="noiseless + scale-then-privatize", note=_NOISELESS,
        knobs=(rates(1e-3), _EPS_OVER_LITTLE, Hyperparameter("clip_norm", (0.5, 1.0, 2.0), 1.0)),
        starts=_in_much_noise(lr=5e-3, eps_over_noise=0.5),
    ),
    Row(name="post_processing", label="post-processing", knobs=(rates(1e-3),)),
    Row(
        name="post_processing_eps", label="post-processing, ε_s tuned", knobs=(rates(1e-3), _EPS),
        starts={"independent_low": {"lr": 2e-3}, "banded": {"lr": 0.01}, "independent": {"lr": 5e-4}},
    ),
    Row(name="independent_moments", label="IME", knobs=(rates(5e-4), _EPS)),
    Row(name="bias_correction", label="bias correction", knobs=(rates(5e-4), _EPS)),
    Row(
        name="scale_then_privatize", label="scale-then-privatize", knobs=(rates(1e-3), _CLIP_NORM, _EPS_SCALE),
        starts=_in_much_noise(clip_norm=0.25) | _AT_AN_EPSILON,
    ),
    Row(name="dp_sgd", label="DP-SGD", knobs=(rates(0.5), _MOMENTUM)),
    Row(name="exponent_quarter", label="scale-then-privatize, p = 1/4", beyond=True,
        knobs=(rates(1e-3), _CLIP_NORM, _EPS_SCALE), starts=_in_much_noise(clip_norm=0.25)),
    Row(name="exponent_third", label="scale-then-privatize, p = 1/3", beyond=True,
        knobs=(rates(1e-3), _CLIP_NORM, _EPS_SCALE), starts=_in_much_noise(clip_norm=0.25)),
    Row(name="average_of_squares", label="IME, average of squares", beyond=True, knobs=(rates(5e-4), _EPS)),
    Row(
        name="delayed", label="delayed preconditioner (DP²)", beyond=True,
        knobs=(rates(0.2), Hyperparameter("period", (50, 100, 200), 100),
               Hyperparameter("eps", (1e-4, 3e-4, 1e-3), 3e-4)),
    ),
)  # fmt: skip
"""In the table's order."""

ONLY_SCHEDULED: tuple[Row, ...] = (
    Row(name="joint_moments", label="JME", knobs=(rates(5e-4), _EPS)),
    Row(name="rows_scaled", label="scale-then-privatize with row means", beyond=True,
        knobs=(rates(1e-3), _EPS_OVER_LITTLE, _CLIP_NORM)),
    Row(name="filtered_rows_scaled", label="scale-then-privatize with row means of filtered gradients", beyond=True,
        knobs=(rates(1e-3), _EPS_OVER_LITTLE, _CLIP_NORM)),
)  # fmt: skip
"""Only in the table with scheduled learning rates."""

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
    Column(name="independent_x4", label="independent, σ = 1, batches 4 × larger", noise_multiplier=1.0, larger=4,
           beyond=True),
    Column(name="banded_x4", label="BandMF, σ = 1, b = 96, batches 4 × larger", noise=_banded(96), noise_multiplier=1.0,
           larger=4, beyond=True),
    Column(name="independent_x16", label="independent, σ = 1, batches 16 × larger", noise_multiplier=1.0, larger=16,
           beyond=True),
    Column(name="banded_x16", label="BandMF, σ = 1, b = 24, batches 16 × larger", noise=_banded(24),
           noise_multiplier=1.0, larger=16, beyond=True),
)  # fmt: skip
EPSILONS = (1.0, 3.0, 10.0)


def _at(epsilon: float, name: str, label: str, larger: int, **settings: Any) -> Column:
    label = f"{label}, batches {larger} × larger" if larger > 1 else label
    return Column(name=f"{name}_at_{epsilon:g}", label=f"{label}, ε = {epsilon:g}", larger=larger, epsilon=epsilon,
                  beyond=True, **settings)  # fmt: skip


def _cyclic(bands: int) -> dict[str, Any]:
    return {"noise": _banded(bands), "sampling": lambda steps: CyclicPoisson(bands=min(bands, steps))}


_POISSON: dict[str, Any] = {"sampling": lambda steps: Poisson()}
CURVE: tuple[Column, ...] = tuple(
    each
    for epsilon in EPSILONS
    for each in (
        _at(epsilon, "poisson", "independent, Poisson samples", 1, **_POISSON),
        _at(epsilon, "poisson_x4", "independent, Poisson samples", 4, **_POISSON),
        _at(epsilon, "poisson_x16", "independent, Poisson samples", 16, **_POISSON),
        _at(epsilon, "cyclic_x4", "BandMF, b = 8, cyclic Poisson samples", 4, **_cyclic(8)),
        _at(epsilon, "cyclic_x16", "BandMF, b = 4, cyclic Poisson samples", 16, **_cyclic(4)),
        _at(epsilon, "buffered_x4", "BLT", 4, noise=lambda steps: BufferedToeplitz(buffers=3)),
        _at(epsilon, "inverse_x4", "banded inverse, 16 bands", 4,
            noise=lambda steps: BandedInverse(bands=min(16, steps))),
    )
)  # fmt: skip
"""Noise of the curve of the loss against ε, all with scheduled learning rates."""
WITH_NOISE = tuple(each for each in COLUMNS if not each.beyond and each.name != "none")
"""The paper's columns with noise."""

PAPER_WITHOUT_NOISE = {"none": 4.955, "non_private_sgd": 3.269, "non_private_adam": 2.781}
"""The paper's test losses without noise; "none" means without fine-tuning."""
PAPER_GRADIENT = 0.27
"""The paper's mean of ‖g_t‖/ζ."""


def row(name: str) -> Row:
    """The row of that name."""
    return next(each for each in (*ROWS, *ONLY_SCHEDULED) if each.name == name)


def column(name: str) -> Column:
    """The column of that name."""
    return next(each for each in (*COLUMNS, *CURVE) if each.name == name)


def places(*, beyond: bool) -> list[tuple[str, str]]:
    """The (row, column) pairs of the paper's table (and one more row), or those beyond it.

    >>> len(places(beyond=False))
    26
    """
    if not beyond:
        first = [(name, "none") for name in NON_PRIVATE]
        rows = [each.name for each in ROWS if not each.beyond and each.name not in NON_PRIVATE]
        return first + [(name, each.name) for each in COLUMNS[1:] if not each.beyond for name in rows]
    rows = [each.name for each in ROWS if each.beyond]
    at_ten = [each.name for each in COLUMNS if each.epsilon is not None]
    return [(name, "independent") for name in rows] + [("scale_then_privatize", name) for name in at_ten]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How many held-out texts score a run: validation texts at each point of its curve, test texts once."""

    validation_examples: int = 4096
    test_examples: int | None = None  # all
    points: int = 20


@dataclass(frozen=True, kw_only=True)
class Size:
    """Steps and batches of the final runs, and the smaller ones of the tuning runs.

    `standing_for` is the batch size whose noise in the average gradient a smaller batch keeps, so that tuning sees
    nearly the same problem. A smaller batch adds sampling noise, which matters more where there is little other noise.
    With an `average`, final runs are also scored at the exponential moving average of their weights with this decay.
    Where an ε determines the noise, it is that of runs on `examples` texts, which tuning runs need not have.
    """

    steps: int
    batch_size: int
    standing_for: int
    tuning_batch_size: int
    tuning_steps: int
    seeds: int
    tuned: bool = True  # False: every setting stays at the start of the search
    scoring: Scoring = Scoring()
    schedule: str = "constant"  # of the learning rate; see `rate_factor`
    average: float | None = None
    examples: int | None = None


SIZES = {
    "smoke": Size(
        steps=3, batch_size=8, standing_for=8, tuning_batch_size=4, tuning_steps=2, seeds=1, tuned=False
    ),
    "small": Size(
        steps=10, batch_size=16, standing_for=2048, tuning_batch_size=16, tuning_steps=10, seeds=1, tuned=False,
        scoring=Scoring(validation_examples=64, test_examples=256, points=2),
    ),
    "paper": Size(
        steps=2000, batch_size=2048, standing_for=2048, tuning_batch_size=256, tuning_steps=1000, seeds=3
    ),
}  # fmt: skip


Cell = Mapping[str, Any]


class _Sizes(TypedDict):
    num_examples: int
    batch_size: int
    steps: int


def plan_of(cell: Cell) -> PrivacyPlan:
    """The plan of a cell.

    A cell with batch_size below `standing_for` keeps the noise in the AVERAGE gradient of a batch of that size, so its
    noise multiplier is proportionally smaller. If an ε determines the noise, it is that of `standing_for_steps` steps.
    Such a run predicts how an optimizer would do and is not private.
    """
    if cell["row"] in NON_PRIVATE:
        return PrivacyPlan(**_sizes(cell), clip_norm=float("inf"), noise_multiplier=0.0)
    steps = cell.get("standing_for_steps", cell["steps"])
    examples = cell.get("standing_for_examples", cell["num_examples"])
    multiplier = _multiplier(cell["row"], cell["column"], examples, cell["standing_for"], steps)
    kind = column(cell["column"])
    return PrivacyPlan(
        **_sizes(cell),
        clip_norm=cell.get("clip_norm", 1.0),
        sampling=kind.sampling(cell["steps"]),
        noise=kind.noise(cell["steps"]),
        release=_release(cell["row"]),
        noise_multiplier=multiplier * cell["batch_size"] / cell["standing_for"],
    )


def guarantee(cell: Cell, plan: PrivacyPlan) -> tuple[float | None, str | None]:
    """(ε at δ = 1e-7, None), or (None, the reason why there is none)."""
    if why := row(cell["row"]).note:
        return None, why
    if cell["batch_size"] != cell["standing_for"]:
        return None, "NOT private: the noise of a larger batch's average, on a smaller batch, for tuning"
    return plan.epsilon(delta=DELTA), None


def described(plan: PrivacyPlan) -> dict[str, Any]:
    """What a line of results records of a plan."""
    return {
        "noise_multiplier": plan.noise_multiplier,
        "noise": repr(plan.noise),
        "sampling": repr(plan.sampling),
        "max_participations": plan.max_participations,
        "delta": DELTA,
    }


def _sizes(cell: Cell) -> _Sizes:
    return {"num_examples": cell["num_examples"], "batch_size": cell["batch_size"], "steps": cell["steps"]}


def _release(name: str) -> Release:
    if name in ("noiseless", "noiseless_scaled"):
        return NoiselessSquare()
    if name in ("independent_moments", "average_of_squares"):
        return IndependentMoments(squares="average_of" if name == "average_of_squares" else "of_average")
    if name == "joint_moments":
        return JointMoments()
    return Gradient()


@functools.cache
def _multiplier(name: str, column_name: str, num_examples: int, batch_size: int, steps: int) -> float:
    """The noise multiplier at the full batch: the column's, or what its ε needs."""
    kind = column(column_name)
    if kind.noise_multiplier is not None:
        return kind.noise_multiplier
    assert kind.epsilon is not None
    plan = PrivacyPlan(
        num_examples=num_examples, batch_size=batch_size, steps=steps, sampling=kind.sampling(steps),
        noise=kind.noise(steps),
        release=_release(name),
    )  # fmt: skip
    found = plan.calibrate(epsilon=kind.epsilon, delta=DELTA).noise_multiplier
    assert found is not None
    return found
