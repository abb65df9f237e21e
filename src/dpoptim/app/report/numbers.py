"""The numbers of a report, as plain values: what the page shows and what `--json` prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from dpoptim.app.format import plain
from dpoptim.app.report.figures import CURVES, Mark, quantiles_of
from dpoptim.app.runs.run_log import RunHistory, number, series, value_at

_SETTINGS = ("task", "model", "variant", "mechanism", "noise_multiplier", "clip_norm", "batch_size", "device")
_COUNTS = ("parameters", "trained_parameters", "examples", "validation_examples")
_RELEASED = ("gradient_norm", "noise_norm", "signal_norm", "signal_over_clip", "noise_to_signal", "negative_fraction")


def final_numbers(run: RunHistory) -> dict[str, Any]:
    """The run in a few numbers; None where no file tells one.

    `epsilon` is of all planned steps, `epsilon_spent` of those taken, both as the accountant gave them and ∞ without
    a guarantee. `not_private` is there only where the run logged debugging values; its numbers are no releases.
    """
    guarantee = run.guarantee
    released = [record["released"] for record in run.steps if isinstance(record.get("released"), dict)]
    found: dict[str, Any] = {
        **{name: run.setting(name) for name in (*_SETTINGS, *_COUNTS)},
        "steps": run.last_step,
        "planned_steps": run.planned_steps,
        "ending": run.ending,
        "resumes": run.resumes,
        "private": guarantee.is_private,
        "epsilon": guarantee.epsilon,
        "epsilon_spent": run.epsilon_spent,
        "delta": guarantee.delta,
        "adjacency": guarantee.adjacency,
        "sampling": guarantee.sampling,
        "accountant": guarantee.accountant,
        "validation": _validation(run),
        "released": {name: number(released[-1].get(name)) for name in _RELEASED} if released else None,
        "seconds": run.seconds,
        "median_seconds_per_step": _median(run, "seconds"),
        "median_examples_per_second": _median(run, "examples_per_second"),
    }
    private = [record["not_private"] for record in run.steps if isinstance(record.get("not_private"), dict)]
    if private:
        found["not_private"] = {
            "mark": Mark.DEBUG.value,
            "loss": number(private[-1].get("loss")),
            "clipped_fraction": number(private[-1].get("clipped_fraction")),
            "nonfinite": int(math.fsum(number(one.get("nonfinite")) or 0.0 for one in private)),
        }
    return found


def _validation(run: RunHistory) -> dict[str, Any] | None:
    """The last evaluation and the least loss of all."""
    losses = series(run.evaluations, "loss")
    if not run.evaluations:
        return None
    last = run.evaluations[-1]
    best = min(losses, key=lambda pair: pair[1], default=(None, None))
    return {
        "mark": Mark.OUTSIDE.value,
        "step": last["step"],
        **{name: number(last.get(name)) for name in ("loss", "accuracy", "perplexity", "examples")},
        "best_loss": best[1],
        "best_step": best[0],
    }


def _median(run: RunHistory, path: str) -> float | None:
    values = [value for _, value in series(run.steps, path)]
    return statistics.median(values) if values else None


def all_numbers(runs: Sequence[RunHistory]) -> dict[str, Any]:
    """Everything that the report draws, at full length: {"runs": [...]}, JSON values alone (no NaN, no infinity).

    Each run has its `final` numbers, its `curves` {name: {"mark", "values": [[step, value], ...]}}, its
    `scale_quantiles` [[step, seven values], ...], the recipe, the versions, the statement and the notes.
    """
    return {"runs": [plain(_of_run(run)) for run in runs]}


def _of_run(run: RunHistory) -> dict[str, Any]:
    curves = {curve.name: (curve, curve.of(run)) for curve in CURVES}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "final": final_numbers(run),
        "curves": {name: {"mark": c.mark.value, "values": values} for name, (c, values) in curves.items() if values},
        "scale_quantiles": quantiles_of(run),
        "recipe": run.recipe,
        "versions": value_at(run.starts[-1], "versions") if run.starts else None,
        "statement": run.statement,
        "notes": run.notes,
    }
