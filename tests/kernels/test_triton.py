"""Triton's kernels against the plain functions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dpoptim.kernels import normalization, norms
from tests.interpreter import DEVICE, IS_INTERPRETED, needs_triton
from tests.kernels.test_norms import check_first_left_out, check_square_sums, check_weighted_sums, close, made

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# examples, positions, rows, cols: one of each, odd sizes, larger than a tile, wide ones
SHAPES = [(1, 1, 1, 1), (3, 7, 5, 9), (9, 33, 65, 130), (4, 77, 301, 128), (2, 40, 16, 300), (17, 5, 200, 3)]
SPLIT_SHAPES = [(9, 1, 24, 16), (8, 5, 30, 19), (11, 38, 17, 140), (40, 77, 301, 128)]
CLASSES = [None, 2047, 2048, 30_001, 32_768, 50_257]
EXAMPLES, LONG, LOOK_UPS, WIDTHS = 40, 5000, 650, [8, 130]
if IS_INTERPRETED:  # slow, and it rounds to bfloat16 differently from GPUs
    DTYPES, SHAPES = [torch.float32, torch.float16], [(1, 1, 1, 1), (2, 33, 6, 130)]
    SPLIT_SHAPES = SPLIT_SHAPES[:2]
    CLASSES, EXAMPLES, LONG, LOOK_UPS, WIDTHS = [None, 2047, 4100], 2, 600, 130, [8]
CASES = list(itertools.product(SHAPES, (False, True), DTYPES))
if IS_INTERPRETED:  # each dtype with and without a scale, each shape with both dtypes
    CASES = [case for case in CASES if (case[0] == SHAPES[0]) != (case[1] == (case[2] == torch.float16))]


def check_normalised(kind, grad, inputs, weight, bias, settings, bound):
    """A normalization and its gradient against the same in float64; results rounded to 16 bits, less strictly."""
    norm, gradient = getattr(normalization, kind), getattr(normalization, f"{kind}_gradient")
    rounding = {torch.float32: bound, torch.bfloat16: 5e-3, torch.float16: 1e-3}[inputs.dtype]
    found = norm(inputs, weight, bias, *settings)
    exact = norm(inputs.double(), weight.double(), bias.double(), *settings)
    given = (grad, inputs, weight, *found[1:])
    back, expected = gradient(*given), gradient(*(tensor.double() for tensor in given))
    for ours, theirs in ((found, exact), (back, expected)):
        for a, b, most in zip(ours, theirs, (rounding, bound, bound), strict=True):
            close(a, b, most)
    for a, b in zip(back, gradient(*given), strict=True):
        assert torch.equal(a, b)


@needs_triton
@pytest.mark.gpu
class TestOuterWeightedSum:
    """Sums of outer products, tiles of one example after another."""

    # examples, positions, rows, cols: one position; sizes that fill no tile; each factor narrower once
    @pytest.mark.parametrize("shape", [(9, 1, 24, 16), (8, 5, 30, 19), (11, 18, 17, 140)])
    def test_is_exact_up_to_float32(self, shape):
        examples, positions, rows, cols = shape
        left = made(examples, positions, rows, dtype=torch.bfloat16, device=DEVICE)
        right = made(examples, positions, cols, seed=1, dtype=torch.bfloat16, device=DEVICE)
        weights = made(examples, seed=2, dtype=torch.float32, device=DEVICE).abs()
        weights[1] = 0
        each = left.double().mT @ right.double()
        total = torch.einsum("j,jrc->rc", weights.double(), each)
        out = torch.full((rows, cols), torch.nan, device=DEVICE)
        assert norms.outer_weighted_sum(left, right, weights, out=out) is out
        close(out, total, 1e-6)
        assert torch.equal(out, norms.outer_weighted_sum(left, right, weights))
        padded = torch.full((examples, positions, rows + 8 - rows % 8), torch.nan, dtype=left.dtype, device=DEVICE)
        padded[..., :rows] = left
        assert torch.equal(out, norms.outer_weighted_sum(padded[..., :rows], right, weights))
        transposed = torch.empty(cols, rows, device=DEVICE).T
        close(norms.outer_weighted_sum(left, right, weights, out=transposed), total, 1e-6)

    def test_leaves_out_examples_of_weight_0(self):
        left = made(8, 3, 40, dtype=torch.bfloat16, device=DEVICE)
        right = made(8, 3, 24, seed=1, dtype=torch.bfloat16, device=DEVICE)
        weights = made(8, seed=2, dtype=torch.float32, device=DEVICE)
        weights[[0, 3]] = 0
        total = torch.einsum("j,jrc->rc", weights.double(), left.double().mT @ right.double())
        left[0, 1], left[3, 2, 5], right[3, 0, 7] = torch.nan, torch.inf, -torch.inf
        close(norms.outer_weighted_sum(left, right, weights), total, 1e-6)
        assert not norms.outer_weighted_sum(left, right, torch.zeros_like(weights)).any()

    @pytest.mark.parametrize("weight", [1e-11, 1e-30])
    def test_tiny_weights_keep_all_bits(self, weight):
        """A long gradient has a tiny weight; weight·factor is close to the smallest number of float32."""
        left = made(8, 3, 40, dtype=torch.bfloat16, device=DEVICE)
        right = made(8, 3, 24, seed=1, dtype=torch.bfloat16, device=DEVICE)
        weights = torch.full((8,), weight, device=DEVICE)
        left, right = left / weight, right * 1e-8
        total = torch.einsum("j,jrc->rc", weights.double(), left.double().mT @ right.double())
        close(norms.outer_weighted_sum(left, right, weights), total, 1e-6)

    @pytest.mark.parametrize("shape", SPLIT_SHAPES)
    def test_is_exact_for_short_weights_by_matrix_products(self, shape, monkeypatch):
        if IS_INTERPRETED:  # torch multiplies bfloat16 into float32 only on GPUs
            monkeypatch.setattr(torch, "mm", lambda a, b, *, out_dtype, out: out.copy_(a.double() @ b.double()))
            monkeypatch.setattr(torch, "addmm", lambda c, a, b, *, out_dtype, out: out.add_(a.double() @ b.double()))
        examples, positions, rows, cols = shape
        gap = torch.full((examples, positions, rows + 8 - rows % 8), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        left = gap[..., :rows]
        left.copy_(made(examples, positions, rows, device=DEVICE))
        right = made(examples, positions, cols, seed=1, dtype=torch.bfloat16, device=DEVICE)
        weights = norms.cut(made(examples, seed=2, dtype=torch.float32, device=DEVICE).abs())
        each = left.double().mT @ right.double()
        out = torch.full((rows, cols), torch.nan, device=DEVICE)
        assert norms.outer_weighted_sum(left, right, weights, out, split=True) is out
        close(out, torch.einsum("j,jrc->rc", weights.double(), each), 3e-6)
        once = out.clone()
        assert torch.equal(once, norms.outer_weighted_sum(left, right, weights, out, split=True))
        weights[0] = 0
        left[0, 0, 3], right[0, 0, 7] = torch.nan, -torch.inf
        norms.outer_weighted_sum(left, right, weights, out, split=True)
        close(out, torch.einsum("j,jrc->rc", weights[1:].double(), each[1:]), 3e-6)

    @pytest.mark.parametrize(("positions", "is_split"), [(5, True), (38, True), (77, True), (32, False), (130, False)])
    def test_is_split_if_tiles_would_waste_positions(self, positions, is_split):
        left = made(8, positions, 40_008, dtype=torch.bfloat16, device=DEVICE)[..., :40_001]
        right = made(8, positions, 128, seed=1, dtype=torch.bfloat16, device=DEVICE)
        assert norms.split_is_faster(left, right, torch.ones(8, device=DEVICE)) == is_split


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "scaled", "dtype"), CASES)
class TestKernels:
    """Kernels and plain functions from the same numbers of a narrow dtype: both accumulate in float32 or more."""

    def test_outer(self, shape, scaled, dtype):
        examples, positions, rows, cols = shape
        left = made(examples, positions, rows + 3, dtype=dtype, device=DEVICE)[..., :rows]  # at a stride
        right = made(examples, positions, cols, seed=1, dtype=dtype, device=DEVICE)
        scale = made(rows, cols, seed=2, dtype=torch.float32, device=DEVICE).abs() if scaled else None
        weights = made(examples, seed=3, dtype=torch.float32, device=DEVICE)
        exact = left.double().mT @ right.double()
        factor = torch.ones(rows, cols, device=DEVICE) if scale is None else scale
        if dtype != torch.float32:
            nearest = factor.bfloat16()
            factor = torch.where(nearest < factor, nearest.nextafter(torch.full_like(nearest, 9.0)), nearest)
            assert bool((factor >= (1 if scale is None else scale)).all())
        total = torch.einsum("j,jrc->rc", weights.double(), exact)
        for _ in range(2):
            close(norms.outer_squares(left, right, scale), (exact * factor.double()).square().sum((1, 2)), 3e-6)
            close(norms.outer_weighted_sum(left, right, weights), total, 3e-6)
        again = norms.outer_squares(left, right, scale)
        assert torch.equal(again, norms.outer_squares(left, right, scale))
        without_first = weights.clone()
        without_first[0] = 0
        left[0] = torch.nan
        total = torch.einsum("j,jrc->rc", weights[1:].double(), exact[1:])
        close(norms.outer_weighted_sum(left, right, without_first), total, 3e-6)

    def test_many(self, shape, scaled, dtype):
        examples, _, rows, cols = shape
        apart = made(examples, rows + 1, cols, dtype=dtype, device=DEVICE)[:, :rows]  # examples at a stride
        vectors = [made(examples, 8 * n, seed=n, dtype=dtype, device=DEVICE) for n in (1, 130, LONG)]
        grads = [apart, *vectors, made(examples, cols, seed=1, device=DEVICE, dtype=torch.float32)]
        grads.append(made(examples, 0, device=DEVICE, dtype=dtype))
        scales = [made(*grad.shape[1:], seed=3, dtype=torch.float32, device=DEVICE).abs() for grad in grads]
        scales[1] = torch.cat([scales[1][:1], scales[1]])[1:]  # beginning where loads of 16 bytes cannot
        each = sum(
            (g.double() * (s.double() if scaled else 1)).reshape(examples, -1).square().sum(1)
            for g, s in zip(grads, scales, strict=True)
        )
        found = norms.many_squares(grads, scales if scaled else None)
        close(found, each, 1e-6)
        assert torch.equal(found, norms.many_squares(grads, scales if scaled else None))
        check_weighted_sums(grads, made(examples, seed=4, dtype=torch.float32, device=DEVICE), 1e-6)

    def test_rows(self, shape, scaled, dtype):
        examples, positions, rows, cols = shape
        ids = torch.randint(0, rows, (examples, positions), generator=torch.Generator().manual_seed(4)).to(DEVICE)
        values = made(examples, positions, cols, dtype=dtype, device=DEVICE)
        scale = made(rows, cols, seed=2, dtype=torch.float32, device=DEVICE).abs() if scaled else None
        wide = None if scale is None else scale.double()
        exact = norms.row_squares(ids, values.double(), wide, rows)
        for found, expected in zip(norms.row_squares(ids, values, scale, rows), exact, strict=True):
            close(found, expected, 1e-6)
        weights = made(examples, seed=7, dtype=torch.float32, device=DEVICE)
        total = norms.row_weighted_sum(ids, values, weights, rows)
        close(total, norms.row_weighted_sum(ids, values.double(), weights.double(), rows), 1e-6)
        check_first_left_out(ids, values, weights, rows)
        by_position = made(examples, positions, seed=8, dtype=dtype, device=DEVICE)
        close(
            norms.position_sums(values, by_position),
            norms.position_sums(values.double(), by_position.double()),
            1e-6,
        )
        left = made(examples, positions + 1, rows, seed=5, dtype=dtype, device=DEVICE)
        right = made(examples, positions + 1, cols, seed=6, dtype=dtype, device=DEVICE)
        if not scaled:
            check_square_sums(left, right, ids, values, weights, rows, 1e-5)
        else:  # one dtype is wider
            check_square_sums(left, right, ids, values.float() * 1.001, weights, rows, 1e-5)
        found = norms.outer_row_products(left, right, ids, values, scale)
        close(found, norms.outer_row_products(left.double(), right.double(), ids, values.double(), wide), 3e-5)

    def test_strides(self, shape, scaled, dtype):
        """The same numbers with different strides, such as ids of time-major batches."""
        examples, positions, rows, cols = shape
        ids = torch.randint(0, rows, (examples, positions), generator=torch.Generator().manual_seed(4)).to(DEVICE)
        given = ids, *(
            made(examples, positions, width, seed=n, dtype=dtype, device=DEVICE)
            for n, width in enumerate((cols, rows, cols))
        ), made(rows, cols, seed=5, dtype=torch.float32, device=DEVICE).abs()  # fmt: skip
        weights = made(examples, seed=7, dtype=torch.float32, device=DEVICE)
        results = []
        for turn in (False, True):
            i, values, left, right, scale = (each.mT.contiguous().mT if turn else each for each in given)
            by = scale if scaled else None
            results.append([
                *norms.row_squares(i, values, by, rows),
                norms.row_weighted_sum(i, values, weights, rows),
                norms.row_square_sum(i, values, weights, rows),
                norms.outer_squares(left, right, by),
                norms.outer_weighted_sum(left, right, weights),
                norms.outer_square_sum(left, right, weights, i, values),
                norms.outer_row_products(left, right, i, values, by),
                norms.many_squares([values], [made(positions, cols, device=DEVICE).float()] if scaled else None),
                norms.position_sums(values, right[..., 0]),
            ])  # fmt: skip
        for straight, turned in zip(*results, strict=True):
            assert torch.equal(straight, turned)

    def test_no_examples_or_no_positions(self, shape, scaled, dtype):
        """No examples, or examples without positions."""
        _, _, rows, cols = shape
        for examples, positions in ((0, 3), (2, 0)):
            ids = torch.zeros(examples, positions, dtype=torch.long, device=DEVICE)
            values, right = (made(examples, positions, cols, dtype=dtype, device=DEVICE) for _ in range(2))
            left = made(examples, positions, rows, dtype=dtype, device=DEVICE)
            scale = made(rows, cols, dtype=torch.float32, device=DEVICE) if scaled else None
            weights = torch.ones(examples, device=DEVICE)
            for found, size in (
                *((found, (examples,)) for found in norms.row_squares(ids, values, scale, rows)),
                (norms.outer_squares(left, right, scale), (examples,)),
                (norms.outer_row_products(left, right, ids, values, scale), (examples,)),
                (norms.row_weighted_sum(ids, values, weights, rows), (rows, cols)),
                (norms.outer_weighted_sum(left, right, weights), (rows, cols)),
                (norms.outer_square_sum(left, right, weights, ids, values), (rows, cols)),
                (norms.position_sums(values, values[..., 0]), (examples, cols)),
            ):
                assert found.shape == size
                assert not found.any()
        none, into = torch.zeros(0, 2, dtype=dtype, device=DEVICE), torch.full((2,), torch.nan, device=DEVICE)
        norms.many_weighted_sums([none], torch.zeros(0, device=DEVICE), [into], add=False)
        assert into.tolist() == [0.0, 0.0]
        assert norms.many_squares([none], None).shape == (0,)

    def test_layer_norm(self, shape, scaled, dtype):
        examples, positions, width = shape[0], shape[1], shape[3] + 3  # of one channel alone only rounding is left
        inputs, grad = (made(examples, positions, width, seed=n, dtype=dtype, device=DEVICE) for n in (0, 1))
        weight, bias = (made(width, seed=n, dtype=dtype, device=DEVICE) for n in (2, 3))
        if scaled:  # at a stride
            grad, inputs = grad.mT.contiguous().mT, inputs.mT.contiguous().mT
        check_normalised("layer_norm", grad, inputs, weight, bias, (1e-5,), 2e-6)

    def test_rms_norm(self, shape, scaled, dtype):
        examples, positions, width = shape[0], shape[1], shape[3] + 3
        inputs, grad = (made(examples, positions, width, seed=n, dtype=dtype, device=DEVICE) for n in (0, 1))
        weight, offset = made(width, seed=2, dtype=dtype, device=DEVICE), float(scaled)
        if scaled:  # at a stride
            grad, inputs = grad.mT.contiguous().mT, inputs.mT.contiguous().mT
        exact_grad, exact_inputs, exact_weight = (tensor.double() for tensor in (grad, inputs, weight))
        found, _, rstd = normalization.rms_norm(inputs, weight, None, 1e-5, offset=offset)
        expected, _, exact_rstd = normalization.rms_norm(exact_inputs, exact_weight, None, 1e-5, offset=offset)
        rounding = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
        close(found, expected, rounding)
        close(rstd, exact_rstd, 2e-6)
        own = normalization.rms_norm_gradient(grad, inputs, weight, None, rstd, offset=offset)
        exact = (exact_grad, exact_inputs, exact_weight, None, exact_rstd)
        plain = normalization.rms_norm_gradient(*exact, offset=offset)
        close(own[0], plain[0], rounding)
        close(own[1], plain[1], 2e-6)
        wide, *_ = normalization.rms_norm(inputs, weight, None, 1e-5, offset=offset, dtype=torch.float32)
        assert wide.dtype == torch.float32
        close(wide, expected, 2e-6)

    def test_group_norm(self, shape, scaled, dtype):
        examples, places, groups, each = shape[0], shape[3] + 3, 1 + shape[2] % 4, shape[1]  # as for layer norm
        channels = groups * each
        inputs, grad = (made(examples, channels, places, seed=n, dtype=dtype, device=DEVICE) for n in (0, 1))
        weight, bias = (made(channels, seed=n, dtype=dtype, device=DEVICE) for n in (2, 3))
        if scaled:  # at a stride, and far from 0
            grad, inputs = grad.mT.contiguous().mT, (inputs + 3).mT.contiguous().mT
        check_normalised("group_norm", grad, inputs, weight, bias, (groups, 1e-5), 1e-5)

    @pytest.mark.parametrize("classes", CLASSES)
    def test_softmax_gradient(self, shape, scaled, dtype, classes):
        rows, classes, padding = shape[0] * shape[1], classes or 10 * shape[2] + 1, 67 if scaled else 0
        logits = made(rows, classes + padding, dtype=dtype, device=DEVICE)
        labels = torch.randint(-1, classes, (rows,), generator=torch.Generator().manual_seed(4)).to(DEVICE)
        exact = logits.double()
        found, expected = (norms.softmax_gradient_(x, labels, classes) for x in (logits, exact))
        close(found[0], expected[0], 1e-6)
        close(found[1], expected[1], 1e-5)
        close(logits, exact, {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype])
        assert not logits[:, classes:].any()


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_over_many_examples(dtype):
    grads = [made(777, 40, dtype=dtype, device=DEVICE), made(777, 3, 5, seed=1, dtype=dtype, device=DEVICE)]
    check_weighted_sums(grads, made(777, seed=4, dtype=torch.float32, device=DEVICE), 1e-6)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("classes", [17, 17_000])
def test_invalid_label_drops_only_its_example(classes):
    logits = made(3, classes + 3, dtype=torch.float32, device=DEVICE)
    losses, lengths = norms.softmax_gradient_(logits, torch.tensor([3, classes, 5], device=DEVICE), classes)
    assert losses.isnan().tolist() == lengths.isnan().tolist() == [False, True, False]
    assert logits[:, :classes].isnan().all(1).tolist() == [False, True, False]
    assert not logits[:, classes:].any()


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("classes", [700, 17_000])
def test_softmax_gradient_of_extreme_logits(classes):
    """Lanes without a finite logit, logits far apart, and rows that are not finite."""
    logits = made(6, classes + 4, dtype=torch.float32, device=DEVICE)
    logits[0, 8:] = -math.inf
    logits[1] *= 1e4
    logits[2] -= 1e4
    logits[3, 5] = math.nan
    logits[4, 5] = math.inf
    logits[5, 3] = -math.inf
    labels, exact = torch.full((6,), 3, device=DEVICE), logits.double()
    found, expected = (norms.softmax_gradient_(x, labels, classes) for x in (logits, exact))
    for ours, theirs in (*zip(found, expected, strict=True), (logits, exact)):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["padding", "one", "aligned", "tail", "few"])
def test_sums_over_rows_whose_look_ups_fill_many_chunks(kind, width, monkeypatch):
    """Runs of equal ids that are longer than what a program sums at once, or end just where it ends."""
    from dpoptim.kernels import rows_triton

    monkeypatch.setattr(rows_triton, "_TOGETHER", 4)
    generator = torch.Generator(DEVICE).manual_seed(1)
    ids = torch.randint(0, 500, (EXAMPLES, LOOK_UPS), device=DEVICE, generator=generator)
    if kind == "padding":
        ids[:, LOOK_UPS // 3 :] = 7
    elif kind == "one":
        ids[:] = 499
    elif kind == "tail":
        ids[ids == 499] = 0
        ids[-1, -50:] = 499
    elif kind == "aligned":
        ids = (torch.arange(EXAMPLES * LOOK_UPS, device=DEVICE) // 64).view(EXAMPLES, LOOK_UPS)
    else:
        ids = ids[:3, :30]
    values = torch.randn(*ids.shape, width, device=DEVICE, generator=generator)
    weights = torch.rand(len(ids), device=DEVICE, generator=generator)
    weights[0], values[0] = 0, torch.nan  # the first: the last look-ups must count
    begun = torch.randn(500, width, device=DEVICE, generator=generator)
    exact = norms.row_weighted_sum(ids, values.double(), weights.double(), 500, into=begun.double())
    again = norms.row_weighted_sum(ids, values, weights, 500, into=begun.clone())
    found = norms.row_weighted_sum(ids, values, weights, 500, into=begun)
    assert found is begun
    assert torch.equal(found, again)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-3)
