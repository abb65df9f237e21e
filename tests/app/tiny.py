"""Tiny models and tokenizers, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "private training adds noise to clipped gradients of every single record in the batch",
    "",
    "a short one",
    "noise noise noise",
    "the dog and the fox train a private model with clipped gradients and a little noise",
    "one",
]
LABELS = ["animal", "privacy", "animal", "privacy", "privacy", "animal", "animal"]


def wordpiece() -> Any:
    """A WordPiece tokenizer as BERT has it, with all letters and words. A trained one differs in each process."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for text in TEXTS for word in text.split()})
    letters = sorted(set("".join(words)))
    pieces = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *words])
    tokenizer = Tokenizer(models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip


def bytepair() -> Any:
    """A byte-pair tokenizer as GPT-2 has it: no padding, one token that ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end)


def _wide(**changes: Any) -> dict[str, Any]:
    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, max_position_embeddings=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return {**sizes, **changes}


def bert_config(vocabulary: int, **changes: Any) -> Any:
    return transformers.BertConfig(vocab_size=vocabulary, **_wide(**changes))


def gpt2_config(vocabulary: int) -> Any:
    return transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def vit_config() -> Any:
    return transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def masked_models(vocabulary: int) -> dict[str, nn.Module]:
    """One masked language model of each kind of head."""
    torch.manual_seed(0)
    electra = transformers.ElectraConfig(vocab_size=vocabulary, embedding_size=16, **_wide())
    albert = transformers.AlbertConfig(vocab_size=vocabulary, embedding_size=16, **_wide())
    roberta = transformers.RobertaConfig(vocab_size=vocabulary, pad_token_id=0, **_wide())
    distil = transformers.DistilBertConfig(
        vocab_size=vocabulary, dim=32, n_layers=2, n_heads=2, hidden_dim=48, max_position_embeddings=64, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    return {
        "BERT": transformers.BertForMaskedLM(bert_config(vocabulary)),
        "RoBERTa": transformers.RobertaForMaskedLM(roberta),
        "DistilBERT": transformers.DistilBertForMaskedLM(distil),
        "ALBERT": transformers.AlbertForMaskedLM(albert),
        "ELECTRA": transformers.ElectraForMaskedLM(electra),
    }


def causal_models(vocabulary: int) -> dict[str, nn.Module]:
    """Causal language models: tied, untied, and one that caps its logits."""
    torch.manual_seed(1)
    sizes = dict(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return {
        "GPT-2": transformers.GPT2LMHeadModel(gpt2_config(vocabulary)),
        "Llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        "Gemma 2": transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, head_dim=16)),
    }


def saved(folder: Path, model: Any, tokenizer: Any = None) -> str:
    """The folder, with model and tokenizer in it as `save_pretrained` writes them."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def chatty() -> Any:
    """A byte-pair tokenizer with a chat template that ends each turn with a special token."""
    tokenizer = bytepair()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|over|>"]})
    tokenizer.chat_template = (
        "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|over|>\n{% endfor %}"
    )
    return tokenizer


def gpt2(tokenizer: Any) -> Any:
    """A GPT-2 of two layers with new weights."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(gpt2_config(len(tokenizer)))
