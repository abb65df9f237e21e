"""Which two datasets count as neighbours."""

from __future__ import annotations

import enum


class Adjacency(enum.Enum):
    """The relation between two neighbouring datasets, which differ in one example.

    If gradients are clipped to norm ζ, one participation changes the clipped sum by at most ζ·f, where f is
    `sensitivity_factor`.

    Attributes:
        ZERO_OUT: One example is replaced by a blank whose gradient is zero. The number of examples is public.
        ADD_REMOVE: One example is added or removed. The number of examples is private.
        REPLACE: One example is replaced by any other example. The number of examples is public.

    Guarantee: an (ε, δ) holds for one relation and cannot be compared with one for a different relation.

    >>> Adjacency.REPLACE.sensitivity_factor
    2
    """

    ZERO_OUT = "zero_out"
    ADD_REMOVE = "add_remove"
    REPLACE = "replace"

    @property
    def sensitivity_factor(self) -> int:
        """f: how many clip norms one participation may move the clipped sum."""
        return 2 if self is Adjacency.REPLACE else 1

    @property
    def dataset_size_is_public(self) -> bool:
        """Whether neighbouring datasets have the same number of examples."""
        return self is not Adjacency.ADD_REMOVE

    def describe(self) -> str:
        """Return the relation in words."""
        return _WORDS[self]


_WORDS = {
    Adjacency.ZERO_OUT: (
        "zero-out: one example is replaced by a blank whose gradient is zero; the number of examples is public"
    ),
    Adjacency.ADD_REMOVE: (
        "add/remove: one example is added or removed; the number of examples is private, "
        "and the plan's num_examples is a declared constant"
    ),
    Adjacency.REPLACE: "replace: one example is replaced by any other example; the number of examples is public",
}
