"""Which examples take part in which step: pure functions of a secret key and the step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dpoptim.noise import NoiseKey, uniform_words

Indices = NDArray[np.int64]


@runtime_checkable
class Sampling(Protocol):
    """How batches are drawn; the accountant, the loader and the statement all read the same object."""

    def indices(
        self,
        key: NoiseKey,
        step: int,
        *,
        num_examples: int,
        batch_size: int,
        dataset_size: int | None = None,
    ) -> Indices:
        """The examples of step `step` (from 0), distinct; a pure function of its arguments."""

    def max_participations(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        """In how many steps one example may take part at most."""

    def min_separation(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        """How many steps lie at least between two participations of one example (1: next to each other)."""

    def largest_batch(self, *, batch_size: int) -> float:
        """How many examples a batch may hold at most."""

    def describe(self) -> str:
        """The scheme in words, with what must be secret."""


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """One keyed random order of all examples, repeated, in batches of exactly `batch_size`.

    Step t takes positions t·B … t·B + B − 1, modulo N, of the order.

    Guarantee: over T steps an example takes part at most ⌈T·B/N⌉ times, and two participations lie at least
    ⌊N/B⌋ steps apart. Nothing else about the order is used: the guarantee holds even if the order is known.
    Edge cases: B need not divide N (a batch may span the end of the order); B ≤ N, so a batch holds no
    example twice.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> batches = [Shuffled().indices(key, t, num_examples=7, batch_size=3) for t in range(7)]
    >>> np.bincount(np.concatenate(batches)).tolist()
    [3, 3, 3, 3, 3, 3, 3]
    """

    def indices(
        self,
        key: NoiseKey,
        step: int,
        *,
        num_examples: int,
        batch_size: int,
        dataset_size: int | None = None,
    ) -> Indices:
        if dataset_size is not None and dataset_size != num_examples:
            raise ValueError(
                f"dataset_size={dataset_size} differs from num_examples={num_examples}: a shuffled order is over "
                "exactly num_examples examples"
            )
        positions = (step * batch_size + np.arange(batch_size, dtype=np.int64)) % num_examples
        return _order(key, num_examples)[positions]

    def max_participations(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        return -(-steps * batch_size // num_examples)

    def min_separation(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        return num_examples // batch_size

    def largest_batch(self, *, batch_size: int) -> float:
        return batch_size

    def describe(self) -> str:
        return (
            "shuffled: one random order of the examples, repeated, in batches of exactly batch_size; "
            "no amplification is claimed, so the order need not be secret"
        )


@functools.lru_cache(maxsize=2)
def _order(key: NoiseKey, num_examples: int) -> Indices:
    """A random order: examples sorted by 64 random bits each (two agree with probability < N²/2⁶⁵)."""
    words = uniform_words(key, domain="sampling/order", step=0, count=num_examples)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Each example takes part in each step independently, with probability q = batch_size / num_examples.

    An example is in when its 64 random bits, as an integer, are below ⌊q·2⁶⁴⌋: the probability is q, rounded
    down by less than 2⁻⁶⁴. With `max_batch_size`, a larger sample is cut to a uniformly random subset of that
    size.

    Guarantee: amplification by sampling, which holds only while the draws are secret: nobody may learn who
    was in a batch, nor the key. The rate comes from the plan's numbers, never from the data at hand.
    Edge cases: a batch may be empty; the step is taken all the same, with noise alone.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> len(Poisson().indices(key, 0, num_examples=10, batch_size=10))
    10
    >>> len(Poisson(max_batch_size=4).indices(key, 0, num_examples=10, batch_size=10))
    4
    """

    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        size = self.max_batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"max_batch_size must be a whole number ≥ 1, or None for no limit; got {size!r}")

    def indices(
        self,
        key: NoiseKey,
        step: int,
        *,
        num_examples: int,
        batch_size: int,
        dataset_size: int | None = None,
    ) -> Indices:
        count = num_examples if dataset_size is None else dataset_size
        threshold = (batch_size << 64) // num_examples
        if threshold >= 1 << 64:
            chosen = np.arange(count, dtype=np.int64)
        else:
            words = uniform_words(key, domain="sampling", step=step, count=count)
            chosen = np.flatnonzero(words < np.uint64(threshold)).astype(np.int64)
        if self.max_batch_size is not None and len(chosen) > self.max_batch_size:
            lots = uniform_words(key, domain="sampling/truncation", step=step, count=len(chosen))
            kept = np.argsort(lots, kind="stable")[: self.max_batch_size]
            chosen = chosen[np.sort(kept)]
        return chosen

    def max_participations(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        return steps

    def min_separation(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        return 1

    def largest_batch(self, *, batch_size: int) -> float:
        return math.inf if self.max_batch_size is None else self.max_batch_size

    def describe(self) -> str:
        limit = (
            f", cut to a uniformly random subset of {self.max_batch_size} when larger"
            if self.max_batch_size is not None
            else ""
        )
        return (
            f"Poisson: each example is in each batch independently with probability batch_size/num_examples{limit}; "
            "membership of batches and the sampling key must stay secret"
        )
