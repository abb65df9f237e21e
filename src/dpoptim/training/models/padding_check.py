"""Does padding change a model's loss? If it did, the longest text of a batch would change the losses of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dpoptim.training.data.inputs import TextExample
from dpoptim.training.support.modes import in_eval_mode

_SHORT = 5
_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative; 16-bit models round at each width otherwise
_CLOSE_IN_16_BITS = 5e-2


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
    with in_eval_mode(model):
        alone, beside = (
            float(prepared.evaluate(model, {n: t.to(weight.device) for n, t in batch.items()}).losses[0])
            for batch in (prepared.collate(examples[:1]), prepared.collate(examples))
        )
    if abs(alone - beside) > _CLOSE.get(weight.dtype, _CLOSE_IN_16_BITS) * max(abs(alone), abs(beside), 1e-3):
        raise ValueError(
            f"{type(model).__name__} gives a text of {len(examples[0].tokens)} tokens a loss of {alone:.5g} alone and "
            f"{beside:.5g} beside one of {prepared.max_length}: it looks at padding, or at the batch's width, so that "
            "one record would change the losses of others and clipping would bound nothing; choose another model, or "
            "a smaller max_length"
        )
