"""Models by name: the right class, the same weights for the same seed, and one line per failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import dpoptim
from dpoptim.app import RecordKind, Records, load_model, load_tokenizer, prepare
from dpoptim.app.models.loading import SmallCNN, load_pixel_scale, task_of_model
from dpoptim.clipping import clipped_sum
from dpoptim.integrations.losses import Task
from tests.app import tiny
from tests.clipping.one_at_a_time import clipped_sum_one_at_a_time

WORDS, PIECES = tiny.wordpiece(), tiny.bytepair()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(tiny.bert_config(len(WORDS)))
    return tiny.saved(tmp_path_factory.mktemp("bert"), model, WORDS)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(tiny.gpt2_config(len(PIECES)))
    return tiny.saved(tmp_path_factory.mktemp("gpt2"), model, PIECES)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return tiny.saved(tmp_path_factory.mktemp("vit"), transformers.ViTForImageClassification(tiny.vit_config()))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the hub fail at once."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def texts(labelled: bool = False) -> Records:
    labels = np.array([name == "privacy" for name in tiny.LABELS], np.int64) if labelled else None
    names = ("animal", "privacy") if labelled else ()
    return Records(kind=RecordKind.TEXT, source="memory", texts=tiny.TEXTS, labels=labels, label_names=names)


def same(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_weights_are_loaded_from_a_folder(bert, gpt2):
    masked = load_model(Task.MASKED_LM, bert)
    assert type(masked).__name__ == "BertForMaskedLM"
    assert same(masked, transformers.BertForMaskedLM.from_pretrained(bert))
    causal = load_model(Task.CAUSAL_LM, Path(gpt2))
    assert type(causal).__name__ == "GPT2LMHeadModel"
    assert {p.dtype for p in causal.parameters()} == {torch.float32}
    assert load_tokenizer(bert)("the dog")["input_ids"] == WORDS("the dog")["input_ids"]


def test_new_weights_come_from_the_seed_alone(bert):
    def load(**options: Any) -> nn.Module:
        return load_model(Task.TEXT_CLASSIFICATION, bert, num_labels=3, **options)

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = load(seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(6)
    assert same(first, load(seed=1))
    assert not same(first, load(seed=2))
    scratch = load(seed=1, from_scratch=True)
    table = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(scratch.state_dict()[table], first.state_dict()[table])
    assert same(scratch, load(seed=1, from_scratch=True))


def test_head_is_replaced_for_different_labels(vit, bert):
    model: Any = load_model(Task.IMAGE_CLASSIFICATION, vit, num_labels=5, label_names=["a", "b", "c", "d", "e"])
    assert model.classifier.out_features == 5
    assert model.config.id2label[4] == "e"
    text: Any = load_model(Task.TEXT_CLASSIFICATION, bert, num_labels=3)
    assert text.classifier.out_features == 3


def test_built_in_models():
    mlp = load_model(Task.TABULAR_CLASSIFICATION, "mlp", columns=7, num_labels=3)
    assert [type(layer).__name__ for layer in mlp.children()] == ["Linear", "ReLU", "Linear"]
    assert mlp(torch.zeros(2, 7)).shape == (2, 3)
    cnn = load_model(Task.IMAGE_CLASSIFICATION, "small-cnn", num_labels=4, seed=3)
    assert isinstance(cnn, SmallCNN)
    assert cnn(torch.zeros(2, 3, 8, 8)).shape == (2, 4)
    assert same(cnn, load_model(Task.IMAGE_CLASSIFICATION, "small-cnn", num_labels=4, seed=3))
    with pytest.raises(ValueError, match="model='mlp' does not do image-classification"):
        load_model(Task.IMAGE_CLASSIFICATION, "mlp", num_labels=4)
    with pytest.raises(ValueError, match="model='some/bert' does not do tabular-classification"):
        load_model(Task.TABULAR_CLASSIFICATION, "some/bert", columns=2, num_labels=4)
    with pytest.raises(ValueError, match="the built-in mlp needs the number of features"):
        load_model(Task.TABULAR_CLASSIFICATION, "mlp", num_labels=4)
    with pytest.raises(ValueError, match="lora_rank=2 is for pretrained models"):
        load_model(Task.TABULAR_CLASSIFICATION, "mlp", columns=2, num_labels=4, lora_rank=2)
    with pytest.raises(ValueError, match="needs at least two labels"):
        load_model(Task.TABULAR_CLASSIFICATION, "mlp", columns=2, num_labels=1)


@pytest.mark.parametrize("task", [Task.MASKED_LM, Task.CAUSAL_LM, Task.TEXT_CLASSIFICATION])
def test_lora_trains_only_its_factors_and_the_head(task, bert, gpt2):
    folder = gpt2 if task is Task.CAUSAL_LM else bert
    prepared = prepare(task=task, model=folder, records=texts(task.is_classification), lora_rank=2, bucket=8)
    trainable = [name for name, p in prepared.model.named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in trainable)
    heads = [name for name in trainable if "lora_" not in name]
    assert bool(heads) == task.is_classification
    assert all("classifier" in name for name in heads)
    if not task.is_classification:
        assert prepared.targets_only
    for name, parameter in prepared.model.named_parameters():
        if "lora_B" in name:  # zero at the start, which would leave lora_A without a gradient
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    batch = prepared.at_step(prepared.collate([prepared.dataset[i] for i in range(7)]), 0)
    expected, norms = clipped_sum_one_at_a_time(prepared.model, prepared.loss_per_example, batch, 7, 0.5, None)
    sums, found = clipped_sum(prepared.model, prepared.loss_per_example, batch, clip_norm=0.5)
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-5)
    for name in trainable:
        torch.testing.assert_close(sums[name], expected[name], rtol=1e-3, atol=1e-5)


def test_lora_on_an_image_model(vit):
    model = load_model(Task.IMAGE_CLASSIFICATION, vit, num_labels=3, lora_rank=2)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("classifier" in name for name in trainable)
    assert any("attention" in name and "lora_A" in name for name in trainable)
    assert not any("classifier" in name and "lora" in name for name in trainable)


def test_bad_lora_rank_is_refused(bert):
    with pytest.raises(ValueError, match="lora_rank=0 cannot be used"):
        load_model(Task.MASKED_LM, bert, lora_rank=0)


@pytest.mark.parametrize("task", [Task.MASKED_LM, Task.CAUSAL_LM])
def test_prepare_from_a_folder(task, bert, gpt2):
    prepared = prepare(task=task, model=gpt2 if task is Task.CAUSAL_LM else bert, records=texts(), bucket=8)
    plan = dpoptim.PrivacyPlan(num_examples=7, batch_size=3, steps=2, noise_multiplier=1.0)
    loader = dpoptim.private_loader(prepared.dataset, plan, collate_fn=prepared.collate)
    optimizer = dpoptim.scale_then_privatize(prepared.model, plan)
    for batch in prepared.batches(loader):
        prepared.loss_per_example(prepared.model, batch).sum().backward()
        optimizer.step()
    assert prepared.max_length == 64


def test_pixel_scale_comes_from_the_preprocessor(vit, tmp_path):
    assert load_pixel_scale(vit) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 2.0, 3.0]}')
    assert load_pixel_scale(str(tmp_path)) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))


# -- one line for each failure ----------------------------------------------------------------------------------------


def line(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_incomplete_folder_is_refused(tmp_path, bert):
    with pytest.raises(ValueError, match=r"cannot be loaded \(.* config\.json") as error:
        load_model(Task.MASKED_LM, tmp_path)
    line(error)
    tiny.bert_config(len(WORDS)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be loaded \(.*no file named model\.safetensors") as error:
        load_model(Task.MASKED_LM, tmp_path)
    line(error)
    assert type(load_model(Task.MASKED_LM, tmp_path, from_scratch=True)).__name__ == "BertForMaskedLM"
    with pytest.raises(ValueError, match="has no vocabulary; save the tokenizer in the model's folder") as error:
        load_tokenizer(tmp_path)
    line(error)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_model(Task.MASKED_LM, tmp_path)
    line(error)


def test_missing_folder_is_refused(tmp_path):
    for load in (lambda name: load_model(Task.MASKED_LM, name), load_tokenizer):
        with pytest.raises(ValueError, match="does not exist"):
            load(tmp_path / "missing")
        with pytest.raises(ValueError, match="does not exist"):
            load("~/no such folder")


def test_model_for_a_different_task_is_refused(vit):
    with pytest.raises(ValueError, match="is a 'vit', and transformers has no AutoModelForMaskedLM for it") as error:
        load_model(Task.MASKED_LM, vit)
    line(error)


@pytest.mark.usefixtures("offline")
def test_encoder_decoder_models_are_referred_to_the_trainer(tmp_path):
    for name, architecture in (("t5", "T5ForConditionalGeneration"), ("bart", "BartForConditionalGeneration")):
        config = {"model_type": name, "architectures": [architecture]}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"t5' \(T5For.*encoder–decoder model, which PrivateTrainer") as error:
        task_of_model(str(tmp_path / "t5"))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"no AutoModelForCausalLM for.*it is an encoder–decoder model"):
        load_model(Task.CAUSAL_LM, tmp_path / "t5", from_scratch=True)
    with pytest.raises(ValueError, match=r"PrivateTrainer.*or set task \(--task\) to masked-lm$"):
        task_of_model(str(tmp_path / "bart"))


def test_unknown_hub_name_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # otherwise transformers retries for a minute
    for load in (lambda name: load_model(Task.MASKED_LM, name), load_tokenizer):
        with pytest.raises(ValueError, match="the Hugging Face hub did not provide it") as error:
            load("nobody/no-such-model")
        assert "does not exist" not in str(error.value), "the hub was not reached"
        line(error)
    with pytest.raises(ValueError, match=r"model='mpl' .* did you mean mlp\?$"):
        task_of_model("mpl")


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_missing_packages_are_named(package, bert, monkeypatch):
    model = load_model(Task.MASKED_LM, bert)
    monkeypatch.setitem(sys.modules, package, None)
    expected = rf"needs the package {package}; run: pip install 'dpoptim\[train\]'"
    if package == "peft":
        with pytest.raises(ValueError, match=expected):
            load_model(Task.MASKED_LM, bert, lora_rank=2)
    else:
        with pytest.raises(ValueError, match=expected):
            load_model(Task.MASKED_LM, bert)
        with pytest.raises(ValueError, match=expected):
            load_tokenizer(bert)
    assert isinstance(model, nn.Module)
