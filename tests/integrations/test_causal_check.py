"""A causal language model that reads later tokens is refused before it is trained."""

from __future__ import annotations

import pytest
import torch
import transformers

from dpoptim.app import RecordKind, Records, prepare
from dpoptim.integrations.losses import Task
from dpoptim.integrations.losses.causal_check import check_one_direction
from tests.app import tiny

TOKENS = 90


def test_a_model_of_both_directions_is_refused():
    records = Records(kind=RecordKind.TEXT, source="memory", texts=tiny.TEXTS)
    tokenizer = tiny.wordpiece()
    model = transformers.BertLMHeadModel(tiny.bert_config(len(tokenizer))).train()
    with pytest.raises(ValueError, match=r"BertLMHeadModel reads both directions.*use masked-lm, or a causal") as error:
        prepare(task=Task.CAUSAL_LM, model=model, records=records, tokenizer=tokenizer, max_length=32)
    assert "\n" not in str(error.value)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_models_are_taken(dtype):
    models = tiny.causal_models(TOKENS) | {
        "BERT as a decoder": transformers.BertLMHeadModel(tiny.bert_config(TOKENS, is_decoder=True))
    }
    for model in models.values():
        check_one_direction(model.to(dtype).train())
        assert model.training


def test_new_weights_are_seen_through_too():
    """Attention to a later token weighs little in a model that has learnt nothing."""
    for seed in range(5):
        torch.manual_seed(seed)
        for hidden in (32, 128):
            model = transformers.BertLMHeadModel(tiny.bert_config(TOKENS, hidden_size=hidden))
            with pytest.raises(ValueError, match="reads both directions"):
                check_one_direction(model)
