"""PrivateTrainer on tiny models: what it computes, step by step."""

from __future__ import annotations

import copy
import math
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

import dpoptim
from dpoptim.app import add_lora
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from dpoptim.integrations.hugging_face.arguments import plan_for
from dpoptim.integrations.losses import BatchLosses, Task
from dpoptim.integrations.named_settings import CLIP_NORM
from tests.app import tiny
from tests.integrations.hugging_face.cases import (
    CALIBRATED,
    EXACT,
    PIECES,
    PRIVACY,
    TEXTS,
    WORDS,
    causal_model,
    class_trainer,
    classifier,
    labelled,
    masked_model,
    masked_trainer,
    training_args,
    unseen,
    weights,
)

# -- what is computed ----------------------------------------------------------------------------------------------


def one_step_by_hand(model: Any, batches: list[dict[str, Any]], lr: float) -> dict[str, torch.Tensor]:
    """SGD on the mean of the losses that transformers computes for each example ALONE."""
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
    return weights(model)


def fixed_masks() -> list[dict[str, Any]]:
    """Masked examples of different lengths and numbers of targets, one of them with none."""
    collator = DataCollatorForLanguageModeling(WORDS, mlm_probability=0.4, seed=3)
    found = []
    for text in TEXTS[:6]:
        row = collator([WORDS(text)])
        found.append({name: values[0].tolist() for name, values in row.items()})
    found[3]["labels"] = [-100] * len(found[3]["labels"])
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [fill[name]] * (width - len(row[name])) for row in rows]) for name in rows[0]
    }


def exact_case(kind: str) -> tuple[Any, list[Any], Any, list[dict[str, Any]]]:
    """A model, its examples and collator, and each example as a batch of its own with labels."""
    if kind == "masked-lm":
        rows = fixed_masks()
        alone = [padded([row]) for row in rows if any(label != -100 for label in row["labels"])]
        return masked_model(), rows, padded, alone
    if kind == "causal-lm":
        rows = [PIECES(text) for text in TEXTS[:6]]
        collator = DataCollatorForLanguageModeling(PIECES, mlm=False)
        return causal_model(), rows, collator, [dict(collator([row])) for row in rows]
    rows = labelled()[:6]
    collator = DataCollatorWithPadding(WORDS)
    return classifier(), rows, collator, [dict(collator([dict(row)])) for row in rows]


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm", "classification"])
@pytest.mark.parametrize("parts", [1, 3])
def test_one_step_is_the_mean_of_losses_of_each_example_alone(tmp_path, kind, parts):
    """Without noise and clipping; however a step is cut. A mean over the batch's tokens would not give this."""
    model, rows, collator, alone = exact_case(kind)
    twin = copy.deepcopy(model)
    lr = 0.1 * len(alone) / len(rows)  # one without targets counts in the divisor, with a gradient of 0
    args = training_args(
        tmp_path, per_device_train_batch_size=6 // parts, gradient_accumulation_steps=parts, max_steps=1,
        learning_rate=0.1, adam_beta1=0.0,
    )  # fmt: skip
    trainer: Any = PrivateTrainer(model, args, collator, rows, privacy=EXACT)
    trainer.train()
    expected = one_step_by_hand(twin, alone, lr)
    for name, value in weights(model).items():
        assert torch.allclose(value, expected[name], atol=2e-6), name


def test_clipping_is_of_each_example_and_of_no_smaller_loss(tmp_path):
    """Each of 6 examples is clipped to 1e-3 on its own, whatever the number of parts: the step is at most that long."""
    lengths = []
    for parts in (1, 3):
        model, rows, collator, _ = exact_case("classification")
        rows = [{**row, "labels": 0} for row in rows]  # gradients that point the same way
        before = weights(model)
        args = training_args(
            tmp_path, per_device_train_batch_size=6 // parts, gradient_accumulation_steps=parts, max_steps=1,
            learning_rate=1.0, adam_beta1=0.0, max_grad_norm=1e-3,
        )  # fmt: skip
        privacy = PrivacyArguments(noise_multiplier=0.0, variant="dp_sgd", sampling="shuffled")
        trainer: Any = PrivateTrainer(model, args, collator, rows, privacy=privacy)
        trainer.train()
        counts = trainer.private_optimizer.mechanism.counts_not_private
        assert (counts.examples, counts.clipped) == (6, 6)
        lengths.append(torch.cat([(value - before[name]).flatten() for name, value in weights(model).items()]).norm())
    assert torch.allclose(lengths[0], lengths[1], rtol=1e-4)
    assert 0.5e-3 < float(lengths[0]) <= 1e-3 * (1 + 1e-5)


def test_the_plan_follows_from_the_arguments(tmp_path):
    model = classifier()

    def plan(examples: int = 100, privacy: PrivacyArguments = CALIBRATED, **changes: Any) -> dpoptim.PrivacyPlan:
        return plan_for(privacy, training_args(tmp_path, **changes), examples=examples, model=model)

    assert (plan().num_examples, plan().batch_size, plan().steps, plan().clip_norm) == (100, 6, 4, CLIP_NORM)
    assert plan(max_grad_norm=0.5).clip_norm == 0.5
    assert plan().epsilon(delta=1e-3) == pytest.approx(8.0, abs=1e-3)
    assert plan().sampling == dpoptim.Poisson()
    by_epochs = plan(max_steps=-1, num_train_epochs=3)
    assert by_epochs.steps == 50
    shuffled = PrivacyArguments(epsilon=8.0, delta=1e-3, sampling="shuffled")
    for examples in (65, 66):  # rounded as `dpoptim train` does it
        assert plan(examples, shuffled, max_steps=-1, num_train_epochs=3).steps == math.ceil(3 * examples / 6) == 33
    for weak in (0.01, 0.5):
        with pytest.raises(ValueError, match="is not below 1/100, one over the number of training"):
            plan(privacy=PrivacyArguments(epsilon=8.0, delta=weak))
    cyclic = PrivacyArguments(epsilon=8.0, delta=1e-3, sampling="cyclic", noise="banded-toeplitz:2")
    assert plan(privacy=cyclic).sampling == dpoptim.CyclicPoisson(bands=2)
    moments = PrivacyArguments(noise_multiplier=1.0, delta=1e-3, variant="joint_moments", sampling="shuffled")
    assert isinstance(plan(privacy=moments).release, dpoptim.JointMoments)
    assert plan(privacy=PrivacyArguments(noise_multiplier=1.0)).delta == 1e-3
    declared = PrivacyArguments(epsilon=8.0, delta=1e-3, adjacency="add_remove", num_examples=50)
    assert plan(99, declared).num_examples == 50


def test_the_optimizer_has_the_arguments_settings(tmp_path):
    trainer = class_trainer(tmp_path, adam_beta1=0.8, adam_beta2=0.99, weight_decay=0.1, learning_rate=3e-3)
    optimizer = trainer.create_optimizer()
    decayed, plain = optimizer.param_groups
    assert (decayed["lr"], decayed["betas"], decayed["weight_decay"]) == (3e-3, (0.8, 0.99), 0.1)
    assert plain["weight_decay"] == 0.0
    assert all(parameter.ndim == 1 for parameter in plain["params"])
    assert optimizer.rule.decoupled
    assert optimizer.rule.eps == 1e-8
    assert type(optimizer.geometry).__name__ == "InverseRoot"
    corrected = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, variant="bias_correction")
    trainer = class_trainer(tmp_path, privacy=corrected)
    level = trainer.plan.noise_multiplier * trainer.plan.clip_norm / trainer.plan.batch_size
    assert trainer.create_optimizer().rule.eps == pytest.approx(level)
    assert class_trainer(tmp_path, privacy=corrected, adam_epsilon=1e-3).create_optimizer().rule.eps == 1e-3


# -- the loop ------------------------------------------------------------------------------------------------------


def test_every_release_belongs_to_a_step_of_the_plan_over_several_epochs(tmp_path):
    """24 examples in batches of 6: four steps an epoch, and evaluation at the end of each."""
    trainer = class_trainer(tmp_path, max_steps=-1, num_train_epochs=2.5, eval_strategy="epoch", eval_dataset=unseen(4))
    assert trainer.plan.steps == 10
    steps: list[int] = []
    trainer.create_optimizer().observers.append(lambda released: steps.append(released.step))
    output = trainer.train()
    assert steps == list(range(10))
    assert output.global_step == trainer.state.global_step == trainer.private_optimizer.mechanism.step == 10
    assert trainer.state.epoch == pytest.approx(2.5)
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated == [4, 8, 10]


def test_empty_poisson_batches_are_steps_of_noise(tmp_path):
    """Batches of one expected example among 24: in 40 steps some are empty, and their placeholder is not counted."""
    seen: list[int] = []

    def spied(model: nn.Module, batch: Any) -> torch.Tensor:
        losses = BatchLosses(task=Task.TEXT_CLASSIFICATION)(model, batch)
        seen.append(len(losses))
        return losses

    args = training_args(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=40)
    trainer: Any = PrivateTrainer(
        classifier(), args, None, labelled(), processing_class=WORDS, privacy=PRIVACY, loss_per_example=spied
    )
    trainer.train()
    assert trainer.private_optimizer.mechanism.step == 40
    assert 0 < trainer.private_optimizer.mechanism.counts_not_private.examples < sum(seen)


def test_micro_batches_bound_what_is_in_memory_and_not_the_step(tmp_path):
    sizes: list[int] = []
    trainer = class_trainer(tmp_path, privacy=EXACT, max_steps=2)
    own = trainer.loss_per_example

    def spied(model: nn.Module, batch: Any) -> torch.Tensor:
        sizes.append(len(batch["input_ids"]))
        return own(model, batch)

    trainer.loss_per_example = spied
    trainer.train()
    assert sizes[-6:] == [2] * 6
    assert max(sizes) == 2, "what is tried before the first step has no more in memory"
    assert trainer.private_optimizer.mechanism.counts_not_private.examples == 12


def test_a_dataset_with_other_columns_and_workers(tmp_path):
    rows = datasets.Dataset.from_list([{**row, "text": "unused", "number": 1.5} for row in labelled()])
    args = training_args(tmp_path, max_steps=2, dataloader_num_workers=1)
    trainer: Any = PrivateTrainer(classifier(), args, None, rows, processing_class=WORDS, privacy=PRIVACY)
    trainer.train()
    assert trainer.private_optimizer.mechanism.step == 2


def test_schedules_advance_once_a_step(tmp_path):
    trainer = class_trainer(tmp_path, lr_scheduler_type="linear", max_steps=4, learning_rate=1.0, logging_steps=1)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.75, 0.5, 0.25, 0.0]) or rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_an_object_trains_once(tmp_path):
    trainer = class_trainer(tmp_path, max_steps=1)
    trainer.train()
    with pytest.raises(ValueError, match="make a new PrivateTrainer"):
        trainer.train()
    with pytest.raises(ValueError, match="spends its own epsilon"):
        trainer.hyperparameter_search()


# -- precision, memory, adapters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [masked_trainer, class_trainer])
def test_bf16_runs_under_autocast_and_keeps_full_weights(tmp_path, make):
    trainer = make(tmp_path, bf16=True, max_steps=2)
    before = weights(trainer.model)
    trainer.train()
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    after = weights(trainer.model)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())


def test_a_model_in_bf16_is_trained_as_it_is(tmp_path):
    trainer = class_trainer(tmp_path, model=classifier().to(torch.bfloat16), max_steps=2, save_strategy="steps")
    before = weights(trainer.model)
    trainer.train()
    assert all(parameter.dtype == torch.bfloat16 for parameter in trainer.model.parameters())
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer.model).items())
    moments = trainer.private_optimizer.state_dict()["state"][0]["second_moment"]
    assert moments.dtype == torch.float32


def test_bf16_is_close_to_full_precision(tmp_path):
    steps = []
    for bf16 in (False, True):
        model, rows, collator, _ = exact_case("causal-lm")
        before = weights(model)
        args = training_args(tmp_path, max_steps=1, learning_rate=0.1, adam_beta1=0.0, bf16=bf16)
        PrivateTrainer(model, args, collator, rows, privacy=EXACT).train()
        steps.append(torch.cat([(value - before[name]).flatten() for name, value in weights(model).items()]))
    assert 0 < float((steps[0] - steps[1]).norm()) < 0.03 * float(steps[0].norm())


def test_gradient_checkpointing_gives_the_same_step(tmp_path):
    found = []
    for checkpointing in (False, True):
        model, rows, collator, _ = exact_case("masked-lm")
        args = training_args(tmp_path, max_steps=1, gradient_checkpointing=checkpointing, adam_beta1=0.0)
        PrivateTrainer(model, args, collator, rows, privacy=EXACT).train()
        found.append(weights(model))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=1e-6), name


def test_lora_trains_its_adapters_alone_and_goes_on_bitwise(tmp_path):
    def model() -> Any:
        return add_lora(classifier(dropout=0.1), Task.TEXT_CLASSIFICATION, rank=2)

    first = model()
    before = weights(first)
    class_trainer(tmp_path, model=first, max_steps=4, save_strategy="steps", save_steps=2).train()
    straight = weights(first)
    changed = {name for name, value in straight.items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name or "classifier" in name for name in changed)
    second = model()
    trainer = class_trainer(tmp_path, model=second, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for name in changed:
        assert torch.equal(weights(second)[name], straight[name]), name


def test_lora_of_a_decoder_in_bf16_with_activation_checkpoints(tmp_path):
    model = add_lora(tiny.causal_models(len(PIECES))["Llama"], Task.CAUSAL_LM, rank=2)
    args = training_args(tmp_path, max_steps=2, bf16=True, gradient_checkpointing=True)
    collator = DataCollatorForLanguageModeling(PIECES, mlm=False)
    trainer: Any = PrivateTrainer(model, args, collator, [PIECES(text) for text in TEXTS], privacy=PRIVACY)
    assert trainer.loss_per_example == BatchLosses(task=Task.CAUSAL_LM, targets_only=True)
    trainer.train()
    assert trainer.private_optimizer.mechanism.step == 2
    assert all(value.abs().sum() > 0 for name, value in model.named_parameters() if "lora_B" in name)
