"""Results of long searches, kept in memory and on disk by their inputs.

An entry holds numbers that follow from its inputs alone, nothing that depends on data. A cache that cannot be
read, parsed or written is the same as no cache. What is read is never trusted further than numbers typed in by a
user would be: sensitivity and error are computed from it, and ε from them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_Inputs = ParamSpec("_Inputs")


def cache_dir() -> Path:
    """`$DPOPTIM_CACHE_DIR`, else `$XDG_CACHE_HOME/dpoptim`, else `~/.cache/dpoptim`."""
    if chosen := os.environ.get("DPOPTIM_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "dpoptim"
    return Path(os.path.expanduser("~")) / ".cache" / "dpoptim"


def load(kind: str, inputs: Mapping[str, object]) -> Array | None:
    """The finite float64 array stored for these inputs, or None.

    Guarantee: never raises; an entry whose stored inputs differ from the ones asked for is ignored.
    """
    try:
        with np.load(_path(kind, inputs), allow_pickle=False) as entry:
            if str(entry["inputs"]) != _text(inputs):
                return None
            values = entry["values"]
    except Exception:  # whatever a broken file makes numpy raise
        return None
    return values if values.dtype == np.float64 and np.isfinite(values).all() else None


def store(kind: str, inputs: Mapping[str, object], values: Array) -> None:
    """Keep an array for these inputs; the file appears whole or not at all, and failure is not an error."""
    path = _path(kind, inputs)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{kind}-", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, inputs=np.array(_text(inputs)), values=values)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def remembered(kind: str, *, version: int) -> Callable[[Callable[_Inputs, Array]], Callable[_Inputs, Array]]:
    """A search whose results are kept: in memory while the program runs, on disk for the next.

    Arguments must be hashable and say all in their `repr`. `version` is raised when the search changes.

    >>> @remembered("squares", version=1)
    ... def squares(count: int) -> Array:
    ...     return np.arange(count, dtype=np.float64) ** 2
    >>> squares(3).tolist()
    [0.0, 1.0, 4.0]
    """

    def decorate(search: Callable[_Inputs, Array]) -> Callable[_Inputs, Array]:
        @functools.lru_cache(maxsize=256)
        def kept(*args: _Inputs.args, **kwargs: _Inputs.kwargs) -> Array:
            inputs = {"version": version, "args": [repr(arg) for arg in args], "kwargs": repr(sorted(kwargs.items()))}
            values = load(kind, inputs)
            if values is None:
                values = np.asarray(search(*args, **kwargs), dtype=np.float64)
                store(kind, inputs, values)
            values.flags.writeable = False
            return values

        return cast(Callable[_Inputs, Array], functools.wraps(search)(kept))

    return decorate


def _path(kind: str, inputs: Mapping[str, object]) -> Path:
    return cache_dir() / f"{kind}-{hashlib.sha256(_text(inputs).encode()).hexdigest()[:32]}.npz"


def _text(inputs: Mapping[str, object]) -> str:
    return json.dumps(inputs, sort_keys=True)
