"""PrivateTrainer refuses, before the first step, batches in which one record changes the loss of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import DataCollatorForLanguageModeling, default_data_collator

import dpoptim
from dpoptim.integrations.hugging_face import PrivateTrainer
from tests.app import tiny
from tests.integrations.hugging_face.cases import (
    PRIVACY,
    TEXTS,
    WORDS,
    causal_model,
    classifier,
    labelled,
    masked_model,
)
from tests.integrations.hugging_face.cases import training_args as args

LABELLED = labelled()


def tokenizer(kind: Any, side: str = "right") -> Any:
    made = kind()
    made.padding_side = side
    made.pad_token = made.pad_token or made.eos_token
    return made


def made(folder: Path, model: Any, rows: Any, collator: Any = None, *, words: Any = WORDS, **more: Any) -> Any:
    own = {name: more.pop(name) for name in ("loss_per_example", "optimizers", "plan") if name in more}
    return PrivateTrainer(
        model=model, args=args(folder, **{"per_device_train_batch_size": 4, **more}), train_dataset=rows,
        data_collator=collator, processing_class=words, privacy=None if "plan" in own else PRIVACY, **own,
    )  # fmt: skip


def checked(*given: Any, **more: Any) -> Any:
    trainer = made(*given, **more)
    trainer.get_train_dataloader()
    return trainer


def refused(match: str, *given: Any, **more: Any) -> None:
    with pytest.raises(ValueError, match=match) as no:
        checked(*given, **more)
    assert "\n" not in str(no.value)
    digits = any(letter.isdigit() for letter in str(no.value).replace("GPT2", "").replace(" 0", "").replace("'0.", ""))
    assert not digits, "no loss is told"


# -- padding -------------------------------------------------------------------------------------------------------


def texts(words: Any, length: int | None = None) -> list[Any]:
    options: dict[str, Any] = {} if length is None else {"truncation": True, "max_length": length}
    return [words(text, **options) for text in TEXTS if length is None or len(words(text)["input_ids"]) >= length]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length", [None, 6], ids=["of any length", "of one length"])
def test_positions_that_count_the_padding_on_the_left_are_refused(tmp_path, length, size):
    for kind, model, mlm in ((tiny.bytepair, causal_model, False), (tiny.wordpiece, masked_model, True)):
        for side in ("right", "left"):
            words = tokenizer(kind, side)
            given = (tmp_path, model(), texts(words, length), DataCollatorForLanguageModeling(words, mlm=mlm))
            if side == "right":
                checked(*given, words=words, per_device_train_batch_size=size)
            else:
                line = r'padding on the left .* set padding_side="right" in the tokenizer'
                refused(line, *given, words=words, per_device_train_batch_size=size)


def test_padding_to_multiples_is_looked_at_too(tmp_path):
    words = tokenizer(tiny.bytepair, "left")
    collator = DataCollatorForLanguageModeling(words, mlm=False, pad_to_multiple_of=64)
    refused("padding_side", tmp_path, causal_model(), texts(words), collator, words=words)


def test_one_width_for_all_is_no_harm(tmp_path):
    """Each text is padded beforehand, and the collator does not pad: no record sees the length of another."""
    words = tokenizer(tiny.bytepair, "left")
    rows = [words(text, padding="max_length", max_length=24, truncation=True) for text in TEXTS]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    checked(tmp_path, causal_model(), rows, default_data_collator, words=words)


class Pool(nn.Module):
    """The mean over all positions, padding included."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.l = nn.Embedding(len(WORDS), 8), nn.Linear(8, 2)

    def pooled(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.e(input_ids).mean(1)

    def forward(
        self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, labels: Any = None
    ) -> Any:
        return self.l(self.pooled(input_ids))


class Centred(Pool):
    """Less the mean over the batch."""

    def pooled(self, input_ids: torch.Tensor) -> torch.Tensor:
        found = self.e(input_ids)[:, 0]
        return found - found.mean(0)


def of_first_token(model: Any, batch: Any) -> torch.Tensor:
    labels = batch.pop("labels")
    return F.cross_entropy(model(batch["input_ids"]), labels, reduction="none")


def test_a_model_that_pools_over_padding_is_refused(tmp_path):
    line = "another loss with padding than without it: Pool, or the loss, looks at padding"
    refused(line, tmp_path, Pool(), LABELLED, loss_per_example=of_first_token)


def test_texts_that_the_collator_tokenises(tmp_path):
    def collate(rows: list[Any], **options: Any) -> Any:
        found = WORDS([row["text"] for row in rows], return_tensors="pt", **options)
        return {**found, "labels": torch.tensor([row["labels"] for row in rows])}

    rows = [{"text": text, "labels": number % 2} for number, text in enumerate(TEXTS)]
    more = {"loss_per_example": of_first_token, "remove_unused_columns": False}
    refused("looks at padding", tmp_path, Pool(), rows, lambda rows: collate(rows, padding=True), **more)
    fixed = {"padding": "max_length", "max_length": 40, "truncation": True}
    checked(tmp_path, Pool(), rows, lambda rows: collate(rows, **fixed), **more)


# -- examples that mix ---------------------------------------------------------------------------------------------


def test_a_model_that_looks_across_the_batch_is_refused(tmp_path):
    refused("examples mix", tmp_path, Centred(), LABELLED, loss_per_example=of_first_token)


def test_a_loss_over_the_batch_is_refused_though_no_gradient_flows(tmp_path):
    def loss(model: Any, batch: Any) -> torch.Tensor:
        losses = of_first_token(model, batch)
        return losses / losses.detach().sum()

    class First(Pool):
        def pooled(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.e(input_ids)[:, 0]

    refused("another loss in a batch than alone", tmp_path, First(), LABELLED, loss_per_example=loss)
    checked(tmp_path, First(), LABELLED, loss_per_example=of_first_token)


def table(rows: list[Any], *, centred: bool) -> dict[str, torch.Tensor]:
    x = torch.tensor(np.stack([row["x"] for row in rows]), dtype=torch.float32)
    return {"x": x - x.mean(0) if centred else x, "labels": torch.tensor([row["labels"] for row in rows])}


def of_rows(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


ROWS = [{"x": np.random.default_rng(number).normal(size=3), "labels": number % 2} for number in range(30)]


def test_a_collator_that_computes_over_the_batch_is_refused(tmp_path):
    more = {"loss_per_example": of_rows, "remove_unused_columns": False, "words": None}
    line = "collated by itself has another loss than in a batch"
    refused(line, tmp_path, nn.Linear(3, 2), ROWS, lambda rows: table(rows, centred=True), **more)
    checked(tmp_path, nn.Linear(3, 2), ROWS, lambda rows: table(rows, centred=False), **more)
    alone = {**more, "per_device_train_batch_size": 1}  # no two records meet
    checked(tmp_path, nn.Linear(3, 2), ROWS, lambda rows: table(rows, centred=True), **alone)


def test_two_rows_of_one_record_are_refused(tmp_path):
    def twice(rows: list[Any]) -> Any:
        return table([*rows, *rows], centred=False)

    with pytest.raises(ValueError, match="give 8 losses for 4 examples"):
        checked(
            tmp_path, nn.Linear(3, 2), ROWS, twice, loss_per_example=of_rows, remove_unused_columns=False, words=None
        )


def test_a_model_that_seeds_is_refused(tmp_path):
    class Seeds(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(0)
            return super().forward(x)

    more = {"loss_per_example": of_rows, "remove_unused_columns": False, "words": None}
    model = nn.Sequential(Seeds(3, 3), nn.Dropout(), nn.Linear(3, 2))
    for part in model[0].parameters():
        part.requires_grad_(False)
    refused("the model or loss_per_example makes or seeds a generator", tmp_path, model, ROWS,
            lambda rows: table(rows, centred=False), **more)  # fmt: skip


def test_a_loss_that_draws_is_held_to_its_gradients(tmp_path):
    def noisy(model: Any, batch: Any) -> torch.Tensor:
        return of_rows(model, {**batch, "x": batch["x"] + torch.randn_like(batch["x"])})

    def mixing(model: Any, batch: Any) -> torch.Tensor:
        return noisy(model, batch) + model(batch["x"].mean(0, keepdim=True).expand_as(batch["x"])).sum(1).mean()

    more = {"remove_unused_columns": False, "words": None}
    checked(tmp_path, nn.Linear(3, 2), ROWS, lambda rows: table(rows, centred=False), loss_per_example=noisy, **more)
    refused("examples mix", tmp_path, nn.Linear(3, 2), ROWS, lambda rows: table(rows, centred=False),
            loss_per_example=mixing, **more)  # fmt: skip


# -- what is taken, and what is left as it was ---------------------------------------------------------------------


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(classifier(), peft.LoraConfig(task_type="SEQ_CLS", r=2))


def vision() -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


IMAGES = [{"pixel_values": torch.randn(3, 8, 8), "labels": number % 2} for number in range(12)]
NUMBERS = [{**WORDS(text), "labels": [0.5] * 3} for text in TEXTS]
TAKEN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "classifier": (classifier, LABELLED, {}),
    "dropout": (lambda: classifier(0.3), LABELLED, {}),
    "16 bits": (lambda: classifier().bfloat16(), LABELLED, {}),
    "autocast": (classifier, LABELLED, {"bf16": True}),
    "checkpointing": (classifier, LABELLED, {"gradient_checkpointing": True}),
    "lora": (lora, LABELLED, {}),
    "images": (vision, IMAGES, {"words": None}),
    "numbers": (lambda: classifier(num_labels=3, problem_type="regression"), NUMBERS, {}),
}


def numpy_state() -> bytes:
    state: Any = np.random.get_state()
    return state[1].tobytes() + repr(state[2:]).encode()


@pytest.mark.parametrize("what", TAKEN)
def test_stock_models_are_taken_and_nothing_is_changed(what, tmp_path):
    make, rows, more = TAKEN[what]
    trainer = made(tmp_path, make(), rows, max_steps=1, **more)
    model = trainer.model
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), numpy_state()
    precision = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    trainer.get_train_dataloader()
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == numpy_state()
    assert precision == (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    assert trainer.train().global_step == 1


def test_padding_is_seen_in_16_bits_and_under_autocast(tmp_path):
    words = tokenizer(tiny.bytepair, "left")
    collator = DataCollatorForLanguageModeling(words, mlm=False)
    refused("padding_side", tmp_path, causal_model(), texts(words), collator, words=words, bf16=True)
    refused("padding_side", tmp_path, causal_model().bfloat16(), texts(words), collator, words=words)


def test_a_large_model_of_16_bits_is_looked_at_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("dpoptim.integrations.hugging_face.batch_check._COPIED", 0)
    model = causal_model().bfloat16()
    for part in (model.transformer.wpe, model.transformer.wte):
        part.weight.data *= 30  # as far apart as in a trained model
    for side in ("right", "left"):
        words = tokenizer(tiny.bytepair, side)
        given = (tmp_path, model, texts(words), DataCollatorForLanguageModeling(words, mlm=False))
        checked(*given, words=words) if side == "right" else refused("padding_side", *given, words=words)


def test_a_ready_optimizer_counts_nothing_of_it(tmp_path):
    plan = dpoptim.PrivacyPlan(num_examples=len(LABELLED), batch_size=8, steps=2, noise_multiplier=0.6, delta=1e-3)
    model = classifier()
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1)
    trainer = checked(tmp_path, model, LABELLED, plan=plan, optimizers=(optimizer, None), max_steps=-1)
    assert optimizer.mechanism.counts_not_private.examples == 0
    assert trainer.train().global_step == 2


def test_buffers_are_put_back(tmp_path):
    class Counts(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.detach().sum(0)
            return x

    counts = Counts()
    model = nn.Sequential(counts, nn.Linear(3, 2))
    refused("buffer", tmp_path, model, ROWS, lambda rows: table(rows, centred=False), loss_per_example=of_rows,
            remove_unused_columns=False, words=None)  # fmt: skip
    assert torch.equal(counts.seen, torch.zeros(3))


class Remembers(nn.Module):
    """Subtracts a mean of all that came before, in training, and keeps it in no buffer."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.mean = inner, 0.0

    def forward(self, input_ids: Any, attention_mask: Any = None, **rest: Any) -> Any:
        output = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * float(input_ids.float().mean())
            output.logits = output.logits * (1 + self.mean)
        return output


@pytest.mark.parametrize("size", [1, 4])
def test_what_a_model_remembers_is_refused(size, tmp_path):
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(**batch).logits, batch["labels"], reduction="none")

    more: dict[str, Any] = {"loss_per_example": loss, "remove_unused_columns": False}
    match = "gives other losses each time for the same batch under the same seeds"
    refused(match, tmp_path, Remembers(classifier()), LABELLED, per_device_train_batch_size=size, **more)
    checked(tmp_path, classifier(dropout=0.3), LABELLED, per_device_train_batch_size=size)
