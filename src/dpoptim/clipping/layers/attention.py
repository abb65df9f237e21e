"""`nn.MultiheadAttention`: its projections run through the linear rule, and attention has no parameters."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping.layers.generic import generic
from dpoptim.clipping.layers.linear import apply_linear
from dpoptim.clipping.layers.rule import GradientSink

_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def attention(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for `nn.MultiheadAttention`; learned extra keys and different key widths use the generic rule."""
    if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
        return generic(sink, name, module, args, kwargs)
    given = _SIGNATURE.bind(module, *args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    query, key, value = (options[role] for role in ("query", "key", "value"))
    if query.ndim != 3:
        raise ValueError(f"layer '{name}' got a query of shape {tuple(query.shape)} without a batch axis; add one")
    if not module.batch_first:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    query, key, value = (sink.expand_to_batch(tensor, name) for tensor in (query, key, value))
    same = options["query"] is options["key"] is options["value"]
    projected = _project(sink, module, query, key, value, same)
    # [examples, heads, positions, width of a head]
    queries, keys, values = (part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in projected)
    mask = _merged_mask(options["attn_mask"], options["key_padding_mask"], queries)
    dropout = module.dropout if module.training else 0.0
    if options["need_weights"]:
        scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
        weights = (scores if mask is None else scores + mask).softmax(-1)
        attended = F.dropout(weights, dropout) @ values
        shown = weights.mean(1) if options["average_attn_weights"] else weights
    else:
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)
        shown = None
    output = apply_linear(sink, attended.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    return (output if module.batch_first else output.transpose(0, 1)), shown


def _project(sink: GradientSink, module: Any, query: Tensor, key: Tensor, value: Tensor, same: bool) -> list[Tensor]:
    """Queries, keys and values, each [examples, positions, width]."""
    if same:
        return list(apply_linear(sink, query, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1))
    # One parameter holds three matrices. Each input goes through all three, and one third is used.
    return [
        apply_linear(sink, tensor, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)[part]
        for part, tensor in enumerate((query, key, value))
    ]


def _merged_mask(attn_mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """An additive mask that broadcasts to [examples, heads, queries, keys]."""
    merged = None
    if attn_mask is not None:
        additive = _additive(attn_mask, query.dtype)
        merged = additive if additive.ndim == 2 else additive.unflatten(0, (len(query), -1))
    if padding is not None:
        additive = _additive(padding, query.dtype)[:, None, None, :]
        merged = additive if merged is None else merged + additive
    return merged


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)
