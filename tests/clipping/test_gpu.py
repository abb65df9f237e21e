"""Clipped sums, noise and steps on a CUDA device equal those on the CPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import dpoptim
from dpoptim.clipping import clipped_sum
from dpoptim.clipping.captured import Captured
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.kernels import choose
from dpoptim.kernels.norms import gram_on_gpu, gram_squares, row_weighted_sum
from tests.clipping.models import CASES, Case, case
from tests.clipping.one_at_a_time import clipped_by_user, random_scale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


_FLOAT32_INSIDE = ("GemmaForCausalLM", "weight norm")
"""Models whose norms, or torch's kernels of them, round to float32 for any dtype of their parameters."""


@pytest.mark.parametrize("scaled", [False, True], ids=["flat", "scaled"])
@pytest.mark.parametrize("name", [n for n in CASES if "attention" not in n and n != "shared positions"])
def test_clipped_sums_equal_those_on_the_cpu(name, scaled):
    made = case(name)
    scale = random_scale(made.model) if scaled else None
    expected, norms = clipped_sum(made.model, made.loss_fn, made.batch, clip_norm=0.8, scale=scale)
    model = made.model.cuda()
    batch = pytree.tree_map(lambda t: t.cuda(), made.batch)
    scale = None if scale is None else {n: s.cuda() for n, s in scale.items()}
    with torch.device("cuda"):
        sums, found = clipped_sum(model, made.loss_fn, batch, clip_norm=0.8, scale=scale)
    rounding = 1e-6 if name in _FLOAT32_INSIDE else 1e-9
    torch.testing.assert_close(found.cpu(), norms, rtol=rounding, atol=rounding / 100)
    for n, total in expected.items():
        torch.testing.assert_close(sums[n].cpu(), total, rtol=10 * rounding, atol=rounding / 10)


@pytest.mark.parametrize("counts", [(2, 1, 2), (5,), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["tied", "cnn", "conv2d patches", "embedding", "lstm", "BertForMaskedLM", "GPT2LMHeadModel"]
)
def test_sums_by_user_equal_those_on_the_cpu(name, dtype, counts):
    """And their bits are the same every time."""
    made = case(name, dtype)
    expected, norms, *_ = clipped_by_user(made, counts, 0.8)
    on_gpu = Case(made.model.cuda(), made.loss_fn, pytree.tree_map(lambda t: t.cuda(), made.batch))
    found = []
    for _ in range(2):
        with torch.device("cuda"):
            found.append(clipped_by_user(on_gpu, counts, 0.8))
    rounding = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(found[0][1].cpu().double(), norms.double(), rtol=rounding, atol=rounding / 100)
    for n, total in expected.items():
        error = (found[0][0][n].cpu().double() - total.double()).norm()
        assert error <= 10 * rounding * max(float(total.double().norm()), 1e-3), n
        assert torch.equal(found[0][0][n], found[1][0][n]), n


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tied", "cnn", "bare parameters", "embedding", "layer norm", "BertForMaskedLM"])
def test_sums_of_squares_equal_those_on_the_cpu(name, dtype):
    found = []
    for device in ("cpu", "cuda"):
        made = case(name, dtype)
        model, batch = made.model.to(device), pytree.tree_map(lambda t, d=device: t.to(d), made.batch)
        sums = ClippedSums(model, clip_norm=0.8, squares=True)
        sums.engine.attach()
        with torch.device(device):
            made.loss_fn(model, batch).sum().backward()
        squares = sums.take()[1]
        assert squares is not None
        found.append(torch.cat([squares[n].flatten().cpu().double() for n in sorted(squares)]))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert float((found[0] - found[1]).norm() / found[0].norm()) <= tolerance


@pytest.mark.parametrize(
    "noise", [dpoptim.Independent(), dpoptim.BandedToeplitz(bands=4)], ids=["independent", "banded"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_equal_those_on_the_cpu(noise, dtype):
    key = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
    plan = dpoptim.PrivacyPlan(
        num_examples=50, batch_size=5, steps=10, clip_norm=0.8, noise_multiplier=1.0, noise=noise
    )
    paths = []
    for device in ("cpu", "cuda"):
        made = case("mlp with in-place activations", dtype)
        model, batch = made.model.to(device), made.batch.to(device)
        with torch.device(device):
            optimizer = dpoptim.scale_then_privatize(model, plan, 1e-2, key=key, run_id="", external_batches=True)
            for _ in range(10):
                made.loss_fn(model, batch).sum().backward()
                optimizer.step()
        paths.append(torch.cat([p.detach().flatten().cpu().double() for p in model.parameters()]))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert float((paths[0] - paths[1]).norm() / paths[0].norm()) <= tolerance


def test_bf16_autocast_on_bert():
    made = case("BertForMaskedLM", torch.float32)
    expected, norms = clipped_sum(made.model, made.loss_fn, made.batch, clip_norm=0.8)
    model = made.model.cuda()
    batch = pytree.tree_map(lambda t: t.cuda(), made.batch)

    def loss_fn(model: torch.nn.Module, batch: object) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return made.loss_fn(model, batch)

    sums, found = clipped_sum(model, loss_fn, batch, clip_norm=0.8)
    torch.testing.assert_close(found.cpu(), norms, rtol=0.05, atol=0)
    off = sum(float((sums[n].cpu() - total).square().sum()) for n, total in expected.items()) ** 0.5
    assert off <= 0.1 * sum(float(total.square().sum()) for total in expected.values()) ** 0.5


@pytest.mark.parametrize(("positions", "rows", "cols"), [(8, 384, 96), (16, 1000, 512), (48, 9000, 200)])
def test_products_of_positions(positions, rows, cols):
    generator = torch.Generator("cuda").manual_seed(0)
    left, right = (
        torch.randn(12, positions, width, device="cuda", generator=generator).bfloat16() for width in (rows, cols)
    )
    assert gram_on_gpu(positions, left, right)
    left[1] = 0
    squares, parts = gram_squares(left, right)
    exact, bounds = gram_squares(left.cpu().double(), right.cpu().double())
    assert float((squares.cpu() - exact).abs().max() / bounds.square().max()) < 2e-6
    torch.testing.assert_close(parts.cpu(), bounds, rtol=1e-4, atol=0)
    assert squares[1] == parts[1] == 0
    left[2], right[3] = 1e-20, float("inf")
    right[2] *= 1e12  # squares of `left` vanish, but not its products with `right`
    squares, parts = gram_squares(left, right)
    assert parts[2].isnan()
    assert not squares[3].isfinite()


class _Opposite(torch.nn.Module):
    """A linear map of each position; half of them count with the opposite sign."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.map = torch.nn.Linear(width, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.map(x)
        half = y.shape[1] // 2
        return y[:, :half].sum(1) - y[:, half:].sum(1)


@pytest.mark.parametrize("is_captured", [False, True])
def test_positions_that_cancel(is_captured):
    """The squares of their norms have no correct digit, so two examples are measured again by themselves."""
    torch.manual_seed(0)
    positions, width, outputs, clip_norm = 16, 256, 512, 1e-3
    model = _Opposite(width, outputs).to("cuda", torch.bfloat16)
    x = torch.randn(6, positions, width, device="cuda").bfloat16()
    x[1:3, positions // 2 :] = x[1:3, : positions // 2]
    x[1, 0, 3] += 2**-6
    x[2, 5, 0] += 1

    def losses(model, x):
        return 30 * model(x).sum(1)  # so that gradients are exact in bfloat16

    expected, _ = clipped_sum(model.cpu().double(), losses, x.cpu().double(), clip_norm=clip_norm)
    model = model.to("cuda", torch.bfloat16)
    sums = ClippedSums(model, clip_norm=clip_norm)
    sums.engine.attach()
    if is_captured:
        mechanism: Any = SimpleNamespace(_sums=sums)
        run = Captured(mechanism, lambda x: losses(model, x))
        for _ in range(3):
            run(x)
            total, _ = sums.take()
        assert run.graphs == 1
    else:
        losses(model, x).sum().backward()
        total, _ = sums.take()
    assert "tensor cores" in str(sums.explain())
    found = total["map.weight"].cpu().double()
    assert float((found - expected["map.weight"]).norm()) < 0.01 * clip_norm


@pytest.mark.parametrize("rows", [2, 8, 9, 90, 3000])
def test_row_sums_are_deterministic(rows):
    """torch uses atomics if ids repeat often, so a resumed step would differ in some bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, rows, (64, 256), device="cuda", generator=generator)
    values = torch.randn(64, 256, 128, device="cuda", generator=generator)
    weights = torch.rand(64, device="cuda", generator=generator)
    asked = torch.are_deterministic_algorithms_enabled()
    found = [row_weighted_sum(ids, values, weights, rows) for _ in range(10)]
    assert all(torch.equal(found[0], other) for other in found[1:])
    exact = row_weighted_sum(ids.cpu(), values.double().cpu(), weights.double().cpu(), rows)
    torch.testing.assert_close(found[0].double().cpu(), exact, rtol=1e-5, atol=1e-4)
    assert torch.are_deterministic_algorithms_enabled() == asked


def test_kernels_run_only_on_the_current_device(monkeypatch):
    there = torch.ones(2, device="cuda")
    assert choose.on_gpu(there, None)
    assert choose.available("cuda:0")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 7)
    assert not choose.on_gpu(there)
    assert not choose.available("cuda:0")


@pytest.mark.parametrize("make", [dpoptim.side_information, partial(dpoptim.adadps, renew_every=2)])
def test_public_gradients_equal_those_on_the_cpu(make):
    """On a GPU, backward runs in a different thread, which must also know that the data is public."""
    plan = dpoptim.PrivacyPlan(num_examples=64, batch_size=8, steps=20, clip_norm=1.0, noise_multiplier=0.5)
    key, ends = dpoptim.NoiseKey.from_bytes(bytes(32)), []
    rows, public = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double().to(device)

        def losses(model, batch):
            return model(batch).square().sum(1)

        gradients = dpoptim.PublicGradients(model, losses, [public.to(device)])
        optimizer = make(model, plan, 0.1, public_gradients=gradients, key=key, run_id="run", external_batches=True)
        for _ in range(3):
            losses(model, rows.to(device)).sum().backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)
