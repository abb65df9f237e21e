"""What a finished run comes to: recipe, plan, scores and time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpoptim.privacy import PrivacyPlan
from dpoptim.training.recipes.recipe import Recipe
from dpoptim.training.runs.logged_run import read_run
from dpoptim.training.runs.run_directory import RunDirectory


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
    """Whether the folder is a run that reached its end; the noise key is not read."""
    log = RunDirectory(directory).log_file
    return log.is_file() and log.stat().st_size > 0 and read_run(directory).ending == "finished"


def read_result(directory: Path) -> RunResult:
    """The result of a finished run.

    Edge cases: one ValueError line where a part is missing, or where nothing was held out to score on.
    """
    run = read_run(directory)
    if run.privacy_plan is None or not run.recipe:
        reason = "; ".join(run.notes) or "plan.json or recipe.toml is not a run's own"
        raise ValueError(f"{directory}: {reason}; remove the folder to run it again")
    if not run.evaluations:
        raise ValueError(f"{directory} has no scores: nothing was held out; give validation_fraction or _data")
    return RunResult(
        path=directory,
        recipe=Recipe.from_dict(run.recipe),
        plan=run.privacy_plan,
        first=run.evaluations[0],
        last=run.evaluations[-1],
        seconds=run.seconds or 0.0,
    )
