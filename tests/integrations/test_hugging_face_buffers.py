"""What a model under PrivateTrainer writes into its buffers from private batches is never saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.hugging_face.cases import PRIVACY, WORDS, PrivateTrainer, labelled, training_args


class Classifier(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(WORDS), 8)
        self.out = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(len(WORDS)))
        self.observer = torch.ao.quantization.MinMaxObserver()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.table(input_ids).mean(1)
        self.look(input_ids, hidden.detach())
        return self.out(hidden)

    def look(self, input_ids: Tensor, hidden: Tensor) -> None:
        raise NotImplementedError


class TokensSeen(Classifier):
    def look(self, input_ids: Tensor, hidden: Tensor) -> None:
        self.seen.index_add_(0, input_ids.flatten(), torch.ones(input_ids.numel()))


class Observed(Classifier):
    def look(self, input_ids: Tensor, hidden: Tensor) -> None:
        self.observer(hidden)


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")


@pytest.mark.parametrize(("kind", "buffer"), [(TokensSeen, "seen"), (Observed, "observer.min_val")])
def test_statistics_of_private_batches_are_refused(kind, buffer, tmp_path):
    model = kind()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = PrivateTrainer(
        model=model,
        args=training_args(tmp_path, max_steps=3, save_strategy="steps", save_steps=1),
        train_dataset=labelled(),
        processing_class=WORDS,
        privacy=PRIVACY,
        loss_per_example=loss,
    )
    with pytest.raises(ValueError, match=f"buffer '{buffer}' changes when the model runs in training"):
        trainer.train()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert not list(tmp_path.rglob("model.safetensors"))
