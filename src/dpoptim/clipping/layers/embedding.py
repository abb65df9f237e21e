"""`nn.Embedding`: row id_t of an example's gradient receives the output gradient of position t; never one-hot."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping.gradient_factors import Rows
from dpoptim.clipping.layers.rule import GradientSink, Use, applied, differentiated_once, only_input


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: nn.Parameter, padding_idx: int | None, keeper: GradientSink, use: Use
    ) -> Tensor:
        ctx.keeper, ctx.use, ctx.weight, ctx.padding_idx = keeper, use, weight, padding_idx
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ids = ids.reshape(len(ids), ids.shape[1:].numel())
        values = grad.reshape(*ids.shape, grad.shape[-1])
        if ctx.padding_idx is not None:  # the padding row has no gradient
            values = values.masked_fill((ids == ctx.padding_idx)[..., None], 0)
        ctx.keeper.keep(ctx.weight, Rows(ids, values), ctx.use)
        return None, None, None, None, None


def embedding(keeper: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The rule of `nn.Embedding`; `max_norm` and `scale_grad_by_freq` are refused when the engine is attached."""
    ids = keeper.expand_to_batch(only_input(args, kwargs), name)
    return applied(_Embedding, ids, module.weight, module.padding_idx, keeper, keeper.use())


def scaled_embedding(
    keeper: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The rule of transformers' tables whose rows are multiplied by a number, as Gemma's and BART's are."""
    scale = module.embed_scale
    if isinstance(scale, Tensor):
        scale = scale.to(module.weight.dtype)
    return embedding(keeper, name, module, args, kwargs) * scale
