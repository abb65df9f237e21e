"""Choosing settings by trial runs, and the noise that the trials get for what they may cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpoptim.app.comparison.grids import NON_PRIVATE, Setting, with_setting
from dpoptim.app.comparison.request import PUBLIC, Request
from dpoptim.app.recipes.plans import plan_of
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.setup import RunSetup, records_of
from dpoptim.app.runs.shared_records import shared_count
from dpoptim.privacy import Adjacency, PrivacyPlan
from dpoptim.privacy.composition import calibrate_runs

NO_CLIPPING = 1e9
"""A clip norm that no gradient reaches."""

TRIAL_SEEDS = 1_000_000
"""How far the trials' seed lies from the first of the runs, so that no run repeats what it was chosen by."""


def run_recipe(base: Recipe, variant: str, setting: Setting, seed: int) -> Recipe:
    """The recipe of one run whose scores count: the base, with variant, setting and seed.

    Guarantee: ε, δ, sampling, batch size, steps and noise are those of the base for every variant, but for the
    reference without privacy, which has neither noise nor clipping.
    """
    recipe = with_setting(base, variant, setting).replace(seed=seed)
    if variant != NON_PRIVATE:
        return recipe
    return recipe.replace(epsilon=None, noise_multiplier=0.0, noise="independent", clip_norm=NO_CLIPPING)


def trial_recipe(request: Request, base: Recipe, variant: str, setting: Setting) -> Recipe:
    """The recipe of one trial.

    | what tuning may cost | records | noise multiplier |
    |---|---|---|
    | an ε | the private ones | the least at which all trials of the variant TOGETHER keep to it |
    | "public" | `tuning_data` | that of the runs, so that what is best there is best in them |
    | "none" | the private ones | that of the runs |

    Guarantee: scores that choose settings are of records that no trial trains on; with "public" of public ones.
    """
    steps = request.tuning_steps or base.steps
    assert steps is not None  # filled in
    recipe = run_recipe(base, variant, setting, base.seed + TRIAL_SEEDS)
    recipe = recipe.replace(steps=steps, evaluate_every=steps, checkpoint_every=None, debug=False)
    if variant != NON_PRIVATE:
        multiplier = _trial_noise(request, base, recipe, len(request.points(variant)))
        recipe = recipe.replace(epsilon=None, noise_multiplier=multiplier)
    if request.budget_for_tuning != PUBLIC:
        return recipe
    # What is public has no neighbours; only the noise counts, which zero-out and add/remove share.
    kind = recipe.adjacency if recipe.adjacency != Adjacency.ADD_REMOVE.value else Adjacency.ZERO_OUT.value
    changes: dict[str, Any] = {"data": request.tuning_data, "validation_data": None, "validation_fraction": None}
    return recipe.replace(**changes, adjacency=kind, num_examples=None, delta=None)


def check_tuning_data(request: Request, setup: RunSetup) -> None:
    """Refuse tuning data that is declared public and has private records in it: as a copy, a link, or one by one.

    Training and held-out records are private alike; they are compared by content, whatever their labels.
    """
    if request.tuning_data is None:
        return
    whole = {"data": request.tuning_data, "validation_data": None, "validation_fraction": 0.0, "num_examples": None}
    public, _ = records_of(setup.recipe.replace(**whole), setup.prepared.task)
    private = [part.records for part in (setup.prepared, setup.validation) if part is not None]
    shared = shared_count(public, *private)
    if shared:
        raise ValueError(
            f"tuning_data={request.tuning_data!r} is declared public, and {shared} of its {len(public)} records "
            "are among the private ones; give other records, or an epsilon as budget_for_tuning"
        )


def _trial_noise(request: Request, base: Recipe, trial: Recipe, count: int) -> float:
    budget = request.budget_for_tuning
    if isinstance(budget, str) or budget is None:
        multiplier = plan_of_base(base).noise_multiplier
    else:
        assert base.delta is not None
        plan = plan_of_base(trial.replace(epsilon=None, noise_multiplier=1.0))
        multiplier = calibrate_runs(plan, count, epsilon=float(budget), delta=base.delta).noise_multiplier
    assert multiplier is not None
    return multiplier


def plan_of_base(base: Recipe) -> PrivacyPlan:
    """The calibrated plan of a recipe whose noise is named; it needs no model."""
    assert base.noise != "auto"
    return plan_of(base, parameters=1)


def best_setting(scores: Sequence[tuple[Setting, Mapping[str, float | None]]], metric: str) -> Setting:
    """The setting of the best score; the first of equals, and never one that diverged while another did not.

    >>> trials = [({"learning_rate": 1.0}, {"loss": None}), ({"learning_rate": 0.1}, {"loss": 2.0})]
    >>> best_setting(trials, "loss")
    {'learning_rate': 0.1}
    """
    return min(scores, key=lambda trial: badness(trial[1], metric))[0]


def badness(score: Mapping[str, float | None], metric: str) -> float:
    """What is to be made small: the loss, or minus the accuracy; ∞ for a run that diverged.

    >>> badness({"loss": 2.0, "accuracy": 0.75}, "accuracy"), badness({"loss": None}, "loss")
    (-0.75, inf)
    """
    value = score.get(metric)
    if value is None or score.get("loss") is None:
        return math.inf
    return -value if metric == "accuracy" else value
