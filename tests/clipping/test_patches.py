"""Weight gradients of convolutions by patches, as on a GPU, equal those by groups."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

convolution = importlib.import_module("dpoptim.clipping.layers.convolution")  # its name is also that of a rule
KERNELS = [  # kernel, stride, padding, dilation
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 2), (2, 1), (1, 0), (1, 2)),
    ((7, 7), (2, 2), (3, 3), (1, 1)),
    ((1, 1), (2, 2), (0, 0), (1, 1)),
    ((1, 1), (1, 2), (1, 2), (1, 1)),
    ((1, 3), (2, 2), (0, 1), (3, 2)),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), KERNELS)
def test_patches(kernel, stride, padding, dilation, monkeypatch):
    monkeypatch.setattr(convolution, "_PATCH_ELEMENTS", 5000)  # a few examples at a time
    torch.manual_seed(0)
    inputs, weight = torch.randn(5, 4, 15, 14, dtype=torch.float64), torch.randn(6, 4, *kernel, dtype=torch.float64)
    settings = (list(stride), list(padding), list(dilation), 1)
    patches = convolution._patches(inputs, list(kernel), settings)
    assert torch.equal(patches, F.unfold(inputs, kernel, dilation, padding, stride))
    grad = torch.randn_like(F.conv2d(inputs, weight, None, stride, padding, dilation))
    found = convolution._by_patches(grad, inputs, weight, settings)
    torch.testing.assert_close(found, convolution._by_groups(grad, inputs, weight, settings))
