"""How much of an adaptive optimizer's second moment is noise."""

from __future__ import annotations

import numpy as np

from dpoptim.noise import Strategy
from dpoptim.noise.series import Series


def second_moment_bias(strategy: Strategy, *, beta2: float = 0.999) -> Series:
    """b_t/φ for t = 1, ..., steps: the noise's share of Adam's debiased ν̂_t, for noise C⁻¹z of unit normals.

        b_t/φ = Σ_i (1−β₂)β₂^{t−i}·‖row i of C⁻¹‖² / (1−β₂ᵗ)

    φ is the variance of one coordinate of the noise on the averaged gradient where a row of C⁻¹ has norm 1. Bias
    correction subtracts exactly this. With independent noise it is 1 at every step.

    >>> from dpoptim.noise import Independent, ToeplitzStrategy
    >>> second_moment_bias(Independent().optimize(steps=3), beta2=0.9).round(12).tolist()
    [1.0, 1.0, 1.0]
    >>> banded = ToeplitzStrategy(steps=20, strategy_coefs=(1.0, 0.5, 0.3))
    >>> round(float(second_moment_bias(banded, beta2=0.9)[-1]), 7)
    1.2836411
    """
    check_strategy(strategy)
    if not 0 <= beta2 < 1:
        raise ValueError(f"beta2={beta2} must lie in [0, 1)")
    total, biases = 0.0, []
    for step, norm in enumerate(strategy.row_norms().tolist(), start=1):
        total = beta2 * total + (1 - beta2) * norm**2
        biases.append(total / (1 - beta2**step))
    return np.asarray(biases)


def check_strategy(strategy: Strategy) -> None:
    """Refuse a kind of noise whose matrix is not made yet.

    >>> from dpoptim.noise import BufferedToeplitz
    >>> check_strategy(BufferedToeplitz(buffers=2))
    Traceback (most recent call last):
    ValueError: strategy=BufferedToeplitz(buffers=2) has no matrix yet; call .optimize(steps=...) first
    """
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy={strategy!r} has no matrix yet; call .optimize(steps=...) first")
