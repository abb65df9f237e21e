"""Texts as token ids that lie end to end on the device, and parts of a batch gathered, padded and masked there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

MASKED_SHARE = 0.15


class Marks(NamedTuple):
    """The ids that a tokenizer keeps for itself; these are those of BERT."""

    pad: int = 0
    cls: int = 101
    sep: int = 102
    mask: int = 103


@dataclass(frozen=True)
class Texts:
    """All texts end to end on the device; lengths are also on the host, which plans shapes without asking it."""

    tokens: Tensor  # one of padding, all texts without [CLS], and more padding, as long as a text may be
    rows: Tensor  # [examples, 3]: the place before its first token, its length with [CLS], how many places are masked
    lengths: NDArray[np.int64]
    masked: NDArray[np.int64]
    marks: Marks

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, indices: NDArray[np.int64], *, bucket: int, longest: int) -> tuple[Tensor, int, int, int]:
        """What `made_part` needs of a part, found on the host: indices, width, most masked places; and its tokens."""
        lengths = self.lengths[indices]
        width = -(-int(lengths.max()) // bucket) * bucket
        return torch.from_numpy(indices), min(width, longest), int(self.masked[indices].max()), int(lengths.sum())


def laid_out(tokens: NDArray[Any], marks: Marks, longest: int, device: str) -> Texts:
    """The texts in an array of token ids, each of which ends with `marks.sep`; cut at `longest` with [CLS].

    Of each text 15 % of the tokens (at least one) will be masked.

    >>> texts = laid_out(np.array([7, 8, 102, 9, 102]), Marks(), 512, "cpu")
    >>> texts.lengths.tolist(), texts.masked.tolist()
    ([4, 3], [1, 1])
    """
    ends = np.flatnonzero(tokens == marks.sep) + 1
    if not len(ends):
        raise ValueError(f"no text is closed by the id {marks.sep}; there is nothing to train on")
    lengths = np.minimum(np.diff(ends, prepend=0) + 1, longest)
    words = np.maximum(lengths - 2, 0)  # all but [CLS] and [SEP]
    masked = np.minimum(_masked_of(words), words)
    rows = np.stack([np.concatenate([[0], ends[:-1]]), lengths, masked], axis=1)
    padded = np.full(1 + len(tokens) + longest, marks.pad, np.int32)
    padded[1 : 1 + len(tokens)] = tokens
    return Texts(torch.from_numpy(padded).to(device), torch.from_numpy(rows).to(device), lengths, masked, marks)


def fingerprint(texts: Texts) -> str:
    """Twelve hexadecimal digits of the tokens' digest: which texts a file of results speaks of."""
    return hashlib.sha256(texts.tokens.cpu().numpy().tobytes()).hexdigest()[:12]


def _masked_of(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """15 % of so many words, and at least one."""
    return np.maximum(np.rint(MASKED_SHARE * words).astype(np.int64), 1)


class Indices(torch.utils.data.Dataset[int]):
    """The numbers 0 … count − 1: a loader draws them, and what they stand for is gathered on the device.

    As `range`, but a batch of them is taken at once.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Part(NamedTuple):
    """Some examples as the model takes them."""

    ids: Tensor  # [examples, width], masked
    attends: Tensor  # [examples, 1, 1, width], False at padding
    places: Tensor  # [examples, as many masked places as a text of this width has]
    labels: Tensor  # of that shape, -100 where an example has fewer
    masked: Tensor  # [examples]


def made_part(
    texts: Texts, indices: Tensor, width: int, most: int, vocabulary: int, generator: torch.Generator
) -> Part:
    """Gather, pad and mask the texts `indices` on their device; no number goes back to the host.

    Of the chosen tokens 80 % become [MASK], 10 % another token, 10 % stay. The part's shapes follow from the number of
    texts and the width alone, so that few are met.
    """
    device, marks = texts.tokens.device, texts.marks
    start, length, masked = texts.rows[indices.to(device, non_blocking=True)].unbind(1)
    where = torch.arange(width, device=device)
    padding = where >= length[:, None]
    ids = texts.tokens[start[:, None] + where].long().masked_fill_(padding, marks.pad)
    ids[:, 0] = marks.cls  # where the token before the text was
    order = torch.rand(ids.shape, device=device, generator=generator).masked_fill_(where >= length[:, None] - 1, -1.0)
    order[:, 0] = -1.0
    places = order.topk(most, dim=1).indices
    own = ids.gather(1, places)
    beyond = torch.arange(most, device=device) >= masked[:, None]
    fate = torch.rand(own.shape, device=device, generator=generator)
    other = torch.randint(0, vocabulary, own.shape, device=device, generator=generator)
    shown = torch.where(fate < 0.8, marks.mask, torch.where(fate < 0.9, other, own))
    room = max(int(_masked_of(np.array(width - 2))) - most, 0)
    return Part(
        ids=ids.scatter_(1, places, torch.where(beyond, own, shown)),
        attends=~padding[:, None, None],
        places=F.pad(places, (0, room)),
        labels=F.pad(own.masked_fill(beyond, -100), (0, room), value=-100),
        masked=masked,
    )
