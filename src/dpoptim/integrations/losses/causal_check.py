"""Does a causal model keep to its direction? If it read later tokens, it would be shown what it is to predict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.integrations.losses.token_losses import logits_of
from dpoptim.integrations.modes import in_eval_mode, without_peft

_LENGTH = 6
_CLOSE = {torch.float32: 1e-5, torch.float64: 1e-5}  # of the largest logit; a model that looks ahead is far above
_CLOSE_IN_16_BITS = 1e-2


def check_one_direction(model: nn.Module) -> None:
    """Refuse a model whose logits at a position change when a LATER token does.

    Made-up tokens, in eval mode, without gradients; modes are put back. The last token alone is another one, and the
    logits before it are compared.
    Edge cases: a model without a table of embeddings, or with fewer than two tokens, is not looked at.
    """
    inner = without_peft(model)
    table = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    if not isinstance(table, nn.Embedding) or table.num_embeddings < 2:
        return
    weight = next(model.parameters())
    ids = torch.arange(_LENGTH, device=weight.device)[None] % table.num_embeddings
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % table.num_embeddings
    with in_eval_mode(model):
        one, two = (_logits_before_the_last(model, inner, tokens) for tokens in (ids, other))
    most = max(float(one.abs().max()), 1e-6)
    if float((one - two).abs().max()) > _CLOSE.get(weight.dtype, _CLOSE_IN_16_BITS) * most:
        raise ValueError(
            f"{type(inner).__name__} reads both directions, and would be shown the tokens that causal-lm has it "
            "predict; use masked-lm, or a causal model"
        )


def _logits_before_the_last(model: nn.Module, inner: Any, ids: Tensor) -> Tensor:
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if hasattr(getattr(inner, "config", None), "use_cache"):
        inputs["use_cache"] = False
    return logits_of(model(**inputs))[:, :-1].float()
