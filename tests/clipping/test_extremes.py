"""Numbers at the edge of float32, and positions that cancel: one example never adds more than the clip norm."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from dpoptim.clipping import clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums, _measured
from dpoptim.clipping.engine import PhysicalBatch
from dpoptim.clipping.gradient_factors import Materialized, OuterProduct, RowUpdates
from dpoptim.clipping.parameter_gradients import ParameterGradients


class Parameters(nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def summed(model, gradients, examples=1, **options):
    """Return (sums, sums of squares, counts) at clip norm 1."""
    sums = ClippedSums(model, clip_norm=1.0, **options)
    with torch.no_grad():
        sums._add(PhysicalBatch(gradients=gradients, examples=examples))
    total, squares = sums.take()
    return total, squares, sums.counts


def norm(total):
    return math.sqrt(sum(float(value.double().square().sum()) for value in total.values()))


def of_outer(left, right, *more):
    gradients = ParameterGradients(torch.Size([left.shape[2], right.shape[2]]))
    gradients.add(OuterProduct(left, right))
    for form in more:
        gradients.add(form)
    return gradients


def cancelling(seed, rows, cols, positions=9, size=3e3):
    """Return factors whose products over positions nearly cancel."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(1, positions, rows, generator=generator) * size
    left[:, -1] = -left[:, :-1].sum(1)
    right = torch.randn(1, 1, cols, generator=generator).expand(1, positions, cols) * size
    return left, right.contiguous()


@pytest.mark.parametrize("share", [0.51, 0.75, 1.5, 2.51, 1e3])
def test_an_example_whose_weight_underflows_is_left_out(share):
    """Norms near 1e44: the weight is `share` times the smallest float32, and would be rounded up."""
    size = math.sqrt(1 / (share * 2.0**-149))
    total, _, counts = summed(
        Parameters(w=(1, 1)), {"w": of_outer(torch.full((1, 1, 1), size), torch.full((1, 1, 1), size))}
    )
    assert norm(total) <= 1 + 1e-6
    assert counts.nonfinite == 1


def test_an_example_whose_parts_overflow_is_left_out():
    left, right = torch.zeros(2, 2, 16), torch.zeros(2, 2, 16)
    left[0, 0, 0], right[0, 0, 0] = 1e22, 1e22
    left[0, 1, 0], right[0, 1, 0], right[0, 1, 1] = -1e22, 1e22, 5e21
    left[1], right[1] = 0.1, 0.1
    total, _, counts = summed(Parameters(w=(16, 16)), {"w": of_outer(left, right)}, 2)
    assert total["w"].isfinite().all()
    other = left[1].T @ right[1]
    torch.testing.assert_close(total["w"], other / max(1, norm({"w": other})))
    assert counts.nonfinite == 1


LAYERS = {
    "linear": lambda: (nn.Linear(6, 5), torch.randn(3, 6)),
    "positions": lambda: (nn.Linear(6, 5), torch.randn(3, 7, 6)),
    "embedding": lambda: (nn.Embedding(9, 5), torch.randint(9, (3, 6))),
    "layer norm": lambda: (nn.LayerNorm(6), torch.randn(3, 4, 6)),
    "convolution": lambda: (nn.Conv1d(3, 4, 3), torch.randn(3, 3, 9)),
}


@pytest.mark.parametrize("length", [1e16, 9e16, 1e18, 1e19, 1e20, 1e30, 1e38])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_gradient_that_float32_may_not_measure_adds_nothing(layer, length):
    """Whatever measures it. Against float64: the first example has a gradient of this norm, which is finite."""
    torch.manual_seed(0)
    model, x = LAYERS[layer]()
    wide = copy.deepcopy(model).double()
    each = [wide(row if row.dtype == torch.long else row.double()).flatten(1).sum(1) for row in x.split(1)]
    grads = [
        dict(zip(wide.state_dict(), torch.autograd.grad(loss, list(wide.parameters())), strict=True)) for loss in each
    ]
    factors = torch.tensor([length / norm(grads[0]), 1.0, 1e-2])
    weights = [min(1.0, 1 / (float(factor) * norm(grad))) * factor for factor, grad in zip(factors, grads, strict=True)]
    sums, norms = clipped_sum(model, lambda m, x: m(x).flatten(1).sum(1) * factors, x)
    if length >= 1e18:
        weights[0] = torch.tensor(0.0)
        assert norms[0] >= 0.99e18
    for name, total in sums.items():
        expected = sum(float(weight) * grad[name] for weight, grad in zip(weights, grads, strict=True))
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0.3, 1.1, 1e3])
def test_the_smallest_clip_norm_bounds_a_gradient_spread_over_many_elements(size):
    elements = 10**6
    gradient = torch.full((1, elements), size * 1e-12 / math.sqrt(elements))
    sums = ClippedSums(Parameters(w=(elements,)), clip_norm=1e-12)
    with torch.no_grad():
        sums._add(
            PhysicalBatch(gradients={"w": ParameterGradients(torch.Size([elements]), dense=gradient)}, examples=1)
        )
    assert norm(sums.take()[0]) == pytest.approx(min(size, 1.0) * 1e-12, rel=1e-4)


def test_smaller_clip_norms_are_refused():
    """At 1e-24, squares vanish in float32 and gradients would go unclipped."""
    with pytest.raises(ValueError, match="Expected clip_norm >= 1e-12"):
        ClippedSums(Parameters(w=(3, 5)), clip_norm=1e-24)


@pytest.mark.parametrize("scaled", [False, True], ids=["flat", "scaled"])
@pytest.mark.parametrize("formed", [False, True], ids=["positions", "formed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_uses_of_a_tied_table_that_cancel(dtype, formed, scaled):
    """‖D‖² + 2⟨D, E⟩ + ‖E‖² loses twice as many digits as D + E."""
    for seed, size in enumerate([3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-11] * 4):
        generator = torch.Generator().manual_seed(seed)
        left, right = (torch.zeros(1, 1, 50, dtype=dtype), torch.randn(1, 1, 16, generator=generator).to(dtype))
        left[0, 0, 7] = 1
        left += size * torch.randn(1, 1, 50, generator=generator).to(dtype)
        value = -right + size * torch.randn(1, 1, 16, generator=generator).to(dtype)
        gradients = ParameterGradients(torch.Size([50, 16]), dtype)
        gradients.add(Materialized(left.mT @ right) if formed else OuterProduct(left, right))
        gradients.add(RowUpdates(torch.full((1, 1), 7), value))
        model = Parameters(w=(50, 16)).to(dtype)
        sums = ClippedSums(model, clip_norm=1e-12)
        scale = torch.rand(50, 16, generator=generator).to(dtype) / 2 + 0.5
        sums.scale = {"w": scale} if scaled else None
        with torch.no_grad():
            sums._add(PhysicalBatch(gradients={"w": gradients}, examples=1))
        total = sums.take()[0]["w"].double()
        assert float((total * scale if scaled else total).norm()) <= 1e-12 * (1 + 1e-3)


@pytest.mark.parametrize("kind", ["alone", "with a position of inf times 0", "tied", "beside float64"])
def test_positions_that_cancel(kind):
    """Rounding exceeds the gradient, so the vector that is measured must be the one that is summed."""
    for seed in range(60):
        rows, cols = (40, 5) if kind == "tied" else (3, 5)
        left, right = cancelling(seed, rows, cols)
        if kind == "with a position of inf times 0":
            left = torch.cat([left, torch.full((1, 1, rows), 3e38)], 1)
            right = torch.cat([right, torch.zeros(1, 1, cols)], 1)
        model: nn.Module = Parameters(w=(rows, cols))
        gradients = {"w": of_outer(left, right)}
        if kind == "tied":
            looked_up = RowUpdates(torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1, cols), 1e-3))
            gradients = {"w": of_outer(left, right, looked_up)}
        if kind == "beside float64":
            model = nn.Module()
            model.a, model.w = nn.Parameter(torch.zeros(1).double()), nn.Parameter(torch.zeros(rows, cols))
            other = ParameterGradients(torch.Size([1]), torch.float64)
            other.add(Materialized(torch.zeros(1, 1).double()))
            gradients = {"a": other, **gradients}
        assert norm(summed(model, gradients)[0]) <= 1 + 1e-3


def test_the_order_of_sums_does_not_depend_on_the_run():
    """The order of hashes does not change a bit."""
    gradients = {}
    for i in range(12):
        generator = torch.Generator().manual_seed(i)
        gradients[f"w{i}"] = of_outer(
            torch.randn(4, 3, 9, generator=generator), torch.randn(4, 3, 9, generator=generator)
        )
    expected = sum((own.measured()[0] for own in gradients.values()), torch.zeros(4, dtype=torch.float64))
    assert torch.equal(_measured(gradients, None)[0], expected)


@pytest.mark.parametrize("mean_loss", [False, True], ids=["sum", "mean"])
def test_a_recomputed_example_counts_once(mean_loss):
    """The positions of the first of three examples cancel."""
    left, right = cancelling(0, 3, 5)
    left, right = (torch.cat([each, *[torch.rand_like(each)] * 2]) for each in (left, right))
    factor = 3 if mean_loss else 1
    sums = ClippedSums(Parameters(w=(3, 5)), clip_norm=1e-3, mean_loss=mean_loss)
    with torch.no_grad():
        sums._add(PhysicalBatch(gradients={"w": of_outer(left / factor, right)}, examples=3))
    grads = left.double().mT @ right.double()
    grads[0] = (left[0] / factor).T @ right[0] * factor  # mostly rounding
    lengths = grads.flatten(1).norm(dim=1)
    assert float(lengths[0]) > 1e-3
    assert (sums.counts.clipped, sums.counts.nonfinite) == (3, 0)
    total = sums.take()[0]
    others = (grads[1:] / lengths[1:, None, None] * 1e-3).sum(0).float()
    assert norm({"w": total["w"] - others}) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_size_of_a_batch_rounds_averages_of_16_bits_only(reduction):
    """Leaving out one of 2,048 equal examples: 1/2047 has no 16 bits, so all others become a little longer."""
    model, x = nn.Linear(64, 1, bias=False).bfloat16(), torch.full((2048, 64), 0.12).bfloat16()
    found = []
    for rows in (x, x[1:]):
        sums = ClippedSums(model, clip_norm=1.0, mean_loss=reduction == "mean", in_double=True)
        sums.engine.attach()
        losses = model(rows)[:, 0]
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        sums.engine.flush()
        found.append(sums.take()[0]["weight"])
        sums.engine.detach()
    moved = norm({"weight": found[0] - found[1]})
    assert moved > 1.5 if reduction == "mean" else moved <= 1
