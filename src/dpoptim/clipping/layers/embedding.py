"""`nn.Embedding`: row id_t of an example's gradient receives the output gradient of position t; no one-hot matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping.gradient_factors import RowUpdates
from dpoptim.clipping.layers.rule import GradientSink, Recorder, apply_fast, differentiated_once, only_input


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: nn.Parameter, padding_idx: int | None, record: Recorder) -> Tensor:
        ctx.record, ctx.weight, ctx.padding_idx = record, weight, padding_idx
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
        ctx.record(ctx.weight, RowUpdates(ids, values))
        return None, None, None, None


def embedding(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The rule for `nn.Embedding`; `max_norm` and `scale_grad_by_freq` are refused when the engine is attached."""
    ids = sink.expand_to_batch(only_input(args, kwargs), name)
    return apply_fast(_Embedding, ids, module.weight, module.padding_idx, sink.recorder())


def scaled_embedding(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for embeddings times a number, as in Gemma and BART."""
    scale = module.embed_scale
    if isinstance(scale, Tensor):
        scale = scale.to(module.weight.dtype)
    return embedding(sink, name, module, args, kwargs) * scale
