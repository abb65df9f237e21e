"""The plan of a cell: sampling, noise and clip norm as its column and row say, and its ε."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypedDict

from dpoptim.privacy import Gradient, IndependentMoments, NoiselessSquare, PrivacyPlan, Release
from experiments.tinybert.table_of_cells import DELTA, NON_PRIVATE, column, row

Cell = Mapping[str, Any]


class _Sizes(TypedDict):
    num_examples: int
    batch_size: int
    steps: int


def plan_of(cell: Cell) -> PrivacyPlan:
    """The plan that a cell is trained under.

    A cell with batch_size below `standing_for` keeps the noise in the AVERAGE gradient of a batch of that size: its
    noise multiplier is smaller in proportion; and where an ε decides on the noise, that of `standing_for_steps`
    steps. So it tells how an optimizer would do, and is not private.
    """
    if cell["row"] in NON_PRIVATE:
        return PrivacyPlan(**_sizes(cell), clip_norm=float("inf"), noise_multiplier=0.0)
    steps = cell.get("standing_for_steps", cell["steps"])
    multiplier = _multiplier(cell["row"], cell["column"], cell["num_examples"], cell["standing_for"], steps)
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
    """(ε at δ = 1e-7, None), or (None, why there is none)."""
    if why := row(cell["row"]).note:
        return None, why
    if cell["batch_size"] != cell["standing_for"]:
        return None, "NOT private: the noise of a larger batch's average, on a smaller batch, for tuning"
    return plan.epsilon(delta=DELTA), None


def described(plan: PrivacyPlan) -> dict[str, Any]:
    """What a line of results says of a plan."""
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
    return Gradient()


@functools.cache
def _multiplier(name: str, column_name: str, num_examples: int, batch_size: int, steps: int) -> float:
    """The noise multiplier at the full batch: the column's own, or what its ε needs."""
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
