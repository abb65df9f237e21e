"""Out of memory in PrivateTrainer: the error names the TrainingArguments to change, and the run can continue."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpoptim.clipping import PrivateMechanism, clipped_sums
from dpoptim.integrations.hugging_face.arguments import remedies_for
from dpoptim.privacy import PrivacyPlan
from tests.integrations.hugging_face.cases import class_trainer


@pytest.mark.parametrize(
    ("place", "doing", "first"),
    [
        ((clipped_sums, "_sum"), "clipping", "set per_device_train_batch_size=3 and gradient_accumulation_steps=4 (the "
         "guarantee and the expected batch of 12 stay the same)"),
        ((PrivateMechanism, "_add_noise"), "adding noise and updating parameters", "train only LoRA factors (peft)"),
        (None, "running the model", "set per_device_train_batch_size=3 and gradient_accumulation_steps=4"),
    ],
)  # fmt: skip
def test_the_error_names_training_arguments(place, doing, first, tmp_path, monkeypatch):
    trainer = class_trainer(tmp_path, per_device_train_batch_size=6, gradient_accumulation_steps=2)
    owner, name = place or (trainer, "loss_per_example")
    whole = getattr(owner, name)

    def fails(*args: Any) -> Any:
        if trainer.private_optimizer is not None:  # earlier calls are checks
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(*args)

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(torch.OutOfMemoryError) as failed:
        trainer.train()
    (note,) = failed.value.__notes__
    assert note.startswith(f"Out of memory while {doing}. Known use: parameters ")
    assert f"What to change first: {first}" in note
    assert "private_loader" not in note


def test_the_check_before_the_first_step_may_run_out_of_memory(tmp_path, monkeypatch):
    trainer = class_trainer(tmp_path)

    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(trainer, "loss_per_example", fails)
    with pytest.raises(torch.OutOfMemoryError) as failed:
        trainer.train()
    (note,) = failed.value.__notes__
    assert note.startswith("Out of memory before the first step")


def test_smaller_batches_resume_where_no_step_is_repeated(tmp_path, monkeypatch):
    """Three steps are saved and the fourth fails: smaller batches resume from step 3 and are refused from step 2."""
    first = class_trainer(tmp_path, save_strategy="steps", save_steps=1)
    whole = clipped_sums._sum

    def fails(*args: Any) -> None:
        if first.state.global_step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        whole(*args)

    monkeypatch.setattr(clipped_sums, "_sum", fails)
    with pytest.raises(torch.OutOfMemoryError) as failed:
        first.train()
    assert "Step 4 has released nothing." in failed.value.__notes__[-1]
    assert "set per_device_train_batch_size=1 and gradient_accumulation_steps=6" in failed.value.__notes__[-1]
    monkeypatch.undo()
    smaller: Any = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6}
    with pytest.raises(ValueError, match="step 3 was released before with different gradients"):
        class_trainer(tmp_path, **smaller).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    again = class_trainer(tmp_path, **smaller)
    again.train(resume_from_checkpoint=True)
    assert again.private_optimizer.mechanism.step == 4


def test_the_next_smaller_batch_divides_the_expected_one():
    plan = PrivacyPlan(num_examples=100, batch_size=60, steps=1)
    smaller = remedies_for(15, plan, processes=1).smaller_batches
    assert smaller == "set per_device_train_batch_size=6 and gradient_accumulation_steps=10"
    smaller = remedies_for(15, plan, processes=2).smaller_batches
    assert smaller == "set per_device_train_batch_size=6 and gradient_accumulation_steps=5"
