"""Digests of records: whether the data of a run that goes on is the data that it was begun with.

Noise is a function of (key, run, step). If a step were taken again over other records, the difference of the two
releases would have no noise in it; so a run keeps a digest of its records and is refused over others.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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

    @property
    def tell_records_apart(self) -> bool:
        """Whether at least half are distinct: of a few binary features, equal records may be of different people."""
        return 2 * len(np.unique(self.each)) >= len(self.each)


def digest_records(
    records: Any,
    key: NoiseKey,
    *,
    what: str = "dataset",
    form: Callable[[Any], Any] = lambda record: record,
    look: Callable[[int, Any], None] | None = None,
) -> RecordDigests:
    """A keyed digest of every record and of all in order.

        d_i = BLAKE2b(subkey, record i),  whole = BLAKE2b(subkey, d_0 d_1 …)

    `records` is a list, a torch dataset or a `datasets.Dataset` of texts, numbers, arrays, tensors, images, paths
    (which stand for the bytes of their file), and lists, dicts, tuples and plain objects of these. `form` is applied to
    each record first; `look(place, record)` is called with each as it is read.

    Guarantee: without the key the digests tell nothing of the records. With it, other values, another type or shape of
    an array, and another order, of records or of the keys of a dict, give other digests.
    Edge cases: ValueError for records that are others at each access (random augmentation), and for those of a type
    that cannot be read. It reads every record once: about 5 s for a million short texts, 20 s for a million dicts of 20
    tokens, 2 s for a gigabyte of arrays.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> one, other = digest_records(["a", "b", "c"], key), digest_records(["b", "a", "c"], key)
    >>> one.whole == other.whole, digest_records(["c", "d"], key).shared_with(one)
    (False, 1)
    """
    secret = key.subkey("digest", "records")
    size = len(records)
    for place in sorted({*range(min(size, _LOOKED_AT_TWICE)), *range(max(0, size - _LOOKED_AT_TWICE), size)}):
        if _digest(form(records[place]), secret, what) != _digest(form(records[place]), secret, what):
            raise ValueError(
                f"{what}: example {place} is another one each time it is read (random augmentation?), so that a run "
                "that goes on could not be told from one over other data; keep the dataset fixed and make what is "
                "random in the collator, which draws from the run's own secret numbers"
            )
    whole, each = blake2b(key=secret, digest_size=16), np.empty(size, dtype=np.uint64)
    place = -1
    for place, record in enumerate(_in_order(records)):
        if look is not None:
            look(place, record)
        digest = _digest(form(record), secret, what)
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
    with contextlib.suppress(ValueError, TypeError, RuntimeError):  # objects that cannot be read
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
        for name in value:  # in their order, which a collator may follow
            _add(name, to, files, what)
            _add(value[name], to, files, what)
    elif kind is list or kind is tuple:
        _add_sequence(value, to, files, what)
    elif isinstance(value, bytes | bytearray | memoryview):
        to += b"b%d:" % len(value)
        _add_bytes(value, to)
    elif isinstance(value, Tensor):
        _add_tensor(value, to, files, what)
    elif isinstance(value, np.ma.MaskedArray):
        to += b"m"
        for part in (value.data, np.ma.getmaskarray(value), value.fill_value):
            _add(part, to, files, what)
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        to += f"a{value.dtype.descr if value.dtype.names else value.dtype.str}{value.shape}:".encode()
        _add_bytes(value.tobytes(), to)
    elif isinstance(value, PurePath):
        _add(Path(value).read_bytes() if files else str(value), to, files, what)
    elif isinstance(value, Set):
        _add(sorted(_digest(part, b"", what, files=files) for part in value), to, files, what)
    elif isinstance(value, Sequence | np.ndarray):
        _add_sequence(value, to, files, what)
    else:
        _add_object(value, to, files, what)


def _add_tensor(value: Tensor, to: bytearray, files: bool, what: str) -> None:
    """Its values, whatever lazy view it is; one of another layout by its parts."""
    value = value.detach()
    if value.is_quantized:
        raise ValueError(f"{what} has a quantized tensor ({value.dtype}), which is not compared; dequantize it")
    if value.layout != torch.strided:
        if value.layout != torch.sparse_coo:
            raise ValueError(f"{what} has a tensor of layout {value.layout}, which is not compared; make it dense")
        value = value.coalesce()
        to += f"p{tuple(value.shape)}:".encode()
        _add([value.indices(), value.values()], to, files, what)
        return
    to += f"t{value.dtype}{tuple(value.shape)}:".encode()
    flat = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel():
        if flat.stride() != (1,):  # of one element, out of a strided view
            flat = flat.clone(memory_format=torch.contiguous_format)
        _add_bytes(flat.view(torch.uint8).numpy().data, to)


def _add_bytes(data: Any, to: bytearray) -> None:
    """As they are, or, where there are many, as their own digest: nothing large is copied."""
    to += data if len(data) < 1 << 20 else b"+" + blake2b(data, digest_size=32).digest()


def _add_sequence(values: Any, to: bytearray, files: bool, what: str) -> None:
    if len(values) and type(values[0]) is int and set(map(type, values)) == {int}:
        with contextlib.suppress(OverflowError):
            numbers = array.array("q", values)  # lists of tokens, quickly
            to += b"I%d:" % len(numbers)
            _add_bytes(numbers.tobytes(), to)
            return
    to += b"l%d:" % len(values)
    for value in values:
        _add(value, to, files, what)


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds in its `__dict__` and its `__slots__`."""
    slots = [name for part in type(value).__mro__ for name in _names(part.__dict__.get("__slots__", ()))]
    found = {name: getattr(value, name) for name in slots if name[:2] != "__" and hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _add_object(value: Any, to: bytearray, files: bool, what: str) -> None:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields: Any = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
    elif hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size"):  # an image of pillow's
        palette = value.getpalette() if getattr(value, "palette", None) is not None else None
        shown = [str(getattr(value.palette, "mode", "")), str(value.info.get("transparency"))] if palette else []
        name, fields = "image", [value.mode, list(value.size), value.tobytes(), palette, shown]
    elif not callable(value) and (held := attributes_of(value)):
        fields = held
    else:
        raise ValueError(
            f"{what} has a {name} in its examples, whose content cannot be read; make it of texts, numbers, arrays, "
            "tensors, and lists or dicts of these"
        )
    to += b"o"
    _add(name, to, files, what)
    _add(fields, to, files, what)
