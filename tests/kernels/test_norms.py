"""The inner loops against brute force."""

from __future__ import annotations

import pytest
import torch

from dpoptim.kernels import normalization, norms

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# examples, positions, rows, cols: one of each, odd sizes, larger than a tile, wide ones
SHAPES = [(1, 1, 1, 1), (3, 7, 5, 9), (9, 33, 65, 130), (4, 77, 301, 128), (2, 40, 16, 300), (17, 5, 200, 3)]


def made(*shape, dtype=torch.float64, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(found, expected, tolerance):
    assert found.shape == expected.shape
    error = (found.double().cpu() - expected.double().cpu()).norm() / expected.double().norm().clamp(min=1e-30)
    assert float(error) < tolerance, float(error)


def square_sum(grads, weights):
    return (weights.double().view(-1, *[1] * (grads.ndim - 1)) * grads.double()).square().sum(0)


def check_weighted_sums(grads, weights, tolerance):
    """New and added sums against the definition; an example of weight 0 is not read."""
    squared = [torch.full(grad.shape[1:], torch.nan, dtype=weights.dtype, device=weights.device) for grad in grads]
    for times, add in enumerate((False, True), start=1):
        norms.many_weighted_sums(grads, weights, squared, add=add, squared=True)
        for grad, total in zip(grads, squared, strict=True):
            close(total, times * square_sum(grad, weights), tolerance)
    sizes = [grad.shape[1:].numel() for grad in grads]
    flat = torch.full((1 + sum(sizes),), torch.nan, dtype=weights.dtype, device=weights.device)
    views = flat[1:].split(sizes)  # beginning where loads of 16 bytes cannot
    into = [view.view(grad.shape[1:]) for grad, view in zip(grads, views, strict=True)]
    norms.many_weighted_sums(grads, weights, into, add=False)
    for grad, total in zip(grads, into, strict=True):
        close(total, torch.tensordot(weights.double(), grad.double(), 1), tolerance)
    norms.many_weighted_sums(grads, weights, into, add=True)
    for grad, total in zip(grads, into, strict=True):
        close(total, 2 * torch.tensordot(weights.double(), grad.double(), 1), tolerance)
    without_first = weights.clone()
    without_first[0] = 0
    for grad in grads:
        grad[0] = torch.nan
    norms.many_weighted_sums(grads, without_first, into, add=False)
    norms.many_weighted_sums(grads, without_first, squared, add=False, squared=True)
    for grad, total, squares in zip(grads, into, squared, strict=True):
        close(total, torch.tensordot(weights[1:].double(), grad[1:].double(), 1), tolerance)
        close(squares, square_sum(grad[1:], weights[1:]), tolerance)


def check_square_sums(left, right, ids, values, weights, rows, tolerance):
    """Sums of looked-up rows, of outer products and of both; an example of weight 0 is not read."""
    left, values = left.clone(), values.clone()
    for _ in range(2):
        tables = values.new_zeros(len(ids), rows, values.shape[2], dtype=torch.float64)
        for j in range(len(ids)):
            tables[j].index_add_(0, ids[j], values[j].double())
        products = left.double().mT @ right.double()
        counted = weights != 0
        of_rows, of_products, of_both = (
            square_sum(each[counted], weights[counted]) for each in (tables, products, tables + products)
        )
        close(norms.row_square_sum(ids, values, weights, rows), of_rows, tolerance)
        close(norms.outer_square_sum(left, right, weights), of_products, tolerance)
        found = norms.outer_square_sum(left, right, weights, ids, values)
        close(found, of_both, tolerance)
        assert torch.equal(found, norms.outer_square_sum(left, right, weights, ids, values))
        weights = weights.clone()
        weights[0], left[0], values[0] = 0, torch.nan, torch.inf


def check_first_left_out(ids, values, weights, rows):
    """A look-up of weight 0 adds nothing, though it is NaN."""
    poisoned, others = values.clone(), weights.clone()
    poisoned[0], others[0] = torch.nan, 0
    found = norms.row_weighted_sum(ids, poisoned, others, rows)
    poisoned[0] = 0
    assert torch.equal(found, norms.row_weighted_sum(ids, poisoned, others, rows))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaled", [False, True])
class TestPlain:
    """By the definition, one example at a time, in float64."""

    def test_outer(self, shape, scaled):
        examples, positions, rows, cols = shape
        left, right = made(examples, positions, rows), made(examples, positions, cols, seed=1)
        scale, weights = made(rows, cols, seed=2).abs() if scaled else None, made(examples, seed=3)
        whole = torch.zeros(examples, rows, cols, dtype=torch.float64)
        for j in range(examples):
            for t in range(positions):
                whole[j] += torch.outer(left[j, t], right[j, t])
        each = (whole if scale is None else whole * scale).square().sum((1, 2))
        close(norms.outer_squares(left, right, scale), each, 1e-12)
        close(
            norms.outer_weighted_sum(left, right, weights),
            torch.einsum("j,jrc->rc", weights, whole),
            1e-12,
        )
        close(norms.squares(whole, scale), each, 1e-12)
        if scale is None:
            found, parts = norms.gram_squares(left, right)
            close(found, each, 1e-10)
            close(parts, (left.norm(dim=2) * right.norm(dim=2)).sum(1), 1e-12)

    def test_many(self, shape, scaled):
        examples, _, rows, cols = shape
        grads = [made(examples, rows, cols), made(examples, cols, seed=1), made(examples, seed=2)]
        scales = [made(*grad.shape[1:], seed=3).abs() for grad in grads] if scaled else None
        factors = scales or [torch.ones(()) for _ in grads]
        each = sum((g * f).reshape(examples, -1).square().sum(1) for g, f in zip(grads, factors, strict=True))
        close(norms.many_squares(grads, scales), each, 1e-12)
        weights = made(examples, seed=4)
        check_weighted_sums(grads, weights, 1e-12)

    def test_rows(self, shape, scaled):
        examples, positions, rows, cols = shape
        ids = torch.randint(0, rows, (examples, positions), generator=torch.Generator().manual_seed(4))
        values, scale = made(examples, positions, cols), made(rows, cols, seed=2).abs() if scaled else None
        left, right = made(examples, positions + 1, rows, seed=5), made(examples, positions + 1, cols, seed=6)
        tables = torch.zeros(examples, rows, cols, dtype=torch.float64)
        for j in range(examples):
            for t in range(positions):
                tables[j, ids[j, t]] += values[j, t]
        weights = made(examples, seed=7)
        close(norms.row_weighted_sum(ids, values, weights, rows), torch.einsum("j,jrc->rc", weights, tables), 1e-12)
        check_first_left_out(ids, values, weights, rows)
        check_square_sums(left, right, ids, values, weights, rows, 1e-12)
        by_position = made(examples, positions, seed=8)
        close(norms.position_sums(values, by_position), torch.einsum("jt,jtc->jc", by_position, values), 1e-12)
        products = left.mT @ right
        factor = 1.0 if scale is None else scale
        close(norms.row_squares(ids, values, scale, rows)[0], (tables * factor).square().sum((1, 2)), 1e-12)
        close(
            norms.outer_row_products(left, right, ids, values, scale),
            (tables * factor * products * factor).sum((1, 2)),
            1e-12,
        )


def test_layer_norm_matches_torch_and_autograd():
    inputs, grad = made(4, 6, 10), made(4, 6, 10, seed=1)
    weight, bias = made(10, seed=2), made(10, seed=3)
    output, mean, rstd = normalization.layer_norm(inputs, weight, bias, 1e-5)
    close(output, torch.nn.functional.layer_norm(inputs, [10], weight, bias), 1e-12)
    to_inputs, by_weight, by_bias = normalization.layer_norm_gradient(grad, inputs, weight, mean, rstd)
    for j in range(4):
        x, w, b = (tensor.clone().requires_grad_() for tensor in (inputs[j], weight, bias))
        (torch.nn.functional.layer_norm(x, [10], w, b) * grad[j]).sum().backward()
        close(to_inputs[j], x.grad, 1e-12)
        close(by_weight[j], w.grad, 1e-12)
        close(by_bias[j], b.grad, 1e-12)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_matches_torch_and_autograd(offset):
    inputs, grad, weight = made(4, 6, 10), made(4, 6, 10, seed=1), made(10, seed=2)
    output, _, rstd = normalization.rms_norm(inputs, weight, None, 1e-5, offset=offset)
    close(output, torch.nn.functional.rms_norm(inputs, [10], weight + offset, eps=1e-5), 1e-12)
    to_inputs, by_weight, _ = normalization.rms_norm_gradient(grad, inputs, weight, None, rstd, offset=offset)
    for j in range(4):
        x, w = (tensor.clone().requires_grad_() for tensor in (inputs[j], weight))
        (torch.nn.functional.rms_norm(x, [10], w + offset, eps=1e-5) * grad[j]).sum().backward()
        close(to_inputs[j], x.grad, 1e-12)
        close(by_weight[j], w.grad, 1e-12)


@pytest.mark.parametrize(("channels", "groups", "places"), [(6, 3, 10), (5, 1, 4), (4, 4, 7), (8, 2, 1)])
def test_group_norm_matches_torch_and_autograd(channels, groups, places):
    inputs, grad = made(4, channels, places), made(4, channels, places, seed=1)
    weight, bias = made(channels, seed=2), made(channels, seed=3)
    output, mean, rstd = normalization.group_norm(inputs, weight, bias, groups, 1e-5)
    close(output, torch.nn.functional.group_norm(inputs, groups, weight, bias), 1e-12)
    for laid_out in (grad, grad.mT.contiguous().mT):
        to_inputs, by_weight, by_bias = normalization.group_norm_gradient(laid_out, inputs, weight, mean, rstd)
        for j in range(4):
            x, w, b = (tensor.clone().requires_grad_() for tensor in (inputs[j : j + 1], weight, bias))
            (torch.nn.functional.group_norm(x, groups, w, b) * grad[j]).sum().backward()
            close(to_inputs[j], x.grad[0], 1e-12)
            close(by_weight[j], w.grad, 1e-12)
            close(by_bias[j], b.grad, 1e-12)


@pytest.mark.parametrize("padding", [0, 3])
def test_softmax_gradient_matches_autograd(padding):
    logits = made(6, 11 + padding)
    labels = torch.tensor([0, 10, 3, -100, 5, 5])
    free = logits[:, :11].clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(free, labels, reduction="none")
    expected.sum().backward()
    losses, lengths = norms.softmax_gradient_(logits, labels, 11)
    close(losses, expected.detach(), 1e-12)
    close(lengths, free.grad.norm(dim=1), 1e-12)
    close(logits[:, :11], free.grad, 1e-12)
    assert not logits[:, 11:].any()


def test_ids_that_all_examples_share():
    """Positions: they are summed over the examples first. An example of weight 0 adds nothing, even if not finite."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (1, 12), generator=generator).expand(5, 12)
    values = torch.randn(5, 12, 3, dtype=torch.float64, generator=generator)
    weights = torch.rand(5, dtype=torch.float64, generator=generator)
    close(
        norms.row_weighted_sum(ids, values, weights, 9),
        norms.row_weighted_sum(ids.clone(), values, weights, 9),
        1e-12,
    )
    values[2], weights[2] = torch.inf, 0
    assert bool(norms.row_weighted_sum(ids, values, weights, 9).isfinite().all())


@pytest.mark.parametrize("count", [1, 6, 512, 1000])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_sums_over_few_rows_by_products(count, rows):
    generator = torch.Generator().manual_seed(count + rows)
    ids = torch.randint(0, rows, (count,), generator=generator)
    values = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    expected = torch.zeros(rows, 5, dtype=torch.float64).index_add_(0, ids, values)
    close(norms._summed_rows(ids, values, rows), expected, 1e-12)


def test_weights_are_cut_towards_zero():
    weights = torch.cat([torch.rand(1000, generator=torch.Generator().manual_seed(3)), torch.tensor([0.0, 1.0, 1e-30])])
    short = norms.cut(weights)
    assert bool(((short <= weights) & (short > 0.992 * weights)).logical_or(weights == 0).all())
    assert torch.equal(short, short.bfloat16().float())
    assert short[-3:].tolist()[:2] == [0.0, 1.0]


def test_a_product_with_a_cut_weight_is_the_sum_of_two_bfloat16_numbers():
    generator = torch.Generator().manual_seed(4)
    weights, factors = norms.cut(torch.rand(50_000, generator=generator)), torch.randn(50_000, generator=generator)
    factors = factors.bfloat16().float()
    product = weights.double() * factors.double()
    high = product.float().bfloat16().double()
    low = (product - high).float().bfloat16().double()
    assert torch.equal(high + low, product)
