"""Masks as a pure function: which tokens of a record are masked depends only on (seed, step, its tokens).

    word(seed, step, record, position) = mix(mix(record + key) + position · g),   key = BLAKE2b(seed, step)

Here mix is the finalizer of splitmix64 on 64-bit integers, and `record` is a hash of the record's tokens. A mask
changes at every step, but not after a restart, on a different device, or with different micro-batches, and it does not
depend on other records. Masks need not be secret.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.integrations.token_losses import IGNORED

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_LANE = 1 << 40  # the distance between the streams of one record; no text is that long


def record_hash(tokens: NDArray[np.int32]) -> int:
    """A 64-bit hash of a record's tokens."""
    digest = blake2b(np.ascontiguousarray(tokens, dtype="<i4").tobytes(), digest_size=8, person=b"dpoptim/mask")
    return int.from_bytes(digest.digest(), "little", signed=True)


def mask_key(name: str) -> int:
    """Return the key of the masks of one step, or of all evaluations, in which a record always gets the same mask."""
    digest = blake2b(name.encode(), digest_size=8, person=b"dpoptim/maskkey")
    return int.from_bytes(digest.digest(), "little", signed=True)


def target_counts(words: NDArray[np.int64], mask_fraction: float) -> NDArray[np.int64]:
    """How many tokens are masked: the fraction, rounded, and at least one if there are any."""
    return np.minimum(np.maximum(np.rint(mask_fraction * words).astype(np.int64), 1), words)


def masked(
    input_ids: Tensor,  # [examples, width]
    maskable: Tensor,  # [examples, width], True at tokens of the text itself
    is_target: Tensor,  # [examples, most]; each row is True as often as the example has targets, then False
    record: Tensor,  # [examples], hashes
    *,
    key: int,
    mask_id: int,
    vocabulary: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mask tokens; return the masked `input_ids`, and places and labels of the targets (each [examples, most])."""
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    start = _mix(record + key)[:, None]
    # The position in the last 20 bits makes all lots distinct, so that every device sorts them the same way.
    lots = _words(start, positions, lane=0) & (2**63 - 2**20) | positions
    lots = lots.masked_fill(~maskable, -1)
    places = lots.topk(is_target.shape[1], dim=1).indices
    own = input_ids.gather(1, places)
    draw = (_words(start, places, lane=1) & (2**63 - 1)) % 10
    other = (_words(start, places, lane=2) & (2**63 - 1)) % vocabulary
    # 80 % of the targets become `mask_id`, 10 % become a random token, and 10 % stay unchanged.
    shown = torch.where(draw < 8, mask_id, torch.where(draw == 8, other, own))
    return (
        input_ids.scatter(1, places, torch.where(is_target, shown, own)),
        places,
        own.masked_fill(~is_target, IGNORED),
    )


def _words(start: Tensor, positions: Tensor, *, lane: int) -> Tensor:
    return _mix(start + (positions + 1 + lane * _LANE) * _GOLDEN)


def _mix(words: Tensor) -> Tensor:
    """The finalizer of splitmix64; products wrap around, and shifts bring in zeros."""
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * _FIRST
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * _SECOND
    return words ^ (words >> 31 & (1 << 33) - 1)
