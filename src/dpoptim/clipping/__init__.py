"""Per-example gradients: recorded by layer rules, clipped, summed, noised and released."""

from dpoptim.clipping.captured import Captured
from dpoptim.clipping.cross_entropy import linear_cross_entropy
from dpoptim.clipping.engine import public_data
from dpoptim.clipping.functional import (
    PublicGradients,
    check_example_independence,
    check_training_loss,
    clipped_sum,
)
from dpoptim.clipping.mechanism import PrivateMechanism, Released

__all__ = [
    "Captured",
    "PrivateMechanism",
    "PublicGradients",
    "Released",
    "check_example_independence",
    "check_training_loss",
    "clipped_sum",
    "linear_cross_entropy",
    "public_data",
]
