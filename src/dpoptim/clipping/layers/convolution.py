"""`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: linear maps of patches where that is fast, else one grouped convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping.gradient_factors import GradientFactors, Materialized, OuterProduct
from dpoptim.clipping.layers.rule import GradientSink, Recorder, apply_fast, differentiated_once, only_input, trainable
from dpoptim.kernels.norms import wide

Settings = tuple[list[int], list[int], list[int], int]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,  # [examples, channels, *space], already padded
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        settings: Settings,  # stride, padding, dilation, groups
        record: Recorder,
    ) -> Tensor:
        ctx.record, ctx.weight, ctx.bias, ctx.settings = record, weight, bias, settings
        ctx.save_for_backward(inputs, weight)
        stride, padding, dilation, groups = settings
        return torch.convolution(
            inputs, weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype),
            stride, padding, dilation, False, [0] * len(stride), groups,
        )  # fmt: skip

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        if trainable(ctx.weight):
            ctx.record(ctx.weight, _weight_gradients(grad, inputs, weight, ctx.settings))
        if trainable(ctx.bias):
            ctx.record(ctx.bias, Materialized(wide(grad).flatten(2).sum(2)))
        to_inputs = None
        if ctx.needs_input_grad[0]:
            stride, padding, dilation, groups = ctx.settings
            to_inputs, _, _ = torch.ops.aten.convolution_backward(
                grad, inputs, weight.to(inputs.dtype), None,
                stride, padding, dilation, False, [0] * len(stride), groups, (True, False, False),
            )  # fmt: skip
        return to_inputs, None, None, None, None


_PATCH_ELEMENTS = 1 << 27  # elements of patches in memory at once


def _weight_gradients(grad: Tensor, inputs: Tensor, weight: Tensor, settings: Settings) -> GradientFactors:
    stride, padding, dilation, groups = settings
    if not len(inputs):
        return Materialized(inputs.new_zeros(0, *weight.shape))
    kernel = list(weight.shape[2:])
    apart = kernel == stride and not any(padding) and set(dilation) == {1}
    if groups == 1 and apart and weight.ndim == 4:
        return OuterProduct(grad.flatten(2).mT, _patches_apart(inputs, kernel))
    if groups == 1 and inputs.is_cuda and weight.ndim == 4:
        positions, rows, cols = grad.shape[2:].numel(), weight.shape[0], weight.shape[1:].numel()
        if positions * (rows + cols) < rows * cols:
            return OuterProduct(grad.to(inputs.dtype).flatten(2).mT, _patches(inputs, kernel, settings).mT)
        return Materialized(_by_patches(grad, inputs, weight, settings))
    return Materialized(_by_groups(wide(grad), wide(inputs), weight, settings))


def _patches_apart(inputs: Tensor, kernel: list[int]) -> Tensor:
    """[examples, patches, channels·kernel] of patches that do not overlap: a reordering of the inputs."""
    (examples, channels, *space), (high, across) = inputs.shape, kernel
    rows, cols = space[0] // high, space[1] // across
    whole = inputs[..., : rows * high, : cols * across]
    return (
        whole.reshape(examples, channels, rows, high, cols, across)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(examples, rows * cols, channels * high * across)
    )


def _by_patches(grad: Tensor, inputs: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """[examples, *weight.shape] in the dtype of the inputs, as products with patches, a few examples at a time."""
    kernel = list(weight.shape[2:])
    outputs = grad.to(inputs.dtype).flatten(2)
    gradients = inputs.new_empty(len(inputs), weight.shape[0], weight[0].numel())
    step = max(1, _PATCH_ELEMENTS // (weight[0].numel() * outputs.shape[2]))
    for start in range(0, len(inputs), step):
        part = slice(start, start + step)
        torch.bmm(outputs[part], _patches(inputs[part], kernel, settings).mT, out=gradients[part])
    return gradients.view(len(inputs), *weight.shape)


def _patches(inputs: Tensor, kernel: list[int], settings: Settings) -> Tensor:
    """[examples, channels·kernel, patches]: one copy of a view; `F.unfold` would loop over examples."""
    stride, padding, dilation, _ = settings
    if any(padding):
        inputs = F.pad(inputs, (padding[1], padding[1], padding[0], padding[0]))
    if kernel == [1, 1]:
        return inputs[:, :, :: stride[0], :: stride[1]].flatten(2)
    for axis in (0, 1):
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        inputs = inputs.unfold(2 + axis, reach, stride[axis])[..., :: dilation[axis]]
    return inputs.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


def _by_groups(grad: Tensor, inputs: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """[examples, *weight.shape], by one grouped convolution with examples·groups groups."""
    stride, padding, dilation, groups = settings
    examples = len(inputs)
    side_by_side = (1, examples * inputs.shape[1], *inputs.shape[2:])
    repeated = weight.to(inputs.dtype).repeat(examples, *[1] * (weight.ndim - 1))
    _, gradients, _ = torch.ops.aten.convolution_backward(
        grad.reshape(1, examples * grad.shape[1], *grad.shape[2:]), inputs.reshape(side_by_side), repeated, None,
        stride, padding, dilation, False, [0] * len(stride), groups * examples, (False, True, False),
    )  # fmt: skip
    return gradients.view(examples, *weight.shape)


def convolution(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The rule for the three convolutions, in all padding modes."""
    inputs = only_input(args, kwargs)
    if inputs.ndim != module.weight.ndim:
        raise ValueError(f"layer '{name}' got an input of shape {tuple(inputs.shape)} without a batch axis; add one")
    inputs = sink.expand_to_batch(inputs, name)
    if torch.is_autocast_enabled(inputs.device.type):
        inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
    padding = [0] * len(module.stride)
    if module.padding_mode != "zeros":
        inputs = F.pad(inputs, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    elif isinstance(module.padding, str):  # "same" may need more on one side than on the other
        inputs = F.pad(inputs, module._reversed_padding_repeated_twice)
    else:
        padding = list(module.padding)
    settings = (list(module.stride), padding, list(module.dilation), module.groups)
    return apply_fast(_Convolution, inputs, module.weight, module.bias, settings, sink.recorder())
