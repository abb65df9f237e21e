"""Find texts that repeat passages of other texts, by hashes of the runs of words in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WORDS = 5  # in a row: shorter runs are common phrases
_MOST = 100  # places of one run of words that are compared; more are a common phrase


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What a text shares with known texts."""

    is_exact: bool  # the same words in the same order as a known text
    share: float  # of its runs of words, the most that one known text has
    longest: int  # the most words in a row that one known text has; 0 below WORDS
    record: int | None  # the place of the text with these words


class KnownTexts:
    """Every run of `WORDS` words of some texts, to find again in others.

    >>> known = KnownTexts(["one two three four five six seven"])
    >>> known.overlap("zero, one two three four five SIX")
    Overlap(is_exact=False, share=0.6666666666666666, longest=6, record=0)
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._numbers: dict[str, int] = {}
        self._factors = np.random.default_rng(0).integers(1, 2**63, WORDS, dtype=np.uint64) | np.uint64(1)
        self._whole: dict[tuple[str, ...], int] = {}
        hashes, records, places = [], [], []
        for record, text in enumerate(texts):
            words = words_of(text)
            self._whole.setdefault(tuple(words), record)
            found = self._hashes(words)
            hashes.append(found)
            records.append(np.full(len(found), record))
            places.append(np.arange(len(found)))
        together = np.concatenate([*hashes, np.zeros(0, np.uint64)])
        order = np.argsort(together, kind="stable")
        self._sorted = together[order]
        self._records, self._places = (np.concatenate([*part, np.zeros(0, int)])[order] for part in (records, places))

    def overlap(self, text: str) -> Overlap:
        """What a text shares with the known ones."""
        words = words_of(text)
        same, found = self._whole.get(tuple(words)), self._hashes(words)
        first = np.searchsorted(self._sorted, found, side="left")
        counts = np.minimum(np.searchsorted(self._sorted, found, side="right") - first, _MOST)
        if not counts.sum():
            return Overlap(is_exact=same is not None, share=float(same is not None), longest=0, record=same)
        own = np.repeat(np.arange(len(found)), counts)
        matched = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        records, shifts = self._records[matched], self._places[matched] - own
        pairs = np.unique(np.stack([records, own]), axis=1)[0]
        shared = np.unique(pairs, return_counts=True)[1]
        order = np.lexsort((own, shifts, records))
        records, shifts, own = records[order], shifts[order], own[order]
        continues = (np.diff(records) == 0) & (np.diff(shifts) == 0) & (np.diff(own) == 1)
        starts = np.flatnonzero(np.append(True, ~continues))
        lengths = np.diff(np.append(starts, len(own)))
        return Overlap(
            is_exact=same is not None,
            share=float(shared.max() / len(found)),
            longest=int(lengths.max()) + WORDS - 1,
            record=int(records[starts[lengths.argmax()]]),
        )

    def _hashes(self, words: Sequence[str]) -> NDArray[np.uint64]:
        """One number per run of words: the numbers of its words times fixed random factors, modulo 2^64."""
        if len(words) < WORDS:
            return np.zeros(0, np.uint64)
        own = np.array([self._numbers.setdefault(word, len(self._numbers) + 1) for word in words], dtype=np.uint64)
        return np.lib.stride_tricks.sliding_window_view(own, WORDS) @ self._factors
