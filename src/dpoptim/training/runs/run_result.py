"""What a finished run directory says: recipe, plan, scores and time. The noise key is never read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpoptim.privacy import PrivacyPlan
from dpoptim.training.recipes.recipe import Recipe, read_recipe
from dpoptim.training.runs.run_directory import RunDirectory
from dpoptim.training.runs.run_log import read_log


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run; `first` and `last` are scores on held-out records before and after training.

    A score of None is one that was not finite: the run diverged.
    """

    path: Path
    recipe: Recipe
    plan: PrivacyPlan
    first: dict[str, Any]
    last: dict[str, Any]
    seconds: float


def is_finished(directory: Path) -> bool:
    """Whether the folder is a run that reached its end."""
    log = RunDirectory(directory).log_file
    if not log.is_file():
        return False
    ends = [entry for entry in read_log(log) if entry["kind"] == "end"]
    return bool(ends) and ends[-1]["reason"] == "finished"


def read_result(directory: Path) -> RunResult:
    """The result of a finished run.

    Edge cases: one ValueError line where a part is missing, or where nothing was held out to score on.
    """
    place = RunDirectory(directory)
    try:
        recipe = read_recipe(place.recipe_file)
        plan = PrivacyPlan.from_dict(json.loads(place.plan_file.read_text(encoding="utf-8"))["plan"])
        entries = read_log(place.log_file)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing from a run; remove the folder to run it again") from None
    scores = [entry for entry in entries if entry["kind"] == "evaluation"]
    if not scores:
        raise ValueError(f"{directory} has no scores: nothing was held out; give validation_fraction or _data")
    seconds = sum(entry["seconds"] for entry in entries if entry["kind"] == "end")
    return RunResult(path=directory, recipe=recipe, plan=plan, first=scores[0], last=scores[-1], seconds=seconds)
