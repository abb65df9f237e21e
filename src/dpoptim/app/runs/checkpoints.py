"""Checkpoints of a run: each folder appears complete or not at all, and the last two are kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from dpoptim.app.files import make_folder, remove_unfinished

KEPT = 2
_NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `folder`/step-000100/state.pt, then remove all but the last two checkpoints."""
    path = folder / f"step-{step:06d}"
    if path.exists():
        return path

    def fill(temporary: Path) -> None:
        try:
            torch.save(state, temporary / "state.pt")
        except RuntimeError as error:  # torch reports a full disk like this
            raise OSError(f"{path} cannot be written (is the disk full?)") from error

    remove_unfinished(folder)
    make_folder(path, fill)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / "state.pt").is_file()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its name.

    >>> step_of(Path("checkpoints/step-000120"))
    120
    """
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint: plain values and tensors only, so loading it cannot run code."""
    try:
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"checkpoint {path} cannot be read ({str(error).splitlines()[0]}). Remove it.") from error
    return state
