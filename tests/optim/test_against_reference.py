"""Forty steps of the fast path equal the reference implementation on the same normals, for every variant."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import dpoptim
from dpoptim.noise import TensorPart
from dpoptim.optim import PrivateOptimizer
from tests.optim.table import ROWS, RULES, VARIANTS, Task, task

KEY = dpoptim.NoiseKey.from_bytes(bytes(range(100, 132)))
RUN: Any = {"key": KEY, "run_id": "the run", "external_batches": True}
STEPS = 40

PLANS = {
    "independent noise, Poisson": dpoptim.PrivacyPlan(
        num_examples=40, batch_size=4, steps=STEPS, clip_norm=0.9, noise_multiplier=0.7, sampling=dpoptim.Poisson()
    ),
    "banded noise, shuffled": dpoptim.PrivacyPlan(
        num_examples=40, batch_size=4, steps=STEPS, clip_norm=0.9, noise_multiplier=0.7,
        sampling=dpoptim.Shuffled(), noise=dpoptim.BandedToeplitz(bands=5),
    ),
}  # fmt: skip


def run_fast(made: Task, optimizer: PrivateOptimizer) -> Tensor:
    path = []
    for batch in made.batches:
        if len(batch):
            made.losses(made.model, batch).sum().backward()
        optimizer.step()
        path.append(made.theta().clone())
    return torch.stack(path)


@functools.cache
def rows_of(plan: dpoptim.PrivacyPlan, dtype: torch.dtype, stream: str) -> Tensor:
    """[steps, coordinates]: column_norm·C⁻¹z as the optimizer's key gives it."""
    strategy = plan.square_strategy if stream == "square" else plan.strategy
    columns = []
    for name, p in task(plan, dtype).model.named_parameters():
        parts = [TensorPart(name=name, numel=p.numel())]
        source = strategy.stream(KEY.for_run("the run"), parts, stream=stream, dtype=p.dtype)
        columns.append(torch.stack([source.row(t).clone() for t in range(plan.steps)]))
    return torch.cat(columns, dim=1) * strategy.column_norm


SETTINGS = [
    ("independent noise, Poisson", torch.float64),
    ("banded noise, shuffled", torch.float64),
    ("banded noise, shuffled", torch.float32),
]
CASES = [(*row, *SETTINGS[index % 3]) for index, row in enumerate(ROWS)]


@pytest.mark.parametrize(("variant", "rule", "plan", "dtype"), CASES)
def test_fast_path_equals_reference(variant, rule, plan, dtype):
    plan = PLANS[plan]
    made = task(plan, dtype)
    fast_rule, slow_rule = RULES[rule]
    optimizer = VARIANTS[variant].make(made.model, plan, fast_rule, made, **RUN)
    noise, square_noise = rows_of(plan, dtype, "gradient"), rows_of(optimizer.plan, dtype, "square")
    slow = VARIANTS[variant].reference(task(plan, dtype), noise, square_noise, slow_rule, optimizer.plan)
    fast = run_fast(made, optimizer)
    assert slow.isfinite().all()
    assert float((slow[-1] - slow[0]).norm()) > 0.05, "the run does not move"
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    error = (fast - slow).norm(dim=1) / slow.norm(dim=1)
    assert float(error.max()) <= tolerance
