"""Keyed normals, streams of correlated noise, strategies and the searches for them."""

from dpoptim.noise.exact import ExactStream
from dpoptim.noise.key import NoiseKey
from dpoptim.noise.normals import NormalSource, TensorPart, keystream, uniform_words, words
from dpoptim.noise.search.banded import Banded, BandedToeplitz
from dpoptim.noise.search.banded_inverse import BandedInverse
from dpoptim.noise.search.buffered import BufferedToeplitz
from dpoptim.noise.search.dense import Dense
from dpoptim.noise.search.workloads import DecayedSums, PrefixSums, Workload
from dpoptim.noise.series import divide, inverse_series, multiply, sqrt_series
from dpoptim.noise.strategies.base import Strategy, StrategySpec, saved_strategy, strategy_state
from dpoptim.noise.strategies.matrix import MatrixStrategy
from dpoptim.noise.strategies.toeplitz import (
    BandedInverseStrategy,
    BufferedToeplitzStrategy,
    Independent,
    SquareRoot,
    ToeplitzStrategy,
)
from dpoptim.noise.streams import ConvolvedStream, NoiseMemory, NoiseStream, RecurrentStream

__all__ = [
    "Banded",
    "BandedInverse",
    "BandedInverseStrategy",
    "BandedToeplitz",
    "BufferedToeplitz",
    "BufferedToeplitzStrategy",
    "ConvolvedStream",
    "DecayedSums",
    "Dense",
    "ExactStream",
    "Independent",
    "MatrixStrategy",
    "NoiseKey",
    "NoiseMemory",
    "NoiseStream",
    "NormalSource",
    "PrefixSums",
    "RecurrentStream",
    "SquareRoot",
    "Strategy",
    "StrategySpec",
    "TensorPart",
    "ToeplitzStrategy",
    "Workload",
    "divide",
    "inverse_series",
    "keystream",
    "multiply",
    "saved_strategy",
    "sqrt_series",
    "strategy_state",
    "uniform_words",
    "words",
]
