"""Keyed normals, power-series maths, strategies and streaming mechanisms."""

from dpoptim.noise.banded import Banded
from dpoptim.noise.banded_inverse import BandedInverse
from dpoptim.noise.buffered import BufferedToeplitz
from dpoptim.noise.dense import Dense
from dpoptim.noise.key import NoiseKey
from dpoptim.noise.matrix import MatrixStrategy
from dpoptim.noise.normals import keystream, normals, uniform_words, words
from dpoptim.noise.series import divide, inverse_series, inverse_sqrt_series, multiply, sqrt_series
from dpoptim.noise.strategies import BandedToeplitz, Independent, SquareRoot, Strategy, StrategySpec
from dpoptim.noise.stream import ConvolvedStream, NoiseStream, NormalSource, RecurrentStream
from dpoptim.noise.toeplitz import ToeplitzStrategy

__all__ = [
    "Banded",
    "BandedInverse",
    "BandedToeplitz",
    "BufferedToeplitz",
    "ConvolvedStream",
    "Dense",
    "Independent",
    "MatrixStrategy",
    "NoiseKey",
    "NoiseStream",
    "NormalSource",
    "RecurrentStream",
    "SquareRoot",
    "Strategy",
    "StrategySpec",
    "ToeplitzStrategy",
    "divide",
    "inverse_series",
    "inverse_sqrt_series",
    "keystream",
    "multiply",
    "normals",
    "sqrt_series",
    "uniform_words",
    "words",
]
