"""Models in float32 and bfloat16 against the same weights in float64.

On a CPU each model runs in one combination of dtype and scale. On a CUDA device each runs in both dtypes, through the
kernels, and without TF32, which has only 10 bits. bfloat16 has 8 bits in forward and backward; norms and sums are in
float32.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

from dpoptim.clipping import clipped_sum
from tests.clipping.models import CASES, case
from tests.clipping.one_at_a_time import random_scale

ON_GPU = [name for name in CASES if "attention" not in name and name != "shared positions"]
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
NOT_IN_16_BITS = ("orthogonal",)  # torch's exponential of a bfloat16 matrix returns NaN or worse
needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def moved(batch, device, dtype):
    return pytree.tree_map(lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype), batch)


COMBINATIONS = list(itertools.product(BOUNDS, [False, True]))
ON_CPU = [(name, *COMBINATIONS[i % 4], "cpu") for i, name in enumerate(CASES)]
ON_CUDA = [
    (name, dtype, (i + j) % 2 == 0, "cuda")
    for i, name in enumerate(ON_GPU) for j, dtype in enumerate(BOUNDS)
    if dtype == torch.float32 or name not in NOT_IN_16_BITS
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "scaled", "device"), [*ON_CPU, *(pytest.param(*given, marks=needs_cuda) for given in ON_CUDA)]
)
def test_clipped_sums_are_those_of_float64(name, dtype, scaled, device, monkeypatch):
    made = case(name, dtype)
    scale = random_scale(made.model) if scaled else None
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with torch.device(device):
        model, batch = made.model.to(device), moved(made.batch, device, dtype)
        given = None if scale is None else {n: s.to(device) for n, s in scale.items()}
        found, norms = clipped_sum(model, made.loss_fn, batch, clip_norm=0.8, scale=given)
    exact, batch = model.to("cpu", torch.float64), moved(made.batch, "cpu", torch.float64)
    wide = None if scale is None else {n: s.double() for n, s in scale.items()}
    expected, true_norms = clipped_sum(exact, made.loss_fn, batch, clip_norm=0.8, scale=wide)
    torch.testing.assert_close(norms.cpu().double(), true_norms, rtol=BOUNDS[dtype], atol=0)
    off = sum(float((found[n].cpu().double() - total).square().sum()) for n, total in expected.items())
    assert off <= BOUNDS[dtype] ** 2 * sum(float(total.square().sum()) for total in expected.values())
    assert all(total.dtype == torch.float32 for total in found.values())
