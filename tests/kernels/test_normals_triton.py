"""Noise kernels give the same bits as the plain functions."""

from __future__ import annotations

import pytest
import torch

from dpoptim.noise import NoiseKey
from dpoptim.noise.normals import normals
from tests.interpreter import DEVICE, IS_INTERPRETED, needs_triton

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


def on_device(step, coefs, dtype):
    from dpoptim.kernels.normals_triton import DeviceNormals

    subkeys = [KEY.subkey("normals/gradient", name) for name in RANGES]
    return DeviceNormals(subkeys, list(RANGES.values()), torch.device(DEVICE)).combined(step, coefs, dtype).cpu()


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
