"""Each example's loss equals what the model computes for that example alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithPadding

from dpoptim.app import add_lora
from dpoptim.clipping import check_example_independence
from dpoptim.integrations.losses import BatchLosses, Task, check_is_causal, losses_for
from tests.app import tiny
from tests.integrations.hugging_face.cases import (
    WORDS,
    bart,
    causal_model,
    classifier,
    labelled,
    masked_model,
    t5,
    tagger,
)


def adapted_t5() -> Any:
    return get_peft_model(t5(), LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False, lora_dropout=0.0))


def batch(classes: int, positions: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (5, 6), generator=generator)
    lengths = torch.tensor([6, 5, 4, 6, 3])
    labels = torch.randint(1, classes, (5, positions), generator=generator)
    labels = labels.masked_fill(torch.arange(positions) >= (lengths * positions // 6)[:, None], -100)
    return {"input_ids": ids, "attention_mask": (torch.arange(6) < lengths[:, None]).long(), "labels": labels}


@pytest.mark.parametrize(
    ("make", "task", "classes", "positions"),
    [(tagger, None, 4, 6), (t5, None, 50, 4), (adapted_t5, None, 50, 4), (bart, "seq2seq-lm", 50, 4)],
)
def test_losses_equal_the_models_own(make, task, classes, positions):
    model, given = make().eval(), batch(classes, positions)
    losses = losses_for(model, task)
    found = losses(model, given)
    for j in range(5):
        alone = {key: value[j : j + 1] for key, value in given.items()}
        torch.testing.assert_close(found[j], model(**alone).loss, rtol=1e-5, atol=1e-6)
    check_example_independence(model, losses, given)
    given["labels"][2] = -100
    assert losses(model, given)[2] == 0, "an example without labels has loss 0"


def test_given_decoder_inputs_are_used():
    model, given = t5().eval(), batch(50, 4)
    losses = losses_for(model)
    own = losses(model, given)
    shifted = model._shift_right(given["labels"])
    torch.testing.assert_close(losses(model, {**given, "decoder_input_ids": shifted}), own)
    assert not torch.allclose(losses(model, {**given, "decoder_input_ids": shifted.flip(1)}), own)


def test_classifier_losses_follow_the_problem_type():
    given = dict(DataCollatorWithPadding(WORDS)(labelled()[:3]))
    for labels, changes in (
        (torch.tensor([0.5, 1.0, -1.0]), {"num_labels": 1}),
        (torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), {"problem_type": "multi_label_classification"}),
        (torch.tensor([1, 0, 1]), {}),
    ):
        model = classifier(**changes).eval()
        found = losses_for(model)(model, {**given, "labels": labels})
        for j in range(3):
            alone = {name: value[j : j + 1] for name, value in {**given, "labels": labels}.items()}
            assert found[j].item() == pytest.approx(model(**alone).loss.item(), abs=1e-5)


def test_the_task_follows_from_the_class():
    assert losses_for(masked_model()) == BatchLosses(task="masked-lm", targets_only=True)
    assert losses_for(causal_model()) == BatchLosses(task="causal-lm", targets_only=True)
    assert losses_for(tagger()) == BatchLosses(task="token-classification")
    vision = transformers.ViTForImageClassification(tiny.vit_config())
    assert losses_for(vision) == BatchLosses(task="image-classification")
    assert losses_for(add_lora(classifier(), Task.TEXT_CLASSIFICATION, rank=2)).task == "text-classification"
    with pytest.raises(ValueError, match=r"has no known task\. Set task="):
        losses_for(transformers.BertForQuestionAnswering(tiny.bert_config(len(WORDS))))
    with pytest.raises(ValueError, match=r"BartForConditionalGeneration does several tasks.*seq2seq-lm"):
        losses_for(bart())
    with pytest.raises(ValueError, match="Expected task to be one of 'masked-lm'"):
        losses_for(masked_model(), "nonsense")


@pytest.mark.parametrize(("make", "collator"), [(tagger, "TokenClassification"), (t5, "Seq2Seq")])
def test_a_batch_without_labels_names_a_collator(make, collator):
    model, given = make(), batch(4)
    del given["labels"]
    with pytest.raises(ValueError, match=f"has no labels, only input_ids, attention_mask\\. .*{collator}"):
        losses_for(model)(model, given)


def test_an_encoder_is_not_causal():
    with pytest.raises(ValueError, match=r"BertForMaskedLM reads in both directions.* Use masked-lm"):
        losses_for(masked_model(), "causal-lm")
    with pytest.raises(ValueError, match="BertLMHeadModel reads in both directions"):
        check_is_causal(transformers.BertLMHeadModel(tiny.bert_config(len(WORDS))))
    check_is_causal(transformers.BertLMHeadModel(tiny.bert_config(len(WORDS), is_decoder=True)))
    for model in tiny.causal_models(len(WORDS)).values():
        check_is_causal(model)
    check_is_causal(transformers.BartForCausalLM(bart().config))
