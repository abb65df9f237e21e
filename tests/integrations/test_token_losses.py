"""Decoding the targets alone gives the losses of the whole model, or is not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from dpoptim.app import prepare
from dpoptim.integrations.losses import Task
from dpoptim.integrations.token_losses import IGNORED, can_read_targets
from tests.app import tiny
from tests.app.cases import PIECES, WORDS, masked_lm, text_records, whole_batch


class Capped(transformers.BertForMaskedLM):
    """Changes its logits after the linear map."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output


class Neighbours(transformers.BertForMaskedLM):
    """A head that reads the previous position."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.cls.predictions.transform.register_forward_hook(lambda m, a, out: out + out.roll(1, dims=1))


@pytest.mark.parametrize("kind", [Capped, Neighbours])
def test_a_different_head_computes_all_logits(kind):
    torch.manual_seed(0)
    model = kind(tiny.bert_config(len(WORDS))).train()
    before = torch.random.get_rng_state()
    prepared = prepare(task=Task.MASKED_LM, model=model, tokenizer=WORDS, records=text_records(), bucket=8)
    assert not prepared.targets_only
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    batch = prepared.at_step(whole_batch(prepared), 0)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    row, place = 1, int(batch["places"][1, 0])
    expected = F.cross_entropy(logits[row, place], batch["labels"][row, 0])
    single = {**batch, "labels": batch["labels"].clone()}
    single["labels"][:, 1:] = IGNORED
    torch.testing.assert_close(prepared.loss_per_example(model, single)[row], expected)


def test_a_plain_module_computes_all_logits():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(300, 8), nn.Linear(8, 300)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(input_ids))

    model = Plain()
    assert not can_read_targets(model)
    prepared = prepare(task=Task.CAUSAL_LM, model=model, tokenizer=PIECES, records=text_records(), bucket=8)
    losses = prepared.loss_per_example(model, whole_batch(prepared))
    assert losses.shape == (7,)
    assert losses[2] == 0


def test_hooks_are_removed_after_a_call():
    prepared = masked_lm()
    model: Any = prepared.model
    prepared.loss_per_example(model, prepared.at_step(whole_batch(prepared), 0))
    assert model(input_ids=torch.tensor([[2, 7, 3]])).logits.shape == (1, 3, len(WORDS))
