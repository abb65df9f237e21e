"""Layers whose weight is computed from other parameters; `models` has more of them, in eval mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
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


def test_a_step_updates_a_spectral_norm_once_whatever_the_batch_is():
    """As the next forward in training would, so that the number of parts or of calls does not matter."""
    plan = dpoptim.PrivacyPlan(num_examples=40, batch_size=8, steps=4, sampling=dpoptim.Poisson())
    plan, data = plan.calibrate(epsilon=8.0, delta=1e-3), torch.utils.data.TensorDataset(torch.randn(40, 6))
    model = network()
    optimizer = dpoptim.scale_then_privatize(model, plan, lr=1e-2)
    loader = dpoptim.private_loader(data, plan, micro_batch_size=3)
    before = [buffer.clone() for buffer in model.buffers()]
    for (batch,) in loader:
        squares(model, batch.double()).sum().backward()
        assert all(map(torch.equal, model.buffers(), before))
        optimizer.step()
        if loader.step_ends:
            plain = copy.deepcopy(model)
            for buffer, earlier in zip(plain.buffers(), before, strict=True):
                buffer.copy_(earlier)
            plain(batch.double())
            assert all(map(torch.equal, model.buffers(), plain.buffers()))
            assert not all(map(torch.equal, model.buffers(), before))
            before = [buffer.clone() for buffer in model.buffers()]


def test_other_state_is_refused():
    class Counts(nn.Module):
        calls: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, weight):
            self.calls += 1
            return weight / (1 + self.calls)

    model = nn.Linear(6, 5).double()
    parametrize.register_parametrization(model, "weight", Counts())
    with pytest.raises(ValueError, match=r"'parametrizations\.weight\.0\.calls' changes"):
        clipped_sum(model, squares, torch.randn(EXAMPLES, 6, dtype=torch.float64), clip_norm=1.0)


def test_a_padding_row_is_refused_where_vmap_would_train_it():
    model = weight_norm(nn.Embedding(9, 6, padding_idx=0)).double()
    with pytest.raises(ValueError, match="trains the padding row of ParametrizedEmbedding"):
        clipped_sum(model, squares, torch.randint(0, 9, (EXAMPLES, 4)), clip_norm=1.0)


def test_a_cached_weight_is_refused():
    model = weight_norm(nn.Linear(6, 5)).double()
    with parametrize.cached(), pytest.raises(ValueError, match=r"parametrize\.cached\(\) reuses a weight"):
        clipped_sum(model, squares, torch.randn(EXAMPLES, 6, dtype=torch.float64), clip_norm=1.0)


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
