"""Every task with private training: clipped sums, two steps, a resumed run, independent examples."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import dpoptim
from dpoptim.app import Prepared
from dpoptim.clipping import clipped_sum
from tests.app.cases import (
    HEADS,
    TASKS,
    masked_lm,
    prepared_for,
    whole_batch,
)
from tests.clipping.one_at_a_time import clipped_sum_one_at_a_time, random_scale


@pytest.mark.parametrize(("head", "scaled"), [(head, place % 2 == 0) for place, head in enumerate(HEADS)])
def test_clipped_sums_of_masked_losses_agree_with_one_at_a_time(head, scaled):
    prepared = masked_lm(head)
    model = prepared.model
    batch = prepared.at_step(whole_batch(prepared), 0)
    scale = random_scale(model) if scaled else None
    plain = dataclasses.replace(prepared, targets_only=False).loss_per_example
    expected, expected_norms = clipped_sum_one_at_a_time(model, plain, batch, 7, 1.0, scale)
    sums, norms = clipped_sum(model, prepared.loss_per_example, batch, clip_norm=1.0, scale=scale)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=1e-5)
    assert norms[2] == 0
    assert (norms[[0, 1]] > 1).all(), "nothing is clipped"
    for name, value in expected.items():
        torch.testing.assert_close(sums[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_clipped_sums_of_every_task_agree_with_one_at_a_time(name, images):
    prepared = prepared_for(name, images)
    batch = prepared.at_step(whole_batch(prepared), 0)
    examples = len(prepared.records)
    expected, norms = clipped_sum_one_at_a_time(prepared.model, prepared.loss_per_example, batch, examples, 0.5, None)
    sums, found = clipped_sum(prepared.model, prepared.loss_per_example, batch, clip_norm=0.5)
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-5)
    for parameter, value in expected.items():
        torch.testing.assert_close(sums[parameter], value, rtol=1e-3, atol=1e-5)


def run(prepared: Prepared, *, steps: int = 4, stop: int | None = None, state: Any = None) -> Any:
    """Train from a known key; returns the state, and ends early after `stop` steps."""
    plan = dpoptim.PrivacyPlan(num_examples=len(prepared.records), batch_size=3, steps=steps, noise_multiplier=0.5)
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    cut: Any = {"micro_batch_size": 2}
    if prepared.lengths is not None:
        cut |= {"lengths": prepared.lengths, "micro_batch_tokens": 64, "bucket": 8}
    loader = dpoptim.private_loader(prepared.dataset, plan, key=key, run_id="test", collate_fn=prepared.collate, **cut)
    optimizer = dpoptim.scale_then_privatize(prepared.model, plan, lr=1e-2, key=key, run_id="test")
    if state is not None:
        prepared.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    prepared.model.train()
    for batch in prepared.batches(loader):
        prepared.loss_per_example(prepared.model, batch).sum().backward()
        optimizer.step()
        if loader.step_ends and loader.next_step == stop:
            break
    return copy.deepcopy(
        {"model": prepared.model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    )


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_privately(name, images):
    prepared = prepared_for(name, images)
    batch = prepared.at_step(whole_batch(prepared), 0)
    dpoptim.check_example_independence(prepared.model, prepared.loss_per_example, batch)
    before = copy.deepcopy(prepared.model.state_dict())
    after = run(prepared, steps=2)["model"]
    assert all(torch.isfinite(value).all() for value in after.values() if value.is_floating_point())
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_a_resumed_run_is_the_same_bit_for_bit():
    whole = run(masked_lm())
    resumed = run(masked_lm(), state=run(masked_lm(), stop=2))
    assert all(torch.equal(whole["model"][name], resumed["model"][name]) for name in whole["model"])
