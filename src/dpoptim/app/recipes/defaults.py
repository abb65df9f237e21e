"""What a recipe leaves open is filled by rule: each default, and the one line that justifies it.

Sizes follow from the number of training records (public under zero-out and replace adjacency, declared under
add-remove) and from the kind of model; no default looks into a record.
"""

from __future__ import annotations

import math

import torch

from dpoptim.app.recipes.recipe import Recipe
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import CLIP_NORM, default_delta, refuse_weak_delta, steps_of
from dpoptim.privacy import Adjacency

VALIDATION_FRACTION = 0.05  # one record in twenty: enough to see a trend, and training keeps the rest
EPOCHS = 10  # private training gains from several passes, and past ten the noise of longer runs eats what they add
FEW = 200  # records below which a person is told what to expect
MOST_BATCH = 2048  # larger batches drown noise better, up to what a step can afford
FEWEST = 8  # records: fewer do not make the eight batches that the defaults are meant for, and nothing is learnt


def with_defaults(recipe: Recipe, *, task: Task, num_examples: int, device: torch.device) -> Recipe:
    """The recipe with every open size filled in, for this many training records.

        batch_size = the power of two in (n/16, n/8], at most 2048;  steps = ⌈epochs·n/batch_size⌉, epochs = 10
        delta = the power of ten in (1/(100·n), 1/(10·n)]

    `noise` and `sampling` are settled when the plan is made, `eps` and `eps_scale` by the variant itself.
    Edge cases: one ValueError line for fewer than 8 records, and for a δ of 1/n or more: under such a δ, publishing one
    record in full would count as private.

    >>> recipe = Recipe(model="mlp", data="a.csv", epsilon=1.0)
    >>> found = with_defaults(recipe, task=Task.TABULAR_CLASSIFICATION, num_examples=20_000, device=torch.device("cpu"))
    >>> found.delta, found.batch_size, found.steps, found.evaluate_every
    (1e-06, 2048, 98, 10)
    """
    _check_sizes(recipe, num_examples)
    batch_size = recipe.batch_size or default_batch_size(num_examples)
    steps = recipe.steps or steps_of(recipe.epochs or EPOCHS, num_examples, batch_size)
    every = max(1, math.ceil(steps / 10))  # ten looks at a run are enough to see where it goes
    on_gpu = device.type == "cuda"
    tokens = recipe.micro_batch_tokens
    if tokens is None and task.reads_text:
        tokens = 2**16 if on_gpu else 2**13  # what keeps the device busy and fits beside a small model
    examples = recipe.micro_batch_size
    if examples is None and not task.reads_text:
        examples = 1024 if task is Task.TABULAR_CLASSIFICATION else 256 if on_gpu else 64
    return recipe.replace(
        task=task.value,
        num_examples=num_examples,
        validation_fraction=validation_fraction(recipe),
        delta=recipe.delta or default_delta(num_examples),
        clip_norm=recipe.clip_norm or CLIP_NORM,
        learning_rate=recipe.learning_rate if recipe.learning_rate is not None else default_learning_rate(recipe),
        batch_size=batch_size,
        steps=steps,
        epochs=None,
        micro_batch_size=examples,
        micro_batch_tokens=tokens,
        dtype=recipe.dtype or ("bf16" if on_gpu else "fp32"),  # bf16 is what makes a GPU fast; on CPUs it is slower
        device=str(device),
        evaluate_every=recipe.evaluate_every or every,
        checkpoint_every=recipe.checkpoint_every or every,
    )


def _check_sizes(recipe: Recipe, num_examples: int) -> None:
    if num_examples < FEWEST:
        raise ValueError(
            f"data={recipe.data!r} leaves {num_examples} training record{'s' * (num_examples != 1)}; at least {FEWEST} "
            "are needed, and thousands to learn something that noise does not hide"
        )
    if recipe.delta is not None and recipe.noise_multiplier != 0:
        refuse_weak_delta(recipe.delta, num_examples)


def notes_on(recipe: Recipe, *, num_examples: int, held_out: int) -> list[str]:
    """What a person should know before a run with these settings starts, a line each; often nothing.

    >>> recipe = Recipe(model="mlp", data="a.csv", epsilon=1.0)
    >>> notes_on(recipe, num_examples=9, held_out=0)  # doctest: +ELLIPSIS
    ['only 9 training records: ...', 'nothing is held out, so no scores will be shown: ...']
    """
    notes = []
    if num_examples < FEW:
        notes.append(f"only {num_examples} training records: noise hides most of what they tell; thousands are usual")
    if held_out == 0:
        if recipe.adjacency == Adjacency.ADD_REMOVE.value:
            why = "under add_remove adjacency give validation_data (--validation-data)"
        elif recipe.validation_fraction == 0:
            why = "validation_fraction is 0"
        else:
            why = "there are too few records; give validation_data or a larger validation_fraction"
        notes.append(f"nothing is held out, so no scores will be shown: {why}")
    return notes


def validation_fraction(recipe: Recipe) -> float:
    """What share of the records is held out: none where there is other validation data, or where places shift."""
    if recipe.validation_fraction is not None:
        return recipe.validation_fraction
    if recipe.validation_data is not None or recipe.adjacency == Adjacency.ADD_REMOVE.value:
        return 0.0
    return VALIDATION_FRACTION


def default_batch_size(num_examples: int) -> int:
    """The power of two at or below n/8, at most 2048: noise is divided by it, and eight batches still mix the data.

    >>> [default_batch_size(n) for n in (5, 1000, 10_000, 1_000_000)]
    [1, 64, 1024, 2048]
    """
    return min(MOST_BATCH, 2 ** max(0, int(math.log2(max(1, num_examples / 8)))))


def default_learning_rate(recipe: Recipe) -> float:
    """5e-4 for pretrained texts and images (what private fine-tuning was found to like), 1e-3 for LoRA and new
    weights, 1e-2 for the small built-in ones; dp_sgd, whose step has the length of the gradient, 1.
    """
    if recipe.variant == "dp_sgd":
        return 1.0
    if recipe.model in ("mlp", "small-cnn"):
        return 1e-2
    return 1e-3 if recipe.from_scratch or recipe.lora_rank is not None else 5e-4


def chosen_device(name: str) -> torch.device:
    """The device of a recipe: "auto" is the GPU where there is one; ValueError for one that is not here.

    >>> chosen_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is no device; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: there is no usable GPU here; use cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        there = "cuda:0 alone" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ValueError(f"device={name!r}: there is no such GPU here; there is {there}")
    return device
