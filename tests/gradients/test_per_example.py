"""Arithmetic of one number an example, against the same by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dpoptim.gradients import kernels
from dpoptim.gradients.clipping import ClippedSums
from dpoptim.gradients.per_example import length_products, sum_of_parts, weighed
from dpoptim.gradients.physical_batch import PhysicalBatch
from tests.gradients.test_extremes import Parameters, cancelling, norm, of_outer


def of(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_weights():
    found = weighed(
        of(0, 1, 16, math.inf, math.nan, 16), of(0, 0, 0, 0, 0, 4.1), clip_norm=6.0, factor=2, dtype=torch.float32
    )
    assert found.norms[:3].tolist() == [0, 2, 8]
    assert found.weights.tolist() == [2, 2, 1.5, 0, 0, 0]
    assert found.weights.dtype == found.norms.dtype == torch.float32
    assert found.apart.tolist() == [False] * 5 + [True]
    assert found.counts.tolist() == [3, 2, 1]  # infinity is more than the clip norm


def test_a_bound_that_is_met_is_trusted_and_one_that_is_no_number_is_not():
    found = weighed(of(4, 4, 4), of(2, math.nan, 2.001), clip_norm=9.0, factor=1, dtype=torch.float64)
    assert found.apart.tolist() == [False, True, True]


@pytest.mark.parametrize("is_gram", [False, True])
def test_sums_of_parts(is_gram):
    d, e, cross, parts_of_d, parts_of_e, trust = 9.0, 16.0, -11.0, 700.0, 300.0, 1000.0
    squares, least = sum_of_parts(*(of(x) for x in (d, e, cross, parts_of_d, parts_of_e)), trust=trust, is_gram=is_gram)
    whole = 9 + 16 + (100_000 if is_gram else 140)  # 1000 · 1000/10, or 1000 · 7/50
    assert squares.tolist() == [3.0]
    assert float(least) == pytest.approx((3 + 300 + 140) / 1000 + math.sqrt(whole / 1000), rel=1e-14)


def test_a_product_that_is_not_finite_makes_the_sum_no_number():
    whole = sum_of_parts(
        of(1, 1, 1, 1), of(1, 1, 1, 1), of(-9, -math.inf, math.inf, math.nan), of(1, 1, 1, 1), of(1, 1, 1, 1),
        trust=1e3, is_gram=False,
    )[0]  # fmt: skip
    assert whole[0] == 0
    assert whole[1:].isnan().all()


@pytest.mark.parametrize("known", [False, True])
def test_products_of_lengths(known):
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(3, 4, 5, generator=generator), torch.randn(3, 4, 6, generator=generator)
    left[1], right[1] = 0, 0
    left[1, 2, 0], right[1, 2, 1] = 1.0, 1e-30  # whose square vanishes
    factor = torch.tensor(2.5)
    found = length_products(left, right, left_lengths=left.norm(dim=2) if known else None, factor=factor)
    expected = [
        2.5 * sum(math.hypot(*left[j, t].tolist()) * math.hypot(*right[j, t].tolist()) for t in range(4))
        for j in range(3)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(length_products(left, right, left_lengths=None, factor=None) * 2.5, found) or known


@pytest.mark.parametrize("mean_loss", [False, True], ids=["sum", "mean"])
def test_an_example_by_itself_counts_once_and_as_much_as_the_others(mean_loss):
    """Three examples, of which the first one's positions cancel."""
    left, right = cancelling(0, 3, 5)
    left, right = (torch.cat([each, *[torch.rand_like(each)] * 2]) for each in (left, right))
    factor = 3 if mean_loss else 1
    sums = ClippedSums(Parameters(w=(3, 5)), clip_norm=1e-3, mean_loss=mean_loss)
    with torch.no_grad():
        sums._add(PhysicalBatch(gradients={"w": of_outer(left / factor, right)}, examples=3))
    grads = left.double().mT @ right.double()
    grads[0] = (left[0] / factor).T @ right[0] * factor  # of which little but rounding is left
    lengths = grads.flatten(1).norm(dim=1)
    assert float(lengths[0]) > 1e-3
    assert (sums.counts.clipped, sums.counts.nonfinite) == (3, 0)
    total = sums.take()[0]
    others = (grads[1:] / lengths[1:, None, None] * 1e-3).sum(0).float()
    assert norm({"w": total["w"] - others}) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("mean_loss", [False, True], ids=["sum", "mean"])
def test_how_large_a_batch_is_does_not_change_which_norms_are_trusted(mean_loss, monkeypatch):
    """`least` is in the unit of the gradients, as the squares are: both are multiplied by what a mean divides."""
    sums = ClippedSums(Parameters(w=(3, 5)), clip_norm=1.0, mean_loss=mean_loss)
    left, right = torch.rand(8, 2, 3), torch.rand(8, 2, 5)
    gradients = of_outer(left, right)
    squared = (left.mT @ right).double().square().sum((1, 2))
    alone = []
    monkeypatch.setattr(sums, "_measured", lambda gradients: (squared, 0.5 * squared.sqrt()))
    monkeypatch.setattr(sums, "_clip_and_sum_one", lambda batch, j, factor: alone.append(j))
    with torch.no_grad():
        sums._add(PhysicalBatch(gradients={"w": gradients}, examples=8))
        monkeypatch.setattr(sums, "_measured", lambda gradients: (squared, 2 * squared.sqrt()))
        assert alone == []
        sums._add(PhysicalBatch(gradients={"w": gradients}, examples=8))
    assert alone == list(range(8))


def test_norms_follow_the_gradients_dtype():
    """Also where a model changes it after the optimizer was made."""
    model = nn.Linear(2, 2)
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    model(torch.ones(3, 2)).sum().backward()
    model.double()
    model(torch.ones(3, 2, dtype=torch.float64)).sum().backward()
    sums.engine.flush()
    assert [norms.dtype for norms in sums.norms] == [torch.float32, torch.float64]


@pytest.mark.gpu
def test_kernels_run_on_the_current_device_alone(monkeypatch):
    there = torch.ones(2, device="cuda")
    assert kernels.on_gpu(there, None) is kernels.wide_on_gpu(there) is kernels._kernels()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    assert kernels.on_gpu(there) is kernels.wide_on_gpu(there) is None
