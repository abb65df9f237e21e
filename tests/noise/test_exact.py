"""Exact noise: every released number is the rounded sum of real numbers, by an oracle of 1,000 bits."""

from __future__ import annotations

import importlib
import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from torch import Tensor

from dpoptim.noise import ExactStream, NormalSource, TensorPart, words
from tests.noise.explicit import KEY, STEPS, STRATEGIES

exact = importlib.import_module("dpoptim.noise.exact")
STDDEV = 1.3
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def stream(name: str = "independent", numel: int = 33, start: int = 0, **kind: object) -> ExactStream:
    parts = [TensorPart(name="weight", numel=numel, start=start)]
    made = STRATEGIES[name].stream(KEY, parts, stream="gradient", exact=True, **kind)  # type: ignore[arg-type]
    assert isinstance(made, ExactStream)
    return made


def of_row(coefs: list[float], numel: int, start: int = 0) -> ExactStream:
    parts = (TensorPart(name="weight", numel=numel, start=start),)
    source = NormalSource(key=KEY, stream="gradient", parts=parts, dtype=torch.float64)
    return ExactStream(source, noising_row=lambda step: coefs, steps=STEPS)


def added(to: Tensor, made: ExactStream, step: int = 5, **more: object) -> Tensor:
    sums = to.clone()
    made.add_to(sums, step, stddev=STDDEV, **{"scale": None, "divisor": 1, **more})  # type: ignore[arg-type]
    return sums


def true_normal(place: int, step: int, name: str = "weight", stream: str = "gradient") -> mpmath.mpf:
    """Return the normal whose bits are 16 levels of the keystream."""
    radius = angle = Fraction(0)
    for level in range(16):
        subkey = KEY.subkey(f"normals/{stream}" + (f"/{level}" if level else ""), name)
        pair = exact.words(subkey, step=step, start=place // 2 * 2, count=2).tolist()
        radius += Fraction(pair[0], 2 ** (64 * (level + 1)))
        angle += Fraction(pair[1], 2 ** (64 * (level + 1)))
    length = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(radius.numerator) / radius.denominator))
    turn = 2 * mpmath.pi * mpmath.mpf(angle.numerator) / angle.denominator
    return length * (mpmath.sin(turn) if place % 2 else mpmath.cos(turn))


def true_noise(coefs: list[float], step: int, place: int) -> mpmath.mpf:
    return mpmath.mpf(STDDEV) * sum(coef * true_normal(place, step - lag) for lag, coef in enumerate(coefs))


def grid_of(coefs: list[float]) -> float:
    """Return 2^-10 standard deviations of the noise, or up to half of that: a power of two."""
    return 2.0 ** (math.floor(math.log2(STDDEV * math.hypot(*coefs))) - 10)


def expected(query: list[float], coefs: list[float], step: int, start: int = 0) -> list[float]:
    """Return grid·round((query + STDDEV·Σ_i coefs[i]·z_{step-i})/grid)."""
    grid, found = grid_of(coefs), []
    with mpmath.workprec(1000):
        for place, value in enumerate(query, start):
            total = (value + true_noise(coefs, step, place)) / grid
            found.append(grid * int(mpmath.floor(total + 0.5)))
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of the elements that are computed with more bits."""
    found = []
    one = ExactStream._rounded

    def rounded(stream: ExactStream, name: str, place: int, *rest: Any) -> int:
        found.append(place)
        return one(stream, name, place, *rest)

    monkeypatch.setattr(ExactStream, "_rounded", rounded)
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_number_is_the_rounded_real_sum(name: str) -> None:
    query = torch.linspace(-4, 4, 33)
    coefs = STRATEGIES[name].noising_row(5)
    np.testing.assert_allclose(STRATEGIES[name].noising_matrix()[5, 5::-1][: len(coefs)], coefs)
    assert added(query, stream(name)).tolist() == expected(query.tolist(), coefs, 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("numel", "start"), [(1, 0), (1, 1), (10, 3), (11, 3), (2, 7)])
def test_parts_with_any_edges(numel: int, start: int, dtype: torch.dtype, device: str) -> None:
    query = torch.linspace(-4, 4, numel, dtype=dtype, device=device)
    found = added(query, stream(numel=numel, start=start, dtype=dtype, device=device))
    assert found.tolist() == expected(query.tolist(), [1.0], 5, start)


def test_several_parts_are_added_one_by_one() -> None:
    parts = tuple(TensorPart(name=f"part {i}", numel=n, start=s) for i, (n, s) in enumerate([(3, 1), (0, 0), (5, 2)]))
    kind = {"noising_row": lambda step: [1.0, -0.5], "steps": STEPS}
    together = ExactStream(NormalSource(key=KEY, stream="gradient", parts=parts), **kind)  # type: ignore[arg-type]
    found = added(torch.zeros(8), together).split([3, 0, 5])
    for part, own in zip(parts, found, strict=True):
        alone = ExactStream(NormalSource(key=KEY, stream="gradient", parts=(part,)), **kind)  # type: ignore[arg-type]
        assert torch.equal(own, added(torch.zeros(part.numel), alone))


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_and_shards_have_the_numbers_of_the_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.linspace(-4, 4, 1001, device=device)
    whole = added(query, stream("two bands", 1001, device=device))
    assert torch.equal(whole.cpu(), added(query.cpu(), stream("two bands", 1001)))
    monkeypatch.setattr(exact, "_CHUNKS", {"cpu": 7, "cuda": 7})
    assert torch.equal(whole, added(query, stream("two bands", 1001, device=device)))
    shards = [added(query[a:b], stream("two bands", b - a, a, device=device)) for a, b in pairwise([0, 5, 500, 1001])]
    assert torch.equal(whole, torch.cat(shards))


def test_computing_every_number_with_more_bits_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.linspace(-4, 4, 301)
    quick = added(query, stream("two buffers", 301))
    monkeypatch.setattr(exact, "_ERROR", 1.0)
    assert torch.equal(quick, added(query, stream("two buffers", 301)))


ROWS: dict[str, tuple[list[float], float, int]] = {  # coefficients, how far from 0 in grid steps, the first element
    "independent": ([1.0], 0.0, 0),
    "odd start": ([1.0], 0.0, 3),
    "large coefficients": ([100.0, -90.0, 1.0], 0.0, 0),
    "far from 0": ([1.0], 2.0**40, 0),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("above", [-0.4, 0.0, 0.4])
def test_sums_near_the_middle_of_two_grid_points(row: str, above: float, asked: list[int]) -> None:
    """float64 may not tell where they belong, so they are computed with more bits."""
    coefs, far, start = ROWS[row]
    grid, numel, query = grid_of(coefs), 40, []
    limit = 2.0**-38 * sum(map(abs, coefs)) * STDDEV + 2.0**-50 * far * grid
    with mpmath.workprec(1000):
        for place in range(start, start + numel):
            middle = (place - 20 + 0.5 + far) * grid + above * limit
            query.append(float(middle - true_noise(coefs, 5, place)))
    found = added(torch.tensor(query, dtype=torch.float64), of_row(coefs, numel, start))
    assert found.tolist() == expected(query, coefs, 5, start)
    assert asked == list(range(start, start + numel))


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("radius", [0, 1, 2**20, 2**38 - 1, 2**63, 2**64 - 2**36, 2**64 - 2, 2**64 - 1])
def test_radii_in_the_tail_and_near_zero(
    radius: int, start: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 64 bits of the radius leave a large error there; later levels of the keystream decide."""
    rare = 6  # the pair whose radius this is

    def patched(subkey: bytes, *, step: int, start: int = 0, count: int) -> np.ndarray:
        found = words(subkey, step=step, start=start, count=count).copy()
        if subkey == KEY.subkey("normals/gradient", "weight") and start <= 2 * rare < start + count:
            found[2 * rare - start] = radius
        return found

    monkeypatch.setattr("dpoptim.noise.normals.words", patched)
    monkeypatch.setattr(exact, "words", patched)
    query = torch.linspace(-4, 4, 20)
    assert added(query, stream(numel=20, start=start)).tolist() == expected(query.tolist(), [1.0], 5, start)
    assert asked == ([] if radius == 2**63 else [2 * rare, 2 * rare + 1])


@pytest.mark.parametrize("depth", [1, 2])
def test_intervals_hold_the_normal(depth: int) -> None:
    names = {("weight", "gradient"), ("bias", "gradient"), ("weight", "count")}
    for name, kind in names:
        source = NormalSource(key=KEY, stream=kind, parts=(TensorPart(name=name, numel=20),), dtype=torch.float64)
        made, iv = ExactStream(source, noising_row=lambda step: [1.0], steps=STEPS), mpmath.iv
        iv.prec = 64 * depth + 64
        with mpmath.workprec(1000):
            for place in range(20):
                found = made._interval(iv, name, place, 5, depth)
                assert found.a < true_normal(place, 5, name, kind) < found.b
                assert found.delta < 2.0 ** (-64 * depth + 10)


def test_a_sum_of_0_has_no_sign() -> None:
    """Otherwise it would tell on which side of 0 the unrounded sum is."""
    with mpmath.workprec(1000):
        query = [float(-true_noise([1.0], 5, place)) + side for place in range(20) for side in (-1e-5, 1e-5)]
    for side in (0, 1):
        found = added(torch.tensor(query[side::2], dtype=torch.float64), of_row([1.0], 20))
        assert not found.any()
        assert not found.signbit().any()


def test_scale_and_divisor_come_after_rounding() -> None:
    query, scale = torch.linspace(-4, 4, 33), torch.linspace(0.1, 7.7, 33)
    found = added(query, stream(), scale=[scale], divisor=32)
    multiples = torch.tensor(expected((query.double() * scale.double()).tolist(), [1.0], 5), dtype=torch.float64)
    assert torch.equal(found, (multiples / scale.double() / 32).float())


def test_sums_that_are_not_finite_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_SQUARED_RADII", (math.inf, math.inf))  # as if each needed more bits
    found = added(torch.tensor([math.inf, -math.inf, math.nan, 1.0]), stream(numel=4))
    assert found[0] == math.inf
    assert found[1] == -math.inf
    assert found[2].isnan()
    assert found[3].isfinite()


def impossible_from(x: float, released: Tensor) -> Tensor:
    """Return which released float32 numbers cannot be a sum x + noise, because that is a multiple of x's last bit / 2.

    Near 0, floating-point numbers are closer to each other than near x, so most of them are no such sum.
    """
    spacing = float(np.spacing(np.float32(x))) / 2
    return (released.double() / spacing).frac() != 0


@pytest.mark.parametrize("is_exact", [False, True])
def test_the_last_bits_tell_a_sum_of_0_from_a_sum_of_1(is_exact: bool) -> None:
    """Floating-point noise gives the sum away in a quarter of the coordinates; exact noise never does."""
    numel = 10_000
    part = [TensorPart(name="weight", numel=numel)]
    made = STRATEGIES["independent"].stream(KEY, part, stream="gradient", exact=is_exact)
    for value in (0.0, 1.0):
        sums = torch.full((numel,), value)
        made.add_to(sums, 3, stddev=1.0, scale=None, divisor=1)
        share = float(impossible_from(1.0, sums).double().mean())
        if value == 0.0 and not is_exact:
            assert 0.2 < share < 0.3
        else:
            assert share == 0.0


def test_other_numbers_of_sums_and_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="33 sums, got 34"):
        added(torch.zeros(34), stream())
    with pytest.raises(ValueError, match="step"):
        added(torch.zeros(33), stream(), step=STEPS)
