"""What `dpoptim train --dry-run` prints: the plan, memory and time of a run that was not made."""

from __future__ import annotations

import dataclasses
from typing import Any

from dpoptim.app.format import duration
from dpoptim.app.runs.estimate import Estimate
from dpoptim.app.runs.setup import RunSetup
from dpoptim.theory import Candidate, format_bytes


def as_json(setup: RunSetup, found: Estimate) -> dict[str, Any]:
    """The whole recipe, the plan and the estimate as plain values; bytes and seconds."""
    plan = setup.plan
    return {
        "recipe": setup.recipe.to_dict(),
        "plan": plan.to_dict(),
        "epsilon": plan.epsilon(),
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "mechanism": setup.recipe.noise,
        "rmse": _rmse(setup),
        "trained_parameters": setup.trained_parameters,
        "validation_examples": _held_out(setup),
        "estimate": dataclasses.asdict(found),
    }


def as_text(setup: RunSetup, found: Estimate) -> str:
    """The whole statement, the settings in a few lines, memory, time, and the whole recipe."""
    recipe, plan = setup.recipe, setup.plan
    shown = [
        plan.statement(),
        "",
        f"{recipe.task} with {recipe.variant}, learning rate {recipe.learning_rate:g}",
        f"{recipe.noise} noise of multiplier {plan.noise_multiplier:.4f}, {recipe.sampling} sampling; "
        f"RMSE of prefix sums {_rmse(setup):.4g} for clip norm 1",
        f"{plan.num_examples:,} training records, {_held_out(setup):,} held out; "
        f"{plan.steps:,} steps of {plan.batch_size:,}",
        f"{setup.trained_parameters:,} parameters trained, on {setup.device} in {recipe.dtype}",
        "",
        f"memory   parameters {format_bytes(found.parameter_bytes)}, optimizer {format_bytes(found.optimizer_bytes)}, "
        f"noise {format_bytes(found.noise_bytes)},",
        f"         a micro-batch {format_bytes(found.working_bytes)} (measured); "
        f"about {format_bytes(found.memory_bytes)} in all",
        f"disk     at most {format_bytes(found.disk_bytes)}",
        f"time     {found.step_seconds:.3g} s a step, {duration(found.run_seconds)} for the run "
        "(measured on random examples, without evaluations)",
        "",
        "Nothing was written. The whole recipe:",
        "",
        recipe.to_toml(),
    ]
    return "\n".join(shown)


def _rmse(setup: RunSetup) -> float:
    return Candidate(plan=setup.plan, parameters=setup.trained_parameters).rmse_mean


def _held_out(setup: RunSetup) -> int:
    return 0 if setup.validation is None else len(setup.validation.records)
