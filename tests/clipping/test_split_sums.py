"""Sums of a table that is used as a projection and for look-ups, by ordinary matrix products with cut weights."""

from __future__ import annotations

import torch
from torch import Tensor

from dpoptim.clipping.gradient_factors import OuterProduct, RowUpdates
from dpoptim.clipping.parameter_gradients import ParameterGradients
from dpoptim.kernels import norms


def test_all_uses_of_a_table_have_the_same_weights(monkeypatch):
    """An example adds a multiple of its gradient, however much its look-ups and projections cancel."""
    generator = torch.Generator().manual_seed(5)
    examples, positions, rows, cols = 7, 3, 31, 8
    gradients = ParameterGradients(torch.Size((rows, cols)))
    left, right = torch.randn(examples, positions, rows, generator=generator), torch.randn(examples, positions, cols)
    ids = torch.randint(0, rows, (examples, positions), generator=generator)
    gradients.add(OuterProduct(left, right))
    gradients.add(RowUpdates(ids, -100 * torch.randn(examples, positions, cols, generator=generator)))
    weights = torch.rand(examples, generator=generator)
    plain = norms.outer_weighted_sum

    def split_sum(left: Tensor, right: Tensor, weights: Tensor, out: Tensor, *, split: bool = False) -> Tensor:
        assert split
        return plain(left, right, weights, out)

    monkeypatch.setattr(norms, "split_is_faster", lambda *factors: True)
    monkeypatch.setattr(norms, "outer_weighted_sum", split_sum)
    found = gradients.weighted_sum(weights)
    each = torch.stack([gradients.example(j) for j in range(examples)]).double()
    expected = torch.einsum("j,jrc->rc", norms.cut(weights).double(), each)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    full = torch.einsum("j,jrc->rc", weights.double(), each)
    assert (full - expected).abs().max() > 1e-2
