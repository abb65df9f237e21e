"""Strategies given entry by entry: any lower triangular C, stored by its diagonals."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike

from dpoptim.noise.normals import NormalSource
from dpoptim.noise.search.workloads import Matrix, PrefixSums, Workload
from dpoptim.noise.series import Series
from dpoptim.noise.strategies.base import Strategy, fitting_participations
from dpoptim.noise.streams import ConvolvedStream, NoiseMemory, NoiseStream, RecurrentStream

_ROUNDING = 1e-12  # smaller differences of column products count as rounding


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MatrixStrategy(Strategy):
    """A lower triangular strategy with `bands` diagonals, C[s + lag, s] = diagonals[lag, s].

    Args:
        diagonals: float64 [bands, steps] with a positive main diagonal. Entries outside of the matrix
            (s + lag ≥ steps) are ignored and trailing diagonals of zeros are dropped, so equal matrices are equal
            values.

    Guarantee: `sensitivity` is never below the exact value.

    >>> strategy = MatrixStrategy.from_matrix([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.0, 0.25, 1.0]])
    >>> strategy
    MatrixStrategy(steps=3, bands=2)
    >>> strategy.diagonals.tolist()
    [[1.0, 2.0, 1.0], [0.5, 0.25, 0.0]]
    >>> round(strategy.column_norm**2, 12)  # column 1
    4.0625
    >>> round(strategy.sensitivity(max_participations=2, min_separation=1) ** 2, 12)  # 1.25 + 4.0625 + 2·0.5·2
    7.3125
    """

    diagonals: Matrix
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        diagonals = np.array(self.diagonals, dtype=np.float64)
        if diagonals.ndim != 2 or 0 in diagonals.shape or len(diagonals) > diagonals.shape[1]:
            raise ValueError(f"Expected diagonals [bands, steps] with 1 <= bands <= steps, got {diagonals.shape}.")
        bands, steps = diagonals.shape
        inside = np.arange(bands)[:, None] + np.arange(steps) < steps
        diagonals = np.where(inside, diagonals, 0.0) + 0.0  # removes -0.0, which equals 0.0 but has different bits
        if not np.isfinite(diagonals).all() or not (diagonals[0] > 0).all():
            raise ValueError("Expected finite diagonals with a positive main diagonal, diagonals[0].")
        used = int(np.flatnonzero(diagonals.any(axis=1))[-1]) + 1
        diagonals = np.ascontiguousarray(diagonals[:used])
        diagonals.flags.writeable = False
        object.__setattr__(self, "diagonals", diagonals)
        object.__setattr__(self, "steps", steps)

    @classmethod
    def from_matrix(cls, matrix: ArrayLike) -> MatrixStrategy:
        """Return the strategy whose C is this lower triangular [steps, steps] matrix."""
        full = np.asarray(matrix, dtype=np.float64)
        if full.ndim != 2 or full.shape[0] != full.shape[1] or 0 in full.shape:
            raise ValueError(f"Expected a square matrix, got shape {full.shape}.")
        if np.triu(full, 1).any():
            raise ValueError("Expected a lower triangular matrix, got entries above the diagonal.")
        return cls(diagonals=_by_lag(full.T))

    @property
    def bands(self) -> int:
        return len(self.diagonals)

    @cached_property
    def column_norm(self) -> float:
        return float(np.sqrt(self._column_products[:, 0].max()))

    @cached_property
    def _column_products(self) -> Matrix:
        """column_s · column_{s + lag} as float64 [steps, bands], zero outside of the matrix."""
        bands, steps = self.diagonals.shape
        products = np.zeros((steps, bands))
        # Work in pieces as wide as the band: products of columns further apart are zero.
        for first in range(0, steps, bands):
            stop, reach = min(first + bands, steps), min(first + 2 * bands - 1, steps)
            columns = self._dense(first, reach, rows=min(stop + bands - 1, steps))
            gram = columns[:, : stop - first].T @ columns
            products[first:stop] = _by_lag(gram, lags=bands).T
        return products

    @cached_property
    def _earlier_and_closer_is_worse(self) -> bool:
        """Whether column products are ≥ 0 and do not grow when both columns, or only the later one, move one step."""
        products, slack = self._column_products, _ROUNDING * self.column_norm**2
        falls = (np.diff(products, axis=0) <= slack).all() and (np.diff(products, axis=1) <= slack).all()
        return bool(falls and (products >= -slack).all())

    @property
    def sensitivity_is_exact(self) -> bool:
        """Whether `sensitivity` is exact for every pattern; `is_exact_for` answers for one pattern."""
        return self.bands <= 2 or self._earlier_and_closer_is_worse

    def is_exact_for(self, *, max_participations: int, min_separation: int) -> bool:
        """Return whether `sensitivity` is exact for this pattern, up to rounding. There are two cases.

        Only consecutive participations overlap (at most two, or 2·min_separation ≥ bands): contributions can be
        rotated so that each adds to the next. Or the products of columns are non-negative and do not grow for later
        or wider patterns, as for a Toeplitz matrix with non-negative, non-increasing coefficients.

        >>> strategy = MatrixStrategy.from_matrix([[1, 0, 0, 0], [0.5, 1, 0, 0], [0.2, 0.5, 1, 0], [0, 0.2, 0.5, 2]])
        >>> strategy.is_exact_for(max_participations=2, min_separation=1), strategy.sensitivity_is_exact
        (True, False)
        """
        max_participations = fitting_participations(self.steps, max_participations, min_separation)
        return max_participations <= 2 or 2 * min_separation >= self.bands or self.sensitivity_is_exact

    def sensitivity(self, *, max_participations: int, min_separation: int) -> float:
        """Return an upper bound on how far Cx moves when one example's unit-norm contributions are removed.

            sup ‖C(x - x')‖²  ≤  max over patterns P of  Σ_{s, u in P} |column_s · column_u|

        The supremum is over x, x' that differ in one example, which takes part at most `max_participations` times,
        at least `min_separation` steps apart. Dynamic programming over the first participation, from the last step to
        the first, bounds the maximum in O(steps·bands·max_participations). Products of consecutive columns of the
        pattern are exact. Columns further apart count with the largest product that the earlier one can have.

        Guarantee: never below the exact value, and exact where `is_exact_for` is true. For unit columns and
        min_separation ≥ bands it is √max_participations.
        """
        max_participations = fitting_participations(self.steps, max_participations, min_separation)
        squared = _worst_pattern(np.abs(self._column_products), max_participations, min_separation)
        return float(np.sqrt(squared))

    def squared_errors(self, workload: Workload = PrefixSums()) -> Series:  # noqa: B008
        # AC⁻¹ is the inverse of CA⁻¹, which has one or two bands more than C.
        inverse = torch.from_numpy(workload.inverse_diagonals(self.steps))
        return squared_inverse_rows(times_banded(torch.from_numpy(self.diagonals.copy()), inverse))

    def row_norms(self) -> Series:
        return np.sqrt(squared_inverse_rows(torch.from_numpy(self.diagonals.copy())))

    def strategy_matrix(self) -> Matrix:
        return self._dense(0, self.steps, rows=self.steps)

    def noising_matrix(self) -> Matrix:
        return self._noising_matrix.copy()

    @cached_property
    def _noising_matrix(self) -> Matrix:
        full = torch.from_numpy(self.strategy_matrix())
        identity = torch.eye(self.steps, dtype=torch.float64)
        return np.ascontiguousarray(torch.linalg.solve_triangular(full, identity, upper=False).numpy())

    def _dense(self, first: int, stop: int, *, rows: int) -> Matrix:
        """Return rows [first, rows) of columns [first, stop) of C."""
        dense = np.zeros((rows - first, stop - first))
        for lag, diagonal in enumerate(self.diagonals):
            count = min(stop, rows - lag) - first
            if count <= 0:
                break
            at = np.arange(count)
            dense[at + lag, at] = diagonal[first : first + count]
        return dense

    def noising_row(self, step: int) -> list[float]:
        if self.bands == 1:
            return [1.0 / float(self.diagonals[0, step])]
        row: list[float] = self._noising_matrix[step, step::-1].tolist()
        return row

    def _stream_from(self, source: NormalSource, memory: NoiseMemory) -> NoiseStream:
        if self.bands in (1, self.steps):
            return ConvolvedStream(source, noising_row=self.noising_row, steps=self.steps)
        return RecurrentStream(
            source,
            strategy_row=self._strategy_row,
            bands=self.bands,
            steps=self.steps,
            row_norm=float(self.row_norms().max()),
            memory=memory,
        )

    def _strategy_row(self, step: int) -> list[float]:
        """Return C[step, step - lag] for each lag, zero before the first column."""
        lags = np.arange(self.bands)
        row: list[float] = np.where(lags <= step, self.diagonals[lags, step - lags], 0.0).tolist()
        return row

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MatrixStrategy):
            return NotImplemented
        return np.array_equal(self.diagonals, other.diagonals)

    def __hash__(self) -> int:
        return hash((self.diagonals.shape, float(self.diagonals.sum())))

    def __repr__(self) -> str:
        return f"MatrixStrategy(steps={self.steps}, bands={self.bands})"


def times_banded(diagonals: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return the diagonals of CA⁻¹, float64 [bands + lags - 1, steps], from those of C and of A⁻¹.

        (CA⁻¹)[s + lag, s] = Σ_i C[s + lag, s + i]·A⁻¹[s + i, s]

    >>> times_banded(torch.tensor([[1.0, 2.0], [0.5, 0.0]]), torch.tensor([[1.0, 1.0], [-1.0, 0.0]])).tolist()
    [[1.0, 2.0], [-1.5, 0.0], [0.0, 0.0]]
    """
    bands, steps = diagonals.shape
    product = diagonals.new_zeros(bands + len(inverse) - 1, steps)
    for lag in range(min(len(inverse), steps)):
        product[lag : lag + bands, : steps - lag] += diagonals[:, lag:] * inverse[lag, : steps - lag]
    return product


def column_panels(diagonals: torch.Tensor, *, width: int) -> torch.Tensor:
    """Cut the lower triangular matrix with these diagonals into block columns: [blocks, 2·width, width].

    Panel k holds rows [k·width, (k + 2)·width) of columns [k·width, (k + 1)·width): all non-zero entries if
    width ≥ lags - 1. The matrix is extended by the identity to a whole number of blocks.

    >>> column_panels(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]), width=2)[1]
    tensor([[3., 0.],
            [0., 1.],
            [0., 0.],
            [0., 0.]])
    """
    lags, steps = diagonals.shape
    blocks = -(-steps // width)
    padded = torch.nn.functional.pad(diagonals, (0, blocks * width - steps, 0, 1))  # a last row of zeros
    padded[0, steps:] = 1.0
    lag = torch.arange(2 * width)[:, None] - torch.arange(width)
    lag = torch.where((lag < 0) | (lag >= lags), lags, lag)
    columns = torch.arange(width).expand(2 * width, width)
    return padded.view(lags + 1, blocks, width)[lag, :, columns].permute(2, 0, 1).contiguous()


def squared_inverse_rows(diagonals: torch.Tensor) -> Series:
    """Return ‖row t of L⁻¹‖² for the lower triangular L with these diagonals, in O(steps·lags²).

        (L⁻¹L⁻ᵀ)_{k,k} = L_k⁻¹ (1 + M_k (L⁻¹L⁻ᵀ)_{k-1,k-1} M_kᵀ) L_k⁻ᵀ

    with blocks L_k on the diagonal and M_k to their left.

    >>> squared_inverse_rows(torch.tensor([[1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)).tolist()
    [1.0, 2.0]
    """
    lags, steps = diagonals.shape
    width = min(max(lags - 1, 32), steps)
    panels = column_panels(diagonals, width=width)
    inner, squares = torch.eye(width, dtype=torch.float64), []
    for panel in panels:
        block, below = panel[:width], panel[width:]
        half = torch.linalg.solve_triangular(block, inner, upper=False)
        covariance = torch.linalg.solve_triangular(block, half.mT, upper=False)
        squares.append(covariance.diagonal())
        inner = torch.eye(width, dtype=torch.float64) + below @ covariance @ below.mT
    return torch.cat(squares)[:steps].numpy()


def _by_lag(gram: Matrix, lags: int | None = None) -> Matrix:
    """Return entries [s, s + lag] of a matrix as [lags, rows], zero outside of it."""
    rows, columns = gram.shape
    found = np.zeros((columns if lags is None else lags, rows))
    for lag in range(min(len(found), columns)):
        diagonal = np.diagonal(gram, lag)
        found[lag, : len(diagonal)] = diagonal
    return found


def _worst_pattern(products: Matrix, max_participations: int, min_separation: int) -> float:
    """Bound Σ_{s, u in P} products over all patterns P, from products [steps, bands] by lag."""
    steps, bands = products.shape
    # best[s] bounds the patterns that start at s. rest[s, lag] is the largest sum of products of column s with
    # later columns of the pattern, from s + lag on.
    best, rest = products[:, 0].copy(), np.zeros((steps, bands + min_separation))
    for _ in range(1, max_participations):
        padded = np.concatenate([best, np.zeros(max(bands, min_separation))])
        onward = np.maximum.accumulate(padded[::-1])[::-1]
        gain = onward[max(bands, min_separation) :]
        if min_separation < bands:
            follower = sliding_window_view(padded, bands)[:steps, min_separation:]
            overlap = products[:, min_separation:] + rest[:, 2 * min_separation :]
            gain = np.maximum(gain, (2 * overlap + follower).max(axis=1))
        best = products[:, 0] + gain
        sums = products + rest[:, min_separation:]
        rest[:, :bands] = np.maximum.accumulate(sums[:, ::-1], axis=1)[:, ::-1]
    return float(best.max())
