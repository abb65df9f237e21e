"""Per-example gradients: kept by layer rules, clipped, summed, noised, released."""

from dpoptim.gradients.captured import Captured
from dpoptim.gradients.engine import public_data
from dpoptim.gradients.flat import end_to_end, views_of
from dpoptim.gradients.functional import check_examples_do_not_mix, clipped_sum
from dpoptim.gradients.losses import linear_cross_entropy
from dpoptim.gradients.public import PublicGradients
from dpoptim.gradients.release import PrivateRelease, Released

__all__ = [
    "Captured",
    "PrivateRelease",
    "PublicGradients",
    "Released",
    "check_examples_do_not_mix",
    "clipped_sum",
    "end_to_end",
    "linear_cross_entropy",
    "public_data",
    "views_of",
]
