"""200 random models in each run of all tests, and the faults that the search must find."""

from __future__ import annotations

import pytest

from dpoptim.clipping import clipped_sums
from dpoptim.validation.example_independence import _Observed
from tests.fuzz import sensitivity
from tests.fuzz.models import draw
from tests.fuzz.parts import Failure, count, each


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_models(first):
    for seed in range(first, first + 25):
        sensitivity.case(seed)


def found(seeds: range) -> str:
    """What the search finds with these seeds."""
    return " ".join(count("sensitivity", each(sensitivity.case, seeds), len(seeds)).failures)


@pytest.mark.slow
def test_mixing_that_nobody_refuses_is_found(monkeypatch):
    monkeypatch.setattr(_Observed, "difference", lambda *_: None)
    mixing = [seed for seed in range(120) if draw(seed).mixes not in ("", "batch norm")]  # which is refused by name
    missed = [seed for seed in mixing if not found(range(seed, seed + 1))]
    assert len(mixing) > 8
    assert len(missed) < len(mixing) / 2  # bfloat16 hides some, and some have no effect


@pytest.mark.slow
def test_weights_that_are_too_large_are_found(monkeypatch):
    clip_weights = clipped_sums.clip_weights

    def too_large(*args, **settings):
        clipped = clip_weights(*args, **settings)
        return clipped._replace(weights=clipped.weights * 1.01)

    monkeypatch.setattr(clipped_sums, "clip_weights", too_large)
    failures = found(range(10))
    assert "differs from brute force" in failures
    assert "moves the sum by" in failures


def test_failures_name_the_command_that_repeats_them():
    def case(seed: int) -> str:
        if seed == 8:
            raise Failure("wrong")
        return "right"

    counts = count("sensitivity", each(case, range(7, 10)), 3)
    assert counts.outcomes == {"right": 2}
    assert counts.failures == ["wrong [python -m tests.fuzz --parts sensitivity --seed 8 --cases 1]"]
