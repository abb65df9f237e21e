"""What is predicted, and the loss of each example.

The loss of an example is the mean over ITS targets: masked tokens, next tokens, or its one label. A loss that Hugging
Face's models compute from `labels=` divides by the targets of the whole batch, which ties examples together; it is
never used.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.app.data.examples import Batch
from dpoptim.integrations.losses.class_losses import class_losses
from dpoptim.integrations.losses.token_losses import logits_of, token_losses
from dpoptim.integrations.masking import IGNORED


class Task(enum.Enum):
    """What is predicted from what."""

    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"
    TEXT_CLASSIFICATION = "text-classification"
    IMAGE_CLASSIFICATION = "image-classification"
    TABULAR_CLASSIFICATION = "tabular-classification"

    @property
    def is_classification(self) -> bool:
        """Whether an example has one label, and no language model is trained."""
        return self not in (Task.MASKED_LM, Task.CAUSAL_LM)

    @property
    def reads_text(self) -> bool:
        """Whether there is a tokenizer."""
        return self not in (Task.IMAGE_CLASSIFICATION, Task.TABULAR_CLASSIFICATION)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a model made of a batch: the sum of each example's losses over its targets, and how many they are."""

    total: Tensor  # [examples]
    targets: Tensor  # [examples]
    correct: Tensor | None = None  # [examples], for classification: is the largest logit the label's?

    @property
    def losses(self) -> Tensor:
        """The mean over each example's targets; 0 (with a gradient of 0) where there is none."""
        return self.total / self.targets.clamp(min=1)


def outcome(task: Task, model: nn.Module, batch: Batch, *, targets_only: bool = False) -> Outcome:
    """Run the model on a batch.

        loss of example j = (1 / max(n_j, 1)) Σ_{targets of j} −ln p(target)

    Guarantee: entry j depends on example j alone, and not on how far it was padded.
    Edge cases: an example without targets (an empty text) has loss 0, and takes part in the backward.
    """
    if task is Task.TABULAR_CLASSIFICATION:
        return _outcome(logits_of(model(_as_model(batch["features"], model))), batch["labels"])
    if task is Task.IMAGE_CLASSIFICATION:
        values = _as_model(batch["pixel_values"], model)
        return _outcome(logits_of(model(pixel_values=values)), batch["labels"])
    inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if task is Task.TEXT_CLASSIFICATION:
        return _outcome(logits_of(model(**inputs)), batch["labels"])
    if task is Task.CAUSAL_LM:
        if hasattr(getattr(model, "config", None), "use_cache"):
            inputs["use_cache"] = False
        losses = token_losses(model, inputs, batch["labels"], targets_only=targets_only)
    else:
        if "places" not in batch:
            raise ValueError(
                "batch is not masked yet; pass prepared.at_step(batch, step), or iterate over prepared.batches(loader)"
            )
        losses = token_losses(model, inputs, batch["labels"], batch["places"], targets_only=targets_only)
    return Outcome(total=losses.float().sum(1), targets=(batch["labels"] != IGNORED).sum(1))


def _outcome(logits: Tensor, labels: Tensor) -> Outcome:
    losses = class_losses(logits, labels)
    return Outcome(total=losses, targets=torch.ones_like(labels), correct=logits.argmax(-1) == labels)


def _as_model(values: Tensor, model: nn.Module) -> Tensor:
    """Numbers in the precision of the model's parameters."""
    return values.to(next(model.parameters()).dtype)
