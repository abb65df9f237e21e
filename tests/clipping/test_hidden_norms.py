"""Examples built to hide their norm by underflow, overflow or drift in float32 do not exceed the clip norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dpoptim.clipping import clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.engine import PhysicalBatch
from tests.clipping.test_extremes import Parameters, of_outer


def added(model, loss_fn, batch, clip_norm, scale=None):
    """Return the scaled norm of the sum of one example, in clip norms."""
    sums, _ = clipped_sum(model, loss_fn, batch, clip_norm=clip_norm, scale=scale)
    scaled = [total.double() * (1.0 if scale is None else scale[name].double()) for name, total in sums.items()]
    return math.sqrt(sum(float(each.square().sum()) for each in scaled)) / clip_norm


def weighted(model, batch):
    """Return the sum of the output times weights from the batch."""
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


@pytest.mark.parametrize("to_inputs", [True, False], ids=["inputs", "gradients"])
def test_faint_positions_beside_a_huge_one_with_factor_zero(to_inputs):
    """Divided by the 1e19 of that position, the others are so small that their products vanish."""
    faint, strong = torch.zeros(1, 252, 1024), torch.zeros(1, 252, 1024)
    faint[0, :250], strong[0, :250] = 2.4e-4, 10.0
    faint[0, 251, 2] = 1e19
    for small in (5e10, 3e11):
        faint[0, 250, 0], strong[0, 250, 0] = small, 1e-11
        batch = (faint, strong) if to_inputs else (strong, faint)
        assert added(nn.Linear(1024, 1024, bias=False), weighted, batch, 1.0) <= 1 + 1e-3


def test_cross_terms_that_overflow():
    """2⟨D, E⟩ is -inf in float32, the squares of D and E are finite, and a second parameter has a norm too."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.other = nn.Embedding(64, 32), nn.Linear(32, 32, bias=False)
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids, hidden, by_table, by_logits, by_other):
            parts = (self.table(ids) * by_table, self.head(hidden) * by_logits, self.other(hidden) * by_other)
            return sum(part.sum((1, 2)) for part in parts)

    hidden, by_table, by_other = (torch.zeros(1, 3, 32) for _ in range(3))
    by_logits = torch.zeros(1, 3, 64)
    hidden[0, :, 0] = 1e12
    by_logits[0, 0, 7:9], by_table[0, 0, 0], by_other[0, 0, 0] = 1e13, -1e15, 1e12
    batch = (torch.full((1, 3), 7), hidden, by_table, by_logits, by_other)
    assert added(Tied(), lambda m, b: m(*b), batch, 1.0) <= 1 + 1e-3


def drifting(length, size, ratio):
    """Return equal numbers, half of them nearly negated: their partial sums all round in one direction."""
    half = torch.full((length // 2,), size)
    return torch.cat([half, -half * (1 - 2 / ratio)]).view(1, length, 1)


@pytest.mark.parametrize(
    ("length", "size", "ratio", "clip_norm"),
    [(512, 1.57767368, 918.43025, 8.908893e-3), (4096, 1.8214007, 953.34598, 6.3560546e-3),
     (20_000, 1.6623923, 900.75015, 7.2129966e-3)],
)  # fmt: skip
def test_one_row_looked_up_many_times(length, size, ratio, clip_norm):
    batch = (torch.full((1, length), 20), drifting(length, size, ratio))
    assert added(nn.Embedding(50, 1), weighted, batch, clip_norm) <= 1 + 1e-3


@pytest.mark.parametrize("length", [128, 512, 4096])
def test_many_positions_that_cancel(length):
    """Their products are formed a block at a time."""
    generator = torch.Generator().manual_seed(length)
    for _ in range(100):
        size, ratio, clip = (torch.rand(3, generator=generator) * torch.tensor([1, 690, 5e-3])).tolist()
        values = drifting(length, 1 + size, 300 + ratio).expand(1, length, 8).contiguous()
        sums = ClippedSums(Parameters(w=(8, 8)), clip_norm=5e-3 + clip)
        sums.scale = {"w": torch.ones(8, 8)}
        with torch.no_grad():
            sums._add(PhysicalBatch(gradients={"w": of_outer(values, torch.ones(1, length, 8))}, examples=1))
        assert float(sums.take()[0]["w"].double().norm()) <= (5e-3 + clip) * (1 + 3e-3)


@pytest.mark.parametrize("scaled", [False, True], ids=["flat", "scaled"])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding, nn.LayerNorm])
def test_examples_without_positions(kind, scaled):
    model = nn.LayerNorm(4) if kind is nn.LayerNorm else kind(4, 4)
    inputs = torch.zeros(3, 0, dtype=torch.long) if kind is nn.Embedding else torch.zeros(3, 0, 4)
    scale = {name: torch.ones_like(p) for name, p in model.named_parameters()} if scaled else None
    sums, norms = clipped_sum(model, lambda m, x: m(x).sum((1, 2)), inputs, clip_norm=1.0, scale=scale)
    assert not norms.any()
    assert not any(total.any() for total in sums.values())


@pytest.mark.parametrize("share", [0.501, 0.6, 1.51])
def test_weights_that_make_factors_subnormal(share):
    clip_norm = 3e38 * 1024 * 2.0**-149 * share
    batch = (torch.full((1, 1024), 1e-18), torch.full((1, 1024), 3e38))
    assert added(nn.Linear(1024, 1024, bias=False), weighted, batch, clip_norm) <= 1 + 1e-3


@pytest.mark.parametrize("size", [1e-8, 1e-16, 1e-22, 1e-23])
def test_scales_whose_squares_vanish(size):
    batch = (torch.full((1, 8), 1e15), torch.full((1, 8), 1e15))
    scale = {"weight": torch.full((8, 8), size)}
    assert added(nn.Linear(8, 8, bias=False), weighted, batch, 1.0, scale) <= 1 + 1e-3
