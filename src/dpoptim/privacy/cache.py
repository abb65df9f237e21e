"""Calibrated noise multipliers kept on disk, since finding one takes a second or so.

An entry holds the description of a run, (ε, δ) and a number: nothing that depends on data. A cache that
cannot be read, parsed or written is the same as no cache, and what is read is checked by its user before it
is trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_dir() -> Path:
    """`$DPOPTIM_CACHE_DIR`, else `$XDG_CACHE_HOME/dpoptim`, else `~/.cache/dpoptim`."""
    if chosen := os.environ.get("DPOPTIM_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "dpoptim"
    return Path(os.path.expanduser("~")) / ".cache" / "dpoptim"


def _path(inputs: Mapping[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return cache_dir() / f"calibration-{digest[:32]}.json"


def load(inputs: Mapping[str, object]) -> float | None:
    """The number stored for these inputs, or None when there is none that is positive and finite.

    Guarantee: never raises; an entry whose stored inputs differ from the ones asked for is ignored.
    """
    try:
        entry = json.loads(_path(inputs).read_text(encoding="utf-8"))
        value = entry["noise_multiplier"]
        if entry["inputs"] != json.loads(json.dumps(inputs)) or isinstance(value, bool):
            return None
        value = float(value)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if math.isfinite(value) and value > 0.0 else None


def store(inputs: Mapping[str, object], noise_multiplier: float) -> None:
    """Keep a number for these inputs; the file appears whole or not at all, and failure is not an error."""
    try:
        path = _path(inputs)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".calibration-", suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"inputs": dict(inputs), "noise_multiplier": noise_multiplier}, file)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
