"""Sums over look-ups by loops in C against the definition, in float64."""

from __future__ import annotations

import pytest
import torch

from dpoptim.kernels import norms, rows_c
from tests.torch_settings import default_dtype, threads

pytestmark = pytest.mark.skipif(rows_c._loops() is None, reason="needs a compiler")
SIZES = [(3, 5, 4, 70), (1, 1, 1, 1), (4, 40, 7, 64), (2, 9, 300, 33), (5, 3, 2, 200)]  # look-ups of all sizes repeat


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(rows_c, "WORTH_COMPILING", 0)


class Drawn:
    def __init__(self, examples, positions, rows, width):
        generator, self.rows = torch.Generator().manual_seed(rows), rows
        self.ids = torch.randint(0, rows, (examples, positions), generator=generator)
        shapes = (examples, positions, width), (examples, 6, rows), (examples, 6, width), (rows, width), (examples,)
        self.values, self.left, self.right, self.scale, self.weights = (
            torch.randn(shape, generator=generator) for shape in shapes
        )
        self.scale = self.scale.abs() + 0.01

    def tables(self, scale=None):
        tables = torch.zeros(len(self.ids), self.rows, self.values.shape[2], dtype=torch.float64)
        for table, ids, values in zip(tables, self.ids, self.values, strict=True):
            table.index_add_(0, ids, values.double())
        return tables if scale is None else tables * scale

    def found(self, scale=None, ids=None):
        """All results, by the functions that choose a loop."""
        ids, total = self.ids if ids is None else ids, torch.ones(self.rows, self.values.shape[2])
        return (
            *norms.row_squares(ids, self.values, scale, self.rows),
            norms.outer_row_products(self.left, self.right, ids, self.values, scale),
            norms.row_weighted_sum(ids, self.values, self.weights, self.rows, into=total),
        )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("scaled", [False, True])
def test_by_the_definition(sizes, scaled):
    drawn = Drawn(*sizes)
    scale = drawn.scale if scaled else None
    squares, bound, products, total = drawn.found(scale)
    tables, factors = drawn.tables(scale), torch.ones(()) if scale is None else scale
    alone = (drawn.values.double() * (1 if scale is None else scale[drawn.ids])).square().sum((1, 2))
    outers = (drawn.left.double().mT @ drawn.right.double()) * factors
    summed = 1 + torch.tensordot(drawn.weights.double(), drawn.tables(), 1)
    torch.testing.assert_close(squares, tables.square().sum((1, 2)), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(bound, (alone * sizes[1]).sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(products, (outers * tables).sum((1, 2)), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(total.double(), summed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_plain_functions_agree(scaled, monkeypatch):
    drawn = Drawn(3, 40, 30, 128)
    scale, asked = drawn.scale if scaled else None, []
    loops = rows_c._loops_for

    def counted(*given):
        asked.append(1)
        return loops(*given)

    monkeypatch.setattr(rows_c, "_loops_for", counted)
    by_loops = drawn.found(scale)
    assert len(asked) == 3
    monkeypatch.setattr(rows_c, "_loops_for", lambda *given: None)
    for found, plain in zip(by_loops, drawn.found(scale), strict=True):
        torch.testing.assert_close(found, plain, rtol=2e-5, atol=2e-5)


def test_rows_that_all_examples_look_up():
    drawn = Drawn(3, 5, 9, 70)
    shared = torch.tensor([[0, 4, 2, 8, 4]]).expand(3, -1)
    for found, expected in zip(drawn.found(ids=shared), drawn.found(ids=shared.clone()), strict=True):
        assert torch.equal(found, expected)


def test_other_strides_and_integers():
    drawn = Drawn(3, 5, 9, 70)
    expected = drawn.found(drawn.scale)
    for name in ("values", "left", "right"):
        factor = getattr(drawn, name)
        padded = torch.full((*factor.shape[:2], factor.shape[2] + 3), torch.nan)
        padded[..., :-3] = factor
        setattr(drawn, name, padded[..., :-3])
    drawn.scale, drawn.ids = drawn.scale.T.contiguous().T, drawn.ids.T.contiguous().T.int()
    for found, like in zip(drawn.found(drawn.scale), expected, strict=True):
        assert torch.equal(found, like)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_example_does_not_affect_others(bad):
    drawn = Drawn(3, 5, 9, 70)
    drawn.weights[1] = 0
    *measured, total = drawn.found()
    drawn.values[1, 2, 69] = bad
    *found, again = drawn.found()
    assert torch.equal(again, total)
    for now, before in zip(found, measured, strict=True):
        assert not now[1].isfinite()
        assert torch.equal(now[[0, 2]], before[[0, 2]])


def test_the_number_of_threads_changes_nothing(monkeypatch):
    monkeypatch.setattr(rows_c, "_TOGETHER", 1)
    drawn, results = Drawn(7, 5, 9, 200), []
    for count in (1, 3):
        with threads(count):
            results.append(drawn.found(drawn.scale))
    assert all(torch.equal(one, many) for one, many in zip(*results, strict=True))


@pytest.mark.parametrize("id", [-1, 9])
def test_ids_of_no_row(id):
    drawn = Drawn(3, 5, 9, 70)
    drawn.ids[2, 3] = id
    with pytest.raises(IndexError, match=r"\[0, 9\)"):
        norms.row_squares(drawn.ids, drawn.values, None, 9)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("whole[k] += x * x", "whole[k] += 0.999 * x * x"),
        ("alone[k] += x * x", "alone[k] += 0.999 * x * x"),
        ("factor * factor * v[k]", "factor * v[k]"),
        ("weights[j] != 0", "weights[j] >= 0"),
        ("if (first[id[t]] != t) continue;", ""),
    ],
)
def test_loops_that_are_wrong_are_not_used(monkeypatch, right, wrong):
    assert right in rows_c._SOURCE
    monkeypatch.setattr(rows_c, "_SOURCE", rows_c._SOURCE.replace(right, wrong))
    assert rows_c._loops.__wrapped__() is None


def test_small_work_and_other_dtypes_use_the_plain_functions(monkeypatch):
    drawn = Drawn(3, 5, 9, 70)
    assert rows_c.row_squares(drawn.ids, drawn.values.double(), None, 9) is None
    assert rows_c.row_squares(drawn.ids, drawn.values, drawn.scale.double(), 9) is None
    monkeypatch.setattr(rows_c, "WORTH_COMPILING", drawn.values.numel() + 1)
    assert rows_c.row_squares(drawn.ids, drawn.values, None, 9) is None


def test_the_default_dtype_changes_nothing():
    with default_dtype(torch.bfloat16):
        assert rows_c._loops.__wrapped__() is not None
