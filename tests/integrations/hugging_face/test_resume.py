"""PrivateTrainer repeats a released step exactly, or not at all."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from dpoptim.integrations.hugging_face import PrivateTrainer
from dpoptim.privacy.step_ledger import released_count
from tests.integrations.hugging_face.cases import (
    PRIVACY,
    WORDS,
    assert_equal_weights,
    class_trainer,
    classifier,
    labelled,
    training_args,
    weights,
)

SAVING: dict[str, Any] = dict(save_strategy="steps", save_steps=2, lr_scheduler_type="linear")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished run of four steps, with its checkpoint of step 2."""
    place: Path = tmp_path_factory.mktemp("run")
    class_trainer(place, **SAVING).train()
    return place


def resumed(folder: Path, train_dataset: Any = None, *, at: int = 2, privacy: Any = PRIVACY, **changes: Any) -> Any:
    own = {name: changes.pop(name) for name in list(changes) if name in ("eval_dataset", "loss_per_example", "model")}
    trainer = PrivateTrainer(
        model=own.pop("model", None) or classifier(),
        args=training_args(folder, **{**SAVING, **changes}),
        train_dataset=labelled() if train_dataset is None else train_dataset,
        processing_class=WORDS,
        privacy=privacy,
        **own,
    )
    trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{at}"))
    return trainer


def steps_file(folder: Path) -> Path:
    (found,) = (folder / "out.secret").glob("*.steps")
    return found


def edited() -> dict[str, list[dict[str, Any]]]:
    rows = labelled()
    other_label = [{**row, "labels": 1 - row["labels"]} if place == 5 else row for place, row in enumerate(rows)]
    return {"one label": other_label, "rotated": [*rows[1:], rows[0]]}


@pytest.mark.parametrize(("how", "at"), [("one label", 2), ("rotated", 4)])
def test_different_examples_are_refused(how, at, folder):
    with pytest.raises(ValueError, match="the training data has changed since the run started"):
        resumed(folder, edited()[how], at=at)


@pytest.mark.slow
def test_tensors_are_compared(tmp_path):
    rows = labelled()
    changed = [{**row, "labels": 1 - row["labels"]} if place == 3 else row for place, row in enumerate(rows)]

    def trainer(rows: Any) -> Any:
        return PrivateTrainer(
            model=classifier(), args=training_args(tmp_path, **SAVING), train_dataset=Examples(rows),
            processing_class=WORDS, privacy=PRIVACY,
        )  # fmt: skip

    trainer(rows).train()
    with pytest.raises(ValueError, match="the training data has changed"):
        trainer(changed).train(resume_from_checkpoint=True)


class Examples(Dataset[Any]):
    """A dataset of tensors."""

    def __init__(self, rows: list[dict[str, Any]], *, random: bool = False) -> None:
        self._rows, self._random = rows, random

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        row = {name: torch.tensor(value) for name, value in self._rows[place].items()}
        if self._random:
            row["input_ids"] = row["input_ids"][torch.randperm(len(row["input_ids"]))]
        return row


def test_random_examples_are_refused(tmp_path):
    trainer = PrivateTrainer(
        model=classifier(), args=training_args(tmp_path), train_dataset=Examples(labelled(), random=True),
        processing_class=WORDS, privacy=PRIVACY,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"differs each time it is read\. .* to the collator"):
        trainer.train()


def test_different_arguments_are_refused(folder):
    with pytest.raises(ValueError, match=r"setting lr_scheduler_type was .* when the run started and is .* now"):
        resumed(folder, lr_scheduler_type="cosine")
    with pytest.raises(ValueError, match=r"setting eps was .* when the run started and is .* now"):
        resumed(folder, privacy=dataclasses.replace(PRIVACY, eps=1e-3))


def other_loss(model: Any, batch: Any) -> torch.Tensor:
    labels = batch.pop("labels")
    return torch.nn.functional.cross_entropy(model(**batch).logits, labels, reduction="none", label_smoothing=0.1)


def test_a_different_loss_is_refused(folder):
    with pytest.raises(ValueError, match="step 3 was released before with different gradients"):
        resumed(folder, loss_per_example=other_loss)


@pytest.mark.slow
def test_a_different_dropout_is_refused(folder):
    with pytest.raises(ValueError, match="step 3 was released before"):
        resumed(folder, model=classifier(dropout=0.3))


@pytest.mark.slow
def test_edited_weights_are_refused(folder, tmp_path):
    """Files are not authenticated: the ledger compares what a step would release."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "out" / "checkpoint-2" / "model.safetensors"
    save_file({name: value * 1.3 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="step 3 was released before"):
        resumed(tmp_path)


@pytest.mark.slow
def test_repeated_steps_keep_their_micro_batches(folder):
    """The first step may be refused or the second: a small batch may be split into the same micro-batches."""
    with pytest.raises(ValueError, match=r"step [34] was released before"):
        resumed(folder, per_device_train_batch_size=3, gradient_accumulation_steps=2)


@pytest.mark.slow
def test_micro_batches_may_change_where_no_step_is_repeated(folder):
    assert resumed(folder, at=4, per_device_train_batch_size=3, gradient_accumulation_steps=2).state.global_step == 4


def test_an_older_checkpoint_repeats_the_same_run(folder):
    first = resumed(folder)
    second = resumed(folder, logging_steps=1, per_device_eval_batch_size=3)
    assert_equal_weights(weights(first.model), weights(second.model))
    assert released_count(steps_file(folder)) == 4


@pytest.mark.slow
def test_a_step_is_on_disk_before_its_noise_is_made(tmp_path, monkeypatch):
    from dpoptim.clipping import PrivateMechanism

    counts: list[tuple[int, int]] = []
    add_noise = PrivateMechanism._add_noise

    def counted(self: Any, *args: Any) -> None:
        counts.append((self.step, released_count(steps_file(tmp_path))))
        add_noise(self, *args)

    monkeypatch.setattr(PrivateMechanism, "_add_noise", counted)
    class_trainer(tmp_path).train()
    assert counts == [(0, 1), (1, 2), (2, 3), (3, 4)]
