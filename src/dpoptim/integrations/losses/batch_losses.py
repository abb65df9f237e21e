"""The loss of each example of a batch as a Hugging Face collator makes it: tensors by name, `labels` among them.

A model that is called with `labels` averages over the targets of the whole batch, which ties examples together. Here
labels are taken out before the model is called, and each example's loss is the mean over ITS targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.integrations.losses.causal_check import check_one_direction
from dpoptim.integrations.losses.class_losses import class_losses
from dpoptim.integrations.losses.label_losses import LabelLosses
from dpoptim.integrations.losses.task_of_class import LABEL_TABLES, TABLES, label_tasks_of_classes, tasks_of_classes
from dpoptim.integrations.losses.tasks import Task
from dpoptim.integrations.losses.token_losses import can_read_targets, logits_of, token_losses
from dpoptim.integrations.masking import IGNORED
from dpoptim.integrations.modes import without_peft


@dataclass(frozen=True, kw_only=True)
class BatchLosses:
    """loss_per_example(model, batch) -> [examples], for a task whose batch has `labels`.

        loss of example j = (1 / max(n_j, 1)) Σ_{targets of j} −ln p(target)

    Guarantee: entry j depends on example j alone, provided that the model's output for j does. Language models with
    `targets_only` decode the targets and store no logits.
    Edge cases: an example without targets has loss 0. Classifiers follow `config.problem_type` as transformers does:
    one label, several, or a number (squared error, the mean over the numbers).
    """

    task: Task
    targets_only: bool = False

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs = dict(batch)
        labels = inputs.pop("labels", None)
        if labels is None:
            raise ValueError(
                f"the batch has no labels, only {', '.join(inputs)}: {self.task.value} needs them; use a collator that "
                "makes them (DataCollatorForLanguageModeling, say), or pass loss_per_example="
            )
        if self.task.is_classification:
            return class_losses(logits_of(model(**inputs)), labels, _config(model))
        places = None
        if self.task is Task.CAUSAL_LM:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # position t predicts token t + 1
            if hasattr(_config(model), "use_cache"):
                inputs["use_cache"] = False
        elif self.targets_only:
            labels, places = _gathered(labels)
        losses = token_losses(model, inputs, labels, places, targets_only=self.targets_only)
        return losses.float().sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def losses_for(model: nn.Module, task: str | None = None) -> BatchLosses | LabelLosses:
    """The losses of a model by its class, or for a task by name.

    Edge cases: one ValueError line where the class says nothing, where it does more than one task, and for causal-lm
    with a model that reads later tokens. Of a model that
    a private optimizer watches already, all logits are made: ask before the optimizer is made to decode targets alone.
    """
    found = _task_of(model) if task is None else _named(task)
    if not isinstance(found, Task):
        return LabelLosses(decodes=found == "seq2seq-lm")
    if found is Task.CAUSAL_LM:
        check_one_direction(model)
    return BatchLosses(task=found, targets_only=not found.is_classification and _can_read_targets(model))


def _can_read_targets(model: nn.Module) -> bool:
    try:
        return can_read_targets(model, int(without_peft(model).get_input_embeddings().weight.shape[0]))
    except ValueError:  # its layers run through an optimizer's engine and cannot be looked at
        return False


def _named(task: str) -> Task | str:
    known: dict[str, Task | str] = {kind.value: kind for kind in TABLES} | {name: name for name in LABEL_TABLES}
    if task not in known:
        raise ValueError(f"task={task!r} must be one of {', '.join(known)}")
    return known[task]


def _task_of(model: nn.Module) -> Task | str:
    inner = without_peft(model)
    names = [kind.__name__ for kind in type(inner).__mro__]
    found: list[Task | str] = [*tasks_of_classes(names), *label_tasks_of_classes(names)]
    if len(found) != 1:
        known = ", ".join([*(kind.value for kind in TABLES), *LABEL_TABLES])
        says = "does several tasks" if found else "is of no task that is known here"
        raise ValueError(
            f"{type(inner).__name__} {says}; set task= ({known}), or pass loss_per_example=, a function of (model, "
            "batch) that gives one loss an example"
        )
    return found[0]


def _config(model: nn.Module) -> Any:
    return getattr(without_peft(model), "config", None)


def _gathered(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels and places of the targets, [examples, most targets of one]; `IGNORED` where an example has fewer.

    >>> import torch
    >>> _gathered(torch.tensor([[-100, 7, -100, 8], [-100, -100, 9, -100]]))
    (tensor([[   7,    8],
            [   9, -100]]), tensor([[1, 3],
            [2, 0]]))
    """
    is_target = labels != IGNORED
    most = max(1, int(is_target.sum(1).max()))
    places = (~is_target).int().sort(dim=1, stable=True).indices[:, :most]
    return labels.gather(1, places), places
