"""What a game tells: a score a canary, as the best attack gives it, and the noise that is left without the canaries.

In units of the clip norm, the releases along a canary's coordinate are y = x + std·κ·C⁻¹z, with x its direction at the
steps that drew it, and κ the largest column norm of C. So w = Cy/(κ·std) has unit normals in it, and a step that draws
the canary adds v = (its column of C)/(κ·std). A released square is of the same form, with C, std and x of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.audit.canaries import Observed
from dpoptim.noise import Independent, Strategy
from dpoptim.privacy import Adjacency, CyclicPoisson, IndependentMoments, PrivacyPlan

Floats = NDArray[np.float64]


class Whitening:
    """Multiplies by C/(κ·std)."""

    def __init__(self, strategy: Strategy, stddev: float, *, is_identity: bool) -> None:
        self._whole = None if is_identity else np.asarray(strategy.strategy_matrix()) / (strategy.column_norm * stddev)
        self._number = 1.0 / stddev

    def __call__(self, table: Floats) -> Floats:
        """Of values by step, [steps, canaries]."""
        return self._number * table if self._whole is None else self._whole[: len(table), : len(table)] @ table

    def along_columns(self, whitened: Floats) -> Floats:
        """v·w for each step's v, [steps, canaries]."""
        return self._number * whitened if self._whole is None else self._whole.T @ whitened

    @property
    def squared_columns(self) -> Floats:
        """‖v‖² of each step, [steps, 1]; a number where all are alike."""
        if self._whole is None:
            return np.array(self._number**2)
        return np.asarray((self._whole**2).sum(axis=0)[:, None])


def gradient_whitening(plan: PrivacyPlan) -> Whitening:
    level = plan.noise_stddevs().gradient_sum / plan.clip_norm
    return Whitening(plan.strategy, level, is_identity=isinstance(plan.noise, Independent))


class Whitened(NamedTuple):
    """Releases of the gradient, and what canaries are meant to add to them, both times C/(κ·std), [steps, canaries]."""

    released: Floats
    meant: Floats

    @property
    def residuals(self) -> Floats:
        """Unit normals, if clipping and noise are the plan's."""
        return self.released - self.meant


def whitened_gradient(whitening: Whitening, observed: Observed) -> Whitened:
    return Whitened(whitening(observed.gradient), whitening(observed.drawn * observed.directions))


def square_residuals(plan: PrivacyPlan, observed: Observed) -> Floats | None:
    """The same of the released square; None where none is noised.

    A canary that was drawn alone along its coordinate adds ζ²/B to an average of squares, (ζ/B)² to a squared average.
    """
    stddev = plan.noise_stddevs().square
    if not stddev or observed.square is None:
        return None
    release = plan.release
    of_average = isinstance(release, IndependentMoments) and release.squares == "of_average"
    one = plan.clip_norm**2 / (plan.batch_size**2 if of_average else plan.batch_size)
    noise = release.square_noise if isinstance(release, IndependentMoments) else None
    whitening = Whitening(
        plan.square_strategy, stddev, is_identity=isinstance(plan.noise if noise is None else noise, Independent)
    )
    return whitening(observed.square - observed.drawn * observed.directions**2 * one)


def scores(plan: PrivacyPlan, whitening: Whitening, observed: Observed, whitened: Floats) -> Floats:
    """ln P[w | in] − ln P[w | out] of each canary; where batches are secret, over all draws that may have been."""
    replaces = plan.adjacency is Adjacency.REPLACE
    if not plan.sampling.is_random:
        added = whitening(observed.drawn.astype(np.float64))
        along = (whitened * added).sum(axis=0)
        return 2.0 * along if replaces else along - (added**2).sum(axis=0) / 2
    along, squares = whitening.along_columns(whitened), whitening.squared_columns
    terms = _log_mixture(plan.sampling_prob, along - squares / 2)
    if replaces:
        terms -= _log_mixture(plan.sampling_prob, -along - squares / 2)
    return np.asarray(np.where(_may_be_drawn(plan, observed.drawn), terms, 0.0).sum(axis=0))


def _log_mixture(rate: float, exponents: Floats) -> Floats:
    """ln(1 − q + q·e^x)."""
    if rate >= 1.0:
        return exponents
    return np.logaddexp(np.log1p(-rate), np.log(rate) + exponents)


def _may_be_drawn(plan: PrivacyPlan, drawn: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The steps of a canary's group, which is no secret; for one that is never drawn, any group does."""
    if not isinstance(plan.sampling, CyclicPoisson):
        return np.ones_like(drawn)
    groups = drawn.argmax(axis=0) % plan.sampling.bands
    return np.asarray((np.arange(len(drawn)) % plan.sampling.bands)[:, None] == groups)
