"""A linear layer and its cross-entropy in one function, which does not store the logits next to their gradient.

The loss of a position is -ln softmax(W h + b)[label], and its gradient in the logits is p = softmax - one-hot. The
forward overwrites the logits with p, in the dtype of h. In the backward the layer's output gradient is u·p, where u is
the gradient of the loss.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping.engine import sink_of
from dpoptim.clipping.gradient_factors import Materialized, OuterProduct
from dpoptim.clipping.layers.rule import Recorder, apply_fast, differentiated_once, trainable
from dpoptim.kernels.norms import position_sums, softmax_gradient_

_ALIGNMENT = 64  # classes are padded to a multiple of this, because tensor cores need aligned rows


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,  # [examples, positions, width]
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        labels: Tensor,  # [examples, positions], negative where nothing is predicted
        record: Recorder | None,  # None: ordinary gradients of weight and bias
    ) -> Tensor:
        classes, width = weight.shape
        padding = -classes % _ALIGNMENT
        matrix = F.pad(weight.to(inputs.dtype), (0, 0, 0, padding))
        flat = inputs.reshape(-1, width)
        if bias is None:
            logits = flat @ matrix.T
        else:
            logits = torch.addmm(F.pad(bias.to(inputs.dtype), (0, padding)), flat, matrix.T)
        losses, lengths = softmax_gradient_(logits, labels.reshape(-1), classes)
        ctx.record, ctx.weight, ctx.bias, ctx.classes = record, weight, bias, classes
        to_inputs = (logits @ matrix).view_as(inputs) if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(inputs, logits.view(*inputs.shape[:-1], -1), lengths.view(inputs.shape[:-1]), to_inputs)
        return losses.view(labels.shape)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs, lengths, to_inputs = ctx.saved_tensors
        outputs = outputs[..., : ctx.classes]
        by_position = grad.to(inputs.dtype)
        by_weight = by_bias = None
        if ctx.record is None:
            if ctx.needs_input_grad[1]:
                weighted = (inputs * by_position[..., None]).flatten(0, 1)
                by_weight = (outputs.flatten(0, 1).T @ weighted).to(ctx.weight.dtype)
            if ctx.needs_input_grad[2]:
                by_bias = (by_position.flatten() @ outputs.flatten(0, 1)).to(ctx.bias.dtype)
        else:
            if trainable(ctx.weight):
                ctx.record(ctx.weight, OuterProduct(outputs, inputs * by_position[..., None], lengths))
            if trainable(ctx.bias):
                ctx.record(ctx.bias, Materialized(position_sums(outputs, by_position)))
        if to_inputs is not None:
            to_inputs = to_inputs * by_position[..., None]
        return to_inputs, by_weight, by_bias, None, None


def linear_cross_entropy(layer: nn.Linear, inputs: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Return the cross-entropy of `layer(inputs)` at `labels` for each position, using less memory.

    Use it for the projection onto a vocabulary, where logits are most of a model's memory. It is private if the
    layer's model is trained privately, and ordinary elsewhere. Tied weights count with all their uses.

    Args:
        layer: The projection.
        inputs: [examples, positions, width].
        labels: [examples, positions].
        ignore_index: Positions with this label have loss 0.

    Returns:
        The losses, [examples, positions].

    >>> layer, inputs, labels = nn.Linear(4, 7), torch.randn(2, 3, 4), torch.randint(0, 7, (2, 3))
    >>> plain = F.cross_entropy(layer(inputs).flatten(0, 1), labels.flatten(), reduction="none").view(2, 3)
    >>> torch.allclose(linear_cross_entropy(layer, inputs, labels), plain, atol=1e-6)
    True
    """
    if inputs.ndim != 3 or labels.shape != inputs.shape[:2]:
        shapes = tuple(inputs.shape), tuple(labels.shape)
        raise ValueError(f"inputs must be [examples, positions, width] and labels [examples, positions], got {shapes}")
    labels = labels.masked_fill(labels == ignore_index, -1)
    sink, name = sink_of(layer, inputs)
    if sink is not None:
        inputs = sink.expand_to_batch(inputs, name, has_labels=True)
    if torch.is_autocast_enabled(inputs.device.type):  # as autocast does for a linear layer
        inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
    weight, bias = cast(nn.Parameter, layer.weight), cast(nn.Parameter | None, layer.bias)
    record = None if sink is None else sink.recorder()
    losses: Tensor = apply_fast(_LinearCrossEntropy, inputs, weight, bias, labels, record)
    return losses
