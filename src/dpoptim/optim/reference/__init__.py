"""Slow reference implementations: the paper's algorithms line by line, to test the fast path against."""

from dpoptim.optim.reference.informed import noiseless_preconditioner, noiseless_scale_then_privatize, side_information
from dpoptim.optim.reference.released import (
    bias_correction,
    dp_sgd,
    independent_moments,
    joint_moments,
    noise_bias,
    post_processing,
)
from dpoptim.optim.reference.rules import SGD, AdaGrad, Adam, AdamW, Gradients, PublicGradients, RMSProp, Rule, clip
from dpoptim.optim.reference.scaled import adadps, delayed_preconditioner, scale_of, scale_then_privatize

__all__ = [
    "AdaGrad",
    "Adam",
    "AdamW",
    "Gradients",
    "PublicGradients",
    "RMSProp",
    "Rule",
    "SGD",
    "adadps",
    "bias_correction",
    "clip",
    "delayed_preconditioner",
    "dp_sgd",
    "independent_moments",
    "joint_moments",
    "noise_bias",
    "noiseless_preconditioner",
    "noiseless_scale_then_privatize",
    "post_processing",
    "scale_of",
    "scale_then_privatize",
    "side_information",
]
