"""Estimate declarations that a recipe leaves open, from the training records, with noise.

A range takes two releases. The first counts powers of two, which cover every number. The second divides the range that
was found into equal bins, whose noisy counts give a median and a spread. Categories take one release: values whose
noisy count exceeds a threshold become categories. Everything here is computed from released counts, except the places
of single records in `_octave` and `_bin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.data.readers import Columns, Locate
from dpoptim.app.data.records import RecordKind, held_out_places, read_columns
from dpoptim.app.data.tables import is_missing, numbers, text_of
from dpoptim.app.recipes.columns import ESTIMATE_CATEGORIES, ESTIMATE_RANGE, ESTIMATES
from dpoptim.app.recipes.defaults import label_of, validation_fraction
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.arguments import default_delta
from dpoptim.data.noisy_counts import NoisyCounter
from dpoptim.data.processes import Processes
from dpoptim.integrations.losses import Task
from dpoptim.noise import NoiseKey
from dpoptim.privacy import Adjacency, ColumnCounts

_BINS = 32
_SMALLEST, _LARGEST = -30, 62  # powers of two; numbers beyond them count as 0 or as the largest


def open_columns(declared: Mapping[str, Any]) -> list[str]:
    """The columns to estimate."""
    return [name for name, value in declared.items() if isinstance(value, str) and value in ESTIMATES]


def with_estimates(
    recipe: Recipe, task: Task, *, estimate_columns: bool, stage: Callable[[str], None]
) -> tuple[Recipe, ColumnCounts | None, list[str]]:
    """The recipe with every column declared, the noisy counts that this cost, and notes.

    Without `estimate_columns`, no record is counted and open columns have placeholders.
    """
    declared = recipe.columns or {}
    reused = [name for name, value in declared.items() if isinstance(value, Mapping) and value.get("estimated")]
    notes = [f"{', '.join(reused)}: estimated by an earlier run, whose epsilon adds to this one's"] if reused else []
    names = open_columns(declared)
    if not names or not task.is_tabular:
        return recipe, None, notes
    if recipe.user_column is not None:
        raise ValueError(f"columns.{names[0]} cannot be estimated for users, only for records; declare it")
    if (label := label_of(recipe)) in names and declared[label] == ESTIMATE_CATEGORIES:
        raise ValueError(f"columns.{label} is the label, whose classes cannot be estimated; declare them")
    columns, locate = read_columns(recipe.data, split=recipe.split, kind=RecordKind.TABULAR)
    for name in names:
        if name not in columns:
            raise ValueError(f"columns.{name} is not a column of {recipe.data}; the columns are {', '.join(columns)}")
    everyone = len(columns[names[0]])
    places = np.setdiff1d(np.arange(everyone), held_out_places(everyone, validation_fraction(recipe)))
    epsilon = recipe.columns_epsilon or (recipe.epsilon or 0.0) / 10
    if not epsilon:
        raise ValueError(
            "columns_epsilon is missing; with noise_multiplier, set it to the epsilon to spend on estimates"
        )
    if recipe.epsilon is not None and epsilon >= recipe.epsilon:
        raise ValueError(f"columns_epsilon={recipe.columns_epsilon} must be below epsilon={recipe.epsilon}")
    counts = ColumnCounts.calibrate(
        columns=len(names),
        releases=2 if ESTIMATE_RANGE in declared.values() else 1,
        epsilon=epsilon,
        delta=(recipe.delta or default_delta(recipe.num_examples or len(places))) / 10,
        adjacency=Adjacency(recipe.adjacency),
    )
    if not estimate_columns:
        placeholders = {ESTIMATE_RANGE: {"center": 0.0, "scale": 1.0}, ESTIMATE_CATEGORIES: ["?"]}
        closed = {name: placeholders[value] if name in names else value for name, value in declared.items()}
        note = f"a dry run does not estimate {', '.join(names)}; sizes assume one category each"
        return recipe.replace(columns=closed), counts, [*notes, note]
    stage("estimating columns")
    key, _ = Processes.current().shared_run("estimates of columns", None, None)  # used here only, and forgotten
    own = {name: [columns[name][place] for place in places.tolist()] for name in names}
    found = estimated(own, declared, counts, key, lambda index: locate(int(places[index])))
    return recipe.replace(columns=found), counts, notes


def estimated(
    columns: Columns, declared: Mapping[str, Any], counts: ColumnCounts, key: NoiseKey, locate: Locate
) -> dict[str, Any]:
    """The declarations with estimates for those that were left open.

    Args:
        columns: The columns of the training records.
        declared: The declarations of the recipe.
        counts: The noise.
        key: A key that is used for nothing else.
        locate: Describes the place of a record, for errors.

    Guarantee: the estimates satisfy `counts`.

    Raises:
        ValueError: The noise hides every value of a column.
    """
    counter = NoisyCounter(counts=counts, key=key)
    found = dict(declared)
    for name in open_columns(declared):
        if declared[name] == ESTIMATE_CATEGORIES:
            given = [text_of(value) for value in columns[name] if not is_missing(value)]
            names = list(counter.frequent(given, column=name, release=0))
            found[name] = {"categories": _some(name, names, counts), "estimated": True}
        else:
            values = numbers(name, columns[name], locate)
            found[name] = _range(counter, name, values[~np.isnan(values)], counts)
    return found


def _range(counter: NoisyCounter, name: str, values: NDArray[np.float64], counts: ColumnCounts) -> dict[str, Any]:
    """A center and a scale: the median, and half the distance of the 16th and 84th percentiles."""
    octaves = _some(name, list(counter.frequent(_octave(values).tolist(), column=name, release=0)), counts)
    low, high = min(_edges(one)[0] for one in octaves), max(_edges(one)[1] for one in octaves)
    if low == high:  # all numbers are 0
        return {"center": 0.0, "scale": 1.0, "estimated": True}
    places = np.clip(np.floor((values - low) / (high - low) * _BINS), 0, _BINS - 1).astype(np.int64)
    noisy = counter.histogram(places.tolist(), size=_BINS, column=name, release=1)
    total = np.cumsum(np.maximum(noisy, 0.0))
    edges = np.linspace(low, high, _BINS + 1)
    first, middle, last = np.interp(np.array([0.16, 0.5, 0.84]) * total[-1], np.append(0.0, total), edges)
    spread = max((last - first) / 2, (high - low) / _BINS)
    return {"center": float(f"{middle:.3g}"), "scale": float(f"{spread:.3g}"), "estimated": True}


def _octave(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """The signed power of two below each number, counted from 1; 0 for numbers near 0."""
    exponents = np.clip(np.frexp(values)[1].astype(np.int64) - 1, _SMALLEST - 1, _LARGEST)
    return np.where(values == 0, 0, np.sign(values).astype(np.int64) * (exponents - _SMALLEST + 1))


def _edges(octave: int) -> tuple[float, float]:
    """The lowest and the highest number of an octave."""
    if octave == 0:
        return 0.0, 0.0
    low = 2.0 ** (abs(octave) - 1 + _SMALLEST)
    return (low, 2 * low) if octave > 0 else (-2 * low, -low)


def _some(name: str, found: Sequence[Any], counts: ColumnCounts) -> list[Any]:
    if not found:
        raise ValueError(
            f"column {name!r} cannot be estimated: no value is in more than about {counts.threshold:.0f} records. "
            "Declare it, or set a larger columns_epsilon."
        )
    return list(found)
