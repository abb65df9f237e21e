"""PrivateTrainer: changed code does not repeat a step, and collators with their own random generator are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorForLanguageModeling

from dpoptim.integrations.hugging_face import PrivateTrainer
from tests.app import tiny
from tests.integrations.hugging_face.cases import PRIVACY, TEXTS, WORDS, masked_model, training_args

ROWS = [WORDS(text) for text in TEXTS]


def stock(tokenizer: Any = WORDS, **options: Any) -> Any:
    return DataCollatorForLanguageModeling(tokenizer, **options)


def trainer(folder: Path, collator: Any, *, model: Any = None, loss: Any = None, **changes: Any) -> Any:
    return PrivateTrainer(
        model=masked_model() if model is None else model,
        args=training_args(folder, save_strategy="steps", save_steps=2, **changes),
        train_dataset=ROWS, data_collator=collator, processing_class=WORDS, privacy=PRIVACY, loss_per_example=loss,
    )  # fmt: skip


class Own:
    """A collator with its own generator."""

    def __init__(self, rng: torch.Generator) -> None:
        self.rng = rng

    def __call__(self, rows: Any) -> Any:
        return stock()(rows)


def test_a_collator_with_a_seed_or_generator_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data_collator\.seed=42 makes its draws public"):
        trainer(tmp_path, stock(seed=42))
    with pytest.raises(ValueError, match=r"data_collator\.rng is a random generator with a public seed"):
        trainer(tmp_path, Own(rng=torch.Generator()))


# -- other code ----------------------------------------------------------------------------------------------------


def weighted(weight: torch.Tensor) -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        return (losses * weight[batch["labels"].clamp(min=0)]).sum(1)

    return loss


CALLS: list[int] = []


def annealed(model: Any, batch: Any) -> torch.Tensor:
    """Depends on a count that is in neither its code nor its arguments."""
    CALLS.append(1)
    return weighted(ONES * len(CALLS))(model, batch)


def hooked() -> Any:
    model = masked_model()
    model.bert.embeddings.register_forward_hook(lambda module, args, output: output * 2)
    return model


def other_mask() -> Any:
    words = tiny.wordpiece()
    words.mask_token = "[UNK]"
    return words


ONES = torch.ones(len(WORDS))
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokenizer": ({"collator": stock()}, {"collator": stock(other_mask())}),
    "closure": ({"loss": weighted(ONES)}, {"loss": weighted(ONES * 1.001)}),
    "hook": ({}, {"model": hooked}),
}


def made(folder: Path, parts: dict[str, Any]) -> Any:
    model = parts["model"]() if "model" in parts else None
    return trainer(folder, parts.get("collator") or stock(), model=model, loss=parts.get("loss"), max_steps=8)


def test_a_loss_that_counts_its_calls_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the loss of an example changes"):
        trainer(tmp_path, stock(), loss=annealed, per_device_train_batch_size=4).train()


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_changed_code_cannot_repeat_a_step(what, tmp_path):
    first, second = CHANGES[what]
    made(tmp_path, first).train()
    with pytest.raises(ValueError, match=r"step [3-8] was released before") as no:
        made(tmp_path, second).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert "\n" not in str(no.value)
