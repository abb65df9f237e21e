"""Buffered linear Toeplitz strategies: correlated noise whose memory is a handful of buffers, whatever the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import fft, optimize

from dpoptim.noise.key import NoiseKey
from dpoptim.noise.parallel import in_chunks
from dpoptim.noise.series import Series, multiply
from dpoptim.noise.stream import _CHUNK, ConvolvedStream, NoiseStream, NormalSource, _check_step
from dpoptim.noise.toeplitz import ToeplitzStrategy, _check_participation, check_steps

Objective = Literal["mean", "max"]

_GRID = 64  # decays tried for a further buffer
_SAME_DECAY = 1e-4  # buffers whose decays differ by less, in parts of 1 - decay, are one


@dataclass(frozen=True, kw_only=True)
class BufferedToeplitz:
    """The Toeplitz C of least error whose coefficients are a sum of at most `buffers` decaying exponentials.

        minimise  error·sensitivity  over  c_0 = 1,  c_i = Σ_j weights[j]·decays[j]^(i-1)

    with `error` the mean or the max error of the prefix sums, as `objective` says. Buffered linear Toeplitz
    (BLT) noise: nearly as good as dense C, in the memory of a few rows and the time of as many sums.

    Guarantee: whatever the search finds is non-negative and non-increasing, so that sensitivity is exact.

    Edge cases: a buffer that would not lower the error is left out, so the strategy may have fewer; where no
    correlation helps (one step, or an example present in each) it has none and is independent noise.

    >>> strategy = BufferedToeplitz(buffers=2).optimize(steps=100)
    >>> strategy.buffers, strategy.sensitivity_is_exact
    (2, True)
    >>> round(strategy.mean_error() * strategy.column_norm, 3)  # 2.371 for the square root
    2.321
    """

    buffers: int
    objective: Objective = "mean"

    def __post_init__(self) -> None:
        if self.buffers < 1:
            raise ValueError(f"buffers={self.buffers} must be at least 1; use Independent() for noise without memory")
        if self.objective not in ("mean", "max"):
            raise ValueError(f"objective={self.objective!r} must be 'mean' or 'max'")

    def optimize(self, *, steps: int, max_participations: int = 1, min_separation: int = 1) -> BufferedToeplitzStrategy:
        """The best buffers for this many steps and that participation; a second call is answered from memory."""
        check_steps(steps)
        _check_participation(steps, max_participations, min_separation)
        return optimized_buffers(steps, self.buffers, max_participations, min_separation, self.objective)


@dataclass(frozen=True, kw_only=True)
class BufferedToeplitzStrategy(ToeplitzStrategy):
    """The Toeplitz strategy of the buffers (decays, weights), which it is equal and hashed by.

        c_0 = 1,   c_i = Σ_j weights[j]·decays[j]^(i-1)

    Guarantee: decays in [0, 1) and positive weights that sum to at most 1 = c_0 are asked for, so the
    coefficients are non-negative and non-increasing, and `sensitivity` is exact.

    >>> strategy = BufferedToeplitzStrategy(steps=4, decays=(0.5,), weights=(0.25,))
    >>> strategy.strategy_coefs, strategy.noising_coefs.round(12).tolist()
    ((1.0, 0.25, 0.125, 0.0625), [1.0, -0.25, -0.0625, -0.015625])
    """

    strategy_coefs: tuple[float, ...] = field(init=False, repr=False, compare=False)
    decays: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        check_steps(self.steps)
        decays, weights = np.asarray(self.decays, dtype=np.float64), np.asarray(self.weights, dtype=np.float64)
        if decays.shape != weights.shape or decays.ndim != 1:
            raise ValueError(f"weights={self.weights} must be as many as decays={self.decays}")
        if not ((decays >= 0) & (decays < 1)).all():
            raise ValueError(f"decays={self.decays} must lie in [0, 1)")
        if not (weights > 0).all() or not weights.sum() <= 1:
            raise ValueError(
                f"weights={self.weights} must be positive and sum to at most 1; coefficients that increase "
                "have no known sensitivity"
            )
        order = np.argsort(-decays, kind="stable")
        object.__setattr__(self, "decays", tuple(decays[order].tolist()))
        object.__setattr__(self, "weights", tuple(weights[order].tolist()))
        tail = weights[order] @ _powers(decays[order], self.steps - 1)
        # Decays within rounding of 1 give equal coefficients, which must not seem to increase by an ulp.
        coefs = np.minimum.accumulate(np.concatenate([[1.0], tail]))
        object.__setattr__(self, "strategy_coefs", tuple(coefs.tolist()))
        super().__post_init__()

    @property
    def buffers(self) -> int:
        """The number of rows a stream keeps."""
        return len(self.decays)

    @cached_property
    def noising_coefs(self) -> Series:
        """The first column of C⁻¹, float64 [steps], read-only: the coefficients of `inverse_buffers`."""
        coefs = _noising_coefs(self.decays, self.weights, self.steps)
        coefs.flags.writeable = False
        return coefs

    def stream(
        self,
        key: NoiseKey,
        *,
        stream: str,
        name: str,
        numel: int,
        start: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> NoiseStream:
        """Rows of C⁻¹z for elements [start, start + numel) of the tensor `name`, from `buffers` kept rows.

        >>> key = NoiseKey.from_bytes(bytes(32))
        >>> strategy = BufferedToeplitzStrategy(steps=1000, decays=(0.99, 0.5), weights=(0.1, 0.3))
        >>> stream = strategy.stream(key, stream="gradient", name="weight", numel=5)
        >>> stream.row(0).shape, stream.memory_bytes
        (torch.Size([5]), 40)
        """
        source = NormalSource(
            key=key,
            stream=stream,
            name=name,
            numel=numel,
            start=start,
            dtype=dtype,
            device=device,
        )
        if not self.decays:
            return ConvolvedStream(source, noising_coefs=[1.0], steps=self.steps)
        return BufferedStream(source, decays=self.decays, weights=self.weights, steps=self.steps)


class BufferedStream:
    """Rows y = C⁻¹z for a buffered C, from the buffers s_j = Σ_{i≥1} decays[j]^(i-1)·y_{t-i}.

        y_t = z_t - Σ_j weights[j]·s_j,    then    s_j ← decays[j]·s_j + y_t

    As c_i = Σ_j weights[j]·decays[j]^(i-1), the first line is row t of Cy = z, solved for y_t. Buffers and
    sums are float32, or float64 where the dtype is: a buffer sums many rows, for which narrower is too little.

    Guarantee: row(t) has the same bits in every run: products and sums are separate, correctly rounded
    operations on each element, in one order. Asked for a step that is not the next one, the same one again
    included, the stream replays the steps before it from the key, at one row of normals for each.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> source = NormalSource(key=key, stream="gradient", name="weight", numel=3)
    >>> a = BufferedStream(source, decays=[0.9, 0.5], weights=[0.1, 0.3], steps=10)
    >>> b = BufferedStream(source, decays=[0.9, 0.5], weights=[0.1, 0.3], steps=10)
    >>> rows = [a.row(step) for step in range(4)]
    >>> torch.equal(b.row(3), rows[3]), b.memory_bytes
    (True, 24)
    """

    def __init__(self, source: NormalSource, *, decays: Sequence[float], weights: Sequence[float], steps: int) -> None:
        self.source = source
        self.steps = steps
        self._decays, self._weights = list(decays), list(weights)
        sum_dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
        self._buffers = torch.zeros(len(self._decays), source.numel, dtype=sum_dtype, device=source.device)
        self._next = 0

    @property
    def memory_bytes(self) -> int:
        return self._buffers.numel() * self._buffers.element_size()

    def row(self, step: int) -> torch.Tensor:
        _check_step(step, self.steps)
        if step < self._next:
            self._buffers.zero_()
            self._next = 0
        while self._next < step:
            self._advanced()
        return self._advanced()

    def _advanced(self) -> torch.Tensor:
        """The next row, which the buffers then hold."""
        row = self.source.normals(self._next, dtype=self._buffers.dtype)
        if row.device.type == "cpu":
            rows, buffers = row.numpy(), self._buffers.numpy()

            def advance(begin: int, end: int) -> None:
                _advance(np, rows[begin:end], buffers[:, begin:end], self._decays, self._weights)

            in_chunks(advance, len(row), chunk=_CHUNK)
        else:
            _advance(torch, row, self._buffers, self._decays, self._weights)
        self._next += 1
        return row.to(self.source.dtype)


def _advance(xp: Any, row: Any, buffers: Any, decays: Sequence[float], weights: Sequence[float]) -> None:
    """From row = z_t and buffers at t to row = y_t and buffers at t + 1, in place, for numpy or torch as `xp`.

    Product and sum are two operations: one fused multiply-add would round otherwise, where there is one.
    """
    product = xp.empty_like(row)
    for buffer, weight in zip(buffers, weights, strict=True):
        xp.multiply(buffer, weight, out=product)
        row -= product
    for buffer, decay in zip(buffers, decays, strict=True):
        buffer *= decay
        buffer += row


def inverse_buffers(decays: ArrayLike, weights: ArrayLike) -> tuple[Series, Series]:
    """The decays and weights of 1/c(x), which has as many buffers as c(x) = 1 + x·Σ_j weights[j]/(1 - decays[j]·x).

        1/c(x) = 1 - x·uᵀ(I - x(diag(decays) - uuᵀ))⁻¹u,    u = √weights

    so the decays are the eigenvalues of a symmetric matrix, Q·diag·Qᵀ, and the weights -(Qᵀu)². Symmetry keeps
    it accurate where decays crowd together, as the roots of the polynomial c(x)·Π(1 - decays[j]·x) would not be.
    With weights that sum to at most 1 the decays lie in [-1, 1).

    >>> [found.round(12).tolist() for found in inverse_buffers([0.5], [0.3])]  # 1 + .3x/(1-.5x) = (1-.2x)/(1-.5x)
    [[0.2], [-0.3]]
    """
    decays, root = np.asarray(decays, dtype=np.float64), np.sqrt(np.asarray(weights, dtype=np.float64))
    values, vectors = np.linalg.eigh(np.diag(decays) - np.outer(root, root))
    return values, -((vectors.T @ root) ** 2)


@lru_cache(maxsize=256)
def optimized_buffers(
    steps: int, buffers: int, max_participations: int, min_separation: int, objective: Objective
) -> BufferedToeplitzStrategy:
    """The best buffers, found one after another: the best with one fewer, one more put in, all moved by L-BFGS.

    The further buffer gets the decay at which a little weight lowers the error most, and weight as long as it
    does. So more buffers are never worse; where no decay helps, the strategy with fewer is what is returned.

    >>> optimized_buffers(20, 1, 20, 1, "mean").buffers  # an example that is in each step: nothing to correlate
    0
    """
    if buffers == 0:
        return BufferedToeplitzStrategy(steps=steps, decays=(), weights=())
    fewer = optimized_buffers(steps, buffers - 1, max_participations, min_separation, objective)
    decays, weights = np.asarray(fewer.decays), np.asarray(fewer.weights)
    pattern = (steps, max_participations, min_separation, objective)
    lowest, pull = _log_error(decays, weights, *pattern)
    more = _with_another(decays, weights, lowest, pull[1:], pattern)
    if more is None:
        return fewer
    decays, weights = _merged(*_refined(*more, pattern))
    if not _log_error(decays, weights, *pattern)[0] < lowest:
        return fewer
    return BufferedToeplitzStrategy(steps=steps, decays=tuple(decays), weights=tuple(weights))


_Pattern = tuple[int, int, int, Objective]


def _with_another(
    decays: Series, weights: Series, lowest: float, pull: Series, pattern: _Pattern
) -> tuple[Series, Series] | None:
    """The buffers and the one more that promises most; None where none lowers the error. `pull` is dL/dc_{i≥1}."""
    grid = 1.0 - np.geomspace(0.1 / pattern[0], 1.0, _GRID)
    unit = np.sqrt(1.0 - grid**2)  # the weight that gives each a norm of about 1
    slopes = unit * (_powers(grid, len(pull)) @ pull)
    at = int(np.argmin(slopes))
    if not slopes[at] < -1e-9:
        return None
    all_decays, weight = np.append(decays, grid[at]), 0.5 * min(unit[at], 1.0 - weights.sum())
    for _ in range(30):
        all_weights = np.append(weights, weight)
        if _log_error(all_decays, all_weights, *pattern)[0] < lowest:
            return all_decays, all_weights
        weight /= 2
    return None


def _refined(decays: Series, weights: Series, pattern: _Pattern) -> tuple[Series, Series]:
    """A local minimum by L-BFGS over the logits of the decays, and of the weights beside 1 - Σ weights.

    Any logits are decays in (0, 1) and positive weights that sum to less than 1, so nothing must be refused.
    """
    count = len(decays)

    def buffers(logits: Series) -> tuple[Series, Series]:
        decays = np.clip(1.0 / (1.0 + np.exp(-logits[:count])), 0.0, 1.0 - 1e-12)
        shares = np.exp(logits[count:] - max(0.0, logits[count:].max()))
        rest = np.exp(-max(0.0, logits[count:].max()))
        return decays, shares / (rest + shares.sum())

    def goal(logits: Series) -> tuple[float, Series]:
        decays, weights = buffers(logits)
        value, pull = _log_error(decays, weights, *pattern)
        powers, lags = _powers(decays, len(pull) - 1), np.arange(1, len(pull) - 1)
        by_weight = powers @ pull[1:]
        by_decay = weights * ((powers[:, :-1] * lags) @ pull[2:])
        return value, np.concatenate([by_decay * decays * (1 - decays), weights * (by_weight - weights @ by_weight)])

    decays = np.maximum(decays, 0.2)  # nearer to 0 the logit's gradient is too small to move it
    start = np.concatenate([np.log(decays / (1 - decays)), np.log(weights / (1 - weights.sum()))])
    found = optimize.minimize(
        goal,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-30.0, 30.0)] * (2 * count),
        options={"maxcor": 30, "maxiter": 1000, "maxfun": 2000, "ftol": 1e-15, "gtol": 1e-9},
    )
    return buffers(found.x)


def _merged(decays: Series, weights: Series) -> tuple[Series, Series]:
    """The same buffers in order, those of one decay made one, and those of no weight left out."""
    order = [j for j in np.argsort(-decays, kind="stable") if weights[j] > 1e-12]
    kept: list[tuple[float, float]] = []
    for decay, weight in zip(decays[order], weights[order], strict=True):
        if kept and kept[-1][0] - decay < _SAME_DECAY * (1 - decay):
            last, before = kept.pop()
            decay, weight = (last * before + decay * weight) / (before + weight), before + weight
        kept.append((float(decay), float(weight)))
    return np.array([decay for decay, _ in kept]), np.array([weight for _, weight in kept])


def _log_error(
    decays: Series, weights: Series, steps: int, max_participations: int, min_separation: int, objective: Objective
) -> tuple[float, Series]:
    """ln(error²·sensitivity²), and its gradient in each of the coefficients c_0 .. c_{steps-1}.

    With p = 1/((1-x)c) and h = p/c, a change of c moves p by -h·δc, so that for E = Σ w_i p_i² the
    gradient is the correlation dE/dc_j = -Σ_i 2 w_i p_i h_{i-j}.
    """
    coefs = np.concatenate([[1.0], weights @ _powers(decays, steps - 1)])
    noising = _noising_coefs(decays, weights, steps)
    prefix = np.cumsum(noising)
    rows = np.arange(steps, 0, -1) / steps if objective == "mean" else np.ones(steps)
    error = float(rows @ prefix**2)
    energy, energy_pull = participation_energy(coefs, max_participations, min_separation)
    error_pull = -correlate(2 * rows * prefix, multiply(prefix, noising, steps))
    return float(np.log(error) + np.log(energy)), energy_pull / energy + error_pull / error


def participation_energy(coefs: Series, max_participations: int, min_separation: int) -> tuple[float, Series]:
    """The sensitivity² of non-negative, non-increasing coefficients [steps], and its gradient in each of them.

        Σ_t total_t²,   total_t = Σ_{i < max_participations} c_{t - i·min_separation}

    The sums over participations are differences of running sums along every min_separation-th coefficient,
    so that many participations cost no more than one.

    >>> participation_energy(np.array([1.0, 0.5, 0.0, 0.0]), 2, 1)[0]  # totals 1, 1.5, 0.5, 0
    3.5
    """
    total = _comb(coefs, max_participations, min_separation)
    back = _comb(total[::-1], max_participations, min_separation)[::-1]
    return float(total @ total), 2 * back


def _comb(series: Series, count: int, lag: int) -> Series:
    """Σ_{i < count} series_{t - i·lag} for each t."""
    padded = np.zeros(-(-len(series) // lag) * lag)
    padded[: len(series)] = series
    running = np.cumsum(padded.reshape(-1, lag), axis=0)
    running[count:] -= running[:-count].copy()
    return running.reshape(-1)[: len(series)]


def correlate(a: Series, b: Series) -> Series:
    """Σ_i a_i b_{i-j} for each lag j of [0, len(a)), by FFT.

    >>> correlate(np.array([1.0, 2.0]), np.array([3.0, 4.0])).round(12).tolist()
    [11.0, 6.0]
    """
    size = fft.next_fast_len(2 * len(a), real=True)
    return np.asarray(fft.irfft(fft.rfft(a, size) * np.conj(fft.rfft(b, size)), size)[: len(a)], dtype=np.float64)


def _noising_coefs(decays: ArrayLike, weights: ArrayLike, steps: int) -> Series:
    inverse_decays, inverse_weights = inverse_buffers(decays, weights)
    return np.concatenate([[1.0], inverse_weights @ _powers(inverse_decays, steps - 1)])


def _powers(bases: ArrayLike, count: int) -> Series:
    """bases[j]^i for i in [0, count), as float64 [len(bases), count]: products of two, as powers are slow to take."""
    column = np.asarray(bases, dtype=np.float64)[:, None]
    low, high = column ** np.arange(256), column ** np.arange(0, count, 256)
    return (high[:, :, None] * low[:, None, :]).reshape(len(column), high.shape[1] * 256)[:, :count]
