"""Whose record is whose: the ids of users, the records that a user adds to a step, and parts that split no user.

A user is a person, or anything else that is protected as a whole. The guarantee covers all records with the same id,
so one person with two ids is two users.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpoptim.data.lengths import Integers, rounded_up
from dpoptim.data.secret_randomness import save_rng_states
from dpoptim.noise import NoiseKey, uniform_words


class UserRecords:
    """The records of each user; users are numbered in the order of their ids.

    So a user's number depends on the set of ids alone, not on where anybody's records are.

    >>> users = UserRecords(["ann", "bob", "ann"])
    >>> len(users), users.of_user(0)
    (2, array([0, 2]))
    """

    def __init__(self, ids: Sequence[Any]) -> None:
        found = _checked(ids)
        numbers = {own: number for number, own in enumerate(sorted(set(found)))}
        self.user_of = np.array([numbers[own] for own in found], dtype=np.int64)
        self._sorted = np.argsort(self.user_of, kind="stable")
        self._ends = np.cumsum(np.bincount(self.user_of, minlength=len(numbers)))

    def __len__(self) -> int:
        return len(self._ends)

    def of_user(self, user: int) -> Integers:
        """All records of a user."""
        return self._sorted[0 if user == 0 else self._ends[user - 1] : self._ends[user]]

    def drawn(self, key: NoiseKey, step: int, user: int, *, most: int) -> Integers:
        """The records that a user adds to a step: all, or `most` of them, drawn uniformly.

        Guarantee: a pure function of the arguments and of this user's records.
        """
        own = self.of_user(user)
        if len(own) <= most:
            return own
        lots = uniform_words(key, domain=f"sampling/records of user {user}", step=step, count=len(own))
        return own[np.sort(np.argsort(lots, kind="stable")[:most])]

    def digest(self, key: NoiseKey) -> str:
        """A keyed digest of who has which records, without the ids themselves."""
        return key.subkey("digest of users", hashlib.blake2b(self.user_of.tobytes()).hexdigest()).hex()[:32]


def read_user_ids(dataset: Any, users: Any) -> list[Any]:
    """Return one id per record: those given, or a column of the dataset."""
    if not isinstance(users, str):
        return users.tolist() if isinstance(users, Tensor | np.ndarray) else list(users)
    if hasattr(dataset, "column_names"):
        if users not in dataset.column_names:
            raise ValueError(f"users={users!r} is not a column. The columns are {', '.join(dataset.column_names)}.")
        return list(dataset[users])
    found = []
    for place in range(len(dataset)):
        record = dataset[place]
        if not isinstance(record, Mapping) or users not in record:
            raise ValueError(
                f"users={users!r}: record {place} has no such column. Give dicts with it, or a list with one id per "
                "record."
            )
        found.append(record[users])
    return found


def cut_by_user(
    chosen: Sequence[Integers],
    *,
    lengths: Integers | None = None,
    max_records: int | None = None,
    max_tokens: int | None = None,
    bucket: int = 64,
) -> list[list[Integers]]:
    """Divide the users of a step into parts within the limits; `chosen` has the records of each user.

    Users are sorted by length, then by their number of records. No user is split: one that is above a limit is a part
    by itself.
    """
    widths = [1 if lengths is None else int(rounded_up(lengths[own].max(), bucket)) for own in chosen]
    parts: list[list[Integers]] = []
    rows = 0
    for user in sorted(range(len(chosen)), key=lambda user: (widths[user], len(chosen[user]))):
        rows += len(chosen[user])
        has_many = max_records is not None and rows > max_records
        if not parts or has_many or (max_tokens is not None and rows * widths[user] > max_tokens):
            parts.append([])
            rows = len(chosen[user])
        parts[-1].append(chosen[user])
    return parts


class OrderedCollate:
    """A collator whose rows must keep the order of the records, because a row's place shows whose it is.

    The first batches are collated twice with the same draws, the second time with the first record moved to the end. A
    collator that sorts, shuffles or reverses returns the same rows, but without that move. Batches are checked until
    one shows that the order is kept, at most eight.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate, self._checks_left = collate, 8

    def __call__(self, records: list[Any]) -> Any:
        if not self._checks_left or not isinstance(records, list) or len(records) < 2:
            return self._collate(records)
        moved = copy.deepcopy(records[1:] + records[:1])
        repeat = save_rng_states()
        batch = self._collate(records)
        put_back = save_rng_states()
        repeat()
        try:
            others = _rows(self._collate(moved), len(records))
        finally:
            put_back()  # the loop's draws stay the same
        triples = [
            (rows, rows[1:] + rows[:1], other) for rows, other in zip(_rows(batch, len(records)), others, strict=False)
        ]
        keeps = any(other == expected and len(set(rows)) > 1 for rows, expected, other in triples)
        if not keeps and any(other != expected and sorted(rows) == sorted(other) for rows, expected, other in triples):
            raise ValueError(
                "collate_fn changes the order of the records, so it is unknown whose row is whose. Keep their order."
            )
        self._checks_left = 0 if keeps else self._checks_left - 1
        return batch


def _rows(batch: Any, count: int) -> list[list[bytes]]:
    """The bytes of each row of each tensor with one row per record."""
    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, Tensor) and leaf.shape[:1] == (count,)]
    return [[row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for row in tensor] for tensor in tensors]


def _checked(ids: Sequence[Any]) -> list[str | int]:
    """Return ids that are all strings or all integers; errors do not print an id."""
    found: list[str | int] = []
    for place, given in enumerate(ids):
        own = given.item() if isinstance(given, np.generic | Tensor) and given.ndim == 0 else given
        if isinstance(own, bool) or not isinstance(own, str | int) or (isinstance(own, str) and not own.strip()):
            shown = "an empty string" if isinstance(own, str) else f"a {type(own).__name__}"
            raise ValueError(f"record {place} has {shown} in place of a user id. Give strings or integers.")
        if found and isinstance(own, str) != isinstance(found[0], str):
            raise ValueError(
                f"record {place} has a user id of type {type(own).__name__}, and earlier ones are of type "
                f"{type(found[0]).__name__}. Give strings only or integers only: 1 and '1' would be two users."
            )
        found.append(own)
    return found
