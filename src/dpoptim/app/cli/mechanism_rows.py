"""A mechanism as a row: for programs, and for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from dpoptim.privacy import Shuffled
from dpoptim.privacy.format_epsilon import format_epsilon
from dpoptim.theory import Candidate, format_bytes

COLUMNS = ("noise multiplier", "RMSE mean", "RMSE max", "memory", "normals a step", "epsilon")


def as_values(candidate: Candidate, *, delta: float) -> dict[str, Any]:
    """The mechanism as plain values.

    `noise_multiplier` is relative to one participation, and `sensitivity` is to one participation (the largest
    column norm), so that rmse_mean = noise_multiplier·sensitivity·mean error/batch size. `total_sensitivity`, where
    sampling does not amplify, is how far one neighbour moves the whole run: of all participations, and twice as much
    under replace adjacency.
    """
    plan, strategy = candidate.plan, candidate.plan.strategy
    total = None
    if isinstance(plan.sampling, Shuffled):
        total = plan.adjacency.sensitivity_factor * plan.sensitivity_ratio(strategy) * strategy.column_norm
    return {
        "name": candidate.name,
        "sampling": repr(plan.sampling),
        "noise_multiplier": plan.noise_multiplier,
        "sensitivity": strategy.column_norm,
        "total_sensitivity": total,
        "rmse_mean": candidate.rmse_mean,
        "rmse_max": candidate.rmse_max,
        "memory_bytes": candidate.memory_bytes,
        "normal_rows": candidate.normal_rows,
        "epsilon": plan.epsilon(delta=delta),
    }


def as_cells(candidate: Candidate, *, delta: float) -> list[str]:
    """The mechanism under COLUMNS."""
    return [
        f"{candidate.plan.noise_multiplier:.4f}",
        f"{candidate.rmse_mean:.4g}",
        f"{candidate.rmse_max:.4g}",
        "-" if candidate.memory_bytes == 0 else format_bytes(candidate.memory_bytes),
        f"{candidate.normal_rows:.0f}",
        format_epsilon(candidate.plan.epsilon(delta=delta)),
    ]


def plain_table(*, words: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> Table:
    """A table without lines, whose columns of numbers stand to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, title in enumerate(words):
        table.add_column(title, overflow="fold", no_wrap=place == 0)
    for title in numbers:
        table.add_column(title, justify="right", overflow="fold")
    return table
