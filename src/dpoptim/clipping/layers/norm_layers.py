"""Normalization layers y = x̂ ⊙ weight + bias: with output gradient b, their gradients are sums of b ⊙ x̂ and b.

LayerNorm and GroupNorm run as one function if possible; the others normalize without parameters, then scale and shift.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping.gradient_factors import Materialized
from dpoptim.clipping.layers.rule import (
    GradientSink,
    LayerCall,
    apply_fast,
    by_position,
    differentiated_once,
    only_input,
    trainable,
)
from dpoptim.kernels import normalization
from dpoptim.kernels.choose import on_gpu
from dpoptim.kernels.norms import wide, wide_dtype


class _ScaleAndShift(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normalised: Tensor,  # [examples, ...]
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        first_axis: int,  # the parameter's axes begin here in `normalised`
        sink: GradientSink,
        call: LayerCall,
    ) -> Tensor:
        ctx.sink, ctx.call, ctx.weight, ctx.bias, ctx.first_axis = sink, call, weight, bias, first_axis
        ctx.save_for_backward(normalised if trainable(weight) else None, weight)
        output = normalised.clone() if weight is None else normalised * _fit(weight, normalised, first_axis)
        return output if bias is None else output + _fit(bias, normalised, first_axis)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normalised, weight = ctx.saved_tensors
        if trainable(ctx.weight):
            per_example = _sum_to(wide(grad) * wide(normalised), ctx.weight, ctx.first_axis)
            ctx.sink.record(ctx.weight, Materialized(per_example), ctx.call)
        if trainable(ctx.bias):
            ctx.sink.record(ctx.bias, Materialized(_sum_to(wide(grad), ctx.bias, ctx.first_axis)), ctx.call)
        to_inputs = None
        if ctx.needs_input_grad[0]:
            to_inputs = grad if weight is None else grad * _fit(weight, grad, ctx.first_axis)
        return to_inputs, None, None, None, None, None


def _fit(parameter: Tensor, like: Tensor, first_axis: int) -> Tensor:
    """The parameter with axes of 1 behind it, so that it broadcasts from `first_axis` on."""
    return parameter.view(*parameter.shape, *[1] * (like.ndim - first_axis - parameter.ndim))


def _sum_to(grad: Tensor, parameter: Tensor, first_axis: int) -> Tensor:
    """[examples, *parameter.shape]: sums over all other axes."""
    last_axis = first_axis + parameter.ndim
    axes = [axis for axis in range(1, grad.ndim) if not first_axis <= axis < last_axis]
    return grad.sum(axes) if axes else grad


class _WholeNorm(torch.autograd.Function):
    """Normalization and parameters in one function; on a GPU, one pass over memory each for forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter,
        norm: Callable[..., tuple[Tensor, Tensor, Tensor]],
        settings: tuple[Any, ...],  # further arguments of the norm
        gradient: Callable[..., tuple[Tensor, Tensor, Tensor]],
        sink: GradientSink,
        call: LayerCall,
    ) -> Tensor:
        ctx.sink, ctx.call, ctx.weight, ctx.bias, ctx.gradient = sink, call, weight, bias, gradient
        output, mean, rstd = norm(inputs, weight, bias, *settings)
        ctx.save_for_backward(inputs, weight, mean, rstd)
        return output

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        to_inputs, by_weight, by_bias = ctx.gradient(grad, *ctx.saved_tensors)
        if trainable(ctx.weight):
            ctx.sink.record(ctx.weight, Materialized(by_weight), ctx.call)
        if trainable(ctx.bias):
            ctx.sink.record(ctx.bias, Materialized(by_bias), ctx.call)
        return to_inputs, *[None] * 7


def layer_norm(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    inputs = sink.expand_to_batch(only_input(args, kwargs), name)
    fits = tuple(module.normalized_shape) == inputs.shape[-1:]
    if fits and _has_both(module, inputs) and (inputs.is_cuda or _is_wide(inputs)):
        settings = (normalization.layer_norm, (module.eps,), normalization.layer_norm_gradient)
        output = apply_fast(
            _WholeNorm, by_position(inputs), module.weight, module.bias, *settings, sink, sink.layer_call()
        )
        return output if inputs.ndim == 3 else output.reshape(inputs.shape)
    normalised = F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    first_axis = inputs.ndim - len(module.normalized_shape)
    return _apply(normalised, module, first_axis, name, sink)


def group_norm(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    inputs = sink.expand_to_batch(only_input(args, kwargs), name)
    # torch's own statistics have the inputs' dtype
    exact = _is_wide(inputs) or on_gpu(inputs, module.weight, module.bias)
    fits = inputs.is_contiguous() and inputs.numel() > 0 and inputs.shape[1] == module.num_channels
    if exact and _has_both(module, inputs) and fits:
        settings = (normalization.group_norm, (module.num_groups, module.eps), normalization.group_norm_gradient)
        flat = inputs.view(*inputs.shape[:2], -1)
        output = apply_fast(_WholeNorm, flat, module.weight, module.bias, *settings, sink, sink.layer_call())
        return output.view(inputs.shape)
    return _apply(F.group_norm(inputs, module.num_groups, eps=module.eps), module, 1, name, sink)


def _has_both(module: Any, inputs: Tensor) -> bool:
    """Return whether there are weight and bias in the dtype of the inputs, and a batch axis."""
    both = module.weight is not None and module.bias is not None
    return both and inputs.ndim > 1 and inputs.dtype == module.weight.dtype


def _is_wide(inputs: Tensor) -> bool:
    return inputs.dtype == wide_dtype(inputs.dtype)


def rms_norm(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    inputs = sink.expand_to_batch(only_input(args, kwargs), name)
    normalised = F.rms_norm(inputs, module.normalized_shape, eps=module.eps)
    first_axis = inputs.ndim - len(module.normalized_shape)
    return _apply(normalised, module, first_axis, name, sink)


def instance_norm(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    inputs = sink.expand_to_batch(only_input(args, kwargs), name)
    return _apply(F.instance_norm(inputs, eps=module.eps), module, 1, name, sink)


def batch_norm_in_eval(
    sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """BatchNorm with frozen statistics is an affine map; in training mode it is refused earlier."""
    inputs = sink.expand_to_batch(only_input(args, kwargs), name)
    normalised = F.batch_norm(inputs, module.running_mean, module.running_var, training=False, eps=module.eps)
    return _apply(normalised, module, 1, name, sink)


def _apply(normalised: Tensor, module: Any, first_axis: int, name: str, sink: GradientSink) -> Tensor:
    if first_axis < 1:
        raise ValueError(f"layer '{name}' normalises over the batch axis; add the batch in front of its input")
    bias = getattr(module, "bias", None)
    return apply_fast(_ScaleAndShift, normalised, module.weight, bias, first_axis, sink, sink.layer_call())
