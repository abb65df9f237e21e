"""Default settings, each with its reason, and the plan and optimizer of a complete recipe.

Sizes depend on the number of training records (public under zero-out and replace adjacency, declared under add-remove)
and on the kind of model. No default looks at a record's content.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpoptim.app.recipes.recipe import BUILT_IN, TABULAR_MODELS, Recipe
from dpoptim.arguments import check_delta, default_delta
from dpoptim.integrations import tables
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import (
    CLIP_NORM,
    has_correlated_noise,
    make_optimizer,
    make_plan,
    steps_of,
)
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from dpoptim.optim.out_of_memory import Remedies, halved
from dpoptim.privacy import Adjacency, ColumnCounts, PrivacyPlan

VALIDATION_FRACTION = 0.05  # one record in twenty is enough to see a trend
EPOCHS = 10  # private training gains from several passes; beyond ten the noise outweighs the gain
FEWEST = 8  # fewer records do not fill the eight batches that the defaults assume


def with_defaults(recipe: Recipe, *, task: Task, num_examples: int, device: torch.device) -> Recipe:
    """Fill in every setting that the recipe leaves open, for this number of training records, or of users.

        batch_size = the power of two in (n/16, n/8], at most 2048
        steps = ⌈epochs·n/batch_size⌉, epochs = 10, or 20 for tables
        delta = the power of ten in (1/(100·n), 1/(10·n)]

    `noise` and `sampling` are chosen when the plan is made, `eps` and `eps_scale` by the variant.
    """
    if num_examples < FEWEST:
        units = "records" if recipe.user_column is None else "users"
        raise ValueError(f"data={recipe.data!r} has {num_examples} training {units}; at least {FEWEST} are needed")
    if recipe.delta is not None and recipe.noise_multiplier != 0:
        check_delta(recipe.delta, num_examples)
    batch_size = recipe.batch_size or tables.batch_size_for(num_examples)
    epochs = recipe.epochs or (tables.EPOCHS if task.is_tabular else EPOCHS)
    steps = recipe.steps or steps_of(epochs, num_examples, batch_size)
    every = max(1, math.ceil(steps / 10))  # ten evaluations show a run's course
    on_gpu = device.type == "cuda"
    defaults: dict[str, Any] = {
        "validation_fraction": validation_fraction(recipe),
        "delta": default_delta(num_examples),
        "clip_norm": default_clip_norm(recipe, task),
        "learning_rate": default_learning_rate(recipe),
        "schedule": "linear" if task.is_tabular else "wsd",  # benchmarks/schedules.md
        "batch_size": batch_size,
        "steps": steps,
        "dtype": "bf16" if on_gpu else "fp32",  # bf16 is faster on a GPU and slower on a CPU
        "evaluate_every": every,
        "checkpoint_every": every,
    }
    if task.reads_text:
        defaults["micro_batch_tokens"] = 2**16 if on_gpu else 2**13  # keeps the device busy and fits in its memory
    else:
        defaults["micro_batch_size"] = 1024 if task.is_tabular else 256 if on_gpu else 64
    filled = {name: value for name, value in defaults.items() if getattr(recipe, name) is None}
    return recipe.replace(**filled, task=task.value, num_examples=num_examples, epochs=None, device=str(device))


def validation_fraction(recipe: Recipe) -> float:
    """The share of records to hold out: none with validation_data, or under add-remove, where places shift."""
    if recipe.validation_fraction is not None:
        return recipe.validation_fraction
    is_none = recipe.validation_data is not None or recipe.adjacency == Adjacency.ADD_REMOVE.value
    return 0.0 if is_none else VALIDATION_FRACTION


def label_of(recipe: Recipe) -> str | None:
    """The label's column: the recipe's, or "label" or "labels" if it is declared."""
    return recipe.label_column or next((name for name in ("label", "labels") if name in (recipe.columns or {})), None)


def default_learning_rate(recipe: Recipe) -> float:
    """The default for the variant, the kind of model and of noise; 5e-4 worked best with independent noise."""
    is_correlated = has_correlated_noise(recipe.noise, recipe.sampling, has_epsilon=recipe.epsilon is not None)
    if recipe.variant == "dp_sgd":  # its step is as long as the gradient
        return tables.SGD_LEARNING_RATE if recipe.model in TABULAR_MODELS else 1.0
    if recipe.model in TABULAR_MODELS:
        return tables.learning_rate_for(is_correlated=is_correlated)
    rate = 1e-3 if recipe.from_scratch or recipe.lora_rank is not None else 5e-4
    if recipe.model in BUILT_IN:
        rate = 1e-2
    return 4 * rate if is_correlated else rate


def default_clip_norm(recipe: Recipe, task: Task) -> float:
    """The clip norm, or where an adaptive one starts: on small tables its noisy counts hardly move it."""
    if recipe.clipping != "adaptive":
        return tables.CLIP_NORMS.get(recipe.model, CLIP_NORM)
    if task is Task.TABULAR_REGRESSION:
        return CLIP_NORM  # clipping a squared loss makes it robust to outliers, and costs little
    return 2.0 if recipe.model == "mlp" else 1.0


def chosen_device(name: str) -> torch.device:
    """The device of a recipe; "auto" is the GPU if there is one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and gpus and "LOCAL_RANK" in os.environ:  # one GPU for each process of torchrun
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < gpus):
            return device
    here = ["auto", "cpu", *(f"cuda:{place}" for place in range(gpus))]
    raise ValueError(f"device={name!r} is not available here; use {', '.join(here)}")


def plan_of(
    recipe: Recipe,
    *,
    parameters: int | nn.Module,
    counts: ColumnCounts | None = None,
    progress: Callable[[str], None] | None = None,
) -> PrivacyPlan:
    """Build the calibrated plan of a complete recipe; `make_plan` explains "auto"."""
    values = recipe.part("num_examples", "batch_size", "steps", "sampling", "noise", "epsilon", "noise_multiplier")
    values |= {"counts": counts, "delta": recipe.delta, "clip_norm": recipe.clip_norm or CLIP_NORM}
    values |= recipe.part("records_per_user", "clipping", "exact_noise")
    return make_plan(**values, adjacency=Adjacency(recipe.adjacency), parameters=parameters, progress=progress)


def optimizer_of(
    recipe: Recipe, model: nn.Module, plan: PrivacyPlan, *, key: NoiseKey | None = None, **options: Any
) -> PrivateOptimizer:
    """Create the optimizer of a complete recipe, attached to the model."""
    values = recipe.part("learning_rate", "betas", "eps", "eps_scale", "weight_decay", "averaged")
    optimizer = make_optimizer(recipe.variant, model, plan, **values, key=key, **options)
    fewer = f"a --lora-rank below {recipe.lora_rank}" if recipe.lora_rank else "--lora-rank 16"
    shorter = "" if recipe.micro_batch_tokens is None else ", or a shorter --max-length"
    optimizer.remedies = Remedies(  # as flags of `dpoptim train`
        smaller_batches=smaller_micro_batch(recipe),
        clipping="",
        noise="in a new run, --noise banded-inverse:8",
        fewer_parameters="" if recipe.model in BUILT_IN else f"in a new run, {fewer}{shorter}",
    )
    return optimizer


def smaller_micro_batch(recipe: Recipe) -> str:
    """The flag that halves the micro-batches of a complete recipe; "" if they cannot be smaller."""
    name = "micro_batch_size" if recipe.micro_batch_tokens is None else "micro_batch_tokens"
    assert recipe.batch_size is not None
    limit, rows = getattr(recipe, name), recipe.batch_size * (recipe.records_per_user or 1)
    if name == "micro_batch_size":
        limit = min(limit, rows)
    elif recipe.max_length is not None:
        limit = min(limit, rows * recipe.max_length)
    smaller = halved(name, limit)
    return f"--{name.replace('_', '-')} {smaller}" if smaller else ""


def learning_rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of step `step` (from 0) of a complete recipe, a pure function of the step."""
    assert recipe.learning_rate is not None
    assert recipe.steps is not None
    shape = recipe.part("steps", "warmup", "schedule")
    return recipe.learning_rate * tables.schedule_factor(step, **shape)
