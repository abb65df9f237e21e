"""Which cells to run next, as a pure function of the lines so far: tuning first, then the final runs.

Tuning turns one hyperparameter after the other to its best value, from neighbour to neighbour, until none moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.results_file import Line, cell_key
from experiments.tinybert.grid import COLUMNS, Row, Size, column, row

Setting = tuple[tuple[str, float], ...]


def first_setting(row: Row, column: str) -> Setting:
    """Where the search starts in a column."""
    starts = row.starts.get(column, {})
    return tuple((knob.name, starts.get(knob.name, knob.start)) for knob in row.knobs)


def wanted(row: Row, column: str, tried: Mapping[Setting, float]) -> list[Setting]:
    """Which settings to try next; none if no neighbour on any knob's grid is better than the current setting.

    `tried` has the loss of each setting, infinity if it diverged or was abandoned. Both neighbours on a knob's grid are
    returned at once, so that they can run in parallel.

    >>> from experiments.tinybert.grid import Hyperparameter
    >>> knobs = Hyperparameter("lr", (1.0, 2.0, 3.0), 2.0), Hyperparameter("eps", (1.0, 2.0), 1.0)
    >>> row = Row(name="x", label="x", knobs=knobs)
    >>> tried: dict[Setting, float] = {}
    >>> while settings := wanted(row, "banded", tried):
    ...     tried |= {setting: abs(dict(setting)["lr"] - 3) + dict(setting)["eps"] for setting in settings}
    >>> reached(row, "banded", tried), len(tried)
    ((('lr', 3.0), ('eps', 1.0)), 4)
    """
    return _descend(row, column, tried)[1]


def reached(row: Row, column: str, tried: Mapping[Setting, float]) -> Setting:
    """The current setting of the search."""
    return _descend(row, column, tried)[0]


def on_edge(row: Row, setting: Setting) -> list[str]:
    """The knobs at an end of their grid, where a wider grid might be better."""
    values = dict(setting)
    return [k.name for k in row.knobs if len(k.grid) > 2 and values[k.name] in (k.grid[0], k.grid[-1])]


def _descend(row: Row, column: str, tried: Mapping[Setting, float]) -> tuple[Setting, list[Setting]]:
    """Turn the knobs until none moves: (the current setting, what must be known to continue)."""
    here = first_setting(row, column)
    if here not in tried:
        return here, [here]
    moved = True
    while moved:
        moved = False
        for move in row.directions():
            while True:
                beside = _beside(here, row, move)
                if missing := [setting for setting in beside if setting not in tried]:
                    return here, missing
                # Where all diverged, a lower learning rate is the way out.
                best = min([here, *beside], key=lambda setting: (tried[setting], dict(setting).get("lr", 0.0)))
                if best == here:
                    break
                here, moved = best, True
    return here, []


def _beside(setting: Setting, row: Row, move: Mapping[str, int]) -> list[Setting]:
    """The settings one move back and one ahead, where the grids reach that far.

    >>> from experiments.tinybert.grid import Hyperparameter
    >>> knobs = Hyperparameter("lr", (1.0, 2.0, 5.0), 2.0), Hyperparameter("eps", (0.1, 0.2), 0.1)
    >>> _beside((("lr", 2.0), ("eps", 0.1)), Row(name="x", label="x", knobs=knobs), {"lr": 1, "eps": 1})
    [(('lr', 5.0), ('eps', 0.2))]
    """
    found = []
    for sign in (-1, 1):
        at = {knob.name: knob.grid.index(value) + sign * move.get(knob.name, 0)
              for knob, (_, value) in zip(row.knobs, setting, strict=True)}  # fmt: skip
        if all(0 <= at[knob.name] < len(knob.grid) for knob in row.knobs):
            found.append(tuple((knob.name, knob.grid[at[knob.name]]) for knob in row.knobs))
    return found


SWEEP = "clip norms"
SWEPT = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 8.0, 16.0)
SETTINGS = {
    "purpose", "row", "column", "seed", "steps", "batch_size", "standing_for", "standing_for_steps", "num_examples",
    "model", "dtype",
}  # fmt: skip
"""Settings of cells that are not tuned."""
Cell = dict[str, Any]
Place = tuple[str, str]


@dataclass(frozen=True)
class Job:
    """A cell to run, and the curve of the best tuning run of its place so far."""

    cell: Cell
    beat: list[tuple[int, float]] | None = None


def jobs(lines: Sequence[Line], places: Iterable[Place], size: Size, shared: Cell, seeds: int) -> list[Job]:
    """All cells that can run now: for each place its next tuning runs or, once tuning is done, its final runs.

    `shared` are the settings of all cells (number of examples, fingerprint of the model).

    >>> size = Size(steps=4, batch_size=8, standing_for=8, tuning_batch_size=4, tuning_steps=2, seeds=1)
    >>> [job.cell["lr"] for job in jobs([], [("post_processing", "banded")], size, {"num_examples": 99}, 1)]
    [0.001]
    """
    there = {cell_key(line["cell"]) for line in lines}
    found = []
    for place in places:
        tried = tuning_losses(lines, place, size)
        next_settings = wanted(row(place[0]), place[1], tried) if size.tuned else []
        if next_settings:
            beat = best_curve(lines, place, size)
            found += [Job(tuning_cell(place, setting, size, shared), beat) for setting in next_settings]
        else:
            setting = chosen(lines, place, size)
            found += [Job(final_cell(place, setting, size, shared, seed)) for seed in range(seeds)]
    return [job for job in found if cell_key(job.cell) not in there]


def in_turn(found: Iterable[Job]) -> list[Job]:
    """Tuning runs before final ones, and final runs of the first seed before those of the second.

    >>> [job.cell["seed"] for job in in_turn(Job({"purpose": "final", "seed": seed}) for seed in (1, 0, 1, 0))]
    [0, 0, 1, 1]
    """
    return sorted(found, key=lambda job: (job.cell["purpose"] == "final", job.cell["seed"]))


def sweep_jobs(lines: Sequence[Line], size: Size, shared: Cell) -> list[Job]:
    """Scale-then-privatize at many of the paper's clip norms, B/(σ·eps_over_noise), with other settings as tuned."""
    there = {cell_key(line["cell"]) for line in lines}
    found = []
    for kind in COLUMNS[1:]:
        place = ("scale_then_privatize", kind.name)
        if not kind.beyond and (
            not size.tuned or not wanted(row(place[0]), place[1], tuning_losses(lines, place, size))
        ):
            setting = dict(chosen(lines, place, size))
            for ratio in SWEPT if size.tuned else SWEPT[:2]:
                own = tuple((setting | {"eps_over_noise": ratio}).items())
                found.append(Job({**tuning_cell(place, own, size, shared), "purpose": SWEEP}))
    return [job for job in found if cell_key(job.cell) not in there]


def tuning_cell(place: Place, setting: Setting, size: Size, shared: Cell) -> Cell:
    """A run with the smaller batch."""
    standing_for = size.standing_for * column(place[1]).larger
    own = {"purpose": "tuning", "row": place[0], "column": place[1], "seed": 1000, "standing_for": standing_for}
    return {**own, **_tuning_sizes(place, size), **_scheduled(size), **shared, **dict(setting)}


def _tuning_sizes(place: Place, size: Size) -> Cell:
    """What distinguishes tuning runs of this size; if an ε determines the noise, it is the final run's."""
    kind = column(place[1])
    sizes = {"steps": max(size.tuning_steps // kind.larger, 1), "batch_size": size.tuning_batch_size * kind.larger}
    if kind.epsilon is None:
        return sizes
    if size.examples is None:
        return {**sizes, "standing_for_steps": size.steps}
    return {**sizes, "standing_for_steps": _final_steps(kind.larger, size, size.examples),
            "standing_for_examples": size.examples}  # fmt: skip


def final_cell(place: Place, setting: Setting, size: Size, shared: Cell, seed: int) -> Cell:
    """A run whose test loss is reported. Larger batches make no more passes over the texts than smaller ones."""
    larger = column(place[1]).larger
    sizes = {"steps": _final_steps(larger, size, shared["num_examples"]), "batch_size": larger * size.batch_size,
             "standing_for": larger * size.standing_for}  # fmt: skip
    own = {"purpose": "final", "row": place[0], "column": place[1], "seed": seed, **sizes, **_scheduled(size)}
    return {**own, **({} if size.average is None else {"average": size.average}), **shared, **dict(setting)}


def _final_steps(larger: int, size: Size, num_examples: int) -> int:
    """With larger batches as many times fewer steps, rounded down to whole passes over the texts."""
    steps, of_a_pass = max(size.steps // larger, 1), num_examples // (larger * size.batch_size)
    return steps - steps % of_a_pass if larger > 1 and 0 < of_a_pass < steps else steps


def _scheduled(size: Size) -> Cell:
    """The schedule, unless it is constant: cells of constant rates do not mention it."""
    return {} if size.schedule == "constant" else {"schedule": size.schedule}


def tuning_lines(lines: Sequence[Line], place: Place, size: Size) -> list[Line]:
    """The tuning runs of a place at this size, oldest first."""
    schedule = None if size.schedule == "constant" else size.schedule
    return _lines_of(lines, place, purpose="tuning", schedule=schedule, **_tuning_sizes(place, size))


def final_lines(lines: Sequence[Line], place: Place) -> list[Line]:
    """The final runs of a place, of all seeds."""
    return _lines_of(lines, place, purpose="final")


def _lines_of(lines: Sequence[Line], place: Place, **settings: Any) -> list[Line]:
    own = {"row": place[0], "column": place[1], **settings}
    return [line for line in lines if all(line["cell"].get(name) == value for name, value in own.items())]


def setting_of(cell: Cell) -> Setting:
    """The tuned settings of a cell."""
    return tuple((knob.name, cell[knob.name]) for knob in row(cell["row"]).knobs)


def tuning_losses(lines: Sequence[Line], place: Place, size: Size) -> dict[Setting, float]:
    """Validation loss of each setting so far; infinite if the run diverged or was abandoned."""
    return {setting_of(line["cell"]): loss_of(line) for line in tuning_lines(lines, place, size)}


def best_curve(lines: Sequence[Line], place: Place, size: Size) -> list[tuple[int, float]] | None:
    """The curve of the best tuning run of a place."""
    whole = [line for line in tuning_lines(lines, place, size) if line["result"]["ended"] == "finished"]
    if not whole:
        return None
    return [(step, loss) for step, loss in min(whole, key=loss_of)["result"]["curve"] if loss is not None]


def chosen(lines: Sequence[Line], place: Place, size: Size) -> Setting:
    """Where the search ended, or its start if nothing is tuned."""
    return reached(row(place[0]), place[1], tuning_losses(lines, place, size) if size.tuned else {})


def loss_of(line: Line) -> float:
    """The validation loss of a run; infinite if it did not finish."""
    loss = line["result"]["validation"]
    return math.inf if loss is None or line["result"]["ended"] != "finished" else float(loss)
