"""Labels beside logits, for named entities and for texts made of texts: each example's loss against the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForTokenClassification,
    DataCollatorForSeq2Seq,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

from dpoptim.clipping import check_example_independence
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from dpoptim.integrations.losses import losses_for
from tests.app import tiny


def tagger() -> Any:
    torch.manual_seed(0)
    return BertForTokenClassification(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def bart() -> Any:
    torch.manual_seed(0)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16, dropout=0.0,
        )
    )  # fmt: skip


def adapted() -> Any:
    return get_peft_model(t5(), LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False, lora_dropout=0.0))


def batch(classes: int, positions: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (5, 6), generator=generator)
    lengths = torch.tensor([6, 5, 4, 6, 3])
    labels = torch.randint(1, classes, (5, positions), generator=generator)
    labels = labels.masked_fill(torch.arange(positions) >= (lengths * positions // 6)[:, None], -100)
    return {"input_ids": ids, "attention_mask": (torch.arange(6) < lengths[:, None]).long(), "labels": labels}


CASES = {
    "tagger": (tagger, None, 4, 6),
    "t5": (t5, None, 50, 4),
    "t5 with LoRA": (adapted, None, 50, 4),
    "bart": (bart, "seq2seq-lm", 50, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_each_loss_is_what_the_model_says_of_that_example_alone(name):
    make, task, classes, positions = CASES[name]
    model, given = make().eval(), batch(classes, positions)
    found = losses_for(model, task)(model, given)
    for j in range(5):
        alone = {key: value[j : j + 1] for key, value in given.items()}
        torch.testing.assert_close(found[j], model(**alone).loss, rtol=1e-5, atol=1e-6)
    check_example_independence(model, losses_for(model, task), given)


def test_inputs_of_the_decoder_that_are_given_are_taken():
    model, given = t5().eval(), batch(50, 4)
    losses = losses_for(model)
    own = losses(model, given)
    shifted = model._shift_right(given["labels"])
    torch.testing.assert_close(losses(model, {**given, "decoder_input_ids": shifted}), own)
    assert not torch.allclose(losses(model, {**given, "decoder_input_ids": shifted.flip(1)}), own)


def test_an_example_without_labels_has_loss_0():
    given = batch(4)
    given["labels"][2] = -100
    model = tagger()
    found = losses_for(model)(model, given)
    assert found[2] == 0
    assert (found[[0, 1, 3, 4]] > 0).all()


@pytest.mark.parametrize(("make", "task", "maker"), [(tagger, None, "TokenClassification"), (t5, None, "Seq2Seq")])
def test_a_batch_without_labels_names_a_collator(make, task, maker):
    model, given = make(), batch(4)
    del given["labels"]
    with pytest.raises(ValueError, match=f"has no labels, only input_ids, attention_mask; .*{maker}"):
        losses_for(model, task)(model, given)


def test_a_class_that_does_several_tasks_is_asked_about():
    with pytest.raises(ValueError, match=r"BartForConditionalGeneration does several tasks; set task=.*seq2seq-lm"):
        losses_for(bart())
    with pytest.raises(ValueError, match=r"task='translation' must be one of masked-lm, .*token-classification"):
        losses_for(bart(), "translation")


@pytest.mark.parametrize("name", ["tagger", "t5", "t5 with LoRA"])
def test_a_trainer_trains_it(name, tmp_path):
    make, _, classes, positions = CASES[name]
    given = batch(classes, positions)
    dataset = [{key: value[j % 5] for key, value in given.items()} for j in range(40)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=2, learning_rate=1e-2, report_to="none", use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    model = make()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    trainer = PrivateTrainer(model, arguments, train_dataset=dataset, privacy=PrivacyArguments(epsilon=8.0, delta=1e-3))
    trainer.train()
    moved = [n for n, p in trainer.model.named_parameters() if n in before and not torch.equal(p, before[n])]
    assert len(moved) == len(before)


def padded(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As wide as the longest text and the longest text that is to be made of it, which may be equally wide."""
    ids = pad_sequence([example["input_ids"] for example in examples], batch_first=True)
    labels = pad_sequence([example["labels"] for example in examples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def test_a_long_text_made_of_a_short_one_is_no_padding(tmp_path):
    """Texts and targets are both up to 6 wide: columns that the mask leaves out must not be cut out of the targets."""
    generator = torch.Generator().manual_seed(1)
    dataset = [
        {"input_ids": torch.randint(3, 50, (6 - j % 4,), generator=generator),
         "labels": torch.randint(3, 50, (3 + j % 4,), generator=generator)}
        for j in range(40)
    ]  # fmt: skip
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=1, report_to="none", use_cpu=True, save_strategy="no"
    )
    trainer = PrivateTrainer(
        t5(), arguments, train_dataset=dataset, data_collator=padded,
        privacy=PrivacyArguments(epsilon=8.0, delta=1e-3),
    )  # fmt: skip
    assert trainer.train().global_step == 1


def made_of_texts(folder: Any, collator: Any, *, length: int, model: Any = None, **more: Any) -> Any:
    """A trainer over texts whose targets are all of one length, 8 of them a batch."""
    words = tiny.wordpiece()
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": torch.randint(5, 50, (4 + 2 * (j % 3),), generator=generator).tolist(),
         "labels": torch.randint(5, 50, (length,), generator=generator).tolist()}
        for j in range(70)
    ]  # fmt: skip
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=1, report_to="none", use_cpu=True, save_strategy="no"
    )
    return PrivateTrainer(
        t5() if model is None else model, arguments, train_dataset=rows, data_collator=collator,
        processing_class=words, privacy=PrivacyArguments(epsilon=8.0, delta=1e-3), **more,
    )  # fmt: skip


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("multiple", [None, 8], ids=["padded to the longest", "padded to multiples"])
def test_targets_of_one_length_that_would_be_padded_on_the_left_are_refused(length, multiple, tmp_path):
    words = tiny.wordpiece()
    for side in ("right", "left"):
        words.padding_side = side
        for model in (None, t5()):
            collator = DataCollatorForSeq2Seq(words, model=model, pad_to_multiple_of=multiple)
            trainer = made_of_texts(tmp_path, collator, length=length)
            if side == "right":
                trainer.get_train_dataloader()
            else:
                with pytest.raises(
                    ValueError, match=r"labels that are padded on the left .*padding_side=\"right\""
                ) as no:
                    trainer.get_train_dataloader()
                assert "\n" not in str(no.value)


def test_padding_of_targets_that_is_counted_is_refused(tmp_path):
    own = losses_for(t5())

    def counted(model: Any, batch: Any) -> torch.Tensor:
        return own(model, batch) * batch["labels"].shape[1]

    collator = DataCollatorForSeq2Seq(tiny.wordpiece())
    made_of_texts(tmp_path, collator, length=5, loss_per_example=own).get_train_dataloader()
    with pytest.raises(ValueError, match=r"labels that are padded on the right change the loss .* divide by each"):
        made_of_texts(tmp_path, collator, length=5, loss_per_example=counted).get_train_dataloader()
