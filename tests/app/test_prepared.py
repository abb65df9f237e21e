"""Prepared models: losses against Hugging Face's own for each example alone, scores, and errors."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

from dpoptim.app import evaluate, prepare
from dpoptim.integrations.losses import Task
from dpoptim.integrations.token_losses import IGNORED
from tests.app import tiny
from tests.app.cases import (
    HEADS,
    PIECES,
    WORDS,
    causal_lm,
    masked_lm,
    prepared_for,
    rows,
    text_classification,
    text_records,
    whole_batch,
)

# -- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_masked_losses_match_the_models_own(head):
    prepared = masked_lm(head)
    model: Any = prepared.model.eval()
    assert prepared.targets_only, "targets alone should be decoded"
    batch = prepared.at_step(whole_batch(prepared), 5)
    losses = prepared.loss_per_example(model, batch)
    from_all_logits = dataclasses.replace(prepared, targets_only=False).loss_per_example(model, batch)
    torch.testing.assert_close(losses, from_all_logits)
    assert prepared.lengths is not None
    for j, length in enumerate(prepared.lengths):
        labels = torch.full((1, int(length)), IGNORED)
        for place, label in zip(batch["places"][j], batch["labels"][j], strict=True):
            if label != IGNORED:
                labels[0, place] = label
        if j == 2:
            assert losses[j] == 0
            assert (labels == IGNORED).all()
            continue
        alone = model(input_ids=batch["input_ids"][j : j + 1, :length], labels=labels).loss
        torch.testing.assert_close(losses[j], alone)


@pytest.mark.parametrize(("kind", "targets_only"), [("GPT-2", True), ("Llama", True), ("Gemma 2", False)])
def test_causal_losses_match_the_models_own(kind, targets_only):
    """Gemma 2 caps its logits, so all of them are computed."""
    prepared = causal_lm(kind)
    model: Any = prepared.model.eval()
    assert prepared.targets_only == targets_only
    losses = prepared.loss_per_example(model, whole_batch(prepared))
    plain = dataclasses.replace(prepared, targets_only=False).loss_per_example(model, whole_batch(prepared))
    torch.testing.assert_close(losses, plain)
    for j, text in enumerate(tiny.TEXTS):
        ids = torch.tensor([[*PIECES(text)["input_ids"], PIECES.eos_token_id]])
        assert ids.shape[1] == prepared.lengths[j]  # type: ignore[index]
        alone = model(input_ids=ids, labels=ids).loss if ids.shape[1] > 1 else torch.tensor(0.0)
        torch.testing.assert_close(losses[j], alone)


@pytest.mark.parametrize("decoder", [False, True])
def test_text_classification_losses_match_the_models_own(decoder):
    prepared = text_classification(decoder)
    model: Any = prepared.model.eval()
    losses = prepared.loss_per_example(model, whole_batch(prepared))
    for j in range(len(tiny.TEXTS)):
        tokens, label, *_ = prepared.dataset[j]
        alone = model(input_ids=torch.tensor(tokens[None]).long(), labels=torch.tensor([label])).loss
        torch.testing.assert_close(losses[j], alone)


def test_image_losses_match_the_models_own(images):
    prepared = prepared_for("image-classification", images)
    model: Any = prepared.model.eval()
    losses = prepared.loss_per_example(model, whole_batch(prepared))
    for j, path in enumerate(images.images):
        with Image.open(path) as image:
            small = np.asarray(image.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR), dtype=np.float32)
        pixels = torch.tensor(small).permute(2, 0, 1)[None] / 127.5 - 1
        alone = model(pixel_values=pixels, labels=torch.tensor([int(images.labels[j])])).loss
        torch.testing.assert_close(losses[j], alone)


def test_tabular_losses_are_cross_entropies():
    prepared = prepared_for("tabular", rows())
    records = prepared.records
    assert records.features is not None
    assert records.labels is not None
    logits = prepared.model(torch.tensor(records.features))
    expected = F.cross_entropy(logits, torch.tensor(records.labels), reduction="none")
    torch.testing.assert_close(prepared.loss_per_example(prepared.model, whole_batch(prepared)), expected)


@pytest.mark.parametrize("name", ["masked-lm", "causal-lm", "text-classification", "decoder"])
def test_padding_does_not_change_losses(name, images):
    narrow = prepared_for(name, images)
    model = narrow.model.eval()
    wide = dataclasses.replace(narrow, collate=dataclasses.replace(narrow.collate, bucket=64))  # type: ignore
    batches = [prepared.at_step(whole_batch(prepared), 1) for prepared in (narrow, wide)]
    assert batches[0]["input_ids"].shape[1] < batches[1]["input_ids"].shape[1] == 64
    first, second = (narrow.loss_per_example(model, batch) for batch in batches)
    torch.testing.assert_close(first, second)


def test_width_never_exceeds_max_length():
    prepared = masked_lm(max_length=12)
    batch = prepared.collate([prepared.dataset[1]])
    assert batch["input_ids"].shape == (1, 12)
    assert int(prepared.lengths.max()) == 12  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["masked-lm", "causal-lm"])
def test_empty_text_has_loss_and_gradient_zero(name, images):
    prepared = prepared_for(name, images)
    batch = prepared.at_step(prepared.collate([prepared.dataset[2]]), 0)
    loss = prepared.loss_per_example(prepared.model, batch)
    assert loss.shape == (1,)
    assert loss.item() == 0
    assert loss.requires_grad
    loss.sum().backward()
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in prepared.model.parameters())


def test_text_without_tokens_counts_as_an_example():
    """Without a token that ends a text, an empty one has no tokens at all."""
    torch.manual_seed(0)
    pieces = copy.deepcopy(PIECES)
    pieces.eos_token = None
    model = transformers.GPT2LMHeadModel(tiny.gpt2_config(len(PIECES)))
    prepared = prepare(task=Task.CAUSAL_LM, model=model, tokenizer=pieces, records=text_records(), bucket=8)
    assert prepared.lengths is not None
    assert prepared.lengths[2] == 1
    losses = prepared.loss_per_example(model, whole_batch(prepared))
    assert losses[2] == 0
    assert torch.isfinite(losses).all()


# -- scores -----------------------------------------------------------------------------------------------------------


def test_scores_of_a_language_model():
    prepared = masked_lm()
    prepared.model.train()
    scores = evaluate(prepared, batch_size=2)
    assert prepared.model.training
    prepared.model.eval()
    found = prepared.evaluate(prepared.model, whole_batch(prepared))
    assert scores.examples == 7
    assert scores.targets == int(found.targets.sum())
    with_targets = found.targets > 0
    assert 0 < int(with_targets.sum()) < 7, "the empty text has none"
    assert scores.loss == pytest.approx(found.losses[with_targets].mean().item(), rel=1e-5)
    assert scores.target_loss == pytest.approx((found.total.sum() / found.targets.sum()).item(), rel=1e-5)
    assert scores.target_loss != pytest.approx(scores.loss, rel=1e-4)
    assert scores.perplexity == pytest.approx(np.exp(scores.target_loss))
    assert scores.accuracy is None


def test_scores_of_a_classifier():
    prepared = prepared_for("tabular", rows())
    records = prepared.records
    assert records.features is not None
    answers = prepared.model(torch.tensor(records.features)).argmax(1).numpy()
    chosen = [0, 1, 2, 5]
    scores = evaluate(prepared.on(records.take(chosen)), batch_size=3)
    assert scores.accuracy == np.mean(answers[chosen] == records.labels[chosen])  # type: ignore[index]
    assert scores.examples == scores.targets == 4


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_masked_exactly_once():
    prepared = masked_lm()
    batch = whole_batch(prepared)
    with pytest.raises(AssertionError, match="not masked"):
        prepared.loss_per_example(prepared.model, batch)
    with pytest.raises(AssertionError, match="masked already"):
        prepared.evaluate(prepared.model, prepared.at_step(batch, 0))


def test_records_must_fit_the_task():
    bert = transformers.BertForMaskedLM(tiny.bert_config(len(WORDS)))
    with pytest.raises(ValueError, match="masked-lm needs text records, and data 'memory' has tabular records"):
        prepare(task=Task.MASKED_LM, model=bert, tokenizer=WORDS, records=rows())
    with pytest.raises(ValueError, match="text-classification needs labels"):
        prepare(task=Task.TEXT_CLASSIFICATION, model=bert, tokenizer=WORDS, records=text_records())
    one = dataclasses.replace(rows(), labels=np.zeros(8, np.int64), label_names=("no",))
    with pytest.raises(ValueError, match="at least two labels"):
        prepare(task=Task.TABULAR_CLASSIFICATION, model="mlp", records=one)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lora_rank": 2}, "need the model's folder, not a module"),
        ({"tokenizer": None}, "give the tokenizer of a model that is a module"),
        ({"tokenizer": PIECES}, "has no mask token"),
        ({"max_length": 65}, "Expected max_length >= 2 and <= 64, got 65"),
        ({"max_length": 1}, "Expected max_length >= 2 and <= 64, got 1"),
    ],
)
def test_settings_must_fit_the_model(options, line):
    model = transformers.BertForMaskedLM(tiny.bert_config(len(WORDS)))
    with pytest.raises(ValueError, match=line):
        prepare(task=Task.MASKED_LM, model=model, records=text_records(), **{"tokenizer": WORDS, **options})


def test_tokenizer_must_fit_the_model():
    model = transformers.BertForMaskedLM(tiny.bert_config(50))
    with pytest.raises(ValueError, match=f"the tokenizer has {len(WORDS)} tokens and the model 50 embeddings"):
        prepare(task=Task.MASKED_LM, model=model, tokenizer=WORDS, records=text_records())


def test_held_out_records_need_the_same_labels_and_features():
    prepared = prepared_for("tabular", rows())
    with pytest.raises(ValueError, match=r"has label_names \['yes', 'no'\] and the training records have"):
        prepared.on(dataclasses.replace(rows(), label_names=("yes", "no")))
    with pytest.raises(ValueError, match=r"has feature_names .* they must be the same, in the same order"):
        prepared.on(dataclasses.replace(rows(), feature_names=("z", "y", "x")))
    assert len(prepared.on(rows().take([1, 2])).records) == 2


def test_unreadable_image_is_refused(tmp_path, images):
    (tmp_path / "broken.png").write_bytes(b"no image")
    broken = dataclasses.replace(images, images=[tmp_path / "broken.png", *images.images[1:]])
    prepared = prepare(task=Task.IMAGE_CLASSIFICATION, model="small-cnn", records=broken)
    with pytest.raises(ValueError, match=r"broken\.png is not a readable image"):
        prepared.dataset[0]
