"""PrivateTrainer does not evaluate on its training examples, whatever type they have."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from dpoptim.integrations.hugging_face.held_out import HeldOutCheck

from dpoptim.integrations.hugging_face import PrivateTrainer
from tests.integrations.hugging_face.cases import (
    LABELS,
    PRIVACY,
    TEXTS,
    WORDS,
    class_trainer,
    classifier,
    labelled,
    training_args,
)


def test_the_training_examples_are_not_evaluated_on(tmp_path):
    data = labelled()
    for held_out in (data, {"a": [{**WORDS("noise"), "labels": 0}], "b": data}):
        trainer = PrivateTrainer(
            model=classifier(), args=training_args(tmp_path), train_dataset=data, eval_dataset=held_out,
            processing_class=WORDS, privacy=PRIVACY,
        )  # fmt: skip
        with pytest.raises(ValueError, match="eval_dataset is train_dataset itself"):
            trainer.train()
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="eval_dataset is train_dataset itself"):
            call(data)


def test_a_copy_of_the_training_examples_is_refused(tmp_path):
    trainer = class_trainer(tmp_path, eval_dataset=labelled()[::-1])
    with pytest.raises(ValueError, match="has the same examples as train_dataset"):
        trainer.train()


def test_examples_in_both_are_counted(tmp_path):
    texts = list(dict.fromkeys(TEXTS))[:3]
    new = [{**WORDS("the fox"), "labels": 1}, {**WORDS("noise"), "labels": 0}]
    mixed = [*({**WORDS(text), "labels": LABELS[TEXTS.index(text)]} for text in texts), *new]
    with pytest.warns(UserWarning, match="3 of the 5 examples of eval_dataset"):
        class_trainer(tmp_path, eval_dataset=mixed).train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*training examples too")
        class_trainer(tmp_path, eval_dataset=new).train()


def tensors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: torch.tensor(value) for name, value in row.items()} for row in rows]


COPIES: dict[str, Any] = {
    "copied": lambda rows: [dict(row) for row in rows],
    "as tensors": tensors,
    "as arrays": lambda rows: [
        {name: np.asarray(value, dtype=np.int32) for name, value in row.items()} for row in rows
    ],
    "as floats": lambda rows: [{**row, "labels": float(row["labels"])} for row in rows],
    "with a column more": lambda rows: [{**row, "special": number} for number, row in enumerate(rows)],
    "with columns moved": lambda rows: [dict(reversed(list(row.items()))) for row in rows],
    "without labels": lambda rows: [{name: row[name] for name in row if name != "labels"} for row in rows],
    "with other labels": lambda rows: [{**row, "labels": 1 - row["labels"]} for row in rows],
    "with other names": lambda rows: [
        {**{name: row[name] for name in row if name != "labels"}, "label": row["labels"]} for row in rows
    ],
    "padded": lambda rows: [
        {**WORDS(text, padding="max_length", max_length=50), "labels": row["labels"]}
        for text, row in zip(TEXTS, rows, strict=True)
    ],
    "without token types": lambda rows: [{name: row[name] for name in row if name != "token_type_ids"} for row in rows],
    "one less": lambda rows: rows[1:],
    "twice": lambda rows: [*rows, *rows],
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_another_type_are_refused(how, tmp_path):
    copy = COPIES[how](labelled())
    with pytest.raises(ValueError, match="has the same examples as train_dataset, or some of them") as refused:
        class_trainer(tmp_path, eval_dataset=copy).train()
    assert "\n" not in str(refused.value)
    trainer = class_trainer(tmp_path)
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="has the same examples as train_dataset"):
            call(copy)


def test_a_format_of_datasets_does_not_matter(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([dict(row) for row in labelled()])
    check = HeldOutCheck(data, columns=None, debugging=False)
    for other in (data.with_format("torch"), data.with_format("numpy"), data.shuffle(seed=1)):
        with pytest.raises(ValueError, match="same examples"):
            check.check(other)


def test_each_dataset_is_compared_once_and_debugging_is_let_be(tmp_path):
    rows = [{"x": number} for number in range(4)]
    check = HeldOutCheck(rows, columns=None, debugging=False)
    mixed = [{"x": 0}, {"x": 9}]
    with pytest.warns(UserWarning, match="1 of the 2 examples"):
        check.check({"a": mixed})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.check(mixed)
        HeldOutCheck(rows, columns=None, debugging=True).check(rows)


def test_rows_of_a_few_numbers_may_be_alike():
    """Three binary features: other people have the same ones."""
    generator = np.random.default_rng(0)
    rows = [{"x": generator.integers(0, 2, 3).tolist(), "labels": int(generator.integers(2))} for _ in range(140)]
    check = HeldOutCheck(rows[:100], columns=None, debugging=False)
    with pytest.warns(UserWarning, match="40 of the 40 examples"):
        check.check(rows[100:])
    distinct = [{"x": generator.normal(size=3).tolist(), "labels": 0} for _ in range(100)]
    with pytest.raises(ValueError, match="the same examples as train_dataset"):
        HeldOutCheck(distinct, columns=None, debugging=False).check(distinct[:40])
