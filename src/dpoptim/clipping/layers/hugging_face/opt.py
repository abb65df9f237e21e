"""OPT: its decoder layer folds examples and positions into one axis before the second layer norm and two linear maps.

All three work on the last axis alone, so the rule skips the fold. Positions are looked up with an offset.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpoptim.clipping.layers.embedding import embedding
from dpoptim.clipping.layers.generic import generic
from dpoptim.clipping.layers.hugging_face.rewritten import check_same
from dpoptim.clipping.layers.rule import GradientSink, any_trainable
from dpoptim.validation.temporary_changes import replaced


def opt_decoder_layer(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for `OPTDecoderLayer`."""
    if not any_trainable(module.final_layer_norm, module.fc1, module.fc2):
        return type(module).forward(module, *args, **kwargs)
    hidden = args[0] if args else kwargs["hidden_states"]
    if sink.recording:
        one = sink.expand_to_batch(hidden, name)[:1]
        # Attention is skipped: it does not depend on the fold, and it would fill a cache.
        with replaced(module, self_attn=lambda hidden_states, **options: (hidden_states, None)):
            check_same(sink, name, module, lambda: _unfolded(module, one), lambda: type(module).forward(module, one))
    return _unfolded(module, *args, **kwargs)


def _unfolded(
    module: Any,
    hidden_states: Tensor,  # [examples, positions, width]
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = None,
    position_ids: Tensor | None = None,
    **options: Any,
) -> Tensor:
    norm_comes_first = module.do_layer_norm_before

    def attended(hidden: Tensor) -> Tensor:
        return module.self_attn(
            hidden_states=hidden,
            past_key_values=past_key_values,
            position_ids=position_ids,
            attention_mask=attention_mask,
            **options,
        )[0]

    def fed_forward(hidden: Tensor) -> Tensor:
        return module.fc2(module.activation_fn(module.fc1(hidden)))

    for part, norm in ((attended, module.self_attn_layer_norm), (fed_forward, module.final_layer_norm)):
        changed = part(norm(hidden_states) if norm_comes_first else hidden_states)
        hidden_states = hidden_states + F.dropout(changed, module.dropout, module.training)
        hidden_states = hidden_states if norm_comes_first else norm(hidden_states)
    return hidden_states


def opt_positions(sink: GradientSink, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for `OPTLearnedPositionalEmbedding` with given positions, as OPT calls it."""
    positions = kwargs.get("position_ids")
    if positions is None:
        return generic(sink, name, module, args, kwargs)
    return embedding(sink, name, module, (positions + module.offset,), {})
