"""Give the batches of a collator few shapes, so that each shape can run as a CUDA graph.

Everything here runs on the host, before a batch is sent to the device, and changes no loss: padding is masked and has
no targets, a mask of ones has no effect, and the places of targets come from the labels.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from dpoptim.integrations.losses import BatchLosses, gathered
from dpoptim.integrations.token_losses import IGNORED, without_peft
from dpoptim.validation.temporary_changes import replaced

_WIDTHS = 8  # at most this many padded widths in a run
_TARGETS = 16  # masked language models: the number of targets is rounded up to a multiple of this
_PADDING = {"attention_mask": 0, "token_type_ids": 0, "labels": IGNORED}


def has_rows(batch: Any) -> bool:
    """Whether all tensors of a batch have the examples on their first axis."""
    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)  # a BatchEncoding is not a dict
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return bool(tensors) and all(tensor.ndim and len(tensor) == len(tensors[0]) for tensor in tensors)


def without_packing(batch: Any) -> contextlib.AbstractContextManager[None]:
    """Stop transformers from searching the model's default positions for packed texts, which waits for the GPU."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    has_positions = isinstance(batch, Mapping) and "position_ids" in batch
    if has_positions or not hasattr(masking, "find_packed_sequence_indices"):
        return contextlib.nullcontext()
    return replaced(masking, find_packed_sequence_indices=lambda position_ids: None)


class BatchShapes:
    """Prepares the batches of a run for graphs; none is padded beyond the width `longest` of the longest record."""

    def __init__(self, model: Any, losses: Any, longest: int | None) -> None:
        inner = without_peft(model)
        pad_id = getattr(getattr(inner, "config", None), "pad_token_id", None)
        self._padding = {**_PADDING, "input_ids": pad_id if isinstance(pad_id, int) and pad_id >= 0 else 0}
        mask = inspect.signature(type(inner).forward).parameters.get("attention_mask")
        task = losses.task if isinstance(losses, BatchLosses) else None
        # A user's loss function may read the mask itself.
        self._mask_is_optional = task is not None and mask is not None and mask.default is None
        self._gathers = task == "masked-lm" and losses.targets_only
        self._has_classes = task is not None and task.endswith("-classification") and task != "token-classification"
        self._longest = longest

    def __call__(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            return batch
        inputs = self._padded(dict(batch))
        mask, labels = inputs.get("attention_mask"), inputs.get("labels")
        if self._mask_is_optional and isinstance(mask, Tensor) and bool((mask == 1).all()):
            del inputs["attention_mask"]
        if self._gathers and isinstance(labels, Tensor):
            inputs["labels"], inputs["places"] = gathered(labels, multiple=_TARGETS)
        return inputs

    def _padded(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Pad all tensors as wide as the tokens, if each has a known padding value and a mask hides the padding."""
        shape = inputs["input_ids"].shape
        if self._longest is None or len(shape) != 2 or shape[1] >= self._longest or "attention_mask" not in inputs:
            return inputs
        alike = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.shape[1:2] == shape[1:]}
        if "labels" in alike and (self._has_classes or inputs["labels"].is_floating_point()):
            alike.remove("labels")  # there are as many classes as tokens, by chance
        if not alike <= self._padding.keys() or any(inputs[name].shape != shape for name in alike):
            return inputs
        step = -(-self._longest // _WIDTHS)
        width = min(-(-shape[1] // step) * step, self._longest)
        for name in alike:
            wide = inputs[name].new_full((shape[0], width), self._padding[name])
            wide[:, : shape[1]] = inputs[name]
            inputs[name] = wide
        return inputs
