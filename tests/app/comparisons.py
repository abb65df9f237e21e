"""Data and recipes for small comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.app import Recipe
from dpoptim.app.comparison.request import Request
from tests.app.runs import COLUMNS

VARIANTS = ("post_processing", "scale_then_privatize")
GRID = {"learning_rate": [1e-4, 0.03]}


def write_rows(path: Path, *, count: int = 240, seed: int = 0) -> str:
    """Write rows of three numbers; the label is the sign of a weighted sum."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(count, 3)).round(4)
    names = np.where(rows @ [1.0, -1.0, 0.5] > 0, "yes", "no")
    lines = [",".join([*map(str, row), name]) for row, name in zip(rows.tolist(), names, strict=True)]
    path.write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    return str(path)


def recipe_for(folder: Path, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": "mlp", "data": str(folder / "private.csv"), "task": "tabular-classification",
        "label_column": "label", "columns": COLUMNS, "epsilon": 3.0, "delta": 1e-4, "sampling": "shuffled",
        "noise": "independent",
        "steps": 4, "batch_size": 48, "validation_fraction": 0.25, **changes,
    }  # fmt: skip
    return Recipe(**values)


def request_for(folder: Path, *, recipe: dict[str, Any] | None = None, **changes: Any) -> Request:
    values: dict[str, Any] = {"variants": VARIANTS, "seeds": (0, 1), "grid": GRID, "tuning_epsilon": 1.0, **changes}
    return Request(recipe=recipe_for(folder, **(recipe or {})), **values)
