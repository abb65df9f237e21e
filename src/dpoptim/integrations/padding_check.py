"""Checks of a few records before training: padding and the collator must not make one example depend on others.

The check of example independence starts after the collator and keeps the batch's width. So it cannot see what the
collator mixes, or that the longest example decides how far the others are padded.
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
from dpoptim.kernels.norms import full_precision

_SEEDS = 32  # are tried until masks leave every record a target
_MAX_COPIED = 500_000_000  # parameters of a 16-bit model that is copied to float32

Collate = Callable[[list[Any]], Any]


def check_padding(
    model: nn.Module, losses: Callable[[nn.Module, Any], Tensor], collate: Collate, records: list[Any]
) -> None:
    """Refuse `losses(model, batch)` if the loss of a record is different among the others and alone, without padding.

    If the collator draws random numbers (masks), the record's row is cut to its attention mask instead of collated
    alone. A loss that draws random numbers in eval mode cannot be compared.
    """
    model, tolerance = _in_float32(model)
    with (
        _generators_restored(), buffers_restored(model), in_eval_mode(model),
        full_precision(next(model.parameters()).device.type),
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    ):  # fmt: skip
        for seed in range(_SEEDS):
            batch, collator_draws = _collated(collate, records, seed)
            seeded = generator_states()
            together = losses(model, copy.copy(batch)).float()
            if generator_states() != seeded:
                return
            if not collator_draws or bool((together != 0).all()):
                break
        if together.shape != (len(records),):
            raise ValueError(
                f"the losses of {len(records)} examples have shape {tuple(together.shape)}. Return one per example."
            )
        for row, record in enumerate(records):
            alone, _ = _collated(collate, [record], seed)
            if collator_draws:
                alone = _cut(batch, row, alone)
            if alone is None:
                continue
            loss = losses(model, alone).float()[0]
            if not torch.allclose(together[row], loss, rtol=tolerance, atol=1e-3 * tolerance, equal_nan=True):
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
        batch, _ = _collated(collate, records, 0)
        after = generator_states()
        for row, record in enumerate(records):
            other, _ = _collated(collate, [record] * len(records), 0)
            if not isinstance(batch, Mapping) or generator_states() != after:
                continue
            for name, one in batch.items():
                two = other[name]
                if not isinstance(one, Tensor) or one.shape[:1] != (len(records),) or one.shape != two.shape:
                    continue
                if not torch.allclose(one[row], two[row], rtol=0.0, atol=0.0, equal_nan=True):
                    raise ValueError(
                        f"data_collator mixes examples: '{name}' of one example changes when the others are replaced. "
                        "Remove what combines several examples, such as mixup."
                    )


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


def _in_float32(model: nn.Module) -> tuple[nn.Module, float]:
    """The model, copied to float32 if it has 16 bits and is not large, and how far two of its losses may differ."""
    parameters = list(model.parameters())
    if all(parameter.dtype in (torch.float32, torch.float64) for parameter in parameters):
        return model, 1e-4
    if sum(parameter.numel() for parameter in parameters) <= _MAX_COPIED:
        return copy.deepcopy(model).float(), 1e-4
    return model, 5e-2


@contextlib.contextmanager
def _generators_restored() -> Iterator[None]:
    restore = save_rng_states()
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Undo what the model writes into its buffers: nothing refuses it here, and it would hold private values."""
    owners = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    contents = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffers, before in owners:
            buffers.clear()
            buffers.update(before)
        for buffer, content in contents:
            buffer.data.copy_(content)
