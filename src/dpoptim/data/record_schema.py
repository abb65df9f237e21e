"""Records of one form: the same keys, and one kind of value at each, in every record.

Stock collators (torch's `default_collate`, those of transformers) take the form of a whole batch from its first record:
which keys it has, whether labels are whole numbers, whether there is a mask. A record of another form then changes what
is made of the others (labels of 0.9 become 0 behind a label 1), and clipping, which bounds what a record adds by its
own loss, bounds nothing of that.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch.utils.data
from torch import Tensor

from dpoptim.data.record_fingerprint import attributes_of

_NUMPY = (np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.float16, np.float32, np.float64)
_PLAIN = frozenset((str, int, float, bool, type(None), *_NUMPY))  # whose type alone is their form
_LISTS = {kind: (list, kind) for kind in _PLAIN}
_AT_ONCE = _PLAIN | {dict, tuple}
_NAMED = 4  # kinds of a mixed list, in a message


@dataclass(frozen=True)
class Form:
    """A kind of value; of a sequence what each of its elements is, of a dict what it has at each key.

    A sequence of several kinds has them by place, as a record that is a tuple has. An empty sequence has neither.
    """

    kind: str
    each: Form | None = None
    parts: Mapping[Any, Form] | None = None

    def __str__(self) -> str:
        if self.each is not None:
            return f"{self.kind} of {self.each}"
        if self.parts and 0 in self.parts:
            return f"{self.kind} of {' and '.join(list(dict.fromkeys(map(str, self.parts.values())))[:_NAMED])}"
        return self.kind


class RecordSchema:
    """Holds each record, called with its place, to the form of those before it.

    Numbers agree by kind: bool, int or float (numpy's ints and 64-bit floats too; of its others collators make others);
    None is a kind of its own, so that a column with gaps is refused. Of lists the elements must be of one kind, and the
    lengths may differ: an empty one agrees with any. Tensors and arrays agree in dtype and number of axes, dicts in
    their keys, records that are tuples or plain objects in each of their parts. Images are one kind, whatever file they
    are from, and other objects are of the kind that their class is. With `columns`, only those keys of a dict count.

    Guarantee: ValueError, in one line without any value, at the first record of another form.
    Cost: a quarter of what digests of the records cost: 2 s for a million texts with a label, 6 s for a million dicts
    of three lists of 20 tokens.

    >>> same = RecordSchema("dataset")
    >>> same(0, {"ids": [1, 2], "label": 0.5})
    >>> same(1, {"ids": [], "label": 1})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: dataset: record 1 has int at ['label'], where the records before it have float; collators take ...
    """

    def __init__(self, what: str, *, columns: Collection[str] | None = None) -> None:
        self._what = what
        self._columns = None if columns is None else frozenset(columns)
        self._form: Form | None = None
        self._seen: set[Any] = set()  # forms that a glance tells, and that were compared

    def __call__(self, place: int, record: Any) -> None:
        if self._columns is not None and isinstance(record, dict):
            record = {name: value for name, value in record.items() if name in self._columns}
        elif type(record) not in _AT_ONCE and isinstance(record, UserDict):  # as tokenizers give
            record = record.data
        sight = _sight_of_record(record)
        if sight is not None and sight in self._seen:
            return
        try:
            form = form_of(record, is_record=True)
            self._form = form if self._form is None else joined(self._form, form)
        except _Other as other:
            raise ValueError(
                f"{self._what}: record {place} {other}; collators take the form of a whole batch from its first "
                "record, so that one record would change the others; make every record of one form: the same keys, "
                "and values of one type (float(label), say)"
            ) from None
        if sight is not None:
            self._seen.add(sight)


def check_all_forms(dataset: Any) -> None:
    """Refuse records of several forms; each is read once."""
    same = RecordSchema("dataset")
    for place in range(len(dataset)):
        same(place, dataset[place])


def is_in_memory(dataset: Any) -> bool:
    """Whether reading all records costs little: lists and tuples, and parts and chains of them."""
    if isinstance(dataset, torch.utils.data.Subset):
        return is_in_memory(dataset.dataset)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return all(map(is_in_memory, dataset.datasets))
    return type(dataset) in (list, tuple)


def collate_one_form(collate: Callable[[list[Any]], Any], records: list[Any]) -> Any:
    """What `collate` makes of the records of one batch, which must have one form; they are compared with each other.

    >>> collate_one_form(len, [{"x": 0.5}, {"x": 1}])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: a batch of dataset: record 1 has int at ['x'], where the records before it have float; collators ...
    """
    if not isinstance(records, list):  # a dataset has made a batch
        return collate(records)
    types = set(map(type, records))
    if len(types) != 1 or not types <= _PLAIN:
        same = RecordSchema("a batch of dataset")
        for place, record in enumerate(records):
            same(place, record)
    return collate(records)


def form_of(value: Any, *, is_record: bool = False) -> Form:
    """The form of a value; a tuple or an object that is the record itself has its parts, others have not.

    >>> str(form_of([[1, 2], []])), str(form_of([1, 0.5])), str(form_of(torch.zeros(2, 3)))
    ('list of list of int', 'list of int and float', 'tensor of torch.float32 with 2 axes')
    """
    if (kind := _number_or_text(value)) is not None:
        return Form(kind)
    if isinstance(value, Tensor):
        return Form(f"tensor of {value.dtype} with {value.ndim} axes")
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        kind = {"U": "str", "S": "bytes"}.get(value.dtype.kind, str(value.dtype))  # of texts of any length
        return Form(f"{'masked ' * isinstance(value, np.ma.MaskedArray)}array of {kind} with {value.ndim} axes")
    if isinstance(value, Mapping):
        return Form("dict", parts={name: form_of(value[name]) for name in value})
    if isinstance(value, tuple) and (is_record or hasattr(value, "_fields")):
        return Form(type(value).__name__, parts=dict(enumerate(map(form_of, value))))
    if isinstance(value, Sequence | np.ndarray):
        return _form_of_sequence(value)
    if isinstance(value, Set | PurePath):
        return Form("set" if isinstance(value, Set) else "path")
    if hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size"):  # of pillow's
        return Form("image")
    held = attributes_of(value) if is_record else {}  # collators take vars() of such records
    return Form(type(value).__name__, parts={name: form_of(part) for name, part in held.items()} if held else None)


def joined(one: Form, other: Form, where: str = "", inside: str = "") -> Form:
    """The form of both, where an empty sequence takes the other's elements; refused where they differ."""
    if one.kind != other.kind:
        raise _Other.kinds(one, other, where, inside)
    if one.each is None and one.parts is None:
        return other
    if other.each is None and other.parts is None:
        return one
    if one.each is not None and other.each is not None:
        each = joined(one.each, other.each, where, f"{inside}{one.kind} of ")
        return one if each is one.each else Form(one.kind, each=each)
    if one.parts is None or other.parts is None:
        raise _Other.kinds(one, other, where, inside)
    if one.parts.keys() != other.parts.keys():
        raise _Other.keys(one.parts, other.parts, where)
    parts = {name: joined(part, other.parts[name], f"{where}[{name!r}]") for name, part in one.parts.items()}
    return Form(one.kind, parts=parts)


class _Other(Exception):
    """What a record has, and what those before it have."""

    @classmethod
    def kinds(cls, one: Form, other: Form, where: str, inside: str) -> _Other:
        at = f" at {where}" if where else ""
        return cls(f"{'has' if where else 'is'} {inside}{other}{at}, where the records before it have {inside}{one}")

    @classmethod
    def keys(cls, one: Mapping[Any, Form], other: Mapping[Any, Form], where: str) -> _Other:
        if missing := [name for name in one if name not in other]:
            return cls(f"has no {where}[{missing[0]!r}], which the records before it have")
        extra = next(name for name in other if name not in one)
        return cls(f"has {where}[{extra!r}], which the records before it have not")


def _number_or_text(value: Any) -> str | None:
    if value is None:
        return "None"
    for kinds, name in _SCALARS:
        if isinstance(value, kinds):
            return name
    return f"numpy {value.dtype.name}" if isinstance(value, np.generic) else None


_SCALARS: Iterable[tuple[tuple[type, ...], str]] = (
    ((str,), "str"),
    ((bool,), "bool"),
    ((int, np.integer), "int"),
    ((float,), "float"),  # numpy's of 64 bits too
    ((bytes, bytearray, memoryview), "bytes"),
)


def _form_of_sequence(values: Any) -> Form:
    kind = "array" if isinstance(values, np.ndarray) else type(values).__name__
    if len(types := set(map(type, values))) == 1 and types <= _PLAIN:
        return Form(kind, each=form_of(values[0]))
    forms = [form_of(value) for value in values]
    each = forms[0] if forms else None
    try:
        for form in forms[1:]:
            each = joined(each, form) if each is not None else form
    except _Other:
        return Form(kind, parts=dict(enumerate(forms)))
    return Form(kind, each=each)


def _sight_of_record(record: Any) -> Any:
    """What tells the form of a record at a glance, or None where it must be looked into."""
    kind = type(record)
    if kind is dict:
        sights = [*map(_sight, record.values())]
        return None if None in sights else (kind, *record, *sights)
    if kind is tuple:
        sights = [*map(_sight, record)]
        return None if None in sights else (kind, *sights)
    return _sight(record)


def _sight(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return kind
    if kind is list:
        types = set(map(type, value))
        return _LISTS.get(*types) if len(types) == 1 else None if types else list
    if kind is Tensor or (kind is np.ndarray and not value.dtype.hasobject):
        return kind, value.dtype, value.ndim
    return None
