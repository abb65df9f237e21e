"""Prepare a run: read the records, load the model, make the plan, and check them before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpoptim.app.data.estimates import open_columns, with_estimates
from dpoptim.app.data.examples import TokenDataset
from dpoptim.app.data.records import RecordKind, Records, held_out_places, read_records
from dpoptim.app.models.loading import check_does, task_of_model
from dpoptim.app.models.prepared import Prepared, prepare, random_batch, record_kind
from dpoptim.app.recipes import prompts
from dpoptim.app.recipes.columns import ESTIMATE_RANGE, Number, column_of
from dpoptim.app.recipes.defaults import (
    chosen_device,
    label_of,
    optimizer_of,
    plan_of,
    validation_fraction,
    with_defaults,
)
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.clipping import check_example_independence
from dpoptim.data import fingerprint_records
from dpoptim.data.users import UserRecords
from dpoptim.integrations.chats import PLAIN_TEMPLATE
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import name_of_noise, name_of_sampling
from dpoptim.integrations.optional import first_line, require
from dpoptim.kernels.freed_memory import keep_freed_memory
from dpoptim.noise import NoiseKey
from dpoptim.privacy import Adjacency, ColumnCounts, PrivacyPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSetup:
    """A complete recipe, the model with its training examples, the held-out examples, and the plan.

    Guarantee: no record is in both `prepared` and `validation`; `plan` counts the training records only.
    """

    recipe: Recipe
    prepared: Prepared
    validation: Prepared | None
    plan: PrivacyPlan
    notes: list[str]  # what a person should know before the run starts; often nothing

    @property
    def model(self) -> nn.Module:
        """The model to train."""
        return self.prepared.model

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    @property
    def messages(self) -> list[str]:
        """What to print before a run: the column of the texts, where they are cut, and the notes."""
        records, cut = self.prepared.records, self.prepared.max_length
        source = "" if records.text_column is None else f" from column {records.text_column!r}"
        source += "" if records.prompt_template is None else f", after prompts {records.prompt_template!r}"
        texts = [] if cut is None else [f"texts{source}, cut at {cut:,} tokens"]
        return [*texts, *(f"note: {note}" for note in self.notes)]

    @property
    def trained_parameters(self) -> int:
        """The number of parameters that training changes."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def precision(self) -> torch.autocast:
        """Autocast for the model if the recipe has bf16; parameters, norms and noise stay fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bf16")


def prepare_run(
    recipe: Recipe,
    *,
    plan: PrivacyPlan | None = None,
    estimate_columns: bool = True,
    stage: Callable[[str], None] = lambda text: None,
) -> RunSetup:
    """Read the data, hold some out, load the model, make the plan, and test model and optimizer on random examples.

    Args:
        recipe: The settings; what it leaves open is filled in.
        plan: The plan of a run to resume. Defaults to a new one.
        estimate_columns: Whether to estimate the columns that the recipe leaves open. A dry run does not: their noisy
            counts are a release, which belongs to a run.
        stage: Called with a short text when a stage begins.

    Raises:
        ValueError: Something is wrong with the input: a missing file or column, no records, a batch larger than the
            data, an impossible ε, a model that mixes examples. Nothing has been written or trained by then.
    """
    device = chosen_device(recipe.device)
    if device.type == "cpu":
        keep_freed_memory()
    for target in recipe.report_to:
        require(target, f"report_to={target!r}")
    recipe = recipe.with_whole_paths()
    stage("reading the records")
    task = task_of(recipe)
    counts: ColumnCounts | None = None
    notes: list[str] = []
    declared = recipe.columns or {}
    if plan is None:
        recipe, counts, notes = with_estimates(recipe, task, estimate_columns=estimate_columns, stage=stage)
    training, held_out = records_of(recipe, task)
    if held_out is None:
        notes.append("no records are held out, so there will be no scores; give validation_data (--validation-data)")
    elif recipe.validation_data is not None:
        stage("comparing training and held-out records")
        notes += _notes_on_shared(training, held_out)
    if held_out is not None:
        notes += _notes_on_unfit(held_out, open_columns(declared))
    names = training.label_names if task.is_classification or training.prompt_template is not None else ()
    if names and recipe.label_names is None and label_of(recipe) not in declared:
        notes.append(_note_on_classes(training))
    units, unit = len(training), "record"
    if training.users is not None:
        units, unit = len(UserRecords(training.users)), "user"
    count = recipe.num_examples or units
    if recipe.adjacency != Adjacency.ADD_REMOVE.value and count != units:
        raise ValueError(
            f"num_examples={count}, but there are {units} training {unit}s. Leave it out, or, to resume a run, restore "
            "its data"
        )
    stage(f"loading {recipe.model}")
    settings = recipe.part(
        "max_length", "lora_rank", "lora_alpha", "lora_targets", "from_scratch", "image_size", "width", "seed"
    )
    prepared = prepare(task=task, model=recipe.model, records=training, **settings)
    prepared.model.to(device)
    recipe = with_defaults(recipe, task=task, num_examples=count, device=device)
    recipe = recipe.replace(max_length=prepared.max_length, label_names=names or None)
    recipe, chat_notes = _with_chats(recipe, prepared)
    notes += chat_notes
    validation = None if held_out is None else prepared.on(held_out)
    notes += ["epsilon above 20 protects very little; 8 is usual"] * ((recipe.epsilon or 0) > 20)
    if plan is None:
        stage("making the privacy plan")
        progress = {"progress": lambda name: stage(f"optimizing {name}")}
        plan = plan_of(recipe, parameters=prepared.model, counts=counts, **progress)
        recipe = recipe.replace(noise=name_of_noise(plan.noise), sampling=name_of_sampling(plan.sampling))
    setup = RunSetup(recipe=recipe, prepared=prepared, validation=validation, plan=plan, notes=notes)
    stage("trying the model on random examples")
    return dataclasses.replace(setup, plan=_tried(setup))


def records_of(recipe: Recipe, task: Task) -> tuple[Records, Records | None]:
    """Read the training records and the held-out ones; with a user column, whole users are held out."""
    is_causal = task is Task.CAUSAL_LM
    fields = prompts.fields(recipe.prompt_template or "")
    used = {"label_column": task.has_label or recipe.label_column in fields, "text_column": task.reads_text}
    used |= dict.fromkeys(("columns", "drop"), task.is_tabular)
    used |= dict.fromkeys(("prompt_template", "messages_column"), is_causal)
    for name, is_used in used.items():
        given = getattr(recipe, name)
        if given is not None and not is_used:
            fitting = "mlp or linear" if name in ("columns", "drop") else "text-classification"
            fitting = "causal-lm" if name in ("prompt_template", "messages_column") else fitting
            if name == "label_column" and is_causal:
                fitting += f", or write {{{given}}} in prompt_template"
            raise ValueError(f"{name}={given!r} is not used by {task.value}; leave it out, or choose {fitting}")

    def read(source: str, label_names: Sequence[str] | None, *, training: bool) -> Records:
        names = label_names if task.is_classification or recipe.prompt_template is not None else None
        columns = recipe.part(
            "text_column", "label_column", "user_column", "split", "prompt_template", "messages_column"
        )
        columns["may_be_chats"] = is_causal
        columns |= {"declared": recipe.columns, "drop": recipe.drop or (), "users_may_lack": not training}
        found = read_records(source, **columns, kind=record_kind(task), label_names=names)
        found.refuse_empty()
        return found

    found = read(recipe.data, recipe.label_names, training=True)
    if recipe.validation_data is not None:
        if same_source(recipe.validation_data, recipe.data):
            raise ValueError(f"validation_data={recipe.validation_data!r} is the training data; give other records")
        return found, read(recipe.validation_data, found.label_names, training=False)
    fraction = validation_fraction(recipe)
    if found.users is None:
        out = held_out_places(len(found), fraction)
    else:
        users = UserRecords(found.users)
        out = np.flatnonzero(np.isin(users.user_of, held_out_places(len(users), fraction)))
    if len(out) == 0:
        return found, None
    return found.take(np.setdiff1d(np.arange(len(found)), out)), found.take(out)


def _with_chats(recipe: Recipe, prepared: Prepared) -> tuple[Recipe, list[str]]:
    """The recipe with the columns of prompts and responses that were found, and notes on them."""
    records, dataset = prepared.records, prepared.dataset
    if records.chats is None or not isinstance(dataset, TokenDataset):
        return recipe, []
    notes = []
    if PLAIN_TEMPLATE in prepared.tokenizer.chat_template:
        notes.append("the tokenizer has no chat template: messages are separated by new lines")
    untaught = dataset.untaught()
    if untaught:
        problem = f"{untaught} of {len(records)} records have no response within max_length={prepared.max_length}"
        if untaught == len(records):
            raise ValueError(f"{problem}; use a larger one")
        notes.append(f"{problem}, so they teach nothing")
    if records.prompt_template is None:
        return recipe.replace(messages_column=records.text_column), notes
    return recipe.replace(prompt_template=records.prompt_template, text_column=records.text_column), notes


def task_of(recipe: Recipe) -> Task:
    """The task of a recipe: its own, or that of its model; a label that is declared as a number means regression."""
    label, declared = label_of(recipe), recipe.columns or {}
    if recipe.task is not None:
        task = Task(recipe.task)
        check_does(recipe.model, task)
        if task is Task.TABULAR_REGRESSION and label not in declared:
            own = label or "label"
            raise ValueError(f"the label {own!r} is not declared; declare its range, as --columns {own}=0:50")
        return task
    task = task_of_model(recipe.model)
    if task.is_tabular and label is not None and label in declared:
        column = column_of(label, declared[label])
        return Task.TABULAR_REGRESSION if isinstance(column, Number) or column == ESTIMATE_RANGE else task
    return task


def _tried(setup: RunSetup) -> PrivacyPlan:
    """Try optimizer and loss on random examples; return the plan with the optimizer's release."""
    setup.model.train()
    try:
        optimizer = optimizer_of(setup.recipe, setup.model, setup.plan)
        optimizer.detach()
        longest = setup.prepared.max_length or 8
        batch = random_batch(setup.prepared, [min(longest, length) for length in (8, 5, 3)])
        with torch.random.fork_rng(devices=[] if setup.device.type == "cpu" else None):
            check_example_independence(setup.model, setup.prepared.loss_per_example, batch)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(f"model={setup.recipe.model!r} cannot be trained: {first_line(error)}") from error
    return optimizer.plan


def training_digest(prepared: Prepared, key: NoiseKey) -> str:
    """A keyed digest of the training examples as the model sees them: tokens, numbers, or the bytes of image files."""
    records = prepared.records
    parts: list[Any] = [prepared.dataset]
    if records.kind is RecordKind.IMAGE:
        parts = [records.images, np.asarray(records.labels).tolist()]
    if records.users is not None:
        parts.append(records.users)
    return " ".join(fingerprint_records(part, key, name="data").digest for part in parts)


def same_source(one: str, other: str) -> bool:
    """Whether two names are the same file, folder or dataset; links are followed."""
    first, second = Path(one).expanduser(), Path(other).expanduser()
    return one == other or (first.exists() and second.exists() and first.samefile(second))


def shared_count(records: Records, *others: Records) -> int:
    """How many of the records occur in any of the others, ignoring labels."""
    key = NoiseKey.generate()
    each = [fingerprint_records(part.contents, key, name=part.source).each for part in (records, *others)]
    return int(np.isin(each[0], np.concatenate(each[1:])).sum())


def _note_on_classes(training: Records) -> str:
    """The classes that were found in the data: a misspelt one is visible, and so is a number."""
    names = training.label_names
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:20])
    shown += ", ..." if len(names) > 20 else ""
    note = f"{len(names)} classes read from the data: {shown}"
    if training.kind is RecordKind.TABULAR and len(names) > 20 and names[-1].isdecimal():  # numbers come first
        note += "; for a regression declare the label's range, as --columns age=0:110"
    return note


def _notes_on_unfit(held_out: Records, estimated: Sequence[str]) -> list[str]:
    """Report declared columns that do not fit many held-out records; the training records are not looked at."""
    if held_out.unfit is None:
        return []
    counts = dict(zip(held_out.columns, held_out.unfit.sum(0).tolist(), strict=True))
    many = [name for name, count in counts.items() if name not in estimated and count > len(held_out) / 4]
    found = ", ".join(f"{name!r} in {counts[name]}" for name in many)
    note = f"outside the declared range or categories: {found} of {len(held_out)} held-out records; check [columns]"
    return [note] if many else []


def _notes_on_shared(training: Records, held_out: Records) -> list[str]:
    """Report held-out records that are also training records; refuse the held-out data if all are."""
    shared = shared_count(held_out, training)
    # A table with few distinct rows is allowed: different people may have equal rows.
    few = training.features is not None and 2 * len(np.unique(training.features, axis=0)) < len(training)
    if shared == len(held_out) and not few:
        raise ValueError(
            f"all {shared} records of validation_data={held_out.source!r} are training records. Use different records, "
            "or validation_fraction."
        )
    found = f"{shared} of the {len(held_out)} records of validation_data are also training records"
    notes = [f"{found}; the guarantee does not cover scores on them"] if shared else []
    users = len({*(training.users or ())} & {*(held_out.users or ())})
    if users:
        notes.append(
            f"{users} users have records in both data and validation_data; the guarantee does not cover scores on them"
        )
    return notes
