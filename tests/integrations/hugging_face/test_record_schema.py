"""PrivateTrainer refuses training examples with different keys or types: collators look at the first of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DataCollatorWithPadding, default_data_collator

from dpoptim.integrations.hugging_face import PrivateTrainer
from tests.integrations.hugging_face.cases import PRIVACY, WORDS, classifier, training_args

NUMBERS: list[dict[str, Any]] = [
    {"input_ids": [5 + number % 9] * 8, "attention_mask": [1] * 8, "label": 0.9} for number in range(40)
]
CLASSES: list[dict[str, Any]] = [{**row, "label": place % 2} for place, row in enumerate(NUMBERS)]


def with_other(rows: list[dict[str, Any]], other: dict[str, Any]) -> list[dict[str, Any]]:
    return [*rows[:30], other, *rows[31:]]


def made(folder: Any, rows: Any, collator: Any = default_data_collator, *, labels: int = 1, **more: Any) -> Any:
    return PrivateTrainer(
        model=classifier(num_labels=labels), args=training_args(folder, max_steps=1, **more), train_dataset=rows,
        data_collator=collator, processing_class=WORDS, privacy=PRIVACY,
    )  # fmt: skip


def test_a_whole_number_among_labels_is_refused(tmp_path):
    rows = with_other(NUMBERS, {**NUMBERS[30], "label": 1})
    line = "train_dataset: record 30 has int at 'label', but earlier records have float"
    with pytest.raises(ValueError, match=line):
        made(tmp_path, rows).train()


def test_a_record_without_a_mask_is_refused(tmp_path):
    collator = DataCollatorWithPadding(WORDS)
    rows = with_other(CLASSES, {"input_ids": [6] * 8, "label": 1})
    with pytest.raises(
        ValueError, match="record 30 has nothing at 'attention_mask', but earlier records have list of int"
    ):
        made(tmp_path, rows, collator, labels=2).train()
    assert made(tmp_path, CLASSES, collator, labels=2).train().global_step == 1


@pytest.mark.slow
def test_unused_columns_may_differ(tmp_path):
    rows = with_other([{**row, "note": "text"} for row in CLASSES], {**CLASSES[30], "note": None})
    assert made(tmp_path, rows, labels=2).train().global_step == 1

    def collate(rows: list[Any]) -> Any:
        return default_data_collator([{name: row[name] for name in row if name != "note"} for row in rows])

    kept = made(tmp_path, rows, collate, labels=2, remove_unused_columns=False)
    with pytest.raises(ValueError, match="record 30 has None at 'note', but earlier records have str"):
        kept.train()


@pytest.mark.slow
def test_missing_values_in_a_used_column_are_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = with_other(NUMBERS, {**NUMBERS[30], "label": None})
    with pytest.raises(ValueError, match="record 30 has None at 'label', but earlier records have float"):
        made(tmp_path, datasets.Dataset.from_list(rows)).train()
    notes = [{**row, "note": None if place % 2 else "text", "label": 1 if place else 0.5} for place, row in
             enumerate(NUMBERS)]  # fmt: skip
    table = datasets.Dataset.from_list(notes)  # labels become floats, and notes are left out
    assert made(tmp_path, table).train().global_step == 1


@pytest.mark.slow
def test_tensors_of_any_length_and_batches_of_one_are_accepted(tmp_path):
    rows = [
        {"input_ids": torch.full((4 + place % 3,), 7), "attention_mask": torch.ones(4 + place % 3, dtype=torch.long),
         "labels": place % 2}
        for place in range(40)
    ]  # fmt: skip
    assert made(tmp_path, rows, DataCollatorWithPadding(WORDS), labels=2).train().global_step == 1
    mixed = with_other(NUMBERS, {**NUMBERS[30], "label": 1})  # no two of them are in one batch
    made(tmp_path, mixed, per_device_train_batch_size=1).get_train_dataloader()
