"""The log's numbers for TensorBoard, where it is installed."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any


def tensorboard_writer(folder: Path, entries: list[dict[str, Any]]) -> Any:
    """A writer into `folder`, which is made anew from the log's entries; None where tensorboard is not installed.

    Steps that a run repeats are then there once: of two versions of one, on a device whose sums differ in their last
    bits, the difference has no noise in it.
    """
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    writer = SummaryWriter(str(folder))
    for entry in entries:
        if entry["kind"] in ("step", "evaluation"):
            write_scalars(writer, entry)
    return writer


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
                writer.add_scalar(f"{group}/{name}", value, step, walltime=0.0)  # when a step ended tells of its batch
    writer.flush()
