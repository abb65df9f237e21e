"""Checks of a few records before training: neither the collator nor padding may make one example depend on others.

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
from dpoptim.data.shards import fsdp_modules
from dpoptim.integrations.token_losses import IGNORED
from dpoptim.kernels.norms import full_precision
from dpoptim.validation.temporary_changes import in_eval_mode

_SEEDS = 32  # seeds to try until masks leave every record a target
_MAX_COPIED = 500_000_000  # parameters of a 16-bit model that is copied to float32

Collate = Callable[[list[Any]], Any]


def check_padding(
    model: nn.Module, losses: Callable[[nn.Module, Any], Tensor], collate: Collate, records: list[Any]
) -> None:
    """Refuse a collator that mixes records (mixup), and `losses(model, batch)` that depend on padding.

    The row of a record must be the same in a batch of its copies, unless its width or the number of draws differs. Its
    loss must be the same when it is alone; if the collator draws (masks), the row is cut to its attention mask instead.
    """
    model, tolerance = _in_float32(model)
    with (
        state_restored(model), in_eval_mode(model), full_precision(next(model.parameters()).device.type),
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    ):  # fmt: skip
        for seed in range(_SEEDS):
            batch, collator_draws = _collated(collate, records, seed)
            if collator_draws and _lacks_targets(batch) and seed + 1 < _SEEDS:
                continue  # do not run the model yet; an empty text never has a target
            drawn = generator_states()
            together = losses(model, copy.copy(batch)).float()
            loss_draws = generator_states() != drawn
            if not collator_draws or loss_draws or bool((together != 0).all()):
                break
        if together.shape != (len(records),):
            raise ValueError(
                f"the losses of {len(records)} examples have shape {tuple(together.shape)}. Return one per example."
            )
        for row, record in enumerate(records):
            copies, _ = _collated(collate, [record] * len(records), seed)
            if generator_states() == drawn:
                _check_row(batch, copies, row, len(records))
            alone = _cut(batch, row, copies) if collator_draws else _collated(collate, [record], seed)[0]
            if alone is None or loss_draws:
                continue
            loss = losses(model, alone).float()[-1]
            if not torch.allclose(together[row], loss, rtol=tolerance, atol=1e-3 * tolerance, equal_nan=True):
                raise ValueError(
                    "the loss of an example changes with its padding or with the other examples of its batch. Pad on "
                    "the right, give the model its attention_mask, and divide by each example's own tokens."
                )


@contextlib.contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore the random generators, and the model's buffers, which would otherwise hold private values."""
    restore_generators = save_rng_states()
    owners = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    contents = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        restore_generators()
        for buffers, before in owners:
            buffers.clear()
            buffers.update(before)
        for buffer, content in contents:
            buffer.data.copy_(content)


def _collated(collate: Collate, records: list[Any], seed: int) -> tuple[Any, bool]:
    """The batch of copies of the records, and whether the collator drew random numbers."""
    seed_generators(seed)
    before = generator_states()
    return collate(copy.deepcopy(records)), generator_states() != before


def _lacks_targets(batch: Any) -> bool:
    """Whether some row of token labels has nothing to predict."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return isinstance(labels, Tensor) and labels.ndim == 2 and bool((labels == IGNORED).all(1).any())


def _check_row(batch: Any, copies: Any, row: int, examples: int) -> None:
    for name, one in batch.items() if isinstance(batch, Mapping) else ():
        if not isinstance(one, Tensor) or one.shape[:1] != (examples,) or one.shape != copies[name].shape:
            continue
        if not torch.allclose(one[row], copies[name][row], rtol=0.0, atol=0.0, equal_nan=True):
            raise ValueError(
                f"data_collator mixes examples: '{name}' of one example changes when the others are replaced. Remove "
                "what combines several examples, such as mixup."
            )


def _cut(batch: Any, row: int, copies: Any) -> Any:
    """One row of a batch, cut to the columns in its attention mask; None if the collator has not padded it."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None or mask.ndim != 2 or copies["attention_mask"].shape[1] == mask.shape[1]:
        return None
    columns = mask[row].nonzero().flatten()
    return {
        name: value[row : row + 1, columns] if value.shape[:2] == mask.shape else value[row : row + 1]
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }


def _in_float32(model: nn.Module) -> tuple[nn.Module, float]:
    """The model, copied to float32 if it has 16 bits and is not large, and how far two of its losses may differ."""
    parameters, groups = list(model.parameters()), fsdp_modules(model)
    computed_in = {group._get_fsdp_state()._mp_policy.param_dtype for group in groups}  # type: ignore[operator]
    if groups:  # cannot be copied
        return model, 1e-4 if (computed_in | {p.dtype for p in parameters}) <= {None, torch.float32} else 5e-2
    if all(parameter.dtype in (torch.float32, torch.float64) for parameter in parameters):
        return model, 1e-4
    if sum(parameter.numel() for parameter in parameters) <= _MAX_COPIED:
        return copy.deepcopy(model).float(), 1e-4
    return model, 5e-2
