"""Tiny models and trainers that the tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import DataCollatorForLanguageModeling, TrainingArguments

from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from tests.app import tiny

WORDS, PIECES = tiny.wordpiece(), tiny.bytepair()
PIECES.pad_token = PIECES.eos_token
TEXTS = [text for text in tiny.TEXTS if text] * 4
LABELS = [number % 2 for number in range(len(TEXTS))]
PRIVACY = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, sampling="poisson")  # fast: no calibration
CALIBRATED = PrivacyArguments(epsilon=8.0, delta=1e-3, sampling="poisson")
EXACT = PrivacyArguments(noise_multiplier=0.0, clip_norm=1e6, variant="dp_sgd", sampling="shuffled", delta=1e-3)


def training_args(folder: Path, **changes: Any) -> TrainingArguments:
    defaults = dict(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=4,
        logging_steps=100, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
        lr_scheduler_type="constant",
    )  # fmt: skip
    return TrainingArguments(**{**defaults, **changes})


def masked_model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(tiny.bert_config(len(WORDS), hidden_dropout_prob=dropout))


def classifier(dropout: float = 0.0, **changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        tiny.bert_config(len(WORDS), hidden_dropout_prob=dropout, **changes)
    )


def causal_model() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(tiny.gpt2_config(len(PIECES)))


def tagger() -> Any:
    torch.manual_seed(0)
    return transformers.BertForTokenClassification(
        transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> Any:
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def bart() -> Any:
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16, dropout=0.0,
        )
    )  # fmt: skip


def labelled(texts: list[str] = TEXTS) -> list[dict[str, Any]]:
    return [{**WORDS(text), "labels": label} for text, label in zip(texts, LABELS, strict=False)]


def unseen(count: int) -> list[dict[str, Any]]:
    """Examples that are not training examples."""
    return [{**WORDS("the fox " * (number + 2)), "labels": number % 2} for number in range(count)]


def masked_trainer(folder: Path, *, model: Any = None, privacy: PrivacyArguments = PRIVACY, **changes: Any) -> Any:
    return PrivateTrainer(
        model=masked_model() if model is None else model,
        args=training_args(folder, **changes),
        train_dataset=[WORDS(text) for text in TEXTS],
        data_collator=DataCollatorForLanguageModeling(WORDS),
        processing_class=WORDS,
        privacy=privacy,
    )


def class_trainer(folder: Path, *, model: Any = None, privacy: Any = PRIVACY, **changes: Any) -> Any:
    own = {
        name: changes.pop(name) for name in list(changes) if name in ("eval_dataset", "compute_metrics", "callbacks")
    }
    return PrivateTrainer(
        model=classifier() if model is None else model,
        args=training_args(folder, **changes),
        train_dataset=labelled(),
        processing_class=WORDS,
        privacy=privacy,
        **own,
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
