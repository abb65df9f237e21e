"""Per-example gradients: kept by layer rules, clipped, summed, noised, released."""

from dpoptim.gradients.engine import public_data
from dpoptim.gradients.functional import check_examples_do_not_mix, clipped_sum
from dpoptim.gradients.public import PublicGradients
from dpoptim.gradients.release import PrivateRelease, Released

__all__ = [
    "PrivateRelease",
    "PublicGradients",
    "Released",
    "check_examples_do_not_mix",
    "clipped_sum",
    "public_data",
]
