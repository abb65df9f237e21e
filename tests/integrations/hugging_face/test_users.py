"""PrivateTrainer with users as units: what one step computes, resuming, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import DataCollatorWithPadding

import dpoptim
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from tests.integrations.hugging_face.cases import (
    LABELS,
    TEXTS,
    WORDS,
    assert_equal_weights,
    classifier,
    training_args,
    weights,
)

USERS = [f"person {(place * place) % 13}" for place in range(len(TEXTS))]
COUNT = len(set(USERS))
OF_USERS: dict[str, Any] = {"user_column": "who", "records_per_user": 3}
EXACT = PrivacyArguments(noise_multiplier=0.0, variant="dp_sgd", sampling="shuffled", **OF_USERS)
NOISY = PrivacyArguments(noise_multiplier=0.6, delta=1e-2, **OF_USERS)


def rows() -> list[dict[str, Any]]:
    return [
        {**WORDS(text), "labels": label, "who": user} for text, label, user in zip(TEXTS, LABELS, USERS, strict=True)
    ]


def trainer_of(folder: Path, privacy: Any, dataset: Any = None, **changes: Any) -> Any:
    own = {name: changes.pop(name) for name in list(changes) if name in ("plan", "model")}
    return PrivateTrainer(
        model=own.pop("model", None) or classifier(),
        args=training_args(folder, **changes),
        train_dataset=rows() if dataset is None else dataset,
        processing_class=WORDS,
        privacy=privacy,
        **own,
    )


def user_gradients(model: Any, records: int) -> list[dict[str, torch.Tensor]]:
    """The mean gradient of each user's records, one backward each; a user has at most `records`."""
    collate, found = DataCollatorWithPadding(WORDS), []
    for user in dict.fromkeys(USERS):
        own = [{**row} for row in rows() if row["who"] == user]
        assert len(own) <= records
        model.zero_grad()
        for row in own:
            row.pop("who")
            (model(**collate([row])).loss / len(own)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


@pytest.mark.parametrize("micro_batch", [1, 4, 50])
@pytest.mark.parametrize("kind", ["list", "Dataset"])
def test_one_step_clips_the_mean_gradient_of_each_user(tmp_path, micro_batch, kind):
    most = max(USERS.count(user) for user in USERS)
    model, clip_norm = classifier(), 0.2
    gradients = user_gradients(copy.deepcopy(model), most)
    norms = [sum(float(g.square().sum()) for g in own.values()) ** 0.5 for own in gradients]
    assert min(norms) < clip_norm < max(norms)
    plan = dpoptim.PrivacyPlan(
        num_examples=COUNT, batch_size=COUNT, steps=1, clip_norm=clip_norm, noise_multiplier=0.0, unit="user",
        records_per_user=most,
    )  # fmt: skip
    expected = weights(model)
    for own, norm in zip(gradients, norms, strict=True):
        for name, gradient in own.items():
            expected[name] -= 0.1 * min(1.0, clip_norm / norm) * gradient / COUNT
    dataset: Any = rows() if kind == "list" else datasets.Dataset.from_list(rows())
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1)
    args = training_args(
        tmp_path, per_device_train_batch_size=micro_batch, max_steps=1, remove_unused_columns=kind == "list"
    )
    privacy = PrivacyArguments(user_column="who")
    collate = DataCollatorWithPadding(WORDS)
    trainer: Any = PrivateTrainer(
        model, args, collate, dataset, privacy=privacy, plan=plan, optimizers=(optimizer, None)
    )
    trainer.train()
    assert optimizer.mechanism.counts_not_private.examples == COUNT
    for name, value in weights(model).items():
        assert torch.allclose(value, expected[name], atol=2e-6), name


def test_the_plan_counts_users(tmp_path):
    trainer = trainer_of(tmp_path, NOISY, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    plan = trainer.plan
    assert (plan.num_examples, plan.batch_size, plan.unit, plan.records_per_user) == (COUNT, 4, "user", 3)
    trainer.train()
    assert "Protected:          one user" in trainer.plan.statement()


def test_a_run_resumes_exactly_with_the_same_ids_only(tmp_path):
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    whole = trainer_of(tmp_path, NOISY, **saving)
    whole.train()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    again = trainer_of(tmp_path, NOISY, **saving)
    again.train(resume_from_checkpoint=checkpoint)
    assert_equal_weights(weights(whole.model), weights(again.model))
    others = rows()
    others[0]["who"], others[1]["who"] = others[1]["who"], others[0]["who"]
    with pytest.raises(ValueError, match="the training data has changed"):
        trainer_of(tmp_path, NOISY, others, **saving).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        (PrivacyArguments(noise_multiplier=1.0, user_column="who"), "user_column='who', records_per_user=None"),
        (PrivacyArguments(noise_multiplier=1.0, records_per_user=3), "user_column=None, records_per_user=3"),
        (PrivacyArguments(noise_multiplier=1.0, user_column="whom", records_per_user=3), "users='whom': record 0"),
        (PrivacyArguments(epsilon=8.0, delta=0.2, **OF_USERS), r"delta=0.2 is not below 1/7"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, privacy, message):
    assert COUNT == 7
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, privacy)


@pytest.mark.parametrize(("unit", "column"), [("user", None), ("example", "who")])
def test_a_plan_and_the_column_must_fit(tmp_path, unit, column):
    plan = dpoptim.PrivacyPlan(
        num_examples=COUNT, batch_size=2, steps=2, noise_multiplier=1.0, unit=unit,
        records_per_user=3 if unit == "user" else None,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"the plan has unit='{unit}'"):
        trainer_of(tmp_path, PrivacyArguments(user_column=column), plan=plan)
