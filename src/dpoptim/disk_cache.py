"""Cache the results of long searches in memory and on disk.

An entry depends only on its inputs, never on data. A cache that cannot be read or written is ignored. Cached numbers
are trusted no more than numbers that a user types in: sensitivity, error and ε are computed from them.
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
    """Return `$DPOPTIM_CACHE_DIR`, else `$XDG_CACHE_HOME/dpoptim`, else `~/.cache/dpoptim`."""
    if chosen := os.environ.get("DPOPTIM_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "dpoptim"
    return Path(os.path.expanduser("~")) / ".cache" / "dpoptim"


def load(kind: str, inputs: Mapping[str, object]) -> Array | None:
    """Return the finite float64 array stored for these inputs, or None. Never raises."""
    try:
        with np.load(_path(kind, inputs), allow_pickle=False) as entry:
            if str(entry["inputs"]) != _text(inputs):
                return None
            values = entry["values"]
    except Exception:  # a broken file can make numpy raise anything
        return None
    return values if values.dtype == np.float64 and np.isfinite(values).all() else None


def store(kind: str, inputs: Mapping[str, object], values: Array) -> None:
    """Store an array for these inputs. The file appears complete or not at all; failures are ignored."""
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


def cached_on_disk(kind: str, *, version: int) -> Callable[[Callable[_Inputs, Array]], Callable[_Inputs, Array]]:
    """Decorate a search so that its results are cached in memory and on disk.

    Arguments must be hashable, and their `repr` must describe them completely. Increase `version` when the search
    changes.

    >>> @cached_on_disk("squares", version=1)
    ... def squares(count: int) -> Array:
    ...     return np.arange(count, dtype=np.float64) ** 2
    >>> squares(3).tolist()
    [0.0, 1.0, 4.0]
    """

    def decorate(search: Callable[_Inputs, Array]) -> Callable[_Inputs, Array]:
        @functools.lru_cache(maxsize=256)
        def cached(*args: _Inputs.args, **kwargs: _Inputs.kwargs) -> Array:
            inputs = {"version": version, "args": [repr(arg) for arg in args], "kwargs": repr(sorted(kwargs.items()))}
            values = load(kind, inputs)
            if values is None:
                values = np.asarray(search(*args, **kwargs), dtype=np.float64)
                store(kind, inputs, values)
            values.flags.writeable = False
            return values

        return cast(Callable[_Inputs, Array], functools.wraps(search)(cached))

    return decorate


def _path(kind: str, inputs: Mapping[str, object]) -> Path:
    return cache_dir() / f"{kind}-{hashlib.sha256(_text(inputs).encode()).hexdigest()[:32]}.npz"


def _text(inputs: Mapping[str, object]) -> str:
    return json.dumps(inputs, sort_keys=True)
