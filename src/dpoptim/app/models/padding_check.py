"""Does padding change a model's loss? If it did, the longest text of a batch would change the losses of the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpoptim.app.data.inputs import TextExample
from dpoptim.integrations.modes import in_eval_mode
from dpoptim.integrations.padding_check import full_precision, same_losses

_SHORT = 5


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
