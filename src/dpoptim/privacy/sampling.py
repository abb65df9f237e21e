"""Which examples take part in which step: pure functions of a secret key and the step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dpoptim.noise import NoiseKey, uniform_words
from dpoptim.noise.strategies.short_repr import ShortRepr

Indices = NDArray[np.int64]


@runtime_checkable
class Sampling(Protocol):
    """How batches are drawn; the accountant, the loader and the statement all read the same object."""

    @property
    def is_random(self) -> bool:
        """Whether examples are drawn anew at each step: batches vary in size, and who is in them must be secret."""

    def sampling_prob(self, *, num_examples: int, batch_size: int) -> float:
        """The chance of an example to be in a batch, at the steps at which it can be."""

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

    @property
    def is_random(self) -> bool:
        return False

    def sampling_prob(self, *, num_examples: int, batch_size: int) -> float:
        return batch_size / num_examples

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
        return _order(key, num_examples, "sampling/order")[positions]

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
def _order(key: NoiseKey, num_examples: int, domain: str) -> Indices:
    """A random order: examples sorted by 64 random bits each (two agree with probability < N²/2⁶⁵)."""
    words = uniform_words(key, domain=domain, step=0, count=num_examples)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def _drawn(key: NoiseKey, step: int, *, domain: str, count: int, rate: tuple[int, int]) -> Indices:
    """Each of range(count) on its own with probability p/q, for rate (p, q), rounded down by less than 2⁻⁶⁴."""
    threshold = (rate[0] << 64) // rate[1]
    if threshold >= 1 << 64:
        return np.arange(count, dtype=np.int64)
    words = uniform_words(key, domain=domain, step=step, count=count)
    return np.flatnonzero(words < np.uint64(threshold)).astype(np.int64)


@dataclass(frozen=True, kw_only=True, repr=False)
class Poisson(ShortRepr):
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

    @property
    def is_random(self) -> bool:
        return True

    def sampling_prob(self, *, num_examples: int, batch_size: int) -> float:
        return batch_size / num_examples

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
        chosen = _drawn(key, step, domain="sampling", count=count, rate=(batch_size, num_examples))
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


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson:
    """Examples in `bands` groups that take turns; at its group's turn an example is drawn with probability q.

        q = bands·batch_size / num_examples,   step t is the turn of group t mod bands

    One keyed random order is dealt out in turn, so the sizes of groups differ by at most one. Draws are as in
    `Poisson`: independent, from 64 random bits each, q rounded down. bands = 1 is `Poisson()`.

    Guarantee: amplification for correlated noise (Choquette-Choo et al. 2023), for a lower triangular C with
    at most `bands` diagonals. Let κ be its largest column norm and κσ the noise on Cx, per clip norm. Grant
    the adversary the groups and the draws of all other examples. Given what was released before, the others'
    part of a row of Cx + κσz is then a known number, to be subtracted. An example of group g can enter at the
    steps s = g, g + bands, ... alone; column s of C has its support in rows s … s + bands − 1, where the next
    such column has not begun. So those rows, as a block, are one Gaussian release of
    (coin of probability q)·(column s)·(the example's clipped gradient at s). That gradient is settled by what
    was released before the block, and the vector is at most κ long. Rows before g do not see the example.
    Hence the run is an adaptive composition of at most ⌈steps/bands⌉ Poisson-sampled Gaussian steps of rate q
    at noise multiplier σ, which is what `PoissonRun` accounts for. Under `REPLACE` the same coin chooses in
    both neighbours, and both vectors are at most κ long: its pair at −1 and +1. A column that the last step
    cuts off is only shorter. Squares that are released too lengthen the vector, within what
    `dpoptim.privacy.release_types` allots.
    The draws must be secret, and the key with them; who is in which group need not be.
    Edge cases: batches may be empty. Where bands does not divide num_examples, the expected batch size of a
    step is q times its group's size, within q of batch_size. Removing an example would deal the others out
    anew, so add/remove neighbours are not covered.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> turns = [CyclicPoisson(bands=3).indices(key, t, num_examples=9, batch_size=3) for t in range(6)]
    >>> np.bincount(np.concatenate(turns)).tolist()  # q = 1: everybody at each of their two turns
    [2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    bands: int

    def __post_init__(self) -> None:
        if isinstance(self.bands, bool) or not isinstance(self.bands, int) or self.bands < 1:
            raise ValueError(f"bands must be a whole number ≥ 1, got {self.bands!r}; bands=1 is Poisson()")

    @property
    def is_random(self) -> bool:
        return True

    def sampling_prob(self, *, num_examples: int, batch_size: int) -> float:
        self._check_groups(num_examples, batch_size)
        return self.bands * batch_size / num_examples

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
                f"dataset_size={dataset_size} differs from num_examples={num_examples}: groups are made of exactly "
                "num_examples examples"
            )
        self._check_groups(num_examples, batch_size)
        group = _order(key, num_examples, "sampling/groups")[step % self.bands :: self.bands]
        rate = (self.bands * batch_size, num_examples)
        return np.sort(group[_drawn(key, step, domain="sampling/cyclic", count=len(group), rate=rate)])

    def max_participations(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        return -(-steps // self.bands)

    def min_separation(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        return self.bands

    def largest_batch(self, *, batch_size: int) -> float:
        return math.inf

    def describe(self) -> str:
        return (
            f"cyclic Poisson: one random order deals the examples out to {self.bands} groups, and at step t each "
            f"member of group t mod {self.bands} is in the batch independently with probability "
            f"{self.bands}*batch_size/num_examples; membership of batches and the sampling key must stay secret, "
            "membership of groups need not"
        )

    def _check_groups(self, num_examples: int, batch_size: int) -> None:
        if self.bands * batch_size > num_examples:
            raise ValueError(
                f"bands={self.bands} groups of num_examples={num_examples} are smaller than batch_size={batch_size}; "
                f"use at most {num_examples // batch_size} bands"
            )
