"""The plan, the optimizer and the learning rate of a complete recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from dpoptim.app.recipes.recipe import Recipe
from dpoptim.integrations.named_settings import CLIP_NORM, make_optimizer, make_plan
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import Adjacency, PrivacyPlan


def plan_of(
    recipe: Recipe, *, parameters: int | nn.Module, progress: Callable[[str], None] | None = None
) -> PrivacyPlan:
    """Build the calibrated plan of a complete recipe; `make_plan` explains "auto"."""
    assert recipe.num_examples is not None  # filled in
    assert recipe.batch_size is not None
    assert recipe.steps is not None
    assert recipe.delta is not None
    if recipe.batch_size > recipe.num_examples:
        raise ValueError(
            f"batch_size={recipe.batch_size} is larger than the {recipe.num_examples} training records. Use a smaller "
            f"one, such as {max(1, recipe.num_examples // 8)}, or leave it out."
        )
    return make_plan(
        num_examples=recipe.num_examples,
        batch_size=recipe.batch_size,
        steps=recipe.steps,
        clip_norm=recipe.clip_norm or CLIP_NORM,
        sampling=recipe.sampling,
        noise=recipe.noise,
        adjacency=Adjacency(recipe.adjacency),
        epsilon=recipe.epsilon,
        noise_multiplier=recipe.noise_multiplier,
        delta=recipe.delta,
        parameters=parameters,
        progress=progress,
    )


def optimizer_of(
    recipe: Recipe, model: nn.Module, plan: PrivacyPlan, *, key: NoiseKey | None = None, **options: Any
) -> PrivateOptimizer:
    """Create the optimizer of a complete recipe, attached to the model."""
    assert recipe.learning_rate is not None
    return make_optimizer(
        recipe.variant,
        model,
        plan,
        learning_rate=recipe.learning_rate,
        betas=recipe.betas,
        eps=recipe.eps,
        eps_scale=recipe.eps_scale,
        weight_decay=recipe.weight_decay,
        key=key,
        **options,
    )


def learning_rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of step `step` (from 0) of a complete recipe, a pure function of the step.

        rate · min(1, (step + 1)/warm) · decay,  decay = 1, 1 − x or (1 + cos πx)/2,  x = (step − warm)/(steps − warm)

    >>> recipe = Recipe(model="m", data="d", epsilon=1.0, steps=4, learning_rate=1.0, warmup=0.0)
    >>> [learning_rate_at(recipe, step) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    assert recipe.learning_rate is not None
    assert recipe.steps is not None
    warm = int(recipe.warmup * recipe.steps)
    if step < warm:
        return recipe.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, recipe.steps - warm)
    decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
    return recipe.learning_rate * decay[recipe.schedule]
