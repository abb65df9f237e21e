"""How large the runs of each scale are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How many held-out texts a run is scored on: validation texts at each point of its curve, test texts once."""

    validation_examples: int = 4096
    test_examples: int | None = None  # all
    points: int = 20


@dataclass(frozen=True, kw_only=True)
class Size:
    """Steps and batches of the final runs, and the smaller batch of the runs that settings are tuned with.

    `standing_for` is the batch whose noise in the average gradient is kept, so that a smaller batch meets nearly the
    same problem: its clipped sum has sampling noise of its own, the more of the whole the less noise there is.
    """

    steps: int
    batch_size: int
    standing_for: int
    tuning_batch_size: int
    tuning_steps: int
    seeds: int
    tuned: bool = True  # False: every setting stays where the search would begin
    scoring: Scoring = Scoring()


SIZES = {
    "smoke": Size(
        steps=3, batch_size=8, standing_for=8, tuning_batch_size=4, tuning_steps=2, seeds=1, tuned=False
    ),
    "small": Size(
        steps=10, batch_size=16, standing_for=2048, tuning_batch_size=16, tuning_steps=10, seeds=1, tuned=False,
        scoring=Scoring(validation_examples=64, test_examples=256, points=2),
    ),
    "paper": Size(
        steps=2000, batch_size=2048, standing_for=2048, tuning_batch_size=256, tuning_steps=1000, seeds=3
    ),
}  # fmt: skip
