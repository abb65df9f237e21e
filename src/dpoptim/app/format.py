"""Values for JSON, and times for people."""

from __future__ import annotations

import math
from typing import Any


def plain(value: Any) -> Any:
    """The value as JSON can write it: null for numbers that are not finite, text for types that JSON lacks."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def duration(seconds: float) -> str:
    """A time in its two largest units."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
