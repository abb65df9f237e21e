"""The loss on held-out abstracts: always the same ones, masked always alike."""

from __future__ import annotations

import numpy as np
import torch

from experiments.tinybert.model import MaskedLM
from experiments.tinybert.texts import Texts, made_part

_TOGETHER = 256


@torch.no_grad()
def mean_losses(
    model: MaskedLM,
    texts: Texts,
    *,
    examples: int | None = None,
    longest: int = 512,
    bucket: int = 64,
) -> dict[str, float]:
    """{"tokens": mean over masked tokens, "examples": mean over the examples' own means}, of the first `examples`."""
    device = texts.tokens.device
    generator = torch.Generator(device).manual_seed(0)
    count = min(len(texts), examples or len(texts))
    order = np.argsort(texts.lengths[:count], kind="stable")
    total, mean, masked = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
    vocabulary = model.bert.config.vocab_size
    model.eval()
    for first in range(0, count, _TOGETHER):
        indices, width, most, _ = texts.part(order[first : first + _TOGETHER], bucket=bucket, longest=longest)
        part = made_part(texts, indices, width, most, vocabulary, generator)
        losses = model.token_losses(part).double().sum(1)
        total, masked = total + losses.sum(), masked + part.masked.sum()
        mean = mean + (losses / part.masked.clamp(min=1)).sum()
    model.train()
    return {"tokens": float(total / masked), "examples": float(mean / count)}
