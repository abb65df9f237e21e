"""Writes run directories to report on, without training."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

from dpoptim import Independent, Poisson, PrivacyPlan

HOSTILE = "<script>alert('x')</script>&\"'"

RECIPE = """\
task = "masked-lm"
model = "bert-tiny"
data = "private.jsonl"
variant = "scale_then_privatize"
epsilon = 8.0
learning_rate = 0.001
betas = [0.9, 0.999]
debug = false
"""


@functools.cache
def calibrated(steps: int) -> PrivacyPlan:
    plan = PrivacyPlan(num_examples=10_000, batch_size=256, steps=steps, sampling=Poisson(), noise=Independent())
    return plan.calibrate(epsilon=8.0, delta=1e-6)


@functools.cache
def accounted(plan: PrivacyPlan) -> tuple[float, str]:
    return plan.epsilon(delta=1e-6), plan.statement(delta=1e-6)


def start_record(steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "start",
        "time": "2026-01-02T03:04:05+00:00",
        "versions": {"dpoptim": "0.1.0", "torch": "2.9.0", "python": "3.12.1"},
        "device": "cpu",
        "parameters": 4_416_698,
        "trained_parameters": 4_416_698,
        "examples": 10_000,
        "validation_examples": 500,
        "steps": steps,
        "batch_size": 256,
        "epsilon": 8.0,
        "delta": 1e-6,
        "noise_multiplier": 0.66,
        "clip_norm": 1.0,
        "variant": "scale_then_privatize",
        "mechanism": "Independent()",
        "resumed_from": None,
        **changes,
    }


def step_record(step: int, steps: int, *, debug: bool, shift: float = 0.0) -> dict[str, Any]:
    share = step / steps
    wave = math.sin(step * 1.7)
    released = {
        "gradient_norm": 1.4 + 0.02 * wave,
        "noise_norm": 1.35,
        "signal_norm": 0.37 + 0.05 * wave,
        "signal_over_clip": 0.37 + 0.05 * wave - 0.1 * share,
        "noise_to_signal": 3.6 - wave + 40 * share**2,
        "negative_fraction": 0.45 + 0.04 * math.exp(-5 * share) + 0.004 * wave + shift / 10,
        "scale_quantiles": [10 ** (-3 * q * share**0.5 - 0.01 * (1 + wave)) for q in (1.3, 0.9, 0.7, 0.5, 0.3, 0.2, 0)],
        "update_norm": 0.01,
    }
    record = {
        "kind": "step",
        "step": step,
        "seconds": 0.21 + 0.02 * wave + (0.5 if step == 1 else 0.0),
        "examples_per_second": 256 / (0.21 + 0.02 * wave),
        "learning_rate": 1e-3 * (1 - share),
        "epsilon": 8.0 * math.sqrt(share) * 0.9999,
        "released": released,
    }
    if debug:
        record["not_private"] = {
            "loss": 3.0 + 4 * math.exp(-4 * share) + 0.1 * wave + shift,
            "clipped_fraction": 0.8 + 0.1 * wave * share,
            "nonfinite": 1 if step == 7 else 0,
        }
    return record


def evaluation_record(step: int, steps: int, *, shift: float = 0.0) -> dict[str, Any]:
    loss = 3.1 + 3.9 * math.exp(-4 * step / steps) + shift
    accuracy = 1 / (1 + loss)
    perplexity = math.exp(loss)
    scores = {"loss": loss, "accuracy": accuracy, "perplexity": perplexity, "examples": 500}
    return {"kind": "evaluation", "step": step, "split": "validation", **scores, "outside_guarantee": True}


def records(*, steps: int = 40, taken: int | None = None, debug: bool = False, shift: float = 0.0) -> list[dict]:
    taken = steps if taken is None else taken
    found = [start_record(steps), evaluation_record(0, steps, shift=shift)]
    for step in range(1, taken + 1):
        found.append(step_record(step, steps, debug=debug, shift=shift))
        if step % max(steps // 10, 1) == 0:
            found.append(evaluation_record(step, steps, shift=shift))
    reason = "finished" if taken == steps else "interrupted"
    return [*found, {"kind": "end", "step": taken, "reason": reason, "seconds": 0.25 * taken}]


def write_run(
    folder: Path, log: list[dict[str, Any]], *, recipe: str = RECIPE, plan: PrivacyPlan | None = None
) -> Path:
    """Write a run directory with this log; its plan has 40 steps unless one is given."""
    plan = calibrated(40) if plan is None else plan
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(recipe)
    epsilon, statement = accounted(plan)
    numbers = {"plan": plan.to_dict(), "epsilon": epsilon, "delta": 1e-6}
    (folder / "plan.json").write_text(json.dumps(numbers))
    (folder / "statement.txt").write_text(statement + "\n")
    secret = folder.with_name(f"{folder.name}.secret")
    secret.mkdir()
    (secret / "noise.key").write_text("the-secret-noise-key")
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    return folder
