"""Norms of released gradients."""

from __future__ import annotations

import math

import torch

from dpoptim.clipping import Released
from dpoptim.integrations.released_norms import released_norms


def test_parameters_without_a_scale_have_scale_one():
    values = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    released = Released(step=0, gradient=values, square=None, noise_variance=0.25)
    norms = [float(norm) for norm in released_norms(released, {"b": torch.tensor([0.5])})]
    assert norms == [5.0, math.sqrt(0.25 * (2 + 4))]
