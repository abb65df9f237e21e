"""The folder of a run: recipe, plan, statement, key, log, checkpoints, model and summary; complete from the start."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpoptim.app.recipes.recipe import Recipe, read_recipe
from dpoptim.app.support.files import UNFINISHED, make_folder, write_text
from dpoptim.app.support.plain import plain
from dpoptim.noise import NoiseKey
from dpoptim.privacy import PrivacyPlan


@dataclass(frozen=True)
class RunDirectory:
    """Where the parts of a run lie.

    | name | what it holds |
    |---|---|
    | recipe.toml | every setting, as it was used |
    | plan.json | the privacy plan, with ε and δ |
    | statement.txt | the guarantee in words |
    | noise.key | SECRET, mode 0600: who has it can take the noise off |
    | noise.steps | the step ledger: a digest of each released step |
    | log.jsonl | what happened, line by line |
    | checkpoints/step-000100/ | where the run can be taken up; the last two |
    | model/ | the trained model, at the end |
    | summary.json | how it ended |
    """

    path: Path

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def statement_file(self) -> Path:
        return self.path / "statement.txt"

    @property
    def key_file(self) -> Path:
        return self.path / "noise.key"

    @property
    def steps_file(self) -> Path:
        return self.path / "noise.steps"

    @property
    def log_file(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    def check_new(self, *, bytes_needed: int = 0) -> None:
        """Refuse, in one line, a place where no run can be written; nothing is left there."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            mend = f"continue it with --resume {self.path}, or " if self.recipe_file.exists() else ""
            raise ValueError(f"run directory {self.path} is there already; {mend}choose another name")
        parent = next(folder for folder in self.path.absolute().parents if folder.exists())
        if not _may_write(parent):
            raise ValueError(f"run directory {self.path} cannot be made: {parent} is not a folder one may write to")
        free = shutil.disk_usage(parent).free
        if free < bytes_needed:
            raise ValueError(
                f"run directory {self.path}: checkpoints need {bytes_needed / 1e6:.0f} MB and the disk has "
                f"{free / 1e6:.0f} MB left; make room, or choose another disk"
            )

    def create(self, recipe: Recipe, plan: PrivacyPlan, key: NoiseKey) -> None:
        """Make the folder (mode 0700) with all that is known before training; it appears whole or not at all."""

        def fill(folder: Path) -> None:
            new = RunDirectory(folder)
            key.save(new.key_file)
            new.recipe_file.write_text(recipe.to_toml(), encoding="utf-8")
            described = {"plan": plan.to_dict(), "epsilon": plan.epsilon(), "delta": plan.delta}
            new.plan_file.write_text(json.dumps(plain(described), indent=2) + "\n", encoding="utf-8")
            new.statement_file.write_text(plan.statement() + "\n", encoding="utf-8")
            new.log_file.touch()
            new.checkpoints.mkdir()

        make_folder(self.path, fill)

    def read(self) -> tuple[Recipe, PrivacyPlan, NoiseKey]:
        """What a run is taken up with.

        Edge cases: one ValueError line where the folder is no run, or a part of it is missing.
        """
        if not self.recipe_file.is_file():
            raise ValueError(f"{self.path} is no run directory (it has no recipe.toml); check the path")
        recipe = read_recipe(self.recipe_file)
        try:
            return recipe, self.read_plan(), NoiseKey.load(self.key_file)
        except FileNotFoundError as error:
            raise ValueError(f"{error.filename} is missing, and the run cannot go on without it") from None

    def read_plan(self) -> PrivacyPlan:
        """The plan that the run keeps to."""
        return PrivacyPlan.from_dict(json.loads(self.plan_file.read_text(encoding="utf-8"))["plan"])

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_text(self.summary_file, json.dumps(plain(summary), indent=2, ensure_ascii=False) + "\n")


def _may_write(folder: Path) -> bool:
    """Whether a folder can be made there: modes alone say yes to an administrator where the system says no."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return False
    try:
        Path(tempfile.mkdtemp(prefix=".", suffix=UNFINISHED, dir=folder)).rmdir()
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)  # a full disk is told as one
    return True
