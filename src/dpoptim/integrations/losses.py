"""Tasks and the loss of each example.

The loss of an example is the mean over ITS OWN targets: masked tokens, next tokens, or its label. A Hugging Face model
that is called with `labels` divides by the number of targets in the whole batch, which mixes examples. So labels are
taken out before the model is called.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.arguments import check_choice
from dpoptim.integrations.optional import require
from dpoptim.integrations.token_losses import IGNORED, can_read_targets, logits_of, token_losses, without_peft


class Task(enum.Enum):
    """What `dpoptim train` can predict."""

    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"
    TEXT_CLASSIFICATION = "text-classification"
    IMAGE_CLASSIFICATION = "image-classification"
    TABULAR_CLASSIFICATION = "tabular-classification"
    TABULAR_REGRESSION = "tabular-regression"

    @property
    def is_classification(self) -> bool:
        """Whether an example has one of several labels."""
        return self.has_label and self is not Task.TABULAR_REGRESSION

    @property
    def has_label(self) -> bool:
        """Whether an example has a label: a class or a number."""
        return self not in (Task.MASKED_LM, Task.CAUSAL_LM)

    @property
    def reads_text(self) -> bool:
        """Whether there is a tokenizer."""
        return self is not Task.IMAGE_CLASSIFICATION and not self.is_tabular

    @property
    def is_tabular(self) -> bool:
        """Whether an example is a row of numbers."""
        return self in (Task.TABULAR_CLASSIFICATION, Task.TABULAR_REGRESSION)


_TABLES = {  # transformers' tables of model classes
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "text-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
_COLLATORS = {"token-classification": "DataCollatorForTokenClassification", "seq2seq-lm": "DataCollatorForSeq2Seq"}


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleLosses:
    """The sum of each example's losses over its targets, and the number of targets."""

    total: Tensor  # [examples]
    targets: Tensor  # [examples]
    correct: Tensor | None = None  # [examples], for classifiers: whether the label has the largest logit

    @property
    def losses(self) -> Tensor:
        """The mean over each example's targets; 0, with a gradient of 0, for an example without targets."""
        return self.total / self.targets.clamp(min=1)


def example_losses(
    task: Task, model: nn.Module, batch: Mapping[str, Tensor], *, targets_only: bool = False
) -> ExampleLosses:
    """Run the model on a batch that was prepared for the task.

    Guarantee: Entry j depends on example j alone, and not on its padding, if that holds for the model's outputs.
    """
    assert task is not Task.MASKED_LM or "places" in batch, "the batch is not masked: use prepared.at_step or batches"
    dtype = next(model.parameters()).dtype
    inputs = {name: values.to(dtype) if values.is_floating_point() else values for name, values in batch.items()}
    labels, places = inputs.pop("labels"), inputs.pop("places", None)
    if task.is_classification:
        logits = logits_of(model(inputs["features"]) if task.is_tabular else model(**inputs))
        losses = class_losses(logits, labels)
        return ExampleLosses(total=losses, targets=torch.ones_like(labels), correct=logits.argmax(-1) == labels)
    if task is Task.TABULAR_REGRESSION:
        losses = (model(inputs["features"]).squeeze(-1).float() - labels.float()).square()
        return ExampleLosses(total=losses, targets=torch.ones_like(losses, dtype=torch.int64))
    return _of_tokens(task.value, model, inputs, labels, places, targets_only)


def _of_tokens(
    task: str, model: nn.Module, inputs: dict[str, Any], labels: Tensor, places: Tensor | None, targets_only: bool
) -> ExampleLosses:
    if task in ("causal-lm", "seq2seq-lm") and hasattr(_config(model), "use_cache"):
        inputs["use_cache"] = False
    losses = token_losses(model, inputs, labels, places, targets_only=targets_only)
    return ExampleLosses(total=losses.float().sum(1), targets=(labels != IGNORED).sum(1))


@dataclass(frozen=True, kw_only=True)
class BatchLosses:
    """`losses(model, batch)` returns the loss of each example of a Hugging Face collator's batch.

    Guarantee: Entry j depends on example j alone, if that holds for the model's outputs. An example without targets has
    loss 0.
    """

    task: str
    targets_only: bool = False

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs = dict(batch)
        labels = inputs.pop("labels", None)
        if labels is None:
            collator = _COLLATORS.get(self.task, "DataCollatorForLanguageModeling")
            raise ValueError(
                f"the batch has no labels, only {', '.join(inputs)}. Use a collator that adds them, such as {collator}."
            )
        if self.task in ("text-classification", "image-classification"):
            return class_losses(logits_of(model(**inputs)), labels, _config(model))
        places = inputs.pop("places", None)
        if self.task == "causal-lm":
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # position t predicts token t + 1
        elif self.task == "seq2seq-lm" and inputs.get("decoder_input_ids") is None:
            shift = getattr(without_peft(model), "prepare_decoder_input_ids_from_labels", None)
            if shift is None:
                raise ValueError(
                    "the batch has no decoder_input_ids, and the model cannot shift labels. Add them to the data."
                )
            inputs["decoder_input_ids"] = shift(labels=labels)
        elif self.task == "masked-lm" and self.targets_only and places is None:
            labels, places = gathered(labels)
        return _of_tokens(self.task, model, inputs, labels, places, self.targets_only).losses


def losses_for(model: nn.Module, task: str | None = None) -> BatchLosses:
    """The losses of a Hugging Face model; once an optimizer is attached, language models compute all logits."""
    if task is None:
        inner = without_peft(model)
        found = _tasks_of([kind.__name__ for kind in type(inner).__mro__])
        if len(found) != 1:
            problem = "does several tasks" if found else "has no known task"
            raise ValueError(
                f"{type(inner).__name__} {problem}. Set task= ({', '.join(_TABLES)}), or pass loss_per_example=."
            )
        (task,) = found
    check_choice("task", task, _TABLES)
    if task == "causal-lm":
        check_is_causal(model)
    return BatchLosses(task=task, targets_only=task in ("masked-lm", "causal-lm") and can_read_targets(model))


def class_losses(logits: Tensor, labels: Tensor, config: Any = None) -> Tensor:
    """The loss of each example of a classifier, by the kind of labels that its configuration declares."""
    logits = logits.float()
    kind = getattr(config, "problem_type", None)
    if kind is None and config is not None and logits.shape[-1] == 1:
        kind = "regression"
    if kind is None and labels.is_floating_point():
        kind = "multi_label_classification"
    if kind == "regression":
        return F.mse_loss(logits, labels.float().view_as(logits), reduction="none").flatten(1).mean(1)
    if kind == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").flatten(1).mean(1)
    return F.cross_entropy(logits, labels.view(-1), reduction="none")


def check_is_causal(model: nn.Module) -> None:
    """Refuse an encoder that is not configured as a decoder: it would see the tokens that it has to predict."""
    config = _config(model)
    auto = require("transformers.models.auto.modeling_auto", "causal-lm")
    is_encoder = getattr(config, "model_type", None) in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_encoder and not (getattr(config, "is_decoder", False) or getattr(config, "causal", False)):
        raise ValueError(
            f"{type(without_peft(model)).__name__} reads in both directions, so it sees the tokens that causal-lm "
            "predicts. Use masked-lm, or set is_decoder=True in its configuration."
        )


def tasks_of_classes(names: Iterable[str]) -> list[Task]:
    """The tasks of `dpoptim train` that classes with these names are for: none, one or several."""
    return [Task(task) for task in _tasks_of(names) if task not in _COLLATORS]


def trained_elsewhere(names: Iterable[str]) -> str | None:
    """Describe a model that only PrivateTrainer can train; None for others."""
    found = [task for task in _tasks_of(names) if task in _COLLATORS]
    if not found:
        return None
    kind = "an encoder–decoder" if "seq2seq-lm" in found else f"a {found[0]}"
    return f"{kind} model, which PrivateTrainer trains (docs/hugging-face.md) and `dpoptim train` does not"


def _tasks_of(names: Iterable[str]) -> list[str]:
    """The tasks of classes with these names, by transformers' tables."""
    auto = require("transformers.models.auto.modeling_auto", "finding the task of a model")
    asked = set(names)

    def has_one(table: Mapping[str, str | tuple[str, ...]]) -> bool:
        return any(asked & ({value} if isinstance(value, str) else set(value)) for value in table.values())

    return [task for task, table in _TABLES.items() if has_one(getattr(auto, table))]


def _config(model: nn.Module) -> Any:
    return getattr(without_peft(model), "config", None)


def gathered(labels: Tensor, *, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Return labels and places of targets, [examples, most rounded up to `multiple`]; spare labels are `IGNORED`."""
    is_target = labels != IGNORED
    most = min(-(-max(1, int(is_target.sum(1).max())) // multiple) * multiple, labels.shape[1])
    places = (~is_target).int().sort(dim=1, stable=True).indices[:, :most]
    return labels.gather(1, places), places
