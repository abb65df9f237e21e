"""Keyed digests of records: they show whether a resumed run has the same records in the same order.

Noise is a function of (key, run, step). Repeating a step over different records would cancel the noise, and records in
a different order could take part more often than the plan allows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
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

_READ_TWICE = 4  # records at either end
_ROWS_AT_ONCE = 1000
_SCALARS = frozenset({str, bool, int, float, type(None)})  # a repr tells any two of them apart


@dataclass(frozen=True, eq=False)
class RecordFingerprint:
    """`digest` names all records in their order; `each` has 64 bits per record, to count what two sets share."""

    digest: str
    each: NDArray[np.uint64]

    def shared_with(self, other: RecordFingerprint) -> int:
        """How many records also occur in `other`, which must have been made with the same key."""
        return int(np.isin(self.each, other.each).sum())

    @property
    def mostly_distinct(self) -> bool:
        """Whether at least half of the records are distinct; few binary features make different people equal."""
        return 2 * len(np.unique(self.each)) >= len(self.each)


def fingerprint_records(
    records: Any, key: NoiseKey, *, name: str = "dataset", look: Callable[[int, Any], None] | None = None
) -> RecordFingerprint:
    """Compute a keyed digest of every record, and of all records in order.

        d_i = BLAKE2b(subkey, record i),  digest = BLAKE2b(subkey, d_0 d_1 …)

    Args:
        records: A list, a torch dataset or a `datasets.Dataset`. A record is made of strings, bytes, numbers, None,
            arrays, dense tensors, images, paths (which stand for the content of their file), and lists, tuples and
            dicts of these. It must be the same each time it is read.
        key: The noise key.
        name: The name of the records in errors.
        look: Called with the index and the content of each record as it is read.

    Guarantee: without the key the digests reveal nothing about the records.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> one, other = fingerprint_records(["a", "b", "c"], key), fingerprint_records(["b", "a", "c"], key)
    >>> one.digest == other.digest, fingerprint_records(["c", "d"], key).shared_with(one)
    (False, 1)
    """
    secret = key.subkey("digest", "records")
    size = len(records)
    for place in sorted({*range(min(size, _READ_TWICE)), *range(max(0, size - _READ_TWICE), size)}):
        if _digest(records[place], secret) != _digest(records[place], secret):
            raise ValueError(
                f"{name}: record {place} differs each time it is read. Move random augmentation from the dataset to "
                "the collator."
            )
    whole, each = blake2b(key=secret, digest_size=16), np.empty(size, dtype=np.uint64)
    for place, record in enumerate(_in_order(records)):
        if look is not None:
            look(place, record)
        digest = _digest(record, secret)
        whole.update(digest)
        each[place] = int.from_bytes(digest[:8], "little")
    return RecordFingerprint(whole.hexdigest(), each)


def fingerprint_in_memory(dataset: Any, key: NoiseKey) -> str | None:
    """A keyed digest of lists, tuples, arrays, tensors and TensorDatasets; None for others. No file is read."""
    if isinstance(dataset, torch.utils.data.TensorDataset):
        dataset = dataset.tensors
    elif not isinstance(dataset, list | tuple | range | np.ndarray | Tensor):
        return None
    with contextlib.suppress(ValueError):  # records of other types
        return _digest(dataset, key.subkey("digest", "records"), read_files=False).hex()
    return None


def fingerprint_few(dataset: Any, key: NoiseKey) -> list[str]:
    """Keyed digests of 16 records that the key chooses; empty for a record that differs each time it is read."""
    secret, seed = key.subkey("digest", "records"), key.subkey("digest", "few records")
    places = np.random.default_rng(int.from_bytes(seed[:8], "little")).integers(len(dataset), size=16)
    found = []
    for place in places.tolist():
        found.append("")
        with contextlib.suppress(ValueError):  # records of other types
            first, second = (_digest(dataset[place], secret).hex() for _ in range(2))
            found[-1] = first if first == second else ""
    return found


def _in_order(records: Any) -> Iterator[Any]:
    """The records one after another; a `datasets.Dataset` is read in blocks, which is faster."""
    if hasattr(records, "column_names") and hasattr(records, "select"):
        for start in range(0, len(records), _ROWS_AT_ONCE):
            columns = records[start : start + _ROWS_AT_ONCE]
            yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    else:
        yield from (records[place] for place in range(len(records)))


def _digest(record: Any, secret: bytes, *, read_files: bool = True) -> bytes:
    encoded = bytearray()
    _encode(record, encoded, read_files)
    return blake2b(encoded, key=secret, digest_size=16).digest()


def _encode(value: Any, to: bytearray, read_files: bool) -> None:
    """Append bytes that no other value has: its repr, or a letter for the type, the size and the content."""
    kind = type(value)
    if kind in _SCALARS:
        to += f"{value!r};".encode("utf-8", "surrogatepass")
    elif isinstance(value, Mapping):
        to += b"d%d:" % len(value)
        for name in value:  # in their order, which a collator may follow
            _encode(name, to, read_files)
            _encode(value[name], to, read_files)
    elif isinstance(value, list | tuple | range) and _SCALARS.issuperset(map(type, value)):  # fast for tokens
        _append(repr([*value]).encode("utf-8", "surrogatepass"), to)
    elif isinstance(value, list | tuple):
        to += b"l%d:" % len(value)
        for part in value:
            _encode(part, to, read_files)
    elif isinstance(value, bytes):
        to += b"b%d:" % len(value)
        _append(value, to)
    elif isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        to += f"t{value.dtype}{tuple(value.shape)}:".encode()
        flat = value.detach().cpu().resolve_conj().resolve_neg().flatten()
        if flat.stride() != (1,):  # one element of a strided view
            flat = flat.clone(memory_format=torch.contiguous_format)
        _append(flat.view(torch.uint8).numpy().data, to)
    elif isinstance(value, np.ndarray | np.generic) and not (
        isinstance(value, np.ma.MaskedArray) or value.dtype.hasobject
    ):
        to += f"a{value.dtype}{value.shape}:".encode()
        _append(value.tobytes(), to)
    elif isinstance(value, PurePath):
        _encode(Path(value).read_bytes() if read_files else str(value), to, read_files)
    elif hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "convert"):  # a Pillow image
        shown = value.convert("RGBA") if getattr(value, "palette", None) else value
        _encode(["image", value.mode, list(value.size), shown.tobytes()], to, read_files)
    else:
        raise ValueError(
            f"cannot fingerprint a {kind.__name__} in a record. Use strings, numbers, arrays, tensors, lists and dicts."
        )


def _append(data: bytes | memoryview, to: bytearray) -> None:
    """Append the bytes, or their digest if there are many."""
    to += data if len(data) < 1 << 20 else b"+" + blake2b(data, digest_size=32).digest()
