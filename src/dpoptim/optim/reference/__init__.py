"""Slow reference implementations: the paper's algorithms on plain tensors, to test the fast path against."""

from dpoptim.optim.reference.algorithms import (
    adadps,
    bias_correction,
    delayed_preconditioner,
    dp_sgd,
    independent_moments,
    joint_moments,
    noise_bias,
    post_processing,
    scale_of,
    scale_then_privatize,
    side_information,
)
from dpoptim.optim.reference.rules import SGD, AdaGrad, Adam, AdamW, RMSProp, Rule, clip

__all__ = [
    "AdaGrad",
    "Adam",
    "AdamW",
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
    "post_processing",
    "scale_of",
    "scale_then_privatize",
    "side_information",
]
