"""One question of an audit and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was asked, whether all is well (None: it could not be looked at), and what was found."""

    name: str
    passed: bool | None
    found: str

    def as_values(self) -> dict[str, Any]:
        return {"name": self.name, "passed": self.passed, "found": self.found}
