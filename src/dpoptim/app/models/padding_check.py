"""Does padding change a model's loss? If it did, the longest text of a batch would change the losses of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.app.data.examples import TextExample
from dpoptim.integrations.modes import in_eval_mode

_SHORT = 5
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-4}  # relative; 16-bit models round at each width otherwise
_CLOSE_IN_16_BITS = 5e-2


def same_losses(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether two losses of one example are the same but for rounding in `dtype`.

        |one − other| ≤ close·max(|one|, |other|, 1e-3),  close = 1e-4, or 0.05 in 16 bits

    >>> same_losses(torch.tensor(2.0), torch.tensor(2.0001), torch.float32)
    True
    >>> same_losses(torch.tensor(2.0), torch.tensor(2.01), torch.float32)
    False
    """
    close = _CLOSE.get(dtype, _CLOSE_IN_16_BITS)
    larger = torch.maximum(one.abs(), other.abs()).clamp(min=1e-3)
    return bool((((one - other).abs() <= close * larger) | (one.isnan() & other.isnan())).all())


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products and convolutions of 32-bit numbers as they are, not in TF32, for a while."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def check_padding(prepared: Any) -> None:
    """Refuse a model whose loss of a short text is another one beside a text of `max_length` tokens.

    Made-up tokens, in eval mode, without gradients; modes are put back. Architectures without an attention mask (FNet)
    and those that choose their positions by the width of the batch (some rotary embeddings of long texts) fail.
    """
    model, words = prepared.model, np.setdiff1d(np.arange(len(prepared.tokenizer)), prepared.tokenizer.all_special_ids)
    if len(words) == 0:
        return
    generator = np.random.default_rng(0)
    examples = [
        TextExample(generator.choice(words, length).astype(np.int32), 0, False)
        for length in (min(_SHORT, prepared.max_length), prepared.max_length)
    ]
    weight = next(model.parameters())
    with in_eval_mode(model), full_precision():
        alone, beside = (
            prepared.evaluate(model, {n: t.to(weight.device) for n, t in batch.items()}).losses[0]
            for batch in (prepared.collate(examples[:1]), prepared.collate(examples))
        )
    if not same_losses(alone, beside, weight.dtype):
        raise ValueError(
            f"{type(model).__name__} gives a text of {len(examples[0].tokens)} tokens a loss of {float(alone):.5g} "
            f"alone and {float(beside):.5g} beside one of {prepared.max_length}: it looks at padding, or at the "
            "batch's width, so that "
            "one record would change the losses of others and clipping would bound nothing; choose another model, or "
            "a smaller max_length"
        )
