"""What PrivateTrainer adds to a checkpoint of the stock Trainer: where the private run stands, and the run's seal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from dpoptim.noise import NoiseKey
from dpoptim.privacy.seals import check_seal

LOADER_STATE = "private_loader.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def write_loader_state(folder: str | Path, state: dict[str, Any]) -> None:
    (Path(folder) / LOADER_STATE).write_text(json.dumps(state), encoding="utf-8")


def read_loader_state(checkpoint: str | Path) -> dict[str, Any]:
    """Where the loader stood; one ValueError line where the checkpoint has no private state."""
    file = Path(checkpoint) / LOADER_STATE
    for name in ("optimizer.pt", "scheduler.pt", LOADER_STATE):
        if not (Path(checkpoint) / name).is_file():
            raise ValueError(
                f"checkpoint {str(checkpoint)!r} has no {name}, so the private run cannot go on from it: its noise and "
                "batches would be drawn anew; choose one that PrivateTrainer saved with save_only_model=False"
            )
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        missing = {"run", "key_fingerprint", "next_step"} - set(found)
    except (ValueError, TypeError):
        missing = {"readable text"}
    if missing:
        raise ValueError(f"{file} has no {min(missing)}: it is not as the run saved it; put it back, or take another")
    return found


def check_checkpoint(checkpoint: str | Path, key: NoiseKey) -> int:
    """The step of a checkpoint, once it is known that all its files are as the run saved them.

    Guarantee: one ValueError line, before anything of it is loaded, where a file was edited, swapped, removed or added;
    then one where name, state, loader and optimizer do not agree in the step.
    """
    folder = Path(checkpoint)
    check_seal(folder, key)
    optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
    trainer = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    steps = {
        "its state": int(trainer["global_step"]),
        "its loader": int(read_loader_state(folder)["next_step"]),
        "its optimizer": int(optimizer["privacy"]["step"]),
    }
    if match := _NAME.fullmatch(folder.resolve().name):
        steps["its name"] = int(match[1])
    if len(set(steps.values())) != 1:
        said = ", ".join(f"{step} by {what}" for what, step in steps.items())
        raise ValueError(f"checkpoint {folder} is of step {said}: it is not one that the run saved; take another")
    return steps["its state"]
