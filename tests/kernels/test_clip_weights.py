"""Clip weights against the same arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch

from dpoptim.kernels.clip_weights import clip_weights, length_products, sum_of_parts


def of(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_weights():
    found = clip_weights(
        of(0, 1, 16, math.inf, math.nan, 16), of(0, 0, 0, 0, 0, 4.1), clip_norm=6.0, factor=2, dtype=torch.float32
    )
    assert found.norms[:3].tolist() == [0, 2, 8]
    assert found.weights.tolist() == [2, 2, 1.5, 0, 0, 0]
    assert found.weights.dtype == found.norms.dtype == torch.float32
    assert found.needs_recompute.tolist() == [False] * 5 + [True]
    assert found.counts.tolist() == [3, 2, 1]  # infinity is more than the clip norm


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("has_bound", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_clip_weights_match_a_loop_over_examples(factor, has_bound, dtype):
    squares, bounds = torch.randn(2, 1500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares.square_()
    squares[:5] = of(0.0, math.inf, math.nan, 1e76, 0.25)
    bounds[3:6] = of(math.nan, 0.5, math.nan)
    found = clip_weights(squares, bounds if has_bound else None, clip_norm=0.6, factor=factor, dtype=dtype)
    counts, (limit, tiny) = [0, 0, 0], (0.6 / factor, torch.finfo(torch.float32).tiny)
    for j, (square, bound) in enumerate(zip(squares.tolist(), bounds.tolist(), strict=True)):
        norm = math.sqrt(square)
        share = limit / norm if norm else math.inf
        is_left_out = not share >= tiny
        is_doubtful = has_bound and not is_left_out and not bound <= norm
        counts = [
            count + is_true for count, is_true in zip(counts, (norm > limit, is_left_out, is_doubtful), strict=True)
        ]
        assert bool(found.needs_recompute[j]) == is_doubtful
        expected = 0.0 if is_left_out or is_doubtful else min(share, 1.0) * factor
        assert float(found.weights[j]) == pytest.approx(expected, rel=1e-6)
        assert float(found.norms[j]) == pytest.approx(norm * factor, rel=1e-6, nan_ok=True)
    assert found.counts.tolist() == counts
    assert found.weights.dtype == found.norms.dtype == dtype


def test_norms_at_the_bound_are_trusted_and_nan_bounds_are_not():
    found = clip_weights(of(4, 4, 4), of(2, math.nan, 2.001), clip_norm=9.0, factor=1, dtype=torch.float64)
    assert found.needs_recompute.tolist() == [False, True, True]


@pytest.mark.parametrize("is_gram", [False, True])
def test_sums_of_parts(is_gram):
    squares, min_trusted = sum_of_parts(of(9), of(16), of(-11), of(700), of(300), trust=1000.0, is_gram=is_gram)
    whole = 9 + 16 + (100_000 if is_gram else 140)  # 1000 · 1000/10, or 1000 · 7/50
    assert squares.tolist() == [3.0]
    assert float(min_trusted) == pytest.approx((3 + 300 + 140) / 1000 + math.sqrt(whole / 1000), rel=1e-14)


def test_non_finite_product_makes_the_sum_nan():
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
    if not known:
        assert torch.equal(length_products(left, right) * 2.5, found)
