"""Digests of records: whether the data of a run that goes on is the data that it was begun with.

Noise is a function of (key, run, step). If a step were taken again over other records, the difference of the two
releases would have no noise in it; so a run keeps a digest of its records and is refused over others.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.noise import NoiseKey

_LOOKED_AT_TWICE = 4  # at either end
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, eq=False)
class RecordDigests:
    """`whole` names all records in their order, `each` has 64 bits of every one, to count those that two sets share."""

    whole: str
    each: NDArray[np.uint64]

    def shared_with(self, other: RecordDigests) -> int:
        """How many records occur in `other` too; both must have been taken with one key."""
        return int(np.isin(self.each, other.each).sum())

    def same_records(self, other: RecordDigests) -> bool:
        """Whether both have the same records, in whatever order."""
        return len(self.each) == len(other.each) and bool((np.sort(self.each) == np.sort(other.each)).all())


def digest_records(records: Any, key: NoiseKey, *, what: str = "dataset") -> RecordDigests:
    """A keyed digest of every record and of all in order.

        d_i = BLAKE2b(subkey, record i),  whole = BLAKE2b(subkey, d_0 d_1 …)

    `records` is a list, a torch dataset or a `datasets.Dataset` of texts, numbers, arrays, tensors, images, paths
    (which stand for the bytes of their file), and lists, dicts, tuples and plain objects of these.

    Guarantee: without the key the digests tell nothing of the records. With it, other values, another type or shape of
    an array, and another order give other digests.
    Edge cases: ValueError for records that are others at each access (random augmentation), and for those of a type
    that cannot be read. It reads every record once: about 5 s for a million short texts, 20 s for a million dicts of 20
    tokens, 2 s for a gigabyte of arrays.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> one, other = digest_records(["a", "b", "c"], key), digest_records(["b", "a", "c"], key)
    >>> one.whole == other.whole, one.same_records(other), digest_records(["c", "d"], key).shared_with(one)
    (False, True, 1)
    """
    secret = key.subkey("digest", "records")
    size = len(records)
    for place in sorted({*range(min(size, _LOOKED_AT_TWICE)), *range(max(0, size - _LOOKED_AT_TWICE), size)}):
        if _digest(records[place], secret, what) != _digest(records[place], secret, what):
            raise ValueError(
                f"{what}: example {place} is another one each time it is read (random augmentation?), so that a run "
                "that goes on could not be told from one over other data; keep the dataset fixed and make what is "
                "random in the collator, which draws from the run's own secret numbers"
            )
    whole, each = blake2b(key=secret, digest_size=16), np.empty(size, dtype=np.uint64)
    place = -1
    for place, record in enumerate(_in_order(records)):
        digest = _digest(record, secret, what)
        whole.update(digest)
        each[place] = int.from_bytes(digest[:8], "little")
    if place + 1 != size:
        raise ValueError(f"{what} says that it has {size} examples and gives {place + 1}; mend its __len__")
    return RecordDigests(whole.hexdigest(), each)


def digest_in_memory(dataset: Any, key: NoiseKey) -> str | None:
    """A keyed digest where it costs little: lists, tuples, arrays, tensors and TensorDatasets; None for others.

    Edge cases: a path stands for its name here, and no file is read.
    """
    if isinstance(dataset, torch.utils.data.TensorDataset):
        dataset = dataset.tensors
    elif not isinstance(dataset, list | tuple | range | np.ndarray | Tensor):
        return None
    with contextlib.suppress(ValueError):  # objects that cannot be read
        return _digest(dataset, key.subkey("digest", "records"), "dataset", files=False).hex()
    return None


def digest_values(value: Any, key: NoiseKey) -> str:
    """A keyed digest of plain values, arrays and tensors, such as frozen parameters."""
    return _digest(value, key.subkey("digest", "values"), "value").hex()


def _in_order(records: Any) -> Iterable[Any]:
    """The records one after another; of a `datasets.Dataset` many rows are read at once."""
    if hasattr(records, "column_names") and hasattr(records, "select"):
        for start in range(0, len(records), _ROWS_AT_ONCE):
            columns = records[start : start + _ROWS_AT_ONCE]
            names = list(columns)
            for row in zip(*columns.values(), strict=True):
                yield dict(zip(names, row, strict=True))
        return
    for place in range(len(records)):
        yield records[place]


def _digest(record: Any, secret: bytes, what: str, *, files: bool = True) -> bytes:
    encoded = bytearray()
    _add(record, encoded, files, what)
    return blake2b(encoded, key=secret, digest_size=16).digest()


def _add(value: Any, to: bytearray, files: bool, what: str) -> None:
    """Append the value as bytes that no other value has: a letter for its kind, its size, its content."""
    kind = type(value)
    if kind is str:
        data = value.encode("utf-8", "surrogatepass")
        to += b"s%d:" % len(data)
        to += data
    elif kind is int:
        to += b"i%d;" % value
    elif kind is bool or value is None:
        to += b"n" if value is None else b"T" if value else b"F"
    elif kind is float:
        to += b"f" + struct.pack("<d", value)
    elif kind is dict or isinstance(value, Mapping):
        to += b"d%d:" % len(value)
        for name in sorted(value, key=str):
            _add(name, to, files, what)
            _add(value[name], to, files, what)
    elif kind is list or kind is tuple:
        _add_sequence(value, to, files, what)
    elif isinstance(value, bytes | bytearray | memoryview):
        to += b"b%d:" % len(value)
        _add_bytes(value, to)
    elif isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        to += f"t{value.dtype}{tuple(value.shape)}:".encode()
        if flat.numel():
            _add_bytes(flat.view(torch.uint8).numpy().data, to)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        to += f"a{value.dtype.str}{value.shape}:".encode()
        _add_bytes(value.tobytes(), to)
    elif isinstance(value, PurePath):
        _add(Path(value).read_bytes() if files else str(value), to, files, what)
    elif isinstance(value, Set):
        _add(sorted(_digest(part, b"", what, files=files) for part in value), to, files, what)
    elif isinstance(value, Sequence | np.ndarray):
        _add_sequence(value, to, files, what)
    else:
        _add_object(value, to, files, what)


def _add_bytes(data: Any, to: bytearray) -> None:
    """As they are, or, where there are many, as their own digest: nothing large is copied."""
    to += data if len(data) < 1 << 20 else b"+" + blake2b(data, digest_size=32).digest()


def _add_sequence(values: Any, to: bytearray, files: bool, what: str) -> None:
    if len(values) and type(values[0]) is int:
        with contextlib.suppress(TypeError, OverflowError):
            numbers = array.array("q", values)  # lists of tokens, quickly
            to += b"I%d:" % len(numbers)
            _add_bytes(numbers.tobytes(), to)
            return
    to += b"l%d:" % len(values)
    for value in values:
        _add(value, to, files, what)


def _add_object(value: Any, to: bytearray, files: bool, what: str) -> None:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields: Any = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
    elif hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size"):  # an image of pillow's
        name, fields = "image", [value.mode, list(value.size), value.tobytes()]
    elif getattr(value, "__dict__", None) and not callable(value):
        fields = vars(value)
    else:
        raise ValueError(
            f"{what} has a {name} in its examples, whose content cannot be read; make it of texts, numbers, arrays, "
            "tensors, and lists or dicts of these"
        )
    to += b"o"
    _add(name, to, files, what)
    _add(fields, to, files, what)
