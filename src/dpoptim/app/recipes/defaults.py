"""Default settings, each with its reason.

Sizes depend on the number of training records (public under zero-out and replace adjacency, declared under add-remove)
and on the kind of model. No default looks at a record's content.
"""

from __future__ import annotations

import contextlib
import math

import torch

from dpoptim.app.recipes.recipe import Recipe
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import CLIP_NORM, default_delta, refuse_weak_delta, steps_of
from dpoptim.privacy import Adjacency

VALIDATION_FRACTION = 0.05  # one record in twenty is enough to see a trend
EPOCHS = 10  # private training gains from several passes; beyond ten the noise outweighs the gain
FEW = 200  # records below which a note explains what to expect
MOST_BATCH = 2048  # larger batches have less noise per example, but a step costs more
FEWEST = 8  # fewer records do not fill the eight batches that the defaults assume


def with_defaults(recipe: Recipe, *, task: Task, num_examples: int, device: torch.device) -> Recipe:
    """Fill in every setting that the recipe leaves open, for this number of training records.

        batch_size = the power of two in (n/16, n/8], at most 2048;  steps = ⌈epochs·n/batch_size⌉, epochs = 10
        delta = the power of ten in (1/(100·n), 1/(10·n)]

    `noise` and `sampling` are chosen when the plan is made, `eps` and `eps_scale` by the variant.

    Raises:
        ValueError: There are fewer than 8 records, or δ is 1/n or more, which would allow publishing a record in full.

    >>> recipe = Recipe(model="mlp", data="a.csv", epsilon=1.0)
    >>> found = with_defaults(recipe, task=Task.TABULAR_CLASSIFICATION, num_examples=20_000, device=torch.device("cpu"))
    >>> found.delta, found.batch_size, found.steps, found.evaluate_every
    (1e-06, 2048, 98, 10)
    """
    _check_sizes(recipe, num_examples)
    batch_size = recipe.batch_size or default_batch_size(num_examples)
    steps = recipe.steps or steps_of(recipe.epochs or EPOCHS, num_examples, batch_size)
    every = max(1, math.ceil(steps / 10))  # ten evaluations show a run's course
    on_gpu = device.type == "cuda"
    tokens = recipe.micro_batch_tokens
    if tokens is None and task.reads_text:
        tokens = 2**16 if on_gpu else 2**13  # keeps the device busy and fits in its memory
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
        dtype=recipe.dtype or ("bf16" if on_gpu else "fp32"),  # bf16 is faster on a GPU and slower on a CPU
        device=str(device),
        evaluate_every=recipe.evaluate_every or every,
        checkpoint_every=recipe.checkpoint_every or every,
    )


def _check_sizes(recipe: Recipe, num_examples: int) -> None:
    if num_examples < FEWEST:
        raise ValueError(
            f"data={recipe.data!r} has {num_examples} training record{'s' * (num_examples != 1)}; at least {FEWEST} "
            "are needed, and usually thousands to learn something despite the noise"
        )
    if recipe.delta is not None and recipe.noise_multiplier != 0:
        refuse_weak_delta(recipe.delta, num_examples)


def notes_on(recipe: Recipe, *, num_examples: int, held_out: int) -> list[str]:
    """What a person should know before a run with these settings starts; often nothing.

    >>> recipe = Recipe(model="mlp", data="a.csv", epsilon=1.0)
    >>> notes_on(recipe, num_examples=9, held_out=0)  # doctest: +ELLIPSIS
    ['only 9 training records: ...', 'no records are held out, so there will be no scores: ...']
    """
    notes = []
    if num_examples < FEW:
        notes.append(
            f"only {num_examples} training records: noise will hide most of what they contain; thousands are usual"
        )
    if held_out == 0:
        if recipe.adjacency == Adjacency.ADD_REMOVE.value:
            why = "add-remove adjacency needs validation_data (--validation-data)"
        elif recipe.validation_fraction == 0:
            why = "validation_fraction is 0"
        else:
            why = "there are too few records; give validation_data or a larger validation_fraction"
        notes.append(f"no records are held out, so there will be no scores: {why}")
    return notes


def validation_fraction(recipe: Recipe) -> float:
    """The share of records to hold out: none with validation_data, or under add-remove, where places shift."""
    if recipe.validation_fraction is not None:
        return recipe.validation_fraction
    if recipe.validation_data is not None or recipe.adjacency == Adjacency.ADD_REMOVE.value:
        return 0.0
    return VALIDATION_FRACTION


def default_batch_size(num_examples: int) -> int:
    """The power of two at or below n/8, at most 2048: large batches reduce noise, and an epoch has eight or more.

    >>> [default_batch_size(n) for n in (5, 1000, 10_000, 1_000_000)]
    [1, 64, 1024, 2048]
    """
    return min(MOST_BATCH, 2 ** max(0, int(math.log2(max(1, num_examples / 8)))))


def default_learning_rate(recipe: Recipe) -> float:
    """The default learning rate of a recipe.

    5e-4 for pretrained models, which worked best for private fine-tuning; 1e-3 for LoRA and new weights; 1e-2 for the
    small built-in models; 1 for dp_sgd, whose step is as long as the gradient.
    """
    if recipe.variant == "dp_sgd":
        return 1.0
    if recipe.model in ("mlp", "small-cnn"):
        return 1e-2
    return 1e-3 if recipe.from_scratch or recipe.lora_rank is not None else 5e-4


def chosen_device(name: str) -> torch.device:
    """The device of a recipe; "auto" is the GPU if there is one.

    Raises:
        ValueError: There is no such device here, or it is neither a CPU nor a CUDA device.

    >>> chosen_device("cpu")
    device(type='cpu')
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < gpus):
            return device
    here = {0: "cpu (there is no usable GPU)", 1: "cpu or cuda:0"}.get(gpus, f"cpu or cuda:0 to cuda:{gpus - 1}")
    raise ValueError(f"device={name!r} is not available here; use auto, {here}")
