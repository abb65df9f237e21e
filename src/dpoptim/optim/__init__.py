"""Private optimizers: geometry, second moment, update rule; the named variants; their reference implementations."""

from dpoptim.optim.geometries import Delayed, Flat, FromPublic, Geometry, InverseRoot
from dpoptim.optim.optimizer import PrivateOptimizer
from dpoptim.optim.rules import SGD, AdaGrad, Adam, AdamW, RMSProp, UpdateRule
from dpoptim.optim.second_moments import (
    NoiseCorrected,
    NoSecondMoment,
    OfNoisyGradient,
    OfPublicGradient,
    OfReleasedSquare,
    OfScale,
    SecondMoment,
)
from dpoptim.optim.variants import (
    adadps,
    bias_correction,
    delayed_preconditioner,
    dp_sgd,
    independent_moments,
    joint_moments,
    noiseless_preconditioner,
    post_processing,
    scale_then_privatize,
    side_information,
)

__all__ = [
    "AdaGrad",
    "Adam",
    "AdamW",
    "Delayed",
    "Flat",
    "FromPublic",
    "Geometry",
    "InverseRoot",
    "NoSecondMoment",
    "NoiseCorrected",
    "OfNoisyGradient",
    "OfPublicGradient",
    "OfReleasedSquare",
    "OfScale",
    "PrivateOptimizer",
    "RMSProp",
    "SGD",
    "SecondMoment",
    "UpdateRule",
    "adadps",
    "bias_correction",
    "delayed_preconditioner",
    "dp_sgd",
    "independent_moments",
    "joint_moments",
    "noiseless_preconditioner",
    "post_processing",
    "scale_then_privatize",
    "side_information",
]
