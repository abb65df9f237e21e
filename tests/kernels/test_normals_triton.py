"""Noise kernels give the same bits as the plain functions."""

from __future__ import annotations

import pytest
import torch

from dpoptim.noise import NoiseKey
from tests.interpreter import DEVICE, IS_INTERPRETED, needs_triton
from tests.noise.explicit import normals

pytestmark = [needs_triton, pytest.mark.gpu]
KEY = NoiseKey.from_bytes(bytes(range(32)))
RANGES = {"weight": (3, 1100 if IS_INTERPRETED else 2100), "bias": (0, 5), "far": (2**34 - 8, 2**34 + 9)}
STEPS = [7, 2**40 + 3] if IS_INTERPRETED else [0, 7, 2**40 + 3]


def plain(step):
    rows = [
        normals(KEY, stream="gradient", name=name, step=step, start=start, count=stop - start)
        for name, (start, stop) in RANGES.items()
    ]
    return torch.cat(rows)


def device_normals():
    from dpoptim.kernels.normals_triton import DeviceNormals

    subkeys = [KEY.subkey("normals/gradient", name) for name in RANGES]
    return DeviceNormals(subkeys, list(RANGES.values()), torch.device(DEVICE))


def on_device(step, coefs, dtype):
    return device_normals().combined(step, coefs, dtype).cpu()


@pytest.mark.parametrize("step", STEPS)
def test_a_row_has_the_bits_of_the_cpu(step):
    assert torch.equal(on_device(step, [1.0], torch.float64), plain(step))
    assert torch.equal(on_device(step, [1.0], torch.float32), plain(step).float())


def test_rows_are_combined_in_their_order():
    coefs = [1.0, -0.5, 0.3]
    expected = torch.zeros_like(plain(0))
    for lag, coef in enumerate(coefs):
        expected = expected + coef * plain(9 - lag)
    assert torch.equal(on_device(9, coefs, torch.float64), expected)


def moments():
    """Moments in a different order than the tensors; some are negative or 0."""
    numels = {name: stop - start for name, (start, stop) in RANGES.items()}
    whole = torch.randn(sum(numels.values()), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    whole[::7] = 0
    views = dict(zip(reversed(numels), whole.split(list(reversed(numels.values()))), strict=True))
    return [views[name] for name in RANGES]


@pytest.mark.parametrize(("kind", "coefs"), [("flat", [1.0, -0.5]), ("tensors", [1.0]), ("lazy", [1.0])])
def test_noise_is_added_without_a_row_in_memory(kind, coefs):
    """The noise equals the row divided by the scale; with a lazy scale, up to the last bits."""
    from dpoptim.kernels.inverse_root import LazyInverseRoot

    settings = [(0.5, 3.0, 0.1), (0.5, 1.0, 1.0), (0.5, 0.0, 0.25)]
    lazy = [LazyInverseRoot(moment, *numbers) for moment, numbers in zip(moments(), settings, strict=True)]
    tensors = [own.tensor() for own in lazy]
    scale = {"flat": None, "tensors": tensors, "lazy": lazy}[kind]
    noise = on_device(9, coefs, torch.float32).to(DEVICE)
    if scale is not None:
        noise = noise / torch.cat(tensors)
    found = torch.zeros_like(noise)
    assert device_normals().add_to(found, 9, coefs, stddev=1.0, scale=scale, divisor=1.0)
    tolerance = 3e-7 if kind == "lazy" else 0
    torch.testing.assert_close(found, noise, rtol=tolerance, atol=0)
    sums = torch.randn(len(noise), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected = (sums.double() + 0.3 * noise.double()) / 7.0
    assert device_normals().add_to(sums, 9, coefs, stddev=0.3, scale=scale, divisor=7.0)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scaled", [False, True])
def test_aligned_tensors_get_the_same_noise(scaled):
    """Loads and stores of four numbers at a time change nothing."""
    from dpoptim.kernels.normals_triton import DeviceNormals

    subkeys = [KEY.subkey("normals/gradient", name) for name in ("a", "b")]
    whole = DeviceNormals(subkeys, [(0, 1032), (8, 20)], torch.device(DEVICE))
    odd = DeviceNormals(subkeys, [(0, 1031), (8, 19)], torch.device(DEVICE))
    assert whole._is_even
    assert not odd._is_even
    row, other = whole.combined(3, [1.0], torch.float32), odd.combined(3, [1.0], torch.float32)
    assert torch.equal(torch.cat([row[:1031], row[1032:-1]]), other)
    sums, scale = (
        torch.zeros_like(row),
        [torch.full((1032,), 0.5, device=DEVICE), torch.full((12,), 2.0, device=DEVICE)],
    )
    assert whole.add_to(sums, 3, [1.0], stddev=1.0, scale=scale if scaled else None, divisor=1.0)
    assert torch.equal(sums, row / torch.cat(scale) if scaled else row)


def test_other_scales_are_left_to_the_plain_functions():
    from dpoptim.kernels.inverse_root import LazyInverseRoot

    sums = torch.zeros(sum(map(len, moments())), device=DEVICE)
    scales = [
        [moment.double() for moment in moments()],
        [LazyInverseRoot(moment, 0.25, 1.0, 1.0) for moment in moments()],
        [LazyInverseRoot(moment, 0.5, 1.0, 1.0, start=1.0) for moment in moments()],
        [LazyInverseRoot(moments()[0], 0.5, 1.0, 1.0), *moments()[1:]],
        [moment[1:] for moment in moments()],
    ]
    for scale in scales:
        assert not device_normals().add_to(sums, 9, [1.0], stddev=1.0, scale=scale, divisor=1.0)
    assert not device_normals().add_to(sums.double(), 9, [1.0], stddev=1.0, scale=None, divisor=1.0)
    assert not sums.any()


def test_products_are_added_in_their_order():
    from dpoptim.kernels.normals_triton import add_products

    ring = torch.randn(4, 3001, generator=torch.Generator().manual_seed(0))
    row = torch.randn(3001, generator=torch.Generator().manual_seed(1))
    slots, coefs = [2, 0, 3], [0.7, -1.1, 0.01]
    found = row.clone().to(DEVICE)
    add_products(found, ring.to(DEVICE), slots, coefs)
    for slot, coef in zip(slots, coefs, strict=True):
        row = row + ring[slot] * torch.tensor(coef)
    assert torch.equal(found.cpu(), row)
