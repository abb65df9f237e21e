"""A batch with more padding has the same norms and sums, and so the same release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import dpoptim
from dpoptim.clipping import clipped_sum
from dpoptim.data.lengths import pad_to_bucket
from tests.clipping.one_at_a_time import clipped_sum_one_at_a_time, random_scale

COUNTS = (9, 16, 4, 13)
BUCKET = 16  # the longest text fills it
VOCABULARY = 61


def bert(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3,
    )  # fmt: skip
    return BertForMaskedLM(config).to(dtype)


def padded(bucket: int, fill: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in COUNTS]
    labels = [row.where(torch.arange(len(row)) % 3 == 1, -100) for row in ids]
    return {
        "ids": pad_to_bucket(ids, value=fill, bucket=bucket),
        "mask": pad_to_bucket([torch.ones_like(row) for row in ids], value=0, bucket=bucket),
        "labels": pad_to_bucket(labels, value=-100, bucket=bucket),
    }


def average(losses: Tensor, labels: Tensor) -> Tensor:
    return losses.sum(1) / (labels != -100).sum(1)


def stored(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return average(losses, batch["labels"])


def fused(model: Any, batch: dict[str, Tensor]) -> Tensor:
    hidden = model.bert(batch["ids"], attention_mask=batch["mask"]).last_hidden_state
    head = model.cls.predictions
    losses = dpoptim.linear_cross_entropy(head.decoder, head.transform(hidden), batch["labels"])
    return average(losses, batch["labels"])


def without_mask(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return stored(model, {**batch, "mask": torch.ones_like(batch["mask"])})


@pytest.mark.parametrize(
    ("dtype", "tolerance", "loss_fn", "fill", "scaled"),
    [  # every pair of loss, fill and scale
        (torch.float64, 1e-10, stored, 0, False),
        (torch.float32, 1e-6, stored, 7, True),
        (torch.float64, 1e-10, fused, 0, True),
        (torch.float32, 1e-6, fused, 7, False),
    ],
)
def test_more_padding_does_not_change_sums(dtype, tolerance, loss_fn, fill, scaled):
    model = bert(dtype)
    scale = random_scale(model) if scaled else None
    short, long = padded(BUCKET, fill), padded(BUCKET + 64, fill)
    assert long["ids"].shape[1] == short["ids"].shape[1] + 64
    _, norms = clipped_sum(model, loss_fn, short, scale=scale)
    clip_norm = float(norms.median()) * 1.001  # clips some and not others
    sums, norms = clipped_sum(model, loss_fn, short, clip_norm=clip_norm, scale=scale)
    more_sums, more_norms = clipped_sum(model, loss_fn, long, clip_norm=clip_norm, scale=scale)
    torch.testing.assert_close(more_norms, norms, rtol=tolerance, atol=tolerance)
    for name, total in sums.items():
        torch.testing.assert_close(more_sums[name], total, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loss_fn", [stored, fused])
def test_padded_texts_equal_single_unpadded_texts(loss_fn):
    """Compare ordinary autograd on each text alone with one batch that has much padding."""
    model = bert(torch.float64)
    batch = padded(BUCKET + 64, 0)
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    norms = []
    for j, count in enumerate(COUNTS):
        alone = {name: tensor[j : j + 1, :count] for name, tensor in batch.items()}
        own, norm = clipped_sum_one_at_a_time(model, stored, alone, 1, 1.0, None)
        norms.append(norm)
        for name, total in own.items():
            expected[name] += total
    sums, found = clipped_sum(model, loss_fn, batch, clip_norm=1.0)
    torch.testing.assert_close(found, torch.cat(norms), rtol=1e-10, atol=1e-10)
    for name, total in expected.items():
        torch.testing.assert_close(sums[name], total, rtol=1e-10, atol=1e-10)


def test_padding_changes_norms_without_a_mask():
    model = bert(torch.float64)
    norms = [clipped_sum(model, without_mask, padded(bucket, 7))[1] for bucket in (BUCKET, BUCKET + 64)]
    assert float((norms[1] / norms[0] - 1).abs().min()) > 1e-3
