"""Find texts that repeat passages of other texts: exactly, by comparing the runs of words in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

WORDS = 5  # in a row: shorter runs are common phrases
_AT_ONCE = 256  # texts that are compared with all known ones; bounds the memory


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


@dataclass(frozen=True, kw_only=True, eq=False)
class Copies:
    """What each text shares with the known text that it shares most with."""

    is_exact: NDArray[np.bool_]  # the same words in the same order as a known text
    share: NDArray[np.float64]  # of its runs of WORDS words; of a shorter text, 1 if it is exact
    longest: NDArray[np.int64]  # the most words in a row; 0 below WORDS
    record: NDArray[np.int64]  # the place of a known text with these words; −1 if there are none


def find_copies(texts: Sequence[Sequence[str]], known: Sequence[Sequence[str]]) -> Copies:
    """Compare texts with known texts; both are lists of words.

    >>> found = find_copies([words_of("zero, one two three four five SIX")], [words_of("one two three four five six")])
    >>> found.longest, found.share.round(2)
    (array([6]), array([0.67]))
    """
    both, count = [*texts, *known], len(texts)
    numbers: dict[str, int] = {}
    words = np.array([numbers.setdefault(word, len(numbers)) for text in both for word in text], dtype=np.int64)
    lengths = np.array([len(text) for text in both])
    text = np.repeat(np.arange(len(both)), lengths)
    ends = np.cumsum(lengths)[text]
    longest, record, places = np.zeros(count, np.int64), np.full(count, -1), np.zeros(count)
    # Shared runs of words grow by one word at a time: `runs` numbers those of `size` words that begin at `starts`.
    starts, runs = np.arange(len(words)), np.zeros(len(words), np.int64)
    for size in range(1, int(lengths.max()) + 1):
        fits = starts + size <= ends[starts]
        starts, runs = starts[fits], runs[fits]
        runs = np.unique(runs * len(numbers) + words[starts + size - 1], return_inverse=True)[1]
        is_new = text[starts] < count
        is_shared = np.isin(runs, np.intersect1d(runs[is_new], runs[~is_new]))
        starts, runs, is_new = starts[is_shared], runs[is_shared], is_new[is_shared]
        if not len(starts):
            break
        if size >= WORDS:
            new, old = ((text[starts[part]], runs[part]) for part in (is_new, ~is_new))
            first = np.zeros(runs.max() + 1, np.int64)
            first[old[1]] = old[0] - count
            longest[new[0]], record[new[0]] = size, first[new[1]]
            if size == WORDS:
                places = _most_places(new, (old[0] - count, old[1]), (count, len(known)))
    whole = {tuple(words): place for place, words in enumerate(known)}
    exact = np.array([whole.get(tuple(words), -1) for words in texts])
    return Copies(
        is_exact=exact >= 0,
        share=np.where(exact >= 0, 1.0, places / np.maximum(lengths[:count] - WORDS + 1, 1)),
        longest=longest,
        record=np.where(exact >= 0, exact, record),
    )


_Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]  # texts, and the runs of words in them


def _most_places(texts: _Pairs, known: _Pairs, counts: tuple[int, int]) -> NDArray[np.float64]:
    """How many places of each text have a run that one known text has, at most; `counts` are those of all texts."""
    runs = 1 + max(texts[1].max(), known[1].max())
    own, theirs = (
        csr_array((np.ones(len(pairs[0])), pairs), shape=(count, runs))
        for pairs, count in zip((texts, known), counts, strict=True)
    )
    theirs.data[:] = 1  # a run counts once per known text
    parts = (own[start : start + _AT_ONCE] for start in range(0, counts[0], _AT_ONCE))
    return np.concatenate([(part @ theirs.T).max(axis=1).toarray().ravel() for part in parts])
