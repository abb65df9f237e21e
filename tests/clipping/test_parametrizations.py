"""Layers whose weight is computed from other parameters; `models` has more of them, in eval mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import dpoptim
from dpoptim.clipping import clipped_sum
from tests.clipping.models import EXAMPLES, squares
from tests.clipping.one_at_a_time import clipped_sum_one_at_a_time


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(spectral_norm(nn.Linear(6, 5)), nn.Tanh(), spectral_norm(nn.Linear(5, 4))).double()


def test_a_spectral_norm_in_training_is_the_same_for_all_examples():
    model, batch = network(), torch.randn(EXAMPLES, 6, dtype=torch.float64)
    found, _ = clipped_sum(model, squares, batch, clip_norm=0.5)
    expected, norms = clipped_sum_one_at_a_time(model.eval(), squares, batch, EXAMPLES, 0.5, None)
    assert (norms > 0.5).any()
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total)


def test_a_step_updates_a_spectral_norm_as_often_as_without_privacy():
    plan = dpoptim.PrivacyPlan(num_examples=40, batch_size=8, steps=4).calibrate(epsilon=8.0, delta=1e-3)
    model = network()
    optimizer = dpoptim.scale_then_privatize(model, plan, lr=1e-2)
    for step, (batch,) in enumerate(dpoptim.private_loader(torch.utils.data.TensorDataset(torch.randn(40, 6)), plan)):
        same = copy.deepcopy(model)
        losses = squares(model, batch.double())
        if step:  # in the first step, the check that examples do not mix runs the model too
            same(batch.double())
            assert all(map(torch.equal, model.buffers(), same.buffers()))
        losses.sum().backward()
        optimizer.step()


def test_a_frozen_source_leaves_the_bias_trainable():
    layer = weight_norm(nn.Linear(6, 4).double())
    layer.parametrizations.requires_grad_(False)
    batch = torch.randn(EXAMPLES, 6, dtype=torch.float64)
    found, _ = clipped_sum(layer, squares, batch, clip_norm=0.5)
    assert list(found) == ["bias"]
    torch.testing.assert_close(
        found["bias"], clipped_sum_one_at_a_time(layer, squares, batch, EXAMPLES, 0.5, None)[0]["bias"]
    )


def test_what_vmap_cannot_run_is_refused():
    model = weight_norm(nn.LSTM(4, 3, batch_first=True), "weight_hh_l0").double()
    with pytest.raises(ValueError, match=r"cannot run one example at a time.*Freeze it"):
        clipped_sum(model, squares, torch.randn(EXAMPLES, 5, 4, dtype=torch.float64), clip_norm=1.0)
