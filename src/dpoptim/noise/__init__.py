"""Keyed normals, power-series maths, strategies and streaming mechanisms."""

from dpoptim.noise.key import NoiseKey
from dpoptim.noise.memory import NoiseMemory
from dpoptim.noise.normals import keystream, normals, uniform_words, words
from dpoptim.noise.search.banded import Banded
from dpoptim.noise.search.banded_toeplitz import BandedToeplitz
from dpoptim.noise.search.dense import Dense
from dpoptim.noise.series import divide, inverse_series, inverse_sqrt_series, multiply, sqrt_series
from dpoptim.noise.source import NormalSource, TensorPart
from dpoptim.noise.strategies.banded_inverse import BandedInverse
from dpoptim.noise.strategies.base import Strategy, StrategySpec
from dpoptim.noise.strategies.buffered import BufferedToeplitz
from dpoptim.noise.strategies.closed_forms import Independent, SquareRoot
from dpoptim.noise.strategies.matrix import MatrixStrategy
from dpoptim.noise.strategies.saved import saved_strategy, strategy_state
from dpoptim.noise.strategies.toeplitz import ToeplitzStrategy
from dpoptim.noise.streams import ConvolvedStream, NoiseStream, RecurrentStream
from dpoptim.noise.workloads import DecayedSums, PrefixSums, Workload

__all__ = [
    "Banded",
    "BandedInverse",
    "BandedToeplitz",
    "BufferedToeplitz",
    "ConvolvedStream",
    "DecayedSums",
    "Dense",
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
    "inverse_sqrt_series",
    "keystream",
    "multiply",
    "normals",
    "saved_strategy",
    "sqrt_series",
    "strategy_state",
    "uniform_words",
    "words",
]
