"""Loops in C over long vectors against the plain functions."""

from __future__ import annotations

import pytest
import torch

from dpoptim.kernels import elementwise_c
from dpoptim.kernels.inverse_root import inverse_root
from dpoptim.noise import NoiseKey
from dpoptim.noise.normals import NormalSource
from dpoptim.noise.streams import ConvolvedStream

pytestmark = pytest.mark.skipif(elementwise_c._loops() is None, reason="needs a compiler")
COUNT = 3 * elementwise_c._TOGETHER + 7


def drawn(count=COUNT):
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


@pytest.fixture
def asked(monkeypatch):
    """Loops that were found; `patch` turns them off."""
    found, choose = [], elementwise_c._loops_for

    def counted(*vectors):
        found.append(choose(*vectors))
        return found[-1]

    monkeypatch.setattr(elementwise_c, "WORTH_COMPILING", 8)
    monkeypatch.setattr(elementwise_c, "_loops_for", counted)
    return found


def test_inverse_roots(asked, monkeypatch):
    moment = drawn()
    moment[:3] = torch.tensor([0.0, torch.nan, torch.inf])
    found = inverse_root(moment, exponent=0.5, factor=2.5, floor=1e-3)
    assert asked == [elementwise_c._loops()]
    monkeypatch.setattr(elementwise_c, "WORTH_COMPILING", COUNT + 1)
    plain = inverse_root(moment, exponent=0.5, factor=2.5, floor=1e-3)
    assert asked[1:] == [None]
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=0, equal_nan=True)
    assert found[1].isnan()
    inverse_root(moment, exponent=0.3, factor=2.5, floor=1e-3)
    assert len(asked) == 2


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("divisor", [1, 24])
def test_noise_in_one_pass(asked, monkeypatch, scaled, divisor):
    source = NormalSource.of_tensor(NoiseKey.from_bytes(bytes(32)), "weight", numel=COUNT)
    stream = ConvolvedStream(source, noising_row=lambda step: [1.0], steps=3)
    scale, sums = ([drawn().abs() + 0.1] if scaled else None), drawn()
    found, plain = sums.clone(), sums.clone()
    stream.add_to(found, 2, stddev=0.7, scale=scale, divisor=divisor)
    assert asked == [elementwise_c._loops()]
    monkeypatch.setattr(elementwise_c, "WORTH_COMPILING", COUNT + 1)
    stream.add_to(plain, 2, stddev=0.7, scale=scale, divisor=divisor)
    assert asked[1:] == [None]
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
    exact = (sums.double() + 0.7 * stream.row(2).double() / (scale[0].double() if scale else 1)) / divisor
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


def test_when_the_loops_apply(asked):
    row = drawn(16)
    for sums in (row.double(), row.bfloat16(), drawn(32)[::2], drawn(17), drawn(7)):
        before = sums.clone()
        assert not elementwise_c.add_noise(sums, row[: len(sums)], None, stddev=1.0, divisor=1.0)
        assert torch.equal(sums, before)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("< 0 ? 0 : moment[i]", "> 0 ? moment[i] : 0"),  # hides NaN
        ("1 / (factor", "1.00001f / (factor"),
        ("stddev * row[i])", "0.99999f * stddev * row[i])"),
        ("row[i] / scale[i]", "row[i]"),
    ],
)
def test_loops_that_are_wrong_are_not_used(monkeypatch, right, wrong):
    assert right in elementwise_c._SOURCE
    monkeypatch.setattr(elementwise_c, "_SOURCE", elementwise_c._SOURCE.replace(right, wrong))
    assert elementwise_c._loops.__wrapped__() is None
