"""Batches get few shapes, and every example keeps its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

from dpoptim.integrations.hugging_face.batch_shapes import BatchShapes, has_rows, without_packing
from dpoptim.integrations.losses import losses_for
from tests.app import tiny

LONGEST, VOCABULARY, IGNORED = 32, 60, -100
LENGTHS = [9, 3, 7, 5]


def roberta(kind: Any) -> Any:
    return kind(transformers.RobertaConfig(**{**tiny.bert_config(VOCABULARY).to_dict(), "pad_token_id": 1}))


def decoder_classifier(pad_id: int) -> Any:
    config = tiny.gpt2_config(VOCABULARY)
    config.pad_token_id, config.num_labels = pad_id, 3
    return transformers.GPT2ForSequenceClassification(config)


def bert(kind: Any, **changes: Any) -> Any:
    return kind(tiny.bert_config(VOCABULARY, **changes))


MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(tiny.gpt2_config(VOCABULARY)),
    "bert masked-lm": lambda: bert(transformers.BertForMaskedLM),
    "bert classes": lambda: bert(transformers.BertForSequenceClassification, num_labels=3),
    "bert tags": lambda: bert(transformers.BertForTokenClassification, num_labels=3),
    "roberta masked-lm": lambda: roberta(transformers.RobertaForMaskedLM),
    "roberta classes": lambda: roberta(transformers.RobertaForSequenceClassification),
    "decoder classes": lambda: decoder_classifier(7),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def text_batch(lengths: list[int] = LENGTHS, *, pad_id: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(10, VOCABULARY, mask.shape)
    return {"input_ids": torch.where(mask == 1, ids, pad_id), "attention_mask": mask}


def batch_for(name: str, model: Any, lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    batch = text_batch(lengths, pad_id=model.config.pad_token_id or 0)
    ids, is_token = batch["input_ids"], batch["attention_mask"] == 1
    if name.endswith("classes"):
        return {**batch, "labels": torch.arange(len(ids)) % 2}
    if name.endswith("tags"):
        return {**batch, "labels": torch.where(is_token, ids % 3, IGNORED)}
    if name.endswith("masked-lm"):
        is_target = is_token & (torch.arange(ids.shape[1]) % 3 == 1)
        return {**batch, "labels": torch.where(is_target, ids, IGNORED)}
    return {**batch, "labels": torch.where(is_token, ids, IGNORED)}


def padded(batch: Any, longest: int | None = LONGEST, name: str = "bert classes") -> Any:
    model = model_of(name)
    return BatchShapes(model, losses_for(model), longest)(batch)


@pytest.mark.parametrize("lengths", [LENGTHS, [6, 6, 6, 6]], ids=["padded", "equal lengths"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_stay_the_same(name, lengths):
    model = model_of(name)
    losses, batch = losses_for(model), batch_for(name, model, lengths)
    before = {key: value.clone() for key, value in batch.items()}
    shaped = BatchShapes(model, losses, LONGEST)(batch)
    assert shaped["input_ids"].shape == (4, 12 if lengths is LENGTHS else 8)
    with torch.no_grad():
        torch.testing.assert_close(losses(model, shaped), losses(model, batch), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(batch[key], value) for key, value in before.items()), "the collator's tensors stay as given"


def test_a_run_has_few_widths():
    widths = set()
    for length in range(1, LONGEST + 1):
        batch = padded(text_batch([length, 1]))
        width = batch["input_ids"].shape[1]
        assert length <= width <= LONGEST
        widths.add(width)
    assert widths == set(range(4, LONGEST + 1, 4))
    assert padded(text_batch([29, 1]), longest=30)["input_ids"].shape == (2, 30)  # not 32
    assert padded(text_batch([40, 1]))["input_ids"].shape == (2, 40)


def test_each_argument_has_its_own_padding():
    model = model_of("roberta masked-lm")
    batch = batch_for("roberta masked-lm", model, [6, 4])
    batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    shapes = BatchShapes(model, None, LONGEST)  # a different loss, which reads all labels
    found = shapes(batch)
    expected = {"input_ids": 1, "attention_mask": 0, "token_type_ids": 0, "labels": IGNORED}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == batch[name].dtype
        assert torch.equal(found[name][:, :6], batch[name])
        assert found[name][:, 6:].eq(value).all()
        assert found[name].shape == (2, 8)


@pytest.mark.parametrize("what", ["an unknown argument", "no mask", "three axes", "no longest"])
def test_other_batches_keep_their_widths(what):
    batch = text_batch([6, 4])
    if what == "an unknown argument":
        batch["position_ids"] = torch.arange(6).repeat(2, 1)
    elif what == "no mask":
        del batch["attention_mask"]
    elif what == "three axes":  # a mask for each position
        batch["attention_mask"] = batch["attention_mask"][:, :, None].repeat(1, 1, 6)
    found = padded(batch, longest=None if what == "no longest" else LONGEST)
    assert found.keys() == batch.keys()
    assert all(found[name].shape == value.shape for name, value in batch.items())


@pytest.mark.parametrize("labels", [torch.tensor([0, 1]), torch.ones(2, 6), torch.ones(2, 6).long()])
def test_labels_that_are_not_tokens_are_not_padded(labels):
    """Six classes are not six tokens."""
    found = padded({**text_batch([6, 4]), "labels": labels})
    assert found["labels"] is labels
    assert found["input_ids"].shape == (2, 8)


def test_other_inputs_stay_as_they_are():
    images = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    assert padded(images) is images
    rows = torch.zeros(2, 3)
    assert padded(rows) is rows


class NeedsMask(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return input_ids * attention_mask


class Inherits(transformers.BertForSequenceClassification):
    def forward(self, input_ids: Any, **rest: Any) -> Any:
        return super().forward(input_ids, **rest)


def test_a_mask_of_ones_is_dropped_where_the_model_has_none_by_default():
    full = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    model = model_of("bert classes")
    losses = losses_for(model)
    assert "attention_mask" not in BatchShapes(model, losses, 8)(full)
    assert "attention_mask" in BatchShapes(model, losses, 16)(text_batch([8, 7]))
    assert "attention_mask" in BatchShapes(NeedsMask(), losses, 8)(full)
    assert "attention_mask" in BatchShapes(bert(Inherits), losses, 8)(full)
    assert "attention_mask" in BatchShapes(model, lambda model, batch: batch["attention_mask"], 8)(full)
    twos = {**full, "attention_mask": 2 * full["attention_mask"]}  # packed texts are numbered
    assert "attention_mask" in BatchShapes(model, losses, 8)(twos)
    assert "attention_mask" in full


def test_masked_language_models_get_the_places_of_their_targets():
    model = model_of("bert masked-lm")
    batch = batch_for("bert masked-lm", model)
    found = BatchShapes(model, losses_for(model), 64)(batch)
    assert found["labels"].shape == found["places"].shape == (4, 16)  # at most 3 targets, rounded up
    for row in range(4):
        targets = batch["labels"][row] != IGNORED
        count = int(targets.sum())
        assert found["places"][row, :count].tolist() == targets.nonzero().flatten().tolist()
        assert torch.equal(found["labels"][row, :count], batch["labels"][row, targets])
        assert found["labels"][row, count:].eq(IGNORED).all()
    without = BatchShapes(model, lambda model, batch: None, 64)(batch)  # a user's function sees all labels
    assert "places" not in without
    assert without["labels"].shape == without["input_ids"].shape


def test_packed_texts_stay_packed():
    """Positions that restart separate two texts in one row. The search is skipped only for default positions."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    ).eval()  # fmt: skip
    ids = torch.randint(10, VOCABULARY, (2, 12))
    packed = {"input_ids": ids, "position_ids": torch.arange(12).remainder(6).repeat(2, 1)}
    search = masking_utils.find_packed_sequence_indices
    with torch.no_grad():
        with without_packing(packed):
            assert masking_utils.find_packed_sequence_indices is search
            together = model(**packed, use_cache=False).logits
        alone = model(ids[:, 6:], use_cache=False).logits
        torch.testing.assert_close(together[:, 6:], alone, rtol=1e-4, atol=1e-5)
        plain = model(ids, use_cache=False).logits
        with without_packing({"input_ids": ids}):
            assert masking_utils.find_packed_sequence_indices is not search
            torch.testing.assert_close(model(ids, use_cache=False).logits, plain)
    assert masking_utils.find_packed_sequence_indices is search


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"a": torch.zeros(3, 2), "b": [torch.zeros(3)]}, True),
        ({"a": torch.zeros(3, 2), "flag": True}, True),
        (torch.zeros(3), True),
        (transformers.BatchEncoding({"a": torch.zeros(3, 2), "b": torch.zeros(3)}), True),
        (transformers.BatchEncoding({"a": torch.zeros(3, 2), "b": torch.zeros(2)}), False),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(())}, False),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(2)}, False),
        ({"a": 1}, False),
    ],
)
def test_has_rows(batch, expected):
    assert has_rows(batch) is expected
