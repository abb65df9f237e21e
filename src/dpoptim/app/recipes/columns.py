"""What is declared about the columns of a table: the scale of numbers, the names of categories, or what to estimate.

A declaration is public. It comes from what everyone knows, such as the range of an age, and never from the records.
This file imports only the standard library, so that `dpoptim --help` stays fast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dpoptim.arguments import check_number

ESTIMATE_RANGE, ESTIMATE_CATEGORIES = "estimate-range", "estimate-categories"
ESTIMATES = (ESTIMATE_RANGE, ESTIMATE_CATEGORIES)
FORMS = '{low = 0, high = 120}, {center = 50, scale = 20}, ["a", "b"], "estimate-range" or "estimate-categories"'
ALL_OTHERS = "*"
"""In `drop`: every column that is not declared."""

_FURTHEST = 10.0  # scales from the center; a value beyond them is an outlier or a mistake
_BLANK = "?"
_RANGE = re.compile(r"(?P<low>[-+.\de]+):(?P<high>[-+.\de]+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Number:
    """A column of numbers, read as (value − center)/scale and limited to ±limit.

    >>> Number.between(0, 120)
    Number(center=60.0, scale=30.0, limit=2.0)
    """

    center: float
    scale: float
    limit: float = _FURTHEST

    @classmethod
    def between(cls, low: float, high: float) -> Number:
        """Numbers from `low` to `high`, read as −2 to 2: typical values are then about 1 in size."""
        return cls(center=(low + high) / 2, scale=(high - low) / 4, limit=2.0)


@dataclass(frozen=True, kw_only=True)
class Categories:
    """A column of categories with these names; all others are read as "other"."""

    names: tuple[str, ...]


Column = Number | Categories


def column_of(name: str, declared: Any) -> Column | str:
    """Read one declaration; "estimate-range" and "estimate-categories" are returned unchanged.

    >>> column_of("ward", ["a", "b"])
    Categories(names=('a', 'b'))

    Raises:
        ValueError: It has none of these forms.
    """
    where = f"columns.{name}"
    if isinstance(declared, str) and declared in ESTIMATES:
        return declared
    if declared == _BLANK:
        raise ValueError(f"{where} is not filled in. Write {FORMS}, or add {name!r} to drop.")
    if isinstance(declared, Mapping):
        parts = {key: part for key, part in declared.items() if key != "estimated"}
        if parts.keys() == {"categories"}:
            return _categories(where, parts["categories"])
        if parts.keys() == {"low", "high"}:
            check_number(f"{where}.low", parts["low"])
            check_number(f"{where}.high", parts["high"], above=parts["low"])
            return Number.between(float(parts["low"]), float(parts["high"]))
        if parts.keys() == {"center", "scale"}:
            check_number(f"{where}.center", parts["center"])
            check_number(f"{where}.scale", parts["scale"], above=0)
            return Number(center=float(parts["center"]), scale=float(parts["scale"]))
    if isinstance(declared, list | tuple):
        return _categories(where, declared)
    raise ValueError(f"{where}={declared!r} is not a declaration. Write {FORMS}.")


def _categories(where: str, given: Any) -> Categories:
    if not isinstance(given, list | tuple) or not given or not all(type(name) in (str, int) for name in given):
        raise ValueError(f'{where}={given!r} must be a list of one or more names such as ["a", "b"]')
    found = tuple(str(name).strip() for name in given)
    if len(set(found)) < len(found) or "" in found:
        raise ValueError(f"{where}={list(given)} has a repeated or blank name; give each name once")
    return Categories(names=found)


def check_columns(name: str, value: Any) -> dict[str, Any]:
    """Check the declarations of a recipe and return them as plain values."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{name}={value!r} must be a table of declarations: write [columns]")
    for column, declared in value.items():
        column_of(column, declared)
    return {column: list(part) if isinstance(part, tuple) else part for column, part in value.items()}


def columns_of_flags(given: Sequence[str], declared: Mapping[str, Any]) -> dict[str, Any]:
    """The declarations of `--columns`: NAME=LOW:HIGH, NAME=a,b,c, NAME=estimate-…, or NAME as the recipe declares it.

    >>> columns_of_flags(["age=0:120", "ward=a,b", "dose"], {"dose": {"center": 2, "scale": 1}})
    {'age': {'low': 0.0, 'high': 120.0}, 'ward': ['a', 'b'], 'dose': {'center': 2, 'scale': 1}}
    """
    found: dict[str, Any] = {}
    for text in given:
        name, is_declared, value = text.partition("=")
        if name in found:
            raise ValueError(f"--columns names {name!r} twice; name it once")
        if not is_declared:
            if name not in declared:
                raise ValueError(
                    f"--columns {name} is not declared in a recipe; write {name}=0:120 for numbers, {name}=a,b for "
                    f"categories, or {name}=estimate-range"
                )
            found[name] = declared[name]
        elif matched := _RANGE.fullmatch(value):
            try:
                found[name] = {key: float(part) for key, part in matched.groupdict().items()}
            except ValueError:
                raise ValueError(f"--columns {text}: {value!r} is not a range such as 0:120") from None
        else:
            found[name] = value if value in ESTIMATES else value.split(",")
    return found


def chosen_columns(names: Sequence[str], declared: Mapping[str, Any], drop: Sequence[str], source: str) -> list[str]:
    """Which of a table's columns (without the label) are used, in the order of the declarations.

    Raises:
        ValueError: A column is neither declared nor dropped, or a name is not a column.
    """
    for name in (*declared, *drop):
        if name not in names and name != ALL_OTHERS:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the columns are {', '.join(names)}"
            raise ValueError(f"data {source!r} has no column {name!r}; {hint}")
    for name in names:
        if name not in declared and name not in drop and ALL_OTHERS not in drop:
            raise ValueError(
                f"column {name!r} is not declared. Under [columns] in a recipe, write {_key(name)} = "
                f'{{low = 0, high = 120}} for numbers or {_key(name)} = ["a", "b"] for categories, or leave it out '
                f"with --drop {name}; `dpoptim columns {source}` prints a template for all columns"
            )
    return [name for name in declared if name not in drop]


def template(names: Sequence[str], *, label: str | None, source: str) -> str:
    """A recipe's table [columns] to fill in, from the names of the columns alone."""
    lines = [
        "# Fill in what is publicly known, such as the range of an age. Never look at the records: a minimum, a mean",
        "# or a list of values that is read from them is not private.",
        f"# Write one of: {FORMS}",
        '# The two "estimate-" forms read the records, with noise, and cost a part of epsilon. Delete the lines of',
        "# columns that you do not need, such as names and dates, and list these columns here:",
        "drop = []",
        f"data = {json.dumps(source, ensure_ascii=False)}",
        *([] if label is None else [f"label_column = {json.dumps(label, ensure_ascii=False)}"]),
        "",
        "[columns]",
        *(f'{_key(name)} = "{_BLANK}"' for name in names if name != label),
    ]
    return "\n".join(lines) + "\n"


def to_toml(declared: Mapping[str, Any]) -> str:
    """The declarations as lines of a TOML document, which may be followed by other settings."""
    return "".join(f"columns.{_key(name)} = {_inline(value)}\n" for name, value in declared.items())


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_inline(part)}" for name, part in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
