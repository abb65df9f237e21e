"""One schema for all records: the same keys, and the same type of value at each key.

Collators infer the layout of a batch from its first record: its keys, whether labels are integers, whether there is a
mask. A record with a different schema would change how the others are converted (after a first label of 1, a label of
0.9 becomes 0), and clipping does not bound that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch.utils.data
from torch import Tensor


class RecordSchema:
    """Compares every record with the first: its keys, and per key the type, or dtype and number of axes.

    bool, int, float and None differ. Lists are compared by the types of their elements; an empty list matches any.
    With `columns`, only these keys of a dict count.
    """

    def __init__(self, name: str, *, columns: Collection[str] | None = None) -> None:
        self._name = name
        self._columns = None if columns is None else frozenset(columns)
        self._schema: dict[Any, str] | None = None
        self._signature: Any = None  # of the last record

    def check(self, place: int, record: Any) -> None:
        """Refuse a record whose schema differs from that of earlier records, without printing any of its values."""
        signature = _signature(record)
        if signature != self._signature:
            self._compare(place, self._of(record))
            self._signature = signature

    def _compare(self, place: int, schema: dict[Any, str]) -> None:
        if self._schema is None:
            self._schema = schema
        if schema == self._schema:
            return
        for key in [*self._schema, *schema]:
            then, now = self._schema.get(key, "nothing"), schema.get(key, "nothing")
            may_be_empty = "empty list" in (then, now) and "nothing" not in (then, now)
            if then == "empty list" and may_be_empty:
                self._schema[key] = now
            elif then != now and not may_be_empty:
                at = "" if key is None else f" at {key!r}"
                raise ValueError(
                    f"{self._name}: record {place} has {now}{at}, but earlier records have {then}. Give all records "
                    "the same keys and types."
                )

    def _of(self, record: Any) -> dict[Any, str]:
        if isinstance(record, Mapping):
            chosen = self._columns
            return {key: _kind(record[key]) for key in record if chosen is None or key in chosen}
        if isinstance(record, tuple):
            return {place: _kind(value) for place, value in enumerate(record)}
        return {None: _kind(record)}


def check_records(name: str, records: Any) -> None:
    """Read every record once and refuse the first with a different schema."""
    schema = RecordSchema(name)
    for place in range(len(records)):
        schema.check(place, records[place])


def is_in_memory(dataset: Any) -> bool:
    """Whether it costs little to read all records: lists, tuples, and Subsets and ConcatDatasets of them."""
    if isinstance(dataset, torch.utils.data.Subset):
        return is_in_memory(dataset.dataset)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return all(map(is_in_memory, dataset.datasets))
    return type(dataset) in (list, tuple)


def collate_checked(collate: Callable[[list[Any]], Any], records: list[Any]) -> Any:
    """Collate the records of a batch, once their schemas have been compared."""
    if isinstance(records, list):  # otherwise the dataset has made the batch
        check_records("a batch of dataset", records)
    return collate(records)


def _signature(value: Any) -> Any:
    """Something cheap that is equal only for records with equal schemas."""
    kind = type(value)
    if kind is Tensor:
        return value.dtype, value.ndim
    if kind in _SCALARS:
        return kind
    if kind is list:
        return list, frozenset(map(type, value))
    if kind is tuple:
        return tuple(map(_signature, value))
    if kind is dict:
        return dict, *value, *map(_signature, value.values())
    return object()


_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor of {value.dtype} with {value.ndim} axes"
    if isinstance(value, np.ndarray):
        dtype = {"U": "str", "S": "bytes"}.get(value.dtype.kind, str(value.dtype))  # strings of any length
        return f"{type(value).__name__} of {dtype} with {value.ndim} axes"
    if isinstance(value, list | tuple):
        types = sorted({kind.__name__ for kind in set(map(type, value))})
        return f"{type(value).__name__} of {' and '.join(types)}" if types else "empty list"
    if hasattr(value, "tobytes") and hasattr(value, "mode"):  # a Pillow image, from any kind of file
        return "image"
    return "None" if value is None else type(value).__name__
