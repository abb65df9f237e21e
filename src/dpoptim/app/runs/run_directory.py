"""The folder of a run with its checkpoints, and its secrets beside it."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpoptim.app.files import make_folder, remove_unfinished
from dpoptim.app.format import plain
from dpoptim.app.recipes.recipe import Recipe, read_recipe
from dpoptim.app.runs.run_log import parsed, plan_and_epsilon
from dpoptim.noise import NoiseKey
from dpoptim.noise.key import KEY_BYTES
from dpoptim.optim.out_of_memory import is_out_of_memory
from dpoptim.privacy import PrivacyPlan


class RunDirectory:
    """The files of a run.

    | name | what it holds |
    |---|---|
    | recipe.toml | every setting, as used |
    | plan.json | the privacy plan, with ε and δ |
    | statement.txt | the guarantee in words |
    | log.jsonl | the log, one JSON object per line |
    | checkpoints/step-000100/ | where the run can resume; the last two |
    | model/ | the trained model, at the end |
    | summary.json | how the run ended |
    | tensorboard/, wandb/, wandb.json | with `report_to`: copies of the log |
    | ../RUN.secret/noise.key | mode 0600: whoever has it can remove the noise |
    | ../RUN.secret/noise.steps | the step ledger: a digest of each released step |

    People share run directories, so the secrets lie outside, in a folder of mode 0700.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe_file = path / "recipe.toml"
        self.plan_file = path / "plan.json"
        self.statement_file = path / "statement.txt"
        self.log_file = path / "log.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.summary_file = path / "summary.json"
        whole = path.resolve()
        self.secret_folder = whole.with_name(f"{whole.name}.secret")
        self.key_file = self.secret_folder / "noise.key"
        self.steps_file = self.secret_folder / "noise.steps"

    def check_new(self) -> None:
        """Raise a ValueError if no run can be written here."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            hint = f"resume it with --resume {self.path}, or " if self.recipe_file.exists() else ""
            raise ValueError(f"run directory {self.path} already exists; {hint}choose a different name")
        if self.secret_folder.exists():
            raise ValueError(f"{self.secret_folder} holds the key of an earlier run; remove it, or use a new name")
        parent = next(folder for folder in self.path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ValueError(f"run directory {self.path} cannot be made, because {parent} is not a writable folder")

    def create(self, recipe: Recipe, plan: PrivacyPlan, key: NoiseKey) -> None:
        """Make both folders (mode 0700) with all files that exist before training, or neither."""

        def fill(folder: Path) -> None:
            new = RunDirectory(folder)
            new.recipe_file.write_text(recipe.to_toml(), encoding="utf-8")
            described = {"plan": plan.to_dict(), "epsilon": plan.epsilon(), "delta": plan.delta}
            new.plan_file.write_text(json.dumps(plain(described), indent=2) + "\n", encoding="utf-8")
            new.statement_file.write_text(plan.statement() + "\n", encoding="utf-8")
            new.log_file.touch()
            new.checkpoints.mkdir()

        make_folder(self.secret_folder, lambda folder: key.save(folder / self.key_file.name))
        try:
            make_folder(self.path, fill)
        except BaseException:
            shutil.rmtree(self.secret_folder, ignore_errors=True)
            raise

    def read(self) -> tuple[Recipe, PrivacyPlan, NoiseKey]:
        """What a run needs to resume."""
        self.check_is_run()
        recipe = self.read_recipe()
        try:
            if self.key_file.stat().st_size != KEY_BYTES:
                raise ValueError(f"{self.key_file} is damaged. Restore it: the run cannot resume without it.")
            parsed(self.statement_file, str)  # the end of the run needs it
            return recipe, self.read_plan(), NoiseKey.load(self.key_file)
        except FileNotFoundError as error:
            raise ValueError(f"{error.filename} is missing. The run cannot resume without it.") from None

    def check_is_run(self) -> None:
        """Raise a ValueError if the folder is not a run directory."""
        if not self.path.exists():
            raise ValueError(f"run directory {self.path} does not exist")
        if not self.recipe_file.is_file():
            raise ValueError(f"{self.path} is not a run directory: it has no recipe.toml")

    def read_recipe(self) -> Recipe:
        """The run's recipe."""
        try:
            return read_recipe(self.recipe_file)
        except ValueError as error:
            problem = str(error).partition(";")[0]  # the rest is advice on new recipes
            raise ValueError(f"{self.recipe_file} is damaged ({problem}). Restore the original.") from error

    def read_plan(self) -> PrivacyPlan:
        """The run's plan."""
        plan, _ = parsed(self.plan_file, plan_and_epsilon)
        return plan


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `folder`/step-000100/state.pt, then remove all but the last two checkpoints."""
    path = folder / f"step-{step:06d}"
    if (path / "state.pt").exists():
        return path
    shutil.rmtree(path, ignore_errors=True)  # a checkpoint that was removed in part

    def fill(temporary: Path) -> None:
        try:
            torch.save(state, temporary / "state.pt")
        except RuntimeError as error:  # torch reports a full disk like this
            raise OSError(f"{path} cannot be written (is the disk full?)") from error

    remove_unfinished(folder)
    make_folder(path, fill)
    for old in checkpoints(folder)[:-2]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted((file.parent for file in folder.glob("step-*/state.pt")), key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(path.name.removeprefix("step-"))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint: plain values and tensors only, so loading it cannot run code."""
    file = path / "state.pt"
    state = load_tensors(file)
    if not (isinstance(state, dict) and state.keys() >= {"step", "model", "optimizer", "loader"}):
        raise ValueError(f"{file} cannot be read (it is not a checkpoint). Restore the original.")
    return state


def load_tensors(file: Path) -> Any:
    """Load plain values and tensors, without running code; a ValueError names a file that is broken or not ours."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles of other versions, which fail below
            with zipfile.ZipFile(file) as parts:
                if parts.testzip() is not None:  # torch does not compare checksums
                    raise ValueError("a checksum differs")
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}). Restore the original.") from error
    except Exception as error:  # unpickling foreign bytes fails in many ways
        if is_out_of_memory(error):
            raise
        # torch would explain how to load such a file by running the code in it.
        raise ValueError(
            f"{file} cannot be read (it is damaged, or was not written by dpoptim). Restore the original."
        ) from error


def load_newest(folder: Path, note: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read, and its state; None if there are no checkpoints."""
    found = checkpoints(folder)
    while found:
        path = found.pop()
        try:
            return path, load_checkpoint(path)
        except ValueError as error:
            if not found:
                raise
            note(f"{error} Resuming from {found[-1].name} instead.")
    return None


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints after `step`, which could not be read, to unreadable-step-000100."""
    for path in checkpoints(folder):
        if step_of(path) > step:
            aside = path.with_name(f"unreadable-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
