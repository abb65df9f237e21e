"""Prepare a run: read the records, load the model, make the plan, and check them before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpoptim.app.data.estimates import counts_for, estimated, open_columns, without_looking
from dpoptim.app.data.examples import ChatDataset
from dpoptim.app.data.records import RecordKind, Records, read_columns, read_records
from dpoptim.app.models.loading import task_of_model
from dpoptim.app.models.prepared import Prepared, prepare, random_batch, record_kind
from dpoptim.app.recipes import prompts
from dpoptim.app.recipes.columns import ESTIMATE_RANGE, Number, column_of
from dpoptim.app.recipes.defaults import chosen_device, optimizer_of, plan_of, validation_fraction, with_defaults
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.report_to import check_installed
from dpoptim.arguments import default_delta
from dpoptim.clipping import check_example_independence
from dpoptim.data import fingerprint_records
from dpoptim.data.processes import Processes
from dpoptim.data.users import UserRecords
from dpoptim.integrations.chats import PLAIN_TEMPLATE
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import name_of_noise, name_of_sampling
from dpoptim.integrations.optional import first_line
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
    looks: bool = True,
    stage: Callable[[str], None] = lambda text: None,
) -> RunSetup:
    """Read the data, hold some out, load the model, make the plan, and try model and optimizer on random examples.

    Args:
        recipe: The settings; what it leaves open is filled in.
        plan: The plan of a run to resume. Defaults to a new one.
        looks: Whether to estimate the columns that the recipe leaves open. A dry run does not: their noisy counts are
            a release, which belongs to a run.
        stage: Called with a short text when a stage begins.

    Raises:
        ValueError: Something is wrong with the input: a missing file or column, no records, a batch larger than the
            data, an impossible ε, a model that mixes examples. Nothing is written or trained before.
    """
    device = chosen_device(recipe.device)
    if device.type == "cpu":
        keep_freed_memory()
    check_installed(recipe.report_to)
    recipe = recipe.with_whole_paths()
    stage("reading the records")
    task = task_of(recipe)
    counts: ColumnCounts | None = None
    notes: list[str] = []
    if plan is None:
        recipe, counts, notes = _with_estimates(recipe, task, looks=looks, stage=stage)
    training, held_out = records_of(recipe, task)
    if held_out is None:
        notes.append("no records are held out, so there will be no scores; give validation_data (--validation-data)")
    elif recipe.validation_data is not None:
        stage("comparing training and held-out records")
        notes += _notes_on_shared(training, held_out)
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
    names = training.label_names if task.is_classification or training.prompt_template is not None else None
    recipe = recipe.replace(max_length=prepared.max_length, label_names=names or None)
    recipe, chat_notes = _with_chats(recipe, prepared)
    notes += chat_notes
    validation = None if held_out is None else prepared.on(held_out)
    if plan is None:
        stage("making the privacy plan")
        progress = {"progress": lambda name: stage(f"optimizing {name}")}
        plan = plan_of(recipe, parameters=prepared.model, counts=counts, **progress)
        recipe = recipe.replace(noise=name_of_noise(plan.noise), sampling=name_of_sampling(plan.sampling))
    setup = RunSetup(recipe=recipe, prepared=prepared, validation=validation, plan=plan, notes=notes)
    stage("trying the model on random examples")
    return dataclasses.replace(setup, plan=_tried(setup))


def held_out_places(count: int, fraction: float) -> np.ndarray:
    """Every k-th place from k − 1 on, k = round(1/fraction): a rule that does not look at the records."""
    every = max(2, round(1 / fraction)) if fraction else count + 1
    return np.arange(every - 1, count, every, dtype=np.int64)


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
            other = (
                "choose causal-lm" if name in ("prompt_template", "messages_column") else "choose text-classification"
            )
            if name == "label_column" and is_causal:
                other += f", or write {{{given}}} in prompt_template"
            raise ValueError(f"{name}={given!r} is not used by {task.value}; drop it, or {other}")

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
    if not isinstance(dataset, ChatDataset):
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


def _with_estimates(
    recipe: Recipe, task: Task, *, looks: bool, stage: Callable[[str], None]
) -> tuple[Recipe, ColumnCounts | None, list[str]]:
    """The recipe with every column declared, the noisy counts that this cost, and notes."""
    declared = recipe.columns or {}
    reused = [name for name, value in declared.items() if isinstance(value, Mapping) and value.get("estimated")]
    notes = [f"{', '.join(reused)}: estimated by an earlier run, whose epsilon adds to this one's"] if reused else []
    names = open_columns(declared)
    if not names or not task.is_tabular:
        return recipe, None, notes
    if recipe.user_column is not None:
        raise ValueError(f"columns.{names[0]} cannot be estimated for users, only for records; declare it")
    columns, locate = read_columns(recipe.data, split=recipe.split, kind=RecordKind.TABULAR)
    for name in names:
        if name not in columns:
            raise ValueError(f"columns.{name} is not a column of {recipe.data}; the columns are {', '.join(columns)}")
    everyone = len(columns[names[0]])
    places = np.setdiff1d(np.arange(everyone), held_out_places(everyone, validation_fraction(recipe)))
    epsilon = recipe.columns_epsilon or (recipe.epsilon or 0.0) / 10
    if not epsilon or (recipe.epsilon is not None and epsilon >= recipe.epsilon):
        raise ValueError(f"columns_epsilon={recipe.columns_epsilon} must be set, below epsilon={recipe.epsilon}")
    delta = recipe.delta or default_delta(recipe.num_examples or len(places))
    counts = counts_for(declared, epsilon=epsilon, delta=delta, adjacency=Adjacency(recipe.adjacency))
    if not looks:
        note = f"a dry run does not estimate {', '.join(names)}; sizes assume one category each"
        return recipe.replace(columns=without_looking(declared)), counts, [*notes, note]
    stage("estimating columns")
    key, _ = Processes.current().shared_run("estimates of columns", None, None)  # used here only, and forgotten
    own = {name: [columns[name][place] for place in places.tolist()] for name in names}
    found = estimated(own, declared, counts, key, lambda index: locate(int(places[index])))
    return recipe.replace(columns=found), counts, notes


def task_of(recipe: Recipe) -> Task:
    """The task of a recipe: its own, or that of its model; a label that is declared as a number means regression."""
    if recipe.task is not None:
        return Task(recipe.task)
    task, label, declared = task_of_model(recipe.model), label_of(recipe), recipe.columns or {}
    if task.is_tabular and label is not None and label in declared:
        column = column_of(label, declared[label])
        return Task.TABULAR_REGRESSION if isinstance(column, Number) or column == ESTIMATE_RANGE else task
    return task


def label_of(recipe: Recipe) -> str | None:
    """The label's column: the recipe's, or "label" or "labels" if it is declared."""
    return recipe.label_column or next((name for name in ("label", "labels") if name in (recipe.columns or {})), None)


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
            f"{users} users have records in both data and validation_data; the guarantee does not cover scores"
        )
    return notes
