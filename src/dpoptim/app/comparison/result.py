"""The result of a comparison: scores with intervals, ε of one run, and ε of everything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dpoptim.app.comparison.intervals import CONFIDENCE, mean_interval, paired_difference
from dpoptim.app.comparison.request import NON_PRIVATE, PUBLIC, UNCOVERED, Request, Setting
from dpoptim.app.runs.run_log import RunHistory
from dpoptim.integrations.named_settings import name_of_noise, name_of_sampling
from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.composition import epsilon_of_runs

Trials = Mapping[str, Sequence[tuple[Setting, RunHistory]]]
Runs = Mapping[str, Sequence[RunHistory]]

NOT_PRIVATE = "NOT PRIVATE"


def badness(score: Mapping[str, float | None], metric: str) -> float:
    """What to minimize: the loss, or minus the accuracy; ∞ for a run that diverged."""
    value = score.get(metric)
    if value is None or score.get("loss") is None:
        return math.inf
    return -value if metric == "accuracy" else value


def summarize(
    request: Request, *, trials: Trials, chosen: Mapping[str, Setting], runs: Runs, in_folder: Sequence[PrivacyPlan]
) -> dict[str, Any]:
    """Summarize finished runs as plain values: one row per variant, references, tuning, and what everything costs.

    Guarantee: `epsilon.everything` composes all runs of the table on the private records, including trials. Runs marked
    NOT PRIVATE have no guarantee and are left out. `epsilon.folder` also composes runs that were started in the same
    folder and are no longer in the table (`in_folder`).
    """
    first, metric = runs[request.variants[0]], request.metric
    one = first[0]
    best = min(request.variants, key=lambda variant: math.fsum(badness(run.scores, metric) for run in runs[variant]))
    rows = {
        variant: _row(variant, chosen[variant], runs[variant], trials[variant], runs[best], metric)
        for variant in request.rows
    }
    return {
        "examples": one.plan.num_examples,
        "validation_examples": one.evaluations[0]["examples"],
        "batch_size": one.plan.batch_size,
        "steps": one.plan.steps,
        "sampling": name_of_sampling(one.plan.sampling),
        "mechanism": name_of_noise(one.plan.noise),
        "adjacency": one.plan.adjacency.value,
        "delta": one.plan.delta,
        "seeds": list(request.seeds),
        "confidence": CONFIDENCE,
        "metric": metric,
        "outside_guarantee": "scores, which rank the rows, are on held-out records outside the guarantee",
        "best": best,
        "variants": [rows[variant] for variant in request.variants],
        "references": [_before(first, runs[best], metric), rows[NON_PRIVATE]] if request.references else [],
        "tuning": _tuning(request, trials),
        "epsilon": _epsilons(request, trials, runs, in_folder),
    }


def _row(
    variant: str,
    setting: Setting,
    runs: Sequence[RunHistory],
    trials: Sequence[tuple[Setting, RunHistory]],
    best: Sequence[RunHistory],
    metric: str,
) -> dict[str, Any]:
    is_private = all(run.plan.is_private for run in runs)
    return {
        "variant": variant,
        "private": is_private,
        "label": variant if is_private else f"{variant.replace('non_private', 'non-private')} ({NOT_PRIVATE})",
        "setting": setting,
        "learning_rate": runs[0].recipe["learning_rate"],
        "clip_norm": runs[0].recipe["clip_norm"] if variant != NON_PRIVATE else None,
        "noise_multiplier": runs[0].plan.noise_multiplier,
        "epsilon": max(run.plan.epsilon() for run in runs),
        **_scores(runs, best, metric),
        "seconds": math.fsum(run.seconds or 0.0 for run in runs) / len(runs),
        "runs": [str(run.folder) for run in runs],
        "trials": [
            {
                "setting": tried,
                "loss": run.scores.get("loss"),
                "accuracy": run.scores.get("accuracy"),
                "noise_multiplier": run.plan.noise_multiplier,
                "run": str(run.folder),
            }
            for tried, run in trials
        ],
    }


def _before(runs: Sequence[RunHistory], best: Sequence[RunHistory], metric: str) -> dict[str, Any]:
    """The model before training, which is the same for every variant and has not seen the private records."""
    return {
        "variant": "no_fine_tuning",
        "private": True,
        "label": "no fine-tuning",
        "setting": {},
        "noise_multiplier": None,
        "epsilon": 0.0,
        **_scores(runs, best, metric, before=True),
        "seconds": 0.0,
        "runs": [str(run.folder) for run in runs],
        "trials": [],
    }


def _scores(
    runs: Sequence[RunHistory], best: Sequence[RunHistory], metric: str, *, before: bool = False
) -> dict[str, Any]:
    """Scores with intervals over the seeds, and their difference to the best variant's, seed by seed."""
    found: dict[str, Any] = {"loss": None, "accuracy": None, "difference_to_best": None}
    for name in ("loss", "accuracy"):
        if runs[0].evaluations[0][name] is not None:
            values = _values(runs, name, before=before)
            found[name] = {**asdict(mean_interval(values)), "values": values}
    difference = paired_difference(_values(runs, metric, before=before), _values(best, metric))
    if math.isfinite(difference.mean) and (before or runs is not best):
        found["difference_to_best"] = {**asdict(difference), "excludes_zero": difference.excludes_zero}
    return found


def _values(runs: Sequence[RunHistory], metric: str, *, before: bool = False) -> list[float]:
    values = [(run.evaluations[0] if before else run.scores).get(metric) for run in runs]
    return [math.inf if value is None else value for value in values]


def _tuning(request: Request, trials: Trials) -> dict[str, Any]:
    count, budget = sum(len(trials[variant]) for variant in request.variants), request.tuning_epsilon
    epsilon = float(budget) if count and isinstance(budget, int | float) else None
    notes = {
        "not tuned": "settings come from the recipe; nothing was tuned",
        PUBLIC: f"{count} trials on public records ({request.tuning_data}) chose the settings: no cost",
        UNCOVERED: f"TUNING IS NOT COVERED: {count} trials on the private records chose the settings, and epsilon of "
        "one run does not cover that choice",
        "epsilon": f"{count} trials on the private records chose the settings, at epsilon {epsilon or 0:g} per variant",
    }
    kind = "not tuned" if not count else budget if isinstance(budget, str) else "epsilon"
    return {
        "kind": kind,
        "epsilon": epsilon,
        "covered_by_epsilon_of_one_run": kind in ("not tuned", PUBLIC),
        "trials": count,
        "steps": request.tuning_steps,
        "note": notes[kind],
    }


def _epsilons(request: Request, trials: Trials, runs: Runs, in_folder: Sequence[PrivacyPlan]) -> dict[str, Any]:
    """ε of one run, of a variant's tuning, of both, and of everything, composed rather than added."""
    variants = request.variants
    delta = runs[variants[0]][0].plan.delta
    assert delta is not None
    public = request.tuning_epsilon == PUBLIC
    tried = {variant: [] if public else [run.plan for _, run in trials[variant]] for variant in variants}
    everything = [plan for variant in variants for plan in (*tried[variant], *(run.plan for run in runs[variant]))]
    return {
        "delta": delta,
        "one_run": max(run.plan.epsilon(delta=delta) for variant in variants for run in runs[variant]),
        "tuning": {variant: epsilon_of_runs(tried[variant], delta=delta) for variant in variants},
        "one_run_with_tuning": {
            variant: epsilon_of_runs([*tried[variant], runs[variant][0].plan], delta=delta) for variant in variants
        },
        "everything": epsilon_of_runs(everything, delta=delta),
        "runs_on_private_records": len(everything),
        "folder": epsilon_of_runs(in_folder, delta=delta),
        "runs_in_folder": len(in_folder),
        "without": [f"{NON_PRIVATE}: {NOT_PRIVATE}"] if NON_PRIVATE in runs else [],
    }
