"""Layer norm, RMS norm and group norm, forward and backward. On a CUDA device with Triton they call a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from dpoptim import kernels
from dpoptim.kernels.choose import on_gpu
from dpoptim.kernels.norms import wide


def layer_norm(inputs: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x̂·weight + bias, mean, rstd) of inputs [..., width], x̂ = (inputs − mean)·rstd; statistics are wide, [...]."""
    if on_gpu(inputs, weight, bias) and inputs.shape[-1] <= kernels.normalization_triton.WIDEST:
        return kernels.normalization_triton.layer_norm(inputs, weight, bias, eps)
    output, mean, rstd = torch.native_layer_norm(inputs, inputs.shape[-1:], weight, bias, eps)
    return output, wide(mean[..., 0]), wide(rstd[..., 0])


def layer_norm_gradient(
    grad: Tensor, inputs: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the inputs [examples, positions, width]; Σ_t grad·x̂ and Σ_t grad, wide) behind `layer_norm`."""
    if on_gpu(grad, inputs, weight, mean, rstd) and inputs.shape[-1] <= kernels.normalization_triton.WIDEST:
        return kernels.normalization_triton.layer_norm_gradient(grad, inputs, weight, mean, rstd)
    width, mean, rstd = inputs.shape[-1:], mean[..., None], rstd[..., None]
    back = torch.ops.aten.native_layer_norm_backward
    to_inputs = back(grad, inputs, width, mean, rstd, weight, None, [True, False, False])[0]
    normalised = (wide(inputs) - mean).mul_(rstd)
    return to_inputs, normalised.mul_(wide(grad)).sum(1), wide(grad).sum(1)


def rms_norm(
    inputs: Tensor, weight: Tensor, bias: None, eps: float, *, offset: float = 0.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, None, Tensor]:
    """(x̂·(weight + offset) in `dtype`, None, rstd) of x [..., width]: x̂ = x·rstd, rstd = 1/√(mean x² + eps)."""
    if on_gpu(inputs, weight) and inputs.shape[-1] <= kernels.normalization_triton.WIDEST:
        return kernels.normalization_triton.layer_norm(inputs, weight, None, eps, offset=offset, dtype=dtype)
    x = wide(inputs)
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return (x * rstd[..., None] * (wide(weight) + offset)).to(dtype or inputs.dtype), None, rstd


def rms_norm_gradient(
    grad: Tensor, inputs: Tensor, weight: Tensor, mean: None, rstd: Tensor, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, None]:
    """(gradient of the inputs [examples, positions, width]; Σ_t grad·x̂, wide; None) behind `rms_norm`."""
    if on_gpu(grad, inputs, weight, rstd) and inputs.shape[-1] <= kernels.normalization_triton.WIDEST:
        found = kernels.normalization_triton.layer_norm_gradient(grad, inputs, weight, None, rstd, offset=offset)
        return found[0], found[1], None
    g, normalised = wide(grad), wide(inputs) * rstd[..., None]
    scaled = g * (wide(weight) + offset)
    along = (scaled * normalised).mean(-1, keepdim=True)
    to_inputs = (scaled - normalised * along) * rstd[..., None]
    return to_inputs.to(inputs.dtype), (g * normalised).sum(1), None


def group_norm(inputs: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x̂·weight + bias, mean, rstd) of inputs [examples, channels, places]; statistics are [examples, groups]."""
    if on_gpu(inputs, weight, bias):
        return kernels.normalization_triton.group_norm(inputs, weight, bias, groups, eps)
    examples, channels, places = inputs.shape
    return torch.native_group_norm(inputs.contiguous(), weight, bias, examples, channels, places, groups, eps)


def group_norm_gradient(
    grad: Tensor, inputs: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the inputs; Σ_s grad·x̂ and Σ_s grad for each example, [examples, channels]) behind `group_norm`."""
    if on_gpu(grad, inputs, weight, mean, rstd):
        return kernels.normalization_triton.group_norm_gradient(grad, inputs, weight, mean, rstd)
    back = torch.ops.aten.native_group_norm_backward
    grad, inputs, groups = grad.contiguous(), inputs.contiguous(), mean.shape[1]
    to_inputs = back(grad, inputs, mean, rstd, weight, *inputs.shape, groups, [True, False, False])[0]
    normalised = (inputs.unflatten(1, (groups, -1)) - mean[:, :, None, None]) * rstd[:, :, None, None]
    return to_inputs, (normalised.flatten(1, 2) * grad).sum(2), grad.sum(2)
