"""Examples of many lengths: a step's batch is cut into parts of like length, and a part is padded to one of few widths.

A part costs (its examples) × (its longest, rounded up to a multiple of `bucket`) tokens, and a price for launching it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]
Row = Tensor | Sequence[int] | NDArray[Any]

PART_PRICE = 131_072
"""What one more part costs, in tokens: its launches take about as long as this many tokens of padding."""


def cut_together(batch_size: int) -> int:
    """Of how many examples a loader's parts are multiples, so that a run meets few shapes.

    >>> cut_together(2048), cut_together(8)
    (64, 1)
    """
    return max(1, batch_size // 32)


def cut_by_length(
    lengths: Integers,
    *,
    max_tokens: int,
    max_examples: int | None = None,
    bucket: int = 64,
    together: int = 1,
    price: int = PART_PRICE,
) -> list[Integers]:
    """The positions 0 … n − 1 of `lengths`, shortest first, cut into the cheapest parts.

    Minimises Σ_parts (examples · width + price), width = the part's longest rounded up to a multiple of `bucket`, over
    all ways with examples · width ≤ max_tokens and examples ≤ max_examples in each part. Positions of equal length
    stay in their order. Parts are of a multiple of `together` examples, the last excepted, where bounds allow it: so a
    run meets few shapes, and a GPU that prepares for each new one rarely has to.

    Guarantee: every position is in exactly one part; a pure function of its arguments.
    Edge cases: an example that alone exceeds max_tokens is a part of its own; no lengths give no parts.

    >>> [part.tolist() for part in cut_by_length(np.array([200, 30, 190, 64]), max_tokens=512, price=100)]
    [[1, 3], [2, 0]]
    >>> [part.tolist() for part in cut_by_length(np.array([200, 30, 190, 64]), max_tokens=2048, price=1000)]
    [[1, 3, 2, 0]]
    """
    if len(lengths) == 0:
        return []
    order = np.argsort(lengths, kind="stable")
    widths = _rounded_up(lengths[order], bucket)
    most = len(lengths) if max_examples is None else min(max_examples, len(lengths))
    max_tokens = min(max_tokens, np.iinfo(np.int64).max)
    unit = min(together, most, max(max_tokens // int(widths[-1]), 1))
    places = np.append(np.arange(0, len(lengths), unit), len(lengths))  # where a part may begin or end
    # cheapest[k]: the least cost of all that lies before places[k]; before[k]: where the last part of it begins
    cheapest, before = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
    longest = widths[places[1:] - 1]  # in a part that ends there
    first = np.searchsorted(places, places[1:] - np.minimum(most, np.maximum(max_tokens // longest, 1)))
    for k, (width, start) in enumerate(zip(longest.tolist(), first.tolist(), strict=True), 1):
        costs = cheapest[start:k] - width * places[start:k]  # of a part that begins at each place, less what all cost
        before[k] = start + costs.argmin()
        cheapest[k] = costs[before[k] - start] + width * places[k] + price
    cuts, k = [], int(before[-1])
    while k > 0:
        cuts.append(int(places[k]))
        k = int(before[k])
    return np.split(order, cuts[::-1])


def checked_lengths(lengths: Any, micro_batch_tokens: int | None, bucket: int, *, examples: int) -> Integers | None:
    """`lengths` as an array of its own, or None where neither it nor `micro_batch_tokens` is given.

    >>> checked_lengths([3, 5], 64, 64, examples=2)
    array([3, 5])
    """
    if not _is_positive(bucket):
        raise ValueError(f"bucket must be a whole number ≥ 1, got {bucket!r}")
    if lengths is None and micro_batch_tokens is None:
        return None
    if lengths is None:
        raise ValueError(f"micro_batch_tokens={micro_batch_tokens!r} needs lengths=, the token count of each example")
    if micro_batch_tokens is None:
        raise ValueError("lengths needs micro_batch_tokens=, how many tokens a part may hold, padding included")
    if not _is_positive(micro_batch_tokens):
        raise ValueError(f"micro_batch_tokens must be a whole number ≥ 1, got {micro_batch_tokens!r}")
    found = np.asarray(lengths.detach().cpu() if isinstance(lengths, Tensor) else lengths)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(
            f"lengths must be one whole number an example, got {found.dtype} of shape {found.shape}; for a list of "
            "texts pass [len(text) for text in texts]"
        )
    if len(found) != examples:
        raise ValueError(f"lengths has {len(found)} entries and the dataset {examples} examples; give one an example")
    if found.min() < 1:
        where = int(np.argmin(found))
        raise ValueError(f"lengths must be positive, got lengths[{where}]={found[where]}; count an empty text as 1")
    return found.astype(np.int64)


def pad_to_bucket(sequences: Sequence[Row], *, value: int, bucket: int = 64) -> Tensor:
    """Sequences of whole numbers as one int64 tensor [examples, width], filled up by `value` on the right.

    width = the longest, rounded up to a multiple of `bucket` (at least one bucket): so a run meets few shapes. The
    attention mask is a tensor of its own: pad lists of ones with value=0.
    Edge cases: an empty sequence gives a row of `value`; tensors stay on their device.

    >>> pad_to_bucket([[5, 6, 7], [8]], value=0, bucket=4)
    tensor([[5, 6, 7, 0],
            [8, 0, 0, 0]])
    """
    if len(sequences) == 0:
        raise ValueError("sequences is empty; there is nothing to stack")
    if not _is_positive(bucket):
        raise ValueError(f"bucket must be a whole number ≥ 1, got {bucket!r}")
    counts = [len(row) for row in sequences]
    width = max(_rounded_up(max(counts), bucket), bucket)
    flat = _end_to_end([row for row, count in zip(sequences, counts, strict=True) if count])
    filled = torch.arange(width, device=flat.device) < torch.tensor(counts, device=flat.device)[:, None]
    return flat.new_full(filled.shape, value).masked_scatter_(filled, flat)


def _end_to_end(rows: Sequence[Row]) -> Tensor:
    """All numbers in one row; checked once for all, since a check of each takes longer than the copy."""
    if not rows:
        return torch.zeros(0, dtype=torch.int64)
    tensors = [row for row in rows if isinstance(row, Tensor)]
    arrays = [np.asarray(row) for row in rows] if len(tensors) < len(rows) else []
    odd = {row.ndim for row in arrays or tensors} - {1}
    if odd:
        raise ValueError(f"sequences must each be one row of whole numbers, got one with {odd.pop()} axes")
    flat = torch.from_numpy(np.concatenate(arrays)) if arrays else torch.cat(tensors)
    if flat.dtype.is_floating_point or flat.dtype.is_complex or flat.dtype == torch.bool:
        raise ValueError(f"sequences must hold whole numbers, got {flat.dtype}; for a mask give ones, not True")
    return flat.long()


def _rounded_up(lengths: Any, bucket: int) -> Any:
    return -(-lengths // bucket) * bucket


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
