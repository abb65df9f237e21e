"""Ready plans and losses for PrivateTrainer, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DataCollatorWithPadding, TrainingArguments

import dpoptim
from dpoptim.app import add_lora
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from dpoptim.integrations.losses import Task
from dpoptim.integrations.losses.batch_losses import BatchLosses, losses_for
from tests.app import tiny
from tests.integrations.hugging_face_cases import (
    PRIVACY,
    TEXTS,
    WORDS,
    causal_model,
    classifier,
    labelled,
    masked_model,
    training_args,
)

# -- ready plans, optimizers and losses ----------------------------------------------------------------------------


def test_a_ready_plan_and_optimizer(tmp_path):
    plan = dpoptim.PrivacyPlan(num_examples=24, batch_size=8, steps=3, noise_multiplier=1.0, delta=1e-3)
    trainer: Any = PrivateTrainer(
        classifier(), training_args(tmp_path, max_steps=-1), None, labelled(), processing_class=WORDS, plan=plan
    )
    trainer.train()
    assert trainer.plan is plan
    assert trainer.private_optimizer.mechanism.step == 3
    model = classifier()
    plan = plan.replace()
    optimizer = dpoptim.joint_moments(model, plan, 1e-3)
    args = training_args(tmp_path, max_steps=-1)
    trainer = PrivateTrainer(
        model, args, None, labelled(), processing_class=WORDS, plan=plan, optimizers=(optimizer, None)
    )
    trainer.train()
    assert optimizer.mechanism.step == 3
    assert isinstance(trainer.plan.release, dpoptim.JointMoments)


def test_losses_by_kind_of_label():
    batch = dict(DataCollatorWithPadding(WORDS)(labelled()[:3]))
    for labels, changes in (
        (torch.tensor([0.5, 1.0, -1.0]), {"num_labels": 1}),
        (torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), {"problem_type": "multi_label_classification"}),
        (torch.tensor([1, 0, 1]), {}),
    ):
        model = classifier(**changes).eval()
        found = losses_for(model)(model, {**batch, "labels": labels})
        for j in range(3):
            alone = {name: value[j : j + 1] for name, value in {**batch, "labels": labels}.items()}
            assert found[j].item() == pytest.approx(model(**alone).loss.item(), abs=1e-5)


def test_tasks_are_found_by_class():
    assert losses_for(masked_model()) == BatchLosses(task=Task.MASKED_LM, targets_only=True)
    assert losses_for(causal_model()) == BatchLosses(task=Task.CAUSAL_LM, targets_only=True)
    seen = losses_for(transformers.ViTForImageClassification(tiny.vit_config()))
    assert seen == BatchLosses(task=Task.IMAGE_CLASSIFICATION)
    adapted = losses_for(add_lora(classifier(), Task.TEXT_CLASSIFICATION, rank=2))
    assert adapted == BatchLosses(task=Task.TEXT_CLASSIFICATION)
    with pytest.raises(ValueError, match="set task="):
        losses_for(transformers.BertForQuestionAnswering(tiny.bert_config(len(WORDS))))
    with pytest.raises(ValueError, match="task='nonsense'"):
        losses_for(masked_model(), "nonsense")
    with pytest.raises(ValueError, match=r"reads both directions.*use masked-lm"):
        losses_for(masked_model(), "causal-lm")


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": True}, "changes clipping"),
        ({"torch_compile": True}, "torch_compile"),
        ({"_n_gpu": 2}, "CUDA_VISIBLE_DEVICES"),
        ({"deepspeed": {"stage": 2}}, "deepspeed"),
        ({"fsdp": "full_shard"}, "fsdp"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"train_sampling_strategy": "group_by_length"}, "drawn as the privacy plan says"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"skip_memory_metrics": False}, "skip_memory_metrics"),
        ({"include_num_input_tokens_seen": "all"}, "private tokens"),
        ({"optim": "adafactor"}, "variant="),
        ({"optim_args": "a=1"}, "optim_args"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
        ({"max_grad_norm": 0.0}, "clip_norm"),
        ({"per_device_train_batch_size": 100}, "exceeds the 24 examples"),
    ],
)
def test_arguments_that_are_refused(tmp_path, changes, message):
    args = training_args(tmp_path)
    args._setup_devices  # noqa: B018  settles n_gpu
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=message) as refusal:
        PrivateTrainer(classifier(), args, None, labelled(), processing_class=WORDS, privacy=PRIVACY)
    assert "\n" not in str(refusal.value)


def test_calls_that_are_refused(tmp_path):
    model, data = classifier(), labelled()
    args = training_args(tmp_path)
    plan = dpoptim.PrivacyPlan(num_examples=24, batch_size=6, steps=4, noise_multiplier=1.0)

    def refused(message: str, **changes: Any) -> None:
        call: dict[str, Any] = {"model": model, "args": args, "train_dataset": data, "privacy": PRIVACY, **changes}
        with pytest.raises(ValueError, match=message):
            PrivateTrainer(processing_class=WORDS, **call)

    refused("privacy=None", privacy=None)
    refused("one of the two", privacy=PrivacyArguments())
    refused("one of the two", privacy=PrivacyArguments(epsilon=1.0, noise_multiplier=1.0))
    refused("one of the two", plan=plan)
    refused("max_steps=4 and the plan has 5", plan=plan.replace(steps=5), privacy=None)
    refused("no noise_multiplier", plan=plan.replace(noise_multiplier=None), privacy=None)
    refused("loss_per_example=", compute_loss_func=lambda *found, **named: None)
    refused("model=None", model=None, model_init=classifier)
    refused("made by a function of dpoptim", optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None))
    refused("without a length", train_dataset=iter(data))
    refused("empty", train_dataset=[])
    refused("declare one", privacy=PrivacyArguments(epsilon=1.0, adjacency="add_remove"))
    refused("Expected epsilon > 0", privacy=PrivacyArguments(epsilon=-1.0))
    wrong: list[tuple[dict[str, Any], str]]
    wrong = [({"variant": "magic"}, "variant='magic'"), ({"adjacency": "near"}, "adjacency='near'")]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            PrivacyArguments(**changes)
    with pytest.raises(ValueError, match="train_dataset=None"):
        _ = PrivateTrainer(model, args, processing_class=WORDS, privacy=PRIVACY).plan


def test_losses_that_mix_examples_are_refused(tmp_path):
    def stock(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(**batch).loss[None]

    def averaged(model: nn.Module, batch: Any) -> torch.Tensor:
        labels = batch.pop("labels")
        return nn.functional.cross_entropy(model(**batch).logits, labels)

    for loss, message in ((stock, "mixes examples"), (averaged, "one loss an example")):
        trainer = PrivateTrainer(
            classifier(), training_args(tmp_path), None, labelled(), processing_class=WORDS, privacy=PRIVACY,
            loss_per_example=loss,
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            trainer.train()
    unlabelled = [WORDS(text) for text in TEXTS]
    trainer = PrivateTrainer(
        classifier(), training_args(tmp_path), None, unlabelled, processing_class=WORDS, privacy=PRIVACY
    )
    with pytest.raises(ValueError, match="has no labels"):
        trainer.train()


def test_a_loss_that_training_would_not_call_is_refused(tmp_path):
    class Averaging(PrivateTrainer):
        def compute_loss(self, model: Any, inputs: Any, **rest: Any) -> Any:  # type: ignore[override]
            return model(**inputs).loss

    class Stepping(PrivateTrainer):
        def training_step(self, *args: Any, **rest: Any) -> Any:
            return super().training_step(*args, **rest)

    for kind, name in ((Averaging, "compute_loss"), (Stepping, "training_step")):
        with pytest.raises(ValueError, match=f"{name} is overridden, .*; pass loss_per_example= instead"):
            kind(classifier(), training_args(tmp_path), None, labelled(), processing_class=WORDS, privacy=PRIVACY)


def test_a_failure_before_the_first_release_leaves_the_object_as_it_was(tmp_path):
    trainer: Any = PrivateTrainer(
        classifier(), training_args(tmp_path), None, labelled(), processing_class=WORDS, privacy=PRIVACY
    )
    own = trainer.loss_per_example

    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    trainer.loss_per_example = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    trainer.loss_per_example = own
    trainer.train()
    assert trainer.private_optimizer.mechanism.step == 4


def test_it_is_imported_when_it_is_asked_for():
    program = (
        "import sys, dpoptim.app; assert 'transformers' not in sys.modules;"
        "sys.modules['transformers'] = None\n"
        "try:\n    dpoptim.app.PrivateTrainer\n"
        "except ImportError as error:\n    assert 'pip install transformers' in str(error)\n"
        "else:\n    raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_arguments_are_parsed_beside_the_stock_ones():
    parser = transformers.HfArgumentParser((TrainingArguments, PrivacyArguments))
    args, privacy = parser.parse_args_into_dataclasses(
        ["--output_dir", "out", "--epsilon", "8", "--delta", "1e-6", "--variant", "post_processing", "--use_cpu"]
    )
    assert privacy == PrivacyArguments(epsilon=8.0, delta=1e-6, variant="post_processing")
    assert args.output_dir == "out"
    assert "--noise_multiplier" in parser.format_help()


# -- the page ------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "hugging-face.md"


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [WORDS(text) for text in TEXTS]
    names: dict[str, Any] = {"model": masked_model(), "tokenizer": WORDS, "dataset": rows}
    names["held_out"] = [WORDS("the fox " * number) for number in (2, 3)]
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(block, names)
    assert names["plan"].steps == 4
    assert len(list((tmp_path / "out.secret").glob("*.key"))) == 1
    assert not list((tmp_path / "out").rglob("*.key"))


def test_the_page_names_every_setting():
    page = PAGE.read_text()
    for part in dataclasses.fields(PrivacyArguments):
        assert f"`{part.name}`" in page, part.name
