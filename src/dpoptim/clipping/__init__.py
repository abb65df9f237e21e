"""Per-example gradients: kept by layer rules, clipped, summed, noised, released."""

from dpoptim.clipping.captured import Captured
from dpoptim.clipping.engine import public_data
from dpoptim.clipping.functional import check_example_independence, clipped_sum
from dpoptim.clipping.losses import linear_cross_entropy
from dpoptim.clipping.mechanism import PrivateMechanism, Released
from dpoptim.clipping.public import PublicGradients

__all__ = [
    "Captured",
    "PrivateMechanism",
    "PublicGradients",
    "Released",
    "check_example_independence",
    "clipped_sum",
    "linear_cross_entropy",
    "public_data",
]
