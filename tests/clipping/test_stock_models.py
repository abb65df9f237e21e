"""Stock models of transformers, very small and with random weights: clipped sums against one example at a time.

All parameters are trained in float64, texts are padded on the right, and models are unmodified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from dpoptim.clipping import clipped_sum
from tests.clipping.one_at_a_time import assert_exact, random_scale

_NAMED = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_SIZES = {"vocab_size": 64, "max_position_embeddings": 32, **_NAMED}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA = {**_SIZES, "num_key_value_heads": 1, "pad_token_id": 0}
_GEMMA = {**_LLAMA, "head_dim": 8}
_T5 = {
    "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 6, "relative_attention_max_distance": 8,
}  # fmt: skip
_BART = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "dropout": 0.0,
}  # fmt: skip
_GPTJ = {
    "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "rotary_dim": 4, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_DISTILBERT = {
    "vocab_size": 64, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32,
    "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", _LLAMA),
    "MistralForCausalLM": ("MistralConfig", _LLAMA),
    "Qwen2ForCausalLM": ("Qwen2Config", _LLAMA),
    "Qwen3ForCausalLM": ("Qwen3Config", _GEMMA),
    "Phi3ForCausalLM": ("Phi3Config", _LLAMA),
    "Gemma2ForCausalLM": ("Gemma2Config", _GEMMA),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", _GEMMA),
    "Olmo2ForCausalLM": ("Olmo2Config", _LLAMA),
    "GraniteForCausalLM": ("GraniteConfig", _LLAMA),
    "SmolLM3ForCausalLM": ("SmolLM3Config", _LLAMA),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _SIZES),
    "GPTJForCausalLM": ("GPTJConfig", _GPTJ),
    "FalconForCausalLM": ("FalconConfig", {"vocab_size": 64, **{k: v for k, v in _NAMED.items() if "inter" not in k}}),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "MambaForCausalLM": (
        "MambaConfig", {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    ),
    "RobertaForMaskedLM": ("RobertaConfig", {**_SIZES, **_NO_DROPOUT}),
    "DistilBertForMaskedLM": ("DistilBertConfig", _DISTILBERT),
    "ElectraForMaskedLM": ("ElectraConfig", {**_SIZES, **_NO_DROPOUT, "embedding_size": 16}),
    "AlbertForMaskedLM": ("AlbertConfig", {**_SIZES, **_NO_DROPOUT, "embedding_size": 8}),
    "ModernBertForMaskedLM": (
        "ModernBertConfig", {**_SIZES, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    ),
    "MPNetForMaskedLM": ("MPNetConfig", {**_SIZES, **_NO_DROPOUT}),
    "BartForConditionalGeneration": ("BartConfig", _BART),
    "T5ForConditionalGeneration": ("T5Config", _T5),
    "MT5ForConditionalGeneration": ("MT5Config", _T5),
    "UMT5ForConditionalGeneration": ("UMT5Config", _T5),
    "T5EncoderModel": ("T5Config", _T5),
}  # fmt: skip
"""BERT, GPT-2, Gemma, OPT, DeBERTa-v2 and ViT are in `models.py`."""

SIMILAR = {f"{name}ForCausalLM" for name in ("Mistral", "Qwen2", "Phi3", "Gemma2", "Granite", "SmolLM3", "GPTJ")}
"""Models with the same layers as others in the table."""


def made(name: str) -> nn.Module:
    config, settings = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings)).double().train()
    with torch.no_grad():  # zeros in tables and ones in norms would hide mistakes
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch(examples: int = 4, positions: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(3, 64, (2, examples, positions), generator=generator)
    lengths = torch.tensor([positions - j % 3 for j in range(examples)])
    mask = (torch.arange(positions) < lengths[:, None]).long()
    return {"ids": ids * mask, "mask": mask, "labels": labels}


def loss_of(name: str) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {"input_ids": batch["ids"], "attention_mask": batch["mask"]}
        if name.endswith("ConditionalGeneration"):
            inputs["decoder_input_ids"] = batch["labels"]
        found = model(**inputs)
        if name == "T5EncoderModel":
            return found.last_hidden_state.square().mean((1, 2))
        losses = F.cross_entropy(found.logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (losses.view(batch["labels"].shape) * batch["mask"]).sum(1) / batch["mask"].sum(1)

    return loss


def check(model: nn.Module, name: str, inputs: dict[str, Tensor], *, scaled: bool) -> None:
    scale = random_scale(model) if scaled else None
    assert_exact(model, loss_of(name), inputs, len(inputs["ids"]), scale, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "scaled"),
    [pytest.param(name, i % 2 == 1, marks=[pytest.mark.slow] * (name in SIMILAR)) for i, name in enumerate(MODELS)],
)
def test_clipped_sums_equal_one_example_at_a_time(name, scaled):
    check(made(name), name, batch(), scaled=scaled)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "UMT5ForConditionalGeneration", "MPNetForMaskedLM"])
def test_as_many_examples_as_positions_and_heads(name):
    check(made(name), name, batch(examples=2, positions=2), scaled=False)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "UMT5ForConditionalGeneration", "MPNetForMaskedLM"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "frozen"])
def test_relative_positions_trained_alone_or_frozen(name, alone):
    model = made(name)
    for n, parameter in model.named_parameters():
        parameter.requires_grad_(("relative_attention_bias" in n) == alone)
    check(model, name, batch(), scaled=True)


def test_a_different_computation_of_biases_is_refused(monkeypatch):
    from transformers.models.t5.modeling_t5 import T5Attention

    own = T5Attention.compute_bias
    monkeypatch.setattr(T5Attention, "compute_bias", lambda *args, **kwargs: 2 * own(*args, **kwargs))
    name = "T5EncoderModel"
    with pytest.raises(ValueError, match="does not compute what its rule does in this version of transformers"):
        clipped_sum(made(name), loss_of(name), batch(), clip_norm=1.0)


def test_experts_that_mix_tokens_of_all_examples_are_refused():
    config = transformers.MixtralConfig(**_LLAMA, num_local_experts=2)
    model = transformers.MixtralForCausalLM(config)
    with pytest.raises(ValueError, match=r"mlp\.gate.*the batch has 4 examples"):
        clipped_sum(model, loss_of("MixtralForCausalLM"), batch(), clip_norm=1.0)
