"""DeBERTa-v2 and v3: every layer projects one shared table of relative positions, which enters all attention scores.

Each example gets a copy of the table as a view, so that norm, dropout and projections have the batch as first axis.
With R rows (twice the position buckets, 512 in v3), memory grows by [examples, R, width] once for the norm and three
times per layer. If table and norm are frozen, as in LoRA, only layers with a trained query or key projection do this.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.clipping.layers.generic import PerExampleCopy
from dpoptim.clipping.layers.hugging_face.rewritten import check_same
from dpoptim.clipping.layers.linear import apply_linear
from dpoptim.clipping.layers.rule import GradientSink, any_trainable, trainable
from dpoptim.validation.temporary_changes import replaced


def deberta_encoder(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for `DebertaV2Encoder`, which hands the table to its layers."""
    forward = partial(type(module).forward, module, *args, **kwargs)
    norm = module.LayerNorm if "layer_norm" in module.norm_rel_ebd else nn.Identity()
    if not module.relative_attention or not any_trainable(module.rel_embeddings, norm):
        return forward()
    hidden = args[0] if args else kwargs["hidden_states"]
    if sink.recording:
        hidden = sink.expand_to_batch(hidden, name)
        shared = partial(type(module).get_rel_embedding, module)
        check_same(sink, name, module, lambda: norm(module.rel_embeddings.weight.expand(1, -1, -1))[0], shared)

    def copies() -> Tensor:  # [examples, R, width]
        table = module.rel_embeddings.weight
        if trainable(table):
            return norm(PerExampleCopy.apply(table, len(hidden), sink.recorder()))
        return norm(table.expand(len(hidden), -1, -1))

    with replaced(module, get_rel_embedding=copies):
        return forward()


def deberta_attention(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for `DisentangledSelfAttention`."""
    if sink.recording:
        sink.expand_to_batch(args[0] if args else kwargs["hidden_states"], name)
    with replaced(module, disentangled_attention_bias=partial(_position_scores, sink, name, module)):
        return type(module).forward(module, *args, **kwargs)


def _position_scores(
    sink: GradientSink,
    name: str,
    module: Any,
    query: Tensor,  # [examples · heads, positions, width of a head]
    key: Tensor,  # same shape as query
    relative_pos: Tensor,  # [1, positions, positions]
    rows: Tensor,  # [R, width] or, for each example, [examples, R, width]
    scale_factor: int,
) -> Any:
    """Return the attention scores between content and position, [examples · heads, positions, positions]."""
    own = partial(type(module).disentangled_attention_bias, module)
    if rows.ndim == 2 and not any_trainable(*_projections(module)):
        return own(query, key, relative_pos, rows, scale_factor)
    if relative_pos is None or relative_pos.shape.numel() != query.shape[1] * key.shape[1] or query.shape != key.shape:
        raise ValueError(
            f"layer '{name}' got custom positions or queries. Leave them to the model, or freeze the encoder"
        )
    if rows.ndim == 2:
        rows = rows.expand(len(query) // module.num_attention_heads, -1, -1)
    if sink.recording and len(rows):
        few = (query[: module.num_attention_heads], key[: module.num_attention_heads], relative_pos)
        ours = partial(_scores, module, *few, rows[:1], scale_factor)
        check_same(sink, name, module, ours, partial(own, *few, rows[0], scale_factor))
    return _scores(module, query, key, relative_pos, rows, scale_factor)


def _scores(module: Any, query: Tensor, key: Tensor, relative_pos: Tensor, rows: Tensor, scale_factor: int) -> Any:
    span = module.pos_ebd_size
    distance = relative_pos.to(query.device, torch.long).view(query.shape[1], key.shape[1])
    divisor = (torch.tensor(query.shape[-1], dtype=torch.float) * scale_factor).sqrt().to(query.dtype)
    to_query, to_key = _projections(module)

    def gathered(content: Tensor, projection: nn.Module, distance: Tensor) -> Tensor:
        # The heads of example j are rows j·heads … (j+1)·heads − 1 of inputs and outputs.
        positions = module.transpose_for_scores(projection(rows[:, : 2 * span]), module.num_attention_heads)
        index = (distance + span).clamp(0, 2 * span - 1).expand(len(content), -1, -1)
        return torch.bmm(content, positions.mT).gather(-1, index) / divisor

    total: Any = 0
    if "c2p" in module.pos_att_type:
        total = total + gathered(query, to_key, distance)
    if "p2c" in module.pos_att_type:
        total = total + gathered(key, to_query, -distance).mT
    return total


def _projections(module: Any) -> tuple[Any, Any]:
    """Return the projections of the rows to queries and keys; a missing one is not used."""
    if module.share_att_key:
        return module.query_proj, module.key_proj
    return getattr(module, "pos_query_proj", nn.Identity()), getattr(module, "pos_key_proj", nn.Identity())


def deberta_lm_head(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for `DebertaV2LMPredictionHead`, which multiplies by the word table of the embedding layer."""
    hidden, words = (*args, *kwargs.values())
    if not trainable(words.weight) and not trainable(module.bias):
        return type(module).forward(module, hidden, words)
    if sink.recording:
        hidden = sink.expand_to_batch(hidden, name)
        ours = partial(_predicted, sink, module, hidden[:1], words)
        check_same(sink, name, module, ours, partial(type(module).forward, module, hidden[:1], words))
    return _predicted(sink, module, hidden, words)


def _predicted(sink: GradientSink, module: Any, hidden: Tensor, words: Any) -> Tensor:
    hidden = module.LayerNorm(module.transform_act_fn(module.dense(hidden)))
    return apply_linear(sink, hidden, words.weight, module.bias)
