"""Encode the columns of a table as numbers, each record by itself: nothing is computed over several records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.data.readers import Columns, Locate, refuse
from dpoptim.app.recipes.columns import Column, Number, column_of

_MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "nat", "?"))


def is_missing(value: Any) -> bool:
    """Whether a cell holds no value: None, NaN, a blank, or a word such as NA.

    >>> [is_missing(value) for value in (None, float("nan"), " NA ", 0, "0", "Nancy")]
    [True, True, True, False, False, False]
    """
    if isinstance(value, str):
        return value.strip().lower() in _MISSING
    return value is None or (isinstance(value, float) and math.isnan(value))


def text_of(value: Any) -> str:
    """A cell as the name of a category; whole numbers have no decimals, because a missing value turns 3 into 3.0."""
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if is_whole else value).strip()


_ADVICE = "correct them or leave them empty, declare the column as categories, or leave it out (--drop)"


def numbers(name: str, values: Sequence[Any], locate: Locate, advice: str = _ADVICE) -> NDArray[np.float64]:
    """The values of a column of numbers; NaN where they are missing.

    Raises:
        ValueError: A value is neither a finite number nor missing. The error quotes no value.
    """

    def read(value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return math.nan if is_missing(value) else math.inf

    found = np.array([read(value) for value in values], dtype=np.float64)
    refuse(np.flatnonzero(np.isinf(found)).tolist(), locate, f"column {name!r}", "values that are not numbers", advice)
    return found


def encode_table(
    columns: Columns, declared: Mapping[str, Any], names: Sequence[str], locate: Locate
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """The chosen columns of a table as features, [records, features], and the features' names."""
    features, found = [], []
    for name in names:
        column = column_of(name, declared[name])
        if isinstance(column, str):
            raise ValueError(f"columns.{name}={column!r} is not estimated yet; `dpoptim train` estimates it")
        features.append(encoded(name, column, columns[name], locate))
        found += encoded_names(name, column)
    return np.concatenate(features, axis=1), tuple(found)


def encoded_names(name: str, column: Column) -> list[str]:
    """The names of the features that a column becomes."""
    if isinstance(column, Number):
        return [name, f"{name} (missing)"]
    return [*(f"{name} = {category}" for category in column.names), f"{name} (other)", f"{name} (missing)"]


def encoded(name: str, column: Column, values: Sequence[Any], locate: Locate) -> NDArray[np.float32]:
    """A column as features, [records, features]: a scaled number and whether it is missing, or one slot per category.

    A missing number is 0, the center. Every column has a slot for missing values, whether or not any is missing, so
    that the shape does not depend on the records.
    """
    if isinstance(column, Number):
        found = scaled(column, numbers(name, values, locate))
        absent = np.isnan(found)
        return np.stack([np.where(absent, 0.0, found), absent], axis=1).astype(np.float32)
    slots = {category: place for place, category in enumerate(column.names)}
    other, missing = len(slots), len(slots) + 1

    def place_of(value: Any) -> int:
        absent = is_missing(value)
        if absent and not isinstance(value, str):
            return missing
        return slots.get(text_of(value), missing if absent else other)  # "NA" may be the name of a category

    places = [place_of(value) for value in values]
    one_hot = np.zeros((len(places), len(slots) + 2), dtype=np.float32)
    one_hot[np.arange(len(places)), places] = 1
    return one_hot


def unfit(name: str, declared: Any, values: Sequence[Any], locate: Locate) -> NDArray[np.bool_]:
    """Which values are outside the declared range, or in no declared category, [records]."""
    column = column_of(name, declared)
    if isinstance(column, Number):
        return np.abs(numbers(name, values, locate) - column.center) > column.limit * column.scale * (1 + 1e-9)
    assert not isinstance(column, str)  # encode_table refuses it
    return encoded(name, column, values, locate)[:, -2] == 1


def scaled(column: Number, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers in units of the declared scale, within the declared limits."""
    with np.errstate(over="ignore"):
        return np.clip((values - column.center) / column.scale, -column.limit, column.limit)


def unscaled(column: Number, values: NDArray[Any]) -> NDArray[np.float64]:
    """The reverse of `scaled`."""
    return np.asarray(values, dtype=np.float64) * column.scale + column.center
