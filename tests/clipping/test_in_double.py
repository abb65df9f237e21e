"""Norms and sums in float64, which plans with exact noise use: rounding does not move neighbouring sums apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dpoptim.clipping import clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.engine import PhysicalBatch, UncheckedLossError
from dpoptim.clipping.gradient_factors import OuterProduct
from dpoptim.clipping.parameter_gradients import ParameterGradients
from dpoptim.data import shards
from dpoptim.data.processes import Processes
from tests.clipping.models import CASES, Case, case
from tests.clipping.one_at_a_time import random_scale

CLIP_NORM = 0.8
NAMES = [name for name in CASES if "attention" not in name and name != "orthogonal"]
FAST = ("tied", "cnn", "conv2d patches", "embedding", "layer norm", "bare parameters", "lstm", "BertForMaskedLM")


def sums_of(made: Case, scale: dict[str, Tensor] | None, left_out: Sequence[int] = ()) -> dict[str, Tensor]:
    """The sums, in which some examples have losses of 0."""
    sums = ClippedSums(made.model, clip_norm=CLIP_NORM, in_double=True)
    sums.scale = scale
    sums.engine.attach()
    try:
        try:
            losses = made.loss_fn(made.model, made.batch)
        except UncheckedLossError:
            sums.engine.check_losses(lambda batch: made.loss_fn(made.model, batch), made.batch, lasting=False)
            losses = made.loss_fn(made.model, made.batch)
        counts = torch.ones_like(losses)
        counts[list(left_out)] = 0
        (losses * counts).sum().backward()
        sums.engine.flush()
        return dict(sums.take()[0])
    finally:
        sums.engine.detach()


@pytest.mark.parametrize(
    ("name", "dtype", "scaled"),
    [
        pytest.param(
            name, (torch.float32, torch.bfloat16)[i % 2], i % 4 < 2, marks=[] if name in FAST else pytest.mark.slow
        )
        for i, name in enumerate(NAMES)
    ],
)
def test_no_example_moves_the_sum_further_than_the_clip_norm(name, dtype, scaled):
    made = case(name, dtype)
    scale = {n: s.float() for n, s in random_scale(made.model).items()} if scaled else None
    whole = sums_of(made, scale)
    expected = clipped_sum(made.model, made.loss_fn, made.batch, CLIP_NORM, scale)[0]
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    for n, total in expected.items():
        assert whole[n].dtype == torch.float64
        assert float((whole[n] - total).norm()) <= bound * max(float(total.double().norm()), 1e-2), n
    lengths = []
    for example in range(5):
        rest = sums_of(made, scale, [example])
        moved = [(whole[n] - rest[n]) * (1.0 if scale is None else scale[n].double()) for n in whole]
        lengths.append(float(torch.stack([part.square().sum() for part in moved]).sum().sqrt()))
    assert max(lengths) <= CLIP_NORM * (1 + 1e-12)
    assert max(lengths) >= 0.01 * CLIP_NORM


def test_examples_that_were_made_do_not_move_others():
    """In float32, leaving out the first example rounds all others differently, in the same direction."""
    width, many = 1024, 1024
    power = 2.0 ** int(torch.tensor(many / width**0.5).log2())
    inputs = torch.full((2 * many, width), power / (many - 0.5))
    inputs[0] = 1.0
    inputs[many:] = 0.56 * power * 2.0**-23
    model = torch.nn.Linear(width, 1, bias=False)

    def moved(*, in_double: bool) -> float:
        found = []
        for rows in (inputs, inputs[1:]):
            sums = ClippedSums(model, clip_norm=1.0, in_double=in_double)
            sums.engine.attach()
            model(rows).sum().backward()
            sums.engine.flush()
            found.append(sums.take()[0]["weight"].double())
            sums.engine.detach()
        return float((found[0] - found[1]).norm())

    assert moved(in_double=False) > 1.01
    assert moved(in_double=True) == pytest.approx(1, abs=1e-12)


def test_parts_that_cancel_do_not_round_sums():
    """Added to parts of 2^30, the others are rounded to 2^-22, and without the first example to 2^-23."""
    values = torch.zeros(512, 5, 256)
    values[1:, 0], values[1:, 1], values[1:, 2] = 2.0**30 - 64, 64 - 1 / 64, 0.56 * 2.0**-22
    values[1:, 3:] = -values[1:, :2]
    values[:, :, 0] = 0
    values[1:, 2, 0] = 0.95
    values[1::2, 2, 0] *= -1
    values[0, 2] = 1 / 16
    model, found = torch.nn.Embedding(32, 256), []
    for rows in (values, values[1:]):
        sums = ClippedSums(model, clip_norm=1.0, in_double=True)
        sums.engine.attach()
        (model(torch.zeros(len(rows), 5, dtype=torch.long)) * rows).sum().backward()
        sums.engine.flush()
        found.append(sums.take()[0]["weight"])
        sums.engine.detach()
    assert float((found[0] - found[1]).norm()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("kind", ["rows", "users", "sharded"])
def test_sums_and_squares_are_those_of_float64(kind, monkeypatch):
    monkeypatch.setattr(shards, "exchange", lambda collective, own, parts: own.copy_(parts[0]))
    torch.manual_seed(0)
    left, right = torch.rand(9, 1, 3), torch.rand(9, 1, 5)
    model = torch.nn.Linear(5, 3, bias=False)
    gradients = ParameterGradients(model.weight.shape)
    gradients.add(OuterProduct(left, right))
    divided = shards.Shards(Processes(), {"weight": model.weight.shape}, torch.float32) if kind == "sharded" else None
    sums = ClippedSums(model, clip_norm=0.5, squares=True, by_user=kind == "users", shards=divided, in_double=True)
    sums.rows_of_users = [2, 3, 4] if kind == "users" else None
    with torch.no_grad():
        sums._add(PhysicalBatch(gradients={"weight": gradients}, examples=9))
    each = left.double().mT @ right.double()
    if kind == "users":
        each = torch.stack([part.mean(0) for part in each.split([2, 3, 4])])
    clipped = each * (0.5 / each.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None]
    total, squares = sums.take()
    assert squares is not None
    torch.testing.assert_close(total["weight"], clipped.sum(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(squares["weight"], clipped.square().sum(0), rtol=1e-13, atol=0)
