"""PrivateTrainer refuses what mixes examples before the first layer, random numbers or not, and in training mode alone.

Dropout, noise and masks of each example's own are taken.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DataCollatorForLanguageModeling

from tests.integrations.hugging_face.cases import TEXTS, WORDS, labelled, masked_model
from tests.integrations.test_batch_check import ROWS, Pool, checked, of_first_token, of_rows, refused, table


class Changes(nn.Module):
    """A linear layer behind something that is done to its input."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.change = nn.Linear(3, 2), change

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.change(x, self.training))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


MIXING = {
    "noise": lambda x, training: centred(x) + 0.1 * torch.randn_like(x),
    "little noise": lambda x, training: centred(x) + 1e-3 * torch.randn(1),
    "dropout in eval mode": lambda x, training: F.dropout(x / x.abs().amax(0), 0.5, training=True),
    "noise of numpy": lambda x, training: centred(x) * float(np.random.random()),
    "in training alone": lambda x, training: centred(x) if training else x,
    "in training alone, with dropout": lambda x, training: F.dropout(centred(x), 0.1) if training else x,
    "before a backward alone": lambda x, training: centred(x) if training and torch.is_grad_enabled() else x,
    "in large batches alone": lambda x, training: centred(x) if len(x) > 4 else x,
    "each with the one before it, in large batches": lambda x, training: x + x.roll(1, 0) if len(x) > 4 else x,
}
APART = {
    "dropout in eval mode": lambda x, training: F.dropout(x, 0.5, training=True),
    "noise": lambda x, training: x + torch.randn_like(x),
    "one number for all": lambda x, training: x * torch.rand(1),
    "as many numbers as there are examples": lambda x, training: x * torch.rand(len(x), 1) + torch.rand(2 * len(x))[-1],
    "in another order": lambda x, training: x + torch.randn(x.shape[1], len(x)).T,
    "as many numbers as positive values": lambda x, training: x.masked_scatter(x > 0, torch.rand(int((x > 0).sum()))),
}


def plain(rows: list[Any]) -> dict[str, Tensor]:
    return table(rows, centred=False)


def given(folder: Path, change: Any, collator: Any = plain) -> tuple[tuple[Any, ...], dict[str, Any]]:
    more = {
        "loss_per_example": of_rows, "remove_unused_columns": False, "words": None, "per_device_train_batch_size": 10,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    return (folder, Changes(change), ROWS, collator), more


@pytest.mark.parametrize("what", MIXING)
def test_mixing_is_seen_behind_random_numbers(what, tmp_path):
    arguments, more = given(tmp_path, MIXING[what])
    refused("another loss in (training where the others of its batch are replaced|a batch than alone)",
            *arguments, **more)  # fmt: skip


@pytest.mark.parametrize("what", APART)
def test_random_numbers_alone_are_taken(what, tmp_path):
    arguments, more = given(tmp_path, APART[what])
    checked(*arguments, **more)


def with_temperature(rows: list[Any]) -> dict[str, Tensor]:
    return {**plain(rows), "temperature": torch.tensor(0.5)}


def test_mixing_is_seen_in_batches_whose_rows_cannot_be_told(tmp_path):
    arguments, more = given(tmp_path, MIXING["noise"], with_temperature)
    refused("another loss where it is collated with copies of one", *arguments, **more)
    arguments, more = given(tmp_path, APART["noise"], with_temperature)
    checked(*arguments, **more)


class PoolsInTraining(Pool):
    """The mean over all positions, padding included, in training alone; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def pooled(self, input_ids: Tensor) -> Tensor:
        is_word = (input_ids != WORDS.pad_token_id).unsqueeze(2)
        own = (self.e(input_ids) * is_word).sum(1) / is_word.sum(1)
        return self.dropout(super().pooled(input_ids) if self.training else own)


def test_padding_is_looked_at_in_training_mode_too(tmp_path):
    refused("looks at padding", tmp_path, PoolsInTraining(), labelled(), loss_per_example=of_first_token)


# -- collators -----------------------------------------------------------------------------------------------------


def mixup(rows: list[Any]) -> dict[str, Tensor]:
    batch, share = plain(rows), float(np.random.uniform(0.3, 0.7))
    return {**batch, "x": share * batch["x"] + (1 - share) * batch["x"].roll(1, 0)}


def mixed_where_many(rows: list[Any]) -> dict[str, Tensor]:
    return table(rows, centred=len(rows) > 4)


def noisy(rows: list[Any]) -> dict[str, Tensor]:
    batch = plain(rows)
    return {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}


def test_a_collator_that_mixes_is_refused(tmp_path):
    for collator in (mixup, mixed_where_many):
        arguments, more = given(tmp_path, lambda x, training: x, collator)
        refused("look for what data_collator makes of several examples", *arguments, **more)
    arguments, more = given(tmp_path, lambda x, training: x, noisy)
    checked(*arguments, **more)


def masked(rows: list[Any]) -> dict[str, Tensor]:
    """One number for each positive value, one example after another, as masks of whole words take them."""
    batch = plain(rows)
    for row in batch["x"]:
        row[row > 0] *= torch.tensor([float(random.random() < 0.5) for value in row if value > 0])
    return batch


def test_masks_of_as_many_numbers_as_an_example_needs_are_taken(tmp_path):
    for rows in (ROWS, ROWS[::-1]):
        (folder, model, _, collator), more = given(tmp_path, APART["noise"], masked)
        checked(folder, model, rows, collator, **more)


def test_masks_of_stock_are_taken(tmp_path):
    collator = DataCollatorForLanguageModeling(WORDS)
    rows = [WORDS(text, truncation=True, max_length=7) for text in TEXTS]
    checked(tmp_path, masked_model(dropout=0.3), rows, collator)
