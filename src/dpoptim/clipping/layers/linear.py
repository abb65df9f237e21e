"""Linear maps: `nn.Linear` (weight [outputs, inputs]) and Hugging Face's `Conv1D` (weight [inputs, outputs]).

With input x_t and output gradient b_t at position t, the weight gradient of an example is Σ_t b_t ⊗ x_t, and the
bias gradient is Σ_t b_t.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping.gradient_factors import Materialized, OuterProduct
from dpoptim.clipping.layers.rule import GradientSink, Recorder, apply_fast, differentiated_once, only_input, trainable
from dpoptim.kernels.norms import wide_dtype


def by_position(tensor: Tensor) -> Tensor:
    """Reshape [examples, ..., width] to [examples, positions, width], even with no examples."""
    return tensor if tensor.ndim == 3 else tensor.reshape(len(tensor), tensor.shape[1:-1].numel(), tensor.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,  # [examples, ..., inputs]
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        inputs_first: bool,
        record: Recorder,
    ) -> Tensor:
        ctx.record, ctx.inputs_first = record, inputs_first
        ctx.weight, ctx.bias, ctx.dtype = weight, bias, inputs.dtype
        ctx.save_for_backward(inputs if weight.requires_grad else None, weight)
        # With positions the output is a view, and torch would not let an in-place activation change it.
        return F.linear(inputs, weight.T if inputs_first else weight, bias).data

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        leaving = by_position(grad)
        if trainable(ctx.weight):
            entering = by_position(inputs if inputs.dtype == grad.dtype else inputs.to(grad.dtype))  # .to() takes time
            factors = OuterProduct(entering, leaving) if ctx.inputs_first else OuterProduct(leaving, entering)
            ctx.record(ctx.weight, factors)
        if trainable(ctx.bias):
            ctx.record(ctx.bias, Materialized(leaving.sum(1, dtype=wide_dtype(leaving.dtype))))
        to_inputs = None
        if ctx.needs_input_grad[0]:
            matrix = weight.T if ctx.inputs_first else weight
            flat = grad.reshape(-1, grad.shape[-1]) @ (matrix if matrix.dtype == grad.dtype else matrix.to(grad.dtype))
            to_inputs = flat.view(*grad.shape[:-1], flat.shape[-1])
            to_inputs = to_inputs if to_inputs.dtype == ctx.dtype else to_inputs.to(ctx.dtype)
        return to_inputs, None, None, None, None


def apply_linear(sink: GradientSink, inputs: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
    """inputs @ weight.T + bias, through the engine."""
    return apply_fast(_Linear, inputs, weight, bias, False, sink.recorder())


def linear(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The rule for `nn.Linear`."""
    return apply_linear(sink, _with_batch(sink, name, only_input(args, kwargs)), module.weight, module.bias)


def transposed_linear(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for `transformers.pytorch_utils.Conv1D`, a linear map with a transposed weight."""
    inputs = _with_batch(sink, name, only_input(args, kwargs))
    return apply_fast(_Linear, inputs, module.weight, module.bias, True, sink.recorder())


def _with_batch(sink: GradientSink, name: str, inputs: Tensor) -> Tensor:
    if inputs.ndim < 2:
        raise ValueError(f"layer '{name}' got an input of shape {tuple(inputs.shape)} without a batch axis; add one")
    return sink.expand_to_batch(inputs, name)
