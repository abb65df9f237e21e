"""Runs the cases of a part, and counts how they end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

SHOWN_EVERY = 15  # seconds


class Failure(AssertionError):
    """A promise of the package that a case broke."""


Outcome = str | Failure


@dataclass
class Counts:
    """How the cases of a part ended."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # each with the command that repeats it
    note: str = ""  # why not all cases ran

    @property
    def cases(self) -> int:
        return self.outcomes.total() + len(self.failures)


def each(case: Callable[[int], str], seeds: Iterable[int]) -> Iterator[tuple[int, Outcome]]:
    """Run the case of each seed."""
    for seed in seeds:
        try:
            yield seed, case(seed)
        except Failure as failure:
            yield seed, failure


def count(name: str, cases: Iterable[tuple[int, Outcome]], planned: int) -> Counts:
    """Count how cases end and print progress; after Ctrl-C, what has been counted remains."""
    counts, shown = Counts(), time.monotonic()
    try:
        for seed, outcome in cases:
            if isinstance(outcome, Failure):
                counts.failures.append(f"{outcome} [python -m tests.fuzz --parts {name} --seed {seed} --cases 1]")
                print(f"FAILED {counts.failures[-1]}", flush=True)
            else:
                counts.outcomes[outcome] += 1
            if time.monotonic() - shown > SHOWN_EVERY or planned == 1:
                shown = time.monotonic()
                print(f"{name}: {counts.cases} of {planned}, {len(counts.failures)} failed; {outcome}", flush=True)
    except KeyboardInterrupt:
        counts.note = "interrupted"
    return counts
