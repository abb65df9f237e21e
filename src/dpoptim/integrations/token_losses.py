"""The cross-entropy of a language model at chosen places only, for any architecture that transformers knows.

A language model is an encoder (`base_model`), a head, and a linear map onto the vocabulary (`get_output_embeddings()`).
One hook gathers the encoder's output at the targets, another takes out the input of the linear map. Then
`linear_cross_entropy` computes the losses without storing logits. If a model is not built like this, which
`can_read_targets` finds out on made-up tokens, all logits are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping import linear_cross_entropy
from dpoptim.clipping.layers import choose_rules
from dpoptim.clipping.layers.generic import generic
from dpoptim.data.shards import fsdp_modules
from dpoptim.validation.temporary_changes import in_eval_mode

IGNORED = -100
"""The label of a position where nothing is predicted."""

_Parts = tuple[nn.Module, nn.Linear]  # encoder and linear map, which get the two hooks


def token_losses(
    model: nn.Module,
    inputs: Mapping[str, Any],
    labels: Tensor,  # [examples, places], IGNORED where nothing is predicted
    places: Tensor | None = None,  # [examples, places]; None: labels are at all positions
    *,
    targets_only: bool,
) -> Tensor:
    """The loss at each place, [examples, places]; `targets_only`, if `can_read_targets` allows it, stores no logits.

    Sharded models always compute all logits, because the weight of the linear map is whole only inside the map.
    """
    if targets_only and not fsdp_modules(model):
        parts = _parts(model)
        assert parts is not None, "the model is not the one that was prepared"
        return linear_cross_entropy(parts[1], _entering(model, parts, inputs, places), labels)
    found = logits_of(model(**inputs))
    if places is not None:
        found = found.gather(1, places[..., None].expand(-1, -1, found.shape[-1]))
    losses = F.cross_entropy(found.flatten(0, 1).float(), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(labels.shape)


def logits_of(output: Any) -> Tensor:
    """The logits of a model that returns them, or returns an object that has them."""
    return output if isinstance(output, Tensor) else output.logits


def without_peft(model: Any) -> Any:
    """The model inside the wrapper of peft, with its LoRA layers; any other model unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def can_read_targets(model: nn.Module) -> bool:
    """Whether decoding the targets alone gives exactly what the model computes, and the engine sees the linear map."""
    parts = _parts(model)
    if parts is None:
        return False
    try:
        layers = choose_rules(model)
        if any(layer.rule is generic and parts[1] in module.modules() for module, layer in layers.items()):
            return False
        with in_eval_mode(model), torch.random.fork_rng(devices=[]):
            return _reads_exactly(model, parts)
    except Exception:  # an optimizer's engine already runs the layers, or the model does not take such inputs
        return False


def _parts(model: nn.Module) -> _Parts | None:
    """Encoder and linear map, by transformers' names for them; looked up each time, because models are copied."""
    inner = without_peft(model)
    encoder = getattr(inner, "base_model", None)
    decoder = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if not isinstance(encoder, nn.Module) or encoder is inner or type(decoder) is not nn.Linear:
        return None
    return encoder, decoder


def _reads_exactly(model: nn.Module, parts: _Parts) -> bool:
    decoder = parts[1]
    weight = decoder.weight
    vocabulary = int(without_peft(model).get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (2, 6), generator=generator).to(weight.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    places = torch.tensor([[4, 1, 2], [0, 5, 3]], device=weight.device)
    everywhere = _entering(model, parts, inputs, None)
    if everywhere.shape != (2, 6, weight.shape[1]):
        return False
    chosen = everywhere.gather(1, places[..., None].expand(-1, -1, everywhere.shape[-1]))
    close = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 2e-2
    if not torch.allclose(_entering(model, parts, inputs, places), chosen, rtol=close, atol=close):
        return False
    large = 100 * torch.randn(everywhere.shape, generator=generator).to(weight)
    with decoder.register_forward_pre_hook(lambda module, args: (large,)):
        logits = logits_of(model(**inputs))
    return torch.allclose(logits.float(), decoder(large).float(), rtol=close, atol=close)


def _entering(model: nn.Module, parts: _Parts, inputs: Mapping[str, Any], places: Tensor | None) -> Tensor:
    """The input of the map onto the vocabulary, [examples, places, width]; the map itself runs on no positions."""
    taken: list[Tensor] = []

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        if places is None:
            return output
        hidden = output[0]
        own = places[: len(hidden), :, None]  # the engine may check the model on fewer examples
        gathered = hidden.gather(1, own.expand(-1, -1, hidden.shape[-1]))
        if isinstance(output, tuple):
            return gathered, *output[1:]
        output["last_hidden_state"] = gathered
        return output

    def take(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        taken[:] = args
        return (args[0][:, :0],)

    encoder, decoder = parts
    with decoder.register_forward_pre_hook(take), encoder.register_forward_hook(gather):
        model(**inputs)
    (hidden,) = taken
    return hidden
