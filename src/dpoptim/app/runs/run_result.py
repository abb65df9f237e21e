"""What a finished run comes to: recipe, plan, scores and time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.logged_run import read_run
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.privacy import PrivacyPlan


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run; `first` and `last` are scores on held-out records before and after training.

    A score of None is one that was not finite: the run diverged, and may have stopped before its end.
    """

    path: Path
    recipe: Recipe
    plan: PrivacyPlan
    first: dict[str, Any]
    last: dict[str, Any]
    seconds: float


class Diverged(ValueError):
    """Training stopped because parameters are no finite numbers any more."""


def is_finished(directory: Path) -> bool:
    """Whether the folder is a run that reached its end; the noise key is not read."""
    return _ending(directory) == "finished"


def has_diverged(directory: Path) -> bool:
    """Whether the folder is a run that stopped with `Diverged`, and would again."""
    return _ending(directory) == ending_by(Diverged())


def ending_by(error: BaseException) -> str:
    """How a log says that a run was ended by an error: its type alone, since a message may tell of records."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {type(error).__name__}"


def _ending(directory: Path) -> str | None:
    log = RunDirectory(directory).log_file
    return read_run(directory).ending if log.is_file() and log.stat().st_size > 0 else None


def read_result(directory: Path) -> RunResult:
    """The result of a run that finished or diverged.

    Edge cases: the last scores of a run that diverged are None. One ValueError line where a part is missing, or where
    nothing was held out to score on.
    """
    run = read_run(directory)
    if run.privacy_plan is None or not run.recipe:
        reason = "; ".join(run.notes) or "plan.json or recipe.toml is not a run's own"
        raise ValueError(f"{directory}: {reason}; remove the folder to run it again")
    if not run.evaluations:
        raise ValueError(f"{directory} has no scores: nothing was held out; give validation_fraction or _data")
    last = run.evaluations[-1]
    if has_diverged(directory):
        last = {**last, "loss": None, "accuracy": None, "perplexity": None}
    return RunResult(
        path=directory,
        recipe=Recipe.from_dict(run.recipe),
        plan=run.privacy_plan,
        first=run.evaluations[0],
        last=last,
        seconds=run.seconds or 0.0,
    )
