"""BERT with its head for masked tokens, looking at the masked places alone behind the encoder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.clipping import linear_cross_entropy
from experiments.tinybert.texts import Part


class MaskedLM(nn.Module):
    """One loss an example: the mean over its masked tokens."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def token_losses(self, part: Part) -> Tensor:
        """The loss at every masked place, [examples, places]; 0 where an example has fewer."""
        head = self.bert.cls.predictions
        hidden = self.bert.bert(part.ids, attention_mask=part.attends).last_hidden_state
        chosen = hidden.gather(1, part.places[..., None].expand(-1, -1, hidden.shape[-1]))
        return linear_cross_entropy(head.decoder, head.transform(chosen), part.labels)

    def forward(self, part: Part) -> Tensor:
        return self.token_losses(part).sum(1) / part.masked.clamp(min=1)


def load(model: str | Path, *, dtype: torch.dtype = torch.float32) -> MaskedLM:
    """The model of a folder or a name, without dropout, as the loss of a private example should have no other noise."""
    from transformers import BertForMaskedLM

    bert = BertForMaskedLM.from_pretrained(
        model, dtype=dtype, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return MaskedLM(bert)


def made_up(*, vocabulary: int, seed: int = 0) -> MaskedLM:
    """A very small BERT with random weights."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MaskedLM(BertForMaskedLM(config))


def fingerprint(model: nn.Module) -> str:
    """Twelve hexadecimal digits of the weights' digest: which model a line of results speaks of."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
