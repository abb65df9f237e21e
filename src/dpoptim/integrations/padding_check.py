"""Checks of a few records before training: padding and the collator must not make one example depend on others.

The check of example independence replaces rows of a batch. It starts after the collator and keeps the batch's width, so
it cannot see what the collator mixes, or that the longest example decides how far the others are padded.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.data.secret_randomness import generator_states, save_rng_states, seed_generators
from dpoptim.integrations.modes import in_eval_mode

_SEEDS = 32  # are tried until masks leave every record a target
_MAX_COPIED = 500_000_000  # parameters of a 16-bit model that is copied to float32
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_TOLERANCE_16_BITS = 5e-2

Collate = Callable[[list[Any]], Any]


class Extremes:
    """The places of the records with the shortest and longest inputs and labels, noted while the records are read.

    >>> extremes = Extremes()
    >>> for place, length in enumerate([3, 1, 2]):
    ...     extremes.note(place, {"input_ids": [0] * length, "labels": 1})
    >>> extremes.places
    [1, 0]
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}  # (size, place) of shortest and longest

    def note(self, place: int, record: Any) -> None:
        """Compare one record with those before."""
        sizes = {"inputs": 0, "labels": 0}
        for name, value in record.items() if isinstance(record, Mapping) else ():
            if hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0:
                sizes["labels" if name.startswith("label") else "inputs"] += len(value)
        for part, size in sizes.items():
            shortest, longest = self._found.get(part, ((size, place), (size, place)))
            self._found[part] = min(shortest, (size, place)), max(longest, (size, place))

    @property
    def places(self) -> list[int]:
        """Without repetitions; those of unequal inputs first."""
        pairs = [pair for pair in self._found.values() if pair[0][0] < pair[1][0]]
        return list(dict.fromkeys(place for pair in pairs for _, place in pair))


def check_padding(
    model: nn.Module, losses: Callable[[nn.Module, Any], Tensor], collate: Collate, records: list[Any]
) -> None:
    """Refuse a model, loss or collator if the loss of a record changes with its padding.

    Each record's loss among the others is compared with its loss alone, in eval mode and in float32 if possible. If the
    collator draws random numbers (masks), the record's row is cut to its own tokens instead. A loss that draws random
    numbers in eval mode is not checked.

    Args:
        model: The model.
        losses: `losses(model, batch)` returns one loss per record.
        collate: Makes a batch on the model's device.
        records: Records of different lengths.
    """
    model, dtype = _in_float32(model)

    def evaluate(batch: Any) -> Tensor:
        seed_generators(0)
        return losses(model, copy.copy(batch)).float()

    with _generators_restored(), buffers_restored(model), in_eval_mode(model), _without_tf32():
        for seed in range(_SEEDS):
            batch, draws = _collated(collate, records, seed)
            together = evaluate(batch)
            if not draws or bool((together != 0).all()):
                break
        if together.shape != (len(records),):
            raise ValueError(
                f"the losses of {len(records)} examples have shape {tuple(together.shape)}. Return one per example."
            )
        after = generator_states()
        seed_generators(0)
        if generator_states() != after:
            return
        for row, record in enumerate(records):
            alone = _collated(collate, [record], seed)[0]
            other = _cut(batch, row, alone) if draws else alone
            if other is not None and not same_losses(together[row], evaluate(other)[0], dtype):
                raise ValueError(
                    "the loss of an example changes with its padding or with the other examples of its batch: "
                    f"{type(model).__name__}, the loss or the collator reads them. Pad on the right, give the model "
                    "its attention_mask, and divide by each example's own tokens; or pad all examples to one length."
                )


def check_collator(collate: Collate, records: list[Any]) -> None:
    """Refuse a collator that mixes records (mixup): a row must stay the same if the other records are replaced.

    Batches of different shapes, or for which a different amount of random numbers was drawn, are not compared.
    """
    with _generators_restored():
        whole, after = _collated(collate, records, 0)[0], generator_states()
        for row, record in enumerate(records):
            other = _collated(collate, [record] * len(records), 0)[0]
            if not isinstance(whole, Mapping) or generator_states() != after:
                continue
            for name, one in whole.items():
                two = other[name]
                if not isinstance(one, Tensor) or one.shape[:1] != (len(records),) or one.shape != two.shape:
                    continue
                if not bool(((one[row] == two[row]) | ((one[row] != one[row]) & (two[row] != two[row]))).all()):
                    raise ValueError(
                        f"data_collator mixes examples: '{name}' of one example changes when the others are replaced. "
                        "Remove what combines several examples, such as mixup."
                    )


def same_losses(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether losses are equal up to rounding: |one − other| ≤ tolerance·max(|one|, |other|, 1e-3).

    >>> same_losses(torch.tensor(2.0), torch.tensor(2.0001), torch.float32)
    True
    >>> same_losses(torch.tensor(2.0), torch.tensor(2.01), torch.float32)
    False
    """
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_16_BITS)
    larger = torch.maximum(one.abs(), other.abs()).clamp(min=1e-3)
    return bool((((one - other).abs() <= tolerance * larger) | (one.isnan() & other.isnan())).all())


def _collated(collate: Collate, records: list[Any], seed: int) -> tuple[Any, bool]:
    """The batch of copies of the records, and whether the collator drew random numbers."""
    seed_generators(seed)
    before = generator_states()
    return collate(copy.deepcopy(records)), generator_states() != before


def _cut(batch: Any, row: int, alone: Any) -> Any:
    """One row of a batch, cut to the columns in its attention mask; None if the collator has not padded it."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None or mask.ndim != 2 or alone["attention_mask"].shape[1] == mask.shape[1]:
        return None
    columns = mask[row].nonzero().flatten()
    return {
        name: value[row : row + 1, columns] if value.shape[:2] == mask.shape else value[row : row + 1]
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }


def _in_float32(model: nn.Module) -> tuple[nn.Module, torch.dtype]:
    """The model, or a copy in float32 if it has 16 bits and is not large: rounding would hide the effect of padding."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes <= {torch.float32, torch.float64}:
        return model, torch.float32
    if sum(parameter.numel() for parameter in model.parameters()) <= _MAX_COPIED:
        with contextlib.suppress(RuntimeError, TypeError):  # quantized weights
            return copy.deepcopy(model).float(), torch.float32
    return model, torch.bfloat16


@contextlib.contextmanager
def _generators_restored() -> Iterator[None]:
    restore = save_rng_states()
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """What a model writes into its buffers during the check, or puts in their place, is undone."""
    owners = [(module, dict(module._buffers)) for module in model.modules()]
    contents = {id(b): b.clone() for _, buffers in owners for b in buffers.values() if b is not None}
    try:
        yield
    finally:
        for module, buffers in owners:
            module._buffers.update(buffers)
            for buffer in buffers.values():
                if buffer is not None and not torch.equal(buffer, contents[id(buffer)]):
                    buffer.data.copy_(contents[id(buffer)])


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
