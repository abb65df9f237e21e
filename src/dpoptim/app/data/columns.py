"""Which columns of a table hold the text, the label and the features, and what is in them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.data import sources


class Kind(enum.Enum):
    """What a record is made of."""

    TEXT = "text"
    IMAGE = "image"
    TABULAR = "tabular"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the caller asked for."""

    source: str
    text: str | None
    label: str | None
    kind: Kind | None
    names: Sequence[str] | None
    place: Callable[[int], str] = sources.record_number  # where the record of an index lies, for errors


def label_column_of(columns: sources.Columns, asked: Choice) -> str | None:
    """Where the labels are: as asked for, else in "label" or "labels"; None where there are none."""
    if asked.label is not None:
        _require(asked.label, "label_column", columns)
        return asked.label
    return next((name for name in ("label", "labels") if name in columns and name != asked.text), None)


def text_column_of(columns: sources.Columns, label: str | None, asked: Choice) -> str | None:
    """Where the texts are; None for a table of numbers."""
    if asked.text is not None:
        _require(asked.text, "text_column", columns)
        return asked.text
    if "text" in columns and label != "text":
        return "text"
    strings = [name for name, values in columns.items() if name != label and _is_strings(values)]
    if len(strings) == 1:
        return strings[0]
    if strings or asked.kind is Kind.TEXT:
        raise ValueError(
            f"data {asked.source!r}: which column holds the text? There is no 'text' and "
            f"{f'{len(strings)} columns of strings' if strings else 'no column of strings'}; set text_column "
            f"(--text-column) to one of {', '.join(columns)}"
        )
    return None


def _require(name: str, argument: str, columns: sources.Columns) -> None:
    if name not in columns:
        raise ValueError(f"{argument}={name!r} is not a column; there are {', '.join(columns) or 'none'}")


def _is_strings(values: Sequence[Any]) -> bool:
    """Whether a column holds strings that are not all numbers, as a .csv writes them."""
    if isinstance(values, sources.HubColumn):
        return values.is_string
    some = [value for value in values if value is not None and value != ""]
    return all(isinstance(value, str) for value in some) and not all(_is_number(value) for value in some)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def texts_of(columns: sources.Columns, column: str, asked: Choice) -> list[str]:
    """The text of each record; null is an empty text."""
    texts = []
    for index, value in enumerate(columns[column]):
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f"text_column={column!r} holds a {type(value).__name__}, not a string (first: {asked.place(index)}); "
                "choose another column"
            )
        texts.append(value or "")
    return texts


def count_empty(texts: Sequence[str]) -> int:
    """How many texts have nothing but blanks."""
    return sum(not text.strip() for text in texts)


def labels_of(
    columns: sources.Columns, label: str | None, asked: Choice, *, needed: bool = False
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """The labels; none where there is no such column, or where one that was only guessed does not hold labels."""
    if label is None:
        return None, ()
    values = columns[label]
    declared = values.class_names if isinstance(values, sources.HubColumn) else None
    if declared is not None:
        values = [declared[value] if value is not None and value >= 0 else None for value in values]
    try:
        return labels_among(list(values), asked.names or declared, f"label_column={label!r}", asked.place)
    except ValueError:
        if needed or asked.label is not None or asked.names is not None:
            raise
        return None, ()


def labels_among(
    values: Sequence[Any], declared: Sequence[str] | None, where: str, place_of: Callable[[int], str]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels as places in the declared names, or in the names that are found: numbers by size, then strings."""
    missing = [index for index, value in enumerate(values) if value is None or value == ""]
    if missing:
        raise ValueError(
            f"{where} has {len(missing)} records without a label (first: {place_of(missing[0])}); every record needs "
            "one"
        )
    odd = [index for index, value in enumerate(values) if not _may_be_label(value)]
    if odd:
        kinds = sorted({type(values[index]).__name__ for index in odd} - {"float"})
        raise ValueError(
            f"{where} must hold class names or whole numbers, and holds {', '.join(kinds) or 'fractions'} (first: "
            f"{place_of(odd[0])}); choose another column"
        )
    found = [value if isinstance(value, str) else str(int(value)) for value in values]
    if declared is None:
        names = tuple(sorted(set(found), key=lambda name: (0, int(name), "") if _is_whole(name) else (1, 0, name)))
    else:
        names = tuple(str(name) for name in declared)
        if len(set(names)) < len(names):
            raise ValueError(f"label_names={list(names)} has a name twice; give each once")
        strange = [index for index, name in enumerate(found) if name not in names]
        if strange:  # what they say is private
            raise ValueError(
                f"{where} has {len(strange)} labels (first: {place_of(strange[0])}) that are not among the "
                f"{len(names)} declared label_names; add their names, or remove the records"
            )
    place = {name: number for number, name in enumerate(names)}
    return np.array([place[name] for name in found], dtype=np.int64), names


def _may_be_label(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and value.is_integer())


def _is_whole(name: str) -> bool:
    return name.removeprefix("-").isdecimal()


def feature_matrix(columns: sources.Columns, names: list[str], asked: Choice) -> NDArray[np.float32]:
    """The named columns, [records, columns]; refuses what is no finite number."""
    if not names:
        raise ValueError(f"data {asked.source!r} has no column beside the label; there are no features")
    found = np.empty((len(columns[names[0]]), len(names)), dtype=np.float32)
    for place, name in enumerate(names):
        values = np.array([float(value) if _is_number(value) else np.nan for value in columns[name]])
        with np.errstate(over="ignore"):
            found[:, place] = values
        odd = np.flatnonzero(~np.isfinite(found[:, place]))
        if len(odd):
            first = asked.place(int(odd[0]))
            raise ValueError(
                f"column {name!r} has {len(odd)} values that are no finite numbers (first: {first}); "
                "fill or encode them (by a rule that does not look at the other records), or leave the column out"
            )
    return found
