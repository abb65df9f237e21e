"""A model whose losses depend on padding is refused before it is trained."""

from __future__ import annotations

import pytest
import transformers

from dpoptim.app import RecordKind, Records, prepare
from dpoptim.integrations.losses import Task
from tests.app import tiny


def records() -> Records:
    return Records(kind=RecordKind.TEXT, source="memory", texts=tiny.TEXTS)


def test_an_architecture_without_a_mask_is_refused():
    tokenizer = tiny.wordpiece()
    config = transformers.FNetConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, intermediate_size=48, max_position_embeddings=64
    )
    model = transformers.FNetForMaskedLM(config).train()
    with pytest.raises(ValueError, match="the loss of an example changes with its padding"):
        prepare(task=Task.MASKED_LM, model=model, records=records(), tokenizer=tokenizer, max_length=64, bucket=8)
    assert model.training
    prepare(task=Task.MASKED_LM, model=model, records=records(), tokenizer=tokenizer, max_length=64)  # of one width


def test_bert_is_accepted_and_its_mode_restored():
    tokenizer = tiny.wordpiece()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).train()
    prepare(task=Task.MASKED_LM, model=model, records=records(), tokenizer=tokenizer, max_length=64, bucket=8)
    assert model.training
