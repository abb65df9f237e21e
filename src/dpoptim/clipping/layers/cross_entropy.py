"""A linear layer and the cross-entropy behind it as one: the logits are made, turned into their gradient, and gone.

The loss of a position is -ln softmax(W h + b)[label]; its gradient in the logits, p = softmax - one-hot, is known as
soon as they are. So the forward overwrites the logits by p, in the dtype of h; the backward has u·p as output gradient
of the layer, with u the gradient of the loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping.gradient_factors import Dense, Outer
from dpoptim.clipping.layers.rule import GradientSink, Use, applied, differentiated_once, trainable
from dpoptim.kernels.norms import position_sums, softmax_gradient_

_ALIGNMENT = 64  # classes are padded to a multiple of this: tensor cores want aligned rows


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,  # [examples, positions, width]
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        labels: Tensor,  # [examples, positions], negative where nothing is predicted
        keeper: GradientSink | None,  # None: ordinary gradients of weight and bias
        use: Use | None,
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
        ctx.keeper, ctx.use, ctx.weight, ctx.bias, ctx.classes = keeper, use, weight, bias, classes
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
        if ctx.keeper is None:
            if ctx.needs_input_grad[1]:
                weighted = (inputs * by_position[..., None]).flatten(0, 1)
                by_weight = (outputs.flatten(0, 1).T @ weighted).to(ctx.weight.dtype)
            if ctx.needs_input_grad[2]:
                by_bias = (by_position.flatten() @ outputs.flatten(0, 1)).to(ctx.bias.dtype)
        else:
            if trainable(ctx.weight):
                ctx.keeper.keep(ctx.weight, Outer(outputs, inputs * by_position[..., None], lengths), ctx.use)
            if trainable(ctx.bias):
                ctx.keeper.keep(ctx.bias, Dense(position_sums(outputs, by_position)), ctx.use)
        if to_inputs is not None:
            to_inputs = to_inputs * by_position[..., None]
        return to_inputs, by_weight, by_bias, None, None, None


def linear_cross_entropy(
    inputs: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, labels: Tensor, keeper: GradientSink | None
) -> Tensor:
    """Losses of shape [examples, positions] from inputs [examples, positions, width]."""
    if torch.is_autocast_enabled(inputs.device.type):  # as autocast does for a linear layer
        inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
    use = None if keeper is None else keeper.use()
    return applied(_LinearCrossEntropy, inputs, weight, bias, labels, keeper, use)
