"""Which examples take part in which step: pure functions of a secret key and the step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dpoptim.arguments import check_at_most, set_whole
from dpoptim.noise import NoiseKey, uniform_words
from dpoptim.short_repr import ShortRepr

Indices = NDArray[np.int64]


@runtime_checkable
class Sampling(Protocol):
    """How batches are drawn. The accountant, the loader and the statement read the same object."""

    is_random: ClassVar[bool]
    """Whether each step draws its examples independently: batch sizes vary, and membership must be secret."""

    def sampling_prob(self, *, num_examples: int, batch_size: int) -> float:
        """Return the probability that an example is in a batch, at the steps where it can be."""

    def indices(
        self, key: NoiseKey, step: int, *, num_examples: int, batch_size: int, dataset_size: int | None = None
    ) -> Indices:
        """Return the distinct examples of step `step` (from 0); a pure function of the arguments.

        `dataset_size` is the actual number of examples where it may differ from the declared `num_examples`.
        """

    def max_participations(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        """Return the largest number of steps in which one example may take part."""

    def min_separation(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        """Return the least number of steps between two participations of one example (1: consecutive steps)."""

    def largest_batch(self, *, batch_size: int) -> float:
        """Return the largest possible number of examples in a batch."""

    def describe(self) -> str:
        """Return the scheme in words, with what must be secret."""


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Use one keyed random order of all examples, repeated, in batches of exactly `batch_size`.

    Step t takes positions t·B … t·B + B − 1, modulo N, of the order. A batch may span the end of the order.

    Guarantee: in T steps, each example takes part at most ⌈T·B/N⌉ times, and two participations are at least ⌊N/B⌋
    steps apart. The guarantee uses nothing else about the order, so it holds even if the order is known.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> batches = [Shuffled().indices(key, t, num_examples=7, batch_size=3) for t in range(7)]
    >>> np.bincount(np.concatenate(batches)).tolist()
    [3, 3, 3, 3, 3, 3, 3]
    """

    is_random: ClassVar[bool] = False

    def sampling_prob(self, *, num_examples: int, batch_size: int) -> float:
        return batch_size / num_examples

    def indices(
        self, key: NoiseKey, step: int, *, num_examples: int, batch_size: int, dataset_size: int | None = None
    ) -> Indices:
        _check_dataset_size(dataset_size, num_examples)
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Poisson(ShortRepr):
    """Draw each example for each step independently, with probability q = batch_size / num_examples.

    An example is drawn if its 64 random bits, as an integer, are below ⌊q·2⁶⁴⌋, so q is rounded down by less than 2⁻⁶⁴.
    A batch may be empty; the step then releases noise alone.

    Args:
        max_batch_size: Cut a larger sample to a uniformly random subset of this size. None means no limit.

    Guarantee: sampling amplifies, but only while the draws are secret: nobody may learn the key or who was in a batch.
    The rate comes from the plan's numbers, never from the actual data.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> len(Poisson().indices(key, 0, num_examples=10, batch_size=10))
    10
    >>> len(Poisson(max_batch_size=4).indices(key, 0, num_examples=10, batch_size=10))
    4
    """

    max_batch_size: int | None = None
    is_random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_batch_size is not None:
            set_whole(self, "max_batch_size", hint="Use None for no limit.")

    def sampling_prob(self, *, num_examples: int, batch_size: int) -> float:
        return batch_size / num_examples

    def indices(
        self, key: NoiseKey, step: int, *, num_examples: int, batch_size: int, dataset_size: int | None = None
    ) -> Indices:
        count = num_examples if dataset_size is None else dataset_size
        drawn = _drawn(key, step, domain="sampling", count=count, rate=(batch_size, num_examples))
        if self.max_batch_size is not None and len(drawn) > self.max_batch_size:
            lots = uniform_words(key, domain="sampling/truncation", step=step, count=len(drawn))
            kept = np.argsort(lots, kind="stable")[: self.max_batch_size]
            drawn = drawn[np.sort(kept)]
        return drawn

    def max_participations(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        return steps

    def min_separation(self, *, num_examples: int, batch_size: int, steps: int) -> int:
        return 1

    def largest_batch(self, *, batch_size: int) -> float:
        return math.inf if self.max_batch_size is None else self.max_batch_size

    def describe(self) -> str:
        limit = f", cut to a random subset of {self.max_batch_size} when larger" if self.max_batch_size else ""
        return (
            f"Poisson: each example is in each batch independently with probability batch_size/num_examples{limit}; "
            "membership of batches and the sampling key must stay secret"
        )


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson:
    """Split the examples into `bands` groups that take turns, and draw each example at its turn with probability q.

        q = bands·batch_size / num_examples,   step t is the turn of group t mod bands

    One keyed random order is dealt out to the groups, so their sizes differ by at most one. Draws are as in `Poisson`,
    and bands = 1 is `Poisson()`. If bands does not divide num_examples, the expected size of a batch is q times its
    group's size, within q of batch_size.

    Args:
        bands: The number of groups, at least the number of diagonals of the strategy.

    Guarantee: sampling amplifies correlated noise (Choquette-Choo et al. 2023) for a lower triangular C with at most
    `bands` diagonals, while the draws and the key are secret. Who is in which group need not be secret. Removing an
    example would deal the others out again, so add/remove neighbours are not covered.

    Proof: let κ be the largest column norm of C and κσ the noise on Cx, per clip norm. Give the adversary the groups
    and the draws of all other examples. Given the earlier releases, the others' part of a row of Cx + κσz is a known
    number and can be subtracted. An example of group g can enter only at the steps s = g, g + bands, ... Column s of C
    has its support in rows s … s + bands − 1, where the next such column has not started. So these rows, as a block,
    are one Gaussian release of (coin of probability q)·(column s)·(the example's clipped gradient at s). The releases
    before the block determine that gradient, and the vector is at most κ long. Rows before g do not depend on the
    example. Therefore the run is an adaptive composition of at most ⌈steps/bands⌉ Poisson-sampled Gaussian steps of
    rate q at noise multiplier σ: a `PoissonRun`. Under `REPLACE` the same coin chooses in both neighbours, and both
    vectors are at most κ long: its pair at −1 and +1. A column that the last step cuts off is only shorter. Released
    squares lengthen the vector within the limits of `dpoptim.privacy.release_types`.

    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> turns = [CyclicPoisson(bands=3).indices(key, t, num_examples=9, batch_size=3) for t in range(6)]
    >>> np.bincount(np.concatenate(turns)).tolist()  # q = 1: every example at each of its two turns
    [2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    bands: int
    is_random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        set_whole(self, "bands", hint="bands=1 is Poisson().")

    def sampling_prob(self, *, num_examples: int, batch_size: int) -> float:
        self._check_groups(num_examples, batch_size)
        return self.bands * batch_size / num_examples

    def indices(
        self, key: NoiseKey, step: int, *, num_examples: int, batch_size: int, dataset_size: int | None = None
    ) -> Indices:
        _check_dataset_size(dataset_size, num_examples)
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
        hint = f"Use at most {num_examples // batch_size} bands."
        check_at_most("bands * batch_size", self.bands * batch_size, "num_examples", num_examples, hint=hint)


def _check_dataset_size(dataset_size: int | None, num_examples: int) -> None:
    if dataset_size is not None and dataset_size != num_examples:
        raise ValueError(
            f"Expected dataset_size == num_examples, got {dataset_size} != {num_examples}. The random order is over "
            "exactly num_examples examples."
        )


@functools.lru_cache(maxsize=2)
def _order(key: NoiseKey, num_examples: int, domain: str) -> Indices:
    """Return a random order: examples sorted by 64 random bits (two are equal with probability < N²/2⁶⁵)."""
    words = uniform_words(key, domain=domain, step=0, count=num_examples)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def _drawn(key: NoiseKey, step: int, *, domain: str, count: int, rate: tuple[int, int]) -> Indices:
    """Draw each of range(count) independently with probability p/q, rate = (p, q), rounded down by less than 2⁻⁶⁴."""
    threshold = (rate[0] << 64) // rate[1]
    if threshold >= 1 << 64:
        return np.arange(count, dtype=np.int64)
    words = uniform_words(key, domain=domain, step=step, count=count)
    return np.flatnonzero(words < np.uint64(threshold)).astype(np.int64)
