"""Runs that were not finished: kept on the disk, and taken up where they stopped by the next call for the same cell."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.result_files import cell_key


class TimeIsOver(Exception):
    """A run has stopped for want of time, and is kept."""


@dataclass(frozen=True)
class Unfinished:
    """The folder of runs that have begun, and when the time for all of them is over (by `time.time`).

    A file holds weights, moments and curves of a run on public texts; the key is not in it.
    """

    folder: Path
    until: float = math.inf
    every: float = 60.0  # seconds between two copies of a run
    _kept: dict[str, float] = field(default_factory=dict)

    def is_over(self) -> bool:
        """Whether runs are to stop."""
        return time.time() >= self.until

    def keep(self, cell: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Write down where a run stands; a copy that breaks off leaves the one before."""
        path = self._file(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(dict(state), part)
        os.replace(part, path)
        self._kept[path.name] = time.time()

    def is_due(self, cell: Mapping[str, Any]) -> bool:
        """Whether the last copy is old; of a run that has none, whether it was asked about long ago."""
        now = time.time()
        return now - self._kept.setdefault(self._file(cell).name, now) >= self.every

    def found(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was kept of this cell, if anything."""
        path = self._file(cell)
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{path} cannot be read; delete it, and its run begins again") from error
        return state

    def forget(self, cell: Mapping[str, Any]) -> None:
        """The run is done."""
        self._file(cell).unlink(missing_ok=True)

    def _file(self, cell: Mapping[str, Any]) -> Path:
        return self.folder / f"{hashlib.sha256(cell_key(cell).encode()).hexdigest()[:16]}.pt"
