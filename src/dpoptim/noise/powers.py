"""Series that are sums of decaying exponentials, and their inverses."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from dpoptim.noise.series import Series


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


def noising_series(decays: ArrayLike, weights: ArrayLike, steps: int) -> Series:
    """The first coefficients of 1/c(x), from the buffers that `inverse_buffers` finds.

    >>> noising_series([0.5], [0.25], 4).round(12).tolist()
    [1.0, -0.25, -0.0625, -0.015625]
    """
    inverse_decays, inverse_weights = inverse_buffers(decays, weights)
    return np.concatenate([[1.0], inverse_weights @ powers(inverse_decays, steps - 1)])


def powers(bases: ArrayLike, count: int) -> Series:
    """bases[j]^i for i in [0, count), as float64 [len(bases), count]: products of two, as powers are slow to take."""
    column = np.asarray(bases, dtype=np.float64)[:, None]
    low, high = column ** np.arange(256), column ** np.arange(0, count, 256)
    return (high[:, :, None] * low[:, None, :]).reshape(len(column), high.shape[1] * 256)[:, :count]
