"""Noise whose addition is exact: each release is a real sum plus real Gaussian noise, rounded to a grid.

The theorems assume real numbers. A floating-point sum x + n takes values that x does not reach with other noise, so a
single value may tell x from its neighbour (Mironov, 2012; Jin et al., 2022). Here each sum x becomes

    grid · round((x + stddev·Σ_i coefs[i]·z_{t-i}) / grid)

for real-valued Gaussians z. The rest, division by the scale and the batch size, is computed from the integer alone.
Rounding is post-processing, so ε does not change, whatever the strategy and the sampling.

z is never computed to its end. The keystream gives as many bits of it as are asked for. In float64, nearly every sum is
known well enough to be rounded. The others, about one in 2^25 per row of z, are computed by intervals with more bits,
until both ends round to the same number (Haney et al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from mpmath.ctx_iv import MPIntervalContext, ivmpf  # type: ignore[import-untyped]
from mpmath.libmp import to_int  # type: ignore[import-untyped]

from dpoptim.kernels.inverse_root import LazyInverseRoot
from dpoptim.noise.normals import NormalSource, words
from dpoptim.noise.streams import ConvolvedStream, Scale, check_step

GRID = 2.0**-10  # standard deviations between rounded sums; rounding adds 1e-7 of the noise's variance
_CHUNKS = {"cpu": 2**20, "cuda": 2**26}  # elements worked on at a time
_ERROR = 2.0**-38  # of a normal in float64, if its pair has a radius in the limits; at most a quarter of it
_SQUARED_RADII = (2.0**-26, 36.0)  # nearer to 0 or in the tail, u = exp(-r²/2) has too few bits


class ExactStream(ConvolvedStream):
    """Add rows of C⁻¹z exactly, as the module says. No memory, but row t needs all rows of z with a coefficient.

    Guarantee: `add_to` sets each number to s⁻¹·grid·k/divisor, computed in floating point from the scale s and the
    integer k alone. k is round((s·sum + stddev·(C⁻¹z)_t)/grid) for real z, where s·sum is the product in float64. That
    z has the bits of the keystream, and is Gaussian if they are uniform.

    >>> from dpoptim.noise import NoiseKey
    >>> source = NormalSource.of_tensor(NoiseKey.from_bytes(bytes(32)), "weight", numel=3)
    >>> sums = torch.zeros(3)
    >>> ExactStream(source, noising_row=lambda step: [1.0], steps=10).add_to(sums, 0, stddev=1.0, scale=None, divisor=1)
    >>> (sums / 2**-10).tolist() == (sums / 2**-10).round().tolist()
    True
    """

    def __init__(self, source: NormalSource, *, noising_row: Callable[[int], Sequence[float]], steps: int) -> None:
        super().__init__(source, noising_row=noising_row, steps=steps)
        # Each part alone, with whole pairs of normals, whose radius shows how exact they are.
        self._pairs = []
        for part in source.parts:
            odd = part.start % 2
            whole = replace(part, start=part.start - odd, numel=odd + part.numel + (odd + part.numel) % 2)
            self._pairs.append(replace(source, parts=(whole,), dtype=torch.float64))

    def add_to(self, sums: torch.Tensor, step: int, *, stddev: float, scale: Scale, divisor: float) -> None:
        check_step(step, self.steps)
        if len(sums) != self.source.numel:
            raise ValueError(f"Expected {self.source.numel} sums, got {len(sums)}.")
        at = 0
        for index, part in enumerate(self.source.parts):
            whole = None if scale is None else scale[index]
            whole = whole.tensor() if isinstance(whole, LazyInverseRoot) else whole
            size = _CHUNKS[sums.device.type]
            for begin in range(0, part.numel, size):
                end = min(begin + size, part.numel)
                own = sums[at + begin : at + end]
                factor = 1.0 if whole is None else whole.reshape(-1)[begin:end].double()
                multiples, grid = self._multiples(index, begin, own.double().mul_(factor), step, stddev)
                own.copy_(multiples.mul_(grid).div_(factor).div_(divisor))
            at += part.numel

    def _multiples(
        self, index: int, begin: int, query: torch.Tensor, step: int, stddev: float
    ) -> tuple[torch.Tensor, float]:
        """Return k for the elements of a part from `begin` on, and the grid."""
        coefs, part = self._noising_row(step), self.source.parts[index]
        own = stddev * math.hypot(*coefs)  # the noise's standard deviation in this row
        grid = GRID * 2.0 ** math.floor(math.log2(own))  # a power of two, so that dividing by it is exact
        noise, unclear = self._row(index, begin, len(query), step, coefs)
        real = noise.to(query.device).mul_(stddev).add_(query).div_(grid)
        rounded = real.round()
        # Errors of the normals and of sums over them, and that of the last sum:
        error = (_ERROR + 2.0**-46 * (len(coefs) + 1)) * sum(map(abs, coefs)) * stddev / grid
        distance = rounded.sub(real).abs_().add_(real.abs_(), alpha=2.0**-50)
        unclear |= set(distance.ge_(0.5 - error).nonzero().ravel().tolist())
        for element in unclear:
            place, value = part.start + begin + element, float(query[element])
            if math.isfinite(value):
                rounded[element] = float(self._rounded(part.name, place, step, coefs, stddev, value, grid))
        return rounded.add_(0.0), grid  # a zero has no sign

    def _row(
        self, index: int, begin: int, count: int, step: int, coefs: Sequence[float]
    ) -> tuple[torch.Tensor, set[int]]:
        """Return `count` elements of Σ_i coefs[i]·z_{step-i} in float64, and those whose error may be larger."""
        source, (least, most) = self._pairs[index], _SQUARED_RADII
        first = self.source.parts[index].start + begin - source.parts[0].start
        odd = first % 2
        total = torch.zeros(odd + count + (odd + count) % 2, dtype=torch.float64, device=source.device)
        unclear: set[int] = set()
        for lag, coef in enumerate(coefs):
            normals = source.normals(step - lag, dtype=torch.float64, start=first - odd, count=len(total))
            even, other = normals[0::2], normals[1::2]
            squared = (even * even).addcmul_(other, other)
            pairs = squared.lt(least).logical_or_(squared.gt(most)).nonzero().ravel().tolist()
            unclear |= {i for pair in pairs for i in (2 * pair - odd, 2 * pair + 1 - odd) if 0 <= i < count}
            total.add_(normals, alpha=coef)
        return total[odd : odd + count], unclear

    def _rounded(
        self, name: str, place: int, step: int, coefs: Sequence[float], stddev: float, query: float, grid: float
    ) -> int:
        """Return round((query + stddev·Σ_i coefs[i]·z_{step-i})/grid) of one element, from as many bits as it takes."""
        depth, low, high = 2, 0, 1
        while low < high:
            iv = MPIntervalContext()
            iv.prec = 64 * depth + 64
            total = iv.mpf(query)
            for lag, coef in enumerate(coefs):
                total += iv.mpf(stddev) * iv.mpf(coef) * self._interval(iv, name, place, step - lag, depth)
            low, high = (int(to_int(end, "f")) for end in (total / iv.mpf(grid) + iv.mpf(0.5))._mpi_)
            depth += 1
        return low

    def _interval(self, iv: MPIntervalContext, name: str, place: int, step: int, depth: int) -> ivmpf:
        """Return an interval that holds the normal of which `depth` words per number are known."""
        radius = angle = 0
        for level in range(depth):
            domain = f"normals/{self.source.stream}" + (f"/{level}" if level else "")
            subkey = self.source.key.subkey(domain, name)
            pair = words(subkey, step=step, start=place - place % 2, count=2).tolist()
            radius, angle = (radius << 64) | pair[0], (angle << 64) | pair[1]
        unit = iv.mpf(2) ** (-64 * depth)
        length = iv.sqrt(-2 * iv.log(iv.mpf([radius, radius + 1]) * unit))
        turn = 2 * iv.pi * iv.mpf([angle, angle + 1]) * unit
        return length * (iv.sin(turn) if place % 2 else iv.cos(turn))
