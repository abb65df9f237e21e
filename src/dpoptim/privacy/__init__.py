"""Sampling, the loader, accounting, releases, the plan and its statement: all that the guarantee rests on."""

from dpoptim.privacy.accounting import GaussianRun, PoissonRun, TruncatedPoissonRun, rdp_epsilon
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_noise_multiplier
from dpoptim.privacy.lengths import pad_to_bucket
from dpoptim.privacy.loader import PrivateLoader, private_loader
from dpoptim.privacy.plan import PrivacyPlan
from dpoptim.privacy.record_digests import RecordDigests, digest_records
from dpoptim.privacy.released_steps import ReleasedSteps, RunIdentity
from dpoptim.privacy.releases import (
    Gradient,
    IndependentMoments,
    JointMoments,
    NoiselessSquare,
    NoiseStddevs,
    Release,
    joint_ratio,
    joint_sensitivity,
    noise_stddevs,
    square_sensitivity,
)
from dpoptim.privacy.repeated import calibrate_runs, epsilon_of_runs
from dpoptim.privacy.sampling import CyclicPoisson, Poisson, Sampling, Shuffled
from dpoptim.privacy.secret_randomness import secret_randomness
from dpoptim.privacy.statement import privacy_statement

__all__ = [
    "Adjacency",
    "CyclicPoisson",
    "GaussianRun",
    "Gradient",
    "IndependentMoments",
    "JointMoments",
    "NoiseStddevs",
    "NoiselessSquare",
    "Poisson",
    "PoissonRun",
    "PrivacyPlan",
    "PrivateLoader",
    "RecordDigests",
    "Release",
    "ReleasedSteps",
    "RunIdentity",
    "Sampling",
    "Shuffled",
    "TruncatedPoissonRun",
    "calibrate_runs",
    "digest_records",
    "epsilon_of_runs",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "joint_ratio",
    "joint_sensitivity",
    "noise_stddevs",
    "pad_to_bucket",
    "privacy_statement",
    "private_loader",
    "rdp_epsilon",
    "secret_randomness",
    "square_sensitivity",
]
