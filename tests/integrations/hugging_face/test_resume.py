"""PrivateTrainer: a step that was released is computed again exactly as it was, or not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from dpoptim.integrations.hugging_face import PrivateTrainer
from dpoptim.noise import NoiseKey
from dpoptim.privacy.seals import seal_folder
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


def go_on(folder: Path, train_dataset: Any = None, *, at: int = 2, privacy: Any = PRIVACY, **changes: Any) -> Any:
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
    shorter = [{name: v[:-1] if name != "labels" else v for name, v in rows[0].items()}, *rows[1:]]
    return {"one label": other_label, "one text": shorter, "rotated": [*rows[1:], rows[0]], "reversed": rows[::-1]}


@pytest.mark.parametrize("how", ["one label", "one text", "rotated", "reversed"])
def test_other_examples_are_refused(how, folder):
    for at in (2, 4):
        with pytest.raises(ValueError, match="the training records are not those that the run was begun with"):
            go_on(folder, edited()[how], at=at)


def test_examples_of_any_kind_are_compared(folder):
    """Equal lists, tensors and a datasets.Dataset are each compared with themselves."""
    datasets = pytest.importorskip("datasets")
    rows = labelled()
    for number, make in enumerate((tuple, datasets.Dataset.from_list, Examples)):
        place = folder / str(number)
        for change in (False, True):
            data = [{**row, "labels": 1 - row["labels"]} if change and i == 3 else row for i, row in enumerate(rows)]
            trainer = PrivateTrainer(
                model=classifier(), args=training_args(place, **SAVING), train_dataset=make(data),
                processing_class=WORDS, privacy=PRIVACY,
            )  # fmt: skip
            if not change:
                trainer.train()
                continue
            with pytest.raises(ValueError, match="training records are not those"):
                trainer.train(resume_from_checkpoint=True)


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


def test_random_examples_are_refused_with_what_to_do(tmp_path):
    trainer = PrivateTrainer(
        model=classifier(), args=training_args(tmp_path), train_dataset=Examples(labelled(), random=True),
        processing_class=WORDS, privacy=PRIVACY,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"another one each time it is read .* in the collator"):
        trainer.train()


CHANGES: dict[str, Any] = {
    "learning_rate": 2e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "adam_beta1": 0.8,
    "adam_beta2": 0.99, "adam_epsilon": 1e-5, "seed": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_other_arguments_are_refused(name, folder):
    with pytest.raises(ValueError, match=f"{name} was .*: a run keeps the settings it was begun with"):
        go_on(folder, **{name: CHANGES[name]})


def test_other_privacy_arguments_are_refused(folder):
    changes: dict[str, Any] = {"variant": "post_processing", "eps": 1e-3, "eps_scale": 1e-2, "clip_norm": 3.0}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=f"{name} was .*: a run keeps the settings"):
            go_on(folder, privacy=dataclasses.replace(PRIVACY, **{name: value}))


def other_loss(model: Any, batch: Any) -> torch.Tensor:
    labels = batch.pop("labels")
    return torch.nn.functional.cross_entropy(model(**batch).logits, labels, reduction="none", label_smoothing=0.1)


def test_another_loss_is_refused(folder):
    with pytest.raises(ValueError, match="step 3 was released before, and its gradients come out otherwise now"):
        go_on(folder, loss_per_example=other_loss)


def test_another_dropout_is_refused(folder):
    with pytest.raises(ValueError, match="the model's build"):
        go_on(folder, model=classifier(dropout=0.3))


def test_frozen_parameters_are_compared(tmp_path):
    def frozen(shift: float) -> Any:
        model = classifier()
        model.bert.embeddings.requires_grad_(False)
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight.add_(shift)
        return model

    class_trainer(tmp_path, model=frozen(0.0), **SAVING).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    (checkpoint / "model.safetensors").unlink()  # as PEFT leaves them out; the rest is loaded from the file
    import safetensors.torch

    safetensors.torch.save_file(frozen(0.5).state_dict(), checkpoint / "model.safetensors")
    (key,) = (tmp_path / "out.secret").glob("*.key")
    seal_folder(checkpoint, NoiseKey.load(key))
    with pytest.raises(ValueError, match="the frozen weight has changed"):
        go_on(tmp_path, model=frozen(0.5))


def test_steps_are_repeated_only_as_they_were_cut(folder):
    """A sample of the first of the two steps may be so small that it is cut as before; then the second is refused."""
    with pytest.raises(ValueError, match=r"step [34] was released before"):
        go_on(folder, per_device_train_batch_size=3, gradient_accumulation_steps=2)


def test_a_run_goes_on_otherwise_where_nothing_is_repeated(folder):
    assert go_on(folder, at=4, per_device_train_batch_size=3, gradient_accumulation_steps=2).state.global_step == 4


def test_an_older_checkpoint_repeats_the_same_run(folder):
    first = go_on(folder)
    second = go_on(folder, logging_steps=1, per_device_eval_batch_size=3)
    assert_equal_weights(weights(first.model), weights(second.model))
    assert released_count(steps_file(folder)) == 4


def test_the_disk_has_a_step_before_its_noise_is_made(tmp_path, monkeypatch):
    from dpoptim.clipping import PrivateMechanism

    counts: list[tuple[int, int]] = []
    add_noise = PrivateMechanism._add_noise

    def counted(self: Any, *args: Any) -> None:
        counts.append((self.step, released_count(steps_file(tmp_path))))
        add_noise(self, *args)

    monkeypatch.setattr(PrivateMechanism, "_add_noise", counted)
    class_trainer(tmp_path).train()
    assert counts == [(0, 1), (1, 2), (2, 3), (3, 4)]
