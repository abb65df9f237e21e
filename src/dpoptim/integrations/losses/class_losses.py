"""The loss of each example of a classifier, from its logits."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def class_losses(logits: Tensor, labels: Tensor, config: Any = None) -> Tensor:
    """[examples], by the kind of labels that the model's configuration declares, as transformers reads it.

    One label: −ln p(label). Several (`problem_type="multi_label_classification"`, or labels that are no whole numbers):
    the mean binary cross-entropy. A number (`"regression"`, or one logit): the mean squared error.
    Guarantee: entry j depends on row j alone.

    >>> import torch
    >>> class_losses(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor([1.3863, 1.3863])
    """
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
