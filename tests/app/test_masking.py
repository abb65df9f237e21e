"""Masks: a pure function of seed, step and record, with the shares that they should have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dpoptim
from dpoptim.app.data.masking import mask_key, masked, record_hash, target_counts
from dpoptim.integrations.token_losses import IGNORED
from tests.app.cases import (
    WORDS,
    masked_lm,
    whole_batch,
)


def test_masks_are_a_function_of_seed_step_and_record_alone():
    prepared = masked_lm()
    together = prepared.at_step(whole_batch(prepared), 4)
    for j in range(7):  # alone, so at a different width and position
        alone = prepared.at_step(prepared.collate([prepared.dataset[j]]), 4)
        width = min(alone["input_ids"].shape[1], together["input_ids"].shape[1])
        assert torch.equal(alone["input_ids"][0, :width], together["input_ids"][j, :width])
        targets = int((alone["labels"] != IGNORED).sum())
        assert torch.equal(alone["places"][0, :targets], together["places"][j, :targets])
        assert torch.equal(alone["labels"][0, :targets], together["labels"][j, :targets])
    again = masked_lm().at_step(whole_batch(prepared), 4)
    assert all(torch.equal(again[name], together[name]) for name in together)
    others = [prepared.at_step(whole_batch(prepared), 5), masked_lm(seed=1).at_step(whole_batch(prepared), 4)]
    assert all(not torch.equal(other["places"], together["places"]) for other in others)


def test_masks_do_not_depend_on_how_batches_are_made():
    def seen(**options: Any) -> list[Any]:
        prepared = masked_lm()
        plan = dpoptim.PrivacyPlan(num_examples=7, batch_size=3, steps=2, noise_multiplier=1.0)
        key = dpoptim.NoiseKey.from_bytes(bytes(32))
        loader = dpoptim.private_loader(
            prepared.dataset, plan, key=key, run_id="test", collate_fn=prepared.collate, **options
        )
        rows = [
            (row[row != 0].tolist(), labels[labels != IGNORED].tolist())
            for batch in prepared.batches(loader)
            for row, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
        return sorted(rows)

    assert seen() == seen(micro_batch_size=2) == seen(num_workers=2)


def test_evaluation_masks_do_not_depend_on_the_run():
    first, second = masked_lm(seed=0), masked_lm(seed=9)
    backwards = second.on(second.records.take(range(6, -1, -1)))
    losses = first.evaluate(first.model.eval(), whole_batch(first)).losses
    again = backwards.evaluate(first.model, whole_batch(backwards)).losses.flip(0)
    torch.testing.assert_close(losses, again)


def test_masks_hide_what_they_should():
    """80 / 10 / 10 of the targets, uniform over the text's own tokens; the bounds are five standard deviations."""
    examples, width, targets, vocabulary = 4000, 24, 5, 1000
    ids = torch.full((examples, width), 7)
    maskable = torch.zeros(examples, width, dtype=torch.bool)
    maskable[:, 1:21] = True
    record = torch.tensor([record_hash(np.array([j], np.int32)) for j in range(examples)])
    is_target = (torch.arange(targets) < targets).expand(examples, -1)
    hidden, places, labels = masked(
        ids, maskable, is_target, record, key=mask_key("training/0/0"), mask_id=3, vocabulary=vocabulary
    )
    assert (labels == 7).all()
    assert ((places >= 1) & (places < 21)).all()
    assert all(len(set(row)) == targets for row in places.tolist())
    count = examples * targets
    chosen = hidden.gather(1, places)
    shares = {"mask": 0.8, "other": 0.0999, "own": 0.1001}
    found = {"mask": (chosen == 3), "other": (chosen != 3) & (chosen != 7), "own": chosen == 7}
    for name, share in shares.items():
        bound = 5 * (share * (1 - share) / count) ** 0.5
        assert abs(float(found[name].double().mean()) - share) < bound, name
    others = chosen[found["other"]].double()
    assert abs(float(others.mean()) - (vocabulary - 1) / 2) < 5 * vocabulary / (12 * len(others)) ** 0.5
    by_place = torch.bincount(places.flatten(), minlength=width)[1:21].double()
    assert float((by_place - count / 20).abs().max()) < 5 * (count / 20) ** 0.5
    untouched = torch.ones_like(hidden, dtype=torch.bool).scatter(1, places, False)
    assert (hidden[untouched] == 7).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_masks_and_losses_are_those_of_the_cpu():
    prepared = masked_lm()
    batch = whole_batch(prepared)
    here, there = prepared.at_step(batch, 3), prepared.at_step({name: t.cuda() for name, t in batch.items()}, 3)
    assert all(torch.equal(here[name], there[name].cpu()) for name in here if name != "places")
    targets = here["labels"] != IGNORED
    assert torch.equal(here["places"][targets], there["places"].cpu()[targets])
    expected = prepared.loss_per_example(prepared.model, here)
    found = prepared.loss_per_example(prepared.model.cuda(), there)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_special_tokens_and_padding_are_never_masked(monkeypatch):
    monkeypatch.setattr("dpoptim.app.data.examples.MASK_FRACTION", 0.9)
    prepared = masked_lm()
    batch = whole_batch(prepared)
    seen = prepared.at_step(batch, 0)
    special = torch.isin(batch["input_ids"], torch.tensor(WORDS.all_special_ids))
    assert torch.equal(seen["input_ids"][special], batch["input_ids"][special])
    assert not torch.isin(seen["labels"], torch.tensor(WORDS.all_special_ids)).any()


def test_at_least_one_token_is_masked_if_there_is_any():
    assert target_counts(np.array([0, 1, 20, 100]), 0.15).tolist() == [0, 1, 3, 15]
