"""Padding and collators that make one example depend on others are refused before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding

from dpoptim.integrations.losses import losses_for
from dpoptim.integrations.padding_check import check_padding
from tests.app import tiny
from tests.integrations.hugging_face.cases import (
    TEXTS,
    WORDS,
    causal_model,
    classifier,
    labelled,
    masked_model,
    t5,
)

CHANGES = "the loss of an example changes with its padding"


def tokenizer(make: Any, side: str) -> Any:
    made = make()
    made.padding_side = side
    made.pad_token = made.pad_token or made.eos_token
    return made


def extremes(records: list[Any], column: str = "input_ids") -> list[Any]:
    """The shortest and the longest record."""
    ordered = sorted(records, key=lambda record: len(record[column]))
    return [ordered[0], ordered[-1]]


@pytest.mark.parametrize(
    ("make", "model", "mlm"), [(tiny.bytepair, causal_model, False), (tiny.wordpiece, masked_model, True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiple", [None, 64])
def test_left_padding_is_refused(make, model, mlm, dtype, multiple):
    """Unless all records have one width. Masks are random, so the row is cut instead of collated alone."""
    network = model().to(dtype).train()
    losses = losses_for(network)
    for side in ("right", "left"):
        words = tokenizer(make, side)
        records = extremes([words(text) for text in TEXTS])
        collator = DataCollatorForLanguageModeling(words, mlm=mlm, pad_to_multiple_of=multiple)
        if side == "right" or multiple:  # to one width: no record depends on how long the others are
            check_padding(network, losses, collator, records)
        else:
            with pytest.raises(ValueError, match=CHANGES):
                check_padding(network, losses, collator, records)
    assert network.training


def test_an_empty_text_costs_no_more_forwards():
    """No mask gives it a target, whatever the seed."""
    model, calls = masked_model(), []
    losses = losses_for(model)

    def counted(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        calls.append(batch)
        return losses(model, batch)

    check_padding(model, counted, DataCollatorForLanguageModeling(WORDS), [WORDS(text) for text in ("", TEXTS[1])])
    assert len(calls) <= 3  # together, and each alone


class Pool(nn.Module):
    """The mean over all positions, padding included."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(len(WORDS), 8), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.out(self.table(input_ids).mean(1))


def pooled(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    return F.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")


def test_a_model_that_pools_over_padding_is_refused_and_left_unchanged():
    model, states = Pool(), (torch.get_rng_state(), np.random.get_state()[1].tobytes())  # type: ignore[index]
    with pytest.raises(ValueError, match=CHANGES):
        check_padding(model, pooled, DataCollatorWithPadding(WORDS), extremes(labelled()))
    assert model.seen == 0
    assert model.training
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tobytes()  # type: ignore[index]
    check_padding(model, pooled, DataCollatorWithPadding(WORDS, padding="max_length", max_length=40), labelled()[:3])
    check_padding(classifier(0.3), losses_for(classifier()), DataCollatorWithPadding(WORDS), extremes(labelled()))


def targets(length: int, number: int) -> list[int]:
    return [5 + (3 * place + number) % 40 for place in range(length)]


def test_padding_of_encoder_decoder_targets():
    records = [{"input_ids": targets(6, j), "attention_mask": [1] * 6, "labels": targets(2 + j, j)} for j in range(4)]
    own = losses_for(t5())

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        return own(model, batch) * batch["labels"].shape[1]

    for side in ("right", "left"):
        words = tokenizer(tiny.wordpiece, side)
        for model in (None, t5()):
            collator = DataCollatorForSeq2Seq(words, model=model)
            if side == "right":
                check_padding(t5(), own, collator, extremes(records, "labels"))
                with pytest.raises(ValueError, match=CHANGES):
                    check_padding(t5(), counted, collator, extremes(records, "labels"))
            else:
                with pytest.raises(ValueError, match=CHANGES):
                    check_padding(t5(), own, collator, extremes(records, "labels"))


ROWS = [{"x": np.random.default_rng(number).normal(size=3), "labels": number % 2} for number in range(4)]


def table(rows: list[Any]) -> dict[str, torch.Tensor]:
    x = torch.tensor(np.stack([row["x"] for row in rows]), dtype=torch.float32)
    return {"x": x, "labels": torch.tensor([row["labels"] for row in rows])}


def of_rows(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def centred(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = table(rows)
    return {**batch, "x": batch["x"] - batch["x"].mean(0)}


def mixup(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch, share = table(rows), float(np.random.uniform(0.3, 0.7))
    return {**batch, "x": share * batch["x"] + (1 - share) * batch["x"].roll(1, 0)}


def noisy(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = table(rows)
    return {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}


def test_collators_that_mix_are_refused():
    for collate in (centred, mixup):
        with pytest.raises(ValueError, match="data_collator mixes examples: 'x'"):
            check_padding(nn.Linear(3, 2), of_rows, collate, ROWS)
    for collate in (table, noisy):
        check_padding(nn.Linear(3, 2), of_rows, collate, ROWS)


@pytest.mark.parametrize("divides", ["the loss", "the collator"])
def test_losses_divided_by_the_batch_size_are_refused(divides):
    model = nn.Sequential(nn.Linear(4, 3))

    def collate(records: list[Any]) -> dict[str, Any]:
        share = torch.full((len(records),), 1 / len(records) if divides == "the collator" else 1.0)
        return {"x": torch.stack(records), "share": share}

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        found = model(batch["x"]).square().sum(1) * batch["share"]
        return found / len(found) if divides == "the loss" else found

    with pytest.raises(ValueError, match=CHANGES):
        check_padding(model, losses, collate, list(torch.randn(3, 4)))


def test_one_loss_per_example():
    with pytest.raises(ValueError, match=r"the losses of 4 examples have shape \(8,\)"):
        check_padding(nn.Linear(3, 2), of_rows, lambda rows: table([*rows, *rows]), ROWS)


def test_a_random_loss_is_not_compared_but_its_collator_is():
    def random_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return of_rows(model, batch) * torch.rand(len(batch["x"]))

    check_padding(nn.Linear(3, 2), random_loss, table, ROWS)
    with pytest.raises(ValueError, match="data_collator mixes examples"):
        check_padding(nn.Linear(3, 2), random_loss, centred, ROWS)
