"""A `repr` that omits fields at their default."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any


class ShortRepr:
    """Give a dataclass a `repr` of the arguments that differ from their defaults.

    Fields with the metadata key "shown" always appear. The disk cache of strategies uses this text as its key.
    """

    def __repr__(self) -> str:
        parts: Any = fields(self)  # type: ignore[arg-type]
        given = [
            f"{part.name}={getattr(self, part.name)!r}"
            for part in parts
            if part.default is MISSING or "shown" in part.metadata or getattr(self, part.name) != part.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"
