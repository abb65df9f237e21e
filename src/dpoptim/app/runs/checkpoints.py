"""Checkpoints of a run: folders that are there whole or not at all, sealed with its key, the last two kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from dpoptim.app.files import make_folder, remove_unfinished
from dpoptim.noise import NoiseKey
from dpoptim.privacy.seals import check_seal, seal_folder

KEPT = 2
_NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], key: NoiseKey) -> Path:
    """Write `folder`/step-000100/state.pt with its seal, and remove all but the last two checkpoints.

    Guarantee: a checkpoint has its name only once it is whole and on the disk, and an older one goes only after that.
    """
    path = folder / f"step-{step:06d}"
    if path.exists():
        return path

    def fill(temporary: Path) -> None:
        try:
            torch.save(state, temporary / "state.pt")
        except RuntimeError as error:  # how torch's writer says that a disk is full
            raise OSError(f"{path} cannot be written (is the disk full?)") from error
        seal_folder(temporary, key, name=f"step {step}")

    remove_unfinished(folder)
    make_folder(path, fill)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / "state.pt").is_file()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """How many steps a checkpoint has behind it, by its name.

    >>> step_of(Path("checkpoints/step-000120"))
    120
    """
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def load_checkpoint(path: Path, key: NoiseKey) -> dict[str, Any]:
    """The state in a checkpoint; plain values and tensors alone, nothing in it can run code.

    Guarantee: one ValueError line, before anything is loaded, where the checkpoint is not as the run saved it under
    this name: edited, swapped or renamed. Its name, loader and optimizer agree in the step.
    """
    check_seal(path, key, name=f"step {step_of(path)}")
    try:
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"checkpoint {path} cannot be read: {str(error).splitlines()[0]}; remove it") from error
    steps = {
        "its name": step_of(path),
        "its state": state["step"],
        "its loader": state["loader"]["next_step"],
        "its optimizer": state["optimizer"]["privacy"]["step"],
    }
    if len(set(steps.values())) != 1:
        said = ", ".join(f"{step} by {what}" for what, step in steps.items())
        raise ValueError(f"checkpoint {path} is of step {said}: it is not one that the run saved; take another")
    return state
