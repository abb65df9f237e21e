"""Examples of many lengths: cut a batch into parts of similar length, and pad each part to one of few widths.

A part costs (its examples) × (its longest, rounded up to a multiple of `bucket`) tokens, plus a price for its launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.arguments import check_whole

Integers = NDArray[np.int64]
Row = Tensor | Sequence[int] | NDArray[Any]

PART_PRICE = 131_072
"""The cost of one more part in tokens: launching it takes about as long as this much padding."""


def part_multiple(batch_size: int) -> int:
    """The number of examples that a loader's parts are multiples of, so that a run has few shapes."""
    return max(1, batch_size // 32)


def cut_by_length(
    lengths: Integers,
    *,
    max_tokens: int,
    max_examples: int | None = None,
    bucket: int = 64,
    multiple: int = 1,
    price: int = PART_PRICE,
) -> list[Integers]:
    """Cut the positions of `lengths`, sorted by length, into the cheapest parts.

    Minimizes Σ_parts (examples · width + price), where width is the part's longest rounded up to a multiple of
    `bucket`. Every position is in exactly one part. An example above `max_tokens` (examples · width) is a part by
    itself. All parts but the last have a multiple of `multiple` examples if possible: a GPU then sees few shapes.
    """
    if len(lengths) == 0:
        return []
    order = np.argsort(lengths, kind="stable")
    widths = rounded_up(lengths[order], bucket)
    most = len(lengths) if max_examples is None else min(max_examples, len(lengths))
    max_tokens = min(max_tokens, np.iinfo(np.int64).max)
    unit = min(multiple, most, max(max_tokens // int(widths[-1]), 1))
    places = np.append(np.arange(0, len(lengths), unit), len(lengths))  # where a part may begin or end
    # cheapest[k]: the least cost of everything before places[k]; before[k]: where its last part begins
    cheapest, before = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
    longest = widths[places[1:] - 1]  # in a part that ends there
    first = np.searchsorted(places, places[1:] - np.minimum(most, np.maximum(max_tokens // longest, 1)))
    for k, (width, start) in enumerate(zip(longest.tolist(), first.tolist(), strict=True), 1):
        costs = cheapest[start:k] - width * places[start:k]  # of a part that begins at each place, up to a constant
        before[k] = start + costs.argmin()
        cheapest[k] = costs[before[k] - start] + width * places[k] + price
    cuts, k = [], int(before[-1])
    while k > 0:
        cuts.append(int(places[k]))
        k = int(before[k])
    return np.split(order, cuts[::-1])


def checked_lengths(lengths: Any, micro_batch_tokens: int | None, bucket: int, *, examples: int) -> Integers | None:
    """Check and copy `lengths`; None if neither it nor `micro_batch_tokens` is given."""
    check_whole("bucket", bucket)
    if lengths is None and micro_batch_tokens is None:
        return None
    if lengths is None or micro_batch_tokens is None:
        raise ValueError("Expected both lengths and micro_batch_tokens, or neither. lengths counts tokens per example.")
    check_whole("micro_batch_tokens", micro_batch_tokens)
    found = np.asarray(lengths.detach().cpu() if isinstance(lengths, Tensor) else lengths)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(
            f"Expected lengths with one integer per example (its tokens), got {found.dtype} of shape {found.shape}."
        )
    if len(found) != examples:
        raise ValueError(f"Expected one length per example, got {len(found)} lengths for {examples} examples.")
    if found.min() < 1:
        raise ValueError(f"Expected lengths >= 1, got {found.min()}. Count an empty text as 1.")
    return found.astype(np.int64)


def pad_to_bucket(sequences: Sequence[Row], *, value: int, bucket: int = 64) -> Tensor:
    """Stack sequences of integers into one int64 tensor [examples, width], padded on the right.

    For an attention mask, pad lists of ones with value=0.

    Args:
        sequences: Lists, arrays or tensors with one axis; empty ones become rows of `value`.
        value: The padding.
        bucket: The width is the longest sequence, rounded up to a multiple of this, so that a run has few shapes.

    >>> pad_to_bucket([[5, 6, 7], [8]], value=0, bucket=4)
    tensor([[5, 6, 7, 0],
            [8, 0, 0, 0]])
    """
    if len(sequences) == 0:
        raise ValueError("Expected at least one sequence, got none: sequences is empty.")
    check_whole("bucket", bucket)
    counts = [len(row) for row in sequences]
    width = max(rounded_up(max(counts), bucket), bucket)
    flat = _flatten([row for row, count in zip(sequences, counts, strict=True) if count])
    filled = torch.arange(width, device=flat.device) < torch.tensor(counts, device=flat.device)[:, None]
    return flat.new_full(filled.shape, value).masked_scatter_(filled, flat)


def _flatten(rows: Sequence[Row]) -> Tensor:
    """All numbers in one row; the concatenation is checked, since checking every row takes longer than the copy."""
    if not rows:
        return torch.zeros(0, dtype=torch.int64)
    tensors = [row for row in rows if isinstance(row, Tensor)]
    arrays = [np.asarray(row) for row in rows] if len(tensors) < len(rows) else []
    odd = {row.ndim for row in arrays or tensors} - {1}
    if odd:
        raise ValueError(f"Expected sequences with one axis, got one with {odd.pop()} axes.")
    flat = torch.from_numpy(np.concatenate(arrays)) if arrays else torch.cat(tensors)
    if flat.dtype.is_floating_point or flat.dtype.is_complex or flat.dtype == torch.bool:
        raise ValueError(f"Expected sequences of integers, got {flat.dtype}. For a mask, use ones instead of True.")
    return flat.long()


def rounded_up(lengths: Any, bucket: int) -> Any:
    """Round up to multiples of `bucket`."""
    return -(-lengths // bucket) * bucket
