"""Losses of models whose logits lie beside their labels: one label a token (named entities), or a text for a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpoptim.integrations.losses.token_losses import token_losses
from dpoptim.integrations.masking import IGNORED
from dpoptim.integrations.modes import without_peft


@dataclass(frozen=True, kw_only=True)
class LabelLosses:
    """loss_per_example(model, batch) -> [examples], the mean cross-entropy over each example's own labels.

    `decodes`: the labels are a text that a decoder makes; where the batch has no `decoder_input_ids`, they are the
    labels shifted by the model's own rule.

    Guarantee: entry j depends on example j alone, provided that the model's output for j does.
    Edge cases: an example whose labels are all −100 has loss 0.
    """

    decodes: bool = False

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs = dict(batch)
        labels = inputs.pop("labels", None)
        if labels is None:
            maker = "DataCollatorForSeq2Seq" if self.decodes else "DataCollatorForTokenClassification"
            raise ValueError(
                f"the batch has no labels, only {', '.join(inputs)}; use a collator that makes them ({maker})"
            )
        if self.decodes:
            inputs["use_cache"] = False
            if inputs.get("decoder_input_ids") is None:
                inputs["decoder_input_ids"] = _shifted(model, labels)
        losses = token_losses(model, inputs, labels, targets_only=False)
        return losses.float().sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def _shifted(model: nn.Module, labels: Tensor) -> Any:
    shift = getattr(without_peft(model), "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        raise ValueError(
            f"the batch has no decoder_input_ids, and {type(without_peft(model)).__name__} cannot make them of labels; "
            "use DataCollatorForSeq2Seq(tokenizer, model=model), or put them into the dataset"
        )
    return shift(labels=labels)
