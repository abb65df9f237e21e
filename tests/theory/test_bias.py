"""The noise's share of the second moment, against the definition, the twins and simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dpoptim
from dpoptim.optim import reference as twins
from dpoptim.theory import second_moment_bias

STRATEGIES = [
    dpoptim.Independent(),
    dpoptim.SquareRoot(),
    dpoptim.Dense(),
    dpoptim.Banded(bands=3),
    dpoptim.BandedToeplitz(bands=4),
    dpoptim.BandedToeplitz(bands=4, workload=dpoptim.DecayedSums(beta=0.9)),
    dpoptim.BufferedToeplitz(buffers=2),
    dpoptim.BandedInverse(bands=4),
]


@pytest.mark.parametrize("spec", STRATEGIES, ids=repr)
@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999])
def test_is_the_weighted_trace(spec, beta2):
    """Σ_i w_i (C⁻¹C⁻ᵀ)_ii with the weights of Adam's debiased average."""
    strategy = spec.optimize(steps=12)
    inverse = strategy.noising_matrix()
    variances = np.diag(inverse @ inverse.T)
    for t in range(1, 13):
        weights = (1 - beta2) * beta2 ** np.arange(t - 1, -1, -1) / (1 - beta2**t)
        assert second_moment_bias(strategy, beta2=beta2)[t - 1] == pytest.approx(weights @ variances[:t], rel=1e-12)


def test_is_what_the_twin_subtracts():
    strategy = dpoptim.BandedToeplitz(bands=4).optimize(steps=12)
    norms = torch.as_tensor(strategy.row_norms()) ** 2
    expected = twins.noise_bias(twins.Adam(lr=0.1, beta2=0.9), norms, 1.0)
    np.testing.assert_allclose(second_moment_bias(strategy, beta2=0.9), expected, rtol=1e-12)


@pytest.mark.parametrize("memory", [dpoptim.NoiseMemory(), dpoptim.NoiseMemory(bits=16)], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("spec", STRATEGIES, ids=repr)
def test_monte_carlo(spec, memory):
    """200,000 coordinates of streamed noise put the mean of ν̂ within .6 %, and one β₂ more is outside."""
    strategy = spec.optimize(steps=10)
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    stream = strategy.stream(key, stream="gradient", name="weight", numel=200_000, memory=memory)
    noise = torch.stack([stream.row(step) for step in range(10)]).double().numpy()
    weights = 0.1 * 0.9 ** np.arange(9, -1, -1) / (1 - 0.9**10)
    simulated = float((weights @ noise**2).mean())
    found = float(second_moment_bias(strategy, beta2=0.9)[-1])
    assert simulated == pytest.approx(found, rel=0.006)
    assert simulated != pytest.approx(0.9 * found, rel=0.006)


def test_bad_beta2():
    with pytest.raises(ValueError, match="beta2=1"):
        second_moment_bias(dpoptim.Independent().optimize(steps=2), beta2=1.0)


def test_a_kind_of_noise_is_no_strategy():
    with pytest.raises(ValueError, match=r"call \.optimize\(steps=\.\.\.\) first"):
        second_moment_bias(dpoptim.BufferedToeplitz(buffers=2))  # type: ignore[arg-type]
