"""What PrivateTrainer logs, and how it evaluates."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
import transformers
from transformers import DataCollatorWithPadding

from dpoptim.integrations.hugging_face import PrivacyArguments
from tests.integrations.hugging_face.cases import (
    CALIBRATED,
    WORDS,
    class_trainer,
    classifier,
    labelled,
    masked_trainer,
    training_args,
    unseen,
)

# -- the log -------------------------------------------------------------------------------------------------------


class Spy(transformers.TrainerCallback):
    """Everything that callbacks (TensorBoard is one) are given."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append(dict(logs))


def test_nothing_of_the_training_loss_is_logged(tmp_path):
    spy = Spy()
    trainer = class_trainer(tmp_path, callbacks=[spy], logging_steps=1, save_strategy="steps", save_steps=2)
    output = trainer.train()
    saved = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    for logged in (spy.logged, trainer.state.log_history, saved["log_history"]):
        assert len(logged) >= 4
        for entry in logged:
            assert not {"loss", "grad_norm", "train_loss", "total_flos", "not_private_loss"} & entry.keys()
    assert math.isnan(output.training_loss)
    assert "train_loss" not in output.metrics
    assert trainer.state.total_flos == 0
    assert float(trainer._tr_loss) == 0.0
    assert trainer._total_loss_scalar == 0.0


def test_epsilon_so_far_rises_to_the_plans(tmp_path):
    trainer = class_trainer(tmp_path, privacy=CALIBRATED, max_steps=5, logging_steps=1)
    trainer.train()
    spent = [entry["epsilon"] for entry in trainer.state.log_history if "epsilon" in entry]
    assert len(spent) == 5
    assert all(one < other for one, other in itertools.pairwise(spent))
    assert spent[-1] == pytest.approx(trainer.plan.epsilon())
    assert spent[1] == pytest.approx(trainer.plan.replace(steps=2).epsilon())
    assert trainer.plan.statement().count("ε") or "epsilon" in trainer.plan.statement()
    correlated = PrivacyArguments(epsilon=8.0, delta=1e-3, sampling="shuffled", noise="buffered-toeplitz:1")
    trainer = class_trainer(tmp_path, privacy=correlated, max_steps=5, logging_steps=1)
    trainer.train()
    spent = [entry["epsilon"] for entry in trainer.state.log_history if "epsilon" in entry]
    assert spent == [trainer.plan.epsilon()] * 5


def test_released_norms_and_the_debug_loss_are_asked_for(tmp_path):
    privacy = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, log_norms=True, debug_loss=True)
    trainer = class_trainer(tmp_path, privacy=privacy, logging_steps=1)
    output = trainer.train()
    steps = [entry for entry in trainer.state.log_history if "epsilon" in entry]
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    level = trainer.plan.noise_multiplier * trainer.plan.clip_norm / trainer.plan.batch_size * math.sqrt(elements)
    assert steps[0]["expected_noise_norm"] == pytest.approx(level)  # the scale of the first step is 1
    for entry in steps:
        assert 0.9 < entry["released_gradient_norm"] / entry["expected_noise_norm"] < 1.1
        assert 0.3 < entry["not_private_loss"] < 3.0
        assert not {"loss", "grad_norm"} & entry.keys()
    assert 0.3 < output.training_loss < 3.0


# -- evaluation ----------------------------------------------------------------------------------------------------


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def test_evaluation_is_the_stock_one_and_leaves_training_alone(tmp_path):
    held_out = unseen(7)
    trainer = class_trainer(tmp_path, eval_dataset=held_out, compute_metrics=accuracy, eval_steps=1, max_steps=3)
    trainer.create_optimizer()
    trainer.model.eval()
    with torch.enable_grad():
        found = trainer.evaluate()
        predicted = trainer.predict(held_out)
    assert trainer.private_optimizer.mechanism.counts_not_private.examples == 0
    args = training_args(tmp_path)
    stock = transformers.Trainer(
        classifier(), args, eval_dataset=held_out, processing_class=WORDS, compute_metrics=accuracy
    )
    for name, value in stock.evaluate().items():
        if name in ("eval_loss", "eval_accuracy", "epoch"):
            assert found[name] == pytest.approx(value), name
    assert (predicted.predictions == stock.predict(held_out).predictions).all()


def test_evaluation_leaves_the_random_numbers_of_training_alone(tmp_path):
    trainer = masked_trainer(tmp_path)
    trainer.eval_dataset = [WORDS("the fox " * number) for number in (2, 3)]
    before = torch.get_rng_state()
    trainer.evaluate()  # draws masks
    assert torch.equal(torch.get_rng_state(), before)


def test_choosing_by_scores_is_warned_about(tmp_path):
    with pytest.warns(UserWarning, match="the guarantee does not cover"):
        trainer = class_trainer(
            tmp_path, eval_dataset=unseen(4), eval_strategy="steps", eval_steps=2, save_strategy="steps",
            save_steps=2, load_best_model_at_end=True,
        )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None


def test_the_model_is_its_own_again_after_training(tmp_path):
    trainer = class_trainer(tmp_path, max_steps=1)
    trainer.train()
    batch = DataCollatorWithPadding(WORDS)(labelled()[:3])
    trainer.model(**batch).loss.backward()
    assert trainer.model.classifier.weight.grad is not None
