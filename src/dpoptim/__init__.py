"""Differentially private training with adaptive optimizers for PyTorch.

Names are imported on first use, so that `import dpoptim` is cheap and the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpoptim.version import __version__

if TYPE_CHECKING:
    from dpoptim import clipping, data, noise, optim, privacy, theory, validation
    from dpoptim.clipping import PublicGradients, check_example_independence, linear_cross_entropy, public_data
    from dpoptim.data import PrivateLoader, pad_to_bucket, private_loader
    from dpoptim.data.secret_randomness import secret_randomness
    from dpoptim.noise import (
        Banded,
        BandedInverse,
        BandedToeplitz,
        BufferedToeplitz,
        DecayedSums,
        Dense,
        Independent,
        NoiseKey,
        NoiseMemory,
        PrefixSums,
        SquareRoot,
    )
    from dpoptim.optim import (
        SGD,
        AdaGrad,
        Adam,
        AdamW,
        PrivateOptimizer,
        RMSProp,
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
    from dpoptim.privacy import (
        AdaptiveClipNorm,
        Adjacency,
        CyclicPoisson,
        FixedClipNorm,
        Gradient,
        GroupClipNorms,
        IndependentMoments,
        JointMoments,
        NoiselessSquare,
        NormalizedGradients,
        Poisson,
        PrivacyPlan,
        Shuffled,
    )
    from dpoptim.theory import choose_noise
    from dpoptim.validation import ExampleMixingError

__all__ = [
    "__version__",
    "AdaGrad",
    "Adam",
    "AdamW",
    "AdaptiveClipNorm",
    "Adjacency",
    "Banded",
    "BandedInverse",
    "BandedToeplitz",
    "BufferedToeplitz",
    "CyclicPoisson",
    "DecayedSums",
    "Dense",
    "ExampleMixingError",
    "FixedClipNorm",
    "Gradient",
    "GroupClipNorms",
    "Independent",
    "IndependentMoments",
    "JointMoments",
    "NoiseKey",
    "NoiseMemory",
    "NoiselessSquare",
    "NormalizedGradients",
    "Poisson",
    "PrefixSums",
    "PrivacyPlan",
    "PrivateLoader",
    "PrivateOptimizer",
    "PublicGradients",
    "RMSProp",
    "SGD",
    "Shuffled",
    "SquareRoot",
    "adadps",
    "bias_correction",
    "check_example_independence",
    "choose_noise",
    "clipping",
    "data",
    "delayed_preconditioner",
    "dp_sgd",
    "independent_moments",
    "joint_moments",
    "linear_cross_entropy",
    "noise",
    "noiseless_preconditioner",
    "optim",
    "pad_to_bucket",
    "post_processing",
    "privacy",
    "private_loader",
    "public_data",
    "scale_then_privatize",
    "secret_randomness",
    "side_information",
    "theory",
    "validation",
]
# Each subpackage imports only from those before it.
_ROOMS = ("noise", "privacy", "data", "validation", "clipping", "optim", "theory")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"dpoptim.{name}")
    if name in __all__:
        for room in _ROOMS:
            module = importlib.import_module(f"dpoptim.{room}")
            if name in module.__all__:
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module 'dpoptim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
