"""The log's numbers for TensorBoard, where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def tensorboard_writer(folder: Path, *, step: int) -> Any:
    """A writer into `folder` that forgets what lies behind `step`; None where tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)


def write_scalars(writer: Any, entry: dict[str, Any]) -> None:
    """Every number of a step's or an evaluation's entry under its own name; those that are not private say so."""
    if writer is None:
        return
    step = entry["step"]
    if entry["kind"] == "evaluation":
        parts = {"held-out": {name: entry[name] for name in ("loss", "accuracy", "perplexity")}}
    else:
        parts = {
            "run": {name: entry[name] for name in ("epsilon", "learning_rate", "seconds")},
            "released": entry["released"],
            "not private, for debugging": entry.get("not_private", {}),
        }
    for group, values in parts.items():
        for name, value in values.items():
            if isinstance(value, int | float):
                writer.add_scalar(f"{group}/{name}", value, step)
    writer.flush()
