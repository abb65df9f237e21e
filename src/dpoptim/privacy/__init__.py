"""Everything that the guarantee depends on: sampling, releases, accounting, the plan and its statement."""

from dpoptim.outlook import Outlook
from dpoptim.privacy.accounting import (
    GaussianRun,
    PoissonRun,
    TruncatedPoissonRun,
    describe_accountant,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    rdp_epsilon,
)
from dpoptim.privacy.adjacency import Adjacency
from dpoptim.privacy.clipping_rules import AdaptiveClipNorm, FixedClipNorm, GroupClipNorms, NormalizedGradients
from dpoptim.privacy.column_counts import ColumnCounts
from dpoptim.privacy.composition import EpsilonSpent, calibrate_runs, epsilon_of_runs
from dpoptim.privacy.plan import PrivacyPlan
from dpoptim.privacy.release_types import (
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
from dpoptim.privacy.sampling import CyclicPoisson, Poisson, Sampling, Shuffled
from dpoptim.privacy.statement import privacy_statement
from dpoptim.privacy.step_ledger import RunHeader, StepLedger

__all__ = [
    "AdaptiveClipNorm",
    "Adjacency",
    "ColumnCounts",
    "CyclicPoisson",
    "EpsilonSpent",
    "FixedClipNorm",
    "GaussianRun",
    "Gradient",
    "GroupClipNorms",
    "IndependentMoments",
    "JointMoments",
    "NoiseStddevs",
    "NoiselessSquare",
    "NormalizedGradients",
    "Outlook",
    "Poisson",
    "PoissonRun",
    "PrivacyPlan",
    "Release",
    "StepLedger",
    "RunHeader",
    "Sampling",
    "Shuffled",
    "TruncatedPoissonRun",
    "calibrate_runs",
    "describe_accountant",
    "epsilon_of_runs",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "joint_ratio",
    "joint_sensitivity",
    "noise_stddevs",
    "privacy_statement",
    "rdp_epsilon",
    "square_sensitivity",
]
