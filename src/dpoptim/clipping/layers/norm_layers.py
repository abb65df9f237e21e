"""Normalization layers y = x̂ ⊙ weight + bias: with output gradient b, their gradients are sums of b ⊙ x̂ and b.

LayerNorm, GroupNorm and RMS norms run as one function if possible; the others normalize without parameters, then scale
and shift. Every model of transformers has its own RMS norm class, y = x̂ ⊙ (weight + offset). These classes are
recognized by what they compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dpoptim.clipping.gradient_factors import Materialized
from dpoptim.clipping.layers.generic import generic
from dpoptim.clipping.layers.linear import by_position
from dpoptim.clipping.layers.rule import GradientSink, Recorder, apply_fast, differentiated_once, only_input, trainable
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
        record: Recorder,
    ) -> Tensor:
        ctx.record, ctx.weight, ctx.bias, ctx.first_axis = record, weight, bias, first_axis
        ctx.save_for_backward(normalised if trainable(weight) else None, weight)
        output = normalised.clone() if weight is None else normalised * _fit(weight, normalised, first_axis)
        return output if bias is None else output + _fit(bias, normalised, first_axis)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normalised, weight = ctx.saved_tensors
        if trainable(ctx.weight):
            per_example = _sum_to(wide(grad) * wide(normalised), ctx.weight, ctx.first_axis)
            ctx.record(ctx.weight, Materialized(per_example))
        if trainable(ctx.bias):
            ctx.record(ctx.bias, Materialized(_sum_to(wide(grad), ctx.bias, ctx.first_axis)))
        to_inputs = None
        if ctx.needs_input_grad[0]:
            to_inputs = grad if weight is None else grad * _fit(weight, grad, ctx.first_axis)
        return to_inputs, None, None, None, None


def _fit(parameter: Tensor, like: Tensor, first_axis: int) -> Tensor:
    """Return the parameter with trailing axes of size 1, so that it broadcasts from `first_axis` on."""
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
        bias: nn.Parameter | None,
        norm: Callable[..., tuple[Tensor, Tensor | None, Tensor]],
        settings: tuple[Any, ...],  # further arguments of the norm
        gradient: Callable[..., tuple[Tensor, Tensor, Tensor | None]],
        record: Recorder,
    ) -> Tensor:
        ctx.record, ctx.weight, ctx.bias, ctx.gradient = record, weight, bias, gradient
        output, mean, rstd = norm(inputs, weight, bias, *settings)
        ctx.save_for_backward(inputs, weight, mean, rstd)
        return output

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        to_inputs, by_weight, by_bias = ctx.gradient(grad, *ctx.saved_tensors)
        if trainable(ctx.weight):
            ctx.record(ctx.weight, Materialized(by_weight))
        if trainable(ctx.bias):
            ctx.record(ctx.bias, Materialized(by_bias))
        return to_inputs, *[None] * 6


def layer_norm(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    inputs = sink.expand_to_batch(only_input(args, kwargs), name)
    fits = tuple(module.normalized_shape) == inputs.shape[-1:]
    if fits and _has_both(module, inputs) and (inputs.is_cuda or inputs.dtype == wide_dtype(inputs.dtype)):
        settings = (normalization.layer_norm, (module.eps,), normalization.layer_norm_gradient)
        output = apply_fast(_WholeNorm, by_position(inputs), module.weight, module.bias, *settings, sink.recorder())
        return output if inputs.ndim == 3 else output.reshape(inputs.shape)
    normalised = F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    return _apply(sink, name, module, normalised, inputs.ndim - len(module.normalized_shape))


def group_norm(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    inputs = sink.expand_to_batch(only_input(args, kwargs), name)
    # torch's own statistics have the inputs' dtype
    exact = inputs.dtype == wide_dtype(inputs.dtype) or on_gpu(inputs, module.weight, module.bias)
    fits = inputs.is_contiguous() and inputs.numel() > 0 and inputs.shape[1] == module.num_channels
    if exact and _has_both(module, inputs) and fits:
        settings = (normalization.group_norm, (module.num_groups, module.eps), normalization.group_norm_gradient)
        flat = inputs.view(*inputs.shape[:2], -1)
        output = apply_fast(_WholeNorm, flat, module.weight, module.bias, *settings, sink.recorder())
        return output.view(inputs.shape)
    return _apply(sink, name, module, F.group_norm(inputs, module.num_groups, eps=module.eps))


def _has_both(module: Any, inputs: Tensor) -> bool:
    """Return whether there are weight and bias in the dtype of the inputs, and a batch axis."""
    both = module.weight is not None and module.bias is not None
    return both and inputs.ndim > 1 and inputs.dtype == module.weight.dtype


_rms_norms: weakref.WeakKeyDictionary[nn.Module, RmsNormKind | None] = weakref.WeakKeyDictionary()


class RmsNormKind(NamedTuple):
    """How an RMS norm computes x̂ ⊙ (weight + offset), x̂ = x/√(mean x² + eps)."""

    offset: float
    promotes: bool  # whether the result has the wider dtype of inputs and weight, not that of the inputs
    eps: str  # the attribute's name


def rms_norm_kind(module: nn.Module) -> RmsNormKind | None:
    """Find out how an RMS norm computes; None if it is something else. Modules of one class may differ by a flag."""
    if module not in _rms_norms:
        _rms_norms[module] = _try_rms_norm(module)
    return _rms_norms[module]


@torch.no_grad()
def _try_rms_norm(module: Any) -> RmsNormKind | None:
    eps = next((name for name in ("eps", "variance_epsilon") if isinstance(getattr(module, name, None), float)), None)
    shapes = {name: parameter.ndim for name, parameter in module.named_parameters()}
    is_norm = type(module).__name__.endswith(("RMSNorm", "LayerNorm")) and not module._modules and not module._buffers
    if eps is None or not is_norm or shapes != {"weight": 1}:
        return None
    width, like = len(module.weight), {"device": module.weight.device, "dtype": torch.float32}
    try:
        generator = torch.Generator(module.weight.device).manual_seed(0)
        weight, inputs = (torch.randn(*shape, width, generator=generator, **like) for shape in ((), (2, 3)))
        output = functional_call(module, {"weight": weight}, (inputs,))
        promotes = functional_call(module, {"weight": weight}, (inputs.bfloat16(),)).dtype == torch.float32
    except (RuntimeError, TypeError, ValueError):
        return None
    for offset in (0.0, 1.0):
        expected, *_ = normalization.rms_norm(inputs, weight, None, getattr(module, eps), offset=offset)
        if output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-4, atol=1e-5):
            return RmsNormKind(offset, promotes, eps)
    return None


def rms_norm(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The rule for torch's RMSNorm and those of transformers, which compute in float32 even if the model is wider."""
    given, kind = only_input(args, kwargs), rms_norm_kind(module)
    if not isinstance(module, nn.RMSNorm) and (given.dtype == torch.float64 or given.ndim < 2):
        return generic(sink, name, module, args, kwargs)
    inputs = sink.expand_to_batch(given, name)
    if kind is None or inputs.ndim < 2:
        normalised = F.rms_norm(inputs, module.normalized_shape, eps=module.eps)
        return _apply(sink, name, module, normalised, inputs.ndim - len(module.normalized_shape))
    dtype = torch.promote_types(inputs.dtype, module.weight.dtype) if kind.promotes else inputs.dtype
    norm = partial(normalization.rms_norm, offset=kind.offset, dtype=dtype)
    gradient = partial(normalization.rms_norm_gradient, offset=kind.offset)
    settings = (norm, (getattr(module, kind.eps),), gradient)
    output = apply_fast(_WholeNorm, by_position(inputs), module.weight, None, *settings, sink.recorder())
    return output if inputs.ndim == 3 else output.reshape(inputs.shape)


def instance_norm(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    inputs = sink.expand_to_batch(only_input(args, kwargs), name)
    return _apply(sink, name, module, F.instance_norm(inputs, eps=module.eps))


def frozen_batch_norm(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """BatchNorm with frozen statistics is an affine map; in training mode it is refused earlier."""
    inputs = sink.expand_to_batch(only_input(args, kwargs), name)
    normalised = F.batch_norm(inputs, module.running_mean, module.running_var, training=False, eps=module.eps)
    return _apply(sink, name, module, normalised)


def _apply(sink: GradientSink, name: str, module: Any, normalised: Tensor, first_axis: int = 1) -> Tensor:
    if first_axis < 1:
        raise ValueError(f"layer '{name}' normalises over the batch axis; add a batch axis in front of its input")
    bias = getattr(module, "bias", None)
    return apply_fast(_ScaleAndShift, normalised, module.weight, bias, first_axis, sink.recorder())
