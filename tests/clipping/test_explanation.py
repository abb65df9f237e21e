"""Which norm method is chosen for which shapes; extra memory changes only the speed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpoptim
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.gradient_factors import Materialized, OuterProduct
from dpoptim.clipping.parameter_gradients import ParameterGradients
from dpoptim.kernels.norm_methods import Explanation, NormMethod
from tests.clipping.models import CASES, Case, case, squares
from tests.clipping.one_at_a_time import random_scale


def run(made, scale, extra_memory):
    sums = ClippedSums(made.model, clip_norm=0.8, extra_memory=extra_memory)
    sums.scale = scale
    sums.engine.attach()
    try:
        made.loss_fn(made.model, made.batch).sum().backward()
        explanation = sums.explain()
        return sums.take()[0], explanation
    finally:
        sums.engine.detach()


@pytest.mark.parametrize(("name", "scaled"), [(name, i % 2 == 1) for i, name in enumerate(CASES)])
def test_extra_memory_does_not_change_sums(name, scaled):
    made = case(name)
    scale = random_scale(made.model) if scaled else None
    lean, _ = run(made, scale, 0)
    formed, explanation = run(made, scale, 1 << 40)
    for n, total in lean.items():
        torch.testing.assert_close(formed[n], total, rtol=1e-9, atol=1e-11)
    assert not sum(parameter.extra_bytes for parameter in explanation.parameters)


def norm_method_of(positions, width, scaled, extra_memory=0):
    model = nn.Linear(width, width, bias=False).double()
    made = type(case("conv2d"))(
        model, lambda m, x: m(x).square().sum((1, 2)), torch.randn(3, positions, width).double()
    )
    (found,) = run(made, {"weight": torch.ones(width, width).double()} if scaled else None, extra_memory)[1].parameters
    return found


def test_choice_by_shape():
    assert norm_method_of(64, 16, scaled=False).norm_method is NormMethod.FORMED  # smaller than its factors
    assert norm_method_of(4, 16, scaled=False).norm_method is NormMethod.GRAM
    assert norm_method_of(4, 16, scaled=True).norm_method is NormMethod.BLOCKS
    assert norm_method_of(1, 16, scaled=True).norm_method is NormMethod.ONE_POSITION


def test_choice_by_memory():
    lean = norm_method_of(4, 16, scaled=True)
    assert lean.held_bytes == 3 * 4 * (16 + 16) * 8
    assert lean.extra_bytes == 3 * (16 * 16 - 4 * (16 + 16)) * 8
    assert norm_method_of(4, 16, scaled=True, extra_memory=lean.extra_bytes - 1).norm_method is NormMethod.BLOCKS
    rich = norm_method_of(4, 16, scaled=True, extra_memory=lean.extra_bytes)
    assert rich.norm_method is NormMethod.FORMED
    assert rich.held_bytes == lean.held_bytes + lean.extra_bytes


def test_memory_is_spent_once_per_batch():
    """Two layers, and memory for one of them."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).double()
    made = Case(model, squares, torch.randn(3, 4, 16).double())
    found = run(made, None, norm_method_of(4, 16, scaled=False).extra_bytes)[1].parameters
    assert sorted(parameter.norm_method.name for parameter in found) == ["FORMED", "GRAM"]


def test_printed_table():
    weight, bias = ParameterGradients(torch.Size([9, 9])), ParameterGradients(torch.Size([9]))
    weight.add(OuterProduct(torch.ones(4, 2, 9), torch.ones(4, 2, 9)))
    bias.add(Materialized(torch.ones(4, 9)))
    assert str(Explanation.of({"0.weight": weight, "1.weight": weight, "0.bias": bias}, scaled=False)).splitlines() == [
        "a physical batch of 4 examples",
        "  2 x *.weight [9, 9]: products of positions with each other (2 positions, 1.2 kB held)",
        "  0.bias [9]: gradients formed once, measured and summed (144 B held)",
        "clipping_memory=1440 (1.4 kB more per physical batch) would form all gradients",
    ]


def test_explain_describes_the_last_batch():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    plan = dpoptim.PrivacyPlan(num_examples=50, batch_size=5, steps=10, noise_multiplier=1.0)
    optimizer = dpoptim.scale_then_privatize(model, plan, 1e-2, external_batches=True, clipping_memory=0)
    with pytest.raises(ValueError, match="after the first step"):
        optimizer.explain()
    for examples in (5, 3):
        model(torch.randn(examples, 4)).square().sum().backward()
        optimizer.step()
        text = optimizer.explain()
        assert f"a physical batch of {examples} examples" in text
        assert "2 x *.weight [8, 8]: one position per example" in text
        assert "clipping_memory=" in text
    with pytest.raises(ValueError, match="clipping_memory"):
        dpoptim.scale_then_privatize(model, plan, 1e-2, clipping_memory=-1)
