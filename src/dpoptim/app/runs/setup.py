"""Everything that a run needs, made and checked before anything is trained or written."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dpoptim.app.data.records import Kind, Records, read_records
from dpoptim.app.models.prepared import Prepared, prepare
from dpoptim.app.models.synthetic import random_batch
from dpoptim.app.models.task_of_model import task_of_model
from dpoptim.app.recipes.defaults import chosen_device, notes_on, validation_fraction, with_defaults
from dpoptim.app.recipes.plans import optimizer_of, plan_of
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.shared_records import check_held_out_is_other, same_source
from dpoptim.clipping import check_example_independence
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import name_of_noise, name_of_sampling
from dpoptim.integrations.optional import first_line
from dpoptim.privacy import Adjacency, PrivacyPlan

_KINDS = {Task.IMAGE_CLASSIFICATION: Kind.IMAGE, Task.TABULAR_CLASSIFICATION: Kind.TABULAR}


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSetup:
    """A recipe with every value filled in, the model with its training examples, held-out ones, and the plan.

    Guarantee: `validation` shares no place with `prepared`; `plan` counts the training records alone.
    """

    recipe: Recipe
    prepared: Prepared
    validation: Prepared | None
    plan: PrivacyPlan
    shared_records: int = 0  # held-out records that occur among the training records too

    @property
    def model(self) -> nn.Module:
        return self.prepared.model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def notes(self) -> list[str]:
        """What a person should know before the run starts, a line each; often nothing."""
        held_out = 0 if self.validation is None else len(self.validation.records)
        notes = notes_on(self.recipe, num_examples=self.plan.num_examples, held_out=held_out)
        if self.shared_records:
            notes.append(
                f"{self.shared_records} of the {held_out} records of validation_data are training records too: scores "
                "on them are not covered by the guarantee"
            )
        return notes

    @property
    def said(self) -> list[str]:
        """What is said before a run: where texts come from and where they are cut, and the notes."""
        column, cut = self.prepared.records.text_column, self.prepared.max_length
        read = [f"texts from column {column!r}"] if column is not None else []
        read += [f"cut at {cut:,} tokens"] if cut is not None else []
        return [*([", ".join(read)] if read else []), *(f"note: {note}" for note in self.notes)]

    @property
    def trained_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def precision(self) -> AbstractContextManager[object]:
        """Parameters, norms and noise are fp32; under bf16 the model's own products run in it."""
        if self.recipe.dtype == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()


def prepare_run(
    recipe: Recipe, *, plan: PrivacyPlan | None = None, tell: Callable[[str], None] = lambda text: None
) -> RunSetup:
    """Read the data, hold some out, load the model, make the plan (or take a run's own), and try model and optimizer.

    The order: records, then those held out, then model and sizes, then the plan over the training records, then a trial
    of the optimizer and of the loss on random examples. Nothing is written and nothing is trained.
    Guarantee: what is wrong with the input is one ValueError line here: a missing file or column, no records, a batch
    larger than the data, an impossible ε, a model that mixes examples.
    """
    device = chosen_device(recipe.device)
    recipe = recipe.with_whole_paths()
    tell("reading the records")
    task = Task(recipe.task) if recipe.task is not None else task_of_model(recipe.model)
    training, held_out = records_of(recipe, task)
    shared = 0
    if recipe.validation_data is not None and held_out is not None:
        tell("comparing training and held-out records")
        shared = check_held_out_is_other(training, held_out, validation_data=recipe.validation_data)
    public = recipe.adjacency != Adjacency.ADD_REMOVE.value
    if public and recipe.num_examples not in (None, len(training)):
        raise ValueError(
            f"num_examples={recipe.num_examples} and there are {len(training)} training records; leave it out, or, if "
            "this is a run's own recipe, give the data of the run"
        )
    tell(f"loading {recipe.model}")
    prepared = prepare(
        task=task,
        model=recipe.model,
        records=training,
        max_length=recipe.max_length,
        lora_rank=recipe.lora_rank,
        from_scratch=recipe.from_scratch,
        image_size=recipe.image_size,
        seed=recipe.seed,
    )
    prepared.model.to(device)
    recipe = with_defaults(recipe, task=task, num_examples=recipe.num_examples or len(training), device=device)
    recipe = recipe.replace(
        max_length=prepared.max_length, label_names=training.label_names or None if task.is_classification else None
    )
    validation = None if held_out is None else prepared.on(held_out)
    if plan is None:
        tell("making the privacy plan")
        plan = plan_of(recipe, parameters=prepared.model, progress=lambda name: tell(f"optimizing {name}"))
        recipe = recipe.replace(noise=name_of_noise(plan.noise), sampling=name_of_sampling(plan.sampling))
    setup = RunSetup(recipe=recipe, prepared=prepared, validation=validation, plan=plan)
    tell("trying the model on random examples")
    return dataclasses.replace(setup, plan=_tried(setup), shared_records=shared)


def held_out_places(count: int, fraction: float) -> np.ndarray:
    """Every k-th place from k − 1 on, k = round(1/fraction): a rule that never looks at what is there.

    >>> held_out_places(10, 0.25).tolist(), held_out_places(10, 0.0).tolist()
    ([3, 7], [])
    """
    if not fraction:
        return np.zeros(0, dtype=np.int64)
    every = max(2, round(1 / fraction))
    return np.arange(every - 1, count, every, dtype=np.int64)


def records_of(recipe: Recipe, task: Task) -> tuple[Records, Records | None]:
    """The training records, and those held out."""
    kind = _KINDS.get(task, Kind.TEXT)
    label_column = recipe.label_column if task.is_classification else None
    text_column = recipe.text_column if kind is Kind.TEXT else None
    for name, given, used in (
        ("label_column", recipe.label_column, label_column),
        ("text_column", recipe.text_column, text_column),
    ):
        if given != used:
            raise ValueError(_unread(recipe, task, name))

    def read(source: str, label_names: Sequence[str] | None) -> Records:
        found = read_records(
            source,
            text_column=text_column,
            label_column=label_column,
            split=recipe.split,
            kind=kind,
            label_names=label_names if task.is_classification else None,
        )
        found.refuse_empty()
        return found

    found = read(recipe.data, recipe.label_names)
    if recipe.validation_data is not None:
        if same_source(recipe.validation_data, recipe.data):
            raise ValueError(
                f"validation_data={recipe.validation_data!r} is the training data itself; give other records, or "
                "validation_fraction"
            )
        return found, read(recipe.validation_data, found.label_names)
    out = held_out_places(len(found), validation_fraction(recipe))
    if len(out) == 0:
        return found, None
    kept = np.setdiff1d(np.arange(len(found)), out)
    if len(kept) == 0:
        raise ValueError(f"data={recipe.data!r} has {len(found)} records and none is left to train on")
    return found.take(kept), found.take(out)


def _unread(recipe: Recipe, task: Task, name: str) -> str:
    """Why a column is not read, and what was probably meant."""
    value = getattr(recipe, name)
    said = task.value if recipe.task is not None else f"{task.value}, which is what model={recipe.model!r} is for"
    mend = "leave it out"
    if name == "label_column":
        mend += ", or say that it is to be predicted: --task text-classification"
    return f"{name}={value!r} is not read in {said}; {mend}"


def _tried(setup: RunSetup) -> PrivacyPlan:
    """The plan as it runs, after an optimizer was made for the model and a loss was taken back through it."""
    setup.model.train()
    try:
        optimizer = optimizer_of(setup.recipe, setup.model, setup.plan, external_batches=True)
        optimizer.detach()
        longest = setup.prepared.max_length or 8
        batch = random_batch(setup.prepared, [min(longest, length) for length in (8, 5, 3)])
        with torch.random.fork_rng(devices=[] if setup.device.type == "cpu" else None):
            check_example_independence(setup.model, setup.prepared.loss_per_example, batch)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(f"model={setup.recipe.model!r} cannot be trained: {first_line(error)}") from error
    return optimizer.plan
