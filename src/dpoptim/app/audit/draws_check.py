"""Were the batches drawn as the plan says? The accountant rests on it as much as on the noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.audit.canaries import Observed
from dpoptim.app.audit.chance import UNLIKELY, count_chance
from dpoptim.privacy import CyclicPoisson, Poisson, PrivacyPlan

_PAIRED = 2000  # steps that are compared with each other

Counts = NDArray[np.int64]


def wrong_draws(plan: PrivacyPlan, game: Observed) -> str | None:
    """How often and how far apart examples were drawn, how large batches are, how much two of them share: what is
    wrong with that, or None.
    """
    return _wrong_random(plan, game) if plan.sampling.is_random else _wrong_shuffled(plan, game)


def _often(plan: PrivacyPlan, game: Observed) -> Counts:
    return np.bincount(np.concatenate(game.batches), minlength=plan.num_examples)


def _wrong_shuffled(plan: PrivacyPlan, game: Observed) -> str | None:
    """What the proof takes for granted, exactly."""
    if any(len(batch) != plan.batch_size or len(np.unique(batch)) != len(batch) for batch in game.batches):
        return f"a batch has not {plan.batch_size:,} different examples"
    if (often := int(_often(plan, game).max())) > plan.max_participations:
        return f"an example takes part in {often:,} steps, and the plan allows {plan.max_participations:,}"
    last = np.full(plan.num_examples, -plan.min_separation)
    for step, batch in enumerate(game.batches):
        if (apart := int((step - last[batch]).min())) < plan.min_separation:
            return f"an example takes part again after {apart:,} steps, and the plan has {plan.min_separation:,}"
        last[batch] = step
    return None


def _wrong_random(plan: PrivacyPlan, game: Observed) -> str | None:
    rate, groups = plan.sampling_prob, _groups(plan)
    limit = plan.sampling.max_batch_size if isinstance(plan.sampling, Poisson) else None
    sizes = np.array([len(batch) for batch in game.batches])
    members = plan.num_examples // groups  # of a group, or one more
    if limit is not None and int(sizes.max()) > limit:
        return f"a batch has {sizes.max():,} examples, and the plan allows {limit:,}"
    only_more = limit is not None
    chances = np.maximum(
        count_chance(sizes, members, rate, only_more=only_more),
        count_chance(sizes, members + 1, rate, only_more=only_more),
    )
    if chances.min() * len(sizes) < UNLIKELY:
        return f"a batch has {sizes[chances.argmin()]:,} examples, where {rate * members:,.0f} are expected"
    often = _often(plan, game)
    turns = -(-plan.steps // groups)
    if float(count_chance(int(often.max()), turns, rate, only_more=True)) * plan.num_examples < UNLIKELY:
        return f"an example is drawn in {often.max():,} of {turns:,} steps, where the chance is {rate:.3g} at each"
    is_plain = isinstance(plan.sampling, Poisson) and limit is None
    if is_plain and float(count_chance(int(sizes.sum()), plan.num_examples * plan.steps, rate)) < UNLIKELY:
        return f"batches have {sizes.mean():,.1f} examples in the mean, where {rate * members:,.1f} are expected"
    return _strange_groups(game, groups) or _shared(game, groups, rate)


def _groups(plan: PrivacyPlan) -> int:
    return plan.sampling.bands if isinstance(plan.sampling, CyclicPoisson) else 1


def _strange_groups(game: Observed, groups: int) -> str | None:
    """An example belongs to one group, and is drawn at its turns alone."""
    steps, canaries = np.nonzero(game.drawn)
    turn = np.full(game.drawn.shape[1], -1)
    turn[canaries[::-1]] = steps[::-1] % groups
    return None if (steps % groups == turn[canaries]).all() else "an example is drawn at the turns of two groups"


def _shared(game: Observed, groups: int, rate: float) -> str | None:
    """Draws of two steps are independent: they share so many canaries and not many more."""
    drawn = game.drawn[:: -(-len(game.drawn) // _PAIRED)]
    if len(drawn) < 2:
        return None
    both = drawn.astype(np.float32) @ drawn.T.astype(np.float32)
    np.fill_diagonal(both, 0)
    most = round(float(both.max()))
    if float(count_chance(most, drawn.shape[1], rate**2 / groups, only_more=True)) * both.size < UNLIKELY:
        expected = drawn.shape[1] * rate**2 / groups
        return f"two steps share {most:,} of {drawn.shape[1]:,} canaries, where {expected:,.1f} are expected"
    return None
