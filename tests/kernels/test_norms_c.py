"""Scaled norms by a loop in C against float64, one example at a time."""

from __future__ import annotations

import pytest
import torch

from dpoptim.clipping.gradient_factors import OuterProduct, RowUpdates
from dpoptim.clipping.parameter_gradients import ParameterGradients
from dpoptim.kernels import norms, norms_c
from tests.torch_settings import default_dtype, threads

pytestmark = pytest.mark.skipif(norms_c._loops() is None, reason="needs a compiler")
SIZES = [(3, 2, 8, 8), (3, 5, 1000, 37), (2, 19, 523, 128), (1, 3, 7, 5), (4, 2, 1, 64), (2, 130, 65, 40)]


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(norms_c, "WORTH_COMPILING", 0)
    monkeypatch.setattr(norms_c, "WORTH_COMPILING_SQUARES", 0)


def drawn(examples, positions, rows, cols):
    generator = torch.Generator().manual_seed(rows)
    shapes = (examples, positions, rows), (examples, positions, cols), (rows, cols)
    left, right, scale = (torch.randn(shape, generator=generator) for shape in shapes)
    return left, right, scale.abs() + 0.01


def found_by_loop(left, right, scale):
    found = norms_c.outer_squares(left, right, scale)
    assert found is not None
    return found


def exactly(left, right, scale):
    factors = zip(left.double(), right.double(), strict=True)
    return torch.stack([((a.T @ b) * scale.double()).square().sum() for a, b in factors])


@pytest.mark.parametrize("sizes", SIZES)
def test_norms(sizes):
    left, right, scale = drawn(*sizes)
    found = found_by_loop(left, right, scale)
    torch.testing.assert_close(found, exactly(left, right, scale), rtol=1e-5, atol=0)


def test_wide_rows_of_equal_numbers_stay_exact():
    """Sums of a quarter of a million equal squares, which one float32 would round down."""
    left, right = torch.ones(1, 1, 8), torch.full((1, 1, 250_002), 0.83)
    found = found_by_loop(left, right, torch.ones(8, 250_002))
    torch.testing.assert_close(found, 8 * right.double().square().sum((1, 2)), rtol=3e-6, atol=0)


def test_shapes_that_do_not_fit():
    left, right, scale = drawn(3, 5, 100, 37)
    with pytest.raises(ValueError, match="do not fit"):
        norms_c.outer_squares(left, right[:, :4], scale)
    with pytest.raises(ValueError, match="do not fit"):
        norms_c.outer_squares(left, right, scale[:50])


@pytest.mark.parametrize("wrong", ["product * factor", "a * a", "a;"])
def test_loops_that_are_wrong_are_not_used(monkeypatch, wrong):
    changed = norms_c._SOURCE.replace(f"= {wrong}", f"= 0.999f * {wrong}")
    assert changed != norms_c._SOURCE
    monkeypatch.setattr(norms_c, "_SOURCE", changed)
    assert norms_c._loops.__wrapped__() is None


def test_factors_with_padding_and_other_strides():
    left, right, scale = drawn(3, 5, 100, 37)
    padded = torch.full((3, 5, 128), torch.nan)
    padded[..., :100] = left
    found = found_by_loop(padded[..., :100], right.mT.contiguous().mT, scale.T.contiguous().T)
    assert torch.equal(found, found_by_loop(left, right, scale))


def test_the_number_of_threads_changes_nothing():
    left, right, scale = drawn(3, 4, 3000, 24)
    found = []
    for count in (1, 3):
        with threads(count):
            found.append(found_by_loop(left, right, scale))
    assert torch.equal(*found)


def test_the_default_dtype_changes_nothing():
    """Memory that the loop fills with float32 must not be allocated as bfloat16."""
    left, right, scale = drawn(3, 5, 100, 37)
    expected = found_by_loop(left, right, scale)
    with default_dtype(torch.bfloat16):
        assert norms_c._loops.__wrapped__() is not None
        assert torch.equal(found_by_loop(left, right, scale), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_example_does_not_affect_others(bad):
    left, right, scale = drawn(3, 5, 100, 37)
    expected = found_by_loop(left, right, scale)
    left[1, 2, 50] = bad
    found = found_by_loop(left, right, scale)
    assert not found[1].isfinite()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_other_dtypes_and_small_work_use_the_plain_functions(monkeypatch):
    left, right, scale = drawn(3, 5, 100, 37)
    assert norms_c.outer_squares(left.double(), right.double(), scale.double()) is None
    assert norms_c.outer_squares(left.bfloat16(), right.bfloat16(), scale) is None
    monkeypatch.setattr(norms_c, "WORTH_COMPILING", left.numel() * 37 + 1)
    assert norms_c.outer_squares(left, right, scale) is None


@pytest.mark.parametrize("looked_up", [False, True])
def test_squares_of_a_tied_table(looked_up, monkeypatch):
    """The norm of the sum of both uses, against the plain function and float64."""
    left, right, scale = drawn(3, 6, 50, 21)
    ids, values = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0)), torch.randn(3, 9, 21)
    own = ParameterGradients(torch.Size([50, 21]))
    own.add(OuterProduct(left, right))
    tables = left.double().mT @ right.double()
    if looked_up:
        own.add(RowUpdates(ids, values))
        for j in range(3):
            tables[j].index_add_(0, ids[j], values[j].double())
    expected = (tables * scale).square().sum((1, 2))
    asked = []
    loop = norms_c.outer_squares

    def counted(*given):
        asked.append(1)
        return loop(*given)

    monkeypatch.setattr(norms_c, "outer_squares", counted)
    torch.testing.assert_close(own.measured(scale)[0], expected, rtol=1e-5, atol=0)
    assert asked
    monkeypatch.setattr(norms_c, "outer_squares", lambda *given: None)
    torch.testing.assert_close(own.measured(scale)[0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_squares_of_many(count, scaled):
    generator, shapes = torch.Generator().manual_seed(0), [(4, 3), (), (5000,), (64, 64), (1, 17), (0, 3)]
    grads = [torch.randn(3, *shape, generator=generator) for shape in shapes]
    scales = [torch.rand(shape, generator=generator) + 0.1 if scaled else torch.ones(shape) for shape in shapes]
    given = scales if scaled else None
    grads[3] = grads[3].mT  # as products of matrices may lie
    expected = sum(
        (grad.double() * scale.double()).square().flatten(1).sum(1) if grad.ndim > 1 else (grad * scale).double() ** 2
        for grad, scale in zip(grads, scales, strict=True)
    )
    with threads(count):
        found = norms_c.many_squares(grads, given)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert torch.equal(norms.many_squares(grads, given), found)
    grads[0][1] = torch.nan
    again = norms.many_squares(grads, given)
    assert again[1].isnan()
    assert torch.equal(again[[0, 2]], found[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(3, 4, 3), (2, 1, 37), (3, 19, 1100), (2, 16, 64), (1, 4, norms.DOT_ELEMENTS + 7)])
def test_quadratic_forms(sizes, dtype):
    """In float32 by the loop, in float64 by the plain function; the matrices need not be symmetric."""
    (examples, positions, width), generator = sizes, torch.Generator().manual_seed(sizes[2])
    matrices = torch.rand(examples, positions, positions, generator=generator, dtype=dtype)
    factors = torch.rand(examples, positions, width + 2, generator=generator, dtype=dtype)[..., :width]
    expected = ((matrices.double() @ factors.double()) * factors.double()).sum((1, 2))
    found, by_loop = norms.quadratic_forms(matrices, factors), norms_c.quadratic_forms(matrices, factors)
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=0)
    assert (by_loop is None) == (dtype == torch.float64)
    assert by_loop is None or torch.equal(by_loop, found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [(0, 0), (7, 36), (10, 20)])
def test_non_finite_factors_affect_only_their_example(bad, at):
    generator = torch.Generator().manual_seed(0)
    matrices, factors = torch.rand(3, 11, 11, generator=generator), torch.rand(3, 11, 37, generator=generator)
    expected = norms_c.quadratic_forms(matrices, factors)
    factors[1][at] = bad
    found = norms_c.quadratic_forms(matrices, factors)
    assert expected is not None
    assert found is not None
    assert not found[1].isfinite()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_sums_made_in_place():
    left, right, _ = drawn(3, 5, 10, 4)
    weights, total = torch.tensor([0.5, 0.0, 2.0]), torch.full((10, 4), torch.nan)
    norms.outer_weighted_sum(left, right, weights, out=total)
    assert torch.equal(total, norms.outer_weighted_sum(left, right, weights))
    ids = torch.tensor([[1, 1], [2, 3], [9, 1]])
    values = torch.randn(3, 2, 4)
    expected = total + norms.row_weighted_sum(ids, values, weights, 10)
    torch.testing.assert_close(norms.row_weighted_sum(ids, values, weights, 10, into=total), expected)
