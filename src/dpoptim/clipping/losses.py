"""Losses that do not store what they need not."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from dpoptim.clipping.engine import sink_of
from dpoptim.clipping.layers import cross_entropy


def linear_cross_entropy(layer: nn.Linear, inputs: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The cross-entropy of `layer(inputs)` at `labels`, one loss for each position, without storing logits beside it.

    For the projection onto a vocabulary, where logits are most of a model's memory. `inputs` are
    [examples, positions, width] and `labels` [examples, positions]; where a label is `ignore_index` the loss is 0.
    Private where the layer's model is trained privately, ordinary elsewhere; tied weights count with all their uses.

    >>> import torch
    >>> import torch.nn.functional as F
    >>> layer, inputs, labels = nn.Linear(4, 7), torch.randn(2, 3, 4), torch.randint(0, 7, (2, 3))
    >>> plain = F.cross_entropy(layer(inputs).flatten(0, 1), labels.flatten(), reduction="none").view(2, 3)
    >>> torch.allclose(linear_cross_entropy(layer, inputs, labels), plain, atol=1e-6)
    True
    """
    if inputs.ndim != 3 or labels.shape != inputs.shape[:2]:
        raise ValueError(
            "inputs must be [examples, positions, width] and labels [examples, positions], got "
            f"{tuple(inputs.shape)} and {tuple(labels.shape)}"
        )
    if inputs.shape[-1] != layer.in_features:
        raise ValueError(f"inputs have width {inputs.shape[-1]} and the layer takes {layer.in_features}")
    labels = labels.masked_fill(labels == ignore_index, -1)
    keeper, name = sink_of(layer, inputs)
    if keeper is not None:
        inputs = keeper.expand_to_batch(inputs, name, is_tied=True)
    bias = cast(nn.Parameter | None, layer.bias)
    return cross_entropy.linear_cross_entropy(inputs, cast(nn.Parameter, layer.weight), bias, labels, keeper)
